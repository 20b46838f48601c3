"""What an epsilon costs and what it promises, before any row is read: noise at a site and after averaging, and how well
anybody can guess whether a unit took part."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fairmesh.errors import BadInput
from fairmesh.privacy.accounting import Releases, deltas_of, noise_for, shared_noise, static_shape

EPSILONS = (1.0, 2.0, 4.0, 8.0)  # that are shown next to the one asked for
SIZES = (200, 1_000, 5_000)  # units, where those of a site are not known
_FALSE_ALARMS = 0.01
_INNER = 3  # sizes between the smallest and the largest, from which the noise of all sizes is interpolated
_LOUD = 1.0  # noise over the clip; above, a site's gradients are mostly noise
_FEWEST = 20  # parameters of a head that is worth naming
_WORTH = 0.95  # of the noise; a change that leaves more is not named


class Terms(NamedTuple):
    """What the noise of a site follows from, besides epsilon and its number of units."""

    delta: float
    batch: int  # units that are expected in a draw
    releases: int  # of the whole run: rounds, times the gradients in each
    parameters: int
    loss_share: float = 0.0  # of the budget, for the losses that weights follow
    clip: float = 1.0

    def fits(self, units: int) -> bool:
        """Returns whether a run accepts a site of so many units."""
        return units >= self.batch and self.delta < 1 / units


class SitePrice(NamedTuple):
    """What an epsilon means at one site."""

    epsilon: float
    units: int
    noise: float  # standard deviation of the noise of a sum of gradients, over the clip
    at_site: float  # Euclidean norm of the noise of a mean gradient, over the clip, which no mean gradient exceeds


class Risk(NamedTuple):
    """The most that somebody can know who guesses whether a unit took part: knows all other units of all sites, the
    rows of the unit, and everything that its site sends."""

    right: float  # share of right guesses, where one of two took part; 0.5 is chance
    found: float  # share of units that took part and are found, with 1 % false alarms; 0.01 is chance


def site_price(terms: Terms, epsilon: float, units: int) -> SitePrice:
    """Returns what an epsilon means at a site.

    Raises:
        BadInput: No noise is enough.
    """
    noise = _noise(terms, epsilon, units)
    return SitePrice(epsilon, units, noise, noise * math.sqrt(terms.parameters) / min(terms.batch, units))


def _noise(terms: Terms, epsilon: float, units: int) -> float:
    released = noise_for(epsilon, terms.delta, units, terms.batch, terms.releases)
    return shared_noise(released, terms.loss_share)[0]


def risk_of(epsilon: float, delta: float) -> Risk:
    """Returns what (epsilon, delta) alone promises, of whatever mechanism: the trade-off curve of (epsilon, delta)
    differential privacy (Kairouz, Oh, Viswanath, 2015; Dong, Roth, Su, 2022)."""
    right = (math.exp(epsilon) + delta) / (1 + math.exp(epsilon))
    few = delta + math.exp(epsilon) * _FALSE_ALARMS
    many = 1 - math.exp(-epsilon) * (1 - delta - _FALSE_ALARMS)
    return Risk(min(1.0, right), min(1.0, few, many))


def risk_by_noise(terms: Terms, epsilon: float, units: int) -> Risk:
    """Returns what the noise of a site promises: the trade-off curve of all its releases, as the accountant bounds it.
    It holds for this mechanism, and is tighter than what (epsilon, delta) alone promises."""
    rate = min(1.0, terms.batch / units)
    noise = noise_for(epsilon, terms.delta, units, terms.batch, terms.releases)
    releases = [Releases(units, rate, static_shape(units, terms.batch), noise, terms.releases)]
    grid = [0.0, *np.geomspace(0.02, max(2 * epsilon, 1.0), 40).tolist()]
    curve = list(zip(grid, deltas_of(releases, grid)))
    found = min(min(d + math.exp(e) * _FALSE_ALARMS, 1 - math.exp(-e) * (1 - d - _FALSE_ALARMS)) for e, d in curve)
    whole, promised = (1 + curve[0][1]) / 2, risk_of(epsilon, terms.delta)
    return Risk(min(whole, promised.right), min(found, promised.found))


def averaged(terms: Terms, epsilon: float, sizes: Sequence[int], prior: Sequence[float] | None = None) -> float:
    """Returns the norm of the noise that is left over the clip, once the graph has averaged the gradients of all
    sites: the root of the sum of the squares of prior times noise. The noise of sites of many sizes is interpolated.

    Args:
        terms: What the noise follows from.
        epsilon: The budget of every site.
        sizes: The units of each site.
        prior: The prior weight of each site; None for its share of all units. Default: None.
    """
    units = np.asarray(sizes, dtype=float)
    weights = units / units.sum() if prior is None else np.asarray(prior, dtype=float)
    known = sorted({min(sizes), max(sizes), *_between(min(sizes), max(sizes))})
    if len(set(sizes)) <= len(known):
        known = sorted(set(sizes))
    noises = [_noise(terms, epsilon, size) for size in known]
    noise = np.exp(np.interp(np.log(units), np.log(known), np.log(noises)))
    at_sites = noise * math.sqrt(terms.parameters) / np.minimum(terms.batch, units)
    return float(np.sqrt(np.square(weights * at_sites).sum()))


def _between(smallest: int, largest: int) -> list[int]:
    return [round(size) for size in np.geomspace(smallest, largest, _INNER + 2)[1:-1].tolist()]


class EpsilonPrice(NamedTuple):
    """What an epsilon means at sites of several sizes, and after averaging."""

    epsilon: float
    sites: tuple[SitePrice, ...]
    averaged: float | None  # None if the other sites are not known
    promised: Risk  # by (epsilon, delta) alone
    by_noise: Risk  # the largest of the sites shown

    def as_json(self) -> dict[str, Any]:
        """Returns it as a JSON object."""
        sites = [site._asdict() for site in self.sites]
        more = {"sites": sites, "promised": self.promised._asdict(), "by_noise": self.by_noise._asdict()}
        return self._asdict() | more


class Price(NamedTuple):
    """What each epsilon means for sites of these sizes.

    Attributes:
        terms: What noise follows from.
        asked: The epsilon of the experiment.
        unit: What is protected: "row"; or "unit", or what the data calls it, if rows belong to units such as patients.
        sizes: The numbers of units that are shown.
        sites: How many sites there are; None if that is not known.
        rows: One per epsilon.
    """

    terms: Terms
    asked: float
    unit: str
    sizes: tuple[int, ...]
    sites: int | None
    rows: tuple[EpsilonPrice, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns everything as a JSON object."""
        rows = [row.as_json() for row in self.rows]
        return self._asdict() | {"terms": self.terms._asdict(), "rows": rows, "sentences": self.sentences()}

    def table(self) -> list[list[str]]:
        """Returns the prices as a table: a line per epsilon, a column per size."""
        sizes = [f"noise at a site of {size:,} {self.unit}s" for size in self.sizes]
        after = [f"averaged over {self.sites} sites"] if self.sites else []
        lines = [["epsilon", *sizes, *after, "a guess is right, at most", "found at 1 % false alarms, at most"]]
        for row in self.rows:
            at_sites = [f"{site.at_site:.3g} (sigma {site.noise:.3g})" for site in row.sites]
            left = [f"{row.averaged:.3g}"] if row.averaged is not None else []
            risk = [f"{100 * row.by_noise.right:.0f} %", f"{100 * row.by_noise.found:.0f} %"]
            asked = f"{row.epsilon:g} (asked)" if row.epsilon == self.asked else f"{row.epsilon:g}"
            lines.append([asked, *at_sites, *left, *risk])
        return lines

    def sentences(self) -> list[str]:
        """Returns what the numbers mean, and what small sites can do, in words."""
        terms, unit = self.terms, self.unit
        row = next(row for row in self.rows if row.epsilon == self.asked)
        said = [
            f"noise: of a mean gradient over about {terms.batch:,} {unit}s, as a multiple of the clip, which is the "
            f"longest that it can be; sigma: of a sum, per parameter; for {terms.parameters:,} parameters, "
            f"{terms.releases:,} releases and delta = {terms.delta:g}",
            f"epsilon = {row.epsilon:g}: somebody who guesses whether a {self._example} took part, knows the rows of "
            f"that one and of all others, and reads all that its site sends, is right at most "
            f"{100 * row.by_noise.right:.0f} % of the time instead of 50 %; of those who took part, at most "
            f"{100 * row.by_noise.found:.0f} % can be found with 1 % false alarms. (By the accountant's curve for this "
            f"noise; (epsilon, delta) alone would promise {100 * row.promised.right:.1f} % and "
            f"{100 * row.promised.found:.0f} %)",
        ]
        return said + self._for_small_sites(row)

    @property
    def _example(self) -> str:
        return "unit, such as a patient," if self.unit == "unit" else self.unit

    def _for_small_sites(self, row: EpsilonPrice) -> list[str]:
        site = row.sites[0]
        if site.at_site <= _LOUD:
            return []
        now, larger, few = self.terms, min(2 * self.terms.batch, site.units), self.terms.parameters // 10
        changes = {
            f"half of the releases ({now.releases // 2:,})": now._replace(releases=max(1, now.releases // 2)),
            f"batches of {larger:,}": now._replace(batch=larger),
        }
        if few >= _FEWEST:
            changes[f"a head of {few:,} parameters on frozen features"] = now._replace(parameters=few)
        noises = {what: site_price(terms, row.epsilon, site.units).at_site for what, terms in changes.items()}
        gains = [f"{noise:.3g} with {what}" for what, noise in noises.items() if noise < _WORTH * site.at_site]
        return [
            f"at a site of {site.units:,} {self.unit}s the noise is {site.at_site:.3g} times the longest gradient: use "
            f"few rounds, large batches and few parameters{'. It is ' if gains else ''}{', '.join(gains)}"
        ]


def price_of(
    terms: Terms,
    asked: float,
    sizes: Sequence[int] = (),
    prior: Sequence[float] | None = None,
    unit: str = "row",
    all_sites: bool = True,
) -> Price:
    """Returns what each epsilon means for sites of these sizes: the smallest, the median and the largest.

    Args:
        terms: What noise follows from.
        asked: The epsilon of the experiment, which is shown with 1, 2, 4 and 8.
        sizes: The units of each site; none if they are not known: then 200, 1,000 and 5,000. Default: ().
        prior: The prior weight of each site; None for its share of all units. Default: None.
        unit: What is protected: "row", "unit", or what the data calls a unit. Default: "row".
        all_sites: Whether these are the sizes of all sites, so that it can be said what their average has. Default:
            True.

    Raises:
        BadInput: No site has enough units for the batch, and few enough for delta.
    """
    given = sorted(sizes or SIZES)
    shown = dict.fromkeys((given[0], given[(len(given) - 1) // 2], given[-1]))
    fitting = tuple(size for size in shown if terms.fits(size))
    if not fitting:
        raise BadInput(
            f"privacy: no site of {', '.join(f'{size:,}' for size in shown)} {unit}s can draw {terms.batch:,} of them "
            f"with delta = {terms.delta:g}; use a smaller sampling.batch, and a delta below one over the {unit}s"
        )
    every = all_sites and bool(sizes) and all(map(terms.fits, sizes))
    rows = []
    for epsilon in sorted({*EPSILONS, float(asked)}):
        sites = tuple(site_price(terms, epsilon, size) for size in fitting)
        risks = [risk_by_noise(terms, epsilon, size) for size in fitting]
        left = averaged(terms, epsilon, sizes, prior) if every else None
        largest = Risk(max(risk.right for risk in risks), max(risk.found for risk in risks))
        rows.append(EpsilonPrice(epsilon, sites, left, risk_of(epsilon, terms.delta), largest))
    return Price(terms, float(asked), unit, fitting, len(sizes) if every else None, tuple(rows))
