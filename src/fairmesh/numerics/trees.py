"""Tensors of the samples of a set, one or several: tuples and dictionaries of tensors that all have one length."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Tree = Any  # a Tensor, or tuples and dictionaries of them, also nested


def leaves(tree: Tree) -> list[Tensor]:
    """Returns the tensors of a tree, in a fixed order."""
    return [tree] if isinstance(tree, Tensor) else tree_leaves(tree)


def mapped(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Returns the tree with a function of each tensor, and of those at the same place of other trees."""
    return function(tree, *others) if isinstance(tree, Tensor) else tree_map(function, tree, *others)


def length(tree: Tree) -> int:
    """Returns the number of samples."""
    return len(leaves(tree)[0])


def at(tree: Tree, rows: Any) -> Tree:
    """Returns some of the samples, by an index, a slice, numbers or a mask."""
    return mapped(lambda tensor: tensor[rows], tree)


def joined(trees: Sequence[Tree]) -> Tree:
    """Returns the samples of several trees one after another."""
    first, *others = trees
    return mapped(lambda *tensors: torch.cat(tensors), first, *others)


def numbers_per_sample(tree: Tree) -> int:
    """Returns how many numbers one sample has, 1 at least."""
    return max(1, sum(tensor[0].numel() for tensor in leaves(tree)))


def nbytes(tree: Tree) -> int:
    """Returns the size of all tensors in bytes."""
    return sum(tensor.nbytes for tensor in leaves(tree))


def named(tree: Tree, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor with its name, such as inputs['mask'] or inputs[0]."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from named(part, f"{name}[{key!r}]")
    else:
        for k, part in enumerate(tree):
            yield from named(part, f"{name}[{k}]")


def form(tree: Tree, of_tensor: Callable[[Tensor], Any] = lambda t: [str(t.dtype), list(t.shape[1:])]) -> Any:
    """Returns what a function says of each tensor, by default shape and dtype of one sample, as lists and tables that
    compare and that JSON can hold."""
    if isinstance(tree, Tensor):
        return of_tensor(tree)
    if isinstance(tree, Mapping):
        return {str(key): form(part, of_tensor) for key, part in tree.items()}
    return [form(part, of_tensor) for part in tree]


def form_in_words(tree: Tree) -> str:
    """Returns shape and dtype of one sample of each tensor, for messages."""
    if isinstance(tree, Tensor):
        return f"{tuple(tree.shape[1:])} {tree.dtype}"
    return ", ".join(f"{name} {form_in_words(tensor)}" for name, tensor in named(tree, ""))


def shapes(tree: Tree) -> Any:
    """Returns the shape of one sample of each tensor, as lists and tables that JSON can hold."""
    return form(tree, lambda tensor: list(tensor.shape[1:]))
