"""Coarse statistics of a site's inputs, which it announces before the first round, and which site's look different.

A mistake with data, such as another unit, is plain in them, long before the model suffers. A difference is a warning
and nothing else: sites that differ are the ones that robust training is for.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fairmesh.data.columns import Column
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.data.site_tables import is_fitted
from fairmesh.mesh.announcements import CLASSES_AT_MOST, INPUTS_AT_MOST, STATISTICS

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
    if not is_fitted(site) or not table.rows:
        return statistics(Samples.of(site.train, site.name or "a site"))
    targets = table.samples(table.rows["train"], table.preprocessing)[1]
    return statistics(Samples(torch.from_numpy(table.numbers()), targets))


def columns_of(site: Site, contract: Sequence[Column] = ()) -> Sequence[Column]:
    """Returns the columns that `statistics_of` is about."""
    fitted = is_fitted(site) and site.table.rows
    return [Column(name) for name in site.table.number_names] if fitted else contract


def in_common(
    said: Mapping[str, Mapping[str, Sequence[float]]], names: Mapping[str, Sequence[str]], columns: Sequence[Column]
) -> tuple[Mapping[str, Mapping[str, Sequence[float]]], Sequence[Column]]:
    """Returns statistics of the columns that all sites have, and these columns, so that each is compared with itself.

    Args:
        said: What each site has announced.
        names: The columns that it is about, by site, in order; none where they are the same everywhere.
        columns: The columns of this site.
    """
    if len(set(names.values())) < 2:
        return said, columns
    shared = sorted(set.intersection(*map(set, names.values())))

    def taken(site: str) -> Mapping[str, Sequence[float]]:
        place = {name: k for k, name in enumerate(names.get(site, ()))}
        short = {
            what: [numbers[place[name]] for name in shared]
            for what, numbers in said[site].items()
            if what != "shares" and len(numbers) == len(place)
        }
        return {**said[site], **short}

    return {site: taken(site) for site in said}, [Column(name) for name in shared]


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
    compared = _alike(said)
    if len(compared) < 3:
        return {}
    inputs = len(next(iter(compared.values()))["mean"])
    if len(columns) != inputs:
        names = ["all inputs together"] if inputs == 1 else [f"input {k + 1}" for k in range(inputs)]
        columns = [Column(name) for name in names]
    center, scale = (np.array([getattr(column, what) for column in columns]) for what in ("center", "scale"))
    means, spreads = (np.array([told[what] for told in compared.values()], float) for what in ("mean", "spread"))
    with np.errstate(all="ignore"):
        inputs_of = _Inputs([column.name for column in columns], means * scale + center, np.abs(spreads) * scale)
    sentences = {site: inputs_of.sentences(k) for k, site in enumerate(compared)}
    for site, sentence in (*_one_class(compared), *_reversed(compared)):
        sentences[site].append(sentence)
    return {site: some for site, some in sentences.items() if some}


def _alike(said: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Mapping[str, Sequence[float]]]:
    """Returns what sites say that tell of as many inputs as most of those that tell of any."""
    telling = {site: told for site, told in said.items() if told["mean"]}
    counts = Counter(len(told["mean"]) for told in telling.values()) or Counter([0])
    usual = counts.most_common(1)[0][0]
    return {site: told for site, told in telling.items() if len(told["mean"]) == len(told["spread"]) == usual}


class _Inputs:
    """The inputs of all sites next to what is usual: medians over the sites, and by how much honest sites differ.

    Args:
        names: The inputs.
        means: Their means, (sites, inputs).
        spreads: Their spreads, likewise.
    """

    def __init__(self, names: Sequence[str], means: np.ndarray, spreads: np.ndarray):
        self._names, self._means, self._spreads = names, means, spreads
        self._mean, self._spread = mean, spread = np.median(means, 0), np.median(spreads, 0)
        self._between = _deviation(means)  # how far the means of sites are apart
        # If the sites scale by themselves, to about mean 0 and spread 1, means say nothing about units.
        centred = len(names) > 1 and 2 * _is_scaled(mean, spread).sum() > len(names)
        never_negative = (means >= -0.02 * spread).all(0) & (not centred)
        tells_size = (np.abs(mean) >= spread / 2) & (not centred)  # far enough from 0 to change with the unit
        log_means, log_spreads = (np.log(np.maximum(np.abs(some), _SMALLEST)) for some in (means, spreads))
        times = np.log(np.maximum(spreads, _SMALLEST) / np.maximum(spread, _SMALLEST))
        of_means = np.log(np.abs(means)) - np.log(np.abs(mean))
        # Whether mean and spread differ from the usual by about the same factor, as in another unit.
        together = tells_size & (np.sign(means) * np.sign(mean) > 0) & (np.abs(of_means - times) < math.log(_TOGETHER))
        self._sizes = np.where(together, (of_means + times) / 2, times)
        few = never_negative & (mean < spread / 2) & (np.abs(means) < 0.02 * spread)
        at_an_end = np.minimum(np.abs(means), np.abs(means - 1)) < 0.02
        rare = few | (at_an_end & (spread < 0.4) & _is_share(mean, spread))  # events: a site may have had none
        far = np.abs(means - mean) > _FAR * np.maximum(np.maximum(spread, self._between), spreads)
        shares = _is_share(means, spreads) & _is_share(mean, spread)  # values are 0 and 1, which have no unit
        factor = np.where(together | ~(tells_size | never_negative), _FACTOR, _FURTHER)
        deviation = np.where(together, _deviation((log_means + log_spreads) / 2), _deviation(log_spreads))
        least = np.clip(_DEVIATIONS * deviation, np.log(factor), math.log(_FURTHER))
        self._differs = np.select(
            [np.broadcast_to(spread == 0, means.shape), spreads == 0, far, shares],
            [False, ((spreads == 0).mean(0) <= 1 / 3) & ~rare, True, False],
            np.abs(self._sizes) > least,
        ).astype(bool)

    def sentences(self, site: int) -> list[str]:
        """Returns in which inputs one site differs from what is usual, and why that may be."""
        means, spreads, different = self._means[site], self._spreads[site], np.flatnonzero(self._differs[site]).tolist()
        found = [
            f"{self._names[k]}: mean {means[k]:.3g} and spread {spreads[k]:.3g}, at most sites {self._mean[k]:.2g} and "
            f"{self._spread[k]:.2g}; {self._cause(site, k, different)}"
            for k in different[:_SHOWN]
        ]
        if len(different) > _SHOWN:
            found.append(f"and {len(different) - _SHOWN} more inputs")
        here, elsewhere = _is_scaled(means, spreads).mean(), _is_scaled(self._mean, self._spread).mean()
        if len(means) > 1 and np.mean([not self._looks_like(site, k, k) for k in range(len(means))]) > 0.5:
            if here == 1 and elsewhere < 0.5:
                found.append("inputs are probably scaled to mean 0 and spread 1 only there")
            if elsewhere == 1 and here < 0.5:
                found.append("inputs are probably not scaled there (standardize)")
        return found

    def _looks_like(self, site: int, k: int, other: int) -> bool:
        """Returns whether an input of a site looks as some input usually does."""
        spread, usual = self._spreads[site, k], self._spread[other]
        near = abs(self._means[site, k] - self._mean[other]) <= 2 * max(usual, self._between[other])
        return bool(near and 0.5 * usual <= spread <= 2 * usual)

    def _cause(self, site: int, k: int, different: Sequence[int]) -> str:
        """Returns the likely cause of a difference. Of columns in another order, at least two are different."""
        if self._spreads[site, k] == 0:
            return "it is the same in every row there; perhaps the column is empty or not measured"
        for other in different:
            if other != k and self._looks_like(site, k, other):
                return f"it looks like {self._names[other]} elsewhere, so perhaps columns are in another order"
        size = float(self._sizes[site, k])
        if abs(size) > math.log(_FACTOR):
            times = f"{float(f'{math.exp(abs(size)):.1g}'):,.12g}"
            return f"values are about {times} times as {'large' if size > 0 else 'small'}, so perhaps in another unit"
        return "perhaps another unit, another column, or another scaling"


def _deviation(values: np.ndarray) -> np.ndarray:
    """Returns a robust standard deviation of each column, from the median absolute deviation."""
    return 1.4826 * np.median(np.abs(values - np.median(values, 0)), 0)


def _is_scaled(mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Returns whether these are about mean 0 and spread 1."""
    return (np.abs(mean) < 0.5) & (spread > 0.4) & (spread < 2.5)


def _is_share(mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Returns whether these are the mean and the spread of values 0 and 1, as far as rounding shows it."""
    return (mean >= 0) & (mean <= 1) & (np.abs(spread - np.sqrt(mean * (1 - mean))) <= 0.02 + 0.1 * spread)


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
