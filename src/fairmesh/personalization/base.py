"""What a way to give sites models of their own must define."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.config.ranges import Count, Positive, Share, Within
from fairmesh.personalization.candidates import LOCAL
from fairmesh.personalization.evidence import Predictions
from fairmesh.personalization.pooled_prior import CommonLosses, Sums


class TriedSite(NamedTuple):
    """A site with the models that it tried, and what these predict for its rows."""

    number: int
    models: dict[str, Tensor]  # each as a row (dim,)
    calibrations: dict[str, tuple[float, Tensor]]  # what the outputs of some of them are multiplied with, and plus
    held_out: Predictions  # each row by models that were trained without it
    fitted: Predictions  # each row by the model that the site would use
    fold: Tensor  # of every row
    unseen: Tensor  # the rows that the common model was not trained on
    independent: float  # units per row
    steps: dict[str, float]  # that models took, if held-out rows decide on it

    @property
    def judged(self) -> Tensor:
        """The rows that judge: the unseen ones, or all if there are none."""
        return self.unseen if bool(self.unseen.any()) else torch.ones_like(self.unseen)


Weigh = Callable[[TriedSite, Tensor], dict[str, float]]
"""Returns the weights of a site's models that some of its rows support, given as a mask."""


@dataclass(frozen=True)
class Personalization(ABC):
    """Base class of ways to give each site a model of its own, from the common model and the sites' own rows.

    The settings of all ways: `share` of its training rows that a site reserves, `folds` that its rows are divided
    into, and the `steps` and the first `step` of models that are trained on from the common one, and of those from
    scratch (`local_steps`, `local_step`). `OneByOne` is the base class of ways in which every site decides alone.

    Example:
        >>> import fairmesh as fm
        >>> [way.components[0] for way in (fm.personalization.Choice(), fm.personalization.Mixture())]
        ['common', 'common']
    """

    steps: Count = 200
    step: Positive = 0.3
    local_steps: Count = 300
    local_step: Positive = 0.7
    folds: Annotated[int, Within("[2, 10]", "a site needs 10 rows, one per fold at least")] = 5
    share: Share = 0.2

    components: ClassVar[tuple[str, ...]]  # the models that are mixed
    fewest_rows: ClassVar[int] = 10  # a site with fewer keeps the common model
    fewest_units: ClassVar[int] = 4
    sums: ClassVar[int] = 0  # how many sums over all sites it needs; with 0 sites send nothing
    sends: ClassVar[str] = ""  # what these sums tell about a site, in words

    @abstractmethod
    def learned(self, sites: Sequence[TriedSite], common: CommonLosses, sums: Sums) -> Weigh:
        """Returns how the rows of a site become the weights of its models.

        Args:
            sites: The sites that are here.
            common: The losses of the common model, summed over all sites if the way needs `sums`: the first of them.
            sums: Adds up numbers over all sites; every process calls it for all other of the way's `sums`.
        """


@dataclass(frozen=True)
class OneByOne(Personalization):
    """Base class of ways in which every site decides by its own rows, and sends nothing.

    `weights` says how a site's model is mixed from the models named in `components`: the common one, the local one,
    trained from scratch on the site's rows, and the fine-tuned one, trained on from the common one.

    Example:
        >>> from dataclasses import dataclass
        >>> import fairmesh as fm
        >>> @dataclass(frozen=True)
        ... class Halves(fm.personalization.OneByOne):
        ...     components = ("common", "local")
        ...
        ...     def weights(self, held_out, rows):
        ...         return {"common": 0.5, "local": 0.5}
        >>> Halves().folds
        5
    """

    @abstractmethod
    def weights(self, held_out: Predictions, rows: Tensor) -> dict[str, float]:
        """Returns the weight of each of the `components`; they sum to one.

        Args:
            held_out: What the models predict for the site's rows, each by models that were trained without it.
            rows: Which of these rows to use, as a mask.
        """

    def learned(self, sites: Sequence[TriedSite], common: CommonLosses, sums: Sums) -> Weigh:
        """Returns the weights by the rows that judge a site."""

        def weigh(site: TriedSite, rows: Tensor) -> dict[str, float]:
            found = self.weights(site.held_out, rows & site.judged)
            if bool(rows.all()) and bool(site.unseen.any()) and LOCAL in found:
                # The common model has seen the other rows, so they speak too well of it. If they favour the local model
                # all the same, and more than the few unseen rows do, they are right to.
                return max(found, self.weights(site.held_out, rows), key=lambda w: w[LOCAL])
            return found

        return weigh
