"""Where sites come from: the digits bundled with scikit-learn, or a user's own function."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from fairmesh.errors import BadInput
from fairmesh.problems.base import Site
from fairmesh.settings import family, imported


class Data(ABC):
    """Gives every node its site."""

    @abstractmethod
    def sites(self) -> list[Site]:
        """One site per node, in the order of the nodes."""


@dataclass(frozen=True)
class Digits(Data):
    """scikit-learn's 1,797 handwritten digits (8 x 8 pixels) over `nodes` sites of equal size.

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
        if not 0 < self.test_share < 1:
            raise BadInput(f"test_share lies in (0, 1), got {self.test_share}")

    def sites(self) -> list[Site]:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = torch.as_tensor(bunch.images / 16.0, dtype=torch.float32)  # type: ignore[attr-defined]
        labels = torch.as_tensor(bunch.target, dtype=torch.int64)  # type: ignore[attr-defined]
        order = np.random.default_rng(self.seed).permutation(len(labels))
        if self.split == "instrument":
            return [self._scanned(i, images[part], labels[part]) for i, part in enumerate(self._dealt(order))]
        sites = []
        for i in range(self.nodes):
            of_class = order[labels[order].numpy() == i % 10]
            sharing = range(i % 10, self.nodes, 10)
            part = np.array_split(of_class, len(sharing))[sharing.index(i)]
            sites.append(self._site(f"site {i} (digit {i % 10})", f"digit {i % 10}", images[part], labels[part]))
        return sites

    def _dealt(self, order: np.ndarray) -> list[np.ndarray]:
        each = len(order) // self.nodes
        if each < 8:
            raise BadInput(f"{len(order)} digits do not go round {self.nodes} sites; use at most {len(order) // 8}")
        return [order[k * each : (k + 1) * each] for k in range(self.nodes)]

    def _scanned(self, i: int, images: torch.Tensor, labels: torch.Tensor) -> Site:
        mirrored = i >= self.nodes - self.odd
        name = f"site {i}{' (mirrored)' if mirrored else ''}"
        return self._site(name, "mirrored" if mirrored else "upright", images.flip(-1) if mirrored else images, labels)

    def _site(self, name: str, group: str, images: torch.Tensor, labels: torch.Tensor) -> Site:
        held_out = max(1, round(self.test_share * len(labels)))
        train, test = (images[held_out:], labels[held_out:]), (images[:held_out], labels[:held_out])
        return Site(train=train, test=test, group=group, name=name)


@dataclass(frozen=True)
class ImportedData(Data):
    """A function that returns the list of sites, at 'package.module:name' or 'file.py:name'."""

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def sites(self) -> list[Site]:
        made = imported(self.path, "data.path")(**self.arguments)
        if not isinstance(made, list | tuple) or not all(isinstance(site, Site) for site in made):
            raise BadInput(f"data.path: {self.path} must return a list of fairmesh.Site, got {type(made).__name__}")
        return list(made)


family(Data, {"digits": Digits, "import": ImportedData})
