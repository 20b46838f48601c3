"""Problems made of published ones, for choosing defaults on."""

from dataclasses import replace

import torch
from torch.nn.functional import avg_pool2d

from fairmesh.errors import BadInput
from fairmesh.problems.base import Site
from fairmesh.problems.datasets import FashionMNIST
from fairmesh.problems.datasets.published import pool_of
from fairmesh.problems.losses import as_floats
from fairmesh.problems.partitions import OneClass, Pair, Pool, Shards


def coarse(nodes: int, pixels: int) -> list[Site]:
    """Fashion-MNIST for a model of few parameters: two shards a node, images brought to so many pixels a side."""

    def pooled(held: Pair) -> Pair:
        images = as_floats(held[0], torch.float32).unsqueeze(1)
        if images.shape[-1] % pixels:
            raise BadInput(f"pixels must divide the {images.shape[-1]} a side that there are, got {pixels}")
        return avg_pool2d(images, images.shape[-1] // pixels).squeeze(1), held[1]

    given = FashionMNIST(Shards(nodes, 2)).sites()
    return [replace(site, train=pooled(site.train), test=pooled(site.test)) for site in given]


def twenty_classes(nodes: int) -> list[Site]:
    """The digits of MNIST and the clothes of Fashion-MNIST as one set, of which a node holds one class."""
    digits, clothes = pool_of("mnist"), pool_of("fashion-mnist")

    def both(some: Pair, others: Pair) -> Pair:
        return torch.cat([some[0], others[0]]), torch.cat([some[1], others[1] + 10])

    return OneClass(nodes).sites(Pool(both(digits.train, clothes.train), both(digits.test, clothes.test)))
