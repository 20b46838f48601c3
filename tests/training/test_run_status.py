"""A run in progress says how far it is and whether its process lives."""

import json
import threading
import time

import pytest

import fairmesh as fm
from fairmesh.comparisons import leave_one_out
from fairmesh.comparisons.leave_one_out import LeftOut
from fairmesh.comparisons.reference_models import add_references
from fairmesh.storage.run_status import locked, read_run_status
from fairmesh.training import run_status
from tests import toys
from tests.refusals import refused

ROUNDS = 8


def _train(folder, *looks, algorithm=toys.ALGORITHMS["ad-gda"], rounds=ROUNDS, nodes=4, **more):
    return fm.train(
        toys.problem(nodes), fm.Ring(), algorithm, rounds, out=folder, observers=looks, measure_every=2, **more
    )


def _status(folder) -> dict:
    return read_run_status(folder, time.time())


@pytest.fixture
def always(monkeypatch):
    """Lets the status be written after every round."""
    monkeypatch.setattr(run_status, "_EVERY_S", 0.0)


@pytest.mark.usefixtures("always")
def test_status_has_what_is_known_of_a_run_and_is_gone_when_it_has_finished(tmp_path):
    seen = []
    _train(tmp_path / "run", lambda done, state: seen.append(_status(tmp_path / "run")))
    assert {one["alive"] for one in seen} == {True}
    assert [one["round"] for one in seen][1:] == [*range(1, ROUNDS + 1)]
    assert seen[-1]["phase"]["name"] == "summing up"
    facts = seen[3]
    assert (facts["rounds"], facts["algorithm"], facts["metric"], facts["phase"]) == (
        ROUNDS,
        "ad-gda",
        "accuracy",
        None,
    )
    assert len(facts["sites"]) == len(facts["prior"]) == len(facts["rows"]) == len(facts["edges"]) == 4
    value, low, high = facts["measured"]["sites"][0]
    assert 0 <= low <= value <= high <= 1
    assert facts["measured"]["round"] == 2
    assert not (tmp_path / "run" / "status.json").exists()
    assert _status(tmp_path / "run") == {}


def test_folder_has_the_same_files_and_bits_whether_a_run_tells_how_it_is_or_not(tmp_path, monkeypatch):
    _train(tmp_path / "told")
    monkeypatch.setattr("fairmesh.training.execution.telling", lambda folder, plan: _Nobody())
    _train(tmp_path / "silent")
    told, silent = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir() if p.is_file()} for name in ("told", "silent")
    )
    assert told.keys() == silent.keys()
    same = [name for name in told if told[name] == silent[name]]
    assert set(told) - set(same) <= {"summary.json", "checkpoint.safetensors"}  # seconds; keys in no fixed order


class _Nobody:
    def __enter__(self):
        return run_status.RunStatus()

    def __exit__(self, *error):
        return None


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (fm.errors.Interrupted("stopped after round 3"), "stopped"),
        (KeyboardInterrupt(), "stopped"),
        (fm.errors.Diverged("a model exploded"), "diverged"),
        (OSError("no space left"), "failed"),
    ],
)
@pytest.mark.quick_cases("all")
def test_run_that_ends_early_says_how_and_is_taken_up_again(tmp_path, error, state):
    def fails(done, _):
        if done == 4:
            raise error

    with pytest.raises(type(error)):
        _train(tmp_path / "run", fails, checkpoint_every=1)
    status = _status(tmp_path / "run")
    assert (status["state"], status["alive"], status["round"]) == (state, False, 4)
    assert str(error) in status["reason"]
    if state != "diverged":
        _train(tmp_path / "run", resume=True, checkpoint_every=1)
        assert (tmp_path / "run" / "summary.json").exists()
        assert _status(tmp_path / "run") == {}


def test_work_after_the_rounds_that_belongs_to_a_run_is_told_and_how_it_ended_too(tmp_path):
    folder, seen = tmp_path / "run", []
    result = _train(folder)
    add_references(result, fm.Options(), ["constant"], folder, announce=lambda text: seen.append(_status(folder)))
    assert [(one["alive"], one["round"], one["phase"]["name"]) for one in seen] == [
        (True, ROUNDS, "training references")
    ]
    assert len(seen[0]["edges"]) == len(seen[0]["measured"]["sites"]) == 4
    assert _status(folder) == {}

    def stops(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_references(result, fm.Options(), ["constant"], folder, announce=stops)
    status = _status(folder)
    assert (status["state"], status["round"], status["phase"]["name"]) == ("stopped", ROUNDS, "training references")


def test_training_without_each_site_is_told(tmp_path, monkeypatch):
    folder, seen = tmp_path / "run", []
    result = _train(folder)

    def looks(*arguments, **options):
        seen.append(_status(folder)["phase"]["name"])
        return LeftOut(result.problem, result, "test", {})

    monkeypatch.setattr(leave_one_out, "leave_one_site_out", looks)
    leave_one_out.add_left_out(result, result.problem, None, fm.Options(), folder)
    assert seen == ["training once more without each of 4 sites"]
    assert _status(folder) == {}


def test_run_that_is_refused_leaves_what_was_there(tmp_path):
    _train(tmp_path / "run", checkpoint_every=1)
    with refused("checkpoint", error=fm.errors.CheckpointError):
        _train(tmp_path / "run", resume=True, nodes=5)
    assert not (tmp_path / "run" / "status.json").exists()
    (tmp_path / "run" / "status.json").write_text("what was there")
    with refused("checkpoint", error=fm.errors.CheckpointError):
        _train(tmp_path / "run", resume=True, nodes=5)
    assert (tmp_path / "run" / "status.json").read_text() == "what was there"


def test_run_that_was_stopped_before_its_first_round_may_be_started_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text("{}")
    _train(tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_phases_outside_the_rounds_are_told(tmp_path):
    phases, over = [], threading.Event()

    def look() -> None:
        while not over.is_set():
            phase = _status(tmp_path / "run").get("phase")
            if phase and phase["name"] not in [one["name"] for one in phases]:
                phases.append(phase)
            time.sleep(0.002)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        fm.run(fm.Experiment(fm.data.Digits(nodes=4), rounds=20), out=tmp_path / "run")
    finally:
        over.set()
        looking.join()
    names = [phase["name"] for phase in phases]
    assert [name for name in names if "reference" in name or "held-out rows" in name or "choosing" in name]
    assert any(phase["of"] == 20 for phase in phases)


def test_lock_shows_whether_a_process_lives_and_a_look_does_not_hold_it(tmp_path):
    (tmp_path / "status.json").write_text(
        json.dumps(_TOLD | {"machine": run_status.machine(), "time": time.time() - 99})
    )
    assert _status(tmp_path)["alive"] is False
    with locked(tmp_path) as first:
        assert first
        assert [_status(tmp_path)["alive"] for _ in range(3)] == [True] * 3
    assert _status(tmp_path)["alive"] is False
    with locked(tmp_path) as again:
        assert again


_TOLD = {"run": 1, "state": "running", "locked": True, "sites": []}


@pytest.mark.slow
def test_telling_takes_less_than_a_hundredth_of_a_run(tmp_path, monkeypatch):
    spent, written = [0.0], run_status._Written
    for name in ("__init__", "after_round", "phase", "end"):
        method = getattr(written, name)

        def timed(*arguments, method=method):
            began = time.thread_time()
            try:
                return method(*arguments)
            finally:
                spent[0] += time.thread_time() - began

        monkeypatch.setattr(written, name, timed)
    began = time.perf_counter()
    _train(tmp_path / "run", rounds=1000)
    assert spent[0] < 0.01 * (time.perf_counter() - began)
