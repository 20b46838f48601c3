"""What a node sends to each neighbour in a round, found by taking the first round of an algorithm without data.

So nobody has to describe the messages of an algorithm or of a weighting, and no description can be wrong."""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm, Round
from fairmesh.networks.base import Delivery, Part
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.numerics.layout import Layout
from fairmesh.topology.graphs import Complete

_NODES, PARAMETERS = 3, 1000  # of the round that is taken


class NoGradients:
    """An oracle whose gradients are zero and whose losses are one: what is left of an algorithm is its gossip."""

    discounts_noise = False
    subgroups = 0

    def __init__(self, rows: Tensor):
        side = math.isqrt(rows.shape[-1])
        layout = Layout(("weight", "bias"), ((side, side), (rows.shape[-1] - side**2,)))
        self.model = SimpleNamespace(layout=layout, own_dim=0)
        self.rows, self.seeds, self.dtype = rows, torch.arange(len(rows)), rows.dtype
        self.initial_rows = rows.mean(dim=-2)
        self.prior = torch.full((len(rows), 1, rows.shape[-2]), 1 / rows.shape[-2], dtype=rows.dtype)

    def initial_models(self) -> Tensor:
        return self.rows.clone()

    def initial_memory(self) -> None:
        return None

    def losses_and_gradients(self, models: Tensor, round_index: Tensor, call: int) -> tuple[Tensor, Tensor]:
        return torch.ones_like(models[..., :1]), torch.zeros_like(models)

    def weights_open(self, round_index: Tensor) -> Tensor | None:
        return None

    def losses(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        return torch.ones_like(models[..., :1])

    def errors(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        return torch.ones_like(models[..., :1])


class _Recording(MemoryNetwork):
    """A network that remembers the last message."""

    sent: Mapping[str, Part] = {}

    def exchange(self, parts: Mapping[str, Part], round_index: Tensor) -> Delivery:
        self.sent = dict(parts)
        return super().exchange(parts, round_index)


def message_of(algorithm: Algorithm, dtype: torch.dtype = torch.float32) -> Mapping[str, Part] | None:
    """Returns the parts of the message that every node sends in round 0, for a model of `PARAMETERS`
    parameters; None if the algorithm cannot take that round without data.

    Args:
        algorithm: The algorithm.
        dtype: The precision of the run. Default: torch.float32.
    """
    start = torch.linspace(-1.0, 1.0, PARAMETERS, dtype=dtype)
    oracle = cast(Any, NoGradients(start.expand(1, _NODES, -1)))
    network = _Recording(Complete().build(_NODES), dtype=dtype, count_bytes=False)
    try:
        algorithm.step(algorithm.init(oracle, network), Round(torch.tensor(0), oracle, network))
    except Exception:  # of any kind: an algorithm may need what only its own experiment has
        return None
    return network.sent
