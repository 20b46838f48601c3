"""One site: the data that a node holds."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Site:
    """What one node holds. `train`, `test` and `validation` are (inputs, targets) or a torch Dataset; sites that share
    a test set are given the same object."""

    train: Any
    test: Any = None
    validation: Any = None
    group: str | None = None  # class, contrast, instrument, hospital; its own name where not given
    name: str | None = None
