"""Fashion-MNIST with few pixels, for a model with few parameters."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from fairmesh.data.datasets import FashionMNIST
from fairmesh.data.partitions import Shards
from fairmesh.data.site import Site
from fairmesh.errors import BadInput
from fairmesh.problems.row_loss import as_floats


def sites(nodes: int, pixels: int) -> list[Site]:
    """Returns sites with two shards each, whose images are averaged to `pixels` per side."""

    def pooled(held: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images = as_floats(held[0], torch.float32).unsqueeze(1)
        if images.shape[-1] % pixels:
            raise BadInput(f"pixels must divide the side of the images, {images.shape[-1]}; got {pixels}")
        return avg_pool2d(images, images.shape[-1] // pixels).squeeze(1), held[1]

    given = FashionMNIST(Shards(nodes, 2)).sites()
    return [replace(site, train=pooled(site.train), test=pooled(site.test)) for site in given]
