"""The prior of the sites' choices, learned from all sites.

A site with few rows cannot tell which model suits it, but all sites together tell which models suit sites like these.
Only sums over the sites are needed: a few numbers once, and one per candidate in every step."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

STEPS = 40
_SEEN = 0.25  # weight of a row that the common model has seen, where it does not look better on such rows
_BEFORE = 4.0  # rows that stand for the usual noise, next to a site's own
_FOR_COMMON = 2.0  # sites
_TRUST = 0.25  # of a row's evidence: folds share rows, so that held-out losses are less certain than they look
_ROUNDING = 1e-9
LARGEST_LOGARITHM = 20.0  # of a site's mean loss, so that no site moves the mean of all without bounds
LARGEST_LOSS, _LARGEST = 1e80, 1e100  # of a row that counts, and of all rows: so their sums are finite


class SomeSites(NamedTuple):
    """What everybody knows of some sites: how many they are, and how many rows they have at most that the common model
    has not seen and has seen."""

    sites: int
    unseen_rows: int
    seen_rows: int


Wrong = Callable[[Tensor, SomeSites], str]
"""Returns what cannot be true of the numbers that some sites add up to, in words; "" if nothing."""


def nothing_wrong(total: Tensor, sites: SomeSites) -> str:
    """Returns that any numbers can be true."""
    return ""


class Sums(Protocol):
    """Returns what all sites add up to, given what the sites here do. Where others send it, `wrong` checks it."""

    def __call__(self, total: Tensor, wrong: Wrong = nothing_wrong, /) -> Tensor: ...


def all_here(total: Tensor, wrong: Wrong = nothing_wrong, /) -> Tensor:
    """Returns the sum over all sites, where all are here."""
    return total


class CommonLosses(NamedTuple):
    """The sums of the common model's losses over rows that it has not seen and has seen, and how many rows these are:
    one per unit, if rows belong to units. And the sum of the logarithms of each site's mean loss, on unseen rows if it
    has such, and of how many sites: a site with much larger numbers than all others changes little in that."""

    unseen: float
    unseen_rows: float
    seen: float
    seen_rows: float
    logarithms: float = 0.0
    sites: float = 0.0

    @staticmethod
    def over(sums: Sums, of_fits: Iterable["CommonLosses"], lowest: float | None = None) -> "CommonLosses":
        """Returns the sums over all sites, given those of the sites that are here, and the lowest possible loss of a
        row if it is known."""
        total = torch.tensor([[0.0] * len(CommonLosses._fields), *of_fits], dtype=torch.float64).sum(dim=0)
        return CommonLosses(*sums(total, partial(CommonLosses.wrong, lowest=lowest)).tolist())

    @staticmethod
    def wrong(total: Tensor, sites: SomeSites, lowest: float | None = None) -> str:
        """Returns what some sites cannot have: a negative number of rows or more than they have declared, losses below
        the lowest possible one, or so large that sums of them are not finite."""
        known = CommonLosses(*total.tolist())
        of_rows = {"not seen": (known.unseen_rows, sites.unseen_rows), "seen": (known.seen_rows, sites.seen_rows)}
        for how, (rows, most) in of_rows.items():
            if not -_ROUNDING <= rows <= most + _ROUNDING * (1 + most):
                return f"{rows:.6g} rows that the common model has {how}, where {most} are declared"
        for loss, rows in ((known.unseen, known.unseen_rows), (known.seen, known.seen_rows)):
            least = -_LARGEST if lowest is None else lowest * rows - _ROUNDING * (1 + abs(lowest) * rows)
            if not least <= loss <= _LARGEST:
                return f"the sum {loss:.6g} of the losses of {rows:.6g} rows"
        if not -_ROUNDING <= known.sites <= sites.sites + _ROUNDING:
            return f"{known.sites:.6g} sites with losses, where there are {sites.sites}"
        if not abs(known.logarithms) <= LARGEST_LOGARITHM * sites.sites + _ROUNDING:
            return f"the sum {known.logarithms:.6g} of logarithms of losses"
        return ""

    @property
    def noise(self) -> float:
        """The usual loss of a site: the geometric mean over sites; 1 if no site has a positive one."""
        return math.exp(self.logarithms / self.sites) if self.sites > 0 else 1.0

    @property
    def weight_of_seen(self) -> float:
        """How much a seen row counts: less where the common model knows these rows better than others."""
        if not self.unseen_rows or not self.seen_rows:
            return _SEEN if self.unseen_rows else 1.0
        ratio = (self.seen / self.seen_rows) / max(self.unseen / self.unseen_rows, 1e-30)
        return _SEEN * min(1.0, max(0.0, ratio)) ** 2 if math.isfinite(ratio) else _SEEN


def evidence(totals: Tensor, rows: Tensor, noise: float, labels: bool) -> Tensor:
    """Returns the logarithm of how likely each site's rows are under each candidate, up to a constant per site; -inf
    where that is not finite.

    The loss of labels is a negative logarithm of their probability. Numbers have a noise of their own at every site,
    whose likely size all sites tell: `noise` counts like four rows.

    Args:
        totals: The sums of the losses (sites, candidates).
        rows: How many rows they are sums of (sites,).
        noise: The mean loss of the common model.
        labels: Whether the loss is a negative logarithm of a probability.
    """
    if labels or bool((totals < 0).any()):
        found = -totals
    else:
        found = -(_BEFORE + rows[:, None]) / 2 * (_BEFORE * noise + totals).log()
    return (_TRUST * found).nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)


def learned_prior(found: Tensor, sums: Sums = all_here, steps: int = STEPS) -> Tensor:
    """Returns the prior probability of each candidate (candidates,) that all sites together support best, by
    expectation and maximisation. Two sites more speak for the first candidate, the common model.

    Args:
        found: The evidence of the sites that are here (sites, candidates).
        sums: Adds up what sites elsewhere have.
        steps: How many steps. Default: 40.
    """
    candidates = found.shape[-1]
    prior = torch.full((candidates,), 1.0 / candidates, dtype=torch.float64)
    for_common = torch.zeros(candidates, dtype=torch.float64)
    for_common[0] = _FOR_COMMON
    for _ in range(steps):
        total = for_common + sums(responsibilities(found, prior).sum(dim=0), wrong_probabilities)
        prior = total / total.sum()
    return prior


def wrong_probabilities(total: Tensor, known: SomeSites) -> str:
    """Returns what probabilities of some sites cannot add up to: those of a site sum to one, or are 0 where it cannot
    judge."""
    if bool((total < -_ROUNDING).any()):
        return f"the probability {float(total.min()):.6g}"
    most = known.sites + _ROUNDING * (1 + known.sites)
    return f"probabilities of {float(total.sum()):.6g} sites, not {known.sites}" if float(total.sum()) > most else ""


def responsibilities(found: Tensor, prior: Tensor) -> Tensor:
    """Returns the probability of each candidate at each site (sites, candidates), given its evidence and the prior. A
    site without evidence for any candidate has the common model."""
    logits = prior.clamp(min=1e-30).log() + found
    lost = ~found.isfinite().any(dim=-1)
    chosen = torch.softmax(torch.where(lost[:, None], 0.0, logits), dim=-1)
    only_common = torch.zeros_like(prior)
    only_common[0] = 1.0
    return torch.where(lost[:, None], only_common, chosen)


def without_site(prior: Tensor, chosen: Tensor, sites: float) -> Tensor:
    """Returns the prior without the part that one of the sites has in it.

    Args:
        prior: The prior of all sites (candidates,).
        chosen: The probabilities of the site (candidates,).
        sites: How many sites the prior was learned from.
    """
    rest = ((sites + _FOR_COMMON) * prior - chosen).clamp(min=0.0)
    return rest / rest.sum()


def without_traces(weights: Sequence[float], least: float) -> list[float]:
    """Returns weights without those below a share, which cost as much to evaluate as others; they sum to one."""
    kept = [weight if weight >= least else 0.0 for weight in weights]
    return [weight / sum(kept) for weight in kept]
