"""Which of two models is better, site by site, and how sure that is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fairmesh.errors import BadInput, counted
from fairmesh.evidence.intervals import LEVEL, Combined, Estimate, Share
from fairmesh.evidence.many import chance_in_words, clear_among, excludes_zero
from fairmesh.evidence.means import mean_number, mean_of, mean_paired_share
from fairmesh.evidence.outcomes import Answers, Outcomes, deciding_rows, resamples_of, skewness_of
from fairmesh.evidence.scores import bootstrapped, paired, paired_counts, row_differences
from fairmesh.metrics.base import limits_of
from fairmesh.metrics.units import Unit, defined

Verdict = Literal["better", "worse", "unclear"]


@dataclass(frozen=True)
class Difference:
    """The difference between two models, and what follows from it.

    Args:
        difference: The metric of the one minus that of the other; NaN if it is not defined.
        interval: Its interval.
        verdict: "better", "worse", or "unclear" if the interval contains 0 or is not known. One of many sites is also
            "unclear" if its 95 % interval lies beside 0 no more clearly than chance explains.
        paired: Whether both answered the same test rows. If not, the interval is wider. Default: True.
        level: The level of the interval: higher at a site that is better or worse among many. Default: 0.95.

    Example:
        >>> from fairmesh.evidence import versus_counts
        >>> found = versus_counts(200, only_a=30, only_b=6)
        >>> found.verdict, found.sentence("alone")
        ('better', 'better than alone by 6 to 18 points')
    """

    difference: float
    interval: tuple[float, float]
    verdict: Verdict
    paired: bool = True
    level: float = LEVEL

    @property
    def stands_out(self) -> bool:
        """Whether the interval excludes 0, whatever the verdict is among many sites."""
        return excludes_zero(self.interval)

    def table(self) -> dict[str, Any]:
        """Returns the difference as it is written to JSON."""
        fields = ("difference", "interval", "level", "verdict")
        return {name: getattr(self, name) for name in fields} | {"interval": list(self.interval)}

    def sentence(self, other: str, unit: Unit = Unit("accuracy", share=True)) -> str:  # noqa: B008
        """Returns the verdict in words.

        Args:
            other: What was compared with, such as "alone".
            unit: How the metric is shown. Default: as accuracy.
        """
        return verdict_in_words(self.table(), unit, other)


def verdict_in_words(compared: Mapping[str, Any], unit: Unit, other: str = "", among: int = 0) -> str:
    """Returns the verdict on a model against another, such as "better than alone by 3 to 9 points".

    Args:
        compared: The difference, as JSON has it. Between organisations it may be without an interval.
        unit: How the metric is shown.
        other: What the other model is called; empty if the reader knows. Default: "".
        among: How many sites were compared; 0 if that is not known. Default: 0.
    """
    verdict, interval = compared["verdict"], compared.get("interval")
    if "interval" in compared and not (interval and all(map(defined, interval))):
        reason = "it is not measured or not defined, or rows are of too few units"
        return f"not compared with {other}, since {reason}" if other else "not compared"
    unclear = verdict == "unclear"
    said = "no clear difference" if unclear else verdict
    said += f" {'from' if unclear else 'than'} {other}" if other else ""
    if not interval:
        return said
    if unclear:
        sites = counted(among, "site") if among else "several sites"
        chance = f"; with {sites} compared, this may be chance" if excludes_zero(interval) else ""
        return f"{said} ({unit.difference(interval)} {unit.of_differences}{chance})"
    return f"{said} by {unit.difference(sorted(map(abs, interval)), signed=False)} {unit.of_differences}"


def difference_of(estimate: Estimate, higher_is_better: bool, paired: bool = True) -> Difference:
    """Returns the verdict that follows from the estimate of a difference.

    Args:
        estimate: The estimate.
        higher_is_better: Whether a larger metric is better.
        paired: Whether both models answered the same rows. Default: True.
    """
    (found,) = differences_of([estimate], higher_is_better, [paired])
    return found


def differences_of(
    estimates: Sequence[Estimate], higher_is_better: bool, paired: Sequence[bool], among: int = 1
) -> tuple[Difference, ...]:
    """Returns the verdicts that follow from the differences at several sites, adjusted for their number.

    Args:
        estimates: The estimate of each difference.
        higher_is_better: Whether a larger metric is better.
        paired: Whether both models answered the same rows, for each.
        among: How many sites are compared, if others know the rest of them. Default: 1.
    """
    clear, found = clear_among(estimates, among), []
    for i, estimate in enumerate(estimates):
        level = clear.level if i in clear.which else LEVEL
        low, high = estimate.interval(level)
        verdict: Verdict = "better" if (low > 0) == higher_is_better else "worse"
        verdict = verdict if i in clear.which else "unclear"
        found.append(Difference(estimate.value, (low, high), verdict, paired[i], level))
    return tuple(found)


def versus_counts(rows: int, only_a: int, only_b: int, among: int = 1) -> Difference:
    """Returns how two models differ in their share of right answers, from counts alone.

    Args:
        rows: How many test rows there are.
        only_a: How many of them only the first model answers right.
        only_b: How many of them only the second model answers right.
        among: How many sites are compared, each by its own counts. Default: 1.

    Example:
        >>> from fairmesh.evidence import versus_counts
        >>> versus_counts(20, only_a=0, only_b=0).verdict
        'unclear'
        >>> versus_counts(60, only_a=9, only_b=1).verdict, versus_counts(60, only_a=9, only_b=1, among=100).verdict
        ('better', 'unclear')
    """
    (found,) = differences_of([paired_counts(rows, only_a, only_b)], True, [True], among)
    return found


@dataclass(frozen=True)
class Comparison:
    """How two models differ at every site, at the worst site and on average.

    Args:
        metric: The metric.
        sites: The names of the sites.
        at_sites: The difference at each site. Verdicts are adjusted for the number of sites that were compared.
        worst: The difference of the two models' worst sites, which may be different sites.
        mean: The difference of the means over sites.
        unit: How the metric is shown.

    Example:
        >>> import fairmesh as fm
        >>> from fairmesh.evidence import versus
        >>> data = fm.data.Digits(nodes=4)
        >>> algorithm = fm.algorithms.DSGD()
        >>> short, long = (fm.run(fm.Experiment(data, algorithm=algorithm, rounds=k)).outcomes() for k in (1, 60))
        >>> versus(long, short).mean.verdict
        'better'
    """

    metric: str
    sites: tuple[str, ...]
    at_sites: tuple[Difference, ...]
    worst: Difference
    mean: Difference
    unit: Unit

    @property
    def paired(self) -> bool:
        """Whether both models answered the same test rows at every site."""
        return all(one.paired for one in self.at_sites)

    def count(self, verdict: Verdict) -> int:
        """Returns at how many sites the verdict is this."""
        return sum(one.verdict == verdict for one in self.at_sites)

    def table(self) -> dict[str, Any]:
        """Returns the comparison as it is written to JSON."""
        return {
            "metric": self.metric,
            "level": LEVEL,
            "paired": self.paired,
            "worst": self.worst.table(),
            "mean": self.mean.table(),
            "sites": {name: one.table() for name, one in zip(self.sites, self.at_sites)},
        }

    def sentences(self, other: str) -> list[str]:
        """Returns one sentence per site.

        Args:
            other: What was compared with, such as "alone".
        """
        return [f"{name}: {one.sentence(other, self.unit)}" for name, one in zip(self.sites, self.at_sites)]

    def chance(self) -> str:
        """Returns how many sites look different by themselves, if that is more than remain among so many sites;
        nothing if it is not."""
        known = [one for one in self.at_sites if not math.isnan(one.interval[0])]
        remaining = self.count("better") + self.count("worse")
        return chance_in_words(sum(one.stands_out for one in known), remaining, len(known))

    def sentence(self, other: str) -> str:
        """Returns one sentence for all sites.

        Args:
            other: What was compared with, such as "alone".
        """
        n, unknown = len(self.at_sites), sum(math.isnan(one.difference) for one in self.at_sites)
        counts = f"{self.count('better')} of {n} sites are better than {other}, {self.count('worse')} worse"
        counts += f", {self.count('unclear') - unknown} without a clear difference"
        counts += f", {unknown} not compared" if unknown else ""
        counts += f"; {chance}" if (chance := self.chance()) else ""
        return (
            f"{counts}; the worst site: {self.worst.sentence(other, self.unit)}; the mean over sites: "
            f"{self.mean.sentence(other, self.unit)}"
        )


def versus(a: Outcomes, b: Outcomes, metric: str | None = None, among: int = 1) -> Comparison:
    """Compares two models at the same sites.

    Where both answered the same test rows, they are compared row by row, and the interval is much narrower than those
    of the two models suggest. Elsewhere it follows from the two intervals. Verdicts by site are adjusted for their
    number (`fairmesh.evidence.many`); those on the worst site and on the mean are single statements.

    Args:
        a: What the one answered.
        b: What the other answered.
        metric: The metric; None for the primary one of `a`. Default: None.
        among: How many sites are compared, if others know the rest of them. Default: 1.

    Raises:
        BadInput: They have different sites.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), algorithm=fm.algorithms.DSGD(), rounds=5)
        >>> outcomes = fm.run(experiment).outcomes()
        >>> fm.evidence.versus(outcomes, outcomes).count("unclear")
        4
    """
    metric = metric or a.metric
    if a.sites != b.sites:
        raise BadInput(f"only models of the same sites can be compared; they have {list(a.sites)} and {list(b.sites)}")
    higher, of_a, of_b = a.higher(metric), a.estimates(metric), b.estimates(metric)
    same = [bool(a.at(i)) and a.rows_key(i) == b.rows_key(i) for i in range(len(a.sites))]
    skewness = _skewness(a, b, metric, same)
    estimates = [
        _paired(a, b, i, metric, skewness) if same[i] else Combined((one, other), (1.0, -1.0))
        for i, (one, other) in enumerate(zip(of_a, of_b))
    ]
    return Comparison(
        metric,
        a.sites,
        differences_of(estimates, higher, same, among),
        difference_of(_of_worst(a, b, metric), higher, all(same)),
        difference_of(mean_difference(a, b, metric), higher, all(same)),
        a.unit(metric),
    )


def _skewness(a: Outcomes, b: Outcomes, metric: str, same: Sequence[bool]) -> float | None:
    """Returns the skewness of the difference of a row, or unit, from those of all sites: a single site does not show
    its tails, which decide when many are compared. None for shares, and for that of each site's own rows if there is
    one only."""
    if a.counts_right(metric):
        return None
    scores = {i: (a.scores(i, metric), b.scores(i, metric)) for i, paired_here in enumerate(same) if paired_here}
    differences = {i: [row_differences(x, y) for x, y in zip(*pair)] for i, pair in scores.items() if all(pair)}
    by_unit = {i: [part.scores for part in a.additions(i, metric, of)] for i, of in differences.items()}
    known = [by_unit[i] or of_site for i, of_site in differences.items()]
    return skewness_of(known) if len(known) > 1 else None


def _paired(a: Outcomes, b: Outcomes, site: int, metric: str, skewness: float | None = None) -> Estimate:
    if not all(one.predicted for one in (*a.at(site), *b.at(site))):
        return Share(math.nan, a.rows(site))
    mine, theirs = a.scores(site, metric), b.scores(site, metric)
    if mine and theirs:
        training, linear = _training_overlap(a, b, site, mine, theirs), getattr(a.function(metric), "linear", True)
        skewness = skewness if linear else 0.0  # roots differ by about as much in both directions
        overlap, units = a.overlaps[site], a.units(site)
        return paired(mine, theirs, overlap, a.counts_right(metric), training, skewness, units)
    here, there, function = a.at(site), b.at(site), a.function(metric)

    def resample(split: int, seed: int, counts: np.ndarray) -> np.ndarray:
        return _mean_of(function, here[split], counts) - _mean_of(function, there[split], counts)

    sizes, bounded = [len(one) for one in here], limits_of(function) == (0.0, 1.0)
    more = {"deciding": deciding_rows(function, here), "units": a.units(site)}
    return bootstrapped(resample, sizes, [1] * len(here), a.overlaps[site], bounded, difference=True, **more)


def _training_overlap(
    a: Outcomes, b: Outcomes, site: int, mine: Sequence[np.ndarray], theirs: Sequence[np.ndarray]
) -> float:
    """Returns how much the training of two models has in common between splits: the mean of both, weighted by how much
    each varies between splits."""
    if len(mine) < 2 or not (a.trained_in_common or b.trained_in_common):
        return 1.0
    variances = [float(np.var([one.mean() for one in scores], ddof=1)) for scores in (mine, theirs)]
    common = [min(one.training_overlap(site), a.overlaps[site]) for one in (a, b)]
    return float(np.average(common, weights=variances)) if sum(variances) > 0 else 1.0


def _mean_of(function: Any, answers: Answers, counts: np.ndarray) -> np.ndarray:
    return np.mean([resamples_of(function, answers, seed, counts) for seed in range(len(answers.losses))], axis=0)


def mean_difference(a: Outcomes, b: Outcomes, metric: str | None = None) -> Estimate:
    """Returns the estimate of the difference of two models' means over sites.

    Args:
        a: What the one answered.
        b: What the other answered.
        metric: The metric; None for the primary one of `a`. Default: None.
    """
    metric = metric or a.metric
    known = [i for i in range(len(a.sites)) if a.at(i) and a.rows_key(i) == b.rows_key(i)]
    if known != [i for i in range(len(a.sites)) if a.at(i) or b.at(i)]:
        return Combined((a.mean(metric), b.mean(metric)), (1.0, -1.0))
    scores = {i: (a.scores(i, metric), b.scores(i, metric)) for i in known}
    if not all(x and y for x, y in scores.values()):
        return mean_of([_paired(a, b, i, metric) for i in known])
    strata = a.strata({i: [row_differences(p, q) for p, q in zip(x, y)] for i, (x, y) in scores.items()})
    return mean_paired_share(strata) if a.counts_right(metric) else mean_number(strata)


def _of_worst(a: Outcomes, b: Outcomes, metric: str) -> Estimate:
    """Returns the difference of the two worst sites. If they are the same site, its rows correlate. If not, both worst
    values are too low by chance, each by another amount, and that is taken into account."""
    one, other = a.worst(metric), b.worst(metric, a.higher(metric))
    i, k = a.worst_site(metric), b.worst_site(metric)
    correlation = 0.0
    if i is not None and k is not None and a.rows_key(i) and a.rows_key(i) == b.rows_key(k):
        mine, theirs = a.scores(i, metric), b.scores(k, metric)
        if mine and theirs:
            by_unit = ([part.scores for part in a.additions(i, metric, scores)] for scores in (mine, theirs))
            pairs = zip(*by_unit) if a.units(i) else zip(mine, theirs)
            correlation = float(np.mean([_correlation(x.mean(axis=0), y.mean(axis=0)) for x, y in pairs]))
    return Combined((one, other), (1.0, -1.0), max(0.0, correlation), debiased=i != k)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    spread = float(x.std() * y.std())
    return float(((x - x.mean()) * (y - y.mean())).mean()) / spread if spread > 0 else 0.0


def evidence_row(estimate: Estimate, differences: Mapping[str, Difference] = {}) -> dict[str, Any]:
    """Returns an estimate and how it differs from other models, by their names, as JSON has it."""
    return {
        "value": estimate.value,
        "interval": list(estimate.interval()),
        "versus": {name: difference.table() for name, difference in differences.items()},
    }


def evidence_table(
    outcomes: Outcomes,
    metric: str | None = None,
    against: Mapping[str, Outcomes] | None = None,
) -> dict[str, Any]:
    """Returns the intervals of every site, of the worst and of the mean, as a run writes them to its summary.

    Args:
        outcomes: What the models answered.
        metric: The metric; None for the primary one. Default: None.
        against: Other models by name, such as {"local": ...}; every site is compared with each. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> from fairmesh.evidence import evidence_table
        >>> result = fm.run(fm.Experiment(fm.data.Digits(nodes=4), algorithm=fm.algorithms.DSGD(), rounds=5))
        >>> found = evidence_table(result.outcomes())
        >>> sorted(found)
        ['covers', 'level', 'mean', 'metric', 'notes', 'sites', 'worst']
        >>> sorted(found["sites"][0])
        ['few_rows', 'interval', 'n', 'name', 'value', 'versus']
    """
    metric, others = metric or outcomes.metric, against or {}
    compared = {name: versus(outcomes, other, metric) for name, other in others.items()}
    estimates, worst = outcomes.estimates(metric), outcomes.worst(metric)
    which, few = outcomes.worst_site(metric), set(outcomes.few_rows)

    return {
        "level": LEVEL,
        "metric": metric,
        "covers": outcomes.covers,
        "notes": outcomes.notes(metric),
        "worst": {"site": None if which is None else outcomes.sites[which]}
        | evidence_row(worst, {name: one.worst for name, one in compared.items()}),
        "mean": evidence_row(outcomes.mean(metric), {name: one.mean for name, one in compared.items()}),
        "sites": [
            {"name": name, "n": outcomes.rows(i), "few_rows": name in few}
            | ({} if outcomes.units(i) is None else {"units": outcomes.unit_count(i)})
            | evidence_row(estimates[i], {other: one.at_sites[i] for other, one in compared.items()})
            for i, name in enumerate(outcomes.sites)
        ],
    }
