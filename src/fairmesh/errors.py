"""The errors fairmesh raises on purpose; each message says what is wrong, where, and what to do."""


class FairmeshError(Exception):
    """Base of every error raised on purpose."""

    told_elsewhere = False  # where all processes of a run raise it, one tells


class BadInput(FairmeshError, ValueError):
    """A setting, a graph or a site's data cannot be used; the message says which and why."""


class Diverged(FairmeshError, ArithmeticError):
    """Training produced non-finite or exploding values."""


class CheckpointError(FairmeshError):
    """A checkpoint is damaged, or belongs to another experiment."""


class Interrupted(FairmeshError):
    """Training was asked to stop; its checkpoint is kept."""


class LostHost(FairmeshError):
    """Another process of the run is gone or silent; restarted, all go on from their last common checkpoint."""


def in_a_line(error: Exception) -> str:
    """Kind and first line of whatever somebody else's code raised."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
