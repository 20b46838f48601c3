"""Long work outside of a run's rounds: shown while it lasts, stopped between two steps, and continued on resuming."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fairmesh.errors import CheckpointError, FairmeshError, Interrupted
from fairmesh.storage.checkpoint import load_checkpoint, read_stored, save_checkpoint, write_stored

_SAVE_EVERY_S = 60.0  # at most this much work is repeated after a crash
_WORTH_SAVING_S = 1.0  # finished work that took less is done again
_FIRST_NOTICE_S = 5.0
_State = TypeVar("_State")


class Notices:
    """The `go_on` of `Phases` in a run: announces at growing intervals how far long work is, and stops it on request.

    Args:
        stop: Is set to stop it.
        announce: Takes a sentence; None to say nothing. Default: None.
        seen: Takes every step, as `go_on` does. Default: nobody.
    """

    def __init__(
        self,
        stop: threading.Event,
        announce: Callable[[str], None] | None = None,
        seen: Callable[[str, int, int], None] = lambda what, done, of: None,
    ):
        self._stop, self._announce, self._seen = stop, announce or (lambda text: None), seen
        self._what, self._since, self._next = "", 0.0, 0.0

    def __call__(self, what: str, done: int, of: int) -> None:
        self._seen(what, done, of)
        if what != self._what:
            self._what, self._since, self._next = what, time.monotonic(), _FIRST_NOTICE_S
        seconds = time.monotonic() - self._since
        if seconds >= self._next:
            self._next = 2 * seconds
            self._announce(f"{what}: {done:,} of {of:,} steps in {seconds:.0f} s")
        if self._stop.is_set():
            raise Interrupted(f"stopped while {what}, after {done:,} of {of:,} steps; resume to continue there")


@dataclass(frozen=True)
class Phases:
    """Carries out long work step by step, and keeps its state and outcome in a folder, as NAME.safetensors.

    Args:
        folder: Where; None to keep nothing. Default: None.
        go_on: Is called before the first step and after every step with the work in words, how many steps are done, and
            how many there are. If it raises an error, the work is saved and stops. Default: nobody watches.
        unusable: Is called with the name of a file that is damaged or of another run. Its work is done again. Default:
            nobody is told.
        storing: Surrounds every write, to say what to do if the disk fails. Default: nullcontext.
    """

    folder: Path | None = None
    go_on: Callable[[str, int, int], None] = lambda what, done, of: None
    unusable: Callable[[str], None] = lambda file: None
    storing: Callable[[], AbstractContextManager[None]] = nullcontext

    def finished(self, name: str, identity: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the outcome that `finish` has kept; {} if there is none.

        Args:
            name: The name of the work.
            identity: All that determines its outcome.
        """
        return self._read(name, lambda path: read_stored(path, identity).tensors, {})

    def finish(self, name: str, identity: Mapping[str, Any], outcome: Mapping[str, Tensor]) -> None:
        """Keeps the outcome of work."""
        self._write(name, lambda path: write_stored(path, outcome, 0, identity))

    def forget(self, name: str) -> None:
        """Removes the files of work whose outcome is kept elsewhere. The name may be a pattern."""
        for path in self.folder.glob(f"{name}.safetensors") if self.folder else ():
            path.unlink(missing_ok=True)
        if self.folder:
            with suppress(OSError):
                self.folder.rmdir()  # fails if other files are in it, and then it stays

    def carried_out(
        self,
        what: str,
        name: str,
        identity: Mapping[str, Any],
        steps: int,
        first: _State,
        onwards: Callable[[_State, int], Iterator[tuple[int, _State]]],
    ) -> _State:
        """Returns the state after all steps, from the start or from where the work was stopped: the same bits.

        Args:
            what: What is done, in words such as "training each site alone".
            name: The name of the work.
            identity: All that determines its outcome.
            steps: How many steps there are.
            first: The state before the first one, a NamedTuple of tensors and of such NamedTuples.
            onwards: (state, steps done) -> yields, from there on, how many steps are done and the state then.
        """
        last, done_before = self._read(name, lambda path: load_checkpoint(path, first, identity), (first, 0))
        began = saved = time.monotonic()

        def save(state: _State, done: int) -> None:
            self._write(name, lambda path: save_checkpoint(path, state, done, identity))

        for done, state in onwards(last, done_before):
            try:
                self.go_on(what, done, steps)
            except FairmeshError:
                save(state, done)
                raise
            now = time.monotonic()
            if now - saved > _SAVE_EVERY_S or (done == steps and now - began > _WORTH_SAVING_S):
                save(state, done)
                saved = now
            last = state
        return last

    def _read(self, name: str, read: Callable[[Path], Any], otherwise: Any) -> Any:
        path = self.folder and self.folder / f"{name}.safetensors"
        if not path or not path.exists():
            return otherwise
        try:
            return read(path)
        except CheckpointError:  # damaged, or of another run
            self.unusable(path.name)
            return otherwise

    def _write(self, name: str, write: Callable[[Path], Any]) -> None:
        if self.folder:
            with self.storing():
                self.folder.mkdir(parents=True, exist_ok=True)
                write(self.folder / f"{name}.safetensors")
