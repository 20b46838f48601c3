"""Twins of the bench with numbers to predict: the same kinds of differences between sites, for regression.

Every split draws new rows by the same truth. Columns and targets are standardised over the training rows of all sites,
as `fm.data.Table` does it. Correlated columns share a factor, which makes the largest curvature of the squared loss
some 10 to 35 times that of independent columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fairmesh.data.site import Site
from fairmesh.problems.models import FullyConnected, Logistic
from reproduction.sites.site_problem import SiteProblem
from reproduction.sites.sources import Generator

_TEST_ROWS = 1000
_SMALLEST_SPREAD = 1e-6


@dataclass(frozen=True)
class Hospital:
    """One site of a twin, before columns are standardised.

    Args:
        rows: Training rows.
        group: What the site has in common with others.
        centre: Where its column 0 lies.
        truth: Which of the problem's truths its targets follow.
        noise: Spread of what no model can predict, in units of the targets of one truth.
        gain: What its instrument makes of every second column.
        offset: What its instrument adds to every second column.
        mixed: Whether half of its rows lie at the centre 2.0 and follow the truth 1.
    """

    rows: int
    group: str = "usual"
    centre: float = 0.0
    truth: int = 0
    noise: float = 0.5
    gain: float = 1.0
    offset: float = 0.0
    mixed: bool = False


Truth = Callable[[np.ndarray], np.ndarray]


def _drawn(
    rng: Generator, count: int, site: Hospital, truths: Sequence[Truth], columns: int, shared: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns columns and targets as a site measures them; `shared` is the correlation between the columns."""
    if site.mixed:
        usual, other = replace(site, mixed=False), replace(site, mixed=False, centre=2.0, truth=1)
        parts = [
            _drawn(rng, n, of, truths, columns, shared) for n, of in ((count // 2, usual), (count - count // 2, other))
        ]
        order = rng.permutation(count)
        return np.concatenate([x for x, _ in parts])[order], np.concatenate([y for _, y in parts])[order]
    x = np.sqrt(shared) * rng.standard_normal((count, 1)) + np.sqrt(1 - shared) * rng.standard_normal((count, columns))
    x[:, 0] += site.centre
    y = truths[site.truth](x) + site.noise * rng.standard_normal(count)
    x[:, 1::2] = site.gain * x[:, 1::2] + site.offset
    return x, y


def twin(
    hospitals: Sequence[Hospital], truths: Sequence[Truth], columns: int = 8, shared: float = 0.0
) -> Callable[[int], list[Site]]:
    """Returns the sites of a split as a function of its number.

    Args:
        hospitals: The sites.
        truths: Functions of the columns that the targets follow.
        columns: Number of columns.
        shared: Correlation between any two columns.
    """

    def sites(split: int) -> list[Site]:
        rng = np.random.default_rng(split)
        train = [_drawn(rng, site.rows, site, truths, columns, shared) for site in hospitals]
        test = [_drawn(rng, _TEST_ROWS, site, truths, columns, shared) for site in hospitals]
        centres, spreads = zip(*(_scale(np.concatenate(rows)) for rows in zip(*train)))

        def scaled(rows: tuple[np.ndarray, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = ((part - centre) / spread for part, centre, spread in zip(rows, centres, spreads))
            return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.float32)[:, None]

        return [
            Site(scaled(train[i]), test=scaled(test[i]), group=site.group, name=f"site {i} ({site.group}, {site.rows})")
            for i, site in enumerate(hospitals)
        ]

    return sites


def _scale(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows.mean(axis=0), np.maximum(rows.std(axis=0), _SMALLEST_SPREAD)


def _usual(*rows: int, **same: float) -> list[Hospital]:
    return [Hospital(n, **same) for n in rows]  # type: ignore[arg-type]


def _line(x: np.ndarray) -> np.ndarray:
    """Returns a sum over all columns whose coefficients alternate and fall off."""
    signs = np.where(np.arange(x.shape[1]) % 2, -1.0, 1.0)
    return x @ (signs * 2.0 / (1 + np.arange(x.shape[1])))


def _turned(x: np.ndarray) -> np.ndarray:
    """Returns columns 1 and 2 along a direction that is 60 degrees from that of `_first`."""
    return x[:, 1] * np.cos(np.pi / 3) + x[:, 2] * np.sin(np.pi / 3)


def _first(x: np.ndarray) -> np.ndarray:
    return x[:, 1]


def _curved(x: np.ndarray) -> np.ndarray:
    """Returns a wave in columns 1 and 2 whose direction turns with column 0."""
    angle = 0.8 * x[:, 0]
    return np.sin(np.cos(angle) * x[:, 1] + np.sin(angle) * x[:, 2]) + 0.3 * x[:, 3] * x[:, 4]


TWINS = (
    SiteProblem(
        "covariate-numbers", "twins", "covariate shift",
        "All 8 sites follow one curved rule; the 2 smallest hold rows from another region.",
        FullyConnected(10), 600,
        twin([
            *_usual(900, 600, 400, 300, 200, 150, centre=-0.5, noise=0.3),
            *(Hospital(n, "high", centre=1.5, noise=0.3) for n in (90, 60)),
        ], [_curved]),
        metric="r2",
    ),
    SiteProblem(
        "concept-numbers", "twins", "concept shift",
        "The coefficients of 2 of 9 sites are turned by 60 degrees; a linear model cannot follow both.",
        Logistic(), 400,
        twin([
            *_usual(700, 500, 400, 300, 250, 200, 150),
            *(Hospital(n, "turned", truth=1) for n in (200, 120)),
        ], [_first, _turned]),
        metric="r2",
    ),
    SiteProblem(
        "small-sites-numbers", "twins", "small sites",
        "3 of 9 sites have 30 to 45 rows and shifted columns; 24 columns are correlated (0.6).",
        Logistic(), 600,
        twin([
            *_usual(220, 180, 150, 120, 100, 80),
            *(Hospital(n, "shifted", offset=1.0) for n in (45, 36, 30)),
        ], [_line], 24, 0.6),
        metric="r2",
    ),
    SiteProblem(
        "instruments-numbers", "twins", "instrument",
        "The instruments of 4 of 10 sites have other gains and offsets; 16 columns are correlated (0.6).",
        FullyConnected(25), 600,
        twin([
            *_usual(1600, 900, 500, 250, 120, 60),
            Hospital(300, "gain 0.5", gain=0.5),
            Hospital(200, "gain 2", gain=2.0),
            Hospital(150, "offset 2", offset=2.0),
            Hospital(80, "gain 1.5, offset -1", gain=1.5, offset=-1.0),
        ], [_line], 16, 0.6),
        metric="r2",
    ),
    SiteProblem(
        "noise-numbers", "twins", "label noise",
        "The targets of one of 10 sites are noise with three times the usual spread; 12 columns are independent.",
        Logistic(), 400,
        twin([
            *_usual(150, 130, 110, 100, 90, 80, 70, 60, 50),
            Hospital(100, "noisy", noise=5.0),
        ], [_line], 12),
        metric="r2",
    ),
    SiteProblem(
        "two-populations-numbers", "twins", "two populations",
        "Half of the rows of one of 8 sites come from another population with its own coefficients.",
        FullyConnected(10), 600,
        twin([
            *_usual(800, 500, 350, 250, 200, 150, 100, centre=-0.5),
            Hospital(160, "two populations", centre=-0.5, mixed=True),
        ], [_first, _turned]),
        metric="r2",
    ),
    SiteProblem(
        "all-alike-numbers", "twins", "all alike",
        "10 sites differ in nothing but their sizes, 30 to 3,000; 40 columns are correlated (0.85).",
        Logistic(), 600,
        twin(_usual(3000, 1500, 800, 400, 250, 150, 100, 60, 40, 30, noise=1.0), [_line], 40, 0.85),
        metric="r2",
    ),
)  # fmt: skip
