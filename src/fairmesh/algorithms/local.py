"""Local: every node trains alone. The reference for what a site gains by joining."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import EXACT, STRUCTURAL, Algorithm, Round, check_beta, fresh_share
from fairmesh.algorithms.schedules import Polynomial, Schedule, as_schedule
from fairmesh.algorithms.steps import scaled_step
from fairmesh.networks.base import Network
from fairmesh.networks.roles import Models
from fairmesh.problems.oracle import Oracle


class LocalState(NamedTuple):
    models: Models  # (..., nodes, dim)
    momenta: Tensor  # (..., nodes, dim)
    squares: Tensor | None  # mean squares of the momenta (..., nodes, dim)


@dataclass(frozen=True)
class Local(Algorithm):
    """Every node trains a model of its own on its own data, and sends nothing.

    The steps are those of `TrackedADGDA` without neighbours:

        g_i <- beta1 g_i + (1 - beta1) grad f_i(theta_i)
        v_i <- beta2 v_i + (1 - beta2) g_i^2
        theta_i <- theta_i - eta g_i / sqrt(dim v_i)

    Train with `own_models=True` to measure each node's own model at its own site.

    Args:
        primal_step: eta, a number >= 0 or a schedule: the length of a step in the Euclidean norm, or the learning rate
            if `beta2 = 0`. Default: Polynomial(0.7, power=3.0), which falls to 0 at the end of the run.
        beta1: Memory of the momentum, in [0, 1), as in Adam; 0 for no momentum. Default: 0.9.
        beta2: Memory of the mean squares that steps are divided by, in [0, 1), as in Adam; 0 for unscaled steps.
            Default: 0.99.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(
        ...     fm.data.Digits(nodes=4), fm.Ring(), fm.Local(), rounds=20, options=fm.Options(own_models=True)
        ... )
        >>> record = fm.run(experiment).final[0]
        >>> len(record["own_models"]["accuracy"]["sites"]), record["bytes_total"]
        (4, 0)
    """

    primal_step: Schedule | float = field(default_factory=lambda: Polynomial(0.7, power=3.0))
    beta1: float = field(default=0.9, metadata=EXACT)
    beta2: float = field(default=0.99, metadata=STRUCTURAL)

    sends: ClassVar[bool] = False
    copies_at_peak: ClassVar[int] = 12

    def __post_init__(self):
        object.__setattr__(self, "primal_step", as_schedule(self.primal_step))
        check_beta("beta1", self.beta1)
        check_beta("beta2", self.beta2)

    def init(self, oracle: Oracle, network: Network) -> LocalState:
        models = oracle.initial_models()
        squares = torch.zeros_like(models) if self.beta2 else None
        return LocalState(models, torch.zeros_like(models), squares)

    def step(self, state: LocalState, ctx: Round) -> LocalState:
        _, gradients = ctx.losses_and_gradients(state.models)
        momenta = torch.lerp(state.momenta, gradients, fresh_share(self.beta1, gradients.dtype))
        squares, step = scaled_step(momenta, state.squares, self.beta2, ctx.step_size(self.primal_step), ctx)
        return LocalState(state.models.addcmul(momenta, step, value=-1), momenta, squares)
