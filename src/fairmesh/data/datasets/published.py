"""Fashion-MNIST, MNIST and CIFAR-10 from their official files."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fairmesh.data.datasets.base import Data
from fairmesh.data.datasets.download import folder_of
from fairmesh.data.datasets.sources import SOURCES, contents, damaged, paths_of, stamp
from fairmesh.data.partitions import Contrast, OneClass, Pair, Partition, Pool
from fairmesh.data.site import Site


@dataclass(frozen=True)
class _Published(Data):
    source: ClassVar[str]  # its name among SOURCES
    partition: Partition = field(default_factory=OneClass)
    folder: str | None = None

    def settled_classes(self) -> int:
        return 10

    def sites(self) -> list[Site]:
        return self.partition.sites(pool_of(self.source, self.folder))


@dataclass(frozen=True)
class FashionMNIST(_Published):
    """Fashion-MNIST: 60,000 training and 10,000 test images of 28 x 28 bytes, in 10 classes.

    Args:
        partition: How the images are dealt to nodes. Default: OneClass(), one class per site.
        folder: The folder that holds the official files; None to look in $FAIRMESH_DATA, the cache and the system's
            folders, and to download them if they are not there. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> data = fm.data.FashionMNIST(fm.data.Dirichlet(nodes=20, concentration=0.3))
        >>> data.partition.nodes
        20

    References:
        Xiao, Rasul, Vollgraf: Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms, 2017.
    """

    source: ClassVar[str] = "fashion-mnist"


@dataclass(frozen=True)
class MNIST(_Published):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28 x 28 bytes, in 10 classes.

    Args:
        partition: How the images are dealt to nodes. Default: OneClass(), one class per site.
        folder: The folder that holds the official files, as in `FashionMNIST`. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> fm.data.MNIST(fm.data.OneClass(nodes=10), folder="downloads").folder
        'downloads'

    References:
        LeCun, Bottou, Bengio, Haffner: Gradient-Based Learning Applied to Document Recognition, Proc. IEEE 1998.
    """

    source: ClassVar[str] = "mnist"


@dataclass(frozen=True)
class CIFAR10(_Published):
    """CIFAR-10: 50,000 training and 10,000 test images of 3 x 32 x 32 bytes, in 10 classes.

    Args:
        partition: How the images are dealt to nodes. Default: Contrast(), some sites at another contrast.
        folder: The folder that holds the official files, as in `FashionMNIST`. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> fm.data.CIFAR10().partition.nodes
        20

    References:
        Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009.
    """

    source: ClassVar[str] = "cifar-10"
    partition: Partition = field(default_factory=Contrast)


def pool_of(name: str, folder: str | None = None) -> Pool:
    """Returns all images of a published dataset, in the order of its files."""
    source = SOURCES[name]
    place = folder_of(source, folder).resolve()
    return _read(name, place, stamp(source, place))


@functools.lru_cache(maxsize=4)  # recipes load the same set many times
def _read(name: str, place: Path, stamped: tuple[int, ...]) -> Pool:
    source = SOURCES[name]
    raw = zip((path or place for path in paths_of(source, place)), contents(source, place))
    if name == "cifar-10":
        batches = [_cifar(path, content) for path, content in raw]
        train = tuple(torch.cat(parts) for parts in zip(*batches[:-1]))
        return Pool((train[0], train[1]), batches[-1])
    images, labels, test_images, test_labels = (_idx(path, content) for path, content in raw)
    for inputs, targets in ((images, labels), (test_images, test_labels)):
        if inputs.ndim != 3 or targets.ndim != 1 or len(inputs) != len(targets):
            raise damaged(place, f"{tuple(inputs.shape)} images do not match {tuple(targets.shape)} labels")
    return Pool((images, labels.long()), (test_images, test_labels.long()))


def _idx(path: Path, content: bytes) -> Tensor:
    """Returns the bytes of an IDX file, in the shape that its header gives."""
    try:
        if content[:3] != b"\0\0\x08":
            raise ValueError("not an IDX file of bytes")
        axes = content[3]
        shape = np.frombuffer(content, ">u4", count=axes, offset=4).astype(int)
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy())
    except (ValueError, IndexError) as error:
        raise damaged(path, error) from error


def _cifar(path: Path, content: bytes) -> Pair:
    """Reads rows of a label and the red, green and blue planes of an image."""
    row = 1 + 3 * 32 * 32
    raw = np.frombuffer(content, np.uint8)
    if not len(raw) or len(raw) % row or raw[::row].max() > 9:
        raise damaged(path, f"{len(raw)} bytes are not rows of a label 0 to 9 and 3,072 pixels")
    rows = torch.from_numpy(raw.reshape(-1, row).copy())
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()
