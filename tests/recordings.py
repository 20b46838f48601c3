"""Recordings of gradients in the quick run: recording takes longer than the rounds of most tests."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

from fairmesh.numerics.tracing import Traced
from fairmesh.numerics.trees import Tree
from fairmesh.problems.oracle import Oracle
from fairmesh.problems.prepared import Prepared

_recorded_call = Traced.__call__


@contextlib.contextmanager
def without_recordings() -> Iterator[None]:
    """Within it, gradients are evaluated as they are written, as with the option `trace = "no"`."""

    def as_written(self: Traced, *arguments: Tree) -> Any:
        return self._function(*arguments)

    with mock.patch.object(Traced, "__call__", as_written):
        yield


@contextlib.contextmanager
def with_recordings() -> Iterator[None]:
    """Within it, gradients are recorded and replayed, as in users' runs, also inside of `without_recordings`."""
    with mock.patch.object(Traced, "__call__", _recorded_call):
        yield


@contextlib.contextmanager
def shared_recordings() -> Iterator[None]:
    """Within it, oracles of the same problem, precision and shape replay one recording of the gradients. A recording
    depends on nothing else: batches, seeds and models are arguments of the recorded function."""
    kept: dict[int, dict[Any, Any]] = {}
    initialise = Oracle.__init__

    def and_share(self: Oracle, problem: Prepared, *arguments: Any, **settings: Any) -> None:
        initialise(self, problem, *arguments, **settings)
        if id(problem) not in kept:
            kept[id(problem)] = {}
            weakref.finalize(problem, kept.pop, id(problem))
        alike = (
            self.seeds.device,
            self.dtype,
            self._nodes.shape,
            self.batches.padded,
            settings.get("precision"),
            settings.get("trace"),
        )
        self._losses.gradients = kept[id(problem)].setdefault(alike, self._losses.gradients)

    with mock.patch.object(Oracle, "__init__", and_share):
        yield
