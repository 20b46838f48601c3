"""Where batches are read from: rows in memory, or streams that are read ahead."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fairmesh.data.rows import Ahead, Reader, SampleRows
from fairmesh.numerics import trees
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.numerics.trees import Tree

Which = tuple[str, int]  # of a round's batches
OfRounds = Callable[[Tensor], Tensor]  # rounds (k,) -> numbers of the rows of all nodes, or their seeds (k, rows)


class RowSource(ABC):
    """Reads the rows of a batch.

    Attributes:
        streamed: Whether rows are read from streams.
        round_number: The number of the round that is computed, so that no GPU needs to be asked; None if unknown.
    """

    streamed: ClassVar[bool] = False
    round_number: int | None = None

    @abstractmethod
    def read(self, which: Which, indices: OfRounds, seeds: OfRounds | None, round_index: Tensor) -> tuple[Tree, Tree]:
        """Returns inputs and targets of a batch.

        Args:
            which: The batch.
            indices: The numbers of its rows.
            seeds: The seeds of items that are read from a stream; None if they depend on the item alone.
            round_index: The round.
        """

    def capture(self, yes: bool) -> None:  # noqa: B027
        """Decides whether streamed batches are read from buffers on the device, which `feed` fills, so that a captured
        round can be replayed with other batches."""

    def feed(self, number: int) -> None:  # noqa: B027
        """Fills the buffers with the batches of a round."""


class RowsInMemory(RowSource):
    """Rows in memory."""

    def __init__(self, rows: SampleRows, round_cache: RoundCache):
        self._rows, self._round_cache = rows, round_cache

    def read(self, which: Which, indices: OfRounds, seeds: OfRounds | None, round_index: Tensor) -> tuple[Tree, Tree]:
        return self._rows.take(self._round_cache.at(which, indices, round_index))


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

        def wanted(rounds: Tensor) -> tuple[Tensor, Tensor | None]:
            rounds = rounds.to(self._device)
            return indices(rounds), None if seeds is None else seeds(rounds)

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
