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
        yield lambda name, rounds: lambda done, records: None
        return
    if not sys.stderr.isatty():
        yield _plain_progress
        return
    bars = _live_bars(console(stderr=True))

    def watcher(name: str, rounds: int) -> Callable[[int, list[dict]], None]:
        bars.start()  # only now, since it is a thread, and the demo forks before
        task = bars.add_task(printable(name), total=rounds, status="")
        status, shown = [""], [0.0]

        def watch(done: int, records: list[dict]) -> None:
            if not records and time.monotonic() - shown[0] < 0.1:  # drawing may take longer than a round
                return
            status[0], shown[0] = _status(records) if records else status[0], time.monotonic()
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


def _plain_progress(name: str, rounds: int) -> Callable[[int, list[dict]], None]:
    started, tenth = time.monotonic(), max(1, rounds // 10)
    said = [-1]

    def watch(done: int, records: list[dict]) -> None:
        if records and (done // tenth > said[0] or done == rounds):
            said[0] = done // tenth
            say(f"{name}: round {done}/{rounds}, {time.monotonic() - started:.1f} s, {_status(records)}")

    return watch


def _status(records: list[dict]) -> str:
    metric = "accuracy" if "accuracy" in records[0] else "loss"
    worst, mean = (sum(record[metric][what] for record in records) / len(records) for what in ("worst", "mean"))
    if metric == "loss":
        return f"worst site's loss {worst:.4g}, mean {mean:.4g}"
    return f"worst site {100 * worst:.1f} %, mean {100 * mean:.1f} %"
