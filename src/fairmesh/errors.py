"""The errors fairmesh raises on purpose; each message says what is wrong, where, and what to do."""


class FairmeshError(Exception):
    """Base of every error raised on purpose."""


class BadInput(FairmeshError, ValueError):
    """A setting, a graph or a site's data cannot be used; the message says which and why."""


class Diverged(FairmeshError, ArithmeticError):
    """Training produced non-finite or exploding values."""


class CheckpointError(FairmeshError):
    """A checkpoint is damaged, or belongs to another experiment."""


class Interrupted(FairmeshError):
    """Training was asked to stop; its checkpoint is kept."""
