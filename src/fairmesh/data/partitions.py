"""Partitions: how a pool of samples is dealt to sites."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from fairmesh.config.ranges import Count, Natural, Positive, Within
from fairmesh.config.tables import register
from fairmesh.data import shifts
from fairmesh.data.site import Site, with_sets
from fairmesh.errors import BadInput

Pair = tuple[Tensor, Tensor]  # inputs (samples, ...), targets (samples, ...)
_Concentration = Annotated[float, Within("[0.001, inf)")]
View = Callable[[Tensor], Tensor]  # images -> images, as an instrument sees them


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a dataset before they are dealt to sites.

    Args:
        train: Inputs (samples, ...) and targets (samples, ...) to train on.
        test: Inputs and targets to test on.
        sites: Where each training sample was taken, (samples,), as an index into `site_names`. Default: None.
        test_sites: The same for the test samples. Default: None.
        site_names: The names of the sites. Default: ().

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> inputs, labels = torch.zeros(40, 2), torch.arange(40) % 4
        >>> fm.data.Pool(train=(inputs, labels), test=(inputs, labels)).classes
        4
    """

    train: Pair
    test: Pair
    sites: Tensor | None = None
    test_sites: Tensor | None = None
    site_names: tuple[str, ...] = ()

    def __post_init__(self):
        for what, samples, sites in (("training", self.train, self.sites), ("test", self.test, self.test_sites)):
            sizes = [len(t) for t in (*samples, sites) if t is not None]
            if len(set(sizes)) > 1:
                raise BadInput(f"{what} samples do not match: there are {sizes} inputs, targets and sites")

    @property
    def classes(self) -> int:
        """The number of classes: the largest label plus one."""
        targets = self.train[1]
        if targets.is_floating_point() or targets.ndim != 1:
            raise BadInput(
                "this partition sorts samples by label, but the targets are not labels; use even, quantity or by-site"
            )
        return 1 + int(max(targets.max(), self.test[1].max()))


class Partition(ABC):
    """Base class of partitions: deals the samples of a pool to sites.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> samples = torch.zeros(40, 2), torch.arange(40) % 4
        >>> partition = fm.data.Dirichlet(nodes=4, concentration=0.3)
        >>> [len(site.train[0]) for site in partition.sites(fm.data.Pool(samples, samples))]
        [7, 7, 14, 12]
    """

    @abstractmethod
    def sites(self, pool: Pool) -> list[Site]:
        """Returns one site per node, in the order of the nodes.

        Args:
            pool: All samples of the dataset.
        """


def _refuse_few(count: int, least: int, sites: int) -> None:
    if count < least:
        raise BadInput(f"{count} samples are too few for {sites} sites; use fewer nodes")


def dealt(samples: Pair, hands: int, least: int = 2) -> list[Pair]:
    """Returns equal shares of the samples, in order; a remainder is left out."""
    each = len(samples[0]) // hands
    _refuse_few(len(samples[0]), least * hands, hands)
    return [(samples[0][k * each : (k + 1) * each], samples[1][k * each : (k + 1) * each]) for k in range(hands)]


def _chosen(samples: Pair, which: Tensor) -> Pair:
    return samples[0][which], samples[1][which]


def by_class(pool: Pool, nodes: int, noun: str) -> list[Site]:
    """Returns sites of which site i holds a share of class i modulo the number of classes.

    Each is judged by all test samples of its class."""
    classes, parts = pool.classes, {}
    for c in range(min(classes, nodes)):
        mine, judge = (_chosen(samples, samples[1] == c) for samples in (pool.train, pool.test))
        parts[c] = dealt(mine, len(range(c, nodes, classes))), judge
    kinds = [f"{noun} {i % classes}" for i in range(nodes)]
    return [
        Site(parts[i % classes][0][i // classes], parts[i % classes][1], group=kind, name=f"site {i} ({kind})")
        for i, kind in enumerate(kinds)
    ]


@dataclass(frozen=True)
class OneClass(Partition):
    """Every site holds a single class: site i an equal share of class i modulo the number of classes.

    It is judged by all test samples of its class.

    Args:
        nodes: The number of sites, >= 1. Default: 10.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> samples = torch.zeros(40, 2), torch.arange(40) % 4
        >>> sites = fm.data.OneClass(nodes=4).sites(fm.data.Pool(samples, samples))
        >>> sites[1].train[1].unique().tolist()
        [1]
    """

    nodes: Count = 10

    def sites(self, pool: Pool) -> list[Site]:
        return by_class(pool, self.nodes, "class")


Tests = Literal["kind", "share"]


def unchanged(images: Tensor) -> Tensor:
    """Returns images as they are."""
    return images


def seen_through(views: Sequence[View], sites: Sequence[Site]) -> list[Site]:
    """Returns sites whose images are seen through a view each. Sites that share a set and a view share the result."""
    by_view: dict[View, Iterator[Site]] = {}
    for view in dict.fromkeys(views):
        alike = [site for site, other in zip(sites, views) if other is view]
        by_view[view] = iter(with_sets(alike, functools.partial(_seen, view)) if view is not unchanged else alike)
    return [next(by_view[view]) for view in views]


def _seen(view: View, pair: Pair, where: str) -> Pair:
    return view(pair[0]), pair[1]


def _altered(pool: Pool, kinds: Sequence[str], views: Sequence[View], tests: Tests) -> list[Site]:
    """Returns sites with equal shares of the samples, in order, each seen through its node's view. A site is judged by
    the whole test set seen through its view, or by an equal share of it."""
    judges = dealt(pool.test, len(kinds), least=1) if tests == "share" else [pool.test] * len(kinds)
    shares = zip(dealt(pool.train, len(kinds)), judges, kinds)
    return seen_through(views, [Site(*pairs, group=k, name=f"site {i} ({k})") for i, (*pairs, k) in enumerate(shares)])


@dataclass(frozen=True)
class Contrast(Partition):
    """Samples dealt equally, in their order, with the images of some sites at another contrast.

    Args:
        nodes: The number of sites, >= 1. Default: 20.
        factors: The contrast of site 0, 1, ..., > 0; the sites after these have contrast 1. Default:
            (0.5, 0.5, 1.5, 1.5).
        tests: What a site is judged by: "kind", the whole test set at its contrast, or "share", an equal share of it.
            Default: "kind".
        transform: How a byte P changes at contrast c: "published" as the authors of AD-GDA computed it, which leaves
            c = 1 unchanged, or "formula", clip(round((128 + c (P - 128))^1.1)), as their paper prints it. Default:
            "published".

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> samples = torch.full((40, 4, 4), 200, dtype=torch.uint8), torch.arange(40) % 4
        >>> sites = fm.data.Contrast(nodes=4, factors=[0.5, 1.5]).sites(fm.data.Pool(samples, samples))
        >>> [site.group for site in sites]
        ['low contrast', 'high contrast', 'original contrast', 'original contrast']
    """

    nodes: Count = 20
    factors: tuple[Positive, ...] = (0.5, 0.5, 1.5, 1.5)
    tests: Tests = "kind"
    transform: shifts.Transform = "published"

    def __post_init__(self):
        if len(self.factors) > self.nodes:
            raise BadInput(f"{len(self.factors)} contrast factors for {self.nodes} nodes; give at most one per node")

    def sites(self, pool: Pool) -> list[Site]:
        factors = (*self.factors, *(1.0,) * (self.nodes - len(self.factors)))
        kinds = [f"{'low' if c < 1 else 'high' if c > 1 else 'original'} contrast" for c in factors]
        views = {c: functools.partial(shifts.with_contrast, c=c, transform=self.transform) for c in factors}
        if self.transform == "published":
            views.pop(1.0, None)  # which leaves images unchanged
        return _altered(pool, kinds, [views.get(c, unchanged) for c in factors], self.tests)


@dataclass(frozen=True)
class Instrument(Partition):
    """Samples dealt equally, in their order, with the images of the last sites taken by a second instrument.

    Args:
        nodes: The number of sites, >= 1. Default: 10.
        odd: The number of sites that use the second instrument, 0 to `nodes`. Default: 2.
        transform: The second instrument: a "mirror", or a "camera" with its own focus, colours and contrast. Default:
            "mirror".
        tests: What a site is judged by: "kind", the whole test set seen through its instrument, or "share", an equal
            share of it. Default: "kind".

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> samples = torch.zeros(40, 4, 4, dtype=torch.uint8), torch.arange(40) % 4
        >>> sites = fm.data.Instrument(nodes=3, odd=1).sites(fm.data.Pool(samples, samples))
        >>> [site.group for site in sites]
        ['first instrument', 'first instrument', 'second instrument']
    """

    nodes: Count = 10
    odd: int = 2
    transform: Literal["mirror", "camera"] = "mirror"
    tests: Tests = "kind"

    def __post_init__(self):
        if not 0 <= self.odd <= self.nodes:
            raise BadInput(f"need 0 <= odd <= nodes, got nodes = {self.nodes}, odd = {self.odd}")

    def sites(self, pool: Pool) -> list[Site]:
        view = shifts.mirrored if self.transform == "mirror" else shifts.through_second_camera
        second = [i >= self.nodes - self.odd for i in range(self.nodes)]
        kinds = [f"{'second' if odd else 'first'} instrument" for odd in second]
        return _altered(pool, kinds, [view if odd else unchanged for odd in second], self.tests)


@dataclass(frozen=True)
class BySite(Partition):
    """One node per site that the data name, judged by all test samples of that site, if it has any.

    Args:
        nodes: The number of nodes that share each site's samples equally, one number per site; empty for one node
            each. With (8, 2), the first site's samples are shared by 8 nodes and the second's by 2. Default: ().

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> samples, place = (torch.zeros(40, 2), torch.arange(40) % 4), torch.arange(40) // 20
        >>> pool = fm.data.Pool(samples, samples, place, place, ("Lyon", "Nice"))
        >>> [site.name for site in fm.data.BySite().sites(pool)]
        ['Lyon', 'Nice']
    """

    nodes: tuple[Count, ...] = ()

    def sites(self, pool: Pool) -> list[Site]:
        if pool.sites is None or pool.test_sites is None:
            lacking = "by-site needs data that say where each sample was taken"
            raise BadInput(f"{lacking}; name a site column, or use another partition")
        counts = self.nodes or (1,) * len(pool.site_names)
        if len(counts) != len(pool.site_names):
            sites = f"{len(pool.site_names)} sites: {', '.join(pool.site_names)}"
            raise BadInput(f"nodes names {len(counts)} counts for {sites}")
        made: list[Site] = []
        for k, (name, count) in enumerate(zip(pool.site_names, counts)):
            judge = _chosen(pool.test, pool.test_sites == k)
            for share in dealt(_chosen(pool.train, pool.sites == k), count, least=1):
                label = f"site {len(made)} ({name})" if self.nodes else name
                made.append(Site(share, judge if len(judge[0]) else None, group=name, name=label))
        return made


def _sites_of(pool: Pool, train: Sequence[np.ndarray], test: Sequence[np.ndarray] | None = None) -> list[Site]:
    """Returns a site per list of training samples, judged by its own list of test samples or by all of them."""
    pairs = [_chosen(pool.train, torch.from_numpy(part)) for part in train]
    judges = [_chosen(pool.test, torch.from_numpy(part)) for part in test] if test else [pool.test] * len(pairs)
    return [Site(pair, judge, name=f"site {i}") for i, (pair, judge) in enumerate(zip(pairs, judges))]


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Label skew: each class is dealt in proportions drawn from a symmetric Dirichlet distribution.

    Training and test samples of a class have the same proportions. A site with fewer than two training samples or no
    test sample gets some from the site that has most of the class it holds most of.

    Args:
        nodes: The number of sites, >= 1. Default: 10.
        concentration: Parameter of the distribution, >= 0.001. The smaller it is, the fewer sites hold most of a class.
            Default: 0.5.
        seed: Seed of the deal, not of training, >= 0. Default: 0.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> samples = torch.zeros(40, 2), torch.arange(40) % 4
        >>> sites = fm.data.Dirichlet(nodes=4, concentration=0.1).sites(fm.data.Pool(samples, samples))
        >>> sites[0].train[1].bincount(minlength=4).tolist()
        [1, 0, 0, 9]
    """

    nodes: Count = 10
    concentration: _Concentration = 0.5
    seed: Natural = 0

    def sites(self, pool: Pool) -> list[Site]:
        generator = np.random.default_rng(self.seed)
        proportions = generator.dirichlet([self.concentration] * self.nodes, pool.classes)  # (classes, nodes)
        labels = [samples[1].numpy() for samples in (pool.train, pool.test)]
        train, test = (_by_proportions(of, proportions, generator) for of in labels)
        _even_out(train, labels[0], 2, train, labels[0])
        _even_out(test, labels[1], 1, train, labels[0])
        return _sites_of(pool, [np.sort(part) for part in train], [np.sort(part) for part in test])


def _by_proportions(labels: np.ndarray, proportions: np.ndarray, generator: np.random.Generator) -> list[np.ndarray]:
    hands: list[list[np.ndarray]] = [[] for _ in range(proportions.shape[1])]
    for c, shares in enumerate(proportions):
        mine = generator.permutation(np.flatnonzero(labels == c))
        cuts = np.round(np.cumsum(shares)[:-1] * len(mine)).astype(int)
        for hand, part in zip(hands, np.split(mine, cuts)):
            hand.append(part)
    return [np.concatenate(hand) for hand in hands]


def _even_out(
    hands: list[np.ndarray], labels: np.ndarray, least: int, own: list[np.ndarray], own_labels: np.ndarray
) -> None:
    """Moves samples, in place, to the nodes with fewer than `least`."""
    _refuse_few(len(labels), least * len(hands), len(hands))
    for i in range(len(hands)):
        while len(hands[i]) < least:
            wanted = np.bincount(own_labels[own[i]]).argmax() if len(own[i]) else -1
            givers = [j for j, hand in enumerate(hands) if len(hand) > least]
            giver = max(givers, key=lambda j: (np.count_nonzero(labels[hands[j]] == wanted), len(hands[j])))
            fitting = np.flatnonzero(labels[hands[giver]] == wanted)
            k = int(fitting[-1]) if len(fitting) else len(hands[giver]) - 1
            hands[i] = np.append(hands[i], hands[giver][k])
            hands[giver] = np.delete(hands[giver], k)


@dataclass(frozen=True)
class Shards(Partition):
    """Samples sorted by label and cut into equal shards, of which each site is dealt a few at random.

    A site is judged by the test samples at the same places of the sorted test set.

    Args:
        nodes: The number of sites, >= 1. Default: 10.
        per_node: Shards per site, >= 1. Default: 2.
        seed: Seed of the deal, not of training, >= 0. Default: 0.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> samples = torch.zeros(40, 2), torch.arange(40) % 4
        >>> sites = fm.data.Shards(nodes=4, per_node=2).sites(fm.data.Pool(samples, samples))
        >>> len(sites[0].train[0])
        10

    References:
        McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
        Decentralized Data, AISTATS 2017.
    """

    nodes: Count = 10
    per_node: Count = 2
    seed: Natural = 0

    def sites(self, pool: Pool) -> list[Site]:
        count = self.nodes * self.per_node
        (order, ends), (test_order, test_ends) = (_sorted(pair, pool.classes) for pair in (pool.train, pool.test))
        each = len(order) // count
        if each < 1 or each * self.per_node < 2:
            raise BadInput(f"{len(order)} samples are too few for {count} shards; use fewer nodes")
        cuts = each * np.arange(count + 1)
        test_cuts = np.round(np.interp(cuts, ends, test_ends)).astype(int)
        hands = np.random.default_rng(self.seed).permutation(count).reshape(self.nodes, self.per_node)
        train = [np.concatenate([order[cuts[k] : cuts[k + 1]] for k in hand]) for hand in hands]
        test = [np.concatenate([test_order[test_cuts[k] : test_cuts[k + 1]] for k in hand]) for hand in hands]
        if not all(map(len, test)):
            raise BadInput(f"{len(test_order)} test samples are too few for {count} shards; use fewer nodes")
        return _sites_of(pool, train, test)


def _sorted(samples: Pair, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the order that sorts the samples by label, and where each class begins, with the end of the last."""
    labels = samples[1].numpy()
    ends = np.cumsum(np.bincount(labels, minlength=classes))
    return np.argsort(labels, kind="stable"), np.concatenate([[0], ends])


@dataclass(frozen=True)
class Quantity(Partition):
    """Size skew: samples dealt at random, in proportions drawn from a symmetric Dirichlet distribution.

    Every site gets at least two samples, of all classes alike, and is judged by the whole test set.

    Args:
        nodes: The number of sites, >= 1. Default: 10.
        concentration: Parameter of the distribution, >= 0.001. The smaller it is, the more the sizes differ. Default:
            0.5.
        seed: Seed of the deal, not of training, >= 0. Default: 0.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> samples = torch.zeros(40, 2), torch.arange(40) % 4
        >>> sites = fm.data.Quantity(nodes=3, concentration=0.5).sites(fm.data.Pool(samples, samples))
        >>> sum(len(site.train[0]) for site in sites)
        40
    """

    nodes: Count = 10
    concentration: _Concentration = 0.5
    seed: Natural = 0

    def sites(self, pool: Pool) -> list[Site]:
        generator = np.random.default_rng(self.seed)
        count = len(pool.train[0])
        _refuse_few(count, 2 * self.nodes, self.nodes)
        shares = np.cumsum(generator.dirichlet([self.concentration] * self.nodes))[:-1]
        cuts = np.round(shares * (count - 2 * self.nodes)).astype(int) + 2 * np.arange(1, self.nodes)
        return _sites_of(pool, np.split(generator.permutation(count), cuts))


@dataclass(frozen=True)
class Even(Partition):
    """Samples dealt equally at random. Every site is judged by the whole test set.

    Args:
        nodes: The number of sites, >= 1. Default: 10.
        seed: Seed of the deal, not of training, >= 0. Default: 0.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> samples = torch.zeros(40, 2), torch.arange(40) % 4
        >>> sites = fm.data.Even(nodes=4).sites(fm.data.Pool(samples, samples))
        >>> [len(site.train[0]) for site in sites]
        [10, 10, 10, 10]
    """

    nodes: Count = 10
    seed: Natural = 0

    def sites(self, pool: Pool) -> list[Site]:
        each = len(dealt(pool.train, self.nodes)[0][0])
        order = np.random.default_rng(self.seed).permutation(len(pool.train[0]))
        return _sites_of(pool, np.split(order[: each * self.nodes], self.nodes))


register(
    Partition,
    {
        "one-class": OneClass,
        "contrast": Contrast,
        "instrument": Instrument,
        "by-site": BySite,
        "dirichlet": Dirichlet,
        "shards": Shards,
        "quantity": Quantity,
        "even": Even,
    },
)
