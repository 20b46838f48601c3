"""Which common model a run hands out that names no algorithm: the robust one, or the one with fixed weights.

Both are trained without a fold of every site's rows, fold by fold, and judged by these rows. So the rows that decide
were not seen in training, and test rows decide nothing."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fairmesh.evidence.outcomes import Outcomes
from fairmesh.metrics.over_sites import WORST_NEEDS_ROWS

if TYPE_CHECKING:
    from fairmesh.training.result import Result

Weights = Literal["robust", "fixed"]
WITHIN_NOISE = 0.1  # weights that differ less from the prior, relative to it, make no difference
_SURE = 1.64  # standard errors: 95 % on one side
_RESAMPLED = 400
_POINTS, _OF_LOSS = 0.005, 0.02  # what the mean over sites may lose: in shares of right answers, and of the loss
_TAIL = 0.2  # the share of the sites whose mean loss the robust weights are to lower


@dataclass(frozen=True)
class HandedOut:
    """Which weights the model has that a run hands out, and why.

    Args:
        weights: "robust" or "fixed".
        why: A sentence.
        worst: How much smaller the mean loss of the worst fifth of the sites is with robust weights, on held-out rows,
            with the bounds of a 90 % interval; NaN if it was not compared.
        mean: How much better the mean over sites of `metric` is.
        metric: What `mean` is about: "accuracy" or "loss".

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), rounds=30)
        >>> fm.run(experiment).handed_out.weights in ("robust", "fixed")
        True
    """

    weights: Weights
    why: str
    worst: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    mean: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    metric: str = "loss"

    @property
    def compared(self) -> bool:
        """Whether the two were compared by held-out rows."""
        return not math.isnan(self.worst[0])

    def as_json(self) -> dict[str, Any]:
        """Returns it as a table."""
        return dict(vars(self))


def near_prior(result: "Result") -> bool:
    """Returns whether the weights of all replicas ended within noise of the prior."""
    prior = result.problem.prior_of_sites.numpy()
    weights = np.array([record["lambda"] for record in result.final])
    return bool((np.abs(weights / prior - 1.0) < WITHIN_NOISE).all())


def decided(robust: Outcomes, fixed: Outcomes) -> HandedOut:
    """Returns which model is handed out, given what both answered on held-out rows. The robust one is, if it clearly
    lowers the mean loss of the worst fifth of the sites, and the mean over all sites is not clearly worse."""
    sites = [_Site.of(robust, fixed, i) for i in range(len(robust.sites))]
    known = [site for site in sites if site and site.units > 1]  # of one unit, nobody knows how sure it is
    if not known:
        return HandedOut("fixed", "no site has rows to hold out, so nothing speaks for robust weights")
    labels = all(site.has_right for site in known)
    generator = np.random.default_rng(0)
    drawn = [site.resampled(generator) for site in known]  # each (resamples, 4)
    found = np.stack([np.concatenate([site.means()[None], of_site]) for site, of_site in zip(known, drawn)], axis=1)
    measured = np.array([site.units >= WORST_NEEDS_ROWS for site in known])
    rows = found[:, measured] if measured.any() else found
    worst = _tail(rows[..., 1]) - _tail(rows[..., 0])
    mean = (found[..., 2] - found[..., 3] if labels else found[..., 1] - found[..., 0]).mean(axis=1)
    before = float(found[0, :, 1].mean())
    may_lose = _POINTS if labels else _OF_LOSS * before
    gain, change = _with_bounds(worst), _with_bounds(mean)
    metric = "accuracy" if labels else "loss"
    if gain[1] > 0 and change[2] >= -may_lose:
        weights, why = "robust", "on held-out rows they clearly help the worst fifth of the sites"
    elif gain[1] > 0:
        lost = (
            f"{-100 * change[0]:.1f} points of accuracy" if labels else f"{-100 * change[0] / before:.0f} % of the loss"
        )
        weights = "fixed"
        why = f"on held-out rows robust weights help the worst sites, but cost the mean over all sites {lost}"
    else:
        weights, why = "fixed", "on held-out rows robust weights do not clearly help the worst fifth of the sites"
    return HandedOut(weights, why, gain, change, metric)


def _tail(losses: np.ndarray) -> np.ndarray:
    """Returns the mean loss of the worst fifth of the sites (..., sites)."""
    count = max(1, math.ceil(_TAIL * losses.shape[-1]))
    return np.sort(losses, axis=-1)[..., -count:].mean(axis=-1)


def _with_bounds(values: np.ndarray) -> tuple[float, float, float]:
    """Returns an estimate, which comes first, and bounds by the spread of the same estimate on resampled rows."""
    error = _SURE * float(values[1:].std())
    return float(values[0]), float(values[0]) - error, float(values[0]) + error


@dataclass(frozen=True)
class _Site:
    """The sums of a site's units: losses with robust and with fixed weights, right answers with both, and rows."""

    of_units: np.ndarray  # (units, 5)
    has_right: bool

    @staticmethod
    def of(robust: Outcomes, fixed: Outcomes, i: int) -> "_Site | None":
        """Returns the rows of site i in all splits that have some; None if none has."""
        made, units, has_right = [], [], True
        for ours, theirs in zip(robust.of_sites, fixed.of_sites):
            if ours[i] < 0:
                continue
            pair = robust.answers[ours[i]], fixed.answers[theirs[i]]
            losses = [answers.losses.double().mean(dim=0).numpy() for answers in pair]
            has_right &= pair[0].right is not None
            right = [
                np.zeros_like(losses[0]) if answers.right is None else (answers.right == 1).double().mean(dim=0).numpy()
                for answers in pair
            ]
            made.append(np.stack([*losses, *right, np.ones_like(losses[0])], axis=1))
            own = pair[0].rows if pair[0].units is None else pair[0].units  # the same in all splits
            units.append(len(units) * 2**40 + np.arange(len(losses[0])) if own is None else own.numpy())
        if not made:
            return None
        _, owner = np.unique(np.concatenate(units), return_inverse=True)
        sums = np.zeros((owner.max() + 1, 5))
        np.add.at(sums, owner, np.concatenate(made))
        return _Site(sums, has_right)

    @property
    def units(self) -> int:
        return len(self.of_units)

    def means(self) -> np.ndarray:
        """Returns the mean losses with robust and fixed weights, and the shares of right answers."""
        total = self.of_units.sum(axis=0)
        return total[:4] / total[4]

    def resampled(self, generator: np.random.Generator) -> np.ndarray:
        """Returns the means of units that are drawn with replacement (resamples, 4)."""
        counts = generator.multinomial(self.units, np.full(self.units, 1 / self.units), size=_RESAMPLED)
        total = counts @ self.of_units
        found = total[:, :4] / total[:, 4:]
        return self.means() + (found - self.means()) * math.sqrt(self.units / (self.units - 1))  # else too narrow
