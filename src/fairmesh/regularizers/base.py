"""The base classes of regularizers."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from fairmesh.regularizers.simplex import project_onto_simplex


class Regularizer(ABC):
    """Base class of regularizers: alpha r(lambda), with r concave, and the set of weights that are allowed.

        g(theta, lambda) = (1/n) sum_i lambda_i f_i(theta) + alpha r(lambda)

    The larger the strength alpha, the nearer the weights lambda stay to the prior p. In all methods `duals` are rows
    (..., nodes, n) on the simplex, `prior` is p (..., 1, n), and `own` (nodes, n) is 1 at each hosted node's own
    coordinate.

    Attributes:
        fast_maximiser: Whether `maximiser` is fast enough to be called in every round. Default: True.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> prior = torch.tensor([[0.5, 0.5]])
        >>> fm.ChiSquare(0.5).maximiser(torch.tensor([[1.0, 2.0]]), prior)
        tensor([[0.3750, 0.6250]])
    """

    fast_maximiser: ClassVar[bool] = True

    def check(self, prior: Tensor) -> None:  # noqa: B027
        """Raises BadInput if the regularizer cannot work with this prior (n,). Default: any prior is accepted."""

    @abstractmethod
    def value(self, duals: Tensor, prior: Tensor) -> Tensor:
        """Returns alpha r(lambda) of each row: (..., nodes, 1)."""

    @abstractmethod
    def gradient(self, duals: Tensor, prior: Tensor, own: Tensor) -> Tensor:
        """Returns alpha times the gradient of r that a node adds to its ascent direction: (..., nodes, n)."""

    def project(self, rows: Tensor, prior: Tensor) -> Tensor:
        """Returns the Euclidean projection of each row onto the ambiguity set, the weights that are allowed. Default:
        the simplex."""
        return project_onto_simplex(rows)

    @abstractmethod
    def maximiser(self, losses: Tensor, prior: Tensor) -> Tensor:
        """Returns lambda*, the exact argmax of (1/n) <lambda, losses> + alpha r(lambda) over the ambiguity set.

        Args:
            losses: The losses of all nodes, (..., 1, n).
            prior: p (..., 1, n).

        Returns:
            The weights (..., 1, n).
        """

    def max_stable_dual_step(self, prior: Tensor) -> float:
        """Returns the dual step size above which gradient ascent oscillates. Default: infinite, for no such bound."""
        return math.inf


class Cappable(Regularizer, ABC):
    """Base class of regularizers over the whole simplex that `Capped` can restrict.

    Their inner maximum is also known when every weight has an upper bound.

    Example:
        >>> import fairmesh as fm
        >>> isinstance(fm.regularizers.NoRegularizer(), fm.regularizers.Cappable)
        True
    """

    @abstractmethod
    def capped_maximiser(self, losses: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
        """Returns the argmax as `maximiser` does, subject to lambda_i <= caps_i: (..., 1, n).

        Args:
            losses: The losses of all nodes, (..., 1, n).
            prior: p (..., 1, n).
            caps: The upper bounds, a multiple >= 1 of the prior.
        """


class Priced(Cappable, ABC):
    """Base class of regularizers that `fm.weighting.ShadowPrice` can use.

    At the inner maximum, lambda_i / p_i is a function of x_i = f_i / softness - price alone, where one price, common to
    all nodes, makes the weights sum to one. The ratio is 1 at x_i = 0.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.ChiSquare(0.05).ratio(torch.tensor([-2.0, 0.0, 0.5]))
        tensor([0.0000, 1.0000, 1.5000])
    """

    @abstractmethod
    def softness(self) -> float | Tensor:
        """Returns the difference in loss that changes lambda_i / p_i by about one.

        In the units of sum_i lambda_i f_i + alpha r(lambda), n times the objective above.
        """

    @abstractmethod
    def ratio(self, x: Tensor) -> Tensor:
        """Returns lambda_i / p_i for x_i = f_i / softness - price."""
