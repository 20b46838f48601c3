"""Many unequal sites with numbers to predict, between which a ring is too slow: every site has a level of its own."""

from collections.abc import Callable

import numpy as np
import torch

from fairmesh.data.site import Site
from fairmesh.problems.models import FullyConnected
from reproduction.sites.site_problem import SiteProblem

_FIXED, _VARYING = 5, 14  # columns that are the same in all rows of a site, as age and sex of a patient, and others
_TEST_ROWS = 150


def _sites_of(n: int) -> Callable[[int], list[Site]]:
    """Returns n sites of 40 to 400 rows as a function of a split's number. A site's level follows from its fixed
    columns only in part, and the coefficients of the other columns differ between sites. Columns and targets are
    standardised over all training rows."""

    def sites(split: int) -> list[Site]:
        rng = np.random.default_rng(split)
        common = rng.standard_normal(_VARYING) / np.sqrt(_VARYING)
        known = rng.standard_normal(_FIXED) / np.sqrt(_FIXED)
        drawn = []
        for _ in range(n):
            rows = int(np.exp(rng.uniform(np.log(40), np.log(400))))
            fixed, centre = rng.standard_normal(_FIXED), rng.standard_normal(_VARYING)
            level = 9.0 * (0.5 * float(fixed @ known) + 0.85 * rng.standard_normal())
            slope = common + 0.5 * rng.standard_normal(_VARYING) / np.sqrt(_VARYING)
            for count in (rows, _TEST_ROWS):
                x = 0.8 * centre + 0.7 * rng.standard_normal((count, _VARYING))
                y = level + 1.5 * x @ slope + 2.5 * rng.standard_normal(count)
                drawn.append((np.column_stack([np.tile(fixed, (count, 1)), x]), y))
        train, test = drawn[::2], drawn[1::2]
        scales = [(part.mean(axis=0), part.std(axis=0)) for part in map(np.concatenate, zip(*train))]

        def scaled(rows: tuple[np.ndarray, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = ((part - mean) / spread for part, (mean, spread) in zip(rows, scales))
            return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.float32)[:, None]

        return [Site(scaled(a), test=scaled(b), name=f"site {i}") for i, (a, b) in enumerate(zip(train, test))]

    return sites


def many_sites(n: int) -> SiteProblem:
    """Returns the problem for n sites.

    Args:
        n: The number of sites.
    """
    difference = f"{n} sites of 40 to 400 rows, each with a level and coefficients of its own."
    return SiteProblem(
        f"{n}-levels-numbers", "twins", "concept shift", difference, FullyConnected(25), 600, _sites_of(n), metric="r2"
    )
