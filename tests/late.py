"""Packages that few tests use and that take a second or more to import."""

from typing import Any

import pytest


class late:
    """A module that is imported at its first use, so that to collect the tests does not import it. A test that uses it
    is skipped where it is not installed.

    Args:
        name: The module's name.
    """

    def __init__(self, name: str):
        self.__name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):  # by which pytest asks every name of a module whether it is a fixture
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self.__name), attribute)
