"""The handwritten digits that come with fairmesh: results within seconds, with nothing to download."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fairmesh.data.datasets.base import Data
from fairmesh.data.partitions import (
    Pair,
    Pool,
    by_class,
    dealt,
)
from fairmesh.data.site import Site
from fairmesh.errors import BadInput

_FILE = Path(__file__).with_name("digits.npz")  # source and licence: digits.md next to it


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns the images (1797, 8, 8), float64 from 0 to 16, and the labels (1797,), int64: the same values in the same
    order as `sklearn.datasets.load_digits`."""
    with np.load(_FILE, allow_pickle=False) as arrays:
        return arrays["images"].astype(np.float64), arrays["labels"].astype(np.int64)


@dataclass(frozen=True)
class Digits(Data):
    """1,797 handwritten digits (8 x 8 pixels) from the UCI repository. They come with fairmesh.

    Each site is judged by all held-out images of its own kind.

    Args:
        nodes: The number of sites, >= 1. Default: 10.
        odd: The number of sites with the other scanner, 0 to `nodes`; not used by `split = "class"`. Default: 2.
        split: How sites differ. "instrument": digits are dealt at random, and the last `odd` sites have a scanner that
            mirrors every image, in training and in testing. "class": site i holds only the digit i modulo 10. Default:
            "instrument".
        seed: Seed of the deal, not of training, >= 0. Default: 0.
        test_share: Share of the digits that is held out for testing, in (0, 1). Default: 0.25.

    Example:
        >>> import fairmesh as fm
        >>> sites = fm.data.Digits(nodes=4, odd=1).sites()
        >>> sites[-1].name, tuple(sites[-1].train[0].shape)
        ('site 3 (mirrored)', (337, 8, 8))
    """

    nodes: int = 10
    odd: int = 2
    split: Literal["instrument", "class"] = "instrument"
    seed: int = 0
    test_share: float = 0.25

    def __post_init__(self):
        if self.nodes < 1 or not 0 <= self.odd <= self.nodes:
            raise BadInput(f"need nodes >= 1 and 0 <= odd <= nodes, got nodes = {self.nodes}, odd = {self.odd}")
        if self.seed < 0:
            raise BadInput(f"seed must be >= 0, got {self.seed}")
        if not 0 < self.test_share < 1:
            raise BadInput(f"test_share must lie in (0, 1), got {self.test_share}")

    def sites(self) -> list[Site]:
        every_image, every_label = load_digits()
        order = np.random.default_rng(self.seed).permutation(len(every_label))
        images = torch.as_tensor(every_image[order] / 16.0, dtype=torch.float32)
        labels = torch.as_tensor(every_label[order], dtype=torch.int64)
        held_out = round(self.test_share * len(labels))
        pool = Pool(test=(images[:held_out], labels[:held_out]), train=(images[held_out:], labels[held_out:]))
        return (
            self._by_instrument(pool.train, pool.test)
            if self.split == "instrument"
            else by_class(pool, self.nodes, "digit")
        )

    def _by_instrument(self, train: Pair, test: Pair) -> list[Site]:
        mirrored_test = (test[0].flip(-1), test[1])
        sites = []
        for i, (images, labels) in enumerate(dealt(train, self.nodes)):
            mirrored = i >= self.nodes - self.odd
            kind = "mirrored" if mirrored else "upright"
            images, judge = (images.flip(-1), mirrored_test) if mirrored else (images, test)
            sites.append(Site((images, labels), test=judge, group=kind, name=f"site {i} ({kind})"))
        return sites
