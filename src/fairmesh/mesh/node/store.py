"""What is in a node's state folder: the checkpoints of each generation of the mesh, the result, and whether the run is
finished. A finished run stays what it is, whatever is approved afterwards."""

import functools
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput, CheckpointError
from fairmesh.mesh.enrol.manifest import Manifest
from fairmesh.mesh.wire.journal import is_complete, storing
from fairmesh.mesh.wire.links import Report
from fairmesh.storage.checkpoint import (
    OtherExperiment,
    OtherFormat,
    load_checkpoint,
    round_of,
    save_checkpoint,
)
from fairmesh.storage.files import read_record, write_record
from fairmesh.storage.finished_work import FinishedWork
from fairmesh.storage.occupied import ALONE
from fairmesh.storage.run_folder import PREPROCESSING, RunFolder

_KEEP_STATE = "Keep the state folder as it is: the other sites refuse a node with an empty one"
_AT_LEAST_KEPT = 2  # checkpoints: one may be found damaged
_KEPT = "landmarks"  # their folder
RESULT, LOCAL = "result", "local"  # folders: of the result, and of the model of this site alone
FINISHED = "finished"  # a file that says that every site has its result
PROGRESS = "progress"  # the folder of the run so far, in the form of a run's folder
START = "start.safetensors"  # the model that all sites started from
TABLE, BEST = "measured.jsonl", "best"  # the metrics of all sites, and the folder of the models of the best rounds
_HASHES = "hashes.json"  # the running hashes of messages at the kept checkpoints
_LANDMARKS = 8  # in a run; all sites keep the first and the last two of their checkpoints, to go back to


def landmark_every(rounds: int) -> int:
    """Returns after how many rounds all sites keep a checkpoint to which they can go back."""
    return max(1, rounds // _LANDMARKS)


def folder_of(state: Path, generation: int) -> Path:
    """Returns the folder of a generation's checkpoints and journal."""
    return state / f"generation-{generation}"


def landmarks_in(state: Path, generation: int) -> list[int]:
    """Returns the rounds to which a node can go back with all others."""
    folder = folder_of(state, generation) / _KEPT
    return sorted(int(path.stem.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*.safetensors"))


def put_run_aside(state: Path) -> None:
    """Moves what a node has of a run into a folder of its own, since it begins again without it. Nothing is deleted."""
    files = ("decisions.json", "vote.json", "facts.json", "outputs.json", "bulletin.json", PREPROCESSING, START)
    names = ("generation-*", "unconfirmed-*", *files)
    found = [path for name in names for path in sorted(state.glob(name))]
    if not found:
        return
    aside = _unused(state / "before-restoring-1")
    aside.mkdir()
    for path in found:
        os.replace(path, aside / path.name)


class Store:
    """The intact checkpoints of one generation."""

    def __init__(self, folder: Path, generation: int, report: Report):
        self.folder, self._generation = folder_of(folder, generation), generation
        self.folder.mkdir(parents=True, exist_ok=True)
        for partial in self.folder.glob("**/*.partial"):
            partial.unlink()  # a crash cut this checkpoint short
        self._rounds = self._intact(self.folder, report)
        self.landmarks = self._intact(self.folder / _KEPT, report)

        def damaged(file: str, reason: str) -> None:
            report("warning", "finished local work is damaged; it is done again", file=file, reason=reason)

        # Kept as long as the journal, since others may ask this node to send the same again.
        guard = functools.partial(storing, self.folder)
        self.work = FinishedWork(self.folder, before_sending=True, damaged=damaged, storing=guard)

    @staticmethod
    def _intact(folder: Path, report: Report) -> list[int]:
        """Returns the rounds of the intact checkpoints in a folder. Puts damaged ones aside."""
        found = []
        for path in sorted(folder.glob("checkpoint-*.safetensors")):
            try:
                found.append(round_of(path))
            except OtherFormat as error:  # it is intact, so it must not be put aside
                raise OtherFormat(error.what, f"install the version that began the run. {_KEEP_STATE}") from error
            except CheckpointError as error:
                report("warning", "a checkpoint is damaged; an older one is used", file=path.name, reason=error.what)
                path.rename(path.with_suffix(".damaged"))
        return found

    def path(self, done: int) -> Path:
        return self.folder / _name(done)

    def oldest(self, start: int) -> int:
        """Returns the earliest round that this node can compute again: the generation's start, as long as the journal
        has every message since, else the first checkpoint."""
        whole = is_complete(self.folder) and (start == 0 or start in self._rounds)
        return start if whole or not self._rounds else self._rounds[0]

    @property
    def newest(self) -> int | None:
        return self._rounds[-1] if self._rounds else None

    def at_or_before(self, done: int) -> int | None:
        return max((one for one in self._rounds if one <= done), default=None)

    def load(self, done: int, like: Any, identity: Mapping[str, Any]) -> Any:
        path = self.path(done)
        path = path if path.exists() else self.folder / _KEPT / path.name
        try:
            return load_checkpoint(path, like, identity)[0]
        except OtherExperiment as error:
            advice = (
                f"put back the files and versions with which the run began, and start the node again. {_KEEP_STATE}"
            )
            raise OtherExperiment(error.what, advice) from error
        except CheckpointError as error:
            raise CheckpointError(error.what, f"start the node again: it uses an older one. {_KEEP_STATE}") from error

    @property
    def hashes_path(self) -> Path:
        return self.folder / _HASHES

    def hashes(self) -> dict[str, Any]:
        """Returns the running hashes of messages at the kept checkpoints. Raises BadInput if the file is damaged."""
        return read_record(self.hashes_path, "nothing is to be done: training goes on without them")

    def keep_hashes(self, done: int, hashes: Mapping[int, str]) -> None:
        """Writes those of a checkpoint that is written next: each checkpoint that is there has its own."""
        try:
            kept = {one: kept for one, kept in self.hashes().items() if int(one) in self._rounds}
        except BadInput:
            kept = {}
        with storing(self.folder):
            write_record(self.hashes_path, kept | {str(done): hashes})

    def keep(self, state: Any, done: int, identity: Mapping[str, Any], thin: bool = True) -> None:
        """Writes a checkpoint for all sites to go back to. With `thin`, keeps only the first and the last two of
        these."""
        folder = self.folder / _KEPT
        with storing(self.folder):
            folder.mkdir(exist_ok=True)
            save_checkpoint(folder / _name(done), state, done, identity)
        self.landmarks = sorted({*self.landmarks, done})
        for one in self.landmarks[1:-2] if thin else ():
            (folder / _name(one)).unlink(missing_ok=True)
            self.landmarks.remove(one)

    def save(self, state: Any, done: int, identity: Mapping[str, Any], reach: int, pinned: int | None = None) -> int:
        """Writes a checkpoint and removes old ones. Keeps the last two, and one at least `reach` rounds back, which is
        as far as the other sites may ask this node to go back, and all from `pinned` on.

        Returns:
            The round from which on the journal is needed.
        """
        with storing(self.folder):
            save_checkpoint(self.path(done), state, done, identity)
        self._rounds = sorted({*self._rounds, done})
        for damaged in self.folder.glob("*.damaged"):
            if damaged.is_file():
                damaged.unlink(missing_ok=True)
        far = self.at_or_before(done - reach)
        if far is None:
            return 0  # the journal is needed from the start of this generation
        needed = min(self._rounds[-_AT_LEAST_KEPT:][0], far)
        if pinned is not None:
            needed = min(needed, self.at_or_before(pinned) or 0)
        if not needed:
            return 0
        for one in [one for one in self._rounds if one < needed]:
            self.path(one).unlink(missing_ok=True)
            self._rounds.remove(one)
        self.work.drop_before(needed)
        return needed


def mark_finished(state: Path, manifest: Manifest) -> None:
    """Records that every site has its result, and of which manifest the run was."""
    write_record(state / FINISHED, _run_of(manifest))


def is_finished(state: Path, manifest: Manifest) -> bool:
    """Returns whether a folder has the result of this manifest. Refuses that of another one."""
    if not (state / FINISHED).exists():
        return False
    stays = (
        f"A finished run cannot be extended, and its result stays in {state / RESULT}. For another run, let the "
        "founder found a new mesh (fairmesh mesh init), and make a new folder and key for this site there (fairmesh "
        "mesh key)"
    )
    advice = f"it says of which manifest the finished run in {state} is. {stays}"
    now, before = _run_of(manifest), read_record(state / FINISHED, advice)
    unlike = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    if unlike:
        differs = f"of another manifest, which differs in: {', '.join(unlike)}"
        raise BadInput(f"{state} holds a finished run {differs}. {stays}")
    return True


def _run_of(manifest: Manifest) -> dict[str, Any]:
    """Returns what makes two manifests those of one run: all but the day on which they were signed."""
    table = manifest.table()
    files = table.pop("files")
    return {key: value for key, value in table.items() if key != "signed"} | files


def forget_run(state: Path) -> None:
    """Removes what only a run in progress needs: checkpoints, journals, the kept models, and the metrics so far, which
    are in the result too. Results, the log, decisions and what was put aside stay."""
    for pattern in ("generation-*", "unconfirmed-*", BEST, PROGRESS, ALONE):
        for folder in state.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
    for file in (TABLE, START):
        (state / file).unlink(missing_ok=True)


def _name(done: int) -> str:
    return f"checkpoint-{done:012d}.safetensors"


def put_aside(folder: Path, generation: int) -> None:
    """Renames a result, because its generation has ended and the next one will write its own. Nothing is deleted."""
    if folder.exists():
        aside = folder.with_name(f"{folder.name}-generation-{generation}")
        os.replace(folder, _unused(folder.with_name(f"{aside.name}-2")) if aside.exists() else aside)


def _unused(path: Path) -> Path:
    """Returns a path that ends with a number, or with the next higher one that nothing has."""
    stem, _, first = path.name.rpartition("-")
    numbered = (path.with_name(f"{stem}-{number}") for number in itertools.count(int(first)))
    return next(candidate for candidate in numbered if not candidate.exists())


@contextmanager
def new_folder(folder: Path) -> Iterator[RunFolder]:
    """Gives a folder to write into, which replaces the one of this name once it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    with storing(folder.parent):
        shutil.rmtree(partial, ignore_errors=True)
        yield RunFolder(partial, resume=False)
        put_in_place(partial, folder)


def put_in_place(partial: Path, final: Path) -> None:
    """Renames a complete folder to its final name, so that no incomplete folder ever has that name."""
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
