"""The rows of several sets as one, gathered by number: copied next to each other if they are few, else left where they
are."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree

COPIED_UP_TO = 1 << 28  # bytes; larger data in main memory stays where it is, such as in a file that is mapped


def stays_apart(sets: Sequence[Tree], device: torch.device) -> bool:
    """Returns whether sets are too large to be copied next to each other on a device."""
    return device.type == "cpu" and sum(map(trees.nbytes, sets)) > COPIED_UP_TO


class Rows:
    """The rows of several sets, numbered one after another.

    Args:
        sets: Trees of tensors of the same form.
        device: Where they are kept.
        order: The number of the row that stands at each place; None for their own order. Default: None.
        change: What is done with each tensor of data that is copied. Default: None, nothing.
    """

    def __init__(
        self,
        sets: Sequence[Tree],
        device: torch.device,
        order: Tensor | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ):
        self._device, self._order = device, order
        self._apart = list(sets) if stays_apart(sets, device) else None
        if self._apart is not None:
            self._ends = torch.tensor([trees.length(one) for one in sets]).cumsum(0)
            return
        whole = trees.joined(sets)
        whole = whole if order is None else trees.at(whole, order)
        self._whole = trees.mapped(lambda part: (part if change is None else change(part)).to(device), whole)

    def take(self, chosen: Tensor) -> Tree:
        """Returns rows by their numbers (count,), on the device where the data is kept."""
        if self._apart is None:
            return trees.mapped(lambda part: part.index_select(0, chosen), self._whole)
        chosen = chosen if self._order is None else self._order[chosen]
        owner = torch.bucketize(chosen, self._ends, right=True)
        found = trees.mapped(lambda part: part.new_empty(len(chosen), *part.shape[1:]), self._apart[0])
        for k in owner.unique().tolist():
            mine = (owner == k).nonzero().flatten()
            first = int(self._ends[k]) - trees.length(self._apart[k])
            rows = chosen[mine] - first

            def fill(into: Tensor, part: Tensor, mine: Tensor = mine, rows: Tensor = rows) -> Tensor:
                return into.index_copy_(0, mine, part.index_select(0, rows))

            trees.mapped(fill, found, self._apart[k])
        return found

    def between(self, start: int, stop: int) -> Tree:
        """Returns neighbouring rows, from `start` to `stop` - 1."""
        if self._apart is None:
            return trees.at(self._whole, slice(start, stop))
        if self._order is not None:
            return self.take(torch.arange(start, stop))
        found, first = [], 0
        for one, end in zip(self._apart, self._ends.tolist()):
            if first < stop and start < end:
                found.append(trees.at(one, slice(max(start - first, 0), stop - first)))
            first = end
        return trees.joined(found)  # a copy also of one part: a model may change its inputs in place

    @property
    def numbers_per_sample(self) -> int:
        """How many numbers one row has, 1 at least."""
        return trees.numbers_per_sample(self._whole if self._apart is None else self._apart[0])
