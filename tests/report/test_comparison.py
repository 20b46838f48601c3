"""Runs next to each other: verdicts, intervals, and warnings where runs differ in more than the algorithm."""

import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import save

import fairmesh as fm
from fairmesh.cli.report import compare
from fairmesh.report.comparison import compared
from fairmesh.report.html import page
from fairmesh.report.runs import Run, best_few, caption_of, choices_in_words, chosen_of, rows_of
from fairmesh.storage.run_folder import OUTCOMES
from tests.refusals import refused

DATA = fm.data.Digits(nodes=3, odd=1, validation_share=0.1)
BASE = fm.Experiment(
    DATA, fm.Ring(), fm.algorithms.DSGD(primal_step=0.5), rounds=12, options=fm.Options(measure_every=6)
)
MANY = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 1e30)
CHANGES = {
    "base": {},
    "same": {},
    "worse": {"algorithm": fm.algorithms.DSGD(primal_step=0.01)},
    "longer": {"rounds": 24},
    "splits": {"splits": 2},
    "shares": {"data": replace(DATA, test_share=0.4)},
    "dealt": {"data": replace(DATA, seed=1)},
    "many": {"sweep": {"primal_step": MANY}, "options": fm.Options(measure_every=6, on_divergence="mark")},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns the folder of each run."""
    base = tmp_path_factory.mktemp("runs")
    for name, changes in CHANGES.items():
        fm.run(replace(BASE, **changes), out=base / name)
    return base


@pytest.fixture
def runs(folders):
    return lambda *names: [Run.from_folder(folders / name) for name in names]


def test_compare_gives_verdicts_on_the_same_rows(runs):
    found = compared(runs("base", "worse", "same"))
    worse, same = found.verdicts["worse", "base"], found.verdicts["same", "base"]
    assert (worse.worst.verdict, worse.mean.verdict, worse.paired) == ("worse", "worse", True)
    assert (same.worst.verdict, same.count("unclear")) == ("unclear", 3)
    assert not found.warnings
    first, second = found.table()[1:]
    assert "worse by" in first[2]
    assert "no clear difference" in second[2]
    header, *rows = found.by_site()
    assert [row[0] for row in rows] == [str(name) for name in found.runs[0].summary["sites"]]
    assert all("no clear difference" in row[header.index("same against base")] for row in rows)


@pytest.mark.parametrize(
    ("other", "words", "same_rows"),
    [
        ("longer", ["rounds", "12", "24"], True),
        ("splits", ["splits", "1", "2"], False),
        ("shares", ["test", "449", "719"], False),
        ("dealt", ["digests"], False),
    ],
)
def test_compare_warns_where_runs_differ_in_more_than_the_algorithm(runs, other, words, same_rows):
    found = compared(runs("base", other))
    assert any(all(word in text for word in words) for text in found.warnings), found.warnings
    assert found.verdicts[other, "base"].paired == same_rows
    assert any("3 of 3 sites" in text for text in found.warnings) != same_rows


def test_compare_refuses_runs_with_other_sites_or_other_data_to_be_judged_on(runs):
    base, other = runs("base", "same")
    for what, value in {"sites": ["a", "b", "c"], "judged_on": "train", "metric": "loss"}.items():
        with refused("same", "base", str(value)):
            compared([base, replace(other, summary=other.summary | {what: value})])


def test_compare_without_kept_answers_says_that_there_is_no_verdict(runs, tmp_path):
    base, other = runs("base", "same")
    found = compared([base, replace(other, folder=tmp_path)])
    assert not found.verdicts
    assert not found.table()
    assert any("same" in text for text in found.warnings)


def test_sweep_with_many_variants_shows_the_best_few_and_says_how_many_others(runs):
    (many,) = runs("many")
    shown, left_out = best_few(many)
    assert len(shown) == 5
    assert "7" in left_out
    assert "2 others" in left_out
    worst = [run.over_sites("worst", "validation") for run in shown[1:]]
    assert worst == sorted(worst, reverse=True)
    found = compared(runs("base", "many"))
    assert len(found.shown) == 3
    assert len(found.as_json()["runs"]) == 8


def test_sweep_is_drawn_as_the_variant_that_tables_show(runs):
    many, base = runs("many", "base")
    shown = chosen_of(many)
    axis, *_ = fm.plot([many, base]).axes
    first = next(line for line in axis.lines if line.get_linestyle() == "-")
    assert first.get_ydata()[-1] == pytest.approx(100 * shown.over_sites("worst"))
    assert shown.label in first.get_label()


def test_choice_names_its_candidates_and_the_end_of_its_range(runs):
    many, base = runs("many", "base")
    tried = replace(many, summary=many.summary | {"chosen": 0})  # 0.01, the smallest
    (said,) = choices_in_words([base, tried])
    assert all(word in said for word in ("many", "0.01", "7 candidates", "validation", "smallest", "smaller ones"))
    middle = replace(many, summary=many.summary | {"chosen": 3})
    assert "est that was tried" not in choices_in_words([middle])[0]
    found = compared([tried, base])
    assert found.choices == [said]
    assert "many 7, base 1" in found.warnings[0]
    below = fm.plot([tried, base]).get_supxlabel().replace("\n    ", " ")
    assert said in below
    assert "many 7, base 1" in below
    assert not compared(runs("base", "same")).choices


@pytest.mark.parametrize("against", [["rounds"], ["rounds", "bytes_busiest_node"]])
def test_legend_lies_outside_the_curves(runs, against):
    figure = fm.plot(runs("many", "base", "longer"), against=against)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box, whole = legend.get_window_extent(), figure.bbox
    assert not any(axis.get_legend() or axis.get_window_extent().overlaps(box) for axis in figure.axes)
    assert (box.x0 >= whole.x0, box.x1 <= whole.x1, box.y1 <= whole.y1) == (True, True, True)


def test_report_of_several_runs_draws_the_chosen_variant(runs, monkeypatch):
    drawn = []
    monkeypatch.setattr("fairmesh.report.html.curves", lambda runs: drawn.extend(runs) or "")
    many, base = runs("many", "base")
    text = page([many, base], "both")
    assert [run.label for run in drawn] == [chosen_of(many).label, "base"]
    assert "many 7, base 1" in text
    assert choices_in_words([many])[0] in text


def test_compare_replaces_a_picture_only_if_asked_to(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compare.png").write_bytes(b"mine")
    with refused("compare.png", "--plot", "--overwrite"):
        compare([folders / "base"])
    assert (tmp_path / "compare.png").read_bytes() == b"mine"
    compare([folders / "base"], overwrite=True)
    assert (tmp_path / "compare.png").read_bytes() != b"mine"


def test_variant_that_diverged_is_shown_as_diverged(runs):
    (many,) = runs("many")
    lost = next(run for run in many.variants() if not run.alive)
    row = dict(zip(*rows_of([lost])))
    assert [row[key] for key in ("worst accuracy", "mean", "best", "gap")] == ["diverged"] * 4
    assert compared([lost]).by_site()[1][2] == "diverged"


def test_tables_show_intervals_and_their_caption_says_what_they_cover(runs):
    base, splits = runs("base", "splits")
    for run in (base, splits):
        evidence, cell = run.summary["evidence"]["worst"], dict(zip(*rows_of([run])))["worst accuracy"]
        low, high = (f"{100 * end:.1f}" for end in evidence["interval"])
        assert cell == f"{100 * evidence['value']:.1f} % ({low} to {high})"
    assert "95 %" in caption_of([base])
    assert "splits" not in caption_of([base])
    assert "2 splits" in caption_of([splits])
    assert "±" not in " ".join(rows_of([splits])[1])


def test_compare_names_the_version_of_answers_that_it_cannot_read(folders, tmp_path):
    shutil.copytree(folders / "base", tmp_path / "older")
    (tmp_path / "older" / OUTCOMES).write_bytes(save({}, {"outcomes": '{"format": 1}'}))
    found = compared([Run.from_folder(folder) for folder in (folders / "same", tmp_path / "older")])
    assert [text for text in found.warnings if "older" in text and "format 1" in text]


def test_compare_prints_tables_and_writes_all_of_it_as_json(folders, capsys, tmp_path):
    paths = [folders / "base", folders / "longer"]
    compare(paths, plot=tmp_path / "a.png", sites=True)
    out, err = capsys.readouterr()
    assert "longer against base" in out
    assert "95 %" in err
    assert "warning" in err
    compare(paths, plot=tmp_path / "b.png", json_=True)
    found = json.loads(capsys.readouterr()[0])
    (verdict,) = found["verdicts"]
    assert (verdict["run"], verdict["compared_with"]) == ("longer", "base")
    assert set(verdict["sites"]) == set(found["runs"]["base"]["sites"])
    assert found["warnings"]
    assert (folders / "base" / OUTCOMES).exists()
