"""Leaves out the libraries that compute, for commands that only read settings.

To say what an algorithm sends, a command builds the algorithm with its settings, and the algorithm's module names torch
in annotations. To import torch takes four times as long as everything else that the command does. So the names of these
libraries become stand-ins, as in Sphinx's `autodoc_mock_imports`. A stand-in can be annotated with, called as a
decorator and derived from. To decide by its truth or its order, or to print it, is an error. `==` compares by identity,
since `typing` compares annotations; tests/mesh/test_without_torch.py shows that no output depends on it.
"""

import gc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

LEFT_OUT = ("torch", "numpy", "scipy", "networkx")


class _StandIn:
    def __init__(self, path: str):
        self._path = path

    def __getattr__(self, name: str) -> "_StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self._path}.{name}")

    def __call__(self, *_: Any, **__: Any) -> "_StandIn":
        return self

    def __getitem__(self, _: Any) -> "_StandIn":
        return self

    def __or__(self, _: Any) -> "_StandIn":
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[()]:
        return ()

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(f"{self._path} is used by a command that leaves out {', '.join(LEFT_OUT)}")

    __bool__ = __lt__ = __gt__ = __iter__ = __len__ = __str__ = __format__ = __float__ = __index__ = _refuse


class _Module(ModuleType):
    def __getattr__(self, name: str) -> _StandIn:
        return getattr(_StandIn(self.__name__), name)


class _Finder:
    """Finds the modules of the libraries that are left out."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in LEFT_OUT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def leave_out_torch() -> None:
    """Leaves torch and what else computes out of this process for good, unless torch is imported already."""
    if "torch" not in sys.modules:
        gc.disable()  # to import modules makes no garbage, and the search for it takes a fifth of the time
        sys.meta_path.insert(0, _Finder())
