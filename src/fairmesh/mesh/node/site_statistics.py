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

from fairmesh.data.samples import Samples

INPUTS_AT_MOST = 64  # with more inputs, or arrays such as images, one mean and one spread of all together
CLASSES_AT_MOST = 100
SAMPLES_AT_LEAST = 20  # with fewer, statistics would say much about single samples
WITHHELD: dict[str, list[float]] = {"mean": [], "spread": [], "shares": [], "relation": []}
_LARGEST = 1e15
_FAR = 8.0  # typical spreads from the typical mean, or times as large as the typical spread, that are a difference
_FURTHER = 20.0  # times as large or small, where the mean says nothing because it is near 0
_SHOWN = 3  # columns per site


def statistics(samples: Samples) -> dict[str, list[float]]:
    """Returns what a site announces about its training inputs as the model sees them: mean and spread (standard
    deviation) of each input to 2 digits, the share of each class to 0.05, and the correlation of each input with the
    number of the class to 0.1."""
    if len(samples) < SAMPLES_AT_LEAST:
        return WITHHELD
    inputs, targets = samples.inputs, samples.targets
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
        found["relation"] = [round(x, 1) for x in both.tolist()]
    return found


def _rounded(value: float, size: float) -> float:
    """Returns a value to 2 digits of something of this size."""
    if size == 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(size)) - 1)
    return min(max(float(f"{round(value / step) * step:.6g}"), -_LARGEST), _LARGEST)


def unusual(said: Mapping[str, Mapping[str, Sequence[float]]], names: Sequence[str] = ()) -> dict[str, list[str]]:
    """Returns the sites whose statistics differ from those of most, with what differs and the likely cause, in
    sentences. It takes three sites to say which one differs."""
    shown = {site: one for site, one in said.items() if one["mean"]}
    if not shown:
        return {}
    inputs = Counter(len(one["mean"]) for one in shown.values()).most_common(1)[0][0]
    sites = [site for site, one in shown.items() if len(one["mean"]) == len(one["spread"]) == inputs]
    if len(sites) < 3:
        return {}
    if len(names) != inputs:
        names = ["all inputs together"] if inputs == 1 else [f"input {k + 1}" for k in range(inputs)]
    means, spreads = (np.array([shown[site][what] for site in sites], float) for what in ("mean", "spread"))
    found = {site: _columns(k, means, spreads, names) for k, site in enumerate(sites)}
    for site, sentence in _reversed({site: shown[site] for site in sites}):
        found[site].append(sentence)
    return {site: sentences for site, sentences in found.items() if sentences}


class _Input(NamedTuple):
    """One input at one site, next to what is usual: the median over all sites."""

    name: str
    mean: float
    spread: float
    usual_mean: float
    usual_spread: float
    typical: float  # the usual spread or, if it is larger, how much the means of the sites differ

    @property
    def times(self) -> float:
        """Returns how many times the usual spread its spread is."""
        return self.spread / self.usual_spread if self.usual_spread > 0 else 1.0

    @property
    def changed_together(self) -> bool:
        """Returns whether mean and spread differ from the usual by about the same factor, as in another unit."""
        if self.usual_mean == 0 or self.times == 0:
            return False
        return 0.5 < abs(self.mean / self.usual_mean) / self.times < 2

    @property
    def differs(self) -> bool:
        if self.typical == 0:
            return False
        if abs(self.mean - self.usual_mean) > _FAR * self.typical:
            return True
        if self.changed_together:
            return not 1 / _FAR <= self.times <= _FAR
        near_zero = abs(self.usual_mean) < self.usual_spread / 2  # so that the mean says nothing
        return self.times > _FURTHER or (near_zero and self.times < 1 / _FURTHER)

    @property
    def is_scaled(self) -> bool:
        """Returns whether it has about mean 0 and spread 1."""
        return abs(self.mean) < 0.5 and 0.4 < self.spread < 2.5

    def looks_like(self, other: "_Input") -> bool:
        """Returns whether it looks as another input usually does."""
        near = abs(self.mean - other.usual_mean) <= 2 * other.typical
        return near and 0.5 * other.usual_spread <= self.spread <= 2 * other.usual_spread

    def cause(self, different: Sequence["_Input"]) -> str:
        """Returns the likely cause of the difference. Of columns in another order, at least two are different."""
        for other in different:
            if other is not self and self.looks_like(other):
                return f"it looks like {other.name} elsewhere, so perhaps columns are in another order"
        if self.spread == 0:
            return "it is the same in every row there; perhaps the column is empty or not measured"
        if self.changed_together or not 1 / _FURTHER <= self.times <= _FURTHER:
            larger = self.times > 1
            times = f"{float(f'{self.times if larger else 1 / max(self.times, 1e-12):.1g}'):,.12g}"
            return f"values are about {times} times as {'large' if larger else 'small'}, so perhaps in another unit"
        return "perhaps another unit, another column, or another scaling"


def _columns(k: int, means: np.ndarray, spreads: np.ndarray, names: Sequence[str]) -> list[str]:
    """Returns in which inputs one site differs from the median of all sites, and why that may be."""
    mid, wide = np.median(means, 0), np.median(spreads, 0)
    between = 1.4826 * np.median(np.abs(means - mid), 0)
    columns = zip(means[k], spreads[k], mid, wide, np.maximum(wide, between))
    inputs = [_Input(name, *map(float, column)) for name, column in zip(names, columns)]
    different = [one for one in inputs if one.differs]
    found = [
        f"{one.name}: mean {one.mean:g} and spread {one.spread:g}, at most sites {one.usual_mean:.2g} and "
        f"{one.usual_spread:.2g}; {one.cause(different)}"
        for one in different[:_SHOWN]
    ]
    if len(different) > _SHOWN:
        found.append(f"and {len(different) - _SHOWN} more inputs")
    usual = [one._replace(mean=one.usual_mean, spread=one.usual_spread) for one in inputs]
    here, elsewhere = (sum(one.is_scaled for one in some) / len(inputs) for some in (inputs, usual))
    if len(inputs) > 1 and here == 1 and elsewhere < 0.5:
        found.append("inputs are probably scaled to mean 0 and spread 1 only there")
    if len(inputs) > 1 and elsewhere == 1 and here < 0.5:
        found.append("inputs are probably not scaled there (standardize)")
    return found


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
