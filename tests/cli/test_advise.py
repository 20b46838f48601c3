"""`fairmesh advise`: recommended settings, and predictions that hold."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fairmesh as fm
from fairmesh import rehearsal
from fairmesh.advice import Advice
from fairmesh.cli.main import app
from tests.refusals import missing_from, refused

FILE = """
rounds = 30
data = { name = "digits", nodes = 4, odd = 1 }
algorithm = { name = "ad-gda", primal_step = 50.0 }
"""


LENGTHS = (10, 20, 40)  # rounds of rehearsals here, but not in slow tests
USUAL = rehearsal.LENGTHS


@pytest.fixture(scope="module", autouse=True)
def short_rehearsals():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "LENGTHS", LENGTHS)
        patch.setattr(rehearsal, "_SECONDS", 600.0)  # also on a machine that is busy
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("advice")
    (path / "mine.toml").write_text(FILE)
    return path


def advised(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["advise", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def advice(folder) -> dict:
    return json.loads(advised(str(folder / "mine.toml"), "--json", "--write", str(folder / "better.toml")))


def test_every_setting_has_a_value_and_a_reason(advice):
    found = {one["setting"]: one for one in advice["recommended"]}
    assert set(found) == {"algorithm", "compressor", "consensus_step", "rounds"}
    assert all(one["value"] and one["reason"] for one in found.values())
    assert "ad-gda" in found["algorithm"]["reason"]
    assert advice["facts"]["sites"] == 4


def test_written_file_runs_with_the_recommended_settings(advice, folder):
    written = fm.load_experiment(folder / "better.toml")
    assert written.algorithm == fm.TrackedADGDA()
    assert written.rounds == advice["settings"]["rounds"] == 2 * LENGTHS[-1]  # each was better than the last
    assert written.data == fm.data.Digits(nodes=4, odd=1)
    comments = [line for line in (folder / "better.toml").read_text().splitlines() if line.startswith("#")]
    assert "mine.toml" in comments[0]
    assert "default" in " ".join(comments)


def test_predicted_bytes_are_those_of_a_run(advice):
    experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), rounds=20, options=fm.Options(compare_weights=False))
    sent = fm.run(experiment).final[0]["bytes_busiest_node"] / 20
    assert advice["predicted"]["bytes_per_round"] == pytest.approx(sent, rel=0.05)
    assert advice["predicted"]["bytes_in_all"] == pytest.approx(2 * LENGTHS[-1] * sent, rel=0.05)


def test_predicted_time_has_the_choice_of_the_sites_models_next_to_the_rounds(advice):
    predicted = advice["predicted"]
    of_rounds = 6 * LENGTHS[-1] * predicted["seconds_per_round"]
    assert of_rounds < predicted["seconds"] < of_rounds + 60.0  # it takes a second or two


def test_nothing_is_overwritten_or_written_elsewhere(folder, tmp_path):
    for place in (folder / "mine.toml", tmp_path / "other.toml"):
        done = CliRunner().invoke(app, ["advise", str(folder / "mine.toml"), "--write", str(place)])
        assert done.exception is not None
        with refused(str(place)):
            raise done.exception
    assert (folder / "mine.toml").read_text() == FILE


@pytest.fixture(scope="module")
def sparse() -> Advice:
    return fm.advise(fm.Experiment(fm.data.Digits(nodes=40, odd=4), fm.Ring()), rtt_ms=200)


def test_where_the_graph_is_the_problem_another_one_is_recommended_and_written(sparse, tmp_path):
    (graph,) = (one for one in sparse.recommended if one.setting == "topology")
    assert missing_from(graph.reason, "graph is the problem", "rounds", "neighbours instead of 2", "bytes") == []
    assert sparse.experiment.topology == fm.topologies.Circulant((1, 6))
    assert sparse.settings()["topology"] == {"name": "circulant", "offsets": [1, 6]}
    assert sparse.facts["neighbours"] == 4
    assert sparse.experiment.objective == fm.Experiment(fm.data.Digits(nodes=40, odd=4)).objective


def test_a_graph_that_is_left_out_stays_left_out_and_is_named(advice):
    assert "topology" not in advice["settings"]
    many = fm.advise(fm.Experiment(fm.data.Digits(nodes=20, odd=2)))
    (graph,) = (one for one in many.recommended if one.setting == "topology")
    assert "circulant" in graph.value
    assert many.settings() == {"rounds": many.experiment.rounds}
    sent = many.predicted.bytes_per_round / many.facts["neighbours"]
    assert sent == pytest.approx(advice["predicted"]["bytes_per_round"] / 2, rel=0.05)  # messages of equal models


def test_file_without_an_algorithm_names_none(sparse, advice):
    (said,) = (one.reason for one in sparse.recommended if one.setting == "algorithm")
    assert "the experiment names" not in said
    (said,) = (one["reason"] for one in advice["recommended"] if one["setting"] == "algorithm")
    assert "the experiment names ad-gda" in said


def test_few_rows_that_judge_a_site_are_named(sparse, advice):
    assert any("12 held-out rows" in hint for hint in sparse.hints)
    assert not any("held-out rows" in hint for hint in advice["hints"])


@pytest.fixture(scope="module")
def far_apart() -> Advice:
    return fm.advise(fm.Experiment(fm.data.Digits(nodes=4, odd=1)), rtt_ms=200, bandwidth_mbits=1)


def test_sites_that_mostly_wait_are_advised_to_take_local_steps_in_fewer_rounds(far_apart):
    assert far_apart.settings()["algorithm"]["local_steps"] == 5
    assert far_apart.experiment.rounds == LENGTHS[-1]  # half of twice the last
    named = {setting: value for setting, value, _ in far_apart.recommended}
    assert (named["local_steps"], named["rounds"]) == ("5", str(LENGTHS[-1]))
    assert any("simulation" in hint and "small-sites.toml" in hint for hint in far_apart.hints)
    assert "--rtt 200" in far_apart.next_step("mine.toml", " --rtt 200")


def test_time_between_sites_is_half_a_round_trip_the_message_and_the_processor(far_apart):
    network, sent = far_apart.as_json()["network"], far_apart.predicted.bytes_per_round
    assert network["waiting_seconds_per_round"] == pytest.approx(0.1 + sent / 125_000, rel=0.01)
    assert network["computing_seconds_per_round"] < 0.05
    assert network["seconds"] == pytest.approx(LENGTHS[-1] / network["rounds_per_second"])
    assert network["seconds"] < 0.6 * network["seconds_with_single_steps"]
    assert missing_from(dict(far_apart.predicted_in_words())["time between sites"], "per second", "single steps") == []


def test_sites_that_are_near_take_single_steps(folder):
    found = json.loads(advised(str(folder / "mine.toml"), "--json", "--rtt", "0.5"))
    assert found["settings"] == {"rounds": 2 * LENGTHS[-1]}
    assert found["network"]["seconds"] == found["network"]["seconds_with_single_steps"]


def test_local_steps_are_not_advised_where_news_needs_all_rounds_to_spread(sparse):
    assert sparse.experiment.algorithm.local_steps == 1
    assert any("do not help" in hint and "spread" in hint for hint in sparse.hints)


PRIVATE = (
    FILE.replace("rounds = 30", "rounds = 24")
    + """
sampling = { batch = 40 }
privacy = { epsilon = 2.0, delta = 1e-4 }
"""
)


def test_advice_with_privacy_has_the_price_and_rehearses_nothing(tmp_path, monkeypatch):
    def read_rows(*_):
        raise AssertionError("a rehearsal reads rows without noise")

    monkeypatch.setattr("fairmesh.advice.rehearsed", read_rows)
    (tmp_path / "private.toml").write_text(PRIVATE)
    advice = json.loads(advised(str(tmp_path / "private.toml"), "--json"))
    assert advice["settings"] == {"rounds": 24}
    assert advice["privacy"]["terms"]["releases"] == 24
    assert advice["privacy"]["terms"]["loss_share"] == fm.Privacy(1, 1e-5).loss_share  # of Tracked AD-GDA
    assert [row["epsilon"] for row in advice["privacy"]["rows"]] == [1, 2, 4, 8]
    assert advice["privacy"]["sites"] == advice["facts"]["sites"] == 4
    assert any("rehearsed" in hint for hint in advice["hints"])
    assert advice["predicted"]["bytes_per_round"] > 0
    assert missing_from(" ".join(advice["privacy"]["sentences"]), "instead of 50 %", "24 releases") == []
    assert missing_from(advised(str(tmp_path / "private.toml")), "2 (asked)", "sigma") == []


def test_advice_without_privacy_says_nothing_of_it(advice, folder):
    assert "privacy" not in advice
    assert not any("privacy" in hint for hint in advice["hints"])


def test_noise_of_the_advice_is_that_of_the_run(tmp_path):
    experiment = replace(
        fm.Experiment(fm.data.Digits(nodes=4, odd=1), rounds=12, privacy=fm.Privacy(2, 1e-4, repeatable=True)),
        sampling=fm.Sampling(40),
    )
    price = fm.advise(experiment).privacy
    noise = fm.run(experiment).privacy["noise"]
    share = 1 - experiment.privacy.loss_share
    asked = next(row for row in price.rows if row.epsilon == 2)
    assert [site.noise * share**0.5 for site in asked.sites] == pytest.approx(
        [max(noise), min(noise)][: len(asked.sites)]
    )


def test_batch_that_a_private_site_cannot_draw_is_replaced_in_the_advice_and_in_the_file(tmp_path):
    data = fm.data.Digits(nodes=4, sizes=(200, 200, 60, 30), odd=1)
    experiment = fm.Experiment(data, rounds=10, privacy=fm.Privacy(4, 1e-3))
    advice = fm.advise(experiment)
    smallest = advice.facts["smallest_site"]
    assert smallest < 50
    assert advice.settings()["sampling"] == {"batch": smallest}
    assert advice.privacy.terms.batch == smallest
    with refused("sampling.batch", "units"):
        fm.run(experiment)


@pytest.mark.parametrize("flags", [["--rtt", "-1"], ["--rtt", "1", "--bandwidth", "0"], ["--bandwidth", "3"]])
def test_lines_that_cannot_be_are_refused(folder, flags):
    done = CliRunner().invoke(app, ["advise", str(folder / "mine.toml"), *flags])
    with refused("rtt", "bandwidth"):
        raise done.exception or AssertionError("accepted")


@pytest.mark.slow
def test_advised_local_steps_reach_the_worst_site_of_single_steps_within_their_interval(monkeypatch):
    """On the sites of `fairmesh demo`; half of the rounds with single steps end far below."""
    monkeypatch.setattr(rehearsal, "LENGTHS", USUAL)
    given = fm.load_experiment("examples/small-sites.toml", ["options.compare_weights=false"])
    advice = fm.advise(given, rtt_ms=100)

    def worst(experiment: fm.Experiment) -> list[float]:
        return [100 * record["accuracy"]["worst"] for record in fm.run(experiment).final]

    of = {"options": given.options, "splits": given.splits}
    local = worst(replace(advice.experiment, **of))
    single = worst(replace(given, rounds=600))
    fewer = worst(replace(given, rounds=300))
    half = 2.571 * statistics.stdev(single) / len(single) ** 0.5  # of a 95 % interval over six splits
    print(f"local {local}, single {single}, fewer {fewer}")
    assert statistics.mean(local) > statistics.mean(single) - half
    assert statistics.mean(fewer) < statistics.mean(single) - half


def test_one_site_has_nobody_to_train_with():
    with refused("one site"):
        fm.advise(fm.Experiment(fm.data.Digits(nodes=1, odd=0)))


@pytest.mark.slow
def test_predicted_time_and_memory_are_near_those_of_a_run(monkeypatch):
    import time

    monkeypatch.setattr(rehearsal, "LENGTHS", USUAL)
    advice = fm.advise(fm.Experiment(fm.data.Digits(nodes=10, odd=2)))
    predicted = advice.predicted
    begun = time.perf_counter()
    fm.run(advice.experiment)
    assert predicted.seconds / 3 < time.perf_counter() - begun < 3 * predicted.seconds


def _rehearsal(*errors: float, is_share: bool = True) -> rehearsal.Rehearsal:
    return rehearsal.Rehearsal((75, 150, 300, 600, 1200)[: len(errors)], errors, is_share)


def test_rounds_are_the_fewest_that_are_as_good_as_the_best_of_the_rehearsal():
    assert _rehearsal(0.13, 0.10, 0.065, 0.06, 0.065).rounds == 300
    assert _rehearsal(0.56, 0.556, 0.58, is_share=False).rounds == 75
    assert _rehearsal(0.64, 0.51, 0.49, 0.39, 0.38, is_share=False).rounds == 600


def test_a_rehearsal_ends_after_two_lengths_without_a_gain():
    assert not _rehearsal(0.13).stopped_helping
    assert not _rehearsal(0.13, 0.14).stopped_helping
    assert _rehearsal(0.13, 0.14, 0.12).stopped_helping
    assert not _rehearsal(0.13, 0.14, 0.09).stopped_helping


def test_a_rehearsal_without_time_for_long_runs_goes_on_from_what_it_has_seen():
    assert _rehearsal(0.13, 0.10).rounds == 300
    assert _rehearsal(0.13, 0.10, 0.07, 0.05).rounds == 600
