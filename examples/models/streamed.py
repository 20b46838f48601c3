"""Scans that do not fit into memory: they are read by index, when a batch needs them, by processes that read ahead.

`fairmesh run examples/models/streamed.toml` imports this file. `Scans` stands for a folder of files: replace
`__getitem__` by what opens and decodes your file number `k`.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fairmesh as fm


class Scans(Dataset):
    """Scans of a clinic, (3, 64, 64) numbers each, that are ill or not. No more than one of them is held at a time."""

    def __init__(self, clinic: int, first: int, count: int):
        self.clinic, self.first, self.count = clinic, first, count
        self.targets = [k % 2 for k in range(count)]  # labels that are known without reading a scan

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        if not 0 <= k < self.count:
            raise IndexError(k)
        generator = torch.Generator().manual_seed(1_000_000 * self.clinic + self.first + k)
        scan = torch.randn(3, 64, 64, generator=generator) + 0.2 * self.clinic
        scan[:, 24:40, 24:40] += 1.0 if self.targets[k] else -1.0
        return scan, self.targets[k]


def sites(scans: int = 20_000, workers: int = 1) -> list[fm.Site]:
    """Returns three clinics with 20,000 scans each, 1 GB in memory."""
    return [
        fm.Site(
            fm.data.Streamed(Scans(clinic, 0, scans), workers=workers),
            test=fm.data.Streamed(Scans(clinic, scans, 40)),
            name=name,
        )
        for clinic, name in enumerate(("north", "south", "east"))
    ]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(392, 2),
    )
