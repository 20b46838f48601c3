"""Tasks in this process or in several."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from fairmesh.errors import FairmeshError, Interrupted

Task = TypeVar("Task")
Made = TypeVar("Made")


@contextmanager
def workers(
    carry_out: Callable[[Task], Made], jobs: int, begin: Callable[..., Any], *given: Any
) -> Iterator[Callable[[Iterable[Task]], Iterator[tuple[Task, Made | FairmeshError]]]]:
    """Yields a function from tasks to each task with its result, or its error, as soon as it is known.

    Args:
        carry_out: Carries out a task; a function that other processes can import.
        jobs: The number of processes; 1 for this one.
        begin: Called in every process before its first task.
        given: Its arguments.
    """
    attempt = partial(_attempted, carry_out)
    if jobs == 1:
        begin(*given)
        yield lambda tasks: ((task, attempt(task)) for task in tasks)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), begin, given) as pool:
        yield partial(_as_they_finish, pool, attempt)


def _attempted(carry_out: Callable[[Task], Made], task: Task) -> Made | FairmeshError:
    try:
        return carry_out(task)
    except Interrupted:
        raise
    except FairmeshError as error:
        return error


def _as_they_finish(pool: Executor, attempt: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields each task with its outcome. If the caller stops, tasks that wait are dropped."""
    futures = {pool.submit(attempt, task): task for task in tasks}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
