"""Private runs between organisations: what is charged, what is told, and what follows when sites die or leave."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fairmesh.mesh.node.privacy_ledger import TEST, PrivacyLedger
from fairmesh.privacy.accounting import epsilon_of
from fairmesh.report.runs import Run as RecordedRun
from fairmesh.report.writing import write_report
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run, play, waits_at
from tests.refusals import missing_from

NAMES = ["a", "b", "c"]
ROUNDS, EPSILON, DELTA = 24, 4.0, 1e-4
PRIVACY = {"epsilon": EPSILON, "delta": DELTA}
OPTIONS = {"measure_every": 8, "checkpoint_every": 6}
EXPERIMENT = experiment(ROUNDS, 3, None, "ring", options=OPTIONS, privacy=PRIVACY, sampling={"batch": 40})
FIVE = experiment(ROUNDS, 5, None, "complete", options=OPTIONS, privacy=PRIVACY, sampling={"batch": 40})


WITHOUT_EVALUATION = experiment(
    ROUNDS, 3, None, "ring", options=OPTIONS, privacy=PRIVACY | {"evaluation_epsilon": 0.0}, sampling={"batch": 40}
)
EXAMPLES = Path(__file__).parents[2] / "examples"


def _ledger(run: Run, name: str) -> PrivacyLedger:
    ledger = PrivacyLedger(run.folder / name / f"{name}.privacy.jsonl")
    ledger.close()
    return ledger


def dies(where: str, at: int) -> Callable[[str, int], None]:
    def observe(point: str, step: int) -> None:
        if (point, step) == (where, at):
            os.kill(os.getpid(), signal.SIGKILL)

    return observe


def one_is_killed(run: Run) -> None:
    """One is killed between writing to its ledger and sending, and another one after it has sent."""
    run.start("a")
    run.start("b", observe=dies("computed", 9))
    run.start("c", observe=dies("sent", 16))
    run.dies("b")
    run.start("b")
    run.dies("c")
    run.start("c")
    run.end(*NAMES)


def undisturbed(run: Run) -> None:
    run.live()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("private")
    play(one_is_killed, folder, NAMES, EXPERIMENT)
    return folder


def _opened(path: Path) -> PrivacyLedger:
    ledger = PrivacyLedger(path)
    ledger.close()
    return ledger


@pytest.mark.slow
def test_nodes_that_are_killed_end_bit_identically(killed, tmp_path):
    play(undisturbed, tmp_path / "calm", NAMES, EXPERIMENT)
    for name in NAMES:
        for file in ("model.safetensors", "metrics.jsonl", "summary.json"):
            there, here = (folder / name / "state" / "result" / file for folder in (tmp_path / "calm", killed))
            assert here.read_bytes() == there.read_bytes(), (name, file)


def test_nodes_that_are_killed_are_charged_once(killed):
    for name in NAMES:
        ledger = _opened(killed / name / f"{name}.privacy.jsonl")
        (releases,) = ledger.spent()
        assert releases.times == ROUNDS
        assert 0.99 * EPSILON < epsilon_of([releases], DELTA) <= EPSILON


def test_summary_says_what_was_spent(killed):
    summary = json.loads((killed / "a" / "state" / "result" / "summary.json").read_text())["privacy"]
    assert 0.99 * EPSILON < summary["epsilon"] <= EPSILON
    assert (summary["delta"], summary["unit"], set(summary["sites"])) == (DELTA, "row", set(NAMES))


def test_sites_tell_noised_losses_and_what_was_spent_and_no_metric(killed):
    announcements = json.loads((killed / "a" / "state" / "bulletin.json").read_text())
    by_kind: dict[str, list[dict]] = {}
    for entry in announcements["announcements"] if isinstance(announcements, dict) else announcements:
        by_kind.setdefault(entry["kind"], []).append(entry["body"])
    assert all(not any(body.values()) for body in by_kind["statistics"])
    assert all(body["cells"] == {} and body["verdict"] == "" for body in by_kind["versus_local"])
    assert all(body["metric"] is None for body in by_kind["status"])
    rows = [json.loads(line) for line in (killed / "a" / "state" / "result" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epsilon"] for row in rows] == sorted(row["epsilon"] for row in rows)
    assert all(row["accuracy"]["sites"] == [None] * 3 for row in rows[:-1])
    assert all(None not in row["loss"]["sites"] for row in rows[1:])


def test_logs_have_no_digest_of_training_rows(killed):
    events = [json.loads(line) for line in (killed / "a" / "state" / "log.jsonl").read_text().splitlines()]
    agreed = [event for event in events if event["what"] == "the sites' data is agreed"]
    assert agreed
    assert not any("data_and_model" in event for event in agreed)


def test_evaluation_at_the_end_has_noise_and_is_charged_to_test_units(killed):
    last = json.loads((killed / "a" / "state" / "result" / "metrics.jsonl").read_text().splitlines()[-1])
    events = [json.loads(line) for line in (killed / "a" / "state" / "log.jsonl").read_text().splitlines()]
    own = [event for event in events if event["what"] == "measured here, and not told"][-1]
    assert all(0 <= told <= 1 for told in last["accuracy"]["sites"])
    assert last["accuracy"]["sites"][0] != own["accuracy"]
    (releases,) = _opened(killed / "a" / "a.privacy.jsonl").spent(TEST)
    assert releases.times == 1
    assert epsilon_of([releases], DELTA) <= 1.0


def one_leaves(run: Run) -> None:
    """One site dies for good. The others go on without it, in a generation that is charged on its own."""
    names = run.mesh.names
    run.start(*names[:-1])
    run.start(names[-1], observe=dies("computed", 17))
    run.dies(names[-1])
    remain = names[:-1]
    run.vote(*remain, out=[names[-1]])
    run.end(*remain)
    for name in remain:
        (went_on,) = run.events(name, "continuing")
        _charged_for_both(_ledger(run, name), went_on["round"])


def all_go_back(run: Run) -> None:
    """What is computed again after going back, at other models, is charged again."""
    flag = run.folder / "go"
    run.start(*NAMES, observe=waits_at(17, flag))
    run.until(lambda: min(map(run.round, NAMES)) >= 15)
    run.vote(*NAMES, back_to=12)
    run.until(lambda: all(any(len(who) == 3 for who in run.status(name)["votes"].values()) for name in NAMES))
    flag.touch()
    run.end(*NAMES)
    for name in NAMES:
        ledger = _ledger(run, name)
        _charged_for_both(ledger, 12)
        assert ledger.plans[1][1].noise > ledger.plans[0][1].noise, "less of the budget is left for as many rounds"


def _charged_for_both(ledger: PrivacyLedger, base: int) -> None:
    (_, first), (_, second) = ledger.plans[:2]
    assert first.times == ROUNDS
    assert ledger.made(0) >= 15
    assert ledger.made(1) == second.times == ROUNDS - base
    assert 0.99 * EPSILON < epsilon_of(ledger.spent(), DELTA) <= EPSILON


def one_loses_its_state(run: Run) -> None:
    """It is restored by its neighbours, with its ledger. Without it, it does not take part."""
    flag = run.folder / "go"
    run.start("a", "b", "c", "d", "e", observe=waits_at(17, flag))
    run.until(lambda: run.round("e") >= 16)
    run.crash("e")
    flag.touch()
    shutil.rmtree(run.folder / "e" / "state")
    ledger = run.folder / "e" / "e.privacy.jsonl"
    kept = ledger.read_bytes()
    run.vote("a", "b", "c", "d", restored=["e"])
    run.start("e")
    run.is_told_to_restore("e")
    run.vote("e", restored=["e"])
    ledger.unlink()
    run.start("e")
    run.stops("e", "e.privacy.jsonl")
    ledger.write_bytes(kept)
    run.start("e")
    run.end(*run.mesh.names)
    charged = _ledger(run, "e")
    assert len(charged.spent()) == 2
    assert charged.made(0) > 17, "rounds that the others had not done are assumed"
    assert epsilon_of(charged.spent(), DELTA) <= EPSILON


def one_has_spent_its_budget_before(run: Run) -> None:
    """A second run on the same rows is refused at that site, before anything is sent."""
    shared = run.folder / "ledger.jsonl"
    fleet.settle(run.folder / "a", ledger=str(shared))
    run.live()
    second = Run(run.folder / "second", NAMES, EXPERIMENT)
    fleet.settle(second.folder / "a", ledger=str(shared))
    second.start("b", "c", "a")
    _refuses(second, "a", "privacy.epsilon = 4", str(shared))
    assert not (second.folder / "a" / "state" / "result").exists()
    assert len(_opened(shared).spent()) == 1
    second.kill()


def _refuses(run: Run, name: str, *names: str) -> None:
    """Waits until a node has refused to start, for a reason that names these."""
    run.ended(name)
    assert missing_from((run.folder / f"{name}.log").read_text(), *names) == []


def one_has_no_ledger_any_more(run: Run) -> None:
    """It does not take part again with none, or with that of a backup, which has fewer releases."""
    run.start("a", "b")
    run.start("c", observe=dies("computed", 17))
    run.dies("c")
    ledger = run.folder / "c" / "c.privacy.jsonl"
    kept = ledger.read_bytes()
    ledger.unlink()
    run.start("c")
    _refuses(run, "c", str(ledger), "is missing")
    older = kept.splitlines(keepends=True)[:5]
    ledger.write_bytes(b"".join(older))
    run.start("c")
    _refuses(run, "c", str(ledger), "older")
    ledger.write_bytes(kept)
    run.start("c")
    run.end(*NAMES)


def one_is_too_small(run: Run) -> None:
    """It is refused before it connects, and has told nobody anything."""
    run.start("a")
    _refuses(run, "a", "this site", "sampling.batch")
    assert not (run.folder / "a" / "state" / "bulletin.json").exists()
    assert not list((run.folder / "a" / "state").glob("generation-*/*"))


def nobody_evaluates(run: Run) -> None:
    """The run ends, and its report says that sites have told no metrics."""
    run.live()
    result = run.folder / "a" / "state" / "result"
    last = json.loads((result / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["accuracy"]["sites"] == last["loss"]["sites"] == [None] * 3
    assert _ledger(run, "a").spent(TEST) == []
    card = write_report([RecordedRun.from_folder(result)], result, "a run").model_card
    assert card is not None
    assert "no metrics" in card.read_text()
    assert not missing_from(card.read_text(), "each site told the noised loss")


def hospitals_of_the_example(run: Run) -> None:
    """The documentation's own file, several rows per patient, with one node killed."""
    names = run.mesh.names
    run.start(*names[:-1])
    run.start(names[-1], observe=dies("computed", 17))
    run.dies(names[-1])
    run.start(names[-1])
    run.end(*names)
    summary = json.loads((run.folder / "a" / "state" / "result" / "summary.json").read_text())
    assert 3.9 < summary["privacy"]["epsilon"] <= 4.0
    assert summary["privacy"]["unit"] == "patient"
    assert all(_ledger(run, name).spent()[0].times == 60 for name in names)


TOO_LARGE = experiment(ROUNDS, 3, None, "ring", options=OPTIONS, privacy=PRIVACY, sampling={"batch": 5000})

SCENARIOS = {
    one_is_too_small: (NAMES, TOO_LARGE),
    one_leaves: (["a", "b", "c", "d", "e"], FIVE),
    all_go_back: (NAMES, EXPERIMENT),
    nobody_evaluates: (NAMES, WITHOUT_EVALUATION),
    one_loses_its_state: (["a", "b", "c", "d", "e"], FIVE),
    one_has_spent_its_budget_before: (NAMES, EXPERIMENT),
    one_has_no_ledger_any_more: (NAMES, EXPERIMENT),
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_sites_that_leave_return_or_have_spent_their_budget(scenario, tmp_path):
    play(scenario, tmp_path / "mesh", *SCENARIOS[scenario])


@pytest.mark.slow
def test_example_with_several_visits_per_patient_runs_between_its_hospitals(tmp_path):
    files = {"patients.py": (EXAMPLES / "patients.py").read_text()}
    text = (EXAMPLES / "private.toml").read_text()
    for scenario in (hospitals_of_the_example, undisturbed):
        play(scenario, tmp_path / scenario.__name__, ["a", "b", "c", "d", "e"], text, files)
    killed, calm = (tmp_path / s.__name__ / "a" / "state" / "result" for s in (hospitals_of_the_example, undisturbed))
    for file in ("model.safetensors", "metrics.jsonl", "summary.json"):
        assert (killed / file).read_bytes() == (calm / file).read_bytes(), file
