"""Who holds what: a pool of samples dealt to sites."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fairmesh.config.tables import register
from fairmesh.data import shifts
from fairmesh.data.site import Site
from fairmesh.errors import BadInput

Pair = tuple[Tensor, Tensor]  # inputs (samples, ...), targets (samples, ...)


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a dataset before they are dealt; where each comes from, if that is known."""

    train: Pair
    test: Pair
    sites: Tensor | None = None  # (training samples,) where each was taken, as an index into site_names
    test_sites: Tensor | None = None
    site_names: tuple[str, ...] = ()

    def __post_init__(self):
        for what, samples, sites in (("training", self.train, self.sites), ("test", self.test, self.test_sites)):
            sizes = [len(t) for t in (*samples, sites) if t is not None]
            if len(set(sizes)) > 1:
                raise BadInput(f"{what} samples do not go together: inputs, targets and sites number {sizes}")

    @property
    def classes(self) -> int:
        """How many classes the labels name."""
        targets = self.train[1]
        if targets.is_floating_point() or targets.ndim != 1:
            raise BadInput(
                "this partition deals by label, but the targets are not labels; use even, quantity or by-site"
            )
        return 1 + int(max(targets.max(), self.test[1].max()))


class Partition(ABC):
    """Deals a pool to sites."""

    @abstractmethod
    def sites(self, pool: Pool) -> list[Site]:
        """One site per node, in the order of the nodes."""


def _check_nodes(nodes: int, seed: int = 0) -> None:
    if nodes < 1:
        raise BadInput(f"nodes must be >= 1, got {nodes}")
    if seed < 0:
        raise BadInput(f"seed must be >= 0, got {seed}")


def dealt(samples: Pair, hands: int, least: int = 2) -> list[Pair]:
    """Equal shares of the samples, in order; what does not go round is left."""
    each = len(samples[0]) // hands
    if each < least:
        raise BadInput(f"{len(samples[0])} samples do not go round {hands} sites; use fewer nodes")
    return [(samples[0][k * each : (k + 1) * each], samples[1][k * each : (k + 1) * each]) for k in range(hands)]


def _chosen(samples: Pair, which: Tensor) -> Pair:
    return samples[0][which], samples[1][which]


def by_class(pool: Pool, nodes: int, noun: str) -> list[Site]:
    """Site i holds a share of class i modulo the number of classes, judged by all test samples of that class."""
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
    """Site i holds an equal share of class i modulo the number of classes, and is judged by all test samples of it."""

    nodes: int = 10

    def __post_init__(self):
        _check_nodes(self.nodes)

    def sites(self, pool: Pool) -> list[Site]:
        return by_class(pool, self.nodes, "class")


Tests = Literal["kind", "share"]


def _altered(pool: Pool, kinds: Sequence[str], views: Sequence, tests: Tests) -> list[Site]:
    """Equal shares in order, each seen through its node's view (a function of images; None leaves them), and judged by
    the whole test set seen so, one object for each view, or by an equal share of it."""
    nodes, judges = len(kinds), {}
    shares = dealt(pool.test, nodes, least=1) if tests == "share" else None
    made = []
    for i, ((inputs, targets), kind, view) in enumerate(zip(dealt(pool.train, nodes), kinds, views)):
        if shares is None and view not in judges:
            judges[view] = (view(pool.test[0]), pool.test[1]) if view else pool.test
        judge = judges[view] if shares is None else (view(shares[i][0]) if view else shares[i][0], shares[i][1])
        made.append(Site((view(inputs) if view else inputs, targets), judge, group=kind, name=f"site {i} ({kind})"))
    return made


@dataclass(frozen=True)
class _AtContrast:
    factor: float
    transform: shifts.Transform

    def __call__(self, images: Tensor) -> Tensor:
        return shifts.with_contrast(images, self.factor, self.transform)


@dataclass(frozen=True)
class Contrast(Partition):
    """Samples dealt equally in their order; node i sees them at contrast `factors[i]`, the nodes after those at 1.

    The two readings of the transform are in `shifts.contrast_table`. `tests = "kind"`: a node is judged by the
    whole test set at its own contrast; "share": by an equal share of it."""

    nodes: int = 20
    factors: tuple[float, ...] = (0.5, 0.5, 1.5, 1.5)
    tests: Tests = "kind"
    transform: shifts.Transform = "published"

    def __post_init__(self):
        _check_nodes(self.nodes)
        if len(self.factors) > self.nodes:
            raise BadInput(f"{len(self.factors)} contrast factors for {self.nodes} nodes; give at most one a node")
        bad = [factor for factor in self.factors if not (math.isfinite(factor) and factor > 0)]
        if bad:
            raise BadInput(f"a contrast factor must be a finite number > 0, got {bad[0]}")

    def sites(self, pool: Pool) -> list[Site]:
        factors = (*self.factors, *(1.0,) * (self.nodes - len(self.factors)))
        kinds = [f"{'low' if c < 1 else 'high' if c > 1 else 'original'} contrast" for c in factors]
        untouched = self.transform == "published"
        views = [None if untouched and c == 1 else _AtContrast(c, self.transform) for c in factors]
        return _altered(pool, kinds, views, self.tests)


@dataclass(frozen=True)
class Instrument(Partition):
    """Samples dealt equally in their order; the last `odd` nodes see them through a second instrument: a "mirror", or a
    "camera" with its own focus, colours and contrast."""

    nodes: int = 10
    odd: int = 2
    transform: Literal["mirror", "camera"] = "mirror"
    tests: Tests = "kind"

    def __post_init__(self):
        _check_nodes(self.nodes)
        if not 0 <= self.odd <= self.nodes:
            raise BadInput(f"need 0 <= odd <= nodes, got nodes = {self.nodes}, odd = {self.odd}")

    def sites(self, pool: Pool) -> list[Site]:
        view = shifts.mirrored if self.transform == "mirror" else shifts.through_second_camera
        second = [i >= self.nodes - self.odd for i in range(self.nodes)]
        kinds = [f"{'second' if odd else 'first'} instrument" for odd in second]
        return _altered(pool, kinds, [view if odd else None for odd in second], self.tests)


@dataclass(frozen=True)
class BySite(Partition):
    """One node for each site that the data name, judged by all test samples of it; with `nodes = (8, 2)`, the first
    site's samples are shared equally by 8 nodes and the second's by 2."""

    nodes: tuple[int, ...] = ()

    def __post_init__(self):
        for count in self.nodes:
            _check_nodes(count)

    def sites(self, pool: Pool) -> list[Site]:
        if pool.sites is None or pool.test_sites is None:
            raise BadInput(
                "by-site needs data that say where each sample was taken; name a site column, or use another partition"
            )
        counts = self.nodes or (1,) * len(pool.site_names)
        if len(counts) != len(pool.site_names):
            known = ", ".join(pool.site_names)
            raise BadInput(f"nodes names {len(counts)} counts for {len(pool.site_names)} sites: {known}")
        made: list[Site] = []
        for k, (name, count) in enumerate(zip(pool.site_names, counts)):
            judge = _chosen(pool.test, pool.test_sites == k)
            if not len(judge[0]):
                raise BadInput(f"site {name!r} has no test sample; give it some, or leave the site out")
            for share in dealt(_chosen(pool.train, pool.sites == k), count, least=1):
                label = f"site {len(made)} ({name})" if self.nodes else name
                made.append(Site(share, judge, group=name, name=label))
        return made


def _sites_of(pool: Pool, train: Sequence[np.ndarray], test: Sequence[np.ndarray] | None = None) -> list[Site]:
    """A site for each list of training samples, judged by its own list of test samples or by all of them."""
    pairs = [_chosen(pool.train, torch.from_numpy(part)) for part in train]
    judges = [_chosen(pool.test, torch.from_numpy(part)) for part in test] if test else [pool.test] * len(pairs)
    return [Site(pair, judge, name=f"site {i}") for i, (pair, judge) in enumerate(zip(pairs, judges))]


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Label skew: the samples of each class, training and test, are dealt in proportions drawn from a symmetric
    Dirichlet distribution; the smaller its `concentration`, the more a class sits at few nodes. A node left with less
    than two training samples or no test sample is given some of the class that most of its own are of, or of any, by
    whoever has most."""

    nodes: int = 10
    concentration: float = 0.5
    seed: int = 0  # of the deal, not of training

    def __post_init__(self):
        _check_nodes(self.nodes, self.seed)
        _check_concentration(self.concentration)

    def sites(self, pool: Pool) -> list[Site]:
        generator = np.random.default_rng(self.seed)
        proportions = generator.dirichlet([self.concentration] * self.nodes, pool.classes)  # (classes, nodes)
        labels = [samples[1].numpy() for samples in (pool.train, pool.test)]
        train, test = (_by_proportions(of, proportions, generator) for of in labels)
        _even_out(train, labels[0], 2, train, labels[0])
        _even_out(test, labels[1], 1, train, labels[0])
        return _sites_of(pool, [np.sort(part) for part in train], [np.sort(part) for part in test])


def _check_concentration(concentration: float) -> None:
    if not (math.isfinite(concentration) and concentration >= 0.001):
        raise BadInput(f"concentration must be a finite number >= 0.001, got {concentration}")


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
    """Moves samples, in place, to the nodes with less than `least`."""
    if len(labels) < least * len(hands):
        raise BadInput(f"{len(labels)} samples do not go round {len(hands)} sites; use fewer nodes")
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
    """Training samples sorted by label and cut into equal shards, of which each node is dealt `per_node` at random; it
    is judged by the test samples of the same shards: of each class, the same stretch."""

    nodes: int = 10
    per_node: int = 2
    seed: int = 0  # of the deal, not of training

    def __post_init__(self):
        _check_nodes(self.nodes, self.seed)
        if self.per_node < 1:
            raise BadInput(f"per_node must be >= 1, got {self.per_node}")

    def sites(self, pool: Pool) -> list[Site]:
        count = self.nodes * self.per_node
        (order, ends), (test_order, test_ends) = (
            _sorted(samples[1].numpy(), pool.classes) for samples in (pool.train, pool.test)
        )
        each = len(order) // count
        if each < 1 or each * self.per_node < 2:
            raise BadInput(f"{len(order)} samples do not go round {count} shards; use fewer nodes")
        cuts = each * np.arange(count + 1)
        test_cuts = np.round(np.interp(cuts, ends, test_ends)).astype(int)
        hands = np.random.default_rng(self.seed).permutation(count).reshape(self.nodes, self.per_node)
        train = [np.concatenate([order[cuts[k] : cuts[k + 1]] for k in hand]) for hand in hands]
        test = [np.concatenate([test_order[test_cuts[k] : test_cuts[k + 1]] for k in hand]) for hand in hands]
        if not all(map(len, test)):
            raise BadInput(f"{len(test_order)} test samples do not go round {count} shards; use fewer nodes")
        return _sites_of(pool, train, test)


def _sorted(labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples in the order of their labels, and where each class begins; the last ends there."""
    ends = np.cumsum(np.bincount(labels, minlength=classes))
    return np.argsort(labels, kind="stable"), np.concatenate([[0], ends])


@dataclass(frozen=True)
class Quantity(Partition):
    """Sizes skewed, labels not: samples dealt at random in proportions drawn from a symmetric Dirichlet distribution,
    at least two to a node; every node is judged by the whole test set."""

    nodes: int = 10
    concentration: float = 0.5
    seed: int = 0  # of the deal, not of training

    def __post_init__(self):
        _check_nodes(self.nodes, self.seed)
        _check_concentration(self.concentration)

    def sites(self, pool: Pool) -> list[Site]:
        generator = np.random.default_rng(self.seed)
        free = len(pool.train[0]) - 2 * self.nodes
        if free < 0:
            raise BadInput(f"{len(pool.train[0])} samples do not go round {self.nodes} sites; use fewer nodes")
        shares = np.cumsum(generator.dirichlet([self.concentration] * self.nodes))[:-1]
        cuts = np.round(shares * free).astype(int) + 2 * np.arange(1, self.nodes)
        return _sites_of(pool, np.split(generator.permutation(len(pool.train[0])), cuts))


@dataclass(frozen=True)
class Even(Partition):
    """Samples dealt equally at random; every node is judged by the whole test set."""

    nodes: int = 10
    seed: int = 0  # of the deal, not of training

    def __post_init__(self):
        _check_nodes(self.nodes, self.seed)

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
