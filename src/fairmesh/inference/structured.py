"""Models with several inputs or outputs as one module of a list of tensors, as exported files hold them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fairmesh.numerics import trees
from fairmesh.problems.outputs import tensors_of
from fairmesh.problems.row_loss import as_floats

Form = Any  # [dtype, shape] of one sample of a tensor, or lists and tables of these, as `trees.form` gives them


def is_leaf(form: Form) -> bool:
    """Returns whether a form is that of one tensor."""
    return isinstance(form, list) and len(form) == 2 and isinstance(form[0], str)


def named_parts(form: Form, name: str = "") -> Iterator[tuple[str, str, list[int]]]:
    """Yields name, dtype and shape of each tensor of a form, in a fixed order."""
    if is_leaf(form):
        yield name or "inputs", form[0].removeprefix("torch."), list(form[1])
        return
    for key, part in form.items() if isinstance(form, dict) else enumerate(form):
        yield from named_parts(part, f"{name}.{key}" if name else (key if isinstance(key, str) else f"inputs.{key}"))


def _filled(form: Form, tensors: Iterator[Tensor]) -> Any:
    if is_leaf(form):
        return next(tensors)
    if isinstance(form, dict):
        return {key: _filled(part, tensors) for key, part in form.items()}
    return tuple(_filled(part, tensors) for part in form)


class StructuredPredictor(nn.Module):
    """A trained module as a function of several tensors that gives a tuple of tensors.

    Inputs are handed over as in training: a dictionary as keywords, a tuple as positional arguments, and bytes
    scaled to [0, 1]. Outputs are those of the module, without entries that are no tensors.

    Args:
        module: The trained module.
        form: What its inputs are, as `trees.form` gives it.
    """

    def __init__(self, module: nn.Module, form: Form):
        super().__init__()
        self.module, self.form = module, form
        self.eval()

    def whole(self, *inputs: Tensor) -> Any:
        """Returns all that the module returns."""
        tree = _filled(self.form, (as_floats(part, torch.float32) for part in inputs))
        if isinstance(tree, dict):
            return tensors_of(self.module(**tree))
        return tensors_of(self.module(*tree) if isinstance(tree, tuple) else self.module(tree))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors of all that the module returns.

        Args:
            inputs: The tensors in the order of `named_parts`.
        """
        return tuple(part for part in tree_leaves(self.whole(*inputs)) if isinstance(part, Tensor))

    def output_names(self, *inputs: Tensor) -> list[str]:
        """Returns the names of the outputs: keys of a dictionary, or places in a tuple."""
        with torch.no_grad():
            return [name.strip("[]'") or "outputs" for name, _ in trees.named(_plain(self.whole(*inputs)), "")]


def _plain(outputs: Any) -> Any:
    """Returns outputs as plain tuples and dictionaries."""
    if isinstance(outputs, Tensor):
        return outputs
    if hasattr(outputs, "items"):
        return {key: _plain(part) for key, part in outputs.items()}
    return tuple(_plain(part) for part in outputs)
