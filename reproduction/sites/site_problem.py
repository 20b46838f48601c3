"""What a problem of the bench is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fairmesh.config.tables import to_table
from fairmesh.data.site import Site
from fairmesh.problems.models import Model

Half = Literal["development", "held-back", "twins", "bench"]
Kind = Literal[
    "covariate shift",
    "label shift",
    "concept shift",
    "instrument",
    "label noise",
    "small sites",
    "rare classes",
    "two populations",
    "all alike",
    "natural",
]


@dataclass(frozen=True)
class SiteProblem:
    """A problem of the bench: a model to train for sites that differ in one way.

    Args:
        name: Its name on the command line and in files.
        half: "development", or "held-back" until all choices are made; "twins" for those with numbers to predict. In
            the arena, "bench" for problems of the bench; halves are those of the natural sets.
        kind: The kind of difference.
        difference: The difference, in words.
        model: The model that is trained.
        rounds: Rounds of training.
        sites: The sites of a split, from the split's number.
        revision: Raise it when `sites` changes, so that recorded results are run again.
        halves: Which of two halves, drawn once by unit, a test row belongs to, by its identity in `Site.rows`; for sets
            whose splits divide the same rows. None where every split draws rows of its own.
        metric: What models are judged by, in shares of 1: "accuracy", or "r2" where numbers are predicted. In the
            arena "rmse" for numbers, in units of their spread over all training rows.
    """

    name: str
    half: Half
    kind: Kind
    difference: str
    model: Model
    rounds: int
    sites: Callable[[int], list[Site]]
    revision: int = 1
    metric: Literal["accuracy", "r2", "rmse"] = "accuracy"
    halves: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def splits(self) -> range:
        """The splits that the table shows. Splits 0 to 4 of the held-back half were seen when an earlier default was
        judged."""
        return range(5, 10) if self.half == "held-back" else range(5)

    @property
    def lower_is_better(self) -> bool:
        return self.metric == "rmse"

    @property
    def recorded_as(self) -> str:
        """The metric's name in result files."""
        return "rmse" if self.metric == "rmse" else "accuracy"

    def described(self) -> dict[str, Any]:
        """Returns what determines the numbers of a run, as a table."""
        return {"name": self.name, "model": to_table(self.model), "rounds": self.rounds, "revision": self.revision}
