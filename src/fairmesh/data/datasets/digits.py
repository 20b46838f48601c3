"""The digits bundled with scikit-learn: enough to see something within seconds, with nothing to fetch."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Digits(Data):
    """scikit-learn's 1,797 handwritten digits (8 x 8 pixels) over `nodes` sites, each judged by all held-out images of
    its own kind.

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
        from sklearn.datasets import load_digits

        bunch = load_digits()
        order = np.random.default_rng(self.seed).permutation(len(bunch.target))  # type: ignore[attr-defined]
        images = torch.as_tensor(bunch.images[order] / 16.0, dtype=torch.float32)  # type: ignore[attr-defined]
        labels = torch.as_tensor(bunch.target[order], dtype=torch.int64)  # type: ignore[attr-defined]
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
