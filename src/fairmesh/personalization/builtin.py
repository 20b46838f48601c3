"""The ways to give sites models of their own."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fairmesh.config.tables import register
from fairmesh.personalization.base import OneByOne, Personalization
from fairmesh.personalization.candidates import COMMON, FINE_TUNED, LOCAL
from fairmesh.personalization.choice import Choice
from fairmesh.personalization.evidence import Predictions


@dataclass(frozen=True)
class FineTuned(OneByOne):
    """Trains the common model further on each site's own rows, for as long as held-out rows support it.

    A site's rows are divided into folds. Models that start from the common one are trained without each fold, and
    judged by it along the way. The site's model is trained on all rows. It is the average of the models along its path,
    each weighted by the evidence that held-out rows give to its number of steps; no step at all is among them. Only
    rows that the common model was not trained on count, if the site has any.

    The result is a single model, which a site can use like the common one. `Mixture` is the safer choice where a site
    would do better without the common model.

    Args:
        steps: Steps at most, >= 1. Default: 200.
        step: Euclidean norm of the first step, > 0; it falls to 0 linearly. Default: 0.3.
        local_steps: Steps of the local model that the site is compared with, >= 1. Default: 300.
        local_step: Euclidean norm of the first of these steps, > 0; it falls to 0 cubically. Default: 0.7.
        folds: The number of folds, 2 to 10. Default: 5.
        share: The share of its training rows that a site reserves, in (0, 1): the common model is not trained on them.
            Default: 0.2.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(
        ...     fm.data.Digits(nodes=4, odd=1), fm.Ring(), fm.TrackedADGDA(), rounds=20,
        ...     personalization=fm.personalization.FineTuned(steps=20, local_steps=20),
        ... )
        >>> result = fm.run(experiment)
        >>> list(result.personal[0].sites[3].state_dicts)
        ['fine-tuned']
    """

    components: ClassVar[tuple[str, ...]] = (FINE_TUNED,)

    def weights(self, held_out: Predictions, rows: Tensor) -> dict[str, float]:
        return {FINE_TUNED: 1.0}


@dataclass(frozen=True)
class Mixture(OneByOne):
    """Mixes the common, the local and the fine-tuned model at each site, with weights that held-out rows support.

    The mixture's probabilities are p = sum_k w_k p_k, or its outputs the average if targets are numbers. The weights
    are the mean of their posterior distribution, given rows that none of the models was trained on. So a site whose
    rows clearly prefer one of the models gets that one. Where they do not, the weights stay in the middle, and the
    mixture is usually better than each of the models.

    Args:
        steps: Steps of the fine-tuned model at most, >= 1. Default: 200.
        step: Euclidean norm of the first of these steps, > 0; it falls to 0 linearly. Default: 0.3.
        local_steps: Steps of the local model at most, >= 1. Default: 300.
        local_step: Euclidean norm of the first of these steps, > 0; it falls to 0 cubically. Default: 0.7.
        folds: The number of folds that a site's rows are divided into, 2 to 10. Default: 5.
        share: The share of its training rows that a site reserves, in (0, 1): the common model is not trained on them.
            Default: 0.2.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(
        ...     fm.data.Digits(nodes=4, odd=1), fm.Ring(), fm.TrackedADGDA(), rounds=20,
        ...     personalization=fm.personalization.Mixture(steps=20, local_steps=20),
        ... )
        >>> weights = fm.run(experiment).personal[0].sites[3].weights
        >>> sorted(weights), round(sum(weights.values()), 6)
        (['common', 'fine-tuned', 'local'], 1.0)
    """

    components: ClassVar[tuple[str, ...]] = (COMMON, LOCAL, FINE_TUNED)

    def weights(self, held_out: Predictions, rows: Tensor) -> dict[str, float]:
        return held_out.mean_weights(self.components, rows)


register(Personalization, {"choice": Choice, "fine-tuned": FineTuned, "mixture": Mixture})
