"""What sites train alone is trained once, stops at once, and continues where it was with the same bits."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch

import fairmesh as fm
from fairmesh.comparisons import phases
from fairmesh.comparisons.phases import Phases
from fairmesh.errors import Interrupted
from fairmesh.storage.occupied import ALONE
from tests import toys

OBJECTIVE = fm.Objective("held-out", discount_noise=True)


class _Stop:
    """Stops work after so many of its steps, and counts them."""

    def __init__(self, after: int = -1):
        self.seen: list[int] = []
        self._after = after

    def __call__(self, what: str, done: int, of: int) -> None:
        self.seen.append(done)
        if done == self._after:
            raise Interrupted("stopped")


def _watched(monkeypatch, stop: _Stop) -> None:
    """Every phase of a run is watched by `stop` from now on."""
    monkeypatch.setattr(phases.Notices, "__call__", lambda self, *work: stop(*work))


def _run(out, **options) -> fm.Result:
    problem = replace(toys.problem(), objective=OBJECTIVE)
    return fm.train(problem, fm.Ring(), fm.TrackedADGDA(), 20, out=out, **options)


def test_run_that_was_stopped_while_sites_trained_alone_continues_there(tmp_path, monkeypatch):
    whole = _run(tmp_path / "whole")
    _watched(monkeypatch, _Stop(after=13))
    with pytest.raises(Interrupted):
        _run(tmp_path / "run")
    _watched(monkeypatch, again := _Stop())
    continued = _run(tmp_path / "run", resume=True)
    assert again.seen == [*range(13, 21)]
    assert torch.equal(continued.row(), whole.row())
    assert continued.problem.objective == whole.problem.objective
    _watched(monkeypatch, once_more := _Stop())
    _run(tmp_path / "run", resume=True)
    assert once_more.seen == []


@pytest.mark.parametrize("reference", ["local", "fine-tuned"])
def test_reference_that_was_stopped_continues_there(tmp_path, monkeypatch, reference):
    options = {"algorithm": fm.algorithms.DSGD(0.1), "rounds": 40, "measure_every": 40, "references": [reference]}
    whole = fm.compare_with_references(toys.problem(), **options)
    _watched(monkeypatch, _Stop(after=17))
    with pytest.raises(Interrupted):
        fm.compare_with_references(toys.problem(), **options, out=tmp_path / "run")
    _watched(monkeypatch, again := _Stop())
    continued = fm.compare_with_references(toys.problem(), **options, out=tmp_path / "run", resume=True)
    assert again.seen[0] == 17
    models = [one.references[reference].state.algorithm.models for one in (continued, whole)]
    assert torch.equal(*models)
    assert [path.stem for path in (tmp_path / "run" / ALONE).iterdir()] == [reference]


def test_choice_of_own_models_that_was_stopped_continues_there(tmp_path, monkeypatch):
    options = {"personalization": fm.personalization.Mixture(local_steps=30, steps=10), "measure_every": 3}

    def chosen(**more):
        (found,) = fm.train(toys.problem(), fm.Ring(), fm.algorithms.DSGD(0.1), 3, **options, **more).personal
        return [site.table() for site in found.sites]

    whole = chosen()
    _watched(monkeypatch, _Stop(after=21))
    with pytest.raises(Interrupted):
        chosen(out=tmp_path / "run")
    _watched(monkeypatch, again := _Stop())
    assert chosen(out=tmp_path / "run", resume=True) == whole
    assert again.seen[0] == 21


def test_signal_stops_sites_that_train_alone_within_two_seconds(tmp_path):
    problem = replace(toys.problem(), objective=OBJECTIVE)
    sent = []

    def stop() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Timer(1.0, stop).start()
    with pytest.raises(Interrupted):
        fm.train(problem, fm.Ring(), fm.TrackedADGDA(), 10**7, out=tmp_path / "run", handle_signals=True)
    assert time.monotonic() - sent[0] < 2
    assert [path.name for path in (tmp_path / "run" / ALONE).iterdir()] == ["reference-losses-begun.safetensors"]


def test_long_work_says_how_far_it_is(monkeypatch):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(phases.time, "monotonic", lambda: float(next(clock)))
    said: list[str] = []
    watch = Phases(go_on=phases.Notices(threading.Event(), said.append)).go_on
    for done in range(11):
        watch("training", done, 10)
    assert 2 <= len(said) <= 4
    assert all("of 10" in text for text in said)
