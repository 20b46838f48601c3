"""A problem small enough to train on in milliseconds, and an oracle of nodes that have nothing to learn."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from fairmesh.data.site import Site
from fairmesh.numerics.layout import Layout
from fairmesh.problems.parts import Parts
from fairmesh.problems.problem import Problem, Sampling

FEATURES, CLASSES = 6, 3


def small_problem(nodes: int = 8, seed: int = 0, batch: int = 7, local: tuple[str, ...] = ()) -> Problem:
    """Returns a problem of 53 parameters and three classes, whose sites differ in size and in what they ask for.

    Args:
        nodes: The number of sites, >= 1. Default: 8.
        seed: Another seed gives other data. Default: 0.
        batch: Samples per node and step. Default: 7.
        local: Patterns of parameters that stay at their site, of "0.weight", "0.bias", "2.weight" and "2.bias".
            Default: ().

    Returns:
        The problem; it trains in milliseconds.

    Example:
        >>> import fairmesh as fm
        >>> fm.testing.small_problem(nodes=4).n
        4
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    truth, sites = normal(FEATURES, CLASSES), []
    for i in range(nodes):
        size = 20 + 3 * i
        inputs = normal(size + 10, FEATURES)
        labels = (inputs @ (truth + 0.7 * normal(FEATURES, CLASSES))).argmax(dim=1)
        train, test = (inputs[:size], labels[:size]), (inputs[size:], labels[size:])
        sites.append(Site(train, test=test, group="odd" if i % 2 else "even"))

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))

    return Problem(model=model, sites=sites, sampling=Sampling(batch=batch), parts=Parts(local=local))


def wide_problem(nodes: int = 8) -> Problem:
    """Returns a problem of about 20,000 parameters with small inputs and batches of one, to measure memory on."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(3, 10, generator=generator), torch.tensor([0, 1, 2])) for _ in range(nodes)]

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 130), nn.Tanh(), nn.Linear(130, 140), nn.Tanh(), nn.Linear(140, 3))

    return Problem(model=model, sites=[Site(train) for train in data], sampling=Sampling(batch=1))


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
