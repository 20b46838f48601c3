"""The rows of several sets as one, gathered by number: copied next to each other if they are few, else left where they
are, or read from streams."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fairmesh.data.samples import Samples
from fairmesh.data.streams import Held, Pair, Part, Workers, joined
from fairmesh.numerics import trees
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.numerics.trees import Tree

COPIED_UP_TO = 1 << 28  # bytes; larger data in main memory stays where it is, such as in a file that is mapped
NO_SEEDS = torch.zeros(0, dtype=torch.int64)
_AT_ONCE = 32  # rows that one worker reads at a time in an evaluation


def stays_apart(sets: Sequence[Tree], device: torch.device) -> bool:
    """Returns whether sets are too large to be copied next to each other on a device."""
    return device.type == "cpu" and sum(map(trees.nbytes, sets)) > COPIED_UP_TO


class _Numbering:
    """The rows of several sets, numbered one after another.

    Args:
        sizes: How many rows each set has.
        order: The number of the row that stands at each place; None for their own order.
    """

    def __init__(self, sizes: Sequence[int], order: Tensor | None):
        self._sizes = torch.tensor(sizes)
        self._ends = self._sizes.cumsum(0)
        self._order = torch.arange(int(self._sizes.sum())) if order is None else order

    def places(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Returns for each row the set that it belongs to, and its number there."""
        chosen = self._order[chosen]
        owners = torch.bucketize(chosen, self._ends, right=True)
        return owners, chosen - (self._ends - self._sizes)[owners]


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
        self._apart = list(sets) if stays_apart(sets, device) else []
        if self._apart:
            self._numbering = _Numbering([trees.length(tree) for tree in sets], order)
            return
        whole = trees.joined(sets)
        whole = whole if order is None else trees.at(whole, order)
        self._whole = trees.mapped(lambda part: (change(part) if change else part).to(device), whole)

    def take(self, chosen: Tensor) -> Tree:
        """Returns rows by their numbers (count,), on the device where the data is kept."""
        if not self._apart:
            return trees.mapped(lambda part: part.index_select(0, chosen), self._whole)
        owners, rows = self._numbering.places(chosen)
        parts, places = [], []
        for k in owners.unique().tolist():
            place = (owners == k).nonzero().flatten()
            parts.append(trees.at(self._apart[k], rows[place]))
            places.append(place)
        return trees.at(trees.joined(parts), torch.cat(places).argsort())

    def between(self, start: int, stop: int) -> Tree:
        """Returns neighbouring rows, from `start` to `stop` - 1. Rows apart are copied: a model may change its inputs
        in place."""
        if self._apart:
            return self.take(torch.arange(start, stop))
        return trees.at(self._whole, slice(start, stop))


class SampleRows:
    """Inputs and targets of several sets, numbered one after another. If a set is a stream, rows are read when they are
    asked for.

    Args:
        sets: The sets.
        device: Where those in memory are kept.
        order: As for `Rows`. Default: None.
        change: What is done with each tensor of inputs that is copied. Default: None, nothing.
    """

    def __init__(
        self,
        sets: Sequence[Samples],
        device: torch.device,
        order: Tensor | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ):
        for samples in sets:
            samples.refuse_sealed()
        self.numbers_per_sample = trees.numbers_per_sample(sets[0].inputs)
        self.reader = Reader(sets, order) if any(samples.stream for samples in sets) else None
        if not self.reader:
            self._inputs = Rows([samples.inputs for samples in sets], device, order, change)
            self._targets = Rows([samples.targets for samples in sets], device, order)

    def take(self, chosen: Tensor) -> Pair:
        """Returns rows by their numbers (count,)."""
        if self.reader:
            return self.reader.ask(chosen, len(chosen))()
        return self._inputs.take(chosen), self._targets.take(chosen)

    def chunks(self, start: int, stop: int, size: int) -> Iterator[tuple[slice, Pair]]:
        """Yields the rows from `start` to `stop` - 1, at most `size` at once, with their places."""
        places = [slice(at, min(at + size, stop)) for at in range(start, stop, size)]
        if not self.reader:
            for at in places:
                yield at, (self._inputs.between(at.start, at.stop), self._targets.between(at.start, at.stop))
            return
        asked: deque[Callable[[], Pair]] = deque()
        for k, at in enumerate(places):
            for ahead in places[k + len(asked) : k + 1 + self.reader.ahead]:
                asked.append(self.reader.ask(torch.arange(ahead.start, ahead.stop), _AT_ONCE))
            yield at, asked.popleft()()


class Reader:
    """Reads rows of several sets, of which some are streams, with the workers that the streams ask for.

    Args:
        sets: The sets.
        order: As for `Rows`. Default: None.
    """

    def __init__(self, sets: Sequence[Samples], order: Tensor | None = None):
        self._numbering = _Numbering([len(samples) for samples in sets], order)
        sources = [samples.stream.source for samples in sets if samples.stream]
        self._count = max(source.workers for source in sources)
        self.ahead = max(source.prefetch for source in sources) if self._count else 0  # rounds
        self._workers = Workers(
            [samples.stream or Held(samples.inputs, samples.targets) for samples in sets], self._count
        )

    def ask(self, chosen: Tensor, together: int, seeds: Tensor = NO_SEEDS) -> Callable[[], Pair]:
        """Asks for rows, and returns a function that waits for them. Workers begin to read at once.

        Args:
            chosen: Their numbers (count,).
            together: How many of them become a batch together.
            seeds: A seed for each, (count,); none for those that depend on the item alone. Default: none.
        """
        owners, rows = self._numbering.places(chosen)
        parts: list[Part] = []
        for start in range(0, len(chosen), together):
            of_sets, counts = owners[start : start + together].unique_consecutive(return_counts=True)
            for k, count in zip(of_sets.tolist(), counts.tolist()):
                part = slice(start, start + count)
                parts.append((k, rows[part].tolist(), seeds[part].tolist()))
                start += count
        # As few messages as keep all workers busy: one takes about a millisecond.
        each = -(-len(parts) // max(1, -(-self._count // max(1, self.ahead))))
        waits = [self._workers.ask(parts[k : k + each]) for k in range(0, len(parts), each)]
        return lambda: joined([wait() for wait in waits])


class Ahead:
    """Batches of rounds that are read before their round comes.

    Args:
        reader: Who reads.
        batches: How many equal batches a request consists of, one for each node.
    """

    def __init__(self, reader: Reader, batches: int):
        self._reader, self._batches = reader, batches
        self._asked: dict[tuple[Any, int], Callable[[], Pair]] = {}
        self._drawn = RoundCache()
        self._last: dict[Any, tuple[int, Pair | None]] = {}
        self._repeated: set[Any] = set()  # batches that are asked for more than once in a round

    def at(self, what: Any, number: int, wanted: Callable[[Tensor], Tensor]) -> Pair:
        """Returns the batch of a round, and has those of the next rounds read.

        Args:
            what: Which of the batches of a round.
            number: The round.
            wanted: Rounds (k,) -> (k, 1 or 2, count) on the CPU: the numbers of rows, and the seeds of their items if
                they have any.
        """
        last, pair = self._last.get(what, (-1, None))
        if last == number and pair:
            return trees.mapped(torch.clone, pair)  # a model may change its inputs in place
        if last == number:
            self._repeated.add(what)  # an algorithm that asks for a batch again does so in every round
            asked = self._ask(what, number, wanted)
        else:
            asked = self._asked.pop((what, number), None) or self._ask(what, number, wanted)
            coming = range(number + 1, number + 1 + self._reader.ahead)
            for key in [key for key in self._asked if key[0] == what and key[1] not in coming]:
                del self._asked[key]  # of rounds that a restarted run has left
            for later in coming:
                if (what, later) not in self._asked:
                    self._asked[what, later] = self._ask(what, later, wanted)
        pair = asked()
        self._last[what] = number, trees.mapped(torch.clone, pair) if what in self._repeated else None
        return pair

    def _ask(self, what: Any, number: int, wanted: Callable[[Tensor], Tensor]) -> Callable[[], Pair]:
        chosen, *seeds = self._drawn.at(what, wanted, torch.tensor(number))
        return self._reader.ask(chosen, len(chosen) // self._batches, *seeds)
