"""The model that suits each site best, by its own rows and by what all sites found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fairmesh.personalization.base import Personalization, TriedSite, Weigh
from fairmesh.personalization.candidates import COMMON, FINE_TUNED, NEAR, OWN, RECALIBRATED
from fairmesh.personalization.evidence import Predictions
from fairmesh.personalization.pooled_prior import (
    STEPS,
    CommonLosses,
    Sums,
    evidence,
    learned_prior,
    responsibilities,
    without_site,
    without_traces,
)

_LEAST = 0.02  # weight of a model in a site's mixture; one with less is left out
_UNITS_FOR_OWN = 6  # a model of fewer is worse than any other, and the prior of larger sites would speak for it


@dataclass(frozen=True)
class Choice(Personalization):
    """Chooses for each site among the common model, its own, and what lies between, with a prior from all sites.

    The candidates are the common model; models trained from it that stay near it; the common model with a constant
    added to its outputs; and models of the site's own rows alone, with penalties on their size. Held-out rows of a site
    say how well each of them does there. A site with few rows cannot tell. So all sites together learn how likely each
    candidate is at a site like these, and a site starts from that. Its model is the mixture of the candidates by their
    probability: p = sum_k r_k p_k for labels, the average output for numbers.

    With `fm.train`, experiment files and between organisations, sites send sums of a few numbers: their part of the
    losses of the common model, and of the probabilities of the candidates.

    Args:
        steps: Steps of models that are trained on from the common one, >= 1. Default: 200.
        step: Euclidean norm of the first of these steps, > 0; it falls to 0 linearly. Default: 0.3.
        local_steps: Steps of models from scratch, >= 1. Default: 300.
        local_step: Euclidean norm of the first of these steps, > 0; it falls to 0 cubically. Default: 0.7.
        folds: The number of folds that a site's rows are divided into, 2 to 10. Default: 5.
        share: The share of its training rows that a site reserves, in (0, 1): the common model is not trained on them.
            Default: 0.2.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(
        ...     fm.data.Digits(nodes=4, odd=1), fm.Ring(), fm.TrackedADGDA(), rounds=20,
        ...     personalization=fm.personalization.Choice(steps=20, local_steps=20),
        ... )
        >>> weights = fm.run(experiment).personal[0].sites[3].weights
        >>> round(sum(weights.values()), 6)
        1.0
    """

    components: ClassVar[tuple[str, ...]] = (COMMON, *NEAR, FINE_TUNED, *RECALIBRATED, *OWN)
    fewest_rows: ClassVar[int] = 2
    fewest_units: ClassVar[int] = 2
    sums: ClassVar[int] = 1 + STEPS
    sends: ClassVar[str] = (
        "by how many rows, or units, it judges models, the sum and the mean of the common model's losses on them, and "
        "in 40 steps how likely each kind of model is the best at this site"
    )

    def learned(self, sites: Sequence[TriedSite], common: CommonLosses, sums: Sums) -> Weigh:
        """Returns the probabilities of the candidates, with the prior that all sites support."""
        names = self.components
        own = torch.tensor([name in OWN for name in names])

        def total(losses: Predictions, weights: Tensor) -> Tensor:
            of_rows = torch.stack([losses.losses({name: 1.0}) for name in names])
            return torch.where(weights > 0, of_rows * weights, 0.0).sum(dim=-1)

        def found(site: TriedSite, rows: Tensor) -> Tensor:
            weights = torch.where(site.unseen, 1.0, common.weight_of_seen).double() * rows * site.independent
            # A model that is worse on the rows it was trained on than models without them is not what these judged: it
            # was stopped at another point of its way. It is judged as what it is.
            totals = torch.maximum(total(site.held_out, weights), total(site.fitted, weights))
            made = evidence(totals[None], weights.sum()[None], common.noise, site.held_out.likelihood)
            return made.masked_fill(own, -torch.inf) if len(rows) * site.independent < _UNITS_FOR_OWN else made

        every = {site.number: found(site, torch.ones_like(site.unseen)) for site in sites}
        nothing = torch.zeros(0, len(names), dtype=torch.float64)
        prior = learned_prior(torch.cat([nothing, *every.values()]), sums)

        def weigh(site: TriedSite, rows: Tensor) -> dict[str, float]:
            before = prior
            if not bool(
                rows.all()
            ):  # the other rows judge what these say, so they have no part in it, nor in the prior
                (of_site,) = responsibilities(every[site.number], prior)
                before = without_site(prior, of_site, common.sites)
            (chosen,) = responsibilities(found(site, rows), before).tolist()
            return {name: w for name, w in zip(names, without_traces(chosen, _LEAST)) if w > 0}

        return weigh
