"""Tasks in several processes."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future, as_completed
from typing import TypeVar

Task = TypeVar("Task")
Made = TypeVar("Made")


def as_they_finish(pool: Executor, futures: Mapping[Future[Made], Task]) -> Iterator[tuple[Task, Made]]:
    """Yields each task with its result as soon as it is known. If the caller stops, tasks that wait are dropped."""
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
