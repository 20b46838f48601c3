"""Problems small enough to train on in milliseconds."""

import torch
from torch import Tensor, nn

from fairmesh.data.site import Site
from fairmesh.problems.batches import Sampling
from fairmesh.problems.parts import Parts
from fairmesh.problems.problem import Problem

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
