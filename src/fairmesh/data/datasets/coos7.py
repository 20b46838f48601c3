"""COOS7: cells seen through two microscopes, read from its HDF5 files."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairmesh.config.ranges import Count
from fairmesh.data.datasets.base import Data
from fairmesh.data.datasets.download import folder_of
from fairmesh.data.datasets.sources import SOURCES, damaged, stamp
from fairmesh.data.partitions import BySite, Partition, Pool
from fairmesh.data.site import Site
from fairmesh.errors import BadInput, optional

_MICROSCOPES = ("microscope 1", "microscope 2")  # COOS7_v1.1_test4.hdf5, COOS7_v1.1_test3.hdf5
_BLOCK = 1024  # images looked at together for the maximum of a file


@dataclass(frozen=True)
class COOS7(Data):
    """COOS7: images of cells of 2 x 64 x 64 pixels in 7 classes, taken with two microscopes.

    By default, 8 nodes hold images of the first microscope (COOS7_v1.1_test4.hdf5) and 2 of the second
    (COOS7_v1.1_test3.hdf5). The nodes of a file train on its first images and are judged by as many that follow. Pixels
    are float16, divided by the maximum of their file. Needs `pip install 'fairmesh[coos7]'`.

    Args:
        partition: `BySite` with the number of nodes of each of the two files. Default: BySite((8, 2)).
        folder: The folder that holds the files; None to look in $FAIRMESH_DATA, the cache and the system's folders, and
            to download them if they are not there. Default: None.
        per_node: Training images per node, >= 1. Default: 1000.

    Example:
        >>> import fairmesh as fm
        >>> fm.data.COOS7(fm.data.BySite((4, 1)), per_node=100).partition.nodes
        (4, 1)

    References:
        Lu, Lu, Schormann, Ghassemi, Andrews, Moses: The Cells Out of Sample (COOS) Dataset, NeurIPS 2019.
    """

    partition: Partition = field(default_factory=lambda: BySite((8, 2)))
    folder: str | None = None
    per_node: Count = 1000

    def __post_init__(self):
        if not isinstance(self.partition, BySite) or len(self.partition.nodes) != 2:
            raise BadInput(
                "coos7 needs the partition by-site with the number of nodes for each of two files, as in nodes = [8, 2]"
            )

    def settled_classes(self) -> int:
        return 7

    def sites(self) -> list[Site]:
        return self.partition.sites(self.pool())

    def pool(self) -> Pool:
        """Returns the images that the nodes need, and no others."""
        source = SOURCES["coos7"]
        place = folder_of(source, self.folder).resolve()
        counts = tuple(n * self.per_node for n in self.partition.nodes)  # type: ignore[attr-defined]
        return _read(place, counts, stamp(source, place))


@functools.lru_cache(maxsize=2)
def _read(place: Path, counts: tuple[int, ...], stamped: tuple[int, ...]) -> Pool:
    parts = [_slices(place / file.name, count) for file, count in zip(SOURCES["coos7"].files, counts)]
    inputs, targets = (torch.cat([part[k][:count] for part, count in zip(parts, counts)]) for k in (0, 1))
    judges = tuple(torch.cat([part[k][count:] for part, count in zip(parts, counts)]) for k in (0, 1))
    sites = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return Pool((inputs, targets), (judges[0], judges[1]), sites, sites, _MICROSCOPES)


def _slices(path: Path, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first 2 * count images and labels of a file."""
    with opened(path) as (data, labels):
        if len(data) < 2 * count:
            raise BadInput(
                f"{path} holds {len(data)} images, but {2 * count} are needed, as many to test as to train on; "
                "use a smaller per_node"
            )
        top = max(float(data[k : k + _BLOCK].max()) for k in range(0, len(data), _BLOCK))
        if not (math.isfinite(top) and top > 0):
            raise damaged(path, f"its brightest pixel is {top}")
        images = np.empty((2 * count, *data.shape[1:]), np.float16)
        for k in range(0, 2 * count, _BLOCK):
            images[k : k + _BLOCK] = data[k : min(k + _BLOCK, 2 * count)] / top
        return torch.from_numpy(images), torch.from_numpy(labels[: 2 * count].reshape(-1).astype(np.int64))


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Opens an HDF5 file of COOS7's layout and yields its images and labels, to be read slice by slice."""
    with optional("coos7"):
        import h5py
    try:
        with h5py.File(path, "r") as file:
            missing = [key for key in ("data", "labels") if key not in file]
            if missing:
                raise damaged(path, f"it has no {missing[0]!r}")
            data: Any = file["data"]
            labels: Any = file["labels"]
            if data.ndim != 4 or data.shape[1:] != (2, 64, 64) or labels.size != len(data):
                raise damaged(path, f"images {data.shape} and labels {labels.shape} are not (N, 2, 64, 64) and (N,)")
            yield data, labels
    except OSError as error:
        raise damaged(path, error) from error
