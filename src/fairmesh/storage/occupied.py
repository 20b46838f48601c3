"""What a folder holds, by the names of its files. It needs no torch, so that a command can refuse a folder at once."""

import os
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from fairmesh.errors import BadInput, refusing

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
EXPERIMENT = "experiment.toml"
DIVERGED = "diverged.txt"  # why the run ended, if it diverged
ALONE = "alone"  # the folder of models that sites train alone, before the run or for its references
PERSONAL = "personal"  # the folder of a site's own model, next to that of the result between organisations
JOB = "launched-by"  # the job that began the run, while it runs, so that its restarts resume by themselves
STATUS = "status.json"  # how far the run is, until it has finished
NO_RESULTS = frozenset((EXPERIMENT, JOB, ALONE, STATUS))  # of a run that was stopped before its first round


def shard(path: Path, now: object, rank: object) -> Path:
    """Returns the path of a process's part of the checkpoint at `path`."""
    return path.with_stem(f"{path.stem}-{now}-{rank}")


def is_shard(path: Path, name: str) -> bool:
    """Returns whether a file of this name is another process's part of the checkpoint at `path`."""
    return Path(name).match(shard(path, "[0-9]*", "[0-9]*").name)


def is_run(path: Path) -> bool:
    """Returns whether a folder has the files of a run, finished or not."""
    return any((path / name).exists() for name in (METRICS, SUMMARY, CHECKPOINT, ALONE))


def has_diverged(path: Path) -> bool:
    """Returns whether a folder has a run that diverged."""
    return is_run(path) and (path / DIVERGED).exists()


def is_occupied(path: Path, *, resume: bool, own: AbstractSet[str] = NO_RESULTS) -> bool:
    """Returns whether a folder has a run to resume.

    Args:
        path: The folder, which need not be there.
        resume: Whether the run in it is to be resumed.
        own: The names of files that alone are no results.

    Raises:
        BadInput: There is something else, or something that is not to be resumed.
    """
    names = {inside.name for inside in path.iterdir()} - own if path.is_dir() else set()
    if all(is_shard(path / CHECKPOINT, name) for name in names):
        return False
    begun = (path / CHECKPOINT).exists()
    if not resume:
        hints = ["resume it (--resume)"] if begun else []
        hints += ["set it aside (--overwrite)"] if is_run(path) else []
        hint = ", ".join([*hints, "choose another (--out)"])
        raise BadInput(f"the run folder {path} is not empty; {hint} or remove it")
    if not begun:
        raise BadInput(f"the run folder {path} has no {CHECKPOINT} to resume from; choose another folder")
    return True


def refuse_unusable(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuses a folder that a run would refuse, before anything is imported or started for it. What cannot be read is
    left to the run."""
    with suppress(OSError):
        if overwrite:
            _refuse_other_files(path.resolve())
        elif resume or not has_diverged(path):  # such a run makes room for another
            is_occupied(path, resume=resume)


def set_aside(path: str | os.PathLike, why: str = "old") -> Path | None:
    """Renames the folder of a run, so that another can have its name. Nothing is deleted.

    Args:
        path: The folder.
        why: The end of its new name. Default: "old".

    Returns:
        Its new path; None if there is no folder, or an empty one.

    Raises:
        BadInput: The folder has other files than those of a run.
    """
    path = Path(path).resolve()
    if _is_free(path):
        return None
    _refuse_other_files(path)
    names = (f"{path.name}-{why}{f'-{k}' if k > 1 else ''}" for k in range(1, 10_000))
    free = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    with refusing(f"cannot rename {path} to {free.name}", OSError):
        path.rename(free)
    return free


def _is_free(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and all(inside.name == STATUS for inside in path.iterdir()))


def _refuse_other_files(path: Path) -> None:
    if not _is_free(path) and not is_run(path):
        raise BadInput(f"{path} is not the folder of a run, so it is not overwritten; choose another folder")
