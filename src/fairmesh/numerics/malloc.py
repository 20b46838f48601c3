"""Memory that a CPU run reuses: glibc hands large blocks back to the system as soon as they are freed, and the system
clears every page of the next one anew, which for a stack of models costs more than the arithmetic on it."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt's names for them
_USUAL_TRIM, _USUAL_MMAP = 128 * 1024, 65536
_LARGE = 2**31 - 1


@contextmanager
def reused() -> Iterator[None]:
    """While it is open, freed memory stays with the process; afterwards what is free is given back, and glibc keeps its
    usual thresholds, which from then on no longer adapt. Elsewhere than with glibc nothing changes."""
    try:
        library = ctypes.CDLL(None)
        tune, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError, TypeError):
        yield
        return
    tune(_MMAP_MAX, 0)
    tune(_TRIM_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        tune(_MMAP_MAX, _USUAL_MMAP)
        tune(_TRIM_THRESHOLD, _USUAL_TRIM)
        trim(0)
