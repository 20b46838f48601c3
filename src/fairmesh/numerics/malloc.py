"""Lets a CPU run reuse freed memory. By default, glibc returns large blocks to the system when they are freed, and the
system clears every page of the next block. For a stack of models that costs more than the arithmetic on it."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt's names for them
_USUAL_TRIM, _USUAL_MMAP = 128 * 1024, 65536
_LARGE = 2**31 - 1
# glibc, while this process keeps freed memory. It then takes more, since blocks leave gaps.
libraries: list[ctypes.CDLL] = []


@contextmanager
def reused() -> Iterator[None]:
    """Keeps freed memory in the process while it is open. Afterwards, free memory is returned and glibc has its usual
    thresholds again, which no longer adapt. Without glibc it does nothing."""
    try:
        library = ctypes.CDLL(None)
        tune, _ = library.mallopt, library.malloc_trim
    except (OSError, AttributeError, TypeError):
        yield
        return
    tune(_MMAP_MAX, 0)
    tune(_TRIM_THRESHOLD, _LARGE)
    libraries.append(library)
    try:
        yield
    finally:
        give_back()


def give_back() -> None:
    """Ends `reused`, also before its end: what is free is returned, and so is what will be freed."""
    for library in libraries:
        library.mallopt(_MMAP_MAX, _USUAL_MMAP)
        library.mallopt(_TRIM_THRESHOLD, _USUAL_TRIM)
        library.malloc_trim(0)
    libraries.clear()
