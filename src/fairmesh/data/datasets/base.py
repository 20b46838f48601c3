"""The base class of data sources; sites from a user's function; sites of another source, held out, cut or corrupted."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fairmesh.config.imports import called
from fairmesh.config.ranges import Count, Natural, Share, Within
from fairmesh.data.partitions import BySite
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site, with_sets
from fairmesh.data.units import divided, joined_units, sortable_targets, units_of, with_units
from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams, trees


class Data(ABC):
    """Base class of data sources: gives every node its site.

    Example:
        >>> import fairmesh as fm
        >>> [site.group for site in fm.data.Digits(nodes=3, odd=1).sites()]
        ['upright', 'upright', 'mirrored']
    """

    @abstractmethod
    def sites(self) -> list[Site]:
        """Returns one site per node, in the order of the nodes."""

    @property
    def innermost(self) -> "Data":
        """The source itself, or the one that it changes, such as that of `HeldOut`."""
        inner = getattr(self, "data", None)
        return inner.innermost if isinstance(inner, Data) else self

    def class_names(self) -> tuple[str, ...]:
        """Returns the names of the classes, in the order of their numbers; nothing if they have none."""
        return () if self.innermost is self else self.innermost.class_names()

    def settled_classes(self) -> int:
        """Returns how many classes the data has, whatever rows its sites hold: by its definition, or as its settings
        list them. 0 if only the rows tell."""
        listed = len(getattr(self, "classes", ()))
        return listed if self.innermost is self else self.innermost.settled_classes()

    def left_to_rows(self) -> dict[str, str]:
        """Returns what single rows decide about all others, by its name, each with what to do."""
        inner = getattr(self, "data", None)
        return inner.left_to_rows() if isinstance(inner, Data) else {}

    def resplit(self, k: int) -> "Data":
        """Returns the same data with another split into rows for training and rows for testing.

        Args:
            k: The number of the split; 0 for the data as it is.

        Raises:
            BadInput: The data does not draw its split by a seed.
        """
        if getattr(self, "time", None) is not None:
            raise BadInput(
                "splits: with time, the latest rows are the test rows, so that all splits would be the same; write "
                "splits = 1, or remove time"
            )
        inner, seed = getattr(self, "data", None), getattr(self, "seed", None)
        changes: dict[str, Any] = {} if inner is None else {"data": inner.resplit(k)}
        changes |= {} if seed is None else {"seed": seed + k}
        if not changes or not is_dataclass(self):
            raise BadInput(
                f"splits: {type(self).__name__} has no seed that draws the split into training and test rows, so there "
                "is only one; use data with a seed, such as a table, or wrap it in held-out"
            )
        return replace(self, **changes) if k else self


def check_split(data: Any) -> None:
    """Raises BadInput if a split leaves no rows to train on or goes by the target, a unit is an input, or a site
    column is needed."""
    if not 0 <= getattr(data, "validation_share", 0) < 1 - getattr(data, "test_share", 0):
        raise BadInput(
            f"validation_share must lie in [0, 1 - test_share), got {data.validation_share} with test_share = "
            f"{data.test_share}"
        )
    for key in ("unit", "time"):
        if (named := getattr(data, key, None)) is not None and named == data.target:
            raise BadInput(f"{key} = {data.target!r} is the target, which says neither whose a row is nor when it was")
    if (unit := getattr(data, "unit", None)) is not None and unit in getattr(data, "inputs", ()):
        raise BadInput(
            f"unit = {unit!r} is among the inputs, so that the model would know units by it and be of no use for new "
            "ones; remove it from inputs, or name another unit"
        )
    has_sites = getattr(data, "site", "") is not None or getattr(data, "has_files", False)
    if not has_sites and isinstance(data.partition, BySite):
        raise BadInput(
            "name the site column, give one file per site, or give a partition that needs no sites, such as even"
        )


@dataclass(frozen=True)
class ImportedData(Data):
    """Sites from a function of your own, which experiment files name by its import path.

    Args:
        path: Where the function is: "package.module:name" or "file.py:name". It returns a list of `fm.Site`.
        arguments: Keyword arguments for the function. Default: {}.

    Example:
        >>> import fairmesh as fm
        >>> data = fm.data.ImportedData("hospitals.py:load", {"year": 2024})
        >>> data.arguments["year"]
        2024
    """

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
    """The sites of another source, judged by part of their training samples instead of their test samples.

    Use it to tune settings without looking at the test samples. The sites of a group are judged by what all of them
    hold out.

    Args:
        data: The source of the sites.
        share: Share of each site's training samples that is held out, drawn at random, in (0, 1). Default: 0.2.
        seed: Seed of the draw, not of training, >= 0. Default: 0.

    Example:
        >>> import fairmesh as fm
        >>> digits = fm.data.Digits(nodes=4)
        >>> whole, rest = digits.sites()[0], fm.data.HeldOut(digits, share=0.25).sites()[0]
        >>> len(whole.train[0]), len(rest.train[0])
        (337, 253)
    """

    data: Data
    share: Share = 0.2
    seed: Natural = 0

    def sites(self) -> list[Site]:
        kept, held = [], {}
        given = with_units(self.data.sites())
        groups = [site.group or site.name or f"node {i}" for i, site in enumerate(given)]
        for i, (site, group) in enumerate(zip(given, groups)):
            where = f"site {i} ({site.name or 'unnamed'})"
            samples = Samples.of(site.train, where)
            if max(1, round(self.share * len(samples))) >= len(samples) or units_of(samples) < 2:
                few = f"{len(samples)} training samples of {units_of(samples)} units"
                raise BadInput(f"{where} has {few}: too few to hold some out")
            generator = np.random.default_rng((self.seed, i))
            rest, out = divided(len(samples), self.share, generator, samples.units, sortable_targets(samples))
            kept.append(samples.take(rest).parts())
            held.setdefault(group, []).append(samples.take(out).parts())
        judges = {group: _joined(sets) for group, sets in held.items()}
        return [
            replace(site, train=train, test=judges[group], validation=None, table=_changed(site))
            for site, train, group in zip(given, kept, groups)
        ]


def _changed(site: Site) -> Any:
    """Returns what is still known of a site's table after its samples have been changed."""
    return site.table and site.table.without_rows()


def _joined(sets: list[Any]) -> Any:
    """Returns sets of samples as one."""
    if len(sets) == 1:
        return sets[0]
    if any(isinstance(samples, Samples) and samples.stream for samples in sets):
        raise BadInput(
            "sites of one group share what they hold out, which Datasets that are not in memory cannot; give every "
            "site a group of its own"
        )
    whole = [Samples.of(samples, "held-out samples") for samples in sets]
    inputs, targets, *subgroups = zip(*(replace(samples, units=None).parts() for samples in whole))
    joined = torch.cat(inputs), torch.cat(targets), *(list(chain.from_iterable(names)) for names in subgroups)
    units = joined_units(whole)
    return joined if units is None else replace(Samples.of(joined, "held-out samples"), units=units)


@dataclass(frozen=True)
class Fewer(Data):
    """The sites of another source, with fewer samples each: for a quick trial.

    Args:
        data: The source of the sites.
        train: Training samples to keep per site, the first ones, >= 2. Default: 100.
        test: Test samples to keep per site, the first ones, >= 1. Default: 50.

    Example:
        >>> import fairmesh as fm
        >>> site = fm.data.Fewer(fm.data.Digits(nodes=4), train=20).sites()[0]
        >>> len(site.train[0]), len(site.test[0])
        (20, 50)
    """

    data: Data
    train: Annotated[int, Within("[2, inf)")] = 100
    test: Count = 50

    def sites(self) -> list[Site]:
        made = with_units(self.data.sites())
        of_units = [getattr(site.train, "units", None) is not None for site in made]
        for name, count in (("train", self.train), ("test", self.test)):
            made = with_sets(made, partial(_first, count), (name,))
        few = {"few": "data.train keeps the first rows, so that a unit with many pushes out others; leave fewer out"}
        told = [{**site.left_to_rows, **(few if units else {})} for site, units in zip(made, of_units)]
        return [replace(site, table=_changed(site), left_to_rows=left) for site, left in zip(made, told)]


def _first(count: int, samples: Any, what: str) -> Any:
    read = Samples.of(samples, what)
    return read.take(torch.arange(min(count, len(read)))).parts()


@dataclass(frozen=True)
class Corrupted(Data):
    """The sites of another source, of which some train on noise.

    Test samples stay as they are. The group of the corrupted sites is "corrupted".

    Args:
        data: The source of the sites.
        corrupted: The numbers of the corrupted sites, from 0. Default: (0,).
        how: What is replaced by noise: "labels", drawn uniformly from all classes, or "inputs", drawn uniformly between
            the site's smallest and largest value. Default: "labels".
        seed: Seed of the noise, not of training, >= 0. Default: 0.

    Example:
        >>> import fairmesh as fm
        >>> [site.group for site in fm.data.Corrupted(fm.data.Digits(nodes=3, odd=1), corrupted=[1]).sites()]
        ['upright', 'corrupted', 'mirrored']
    """

    data: Data
    corrupted: tuple[int, ...] = (0,)
    how: Literal["labels", "inputs"] = "labels"
    seed: Natural = 0

    def __post_init__(self):
        if not self.corrupted or len(set(self.corrupted)) < len(self.corrupted) or min(self.corrupted) < 0:
            raise BadInput(f"corrupted lists different sites by their numbers from 0, got {list(self.corrupted)}")

    def left_to_rows(self) -> dict[str, str]:
        return self.data.left_to_rows() | self._noise_by_rows()

    def _noise_by_rows(self) -> dict[str, str]:
        if self.how == "inputs":
            return {"noise": 'data.how = "inputs" draws between the smallest and the largest value; use "labels"'}
        if self.settled_classes():
            return {}
        return {"noise": "labels are drawn from those that the rows have; name the classes of the data"}

    def sites(self) -> list[Site]:
        made = with_units(self.data.sites())
        if max(self.corrupted) >= len(made):
            raise BadInput(f"corrupted names site {max(self.corrupted)}, but there are {len(made)}, numbered from 0")
        samples = [Samples.of(site.train, f"site {i} ({site.name or 'unnamed'})") for i, site in enumerate(made)]
        for i in self.corrupted:
            if samples[i].stream:
                raise BadInput(f"site {i} is read from a Dataset that is not in memory, which cannot be corrupted")
            inputs, targets = samples[i].inputs, samples[i].targets
            if self.how == "inputs":
                if not isinstance(inputs, Tensor):
                    raise BadInput(f'site {i} has several inputs, of which noise can say nothing; use how = "labels"')
                inputs = self._noise(i, inputs)
            elif samples[i].labels is None:
                raise BadInput(
                    f"labels of site {i} cannot be drawn, because its targets are not classes but "
                    f'{trees.form_in_words(targets)}; use how = "inputs"'
                )
            else:
                classes = self.settled_classes() or 1 + max(int(one.targets.max()) for one in samples)
                targets = self._drawn(i, len(targets), classes)
            noisy = replace(samples[i], inputs=inputs, targets=targets)
            made[i] = replace(made[i], train=noisy.parts(), group="corrupted", table=_changed(made[i]))
        moved = "data = corrupted draws labels by the place of a row, which depends on the rows of other units"
        of_units = {"noise": f"{moved}; change the labels in the files instead, or name no unit"}
        left = [of_units if samples[i].units is not None and i in self.corrupted else {} for i in range(len(made))]
        noise = self._noise_by_rows()
        return [replace(site, left_to_rows={**site.left_to_rows, **here, **noise}) for site, here in zip(made, left)]

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
