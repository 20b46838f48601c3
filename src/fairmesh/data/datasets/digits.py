"""The handwritten digits that come with fairmesh: results within seconds, with nothing to download."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from fairmesh.config.ranges import Natural, Share
from fairmesh.data.datasets.base import Data, check_split
from fairmesh.data.partitions import Pool, View, by_class, seen_through, unchanged
from fairmesh.data.site import Site
from fairmesh.errors import BadInput

_FILE = Path(__file__).with_name("digits.npz")  # source and licence: digits.md next to it


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns the images (1797, 8, 8), float64 from 0 to 16, and the labels (1797,), int64: the same values in the same
    order as `sklearn.datasets.load_digits`."""
    with np.load(_FILE, allow_pickle=False) as arrays:
        return arrays["images"].astype(np.float64), arrays["labels"].astype(np.int64)


_SCANNERS: dict[str, View] = {
    "upright": unchanged,
    "mirrored": lambda images: images.flip(-1),
    "shifted": lambda images: nn.functional.pad(images, (1, -1, 1, -1)),
}


@dataclass(frozen=True)
class Digits(Data):
    """1,797 handwritten digits (8 x 8 pixels) from the UCI repository. They come with fairmesh.

    Each site is judged by all held-out images of its own kind.

    Args:
        nodes: The number of sites, >= 1. Default: 10.
        odd: The number of sites with the other scanner, 0 to `nodes`; not used by `split = "class"`. Default: 2.
        split: How sites differ. "instrument": digits are dealt at random, and the last `odd` sites have a scanner that
            changes every image, in training and in testing. "class": site i holds only the digit i modulo 10. Default:
            "instrument".
        seed: Seed of the deal, not of training, >= 0. Default: 0.
        test_share: Share of the digits that is held out for testing, in (0, 1). Default: 0.25.
        instrument: What the other scanner does: "mirrored" images, or images "shifted" by one pixel to the right and
            down. Default: "mirrored".
        sizes: Training rows of each site, >= 2; None for equal shares. Only with `split = "instrument"`. Default: None.
        validation_share: Share of the digits that is held out for validation, in [0, 1). Only with `split =
            "instrument"`. Default: 0.0.

    Example:
        >>> import fairmesh as fm
        >>> sites = fm.data.Digits(nodes=4, odd=1).sites()
        >>> sites[-1].name, tuple(sites[-1].train[0].shape)
        ('site 3 (mirrored)', (337, 8, 8))
    """

    nodes: int = 10
    odd: int = 2
    split: Literal["instrument", "class"] = "instrument"
    seed: Natural = 0
    test_share: Share = 0.25
    instrument: Literal["mirrored", "shifted"] = "mirrored"
    sizes: tuple[int, ...] | None = None
    validation_share: float = 0.0

    def __post_init__(self):
        if self.nodes < 1 or not 0 <= self.odd <= self.nodes:
            raise BadInput(f"need nodes >= 1 and 0 <= odd <= nodes, got nodes = {self.nodes}, odd = {self.odd}")
        check_split(self)
        if self.split != "instrument" and (self.sizes is not None or self.validation_share):
            raise BadInput(f'sizes and validation_share need split = "instrument", got split = "{self.split}"')
        if self.sizes is not None and (len(self.sizes) != self.nodes or min(self.sizes) < 2):
            raise BadInput(f"sizes must be one number >= 2 for each of {self.nodes} nodes, got {self.sizes}")

    def settled_classes(self) -> int:
        return 10

    def sites(self) -> list[Site]:
        every_image, every_label = load_digits()
        order = np.random.default_rng(self.seed).permutation(len(every_label))
        images = torch.as_tensor(every_image[order] / 16.0, dtype=torch.float32)
        labels = torch.as_tensor(every_label[order], dtype=torch.int64)
        held_out = round(self.test_share * len(labels))
        chosen = round(self.validation_share * len(labels))
        test, validation, train = (
            (images[rows], labels[rows])
            for rows in (slice(held_out), slice(held_out, held_out + chosen), slice(held_out + chosen, None))
        )
        if self.split == "class":
            return by_class(Pool(test=test, train=train), self.nodes, "digit")
        sizes = list(self.sizes or [len(train[1]) // self.nodes] * self.nodes)
        if sum(sizes) > len(train[1]) or min(sizes) < 2:
            raise BadInput(
                f"the sites ask for {sum(sizes)} training rows, at least 2 each, but {len(train[1])} are left; use "
                "fewer nodes or smaller sizes, or hold out less (test_share, validation_share)"
            )
        shares = [(share[0], share[1]) for share in zip(*(part[: sum(sizes)].split(sizes) for part in train))]
        kinds = ["upright"] * (self.nodes - self.odd) + [self.instrument] * self.odd
        sites = [
            Site(share, test, validation if chosen else None, group=kind, name=f"site {i} ({kind})")
            for i, (share, kind) in enumerate(zip(shares, kinds))
        ]
        return seen_through([_SCANNERS[kind] for kind in kinds], sites)
