"""Whether the weights helped: a run next to the same run with fixed weights, site by site."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fairmesh.training.result import Result


_RAISED = 1.5  # times its prior: a weight that is worth a warning


@dataclass(frozen=True)
class SiteVerdict:
    """What the weights did to one site.

    Args:
        name: The site.
        fixed: Its metric with fixed weights, the mean over seeds.
        robust: Its metric with the run's weights.
        interval: Half of the 95 % interval of the difference: from the seeds and, for accuracy, the size of the test
            set. NaN if neither is known.
        weight: lambda_i, its final weight.
        prior: p_i, its fixed weight.
        outcome: "helped", "hurt", or "no difference" within the interval.
    """

    name: str
    fixed: float
    robust: float
    interval: float
    weight: float
    prior: float
    outcome: Literal["helped", "hurt", "no difference"]


@dataclass(frozen=True)
class WeightsVerdict:
    """Whether the weights of a run helped, site by site.

    Args:
        metric: The metric that sites are compared by.
        sites: One verdict per site.
        heaviest: The site with the largest weight, as a multiple of its prior.
        worst: The site with the worst metric.
        warning: That the heaviest site does better than the worst one, by more than chance; None if it does not.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), rounds=30)
        >>> verdict = fm.run(experiment).weights_verdict()
        >>> len(verdict.sites), verdict.metric
        (4, 'accuracy')
    """

    metric: str
    sites: tuple[SiteVerdict, ...]
    heaviest: str
    worst: str
    warning: str | None = None

    def count(self, outcome: str) -> int:
        """Returns how many sites have this outcome."""
        return sum(site.outcome == outcome for site in self.sites)

    def sentences(self) -> list[str]:
        """Returns the verdict in words."""
        lines = [
            f"against fixed weights, the weights helped {self.count('helped')} of {len(self.sites)} sites and hurt "
            f"{self.count('hurt')}; the others differ by less than their interval"
        ]
        lines += [
            f"{site.name}: {self.metric} {site.fixed:.3g} with fixed weights, {site.robust:.3g} with weight "
            f"{site.weight:.2g} instead of {site.prior:.2g} ({site.outcome}, +/- {site.interval:.2g})"
            for site in self.sites
            if site.outcome != "no difference"
        ]
        return lines if self.warning is None else [*lines, self.warning]

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def as_json(self) -> dict[str, Any]:
        """Returns the verdict as a table."""
        return {
            "metric": self.metric,
            "heaviest": self.heaviest,
            "worst": self.worst,
            "warning": self.warning,
            "sites": {site.name: {k: v for k, v in vars(site).items() if k != "name"} for site in self.sites},
        }


def verdict_of(result: "Result", fixed: "Result") -> WeightsVerdict:
    """Returns what the weights did, from the run and the same run with fixed weights."""
    problem, metric = result.problem, result.problem.primary
    sign = 1.0 if problem.higher_is_better(metric) else -1.0
    with_weights, without = ([record[metric]["sites"] for record in one.final] for one in (result, fixed))
    by_share = metric == "accuracy"
    weights, prior = _mean([record["lambda"] for record in result.final]), problem.prior_of_sites.tolist()
    sites = []
    for i, site in enumerate(problem.sites):
        ours, theirs = [row[i] for row in with_weights], [row[i] for row in without]
        robust, plain = sum(ours) / len(ours), sum(theirs) / len(theirs)
        samples = len(site.test) if site.test is not None else None
        interval = 2 * math.hypot(_seed_error(ours, theirs), _sample_error(robust, plain, samples, metric))
        gain = sign * (robust - plain)
        sure = math.isfinite(interval) and abs(gain) > interval
        outcome = ("helped" if gain > 0 else "hurt") if sure else "no difference"
        sites.append(SiteVerdict(site.name or "", plain, robust, interval, weights[i], prior[i], outcome))
    heaviest = max(range(len(sites)), key=lambda i: sites[i].weight / sites[i].prior)
    worst = min(range(len(sites)), key=lambda i: math.inf if math.isnan(sites[i].robust) else sign * sites[i].robust)
    raised, low = sites[heaviest], sites[worst]
    sizes = [0 if problem.sites[i].test is None else len(problem.sites[i].test) for i in (heaviest, worst)]
    errors = [_share_error(one.robust, n) for one, n in zip((raised, low), sizes) if n and by_share]
    warning = None
    better = sign * (raised.robust - low.robust)
    if len(errors) == 2 and raised.weight > _RAISED * raised.prior and better > 2 * math.hypot(*errors):
        warning = (
            f"{raised.name} has {raised.weight / raised.prior:.1f} times the weight of its prior, but {low.name} has "
            f"the worst {metric} ({low.robust:.3g}, against {raised.robust:.3g}): weight does not help there, or the "
            "rows that judge the sites are too few"
        )
    return WeightsVerdict(metric, tuple(sites), raised.name, low.name, warning)


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows)]


def _seed_error(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the standard error, over the seeds, of the difference of two runs; 0 for one seed."""
    differences = [a - b for a, b in zip(ours, theirs)]
    if len(differences) < 2:
        return 0.0
    mean = sum(differences) / len(differences)
    variance = sum((one - mean) ** 2 for one in differences) / (len(differences) - 1)
    return math.sqrt(variance / len(differences))


def _sample_error(robust: float, plain: float, samples: int | None, metric: str) -> float:
    """Returns the standard error of a difference of accuracies on the same samples, as if they erred independently."""
    if metric != "accuracy" or samples is None:
        return 0.0 if metric == "accuracy" else math.nan
    return math.hypot(_share_error(robust, samples), _share_error(plain, samples))


def _share_error(share: float, samples: int) -> float:
    """Returns the standard error of a share of samples."""
    return math.sqrt(share * (1 - share) / samples)
