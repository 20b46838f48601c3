"""Where sites come from: the digits bundled with scikit-learn, or a user's own function."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fairmesh.errors import BadInput
from fairmesh.problems.base import Site
from fairmesh.settings import called, family


class Data(ABC):
    """Gives every node its site."""

    @abstractmethod
    def sites(self) -> list[Site]:
        """One site per node, in the order of the nodes."""


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
        test, train = (images[:held_out], labels[:held_out]), (images[held_out:], labels[held_out:])
        return self._by_instrument(train, test) if self.split == "instrument" else self._by_class(train, test)

    def _by_instrument(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> list[Site]:
        mirrored_test = (test[0].flip(-1), test[1])
        sites = []
        for i, (images, labels) in enumerate(self._dealt(train, self.nodes)):
            mirrored = i >= self.nodes - self.odd
            kind = "mirrored" if mirrored else "upright"
            images, judge = (images.flip(-1), mirrored_test) if mirrored else (images, test)
            sites.append(Site((images, labels), test=judge, group=kind, name=f"site {i} ({kind})"))
        return sites

    def _by_class(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> list[Site]:
        sites: list[Site] = []
        parts = {}
        for digit in range(min(10, self.nodes)):
            mine, judge = (tuple(t[source[1] == digit] for t in source) for source in (train, test))
            parts[digit] = iter(self._dealt(mine, len(range(digit, self.nodes, 10)))), judge
        for i in range(self.nodes):
            dealt, judge = parts[i % 10]
            sites.append(Site(next(dealt), test=judge, group=f"digit {i % 10}", name=f"site {i} (digit {i % 10})"))
        return sites

    def _dealt(self, samples: tuple[Tensor, ...], hands: int) -> list[tuple[Tensor, ...]]:
        each = len(samples[0]) // hands
        if each < 2:
            raise BadInput(f"the digits do not go round {self.nodes} sites; use fewer nodes or a smaller test_share")
        return [tuple(t[k * each : (k + 1) * each] for t in samples) for k in range(hands)]


@dataclass(frozen=True)
class ImportedData(Data):
    """A function that returns the list of sites, at 'package.module:name' or 'file.py:name'."""

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def sites(self) -> list[Site]:
        made = called(self.path, self.arguments, "data")
        if not isinstance(made, list | tuple) or not all(isinstance(site, Site) for site in made):
            raise BadInput(f"data.path: {self.path} must return a list of fairmesh.Site, got {type(made).__name__}")
        return list(made)


family(Data, {"digits": Digits, "import": ImportedData})
