"""Ports that belong to this process alone."""

import os
from collections.abc import Iterable
from typing import Protocol


class _Socket(Protocol):
    def fileno(self) -> int: ...


_own: list[_Socket] = []


def keep_from_forks(sockets: Iterable[_Socket]) -> None:
    """Closes listening sockets in every process that this one forks from now on. A port is taken as long as any process
    holds it: workers that read data outlive a killed node by a moment, and the node could not start again."""
    _own[:] = [*(one for one in _own if one.fileno() >= 0), *sockets]


def _let_go() -> None:
    if not _own:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for one in _own:
        if one.fileno() >= 0:  # it is replaced, not closed, since the object will close its number once more
            os.dup2(nothing, one.fileno(), inheritable=False)
    os.close(nothing)
    _own.clear()


os.register_at_fork(after_in_child=_let_go)
