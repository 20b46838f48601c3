"""Where each parameter of a model lies in its row."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The parameters in a row of models: their names, shapes and places, in order.

    An algorithm gets it as `ctx.layout`, an optimizer as an argument.

    Args:
        names: The names of the parameters, as `named_parameters()` has them.
        shapes: Their shapes.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> sites = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))]
        >>> layout = fm.Problem(torch.nn.Linear(3, 2), sites).flat_model.layout
        >>> layout.names, layout.shapes, layout.offsets, layout.dim
        (('weight', 'bias'), ((2, 3), (2,)), (0, 6), 8)
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many numbers each parameter has."""
        return tuple(map(math.prod, self.shapes))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter begins in a row."""
        return tuple(itertools.accumulate((0, *self.sizes[:-1])))

    @cached_property
    def dim(self) -> int:
        """The length of a row."""
        return sum(self.sizes)

    def without_biases(self) -> Tensor:
        """Returns 1 for the numbers of a row that a penalty on its size is for, and 0 for biases and other vectors; 1
        for all if there is nothing but vectors."""
        vectors = [len(shape) < 2 for shape in self.shapes]
        return torch.cat([torch.full((n,), float(all(vectors) or not v)) for n, v in zip(self.sizes, vectors)])

    def __iter__(self) -> Iterator[tuple[str, tuple[int, ...], slice]]:
        """Yields name, shape and place of each parameter."""
        for name, shape, size, first in zip(self.names, self.shapes, self.sizes, self.offsets):
            yield name, shape, slice(first, first + size)
