"""The checkpoints of a node: which are used, put aside, or refused."""

import errno
import fcntl
import os
import re
import time
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fairmesh.mesh.node.state_lock import locked, running_since
from fairmesh.mesh.node.store import Store, forget_run, landmarks_in, put_aside
from fairmesh.storage import checkpoint
from fairmesh.storage.checkpoint import load_checkpoint, save_checkpoint
from tests.refusals import refused


class State(NamedTuple):
    models: Tensor


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path, 1, report=_ignore)
    for done in (3, 6):
        made.save(State(torch.full((1, 2), float(done))), done, {"seed": 0}, reach=2)
    return made


def _ignore(level, what, **fields):
    pass


@pytest.mark.parametrize(
    ("old", "new"), [(rb"[^?]$", b"?"), (rb'"format":"%d"' % checkpoint.FORMAT, b'"format":"9"')], ids=["end", "format"]
)
def test_damaged_checkpoint_is_put_aside_and_an_older_one_is_used(store, tmp_path, old, new):
    path = store.path(6)
    content, times = re.subn(old, new, path.read_bytes())
    assert times == 1
    path.write_bytes(content)
    said = []
    assert Store(tmp_path, 1, report=lambda level, what, **fields: said.append(fields["reason"])).newest == 3
    assert "delete the folder" not in said[0]
    assert path.with_suffix(".damaged").exists()


def test_checkpoint_that_is_damaged_while_the_node_runs_is_named_with_what_a_restart_does(store):
    store.path(6).write_bytes(b"damaged")
    with refused(store.path(6), "start the node again", error=checkpoint.CheckpointError) as caught:
        store.load(6, State(torch.zeros(1, 2)), {"seed": 0})
    assert _keeps_the_state(caught.value)


def test_checkpoint_of_another_version_is_refused_and_stays(store, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
    with refused(store.path(3), checkpoint.FORMAT - 1, checkpoint.FORMAT, error=checkpoint.OtherFormat) as caught:
        Store(tmp_path, 1, report=_ignore)
    assert _keeps_the_state(caught.value)
    assert store.path(3).exists()
    assert store.path(6).exists()


def test_checkpoint_of_another_experiment_is_refused_with_what_differs_and_advice_for_a_node(store):
    with refused("seed", 0, 7, error=checkpoint.OtherExperiment) as caught:
        store.load(3, State(torch.zeros(1, 2)), {"seed": 7})
    assert _keeps_the_state(caught.value)


def _keeps_the_state(error: Exception) -> bool:
    """Whether a message tells a node to keep its state; a node with an empty one is refused by the others."""
    said = str(error)
    return "Keep the state folder" in said and "another folder" not in said and "delete" not in said


def test_first_and_last_two_landmarks_are_kept(store, tmp_path):
    for done in (10, 20, 30, 40):
        store.keep(State(torch.full((1, 2), float(done))), done, {"seed": 0})
    assert store.landmarks == landmarks_in(tmp_path, 1) == Store(tmp_path, 1, report=_ignore).landmarks == [10, 30, 40]
    assert float(store.load(30, State(torch.zeros(1, 2)), {"seed": 0}).models[0, 0]) == 30


def test_all_landmarks_are_kept_while_a_certificate_may_ask_for_one(store):
    for done in (10, 20, 30, 40, 50):
        store.keep(State(torch.zeros(1, 2)), done, {"seed": 0}, thin=done < 40)
    assert store.landmarks == [10, 20, 30, 40, 50]
    store.keep(State(torch.zeros(1, 2)), 60, {"seed": 0})
    assert store.landmarks == [10, 50, 60]


def test_result_is_put_aside_and_none_is_overwritten(tmp_path):
    for content in ("one", "two"):
        (tmp_path / "result").mkdir()
        (tmp_path / "result" / "file").write_text(content)
        put_aside(tmp_path / "result", 1)
    assert (tmp_path / "result-generation-1" / "file").read_text() == "one"
    assert (tmp_path / "result-generation-1-2" / "file").read_text() == "two"
    assert not (tmp_path / "result").exists()


def test_checkpoints_are_kept_from_a_pinned_round_on(store):
    for done in (9, 12, 15):
        store.save(State(torch.zeros(1, 2)), done, {"seed": 0}, reach=2, pinned=7)
    assert store.at_or_before(7) == 6
    store.save(State(torch.zeros(1, 2)), 18, {"seed": 0}, reach=2)
    assert store.at_or_before(12) is None


class Rows(NamedTuple):
    own: torch.Tensor
    of_neighbours: torch.Tensor
    undefined: torch.Tensor


def test_checkpoint_comes_back_bit_for_bit(tmp_path):
    zeros = torch.zeros(1, 1, 5)
    state = Rows(torch.randn(1, 1, 5), -zeros.unsqueeze(2), torch.full_like(zeros, torch.nan))
    save_checkpoint(tmp_path / "checkpoint.safetensors", state, 3, {})
    found, done = load_checkpoint(tmp_path / "checkpoint.safetensors", state, {})
    assert done == 3
    assert [t.numpy().tobytes() for t in found] == [t.numpy().tobytes() for t in state]


def test_end_of_a_run_leaves_results_log_and_decisions(tmp_path):
    for name in ("result", "result-generation-1", "personal", "generation-2/landmarks", "unconfirmed-2", "best"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(b"x")
    kept = ("log.jsonl", "log.jsonl.1", "decisions.json", "facts.json", "bulletin.json", "metrics-generation-1.jsonl")
    for name in (*kept, "measured.jsonl"):
        (tmp_path / name).write_bytes(b"x")
    forget_run(tmp_path)
    forget_run(tmp_path)  # also if a crash cut it short
    left = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert left == {*kept, "result", "result-generation-1", "personal"}


def test_lock_that_the_processes_of_a_killed_node_hold_is_waited_for(tmp_path):
    lock = locked(tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(0.3)
        os._exit(0)
    lock.close()
    with refused("another node is running"):
        locked(tmp_path)
    locked(tmp_path, patience_s=30).close()
    assert os.waitpid(child, 0)[1] == 0


def test_lock_holds_though_somebody_deletes_its_file(tmp_path):
    with locked(tmp_path):
        (tmp_path / "lock").unlink()
        with refused("another node is running", tmp_path):
            locked(tmp_path)
        assert running_since(tmp_path) is not None
    locked(tmp_path).close()


def test_lock_of_a_folder_that_cannot_be_locked_itself_is_that_of_the_file(tmp_path, monkeypatch):
    """As over NFS, which needs a file that is open for writing."""
    flock = fcntl.flock

    def of_files(handle: int, how: int) -> None:
        if os.path.isdir(handle):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", of_files)
    with locked(tmp_path), refused("another node is running"):
        locked(tmp_path)
    assert running_since(tmp_path) is None


def test_lock_says_since_when_a_node_runs(tmp_path):
    assert running_since(tmp_path / "nowhere") is None
    with locked(tmp_path):
        assert running_since(tmp_path) == pytest.approx(time.time(), abs=5)
    assert running_since(tmp_path) is None
