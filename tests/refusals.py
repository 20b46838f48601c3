"""Errors told apart by what they name (fields, values, files, suggestions), not by their wording."""

import contextlib
from collections.abc import Iterator

import pytest

import fairmesh as fm


def missing_from(text: object, *names: object) -> list[str]:
    """Returns the names that a text does not hold."""
    return [str(name) for name in names if str(name) not in str(text)]


@contextlib.contextmanager
def refused(*names: object, error: type[BaseException] = fm.BadInput) -> Iterator[pytest.ExceptionInfo]:
    """Passes if the block raises the error and its text holds all of the names."""
    with pytest.raises(error) as caught:
        yield caught
    missing = missing_from(caught.value, *names)
    assert not missing, f"{missing} not in: {caught.value}"


def refused_command(answer: tuple[int, str, str], *names: object) -> None:
    """Passes if a command has ended with exit code 2, and what it said holds all of the names."""
    code, _, said = answer
    assert (code, missing_from(said, *names)) == (2, []), said
