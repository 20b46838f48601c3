"""The errors that fairmesh raises on purpose. Each message says what is wrong, where, and what to do."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["BadInput", "CheckpointError", "Diverged", "FairmeshError", "Interrupted", "LostProcess", "TrainerFailed"]


class FairmeshError(Exception):
    """Base class of the errors that fairmesh raises on purpose."""

    reported_elsewhere = False  # if all processes of a run raise it, only one prints it
    exit_code = 2  # of a command that ends with it: only a person can help


class BadInput(FairmeshError, ValueError):
    """A setting, a graph or a site's data cannot be used. The message says which one and why.

    Example:
        >>> import fairmesh as fm
        >>> fm.compressors.Quantize(bits=0)
        Traceback (most recent call last):
        ...
        fairmesh.errors.BadInput: bits must lie in [1, 16], got 0
    """


class MissingPackage(BadInput):
    """A package that only some features need is not installed. The message says how to install it."""


class Diverged(FairmeshError, ArithmeticError):
    """Training produced values that are not finite or that exploded. The message says which step size to lower."""


class CheckpointError(FairmeshError):
    """A checkpoint is damaged, or belongs to another experiment.

    `what` is the message without the advice, since a node of a mesh needs another one."""

    def __init__(self, what: str, advice: str = ""):
        super().__init__(f"{what}; {advice}" if advice else what)
        self.what = what


class Interrupted(FairmeshError):
    """Training was asked to stop, by Ctrl-C or SIGTERM. Its checkpoint is kept."""

    exit_code = 130


class LostProcess(FairmeshError):
    """Another process of the run is gone or silent. After a restart, all continue from their last common checkpoint."""

    exit_code = 1


class TrainerFailed(FairmeshError):
    """A training function of the user's own (`fm.trainers.LocalTrainer`) raised, or left a model that cannot be used.

    The message names the site and the round. Finished rounds are kept."""


_EXTRAS = {  # extra of pyproject.toml -> what its packages are needed for
    "plot": "plots need matplotlib",
    "images": "image files need pillow",
    "parquet": "parquet tables need pyarrow",
    "coos7": "COOS7's HDF5 files need h5py",
    "export": "ONNX files need onnx, onnxscript and onnxruntime",
    "hugging-face": "Hugging Face's Trainer needs transformers and accelerate",
    "lightning": "Lightning's Trainer needs lightning",
    "tensorboard": "TensorBoard's files need tensorboard",
    "mlflow": "MLflow needs mlflow-skinny, sqlalchemy and alembic",
    "wandb": "Weights & Biases needs wandb",
    "lora": "LoRA needs peft and transformers",
    "mesh": "training between organisations needs cryptography and prometheus-client",
    "nvflare": "jobs of NVFlare need nvflare 2.9",
    "privacy": "private training needs dp-accounting and cryptography",
}


@contextmanager
def optional(extra: str) -> Iterator[None]:
    """Guards the imports of an extra's packages, so that a missing one is reported with the command that installs it.

    Args:
        extra: the extra of pyproject.toml that installs the packages, such as "plot".

    Raises:
        MissingPackage: If an import inside the `with` block finds no such package.

    Example:
        >>> with optional("plot"):
        ...     import no_such_package
        Traceback (most recent call last):
        ...
        fairmesh.errors.MissingPackage: plots need matplotlib: pip install 'fairmesh[plot]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackage(f"{_EXTRAS[extra]}: pip install 'fairmesh[{extra}]'") from error


@contextmanager
def refusing(what: str, *kinds: type[BaseException], advice: str = "") -> Iterator[None]:
    """Turns errors inside into BadInput, which says what cannot be done, why, and what to do instead.

    Args:
        what: What cannot be done, such as "cannot read rows.csv".
        kinds: The kinds of errors. Default: all, as of a user's own code, which may raise anything.
        advice: What to do. Default: "".

    Raises:
        BadInput: If there is such an error inside. Errors that fairmesh itself raises stay as they are.

    Example:
        >>> with refusing("cannot read rows.csv", OSError, advice="give another file"):
        ...     raise FileNotFoundError(2, "No such file or directory")
        Traceback (most recent call last):
        ...
        fairmesh.errors.BadInput: cannot read rows.csv: No such file or directory; give another file
    """
    try:
        yield
    except FairmeshError:
        raise
    except kinds or (Exception,) as error:  # noqa: B030
        reason = error.strerror if isinstance(error, OSError) and error.strerror else in_a_line(error)
        raise BadInput(f"{what}: {reason}{advice and f'; {advice}'}") from error


def in_a_line(error: BaseException) -> str:
    """Returns the kind and the first line of an error that other code raised."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def printable(text: str) -> str:
    """Returns a text as a terminal may show it, whoever wrote it: control characters, which can move the cursor, change
    the window's title or turn the direction of writing, become question marks. Lines stay lines; those after the first
    are indented, so that no part of a text looks like another message."""
    return "\n  ".join("".join(c if c.isprintable() else "?" for c in line) for line in text.split("\n"))


def listed(things: Iterable[object], at_most: int = 8) -> str:
    """Returns the first few of some things in words, and how many more there are."""
    names = [str(thing) for thing in things]
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "")


def counted(count: int, noun: str) -> str:
    """Returns how many of something there are, in words."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def in_bytes(count: float) -> str:
    """Returns a number of bytes in words, such as "18.2 MB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:,.0f} {unit}"
    return counted(int(count), "byte")


def named(site: str) -> str:
    """Returns the name of a site in a sentence."""
    return site if site.startswith("site") else f"site {site}"


def duration(seconds: float) -> str:
    """Returns a length of time in words, such as "12 minutes". A negative one, by a clock that was set, counts as 0."""
    if seconds > 2 * 365 * 86400.0:
        return "more than two years"
    for unit, size in (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0)):
        if seconds >= 2 * size:
            return counted(round(seconds / size), unit)
    return counted(max(0, round(seconds)), "second")


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns a suggestion for a mistyped word, or the list of known words."""
    known = sorted(known)
    return suggestion(word, known) or f"; known: {', '.join(known) or 'none'}"


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns a suggestion for a mistyped word; nothing if no known word is close to it."""
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
