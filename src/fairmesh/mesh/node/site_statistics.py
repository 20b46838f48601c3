"""Coarse statistics of a site's inputs, which it announces before the first round, and which site's look different.

A mistake with data, such as another unit, is plain in them, long before the model suffers. A difference is a warning
and nothing else: sites that differ are the ones that robust training is for.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh.data.columns import Column
from fairmesh.data.preprocessing import is_fitted
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.mesh.wire.kinds import CLASSES_AT_MOST, INPUTS_AT_MOST, STATISTICS

SAMPLES_AT_LEAST = 20  # with fewer, statistics would say much about single samples
WITHHELD: dict[str, list[float]] = {"mean": [], "spread": [], "shares": [], "relation": []}
_SMALLEST, _LARGEST = STATISTICS
_ALMOST_ALL = 0.97  # a share of a class, which is announced to 0.05
# Thresholds, set by a simulation of honest sites that differ (tests/mesh/test_site_statistics.py states its rates).
_FAR = 8.0  # spreads between a mean and the usual one
_FACTOR = 5.0  # times as large or small, as in another unit
_FURTHER = 20.0  # times the usual spread, where the mean has not changed by the same factor
_DEVIATIONS = 3.0  # a factor below _FURTHER must also be this many times what the sites differ by among themselves
_TOGETHER = 2.5  # mean and spread change by the same factor if these are at most so many times apart
_SHOWN = 3  # columns per site


def statistics(samples: Samples) -> dict[str, list[float]]:
    """Returns what a site announces about its training inputs as the model sees them: mean and spread (standard
    deviation) of each input to 2 digits, the share of each class to 0.05, and the correlation of each input with the
    number of the class to 0.1. With more inputs than 64, or arrays such as images, it is one mean and one spread of all
    together."""
    if len(samples) < SAMPLES_AT_LEAST:
        return WITHHELD
    samples = samples.some()
    inputs, targets = samples.inputs, samples.targets
    if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
        return WITHHELD  # several inputs or targets have no common scale
    each = inputs.ndim == 2 and inputs.shape[1] <= INPUTS_AT_MOST
    rows = (inputs if each else inputs.reshape(-1, 1)).double()
    mean, spread = rows.mean(0), rows.std(0, correction=0)
    pairs = list(zip(mean.tolist(), spread.tolist()))
    found = WITHHELD | {
        "mean": [_rounded(m, max(abs(m), s)) for m, s in pairs],
        "spread": [_rounded(s, s) for _, s in pairs],
    }
    if targets.is_floating_point() or targets.dtype == torch.bool or targets.ndim != 1:
        return found
    counts = targets.bincount()
    if len(counts) <= CLASSES_AT_MOST:
        found["shares"] = [round(0.05 * round(20 * count / len(targets)), 2) for count in counts.tolist()]
    if each:
        numbers = targets.double() - targets.double().mean()
        both = (((rows - mean) * numbers[:, None]).mean(0) / (spread * numbers.square().mean().sqrt())).nan_to_num()
        found["relation"] = [round(x, 1) for x in both.clamp(-1, 1).tolist()]
    return found


def statistics_of(site: Site) -> dict[str, list[float]]:
    """Returns what a site announces. Of a table that is scaled by the rows of all sites, it is about the numbers as the
    file has them, since a difference in units is gone after scaling."""
    table = site.table
    if not is_fitted(site) or table.rows is None:
        return statistics(Samples.of(site.train, site.name or "a site"))
    targets = table.samples(table.rows["train"], table.preprocessing)[1]
    return statistics(Samples(torch.from_numpy(table.numbers()), targets))


def columns_of(site: Site, contract: Sequence[Column] = ()) -> Sequence[Column]:
    """Returns the columns that `statistics_of` is about."""
    fitted = is_fitted(site) and site.table.rows is not None
    return [Column(name) for name in site.table.number_names] if fitted else contract


def unusual_sites(sites: Sequence[Site]) -> dict[str, list[str]]:
    """Returns the sites whose data looks different, and how, as nodes would say it."""
    said = {site.name or f"node {i}": statistics_of(site) for i, site in enumerate(sites)}
    return unusual(said, columns_of(sites[0]))


def _rounded(value: float, size: float) -> float:
    """Returns a value to 2 digits of something of this size; 0 for what is next to nothing."""
    if size < _SMALLEST:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(size)) - 1)
    rounded = min(max(float(f"{round(value / step) * step:.6g}"), -_LARGEST), _LARGEST)
    return rounded if abs(rounded) >= _SMALLEST else 0.0


def unusual(said: Mapping[str, Mapping[str, Sequence[float]]], columns: Sequence[Column] = ()) -> dict[str, list[str]]:
    """Returns the sites whose statistics differ from those of most, with what differs and the likely cause, in
    sentences. It takes three sites to say which one differs.

    Args:
        said: What each site has announced.
        columns: The contract's columns, in whose units the statistics are compared and shown. Default: none.
    """
    shown = {site: one for site, one in said.items() if one["mean"]}
    if not shown:
        return {}
    inputs = Counter(len(one["mean"]) for one in shown.values()).most_common(1)[0][0]
    sites = [site for site, one in shown.items() if len(one["mean"]) == len(one["spread"]) == inputs]
    if len(sites) < 3:
        return {}
    if len(columns) != inputs:
        names = ["all inputs together"] if inputs == 1 else [f"input {k + 1}" for k in range(inputs)]
        columns = [Column(name) for name in names]
    center, scale = (np.array([getattr(column, what) for column in columns]) for what in ("center", "scale"))
    means = np.array([shown[site]["mean"] for site in sites], float) * scale + center
    spreads = np.abs(np.array([shown[site]["spread"] for site in sites], float)) * scale
    scaled = [_is_scaled(*pair) for pair in zip(np.median(means, 0), np.median(spreads, 0))]
    centred = inputs > 1 and 2 * sum(scaled) > inputs  # the sites scale by themselves, so that means say little
    compared = [_Usual.of(column.name, means[:, k], spreads[:, k], centred) for k, column in enumerate(columns)]
    found = {}
    for k, site in enumerate(sites):
        here = zip(means[k].tolist(), spreads[k].tolist(), compared)
        found[site] = _differing([_Input(mean, spread, usual) for mean, spread, usual in here])
    every = {site: shown[site] for site in sites}
    for site, sentence in (*_one_class(every), *_reversed(every)):
        found[site].append(sentence)
    return {site: sentences for site, sentences in found.items() if sentences}


class _Usual(NamedTuple):
    """What is usual for one input: medians over all sites, and by how much honest sites differ from them."""

    name: str
    mean: float
    spread: float
    between: float  # how far the means of sites are apart
    of_sizes: float  # deviation of the logarithm of mean times spread, halved
    of_spreads: float  # deviation of the logarithm of the spread
    centred: bool  # most inputs have about mean 0 and spread 1, so that means say nothing about units
    never_negative: bool  # no site has a mean below 0, and means are not centred
    constant: float  # the share of sites at which it is the same in every row

    @staticmethod
    def of(name: str, means: np.ndarray, spreads: np.ndarray, centred: bool) -> "_Usual":
        log_spreads, log_means = (np.log(np.maximum(np.abs(some), _SMALLEST)) for some in (spreads, means))
        return _Usual(
            name,
            float(np.median(means)),
            float(np.median(spreads)),
            _deviation(means),
            _deviation((log_means + log_spreads) / 2),
            _deviation(log_spreads),
            centred,
            not centred and bool((means >= -0.02 * np.median(spreads)).all()),
            float((spreads == 0).mean()),
        )

    @property
    def mean_tells_size(self) -> bool:
        """Returns whether the mean is far enough from 0 to change with the unit."""
        return not self.centred and abs(self.mean) >= self.spread / 2


def _deviation(values: np.ndarray) -> float:
    """Returns a robust standard deviation, from the median absolute deviation."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


class _Input(NamedTuple):
    """One input at one site, next to what is usual."""

    mean: float
    spread: float
    usual: _Usual

    @property
    def log_times(self) -> float:
        """Returns the logarithm of how many times the usual spread its spread is."""
        return math.log(max(self.spread, _SMALLEST) / max(self.usual.spread, _SMALLEST))

    @property
    def log_size(self) -> float | None:
        """Returns the logarithm of the factor by which both mean and spread differ from the usual, as in another unit;
        None if they do not differ by the same factor, or the mean says nothing."""
        if not self.usual.mean_tells_size or self.mean * self.usual.mean <= 0:
            return None
        of_means = math.log(abs(self.mean)) - math.log(abs(self.usual.mean))
        apart = abs(of_means - self.log_times)
        return (of_means + self.log_times) / 2 if apart < math.log(_TOGETHER) else None

    @property
    def differs(self) -> bool:
        usual = self.usual
        if usual.spread == 0:
            return False
        if self.spread == 0:
            return usual.constant <= 1 / 3 and not self.of_rare_events
        if abs(self.mean - usual.mean) > _FAR * max(usual.spread, usual.between, self.spread):
            return True
        if _is_share(self.mean, self.spread) and _is_share(usual.mean, usual.spread):
            return False  # values are 0 and 1, which have no unit
        if self.log_size is not None:
            return abs(self.log_size) > _least(_FACTOR, usual.of_sizes)
        factor = _FURTHER if usual.mean_tells_size or usual.never_negative else _FACTOR
        return abs(self.log_times) > _least(factor, usual.of_spreads)

    @property
    def of_rare_events(self) -> bool:
        """Returns whether it counts events that are rare at all sites, so that one may have had none (or only such)."""
        usual = self.usual
        if usual.never_negative and usual.mean < usual.spread / 2 and abs(self.mean) < 0.02 * usual.spread:
            return True
        at_an_end = min(abs(self.mean), abs(self.mean - 1)) < 0.02
        return at_an_end and usual.spread < 0.4 and _is_share(usual.mean, usual.spread)

    def looks_like(self, other: _Usual) -> bool:
        """Returns whether it looks as some input usually does."""
        near = abs(self.mean - other.mean) <= 2 * max(other.spread, other.between)
        return near and 0.5 * other.spread <= self.spread <= 2 * other.spread

    def cause(self, different: Sequence["_Input"]) -> str:
        """Returns the likely cause of the difference. Of columns in another order, at least two are different."""
        if self.spread == 0:
            return "it is the same in every row there; perhaps the column is empty or not measured"
        for other in different:
            if other is not self and self.looks_like(other.usual):
                return f"it looks like {other.usual.name} elsewhere, so perhaps columns are in another order"
        size = self.log_times if self.log_size is None else self.log_size
        if abs(size) > math.log(_FACTOR):
            times = f"{float(f'{math.exp(abs(size)):.1g}'):,.12g}"
            return f"values are about {times} times as {'large' if size > 0 else 'small'}, so perhaps in another unit"
        return "perhaps another unit, another column, or another scaling"


def _least(factor: float, deviation: float) -> float:
    """Returns the logarithm of the least factor that is a difference, among sites that deviate so much."""
    return min(max(math.log(factor), _DEVIATIONS * deviation), math.log(_FURTHER))


def _is_scaled(mean: float, spread: float) -> bool:
    """Returns whether these are about mean 0 and spread 1."""
    return abs(mean) < 0.5 and 0.4 < spread < 2.5


def _is_share(mean: float, spread: float) -> bool:
    """Returns whether these are the mean and the spread of values 0 and 1, as far as rounding shows it."""
    return 0 <= mean <= 1 and abs(spread - math.sqrt(mean * (1 - mean))) <= 0.02 + 0.1 * spread


def _differing(inputs: Sequence[_Input]) -> list[str]:
    """Returns in which inputs one site differs from what is usual, and why that may be."""
    different = [one for one in inputs if one.differs]
    found = [
        f"{one.usual.name}: mean {one.mean:.3g} and spread {one.spread:.3g}, at most sites {one.usual.mean:.2g} and "
        f"{one.usual.spread:.2g}; {one.cause(different)}"
        for one in different[:_SHOWN]
    ]
    if len(different) > _SHOWN:
        found.append(f"and {len(different) - _SHOWN} more inputs")
    pairs = [one[:2] for one in inputs], [(one.usual.mean, one.usual.spread) for one in inputs]
    here, elsewhere = (sum(_is_scaled(*pair) for pair in some) / len(inputs) for some in pairs)
    unlike = sum(not one.looks_like(one.usual) for one in inputs) / len(inputs)
    if len(inputs) > 1 and unlike > 0.5 and here == 1 and elsewhere < 0.5:
        found.append("inputs are probably scaled to mean 0 and spread 1 only there")
    if len(inputs) > 1 and unlike > 0.5 and elsewhere == 1 and here < 0.5:
        found.append("inputs are probably not scaled there (standardize)")
    return found


def _one_class(shown: Mapping[str, Mapping[str, Sequence[float]]]) -> list[tuple[str, str]]:
    """Returns the sites at which all labels are of one class, though they are not at any other site."""
    largest = {site: max(one["shares"]) for site, one in shown.items() if one["shares"]}
    if len(largest) < 3:
        return []
    alone = [site for site, share in largest.items() if share > _ALMOST_ALL]
    if len(alone) != 1 or np.median(list(largest.values())) > 0.9:
        return []
    return [(alone[0], "all labels are of one class there; perhaps the label column is another one")]


def _reversed(shown: Mapping[str, Mapping[str, Sequence[float]]]) -> list[tuple[str, str]]:
    """Returns the sites whose classes seem to be in reverse order: their labels relate to the inputs the other way
    round or, where that is not known, their shares do."""
    found = []
    relations = {site: np.array(one["relation"]) for site, one in shown.items() if one["relation"]}
    if len(relations) == len(shown) and len({len(one) for one in relations.values()}) == 1:
        for site, one in relations.items():
            usual = np.median(np.stack([other for name, other in relations.items() if name != site]), 0)
            sizes = np.linalg.norm(one) * np.linalg.norm(usual)
            if np.abs(usual).max() >= 0.3 and np.abs(one).max() >= 0.3 and one @ usual < -0.7 * sizes:
                found.append((site, "labels relate to the inputs the other way round; perhaps classes are reversed"))
        return found
    shares = {site: one["shares"] for site, one in shown.items() if one["shares"]}
    if len(shares) < 3:
        return found
    count = max(map(len, shares.values()))
    padded = {site: np.array([*one, *[0.0] * (count - len(one))]) for site, one in shares.items()}
    usual = np.median(np.stack(list(padded.values())), 0)
    for site, one in padded.items():
        if np.abs(one - usual).sum() / 2 > 0.4 and np.abs(one[::-1] - usual).sum() / 2 < 0.15:
            found.append((site, "the shares of the classes are the other way round; perhaps classes are reversed"))
    return found
