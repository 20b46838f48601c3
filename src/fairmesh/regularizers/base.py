"""What a regularizer is."""

import math
from abc import ABC, abstractmethod

from torch import Tensor

from fairmesh.errors import BadInput


class Regularizer(ABC):
    """alpha r(lambda). `duals` are rows (..., nodes, n) on the simplex, `prior` is (..., 1, n), `own` marks (nodes, n)
    each hosted node's own coordinate."""

    @abstractmethod
    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        """alpha r(lambda) of each row: (..., nodes, 1)."""

    @abstractmethod
    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        """alpha times the gradient of r that a node's ascent adds: (..., nodes, n)."""

    @abstractmethod
    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        """Euclidean projection of each row onto the ambiguity set, the weights that the adversary may choose."""

    @abstractmethod
    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        """lambda*, the exact argmax over the ambiguity set of (1/m) <lambda, losses> + alpha r(lambda): (..., 1, n)."""

    @abstractmethod
    def max_stable_dual_step(self, prior: Tensor) -> float:
        """The dual step size at which ascent stops being stable; infinite where there is no such bound."""


class Cappable(Regularizer, ABC):
    """A regularizer over the whole simplex whose inner maximum is also known where every weight has a cap."""

    @abstractmethod
    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        """The argmax over the weights lambda_i <= caps_i, caps a multiple of the prior: (..., 1, n)."""


class Priced(Cappable, ABC):
    """A regularizer under which lambda_i / p_i is a function of x_i = f_i / softness - price alone, one at x_i = 0."""

    @abstractmethod
    def softness(self) -> float | Tensor:
        """By how much losses must differ for weights to differ by their size, in the units of sum_i lambda_i f_i +
        alpha r(lambda)."""

    @abstractmethod
    def ratio(self, x: Tensor) -> Tensor:
        """lambda_i / p_i."""


def check_strength(strength: float, positive: bool = True) -> None:
    if not math.isfinite(strength) or strength < 0 or (positive and strength == 0):
        raise BadInput(f"strength, alpha, must be a finite number > 0, got {strength}; for none use NoRegularizer")
