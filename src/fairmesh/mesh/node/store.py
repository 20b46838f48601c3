"""The checkpoints in a node's state folder, for each generation of the mesh."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairmesh.errors import CheckpointError
from fairmesh.mesh.wire.journal import storing
from fairmesh.mesh.wire.links import Report
from fairmesh.storage.checkpoint import OtherFormat, load_checkpoint, round_of, save_checkpoint

_AT_LEAST_KEPT = 2  # checkpoints: one may be found damaged


def folder_of(state: Path, generation: int) -> Path:
    """Returns the folder of a generation's checkpoints and journal."""
    return state / f"generation-{generation}"


class Store:
    """The intact checkpoints of one generation."""

    def __init__(self, folder: Path, generation: int, report: Report):
        self.folder, self._generation = folder_of(folder, generation), generation
        self.folder.mkdir(parents=True, exist_ok=True)
        for partial in self.folder.glob("*.partial"):
            partial.unlink()  # a crash cut this checkpoint short
        self._rounds: list[int] = []
        for path in sorted(self.folder.glob("checkpoint-*.safetensors")):
            try:
                self._rounds.append(round_of(path))
            except OtherFormat:
                raise  # it is intact, so it must not be put aside
            except CheckpointError as error:
                report("warning", "a checkpoint is damaged; an older one is used", file=path.name, reason=str(error))
                path.rename(path.with_suffix(".damaged"))

    def forget_earlier(self) -> None:
        """Removes the folders of earlier generations."""
        for one in self.folder.parent.glob("generation-*"):
            if int(one.name.removeprefix("generation-")) < self._generation:
                shutil.rmtree(one, ignore_errors=True)

    def path(self, done: int) -> Path:
        return self.folder / f"checkpoint-{done:012d}.safetensors"

    @property
    def newest(self) -> int | None:
        return self._rounds[-1] if self._rounds else None

    def at_or_before(self, done: int) -> int | None:
        return max((one for one in self._rounds if one <= done), default=None)

    def load(self, done: int, like: Any, identity: Mapping[str, Any]) -> Any:
        return load_checkpoint(self.path(done), like, identity)[0]

    def save(self, state: Any, done: int, identity: Mapping[str, Any], reach: int) -> int:
        """Writes a checkpoint and removes old ones. Keeps the last two, and one at least `reach` rounds back, which is
        as far as the other sites may ask this node to go back.

        Returns:
            The round from which on the journal is needed.
        """
        with storing(self.folder):
            save_checkpoint(self.path(done), state, done, identity)
        self._rounds = sorted({*self._rounds, done})
        for damaged in self.folder.glob("*.damaged"):
            damaged.unlink(missing_ok=True)
        far = self.at_or_before(done - reach)
        if far is None:
            return 0  # the journal is needed from the start of this generation
        needed = min(self._rounds[-_AT_LEAST_KEPT:][0], far)
        for one in [one for one in self._rounds if one < needed]:
            self.path(one).unlink(missing_ok=True)
            self._rounds.remove(one)
        return needed


def put_in_place(partial: Path, final: Path) -> None:
    """Renames a complete folder to its final name, so that no incomplete folder ever has that name."""
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
