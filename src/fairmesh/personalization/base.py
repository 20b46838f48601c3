"""What a way to give sites models of their own must define."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from fairmesh.config.ranges import Count, Positive, Share, Within
from fairmesh.personalization.evidence import Predictions

COMMON, LOCAL, FINE_TUNED = "common", "local", "fine-tuned"


@dataclass(frozen=True)
class Personalization(ABC):
    """Base class of ways to give each site a model of its own, from the common model and the site's own rows.

    The settings of all ways: `share` of its training rows that a site reserves, `folds` that its rows are divided
    into, and the `steps` and the first `step` of the fine-tuned and of the local models (`local_steps`, `local_step`).
    `weights` says how a site's model is mixed from the models named in `components`: the common one, the local one,
    trained from scratch on the site's rows, and the fine-tuned one, trained on from the common one.

    Example:
        >>> from dataclasses import dataclass
        >>> import fairmesh as fm
        >>> @dataclass(frozen=True)
        ... class Halves(fm.personalization.Personalization):
        ...     components = ("common", "local")
        ...
        ...     def weights(self, held_out, rows):
        ...         return {"common": 0.5, "local": 0.5}
        >>> Halves().folds
        5
    """

    steps: Count = 200
    step: Positive = 0.3
    local_steps: Count = 300
    local_step: Positive = 0.7
    folds: Annotated[int, Within("[2, 10]", "a site needs 10 rows, one per fold at least")] = 5
    share: Share = 0.2

    components: ClassVar[tuple[str, ...]]

    @abstractmethod
    def weights(self, held_out: Predictions, rows: Tensor) -> dict[str, float]:
        """Returns the weight of each of the `components`; they sum to one.

        Args:
            held_out: What the models predict for the site's rows, each by models that were trained without it.
            rows: Which of these rows to use, as a mask.
        """
