"""metrics.jsonl is followed while it is written, in bounded memory."""

import itertools
import os
import time
import tracemalloc

import pytest

from fairmesh.watch.records import POINTS, Followed, Records
from tests.watch.folders import record, records

ONE = [[0]]


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(records(0, 50, 100))
    return path


@pytest.fixture
def known(metrics):
    found = Records(metrics.parent)
    found.read("accuracy", ONE)
    return found


def _rounds(known: Records) -> tuple[int, ...]:
    known.read("accuracy", ONE)
    return known.curves.rounds


def _append(path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_curves_have_the_worst_the_mean_and_every_site(known):
    assert known.curves.rounds == (0, 50, 100)
    assert known.curves.worst.values == pytest.approx((0.5, 0.55, 0.6))
    assert known.curves.mean.values[0] == pytest.approx(2.2 / 3)
    assert [curve.values[-1] for curve in known.curves.sites] == pytest.approx([0.6, 0.8, 0.9])
    assert known.curves.worst.low == ()


def test_line_that_is_being_written_counts_when_it_is_whole(metrics, known):
    line = records(150)
    _append(metrics, line[:40])
    assert _rounds(known) == (0, 50, 100)
    _append(metrics, line[40:])
    assert _rounds(known) == (0, 50, 100, 150)


def test_only_what_is_new_is_read(metrics):
    followed, again = Followed(metrics), []
    assert len(list(followed.lines(lambda: again.append(1)))) == 3
    assert list(followed.lines(lambda: again.append(1))) == []
    _append(metrics, records(150))
    assert [line.decode() for line in followed.lines(lambda: again.append(1))] == [records(150)]
    assert again == []


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rounds", [(0, 50), (0, 60, 120, 180, 240), (7,)])
@pytest.mark.quick_cases("all")
def test_records_that_are_replaced_begin_again(metrics, known, rounds, in_place):
    if in_place:
        metrics.write_text(records(*rounds))
    else:
        other = metrics.with_name("partial")
        other.write_text(records(*rounds))
        os.replace(other, metrics)
    assert _rounds(known) == rounds


def test_run_that_goes_on_where_it_was_keeps_its_curve(metrics, known):
    other = metrics.with_name("partial")
    other.write_text(records(0, 50, 100, 150))  # a resumed run writes its records again
    os.replace(other, metrics)
    assert _rounds(known) == (0, 50, 100, 150)


def test_file_that_is_gone_empty_or_damaged_is_no_error(metrics, known):
    metrics.unlink()
    assert _rounds(known) == (0, 50, 100)
    metrics.write_text("")
    assert _rounds(known) == ()
    damaged = 'nonsense\n[1]\n{"round": 5}\n{"round": "x", "accuracy": 3}\n{"round": 6, "accuracy": {"sites": 3}}\n'
    metrics.write_text(damaged + records(50))
    assert _rounds(known)[-1] == 50
    assert Records(metrics.parent / "nowhere").curves.rounds == ()


def test_undefined_values_are_left_out_and_replicas_have_a_band(metrics, known):
    _append(metrics, record(150, [None, 0.7, 0.9]) + record(150, [0.4, 0.9, None], replica=1))
    known.read("accuracy", [[0, 1]])
    assert known.curves.sites[0].values[-1] == 0.4
    assert (known.curves.sites[1].low[-1], known.curves.sites[1].high[-1]) == (0.7, 0.9)
    assert known.curves.worst.values[-1] == pytest.approx(0.55)


def test_variants_of_a_sweep_have_curves_of_their_own(tmp_path):
    lines = "".join(record(done, [0.1 * r + done / 1e4] * 3, replica=r) for done in (0, 50) for r in range(4))
    (tmp_path / "metrics.jsonl").write_text(lines)
    known = Records(tmp_path)
    known.read("accuracy", [[0, 1], [2, 3]])
    assert [curves.worst.values[0] for curves in known.of_variants] == pytest.approx([0.05, 0.25])
    assert [curves.sites[2].values[0] for curves in known.of_variants] == pytest.approx([0.05, 0.25])


def test_sites_of_a_sweep_have_no_curves_if_they_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr("fairmesh.watch.records.SITES", 5)
    (tmp_path / "metrics.jsonl").write_text("".join(record(0, [0.1] * 3, replica=r) for r in range(2)))
    known = Records(tmp_path)
    known.read("accuracy", [[0], [1]])
    assert [curves.sites for curves in known.of_variants] == [(), ()]


@pytest.mark.parametrize("count", [1, 399, 400, 401, 5000])
@pytest.mark.quick_cases("all")
def test_curves_are_thinned_evenly_and_end_with_the_last_round(tmp_path, count):
    (tmp_path / "metrics.jsonl").write_text("".join(record(done, [0.5, 0.6, 0.7]) for done in range(count)))
    rounds = _rounds(Records(tmp_path))
    assert (rounds[0], rounds[-1]) == (0, count - 1)
    assert min(count, POINTS / 2) <= len(rounds) <= POINTS
    assert len({b - a for a, b in itertools.pairwise(rounds[:-1])}) <= 1


@pytest.mark.slow
def test_hundred_thousand_rounds_of_200_sites_take_little_memory_and_news_little_time(tmp_path):
    whole = record(0, [0.5 + k / 1000 for k in range(200)]).removeprefix('{"round": 0')
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for done in range(100_000):
            file.write(f'{{"round": {done}{whole}')
    known = Records(tmp_path)
    tracemalloc.start()
    began = time.process_time()
    assert _rounds(known)[-1] == 99_999
    first = time.process_time() - began
    _append(tmp_path / "metrics.jsonl", f'{{"round": 100000{whole}')
    began = time.process_time()
    assert _rounds(known)[-1] == 100_000
    news = time.process_time() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20, peak
    assert news < 1.0 > first / 60, (first, news)
