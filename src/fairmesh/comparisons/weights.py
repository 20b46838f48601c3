"""Whether the weights helped: a run next to the same run with fixed weights, site by site."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fairmesh.evidence.intervals import Combined
from fairmesh.evidence.many import chance_in_words, excludes_zero
from fairmesh.evidence.verdicts import Difference, difference_of, versus

if TYPE_CHECKING:
    from fairmesh.comparisons.handed_out import HandedOut
    from fairmesh.training.result import Result


Outcome = Literal["helped", "hurt", "no difference", "not compared"]
_OUTCOMES: dict[str, Outcome] = {"better": "helped", "worse": "hurt", "unclear": "no difference"}
_RAISED = 1.5  # times its prior: a weight that is worth a warning


@dataclass(frozen=True)
class SiteVerdict:
    """What the weights did to one site.

    Args:
        name: The site.
        fixed: Its metric with fixed weights, the mean over replicas.
        robust: Its metric with the run's weights.
        interval: The interval of the difference, robust minus fixed, on the same test rows, as in
            `fm.evidence.Difference`. NaN if it is not known.
        weight: lambda_i, its final weight.
        prior: p_i, its fixed weight.
        outcome: "helped", "hurt", "no difference" if none is clear, or "not compared" where the metric
            is not defined.
    """

    name: str
    fixed: float
    robust: float
    interval: tuple[float, float]
    weight: float
    prior: float
    outcome: Outcome


@dataclass(frozen=True)
class WeightsVerdict:
    """Whether the weights of a run helped, site by site.

    Args:
        metric: The metric that sites are compared by.
        sites: One verdict per site.
        heaviest: The site with the largest weight, as a multiple of its prior.
        worst: The site with the worst metric.
        warning: That the heaviest site does better than the worst one, by more than chance; None if it does not.
        decision: Why a run that names no algorithm hands out its model without a comparison on test rows, which then
            has no sites. Default: "".

    Example:
        >>> import fairmesh as fm
        >>> options = fm.Options(compare_weights=True)
        >>> data, algorithm = fm.data.Digits(nodes=4, odd=1), fm.TrackedADGDA()
        >>> experiment = fm.Experiment(data, algorithm=algorithm, rounds=30, options=options)
        >>> verdict = fm.run(experiment).weights_verdict()
        >>> len(verdict.sites), verdict.metric
        (4, 'accuracy')
    """

    metric: str
    sites: tuple[SiteVerdict, ...]
    heaviest: str
    worst: str
    warning: str | None = None
    decision: str = ""

    def count(self, outcome: str) -> int:
        """Returns how many sites have this outcome."""
        return sum(site.outcome == outcome for site in self.sites)

    def _others(self) -> str:
        """Returns what is said of the sites that were neither helped nor hurt."""
        unknown, alike = self.count("not compared"), self.count("no difference")
        if not unknown:
            return "the others do not differ clearly"
        return f"{alike} do not differ clearly, and {unknown} could not be compared"

    def sentences(self) -> list[str]:
        """Returns the verdict in words."""
        if self.decision:
            return [self.decision]
        lines = [
            f"against fixed weights, the weights helped {self.count('helped')} of {len(self.sites)} sites and hurt "
            f"{self.count('hurt')}; {self._others()}"
        ]
        known = [site.interval for site in self.sites if not math.isnan(site.interval[0])]
        if chance := chance_in_words(
            sum(map(excludes_zero, known)), self.count("helped") + self.count("hurt"), len(known)
        ):
            lines[0] += f": {chance}"
        lines += [
            f"{site.name}: {self.metric} {site.fixed:.3g} with fixed weights, {site.robust:.3g} with weight "
            f"{site.weight:.2g} instead of {site.prior:.2g} ({site.outcome}; the difference is "
            f"{site.interval[0]:+.2g} to {site.interval[1]:+.2g})"
            for site in self.sites
            if site.outcome in ("helped", "hurt")
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
            "decision": self.decision,
            "sites": {site.name: {k: v for k, v in vars(site).items() if k != "name"} for site in self.sites},
        }


def decision_in_words(weights: str, why: str) -> str:
    """Returns which weights the common model has, and why."""
    return f"the common model has {weights} weights, because {why}"


def without_comparison(metric: str, handed_out: "HandedOut") -> WeightsVerdict:
    """Returns what is said of the weights of a run that was decided before its rounds, and compared with no other."""
    return WeightsVerdict(metric, (), "", "", decision=decision_in_words(handed_out.weights, handed_out.why))


def _outcome(difference: Difference) -> Outcome:
    return "not compared" if math.isnan(difference.interval[0]) else _OUTCOMES[difference.verdict]


def verdict_of(result: "Result", fixed: "Result") -> WeightsVerdict:
    """Returns what the weights did, from the run and the same run with fixed weights."""
    problem, metric, ours, theirs = result.problem, result.problem.primary, result.outcomes(), fixed.outcomes()
    robust, plain, compared = ours.estimates(), theirs.estimates(), versus(ours, theirs)
    weights = np.mean([record["lambda"] for record in result.final], axis=0).tolist()
    prior = problem.prior_of_sites.tolist()
    sites = tuple(
        SiteVerdict(name, b.value, a.value, found.interval, weights[i], prior[i], _outcome(found))
        for i, (name, a, b, found) in enumerate(zip(ours.sites, robust, plain, compared.at_sites))
    )
    heaviest = max(range(len(sites)), key=lambda i: sites[i].weight / sites[i].prior)
    worst = ours.worst_site()
    if worst is None:
        return WeightsVerdict(metric, sites, sites[heaviest].name, "")
    raised, low = sites[heaviest], sites[worst]
    apart = difference_of(Combined((robust[heaviest], robust[worst]), (1.0, -1.0)), ours.higher_is_better)
    warning = None
    if raised.weight > _RAISED * raised.prior and apart.verdict == "better":
        warning = (
            f"{raised.name} has {raised.weight / raised.prior:.1f} times the weight of its prior, but {low.name} has "
            f"the worst {metric} ({low.robust:.3g}, against {raised.robust:.3g}): weight does not help there, or the "
            "rows that judge the sites are too few"
        )
    return WeightsVerdict(metric, sites, raised.name, low.name, warning)
