"""What models answered on every site's test rows, kept with a run so that two runs can be compared row by row."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairmesh.errors import BadInput, listed
from fairmesh.evidence.intervals import Estimate, Share, Worst
from fairmesh.evidence.means import Stratum, mean_number, mean_of, mean_share
from fairmesh.evidence.scores import OfUnits, Scores, bootstrapped, mean, share
from fairmesh.evidence.units import Additions, additions_to_mean, additions_to_metric
from fairmesh.metrics.base import MeanMetric, chosen_metrics, limits_of, resampled
from fairmesh.metrics.builtin import Accuracy
from fairmesh.metrics.over_sites import WORST_NEEDS_ROWS
from fairmesh.metrics.units import Unit

UNPREDICTED = 2  # in `right`, of a row for which the model predicts NaN


@dataclass(frozen=True, eq=False)
class Answers:
    """What the models of several seeds answered on one set of test rows.

    Args:
        digest: A fingerprint of the rows. Two models are compared row by row only where it is equal.
        losses: The loss at every row (seeds, rows), float32.
        right: Whether each row's class is right (seeds, rows), uint8: 1 or 0, and 2 where the model predicts NaN; None
            if targets are no classes. Default: None.
        outputs: The models' outputs (seeds, rows, ...); None if there are too many to keep. Default: None.
        targets: The rows' targets (rows, ...), kept with the outputs. Default: None.
        rows: A number for each row, equal for equal inputs (rows,), int64; it tells how many rows splits have in
            common. Default: None.
        units: A number for each row, equal for rows of one unit, such as a patient (rows,), int64; None if every row is
            its own unit. Default: None.
    """

    digest: str
    losses: Tensor
    right: Tensor | None = None
    outputs: Tensor | None = None
    targets: Tensor | None = None
    rows: Tensor | None = None
    units: Tensor | None = None

    def __len__(self) -> int:
        return self.losses.shape[1]

    @property
    def predicted(self) -> bool:
        """Whether the models predict something at every row; no metric is defined where they predict NaN."""
        missed = self.losses.isnan() if self.right is None else self.right == UNPREDICTED
        return not bool(missed.any())

    def labelled(self) -> list[tuple[Tensor, Tensor]]:
        """Returns each seed's outputs with the rows' labels; nothing if they were not kept, or rows have no class."""
        if self.right is None or self.outputs is None or self.targets is None or self.targets.ndim != 1:
            return []
        return [(outputs, self.targets) for outputs in self.outputs]

    def apart(self, count: int) -> list["Answers"]:
        """Returns the answers of each of `count` models, if the rows are those of seeds, and of these models for each
        seed."""

        by_model = {name: getattr(self, name) for name in ("losses", "right", "outputs")}
        known = {name: tensor for name, tensor in by_model.items() if tensor is not None}
        return [replace(self, **{name: t[k::count].contiguous() for name, t in known.items()}) for k in range(count)]


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What the models of one algorithm answered on the test rows of every site, for all seeds and splits.

    Args:
        sites: The names of the sites.
        metric: The metric that sites are judged by.
        higher_is_better: Whether a larger value of it is better.
        answers: Every set of test rows that was answered. Sites that share a set, and the model, share its answers.
        of_sites: For each split, the number of each site's set in `answers`; -1 for a site that was not measured.
        judged_on: "test", or "train" if there are no test rows. Default: "test".
        functions: Metrics beyond accuracy and loss, as functions (outputs, targets) -> number. Files keep those of
            `fm.metrics` with their settings, but no function of your own. Default: {}.
        trained_in_common: For each site, the share of its training rows that a split has in common with another, if
            every site trains alone; () for models of all sites. Default: ().
        lowest_loss: The lowest possible loss of a row; -inf if that is not known. Default: -inf.
        guessed_overlaps: By the number of a site whose splits have no row in common although they must, the share of
            its test rows that random splits of that size have in common. Default: {}.
        worst_needs_rows: How many test rows a site needs to be the worst one, or units where it has units. If no site
            has as many, all count. Default: 5.
        target_unit: The unit of the numbers that are predicted, such as "mmHg", for people. Default: "".

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=20)
        >>> outcomes = fm.run(experiment).outcomes()
        >>> low, high = outcomes.estimates()[0].interval()
        >>> outcomes.metric, low < outcomes.estimates()[0].value < high
        ('accuracy', True)
    """

    sites: tuple[str, ...]
    metric: str
    higher_is_better: bool
    answers: tuple[Answers, ...]
    of_sites: tuple[tuple[int, ...], ...]
    judged_on: str = "test"
    functions: Mapping[str, Callable[[Tensor, Tensor], Any]] = field(default_factory=dict, repr=False)
    trained_in_common: tuple[float, ...] = ()
    lowest_loss: float = -math.inf
    guessed_overlaps: Mapping[int, float] = field(default_factory=dict)
    worst_needs_rows: int = WORST_NEEDS_ROWS
    target_unit: str = ""

    @property
    def covers(self) -> str:
        """What the intervals cover: "samples", "samples and seeds", "samples and splits", or all three; "units" instead
        of "samples" if rows belong to units. They are not said to cover splits whose common rows are not known."""
        seeds = any(answer.losses.shape[0] > 1 for answer in self.answers)
        splits = len(self.of_sites) > 1 and not self.guessed_overlaps
        parts = [
            "units" if self.has_units else "samples",
            *(["seeds"] if seeds else []),
            *(["splits"] if splits else []),
        ]
        return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)

    @cached_property
    def overlaps(self) -> list[float]:
        """For each site, the share of its test rows, or units, that a split has in common with another."""
        found: dict[tuple[int, ...], float] = {}
        keys = list(zip(*self.of_sites))
        for key in set(keys):
            sets = [_names_of(self.answers[k]) for k in key if k >= 0]
            found[key] = in_common([names for names in sets if names is not None])
        return [self.guessed_overlaps.get(i, found[key]) for i, key in enumerate(keys)]

    def training_overlap(self, site: int) -> float:
        """Returns the share of its training rows that a split has in common with another; 1 for a model of all sites.

        Args:
            site: The number of the site.
        """
        return self.trained_in_common[site] if self.trained_in_common else 1.0

    def at(self, site: int) -> list[Answers]:
        """Returns the answers at a site, one entry per split; none if it was not measured in all of them.

        Args:
            site: The number of the site.
        """
        numbers = [of_split[site] for of_split in self.of_sites]
        return [] if -1 in numbers else [self.answers[k] for k in numbers]

    def rows(self, site: int) -> int:
        """Returns how many test rows a site has; 0 if it was not measured.

        Args:
            site: The number of the site.
        """
        here = self.at(site)
        return round(sum(map(len, here)) / len(here)) if here else 0

    @property
    def has_units(self) -> bool:
        """Whether rows belong to units, at some site."""
        return any(answers.units is not None for answers in self.answers)

    def units(self, site: int) -> list[np.ndarray] | None:
        """Returns the unit of each of a site's test rows, one array per split; None if every row is its own.

        Args:
            site: The number of the site.
        """
        known = [answers.units.numpy() for answers in self.at(site) if answers.units is not None]
        return known if known and len(known) == len(self.of_sites) else None

    def unit_count(self, site: int) -> int:
        """Returns how many units the test rows of a site are of, in all splits together; as many as rows where every
        row is its own.

        Args:
            site: The number of the site.
        """
        units = self.units(site)
        return self.rows(site) if units is None else len(np.unique(np.concatenate(units)))

    def scores(self, site: int, metric: str | None = None) -> list[np.ndarray]:
        """Returns a number for each row whose mean is the metric: one array (seeds, rows) per split. Nothing for a
        metric that is no mean over rows, or whose outputs were not kept.

        Args:
            site: The number of the site.
            metric: The metric; None for the primary one. Default: None.
        """
        metric = metric or self.metric
        here = self.at(site)
        if metric not in self.functions and metric == "loss":
            return [one.losses.double().numpy() for one in here]
        if metric not in self.functions and metric == "accuracy":
            found = [one.right.double() for one in here if one.right is not None]
            if len(found) < len(here):
                raise BadInput("accuracy needs class labels, which these outcomes do not have")
            return [one.masked_fill(one == UNPREDICTED, math.nan).numpy() for one in found]
        function = self.function(metric)
        if not isinstance(function, MeanMetric):
            return []
        each = [
            torch.stack([function.each(outputs, answers.targets) for outputs in answers.outputs]).double().numpy()
            for answers in here
            if answers.outputs is not None and answers.targets is not None  # else they were not kept
        ]
        return each if len(each) == len(here) and not any(np.isnan(values).any() for values in each) else []

    def counts_right(self, metric: str | None = None) -> bool:
        """Returns whether the metric is a share of rows that are right.

        Args:
            metric: The metric; None for the primary one. Default: None.
        """
        metric = metric or self.metric
        return metric == "accuracy" and isinstance(self.function(metric), Accuracy)

    def estimates(self, metric: str | None = None) -> list[Estimate]:
        """Returns the estimate of the metric at every site; its value is NaN where it is not measured or not defined.

        Args:
            metric: The metric; None for the primary one. Default: None.
        """
        metric = metric or self.metric
        if metric not in self._estimates:  # a bootstrap takes long
            self._estimates[metric] = self._estimates_of(metric)
        return self._estimates[metric]

    @cached_property
    def _estimates(self) -> dict[str, list[Estimate]]:
        return {}

    def _estimates_of(self, metric: str) -> list[Estimate]:
        keys = list(zip(*self.of_sites))
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        answered = {i for i in first.values() if self.at(i) and all(answers.predicted for answers in self.at(i))}
        scores = {i: self.scores(i, metric) for i in answered}
        additions = {i: self.additions(i, metric, scores[i]) for i in answered}
        by_unit = {i: [part.scores for part in of_site] for i, of_site in additions.items() if of_site}
        known = [by_unit.get(i, of_site) for i, of_site in scores.items() if i in by_unit or of_site]
        skewness = None if self.counts_right(metric) else skewness_of(known)
        found = {
            key: self._estimate(i, metric, scores[i], additions[i], skewness)
            if i in answered
            else Share(math.nan, self.rows(i))
            for key, i in first.items()
        }
        return [found[key] for key in keys]

    def additions(self, site: int, metric: str, scores: Scores) -> list[Additions]:
        """Returns what the units of a site's test rows add to a metric, one entry per split; nothing if every row is
        its own unit.

        Args:
            site: The number of the site.
            metric: The metric.
            scores: The scores at the site: one array (seeds, rows) per split; empty if it is no mean over rows.
        """
        units = self.units(site) or []
        if scores:
            return [additions_to_mean(of_split, of_rows) for of_split, of_rows in zip(scores, units)]
        here, function = self.at(site), self.function(metric)

        def resample(answers: Answers, counts: np.ndarray) -> np.ndarray:
            return np.stack([resamples_of(function, answers, s, counts) for s in range(len(answers.losses))], axis=1)

        return [additions_to_metric(partial(resample, one), of_rows) for one, of_rows in zip(here, units)]

    def _estimate(
        self, site: int, metric: str, scores: Scores, additions: Sequence[Additions], skewness: float | None
    ) -> Estimate:
        here, function, overlap = self.at(site), self.function(metric), self.overlaps[site]
        training, limits = self.training_overlap(site), limits_of(function)
        bounded = limits == (0.0, 1.0) and not scores
        if additions:
            found = OfUnits.of(additions, overlap, training, skewness).of_metric(bounded)
            if bounded or self.counts_right(metric):
                return found.share(sum(map(len, here)))
            return found.number(limits, relative=limits[0] == 0.0 and not scores)
        if not scores:
            sizes, seeds = [len(answers) for answers in here], [len(answers.losses) for answers in here]

            def resample(split: int, seed: int, counts: np.ndarray) -> np.ndarray:
                return resamples_of(function, here[split], seed, counts)

            more = {"training": training, "limits": limits, "deciding": deciding_rows(function, here)}
            return bootstrapped(resample, sizes, seeds, overlap, bounded, **more)
        if self.counts_right(metric):
            return share(scores, overlap, training)
        return mean(scores, overlap, training, skewness, limits)

    def function(self, metric: str) -> Any:
        """Returns a metric.

        Args:
            metric: The metric.

        Raises:
            BadInput: It is not known.
        """
        if metric in self.functions:
            return self.functions[metric]
        if metric == "loss":
            # Each row's loss was kept.
            return SimpleNamespace(higher_is_better=False, limits=(self.lowest_loss, math.inf))
        try:
            return chosen_metrics([metric])[metric]  # one that the run did not measure
        except BadInput as error:
            known = ", ".join(["loss", "accuracy", *self.functions])
            raise BadInput(f"these outcomes have no metric {metric!r}; they have {known}") from error

    def worst(self, metric: str | None = None, higher_is_better: bool | None = None) -> Worst:
        """Returns the estimate of the worst site.

        Args:
            metric: The metric; None for the primary one. Default: None.
            higher_is_better: Whether a larger value is better; None for what is known. Default: None.
        """
        higher = self.higher(metric) if higher_is_better is None else higher_is_better
        every = self.estimates(metric)
        distinct = {id(every[i]): every[i] for i in self._known(every)}  # sites that share rows and model are one
        return Worst(tuple(distinct.values()), higher)

    def counted(self) -> list[int]:
        """Returns the sites that may be the worst: those with enough test rows or units, or all if none has enough. A
        site with a single unit has no interval, and is the worst only if all have one."""
        every = range(len(self.sites))
        enough = [i for i in every if self.unit_count(i) >= self.worst_needs_rows]
        several = [i for i in every if self.units(i) is None or self.unit_count(i) > 1]
        return enough or several or list(every)

    def _known(self, estimates: Sequence[Estimate]) -> list[int]:
        """Returns the sites that may be the worst by these estimates: those with an interval, or all that are counted
        if none has one. A value that nobody knows how far to trust would be outside the interval of the worst."""
        counted = self.counted()
        return [i for i in counted if not math.isnan(estimates[i].interval()[0])] or counted

    @property
    def few_rows(self) -> list[str]:
        """The names of the sites that were measured on too few test rows, or units, to be the worst."""
        counted = set(self.counted())
        return [name for i, name in enumerate(self.sites) if i not in counted and self.rows(i)]

    def notes(self, metric: str | None = None) -> list[str]:
        """Returns what a reader of the intervals must know.

        Args:
            metric: The metric; None for the primary one. Default: None.
        """
        found, least, rows = [], self.worst_needs_rows, "units" if self.has_units else "rows"
        measured = [self.unit_count(i) for i in range(len(self.sites)) if self.rows(i)]
        none_has_enough = bool(measured) and max(measured) < least
        estimates = self.estimates(metric)
        unknown = [self.sites[i] for i, one in enumerate(estimates) if self._has_too_few_units(i, one)]
        if unknown:
            found.append(
                f"The {self.judged_on} rows of {listed(unknown)} are of too few units for an interval of the "
                f"{metric or self.metric}, so verdicts are unclear: one unit says nothing about others, and a metric "
                "such as auroc needs at least three, and must be defined without any one of them."
            )
        if none_has_enough:
            found.append(f"No site has {least} {self.judged_on} {rows}, so any of them may be the worst by chance.")
        elif few := self.few_rows:
            found.append(
                f"With fewer than {least} {self.judged_on} {rows}, {listed(few)} cannot be the worst site "
                "(worst_needs_rows sets another number); the mean over sites includes them."
            )
        heavy = [name for name, one in zip(self.sites, estimates) if getattr(one, "is_heavy", False)]
        if heavy:
            found.append(
                f"The {metric or self.metric} has so heavy a tail that intervals are too narrow at {listed(heavy)}: a "
                "few rows decide it, and rarer ones may be missing. More test rows, or a metric that limits the "
                "influence of single rows, such as mae, say more."
            )
        if self.guessed_overlaps:
            sites = [self.sites[i] for i in self.guessed_overlaps]
            found.append(
                f"Intervals do not cover splits: at {listed(sites)} all splits have the same targets but no input in "
                "common, so inputs were changed in each split, and it is not known which rows splits share. Name the "
                "test rows: fm.Site(..., rows=ids)."
            )
        return found

    def _has_too_few_units(self, site: int, estimate: Estimate) -> bool:
        unknown = not math.isnan(estimate.value) and math.isnan(estimate.interval()[0])
        return unknown and self.units(site) is not None

    def worst_site(self, metric: str | None = None) -> int | None:
        """Returns the number of the worst site; None if no site has a value.

        Args:
            metric: The metric; None for the primary one. Default: None.
        """
        every = self.estimates(metric)
        counted = self._known(every)
        which = Worst(tuple(every[i] for i in counted), self.higher(metric)).which
        return None if which is None else counted[which]

    def higher(self, metric: str | None = None) -> bool:
        """Returns whether a larger value of the metric is better.

        Args:
            metric: The metric; None for the primary one. Default: None.
        """
        if metric is None or metric == self.metric:
            return self.higher_is_better
        return getattr(self.function(metric), "higher_is_better", True)

    def unit(self, metric: str | None = None) -> Unit:
        """Returns how the metric is shown.

        Args:
            metric: The metric; None for the primary one. Default: None.
        """
        function = self.function(metric := metric or self.metric)
        unit = self.target_unit if getattr(function, "in_target_units", False) else ""
        return Unit(metric, getattr(function, "is_share", False), unit)

    def mean(self, metric: str | None = None) -> Estimate:
        """Returns the estimate of the mean over sites. The sites are taken as they are: the interval does not cover the
        choice of the sites.

        Args:
            metric: The metric; None for the primary one. Default: None.
        """
        metric = metric or self.metric
        known = [i for i in range(len(self.sites)) if self.at(i)]
        scores = {i: self.scores(i, metric) for i in known}
        training = float(np.mean(self.trained_in_common)) if self.trained_in_common else 1.0
        limits, bounded = limits_of(self.function(metric)), self.counts_right(metric)
        if all(scores.values()):
            strata = self.strata(scores)
        else:
            strata, bounded = self._strata_of_units(known, metric), limits == (0.0, 1.0)
            if not strata:
                return mean_of(self.estimates(metric))
        return mean_share(strata, training) if bounded else mean_number(strata, training, limits)

    def strata(self, scores: Mapping[int, Scores]) -> list[Stratum]:
        """Returns the strata of the sites that have a score at each of their rows. Sites with the same rows are one.

        Args:
            scores: The scores at sites: one array (seeds, rows) per split.
        """
        defined = {i: of for i, of in scores.items() if of and not any(np.isnan(of_split).any() for of_split in of)}
        strata = []
        for sites in self._with_same_rows(defined):
            first = sites[0]
            numbers = [of_split.rows.numpy() for of_split in self.at(first) if of_split.rows is not None]
            known = len(numbers) == len(self.of_sites) and first not in self.guessed_overlaps
            means = [np.mean(of_split, axis=0) for of_split in zip(*(scores[i] for i in sites))]
            weight, additions = len(sites) / len(defined), self.additions(first, self.metric, means) or None
            strata.append(Stratum(means, weight, numbers if known else None, self.overlaps[first], additions))
        return strata

    def _strata_of_units(self, sites: Sequence[int], metric: str) -> list[Stratum]:
        """Returns the strata of a metric that is no mean over rows, if all sites have units and it is defined without
        any of them; else nothing."""
        every = {i: self.additions(i, metric, []) for i in sites}
        if not all(of and not any(np.isnan(part.scores).any() for part in of) for of in every.values()):
            return []
        if max(len(part.numbers) for of in every.values() for part in of) < 3:  # as at single sites
            return []
        strata = []
        for group in self._with_same_rows(sites):
            of_splits = list(zip(*(every[i] for i in group)))
            means = [np.mean([part.scores for part in of_split], axis=0) for of_split in of_splits]
            additions = [of_split[0]._replace(scores=scores) for of_split, scores in zip(of_splits, means)]
            strata.append(Stratum(means, len(group) / len(sites), None, self.overlaps[group[0]], additions))
        return strata

    def _with_same_rows(self, sites: Iterable[int]) -> list[list[int]]:
        """Returns the sites in groups that have the same test rows."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for i in sites:
            groups.setdefault(self.rows_key(i), []).append(i)
        return list(groups.values())

    def without_outputs(self) -> "Outcomes":
        """Returns the same without the outputs, which only some metrics need."""
        return replace(self, answers=tuple(replace(one, outputs=None, targets=None) for one in self.answers))

    def rows_key(self, site: int) -> tuple[str, ...]:
        """Returns the fingerprints of a site's test rows, one per split; none if it was not measured.

        Args:
            site: The number of the site.
        """
        return tuple(one.digest for one in self.at(site))


def skewness_of(sites: Sequence[Scores]) -> float | None:
    """Returns the skewness of a row, in units of its site, from the rows of all sites: one site has too few for it.
    None if rows do not vary. The unit is the mean distance from the site's mean, which single rows move little."""
    rest = []
    for scores in sites:
        apart = np.concatenate([of - of.mean() for of in (np.asarray(one).mean(axis=0) for one in scores)])
        unit = float(np.abs(apart).mean())
        if 0 < unit < math.inf:
            rest.append(apart / unit)
    if not rest:
        return None
    every = np.concatenate(rest)
    found = float((every**3).mean() / np.square(every).mean() ** 1.5)
    return found if math.isfinite(found) else None


def resamples_of(
    function: Callable[[Tensor, Tensor], Any], answers: Answers, seed: int, counts: np.ndarray
) -> np.ndarray:
    """Returns a metric of resamples of one seed's answers; NaN if outputs were not kept or it is not defined there.

    Args:
        function: The metric.
        answers: The answers.
        seed: Which seed's.
        counts: How often each resample contains each row (resamples, rows).
    """
    if answers.outputs is None or answers.targets is None:
        return np.full(len(counts), math.nan)
    return resampled(function, answers.outputs[seed], answers.targets, torch.from_numpy(counts)).numpy()


def _names_of(answers: Answers) -> Tensor | None:
    """Returns the numbers of the units that were answered, or of the rows if every row is its own unit."""
    return answers.rows if answers.units is None else answers.units.unique()


def deciding_rows(function: Any, answers: Sequence[Answers]) -> list[int]:
    """Returns how many rows decide a metric in each split, such as those of the rarer class.

    Args:
        function: The metric.
        answers: The answers at a site, one entry per split.
    """
    count = getattr(function, "deciding", len)
    return [len(of_split) if of_split.targets is None else int(count(of_split.targets)) for of_split in answers]


def in_common(sets: Sequence[Tensor]) -> float:
    """Returns the share of a set's row numbers that are in another set, averaged over pairs; 0 for one set."""
    pairs = [(a, b) for k, a in enumerate(sets) for b in sets[:k]]
    shares = [len(np.intersect1d(a.numpy(), b.numpy())) / min(len(a), len(b)) for a, b in pairs]
    return min(1.0, float(np.mean(shares))) if shares else 0.0
