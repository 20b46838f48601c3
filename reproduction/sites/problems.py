"""The problems of the bench: sites that differ in one documented way, of natural sizes.

Half of the problems are for development. The other half is held back: it is run once, after all choices are made.
`reproduction.sites.twins` has those with numbers to predict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairmesh.data.site import Site
from fairmesh.errors import BadInput
from fairmesh.problems.models import FullyConnected, Logistic, Model
from reproduction.sites import sources
from reproduction.sites.instruments import (
    Change,
    Relabel,
    blurred,
    calibrated,
    coarse,
    faint,
    half_of,
    mirrored,
    mistaken,
    noisy,
    renamed,
    shifted,
    then,
    thick,
    thin,
    turned,
)
from reproduction.sites.site_problem import SiteProblem
from reproduction.sites.sources import Generator, Pool
from reproduction.sites.twins import TWINS


@dataclass(frozen=True)
class SmallCNN(Model):
    """Two convolutions with stride 2, to 8 and 16 channels, and a linear layer: a tenth of the paper's CNN in cost."""

    def build(self, shape: torch.Size, classes: int) -> nn.Module:
        channels, height, width = shape
        return nn.Sequential(
            nn.Conv2d(channels, 8, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * -(-height // 4) * -(-width // 4), classes),
        )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What one site of a problem holds.

    Args:
        rows: Training rows.
        group: What the site has in common with others.
        shares: The share of each class by its label; classes that are not named share the rest equally. None for the
            shares of the whole set.
        change: What the site's instrument does to inputs.
        relabel: What the site does to labels.
    """

    rows: int
    group: str = "usual"
    shares: Mapping[int, float] | None = None
    change: Change | None = None
    relabel: Relabel | None = None


def dealt(load: Callable[[Generator], Pool], parts: Sequence[Part], test_rows: int) -> Callable[[int], list[Site]]:
    """Returns the sites of a split as a function of its number.

    No training row is dealt twice. The test rows of a site have its shares of classes, its instrument and its labels.
    They repeat only where a class has fewer test rows than the site needs; sites may be tested on the same rows."""

    def sites(split: int) -> list[Site]:
        rng = np.random.default_rng(split)
        pool = load(rng)
        labels = pool.train[1].numpy()
        classes = int(labels.max()) + 1
        usual = np.bincount(labels, minlength=classes) / len(labels)
        shares = [_shares(part, usual) for part in parts]
        train = _train_rows(labels, [_counts(part.rows, share) for part, share in zip(parts, shares)], rng)
        made = []
        for i, (part, share) in enumerate(zip(parts, shares)):
            test = _test_rows(pool.test[1].numpy(), _counts(test_rows, share), rng)
            made.append(
                Site(
                    _held(pool, pool.train, train[i], part, rng),
                    test=_held(pool, pool.test, test, part, rng),
                    group=part.group,
                    name=f"site {i} ({part.group}, {part.rows})",
                )
            )
        return made

    return sites


def _shares(part: Part, usual: np.ndarray) -> np.ndarray:
    if part.shares is None:
        return usual
    rest = (1 - sum(part.shares.values())) / max(1, len(usual) - len(part.shares))
    return np.array([part.shares.get(k, rest) for k in range(len(usual))])


def _counts(rows: int, shares: np.ndarray) -> np.ndarray:
    """Returns rows per class, which sum to `rows`."""
    return np.diff(np.round(np.cumsum(shares) * rows), prepend=0).astype(int)


def _train_rows(labels: np.ndarray, counts: Sequence[np.ndarray], rng: Generator) -> list[np.ndarray]:
    """Returns each site's rows, none of them twice, in random order."""
    by_class = []
    for k, wanted in enumerate(np.transpose(counts)):
        order = rng.permutation(np.flatnonzero(labels == k))
        if wanted.sum() > len(order):
            raise BadInput(f"class {k}: the sites need {wanted.sum()} training rows, but there are {len(order)}")
        by_class.append(np.split(order, np.cumsum(wanted))[:-1])
    return [rng.permutation(np.concatenate(rows)) for rows in zip(*by_class)]


def _test_rows(labels: np.ndarray, counts: np.ndarray, rng: Generator) -> np.ndarray:
    """Returns rows by class; where there are too few, all occur once before any occurs twice."""
    return np.concatenate(
        [np.resize(rng.permutation(np.flatnonzero(labels == k)), wanted) for k, wanted in enumerate(counts)]
    )


def _held(
    pool: Pool, given: tuple[Tensor, Tensor], rows: np.ndarray, part: Part, rng: Generator
) -> tuple[Tensor, Tensor]:
    """Returns rows as a site holds them: its instrument works on full images, which are reduced afterwards."""
    inputs, labels = given[0][rows], given[1][rows]
    if inputs.ndim > 2:
        inputs = sources.as_images(inputs)
    if part.change is not None:
        inputs = part.change(inputs, rng)
    if inputs.ndim > 2:
        inputs = torch.nn.functional.avg_pool2d(inputs[:, None], pool.scale)
    return inputs, labels if part.relabel is None else part.relabel(labels, rng)


def _usual(*rows: int, **same: Any) -> list[Part]:
    return [Part(n, **same) for n in rows]


# Generated tables: every split draws new rows by the same truth.

_COLUMNS, _TABLE_TEST = 8, 2000


def _rows(
    rng: Generator, count: int, centre: float, angle: Callable[[np.ndarray], np.ndarray], sharpness: float
) -> tuple[Tensor, Tensor]:
    """Returns rows of two classes. Column 0 lies around `centre`; the classes differ along a direction in columns 1 and
    2 whose angle may depend on column 0. The other columns are noise."""
    x = rng.standard_normal((count, _COLUMNS))
    x[:, 0] = centre + 0.5 * x[:, 0]
    turn = angle(x[:, 0])
    margin = np.cos(turn) * x[:, 1] + np.sin(turn) * x[:, 2]
    y = rng.random(count) < 1 / (1 + np.exp(-sharpness * margin))
    return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.int64)


def _covariate_table(split: int) -> list[Site]:
    """One rule for all sites: the angle of the boundary is 0.8 x_0. Two sites hold rows of large x_0."""

    def drawn(rng: Generator, count: int, centre: float) -> tuple[Tensor, Tensor]:
        return _rows(rng, count, centre, lambda x: 0.8 * x, 5.0)

    rng = np.random.default_rng(split)
    sizes = {"low": (900, 600, 400, 300, 200, 150), "high": (90, 60)}
    return [
        Site(
            drawn(rng, n, {"low": -0.5, "high": 1.5}[group]),
            test=drawn(rng, _TABLE_TEST, {"low": -0.5, "high": 1.5}[group]),
            group=group,
            name=f"{group} x_0, {n} rows",
        )
        for group, rows in sizes.items()
        for n in rows
    ]


CONCEPT_ANGLE = np.pi / 3


def _concept_table(split: int) -> list[Site]:
    """The boundary is turned by 60 degrees at two of nine sites. The best common line for the worst site is halfway."""
    rng = np.random.default_rng(split)
    sizes = {"usual": (700, 500, 400, 300, 250, 200, 150), "turned": (200, 120)}
    turns = {"usual": 0.0, "turned": CONCEPT_ANGLE}

    def drawn(count: int, group: str) -> tuple[Tensor, Tensor]:
        return _rows(rng, count, 0.0, lambda x: np.full_like(x, turns[group]), 6.0)

    return [
        Site(drawn(n, group), test=drawn(_TABLE_TEST, group), group=group, name=f"{group}, {n} rows")
        for group, rows in sizes.items()
        for n in rows
    ]


def _two_populations_table(split: int) -> list[Site]:
    """One site of eight holds two populations in equal parts: the usual one, and one with large x_0 and its own
    boundary, which column 0 tells apart."""
    rng = np.random.default_rng(split)

    def usual(count: int) -> tuple[Tensor, Tensor]:
        return _rows(rng, count, -0.5, np.zeros_like, 5.0)

    def both(count: int) -> tuple[Tensor, Tensor]:
        other = _rows(rng, count - count // 2, 1.5, lambda x: np.full_like(x, np.pi / 2), 5.0)
        order = torch.from_numpy(rng.permutation(count))
        return tuple(torch.cat(pair)[order] for pair in zip(usual(count // 2), other))  # type: ignore[return-value]

    made = [
        Site(usual(n), test=usual(_TABLE_TEST), group="one population", name=f"one population, {n} rows")
        for n in (800, 500, 350, 250, 200, 150, 100)
    ]
    return [*made, Site(both(160), test=both(_TABLE_TEST), group="two populations", name="two populations, 160 rows")]


DEVELOPMENT = (
    SiteProblem(
        "covariate-table", "development", "covariate shift",
        "All 8 sites follow one rule with a curved boundary; the 2 smallest hold rows from another region.",
        FullyConnected(10), 600, _covariate_table,
    ),
    SiteProblem(
        "concept-table", "development", "concept shift",
        "The boundary of 2 of 9 sites is turned by 60 degrees; a linear model cannot follow both.",
        Logistic(), 400, _concept_table,
    ),
    SiteProblem(
        "label-shift-digits", "development", "label shift",
        "8 sites hold all digits; one of 10 holds mostly 3 and 9, one mostly 1 and 8, which are often confused.",
        Logistic(), 600,
        dealt(sources.digits, [
            *_usual(150, 120, 100, 90, 80, 60, 50, 40),
            Part(50, "mostly 3 and 9", {3: 0.4, 9: 0.4}),
            Part(40, "mostly 1 and 8", {1: 0.4, 8: 0.4}),
        ], 500),
    ),
    SiteProblem(
        "mirrored-digits", "development", "instrument",
        "The scanner of 2 of 10 sites mirrors every image, as in the demo.",
        Logistic(), 600,
        dealt(sources.digits, [
            *_usual(150, 130, 110, 100, 90, 80, 70, 60),
            *_usual(90, 70, group="mirrored", change=mirrored),
        ], 500),
    ),
    SiteProblem(
        "instruments-digits", "development", "instrument",
        "6 of 10 sites have the usual scanner; one each is blurred, faint, noisy and turned by 45 degrees.",
        FullyConnected(25), 600,
        dealt(sources.digits, [
            *_usual(160, 140, 120, 100, 80, 60),
            Part(80, "blurred", change=blurred(3)),
            Part(70, "faint", change=faint(0.4, 0.4)),
            Part(70, "noisy", change=noisy(0.3)),
            Part(60, "turned", change=turned(45)),
        ], 500),
    ),
    SiteProblem(
        "label-noise-digits", "development", "label noise",
        "40 % of the labels of one of 10 sites are wrong, in training and in testing.",
        Logistic(), 600,
        dealt(sources.digits, [
            *_usual(150, 130, 110, 100, 90, 80, 70, 60, 50),
            Part(100, "wrong labels", relabel=mistaken(0.4, 10)),
        ], 500),
    ),
    SiteProblem(
        "small-sites-digits", "development", "small sites",
        "3 of 9 sites have 30 to 45 rows, and their images are shifted by one pixel.",
        FullyConnected(25), 600,
        dealt(sources.digits, [
            *_usual(220, 180, 150, 120, 100, 80),
            Part(45, "shifted", change=shifted(1, 0)),
            Part(36, "shifted", change=shifted(1, 0)),
            Part(30, "shifted", change=shifted(1, 0)),
        ], 500),
    ),
    SiteProblem(
        "rare-classes-digits", "development", "rare classes",
        "The digits 8 and 9 occur only at 2 of 8 sites, which are small.",
        Logistic(), 600,
        dealt(sources.digits, [
            *_usual(180, 150, 120, 100, 80, 60, shares={8: 0.0, 9: 0.0}),
            *_usual(60, 40, group="with 8 and 9", shares={8: 0.3, 9: 0.3}),
        ], 500),
    ),
    SiteProblem(
        "two-populations-table", "development", "two populations",
        "Half of the rows of one of 8 sites come from another population with its own boundary.",
        FullyConnected(10), 600, _two_populations_table,
    ),
    SiteProblem(
        "all-alike-digits", "development", "all alike",
        "10 sites differ in nothing but their sizes, 30 to 220.",
        Logistic(), 600,
        dealt(sources.digits, _usual(220, 170, 130, 105, 85, 70, 58, 48, 38, 30), 500),
    ),
)  # fmt: skip

HELD_BACK = (
    SiteProblem(
        "covariate-mnist", "held-back", "covariate shift",
        "6 of 10 sites write usual strokes; one each writes thin, thick, very thick, and thick and shifted ones.",
        FullyConnected(25), 600,
        dealt(sources.mnist, [
            *_usual(1500, 1000, 700, 500, 350, 250),
            Part(200, "thin", change=thin),
            Part(300, "thick", change=thick()),
            Part(200, "very thick", change=thick(2)),
            Part(150, "thick, shifted", change=then(thick(), shifted(3, 3))),
        ], 1000),
    ),
    SiteProblem(
        "label-shift-fashion", "held-back", "label shift",
        "9 sites hold all classes; one of 12 holds mostly shirts and coats, one mostly pullovers, one mostly shoes.",
        FullyConnected(25), 600,
        dealt(sources.fashion, [
            *_usual(1200, 900, 700, 550, 400, 300, 250, 200, 150),
            Part(250, "shirts and coats", {4: 0.3, 6: 0.5}),
            Part(150, "pullovers", {2: 0.7}),
            Part(200, "shoes", {5: 0.25, 7: 0.35, 9: 0.25}),
        ], 1000),
    ),
    SiteProblem(
        "concept-mnist", "held-back", "concept shift",
        "2 of 9 sites follow another convention of labels: 4 and 9 are exchanged, and so are 1 and 7.",
        FullyConnected(25), 500,
        dealt(sources.mnist, [
            *_usual(1000, 800, 600, 450, 350, 250, 200),
            *_usual(400, 250, group="other convention", relabel=renamed({4: 9, 9: 4, 1: 7, 7: 1})),
        ], 1000),
    ),
    SiteProblem(
        "instruments-fashion", "held-back", "instrument",
        "7 of 12 sites have the usual instrument; one each is blurred, faint, noisy, coarse and turned by 30 degrees.",
        FullyConnected(25), 800,
        dealt(sources.fashion, [
            *_usual(1200, 900, 700, 500, 400, 300, 200),
            Part(250, "blurred", change=blurred(7)),
            Part(250, "faint", change=faint(0.3, 0.3)),
            Part(200, "noisy", change=noisy(0.5)),
            Part(200, "coarse", change=coarse(7)),
            Part(150, "turned", change=turned(30)),
        ], 1000),
    ),
    SiteProblem(
        "label-noise-fashion", "held-back", "label noise",
        "35 % of the labels of one of 9 sites are wrong, in training and in testing.",
        FullyConnected(25), 600,
        dealt(sources.fashion, [
            *_usual(1200, 900, 700, 500, 350, 250, 200, 150),
            Part(600, "wrong labels", relabel=mistaken(0.35, 10)),
        ], 1000),
    ),
    SiteProblem(
        "small-sites-breast-cancer", "held-back", "small sites",
        "8 sites of 30 to 70 rows; the instrument of the 2 smallest has drifted in a third of the columns.",
        Logistic(), 300,
        dealt(sources.breast_cancer, [
            *_usual(70, 50, 44, 38, 34, 32),
            *_usual(30, 30, group="drifted", change=calibrated(0.7, 1.0, 10)),
        ], 220),
    ),
    SiteProblem(
        "rare-classes-fashion", "held-back", "rare classes",
        "Coats and sandals occur only at 2 of 10 sites, which are small.",
        FullyConnected(25), 600,
        dealt(sources.fashion, [
            *_usual(1200, 900, 700, 500, 350, 250, 200, 150, shares={4: 0.0, 5: 0.0}),
            *_usual(200, 120, group="with coats and sandals", shares={4: 0.3, 5: 0.3}),
        ], 1000),
    ),
    SiteProblem(
        "two-populations-mnist", "held-back", "two populations",
        "Half of the digits of one of 8 sites are upside down.",
        FullyConnected(25), 600,
        dealt(sources.mnist, [
            *_usual(1200, 900, 600, 450, 350, 250, 200),
            Part(400, "half upside down", change=half_of(turned(180))),
        ], 1500),
    ),
    SiteProblem(
        "all-alike-fashion", "held-back", "all alike",
        "10 sites differ in nothing but their sizes, 50 to 1,500.",
        FullyConnected(25), 600,
        dealt(sources.fashion, _usual(1500, 1000, 700, 500, 350, 250, 180, 120, 80, 50), 1000),
    ),
    SiteProblem(
        "instruments-cifar", "held-back", "instrument",
        "7 of 10 sites have the usual camera; one each is faint, blurred and upside down.",
        SmallCNN(), 600,
        dealt(sources.cifar, [
            *_usual(3000, 2000, 1500, 1200, 900, 700, 500),
            Part(600, "faint", change=faint(0.25, 0.5)),
            Part(600, "blurred", change=blurred(7)),
            Part(500, "upside down", change=turned(180)),
        ], 1000),
    ),
)  # fmt: skip

PROBLEMS = {problem.name: problem for problem in (*DEVELOPMENT, *HELD_BACK, *TWINS)}
