"""What a model returns, as the one tensor that the rest of fairmesh works with.

A model may return a tensor, or tuples, dictionaries and `ModelOutput`s of tensors. Built-in losses and metrics read one
tensor of it. A loss of the user's own gets all of it: it is packed into one tensor (samples, numbers), which travels
through evaluation as any other, and unpacked for the loss."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fairmesh.errors import BadInput, refusing
from fairmesh.losses.base import ModelLoss, NamedLoss
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.flat_model import as_it_is

Read = Callable[[Any], Tensor]  # what a model returns -> the tensor that predicts


def is_built_in(loss: Any) -> bool:
    """Returns whether a loss is one of fairmesh or torch, which reads one tensor."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    if isinstance(loss, NamedLoss):
        return True
    module = getattr(loss, "__module__", "") or ""
    return module.split(".")[0] == "torch" or module == "fairmesh.losses.builtin"


def logits_of(outputs: Any) -> Tensor:
    """Returns the tensor that predicts, of what a model returns: itself, or its `logits`."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise BadInput(
            f"the model returns {_in_words(outputs)}; say which tensor predicts: Problem(read=lambda outputs: ...), "
            f"such as {_example(outputs)}"
        )
    return logits


def _in_words(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"a {type(outputs).__name__} with {', '.join(map(repr, outputs)) or 'nothing in it'}"
    if isinstance(outputs, tuple | list):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return f"a {type(outputs).__name__}"


def _example(outputs: Any) -> str:
    """Returns how one of the tensors could be read."""
    if isinstance(outputs, Mapping):
        return f"outputs[{next((key for key, value in outputs.items() if isinstance(value, Tensor)), 'logits')!r}]"
    return "outputs[0]" if isinstance(outputs, tuple | list) else "outputs.predictions"


def classes_last(outputs: Tensor, targets: Tree, named: bool, built_in: bool) -> bool:
    """Returns whether the classes of each token or pixel are on the last axis of the outputs, where torch has them on
    the second.

    Args:
        outputs: The tensor that predicts.
        targets: The targets of the same samples.
        named: Whether it was the `logits` of something; those of three axes are (samples, tokens, classes).
        built_in: Whether the loss is a built-in one, which goes by the answer.

    Raises:
        BadInput: A built-in loss would have to guess.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim < 2:
        return False
    if outputs.shape[:-1] != targets.shape:
        return False
    second = outputs.shape[2:] == targets.shape[1:]
    if second and outputs.ndim == 3 and not named and built_in:
        raise BadInput(
            f"a sample has outputs {tuple(outputs.shape[1:])}, so that tokens and classes cannot be told apart; give "
            "Problem(read=lambda outputs: outputs.transpose(1, 2)) if classes are last, or read=lambda outputs: outputs"
        )
    return not second or (named and outputs.ndim == 3)


def classes_second(read: Read, outputs: Any) -> Tensor:
    """Returns the tensor that predicts, with the classes moved from the last axis to the second."""
    return read(outputs).movedim(-1, 1)


class Packing:
    """Packs what a model returns into one tensor (samples, numbers), and unpacks it.

    Args:
        example: What the model returns for some samples.
        samples: Their number.
    """

    def __init__(self, example: Any, samples: int):
        flat, self._spec = tree_flatten(tensors_of(example))
        for tensor in flat:
            if not isinstance(tensor, Tensor) or tensor.ndim == 0 or len(tensor) != samples:
                shown = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise BadInput(
                    f"the model returns {_in_words(example)}, and one of its parts is {shown} for {samples} samples; "
                    "every part must be a tensor with one row per sample. A loss that the model computes itself "
                    "is given as fm.losses.ModelLoss(function)"
                )
        self._shapes = [tensor.shape[1:] for tensor in flat]
        self._dtypes = [tensor.dtype for tensor in flat]
        self._sizes = [shape.numel() for shape in self._shapes]

    def pack(self, outputs: Any) -> Tensor:
        """Returns the parts of all samples next to each other."""
        flat = tree_flatten(tensors_of(outputs))[0]
        dtype = next((tensor.dtype for tensor in flat if tensor.is_floating_point()), torch.float32)
        return torch.cat([tensor.reshape(len(tensor), -1).to(dtype) for tensor in flat], dim=1)

    def unpack(self, packed: Tensor) -> Any:
        """Returns what the model returned."""
        parts = []
        for piece, shape, dtype in zip(packed.split(self._sizes, dim=1), self._shapes, self._dtypes):
            part = piece.reshape(len(packed), *shape)
            parts.append(part if dtype.is_floating_point else part.to(dtype))
        return tree_unflatten(parts, self._spec)


def tensors_of(outputs: Any) -> Any:
    """Returns what a model returns without entries that are no tensors, such as the cache of a language model."""
    if not isinstance(outputs, Mapping):
        return outputs
    kept = {key: part for key, part in outputs.items() if all(isinstance(leaf, Tensor) for leaf in trees.leaves(part))}
    return outputs if len(kept) == len(outputs) else type(outputs)(**kept)


@dataclass(frozen=True, eq=False)
class PackedLoss:
    """A loss of the user's own, of all that the model returns, as a function of packed outputs.

    Args:
        function: The user's loss.
        packing: How outputs are packed.
    """

    function: Callable[[Any, Any], Tensor]
    packing: Packing

    def __call__(self, outputs: Tensor, targets: Tree) -> Tensor:
        return self.function(self.packing.unpack(outputs), targets)


def read_packed(read: Read, packing: Packing, outputs: Tensor) -> Tensor:
    """Returns the tensor that predicts, of packed outputs."""
    return read(packing.unpack(outputs))


class Readings(NamedTuple):
    """How the outputs of a module are read."""

    for_loss: Read = as_it_is  # into the tensor that losses get
    predictions: Read = as_it_is  # from that into the one that predicts, which metrics read
    packing: Packing | None = None  # how a structure is packed for a loss of the user's own


def readings(whole: Any, targets: Tree, loss: Any, given: Read | None) -> Readings:
    """Returns how the outputs of a module are read.

    Args:
        whole: What the module returns for some samples.
        targets: The targets of these samples.
        loss: The loss.
        given: How the user reads outputs, or None.
    """
    read = given or logits_of
    with refusing("read fails for what the model returns"):
        predicting = read(whole)
    if not isinstance(predicting, Tensor):
        raise BadInput(f"read must return one tensor, got a {type(predicting).__name__}")
    count = trees.length(targets)
    if predicting.ndim == 0 or len(predicting) != count:
        raise BadInput(
            f"the model gives {tuple(predicting.shape)} for {count} samples; it must give one row per sample"
        )
    plain = isinstance(whole, Tensor)
    if given is None and classes_last(predicting, targets, not plain, is_built_in(loss)):
        read = functools.partial(classes_second, logits_of)
    unchanged = given is None and plain and read is logits_of
    if is_built_in(loss) or isinstance(loss, ModelLoss) or unchanged:  # none gets all outputs
        return Readings() if unchanged else Readings(read)
    if plain:
        return Readings(predictions=read)
    packing = Packing(whole, count)
    return Readings(packing.pack, functools.partial(read_packed, read, packing), packing)
