"""A run without an algorithm that is stopped in any of its phases: what was finished is not trained again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT, raise_signal
from typing import Any

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.comparisons.phases import Notices
from fairmesh.training.execution import Execution

ROUNDS = 60
ASIDE = ["folds robust", "folds fixed", "all fixed"]


def problem() -> fm.Problem:
    """Six sites, of which two are outnumbered, so that robust weights are handed out."""
    generator = torch.Generator().manual_seed(0)

    def site(i: int) -> fm.Site:
        rows = 120 if i < 4 else 25
        x = torch.randn(rows + 30, 4, generator=generator)
        y = (x[:, 0] + (1.0 if i < 4 else -1.0) * x[:, 1] > 0).long()
        return fm.Site((x[:rows], y[:rows]), test=(x[rows:], y[rows:]), name=f"site {i}")

    return fm.Problem(lambda: nn.Linear(4, 2), [site(i) for i in range(6)])


def train(folder: Path, **more: Any) -> fm.Result:
    return fm.train(problem(), rounds=ROUNDS, out=folder, handle_signals=True, announce=lambda text: None, **more)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(
        "fairmesh.personalization.personalize.Choice", lambda: fm.personalization.Choice(steps=20, local_steps=30)
    )


@pytest.fixture
def rounds_of(monkeypatch) -> list[str]:
    """What has begun its rounds, in this order."""
    begun: list[str] = []
    real = Execution.to_the_end

    def named(run: Execution) -> None:
        weights = "fixed" if "Prior" in type(run.plan.replicas[0].algorithm.weighting).__name__ else "robust"
        begun.append(f"{'folds' if len(run.plan.replicas) > 1 else 'all'} {weights}")
        real(run)

    monkeypatch.setattr(Execution, "to_the_end", named)
    return begun


@contextmanager
def stopped(words: str, after: int) -> Iterator[None]:
    """Ctrl-C while something is done, after so many of its steps."""
    real = Notices.__call__

    def stopping(self, what, done, of):
        if what.startswith(words) and done == after:
            raise_signal(SIGINT)
        real(self, what, done, of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Notices, "__call__", stopping)
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> fm.Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fairmesh.personalization.personalize.Choice", lambda: fm.personalization.Choice(steps=20, local_steps=30)
        )
        return train(tmp_path_factory.mktemp("straight") / "run")


@pytest.mark.parametrize(
    ("words", "after", "again"),
    [
        ("training with fixed weights", 30, ["all fixed", "all robust"]),
        ("trying robust weights on held-out rows", 30, [*ASIDE, "all robust"]),
        ("trying fixed weights on held-out rows", 30, ["folds fixed", "all fixed", "all robust"]),
        ("choosing a model", 15, ["all robust"]),  # which has no round left
    ],
)
@pytest.mark.slow
def test_finished_phases_are_not_trained_again_and_the_result_is_the_same(
    words, after, again, straight, rounds_of, tmp_path
):
    assert straight.handed_out.weights == "robust"
    with stopped(words, after), pytest.raises(fm.errors.Interrupted) as told:
        train(tmp_path / "run")
    assert words in str(told.value)
    rounds_of.clear()
    resumed = train(tmp_path / "run", resume=True)
    assert rounds_of == again
    assert torch.equal(resumed.row(), straight.row())
    assert resumed.handed_out == straight.handed_out
    assert [one.weights for one in resumed.personal[0].sites] == [one.weights for one in straight.personal[0].sites]
    assert resumed.weights_verdict() == straight.weights_verdict()
    assert not list((tmp_path / "run").rglob("aside-*"))


@pytest.mark.slow
def test_run_stopped_in_its_rounds_keeps_what_was_decided(straight, rounds_of, tmp_path):
    with pytest.raises(fm.errors.Interrupted):
        train(tmp_path / "run", observers=[lambda done, state: raise_signal(SIGINT) if done == 20 else None])
    rounds_of.clear()
    resumed = train(tmp_path / "run", resume=True)
    assert rounds_of == ["all robust"]
    assert torch.equal(resumed.row(), straight.row())
    assert resumed.weights_verdict() == straight.weights_verdict()
