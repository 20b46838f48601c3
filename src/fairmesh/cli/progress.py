"""Shows the progress of a run on a terminal or in a log."""

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fairmesh.cli.terminal import console, say
from fairmesh.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_WIDE = 105  # columns from which there is room for the time spent; below, a spinner moves instead


@contextmanager
def progress(quiet: bool):
    """Yields a function that makes a watcher for a run: live bars on a terminal, a line at each tenth elsewhere, and
    nothing if quiet."""
    if quiet:
        yield lambda name, rounds: lambda done, measured: None
        return
    if not sys.stderr.isatty():
        yield _plain_progress
        return
    bars = _live_bars(console(stderr=True))

    def watcher(name: str, rounds: int) -> Callable[[int, str], None]:
        bars.start()  # only now, since it is a thread, and the demo forks before
        task = bars.add_task(printable(name), total=rounds, status="")
        status, shown = [""], [0.0]

        def watch(done: int, measured: str) -> None:
            if not measured and time.monotonic() - shown[0] < 0.1:  # drawing may take longer than a round
                return
            status[0], shown[0] = measured or status[0], time.monotonic()
            bars.update(task, completed=done, status=status[0])

        return watch

    try:
        yield watcher
    finally:
        bars.stop()


def _live_bars(screen: "Console") -> "Progress":
    """Returns bars that fit the screen. If it is narrow, the bar itself shrinks and the numbers stay whole."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    whole = Column(no_wrap=True)
    wide = screen.width >= _WIDE
    moving = (TextColumn("rounds"), TimeElapsedColumn(table_column=whole)) if wide else (SpinnerColumn(),)
    columns = (
        TextColumn("{task.description:<10}", markup=False), BarColumn(),
        MofNCompleteColumn(table_column=whole), *moving,
        TextColumn("left"), TimeRemainingColumn(compact=not wide, table_column=whole),
        TextColumn("{task.fields[status]}"),
    )  # fmt: skip
    return Progress(*columns, console=screen)


def _plain_progress(name: str, rounds: int) -> Callable[[int, str], None]:
    started, tenth = time.monotonic(), max(1, rounds // 10)
    said = [-1]

    def watch(done: int, measured: str) -> None:
        if measured and (done // tenth > said[0] or done == rounds):
            said[0] = done // tenth
            say(f"{name}: round {done}/{rounds}, {time.monotonic() - started:.1f} s, {measured}")

    return watch
