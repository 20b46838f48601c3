"""What a node really sends to each neighbour, found by taking the first round of an algorithm without data."""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm, Round
from fairmesh.compression.codes import Dense
from fairmesh.compression.compressors import Identity
from fairmesh.networks.base import Delivery, Part
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.numerics.layout import Layout
from fairmesh.problems.judge import Standard
from fairmesh.testing.violations import require
from fairmesh.topology.graphs import Complete

_NODES, _PARAMETERS = 3, 1000  # of the round that is taken


class NoGradients:
    """An oracle whose gradients are zero and whose losses are one: what is left of an algorithm is its gossip."""

    standard = Standard()
    problem = SimpleNamespace(trainer=None, objective=SimpleNamespace(subgroups=None))

    def __init__(self, rows: Tensor):
        side = math.isqrt(rows.shape[-1])
        layout = Layout(("weight", "bias"), ((side, side), (rows.shape[-1] - side**2,)))
        self.model = SimpleNamespace(layout=layout, own_dim=0)
        self.rows, self.seeds, self.dtype = rows, torch.arange(len(rows)), rows.dtype
        self.initial_rows = rows.mean(dim=-2)
        self.prior = torch.full((len(rows), 1, rows.shape[-2]), 1 / rows.shape[-2], dtype=rows.dtype)
        self.sizes = torch.ones(len(rows), rows.shape[-2], 1, dtype=torch.int64)
        self.all_sizes = self.sizes.transpose(-1, -2)
        self.division = SimpleNamespace(apart=torch.zeros_like(self.sizes))

    def initial_models(self) -> Tensor:
        return self.rows.clone()

    def losses_and_gradients(self, models: Tensor, round_index: Tensor, call: int) -> tuple[Tensor, Tensor]:
        return torch.ones_like(models[..., :1]), torch.zeros_like(models)

    def step_of_weights(self, step: Any, round_index: Tensor) -> Any:
        return step

    def losses(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        return torch.ones_like(models[..., :1])

    errors = losses

    def sample_losses(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        return torch.ones_like(models[..., :1])

    def sample_gradients(self, models: Tensor, round_index: Tensor, call: int) -> Tensor:
        return torch.zeros_like(models).unsqueeze(-2)


class _Recording(MemoryNetwork):
    """A network that remembers the last message."""

    sent: Mapping[str, Part] = {}

    def exchange(self, parts: Mapping[str, Part], round_index: Tensor) -> Delivery:
        self.sent = dict(parts)
        return super().exchange(parts, round_index)


def check_message(algorithm: Algorithm) -> None:
    """Checks that `message` says what the algorithm sends in its first round, if it says anything."""
    declared = algorithm.message()
    if declared is None or algorithm.needs_server:
        return
    sent, by_name = _sent_by(algorithm), {part.name: part for part in declared}
    unsent = sorted(by_name.keys() - sent.keys())
    require(not unsent, f"message() names {unsent}, but `step` sends only {sorted(sent)}")
    for name, part in sent.items():
        require(name in by_name, f"`step` sends {name!r}, but message() does not name it")
        says, does = by_name[name][1::2], (part.content, part.followed)
        require(says == does, f"message() says that content and followed of {name!r} are {says}, but they are {does}")
        whole = isinstance(part.code, Dense) and part.code.dtype is None
        named = by_name[name].compressor is not None
        require(whole or named, f"{name!r} is sent as a code, but message() names no compressor")
        exact = not named or isinstance(by_name[name].compressor, Identity)
        require(exact or not whole, f"message() names a compressor of {name!r}, but it is sent as it is")


def _sent_by(algorithm: Algorithm) -> Mapping[str, Part]:
    """Returns the parts of the message that every node sends in round 0."""
    dtype = torch.float32
    start = torch.linspace(-1.0, 1.0, _PARAMETERS, dtype=dtype)
    oracle = cast(Any, NoGradients(start.expand(1, _NODES, -1)))
    network = _Recording(Complete().build(_NODES), dtype=dtype, count_bytes=False)
    algorithm.step(algorithm.init(oracle, network), Round(torch.tensor(0), oracle, network))
    return network.sent
