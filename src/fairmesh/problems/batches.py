"""Batches of all hosted nodes, drawn from counter-based streams: which rows, where they are read from, their random
keys, and their weights."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fairmesh.config.ranges import Count
from fairmesh.config.tables import checked
from fairmesh.data.rows import Ahead, Reader, SampleRows
from fairmesh.numerics import random_streams, trees
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.numerics.trees import Tree
from fairmesh.problems.hosted_nodes import Division, HostedNodes
from fairmesh.problems.row_loss import as_floats

AS_FLOATS_UP_TO = 1 << 28  # bytes; a CPU keeps smaller data as floats, to save the conversion in every round

Batch = tuple[Any, ...]  # inputs, targets, the key of the model's random numbers, and weights if the rows have any
Which = tuple[str, int]  # of a round's batches
OfRounds = Callable[[Tensor], Tensor]  # rounds (k,) -> numbers of the rows of all nodes, or their seeds (k, rows)


@checked
@dataclass(frozen=True)
class Sampling:
    """Which samples a node uses for one gradient.

    Args:
        batch: Samples per batch, >= 1; not used by `order = "full"`. Default: 50.
        order: "random" draws with replacement. "shuffled" takes every sample once per epoch, in a random order that
            differs from epoch to epoch; a batch that reaches over the end of an epoch continues in the next. "cyclic"
            takes the samples in their order, "full" takes all samples of the node. Default: "random".
        batches_per_step: Batches per gradient, >= 1, whose gradients are averaged (the AD-GDA paper's oracle
            averaging). Default: 1.

    Example:
        >>> import fairmesh as fm
        >>> fm.Sampling(batch=32, order="cyclic")
        Sampling(batch=32, order='cyclic', batches_per_step=1)
    """

    batch: Count = 50
    order: Literal["random", "shuffled", "cyclic", "full"] = "random"
    batches_per_step: Count = 1


class RowSource:
    """Reads the rows of batches: here from memory.

    Args:
        rows: All rows.
        round_cache: What depends on the round alone.

    Attributes:
        streamed: Whether rows are read from streams.
        round_number: The number of the round that is computed, so that no GPU needs to be asked; None if unknown.
    """

    streamed: ClassVar[bool] = False
    round_number: int | None = None

    def __init__(self, rows: SampleRows, round_cache: RoundCache):
        self._rows, self._round_cache = rows, round_cache

    def read(self, which: Which, indices: OfRounds, seeds: OfRounds | None, round_index: Tensor) -> tuple[Tree, Tree]:
        """Returns inputs and targets of a batch.

        Args:
            which: The batch.
            indices: The numbers of its rows.
            seeds: The seeds of items that are read from a stream; None if they depend on the item alone.
            round_index: The round.
        """
        return self._rows.take(self._round_cache.at(which, indices, round_index))

    def capture(self, yes: bool) -> None:
        """Decides whether streamed batches are read from buffers on the device, which `feed` fills, so that a captured
        round can be replayed with other batches."""

    def feed(self, number: int) -> None:
        """Fills the buffers with the batches of a round."""


class StreamedRows(RowSource):
    """Rows that workers read from streams, some rounds ahead."""

    streamed = True

    def __init__(self, reader: Reader, batches: int, device: torch.device):
        self._ahead, self._device = Ahead(reader, batches), device
        self._captured = False  # whether rounds read from buffers
        self._buffers: dict[Which, tuple[Callable[[Tensor], Any], tuple[Tree, Tree]]] = {}
        self._fed_round: int | None = None  # whose batches are in the buffers

    def read(self, which: Which, indices: OfRounds, seeds: OfRounds | None, round_index: Tensor) -> tuple[Tree, Tree]:
        if which in self._buffers:
            return self._buffers[which][1]

        def wanted(rounds: Tensor) -> Tensor:
            drawn = [draw(rounds.to(self._device)).cpu() for draw in (indices, seeds) if draw is not None]
            return torch.stack(drawn, dim=1)

        number = int(round_index) if round_index.is_cpu or self.round_number is None else self.round_number
        pair = self._ahead.at(which, number, wanted)
        if self._captured:
            pair = trees.mapped(self._buffer, pair)
            self._buffers[which], self._fed_round = (wanted, pair), number
        return pair

    def capture(self, yes: bool) -> None:
        self._captured = yes
        self._buffers = {}

    def feed(self, number: int) -> None:
        if not self._captured or number == self._fed_round:
            return
        self._fed_round = number
        for which, (wanted, buffers) in self._buffers.items():
            trees.mapped(_fill, buffers, self._ahead.at(which, number, wanted))

    def _buffer(self, part: Tensor) -> Tensor:
        """Returns a tensor on the device. It is part of a larger one, since a compiler takes the value of a tensor with
        one number for a constant."""
        rows = torch.empty(len(part) + 1, *part.shape[1:], dtype=part.dtype, device=self._device)
        return rows[:-1].copy_(part)


def _fill(buffer: Tensor, part: Tensor) -> Tensor:
    return buffer.copy_(part.pin_memory() if buffer.is_cuda else part, non_blocking=True)


class Batches:
    """The batches of every round. A stack of batches has one per hosted node, as a stack of models has rows.

    Args:
        nodes: The hosted nodes.
        division: Their rows.
        calls: How many different batches an algorithm asks for in a round.
        data_device: Where rows in memory are kept.
        round_cache: Keeps what depends on the round alone, for several rounds at once.
    """

    def __init__(
        self,
        nodes: HostedNodes,
        division: Division,
        calls: int,
        data_device: torch.device,
        round_cache: RoundCache,
    ):
        self._nodes, self._division, self._sampling = nodes, division, nodes.problem.sampling
        self._calls, self.data_device, self._round_cache = calls, data_device, round_cache
        self._full = self._sampling.order == "full"
        self.repeats = 1 if self._full else self._sampling.batches_per_step
        even = division.order is None and bool((division.sizes == division.sizes.min()).all())
        self._largest, self._most_judges = int(division.sizes.max()), int(division.judges.max())
        self.padded = self._full and not even
        self.weighted = self.padded or nodes.problem.objective.subgroups is not None
        self.source = self._source()

    def _source(self) -> RowSource:
        nodes, samples = self._nodes, self._division.samples
        numbers_here = sum(len(part) * trees.numbers_per_sample(part.inputs) for part in samples)
        floats = nodes.device.type == "cpu" and numbers_here * nodes.dtype.itemsize <= AS_FLOATS_UP_TO
        change = (lambda part: as_floats(part, nodes.dtype)) if floats else None
        rows = SampleRows(samples, self.data_device, self._division.order, change)
        if rows.reader is None:
            return RowSource(rows, self._round_cache)
        return StreamedRows(rows.reader, nodes.rows, nodes.device)

    def sums(self, function: Callable[..., tuple[Tensor, ...]], round_index: Tensor, call: int) -> tuple[Tensor, ...]:
        """Returns the sums, over the batches of a call, of what a function gives for a batch.

        Args:
            function: (number of the batch, *batch) -> tensors.
            round_index: The round.
            call: Which of its calls.
        """
        of_batches = (function(number, *self.at(round_index, number, calls)) for number, calls in self._steps(call))
        return functools.reduce(lambda total, more: tuple(a + b for a, b in zip(total, more)), of_batches)

    def mean(self, function: Callable[..., tuple[Tensor, ...]], round_index: Tensor, call: int) -> tuple[Tensor, ...]:
        """Returns the mean, over the batches of a call, of what a function (*batch) gives. Arguments as of `sums`."""
        total = self.sums(lambda _, *batch: function(*batch), round_index, call)
        return total if self.repeats == 1 else tuple(part / self.repeats for part in total)

    def joined(self, function: Callable[..., Tensor], round_index: Tensor, call: int) -> Tensor:
        """Returns what a function (*batch) gives for the samples of all batches of a call: (nodes, samples, ...)."""
        return torch.cat([function(*self.at(round_index, *step)) for step in self._steps(call)], dim=1)

    def _steps(self, call: int) -> list[tuple[int, int]]:
        """Returns the number of each batch of a call, and how many batches a round has."""
        return [(call * self.repeats + k, self._calls * self.repeats) for k in range(self.repeats)]

    def of_node(self, batch: Batch, row: int, count: int) -> tuple[Tree, Tree]:
        """Returns inputs and targets of one hosted node, whose place in the stack is `row`, without what fills up its
        batch to more than the `count` rows that it trains on."""
        own = slice(count if self._full else None)
        return trees.at(trees.at(batch[0], row), own), trees.at(trees.at(batch[1], row), own)

    def indices(self, rounds: Tensor, number: int, calls: int) -> Tensor:
        """Returns the index, among all sites' samples, of each sample in a batch: (rounds, replicas, nodes, batch).

        Args:
            rounds: The rounds (rounds,).
            number: Which of the batches of a round.
            calls: How many batches the round has, which is `calls` of the class times `repeats`.
        """
        sampling, device = self._sampling, self._nodes.device
        starts, sizes = self._division.starts, self._division.sizes_in(rounds[:, None, None, None])
        if self._full:
            steps = torch.arange(self._largest, device=device).expand(len(rounds), 1, 1, -1)
            return starts + steps % sizes
        if sampling.order == "random":
            key = self._nodes.keys(f"batch {number}", rounds.unsqueeze(-1))
            return starts + random_streams.integers(key, sampling.batch, sizes)
        first = (rounds * calls + number) * sampling.batch
        steps = first[:, None, None, None] + torch.arange(sampling.batch, device=device)
        if sampling.order == "cyclic":
            return starts + steps % sizes
        streams = self._nodes.keys("epochs", 0)  # (replicas, nodes)
        epochs = random_streams.epoch_keys(streams, steps // sizes)
        return starts + random_streams.permuted(epochs, steps % sizes, sizes)

    def at(self, round_index: Tensor, number: int, calls: int) -> Batch:
        """Returns a batch; the last two arguments as of `indices`."""
        nodes = self._nodes

        def keys(rounds: Tensor) -> Tensor:
            return nodes.keys(f"model {number}", rounds.unsqueeze(-1)).flatten(1)

        def seeds(rounds: Tensor) -> Tensor:
            key = nodes.keys(f"items {number}", rounds.unsqueeze(-1))
            drawn = random_streams.bits(key, self.indices(rounds[:1], number, calls).shape[-1])
            return drawn.flatten(1).to(torch.int64) & 0xFFFFFFFF

        key = self._round_cache.at(("model", number), keys, round_index)
        inputs, targets = self._read(("batch", number), self._rows_in(number, calls), seeds, round_index)
        augmenter = nodes.problem.augmenter
        if augmenter is not None:
            inputs, targets = augmenter.beforehand(inputs, targets, key)
        return (inputs, targets, key, *self._weights(inputs, round_index))

    def _weights(self, inputs: Tree, round_index: Tensor) -> tuple[Tensor, ...]:
        """Returns the weight of every sample, if they have any: zero for those that only fill up a full batch."""
        dtype, device = self._nodes.dtype, self._nodes.device
        if self.padded:
            steps, sizes = torch.arange(self._largest, device=device), self._division.sizes_in(round_index)
            return (((steps < sizes).to(dtype) / sizes).flatten(0, 1),)
        if self.weighted:
            rows, count = trees.leaves(inputs)[0].shape[:2]
            return (torch.full((rows, count), 1.0 / count, dtype=dtype, device=device),)
        return ()

    def judging(self, round_index: Tensor, call: int) -> tuple[Tree, Tree, Tensor]:
        """Returns inputs, targets and weights of the rows apart that judge each hosted node: (nodes, rows, ...)."""
        nodes, counts = self._nodes, self._division.judges
        inputs, targets = self._read(("held-out", call), self._judging_rows(call), None, round_index)
        if self._full:
            steps = torch.arange(self._most_judges, device=nodes.device)
            return inputs, targets, ((steps < counts).to(nodes.dtype) / counts).flatten(0, 1)
        count = self._sampling.batch
        weights = torch.full((1, count), 1.0 / count, dtype=nodes.dtype, device=nodes.device)
        return inputs, targets, weights.expand(nodes.rows, -1)

    def of_rows(self, numbers: Tensor, round_index: Tensor, number: int) -> Tensor:
        """Returns the numbers of the rows of a batch: (nodes, rows).

        Args:
            numbers: One number per row of all sites, in the order of the division, on the data's device.
            round_index: The round.
            number: Which of the batches of the round.
        """
        indices = self._rows_in(number, self._calls * self.repeats)
        return self._chosen(numbers, self._round_cache.at(("batch", number), indices, round_index))

    def of_judging_rows(self, numbers: Tensor, round_index: Tensor, call: int) -> Tensor:
        """Returns the same for the rows of a call that judge, as in `judging`."""
        return self._chosen(numbers, self._round_cache.at(("held-out", call), self._judging_rows(call), round_index))

    def _chosen(self, numbers: Tensor, rows: Tensor) -> Tensor:
        chosen = numbers.index_select(0, rows)
        return chosen.to(self._nodes.device, non_blocking=True).unflatten(0, (self._nodes.rows, -1))

    def _rows_in(self, number: int, calls: int) -> OfRounds:
        return lambda rounds: self.indices(rounds, number, calls).flatten(1).to(self.data_device)

    def _judging_rows(self, call: int) -> OfRounds:
        first, counts = self._division.judged_from, self._division.judges

        def indices(rounds: Tensor) -> Tensor:
            if self._full:
                steps = torch.arange(self._most_judges, device=self._nodes.device)
                chosen = (first + steps % counts).expand(len(rounds), -1, -1, -1)
            else:
                key = self._nodes.keys(f"held-out {call}", rounds.unsqueeze(-1))
                chosen = first + random_streams.integers(key, self._sampling.batch, counts)
            return chosen.flatten(1).to(self.data_device)

        return indices

    def _read(self, which: Which, indices: OfRounds, seeds: OfRounds | None, round_index: Tensor) -> tuple[Tree, Tree]:
        """Returns inputs and targets of a stack of batches, as the model sees them: (nodes, rows, ...)."""
        nodes, shape = self._nodes, (self._nodes.rows, -1)

        def seen(part: Tensor) -> Tensor:
            return as_floats(part.to(nodes.device, non_blocking=True), nodes.dtype).unflatten(0, shape)

        inputs, targets = self.source.read(which, indices, seeds, round_index)
        return trees.mapped(seen, inputs), trees.mapped(seen, targets)
