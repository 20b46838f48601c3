"""What every source of sites is; sites from a user's function; sites of another source held out, cut or corrupted."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fairmesh.config.imports import called
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams


class Data(ABC):
    """Gives every node its site."""

    @abstractmethod
    def sites(self) -> list[Site]:
        """One site per node, in the order of the nodes."""


@dataclass(frozen=True)
class ImportedData(Data):
    """A function that returns the list of sites, at 'package.module:name' or 'file.py:name'."""

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def sites(self) -> list[Site]:
        made = called(self.path, self.arguments, "data")
        if isinstance(made, Data):  # a class of data with no fields of its own
            return made.sites()
        if not isinstance(made, list | tuple) or not all(isinstance(site, Site) for site in made):
            raise BadInput(f"data.path: {self.path} must return a list of fairmesh.Site, got {type(made).__name__}")
        return list(made)


@dataclass(frozen=True)
class HeldOut(Data):
    """The sites of `data` with a `share` of their own training samples, drawn at random, held out to judge them by; the
    real test samples are out of reach. For tuning. Sites of one group share what all of them hold out."""

    data: Data
    share: float = 0.2
    seed: int = 0

    def __post_init__(self):
        if not 0 < self.share < 1:
            raise BadInput(f"share lies in (0, 1), got {self.share}")
        if self.seed < 0:
            raise BadInput(f"seed must be >= 0, got {self.seed}")

    def sites(self) -> list[Site]:
        kept, held = [], {}
        given = self.data.sites()
        groups = [site.group or site.name or f"node {i}" for i, site in enumerate(given)]
        for i, (site, group) in enumerate(zip(given, groups)):
            samples = Samples.of(site.train, f"site {i} ({site.name or 'unnamed'})")
            count = max(1, round(self.share * len(samples)))
            if count >= len(samples):
                raise BadInput(
                    f"site {i} ({site.name or 'unnamed'}) has {len(samples)} training samples: too few to hold some out"
                )
            order = torch.from_numpy(np.random.default_rng((self.seed, i)).permutation(len(samples)))
            out, rest = order[:count].sort().values, order[count:].sort().values
            kept.append((samples.inputs[rest], samples.targets[rest]))
            held.setdefault(group, []).append((samples.inputs[out], samples.targets[out]))
        judges = {group: tuple(torch.cat(parts) for parts in zip(*pairs)) for group, pairs in held.items()}
        return [
            replace(site, train=train, test=judges[group], validation=None)
            for site, train, group in zip(given, kept, groups)
        ]


@dataclass(frozen=True)
class Fewer(Data):
    """The sites of `data` with the first so many of their training and of their test samples: for a trial."""

    data: Data
    train: int = 100
    test: int = 50

    def __post_init__(self):
        if self.train < 2 or self.test < 1:
            raise BadInput(f"need train >= 2 and test >= 1, got train = {self.train}, test = {self.test}")

    def sites(self) -> list[Site]:
        judges: dict[int, Any] = {}  # sites that share a test set still do

        def first(samples: Any, count: int, what: str) -> tuple[torch.Tensor, torch.Tensor]:
            read = Samples.of(samples, what)
            return read.inputs[:count], read.targets[:count]

        given = self.data.sites()
        for i, site in enumerate(given):
            if site.test is not None and id(site.test) not in judges:
                judges[id(site.test)] = first(site.test, self.test, f"test set of site {i}")
        return [
            replace(site, train=first(site.train, self.train, f"site {i}"), test=judges.get(id(site.test)))
            for i, site in enumerate(given)
        ]


@dataclass(frozen=True)
class Corrupted(Data):
    """The sites of `data`, of which those numbered in `corrupted` train on what says nothing: labels drawn
    uniformly from all classes, or inputs drawn uniformly between their least and their largest. Test samples stay as
    they are; the corrupted sites' group is "corrupted"."""

    data: Data
    corrupted: tuple[int, ...] = (0,)
    how: Literal["labels", "inputs"] = "labels"
    seed: int = 0

    def __post_init__(self):
        if not self.corrupted or len(set(self.corrupted)) < len(self.corrupted) or min(self.corrupted) < 0:
            raise BadInput(f"corrupted lists different sites by their numbers from 0, got {list(self.corrupted)}")
        if self.seed < 0:
            raise BadInput(f"seed must be >= 0, got {self.seed}")

    def sites(self) -> list[Site]:
        made = self.data.sites()
        if max(self.corrupted) >= len(made):
            raise BadInput(f"corrupted names site {max(self.corrupted)}, but there are {len(made)}, numbered from 0")
        samples = [Samples.of(site.train, f"site {i} ({site.name or 'unnamed'})") for i, site in enumerate(made)]
        for i in self.corrupted:
            inputs, targets = samples[i].inputs, samples[i].targets
            if self.how == "inputs":
                inputs = self._noise(i, inputs)
            elif targets.ndim != 1 or targets.dtype != torch.long:
                raise BadInput(
                    f"labels of site {i} cannot be drawn, for its targets are not classes but {tuple(targets.shape)} "
                    f'{targets.dtype}; use how = "inputs"'
                )
            else:
                targets = self._drawn(i, len(targets), 1 + max(int(one.targets.max()) for one in samples))
            made[i] = replace(made[i], train=(inputs, targets), group="corrupted")
        return made

    def _drawn(self, i: int, count: int, below: int) -> Tensor:
        return random_streams.integers(self._key(i), count, torch.tensor(below)).flatten()

    def _noise(self, i: int, like: Tensor) -> Tensor:
        if like.is_floating_point():
            least, largest = like.min(), like.max()
            drawn = random_streams.uniform(self._key(i), like.numel(), torch.float64).to(like.dtype)
            return least + (largest - least) * drawn.view(like.shape)
        least, largest = int(like.min()), int(like.max())
        return (least + self._drawn(i, like.numel(), largest - least + 1)).view(like.shape).to(like.dtype)

    def _key(self, i: int) -> Tensor:
        return random_streams.keys(torch.tensor([self.seed]), f"corrupted {self.how}", 0, torch.tensor([i]))
