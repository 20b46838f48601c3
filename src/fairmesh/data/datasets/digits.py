"""The handwritten digits that come with fairmesh: enough to see something within seconds, with nothing to fetch."""

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
    """1,797 handwritten digits (8 x 8 pixels) from the UCI repository, dealt to `nodes` sites. Each site is judged by
    all held-out images of its own kind.

    `split = "instrument"`: digits are dealt at random, and the last `odd` sites use another scanner, one that stores
    every image mirrored left to right; they train and are tested on its images. `split = "class"`: site i holds the
    digit i modulo 10 only."""

    nodes: int = 10
    odd: int = 2
    split: Literal["instrument", "class"] = "instrument"
    seed: int = 0  # of the deal, not of training
    test_share: float = 0.25

    def __post_init__(self):
        if self.nodes < 1 or not 0 <= self.odd <= self.nodes:
            raise BadInput(f"need nodes >= 1 and 0 <= odd <= nodes, got nodes = {self.nodes}, odd = {self.odd}")
        if self.seed < 0:
            raise BadInput(f"seed must be >= 0, got {self.seed}")
        if not 0 < self.test_share < 1:
            raise BadInput(f"test_share lies in (0, 1), got {self.test_share}")

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
