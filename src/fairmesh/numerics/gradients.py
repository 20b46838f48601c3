"""Gradients by torch.func, without an import that takes as long as half of `import torch`."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class _NotImported(ModuleType):
    """Stands for TorchDynamo where it was never imported: then compiled autograd is off. All else imports it."""

    compiled_autograd = SimpleNamespace(_disable=nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _without_dynamo() -> Iterator[None]:
    """Within it, `torch.func` does not import TorchDynamo only to switch off its compiled autograd."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    stand_in = _NotImported("torch._dynamo")
    torch.__dict__["_dynamo"] = stand_in
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is stand_in:  # else it was imported in the meantime
            del torch.__dict__["_dynamo"]


def grad_and_value(function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Returns what `torch.func.grad_and_value` gives."""
    differentiated = torch.func.grad_and_value(function, has_aux=has_aux)

    def call(*arguments: Any) -> Any:
        with _without_dynamo():
            return differentiated(*arguments)

    return call
