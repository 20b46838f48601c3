"""Where sites come from: the digits bundled with scikit-learn, or a user's own function."""

import gzip
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
        return (
            self._by_instrument(train, test)
            if self.split == "instrument"
            else _by_class(train, test, self.nodes, "digit")
        )

    def _by_instrument(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> list[Site]:
        mirrored_test = (test[0].flip(-1), test[1])
        sites = []
        for i, (images, labels) in enumerate(_dealt(train, self.nodes)):
            mirrored = i >= self.nodes - self.odd
            kind = "mirrored" if mirrored else "upright"
            images, judge = (images.flip(-1), mirrored_test) if mirrored else (images, test)
            sites.append(Site((images, labels), test=judge, group=kind, name=f"site {i} ({kind})"))
        return sites


def _dealt(samples: tuple[Tensor, ...], hands: int) -> list[tuple[Tensor, ...]]:
    """Equal shares of the samples, in order; what does not go round is left."""
    each = len(samples[0]) // hands
    if each < 2:
        raise BadInput(f"{len(samples[0])} samples do not go round {hands} sites; use fewer nodes")
    return [tuple(t[k * each : (k + 1) * each] for t in samples) for k in range(hands)]


def _by_class(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], nodes: int, noun: str) -> list[Site]:
    """Site i holds a share of class i modulo 10 and is judged by all test samples of that class."""
    parts = {}
    for c in range(min(10, nodes)):
        mine, judge = (tuple(t[source[1] == c] for t in source) for source in (train, test))
        parts[c] = _dealt(mine, len(range(c, nodes, 10))), judge
    return [
        Site(parts[i % 10][0][i // 10], parts[i % 10][1], group=f"{noun} {i % 10}", name=f"site {i} ({noun} {i % 10})")
        for i in range(nodes)
    ]


@dataclass(frozen=True)
class FashionMNIST(Data):
    """Fashion-MNIST (28 x 28 pixels, bytes) with one class to a site: site i holds a share of class i modulo 10 and is
    judged by all test images of it. Its four .gz files are looked for in `folder`, else in $FAIRMESH_DATA/fashion-mnist
    and in the folder of Debian's package dataset-fashion-mnist."""

    nodes: int = 10
    folder: str | None = None

    def __post_init__(self):
        if self.nodes < 1:
            raise BadInput(f"nodes must be >= 1, got {self.nodes}")

    @staticmethod
    def found(folder: str | None = None) -> Path | None:
        """The folder that holds the files, if any does."""
        own = os.environ.get("FAIRMESH_DATA")
        places = [folder] if folder else [own and f"{own}/fashion-mnist", "/usr/share/datasets/fashion-mnist"]
        folders = [Path(place) for place in places if place]
        return next((place for place in folders if (place / "train-images-idx3-ubyte.gz").is_file()), None)

    def sites(self) -> list[Site]:
        folder = self.found(self.folder)
        if folder is None:
            where = self.folder or "$FAIRMESH_DATA/fashion-mnist or /usr/share/datasets/fashion-mnist"
            raise BadInput(f"Fashion-MNIST is not in {where}: put its four .gz files there")
        train, test = (
            (_idx(folder, s, "images-idx3"), _idx(folder, s, "labels-idx1").long()) for s in ("train", "t10k")
        )
        return _by_class(train, test, self.nodes, "class")


def _idx(folder: Path, split: str, kind: str) -> Tensor:
    """The bytes of an IDX file with the shape that its header gives."""
    path = folder / f"{split}-{kind}-ubyte.gz"
    try:
        content = gzip.decompress(path.read_bytes())
        axes = content[3]
        shape = np.frombuffer(content, ">u4", count=axes, offset=4).astype(int)
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy())
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise BadInput(f"{path} is missing or damaged: {error}") from error


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


family(Data, {"digits": Digits, "fashion-mnist": FashionMNIST, "import": ImportedData})
