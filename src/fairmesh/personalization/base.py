"""What a way to give sites models of their own must define."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fairmesh.errors import BadInput
from fairmesh.personalization.evidence import HeldOutPredictions

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

    steps: int = 200
    step: float = 0.3
    local_steps: int = 300
    local_step: float = 0.7
    folds: int = 5
    share: float = 0.2

    components: ClassVar[tuple[str, ...]]

    def __post_init__(self):
        for name in ("steps", "local_steps"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("step", "local_step"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadInput(f"{name} must be a finite number > 0, got {getattr(self, name)}")
        if not 2 <= self.folds <= 10:
            raise BadInput(f"folds must lie in 2..10, got {self.folds}; a site needs 10 rows, one per fold at least")
        if not 0 < self.share < 1:
            raise BadInput(f"share must lie in (0, 1), got {self.share}")

    @abstractmethod
    def weights(self, held_out: HeldOutPredictions, rows: Tensor) -> dict[str, float]:
        """Returns the weight of each of the `components`; they sum to one.

        Args:
            held_out: What the models predict for the site's rows, each by models that were trained without it.
            rows: Which of these rows to use, as a mask.
        """
