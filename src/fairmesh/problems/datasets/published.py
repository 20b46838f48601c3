"""Fashion-MNIST, MNIST and CIFAR-10 from their official files."""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fairmesh.errors import BadInput
from fairmesh.problems.base import Site
from fairmesh.problems.datasets.base import Data
from fairmesh.problems.datasets.sources import SOURCES, File, Source, content, folder_of, path_of, stamp
from fairmesh.problems.partitions import Contrast, OneClass, Pair, Partition, Pool


@dataclass(frozen=True)
class FashionMNIST(Data):
    """Fashion-MNIST, 60,000 and 10,000 images of 28 x 28 bytes."""

    partition: Partition = field(default_factory=OneClass)
    folder: str | None = None

    def sites(self) -> list[Site]:
        return self.partition.sites(pool_of("fashion-mnist", self.folder))


@dataclass(frozen=True)
class MNIST(Data):
    """MNIST, 60,000 and 10,000 images of 28 x 28 bytes."""

    partition: Partition = field(default_factory=OneClass)
    folder: str | None = None

    def sites(self) -> list[Site]:
        return self.partition.sites(pool_of("mnist", self.folder))


@dataclass(frozen=True)
class CIFAR10(Data):
    """CIFAR-10, 50,000 and 10,000 images of 3 x 32 x 32 bytes."""

    partition: Partition = field(default_factory=Contrast)
    folder: str | None = None

    def sites(self) -> list[Site]:
        return self.partition.sites(pool_of("cifar-10", self.folder))


def pool_of(name: str, folder: str | None = None) -> Pool:
    """All images of a published dataset, in the order of its files."""
    source = SOURCES[name]
    place = folder_of(source, folder).resolve()
    return _read(name, place, stamp(source, place))


@functools.lru_cache(maxsize=4)  # recipes load the same set many times
def _read(name: str, place: Path, stamped: tuple[int, ...]) -> Pool:
    source = SOURCES[name]
    if name == "cifar-10":
        batches = [_cifar(source, file, place) for file in source.files]
        train = tuple(torch.cat(parts) for parts in zip(*batches[:-1]))
        return Pool((train[0], train[1]), batches[-1])
    images, labels, test_images, test_labels = (_idx(source, file, place) for file in source.files)
    for inputs, targets in ((images, labels), (test_images, test_labels)):
        if inputs.ndim != 3 or targets.ndim != 1 or len(inputs) != len(targets):
            raise BadInput(
                f"{place}: {tuple(inputs.shape)} images do not go with {tuple(targets.shape)} labels; "
                f"a file is damaged or of another dataset"
            )
    return Pool((images, labels.long()), (test_images, test_labels.long()))


def _idx(source: Source, file: File, place: Path) -> Tensor:
    """The bytes of an IDX file with the shape that its header gives."""
    raw = content(source, file, place)
    try:
        if raw[:3] != b"\0\0\x08":
            raise ValueError("not an IDX file of bytes")
        shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4).astype(int)
        return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy())
    except (ValueError, IndexError) as error:
        raise BadInput(f"{path_of(source, file, place)} is missing or damaged: {error}") from error


def _cifar(source: Source, file: File, place: Path) -> Pair:
    """Rows of a label and the red, green and blue planes of an image."""
    raw = np.frombuffer(content(source, file, place), np.uint8)
    if not len(raw) or len(raw) % 3073 or raw[::3073].max() > 9:
        raise BadInput(
            f"{path_of(source, file, place)} is missing or damaged: {len(raw)} bytes are not rows of a label 0 to 9 "
            f"and 3,072 pixels"
        )
    rows = torch.from_numpy(raw.reshape(-1, 3073).copy())
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()
