"""TERM: tilted empirical risk minimization over the sites, with a server.

Li, Beirami, Sanjabi, Smith: Tilted Empirical Risk Minimization, ICLR 2021.
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from fairmesh.algorithms.base import EXACT, STRUCTURAL, Algorithm, Round
from fairmesh.algorithms.schedules import Polynomial, Schedule, as_schedule
from fairmesh.algorithms.server import (
    ServerState,
    check_server_settings,
    followed_weights,
    local_gradients,
    server_start,
    server_step,
)
from fairmesh.errors import BadInput
from fairmesh.networks.base import Network
from fairmesh.problems.oracle import Oracle


@dataclass(frozen=True)
class TERM(Algorithm):
    """TERM: tilts the average towards large losses, by an exponential.

    Minimises (1 / t) log sum_i p_i exp(t f_i(x)) with a server. A client's gradient has the weight

        lambda_i = p_i exp(t f_i) / sum_j p_j exp(t f_j)

    These are the worst weights under a KL regularizer of strength 1 / t. So it solves the same problem as DR-DSGD with
    `temperature = 1 / t`. The steps are those of `FedAvg`; with `tilt = 0` it is `FedAvg`.

    Args:
        primal_step: eta, a number >= 0 or a schedule by rounds: the length of a round's step in the Euclidean norm; if
            `beta2 = 0`, the learning rate of the local steps. Default: Polynomial(0.7, power=3.0), which falls to 0 at
            the end of the run.
        tilt: t >= 0, per unit of loss. 0 minimises the average; a large tilt comes near the worst case. Default: 1.0.
        local_steps: Local steps per round, >= 1. Default: 5.
        beta1: Memory of the server's momentum, in [0, 1), as in Adam; 0 for no momentum. Default: 0.9.
        beta2: Memory of the mean squares that steps are divided by, in [0, 1), as in Adam; 0 for unscaled steps.
            Default: 0.99.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.algorithms.TERM(tilt=2.0)
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), algorithm, rounds=20)
        >>> fm.run(experiment).weights().shape
        torch.Size([1, 4])

    References:
        Li, Beirami, Sanjabi, Smith: Tilted Empirical Risk Minimization, ICLR 2021.
    """

    primal_step: Schedule | float = field(default_factory=lambda: Polynomial(0.7, power=3.0))
    tilt: float = 1.0
    local_steps: int = field(default=5, metadata=STRUCTURAL)
    beta1: float = field(default=0.9, metadata=EXACT)
    beta2: float = field(default=0.99, metadata=STRUCTURAL)

    needs_server: ClassVar[bool] = True

    def __post_init__(self):
        object.__setattr__(self, "primal_step", as_schedule(self.primal_step))
        check_server_settings(self.local_steps, self.beta1, self.beta2)
        if not (math.isfinite(self.tilt) and self.tilt >= 0):
            raise BadInput(f"tilt must be a finite number >= 0, got {self.tilt}; 0 minimises the average loss")

    def oracle_calls(self) -> int:
        return self.local_steps

    def with_fixed_weights(self) -> "TERM | None":
        return None if self.tilt == 0 else replace(self, tilt=0.0)

    def init(self, oracle: Oracle, network: Network) -> ServerState:
        return server_start(oracle, self.beta2, weighed=True)

    def step(self, state: ServerState, ctx: Round) -> ServerState:
        everyone = torch.ones_like(ctx.hosted(ctx.prior), dtype=torch.bool)
        losses, gradients = local_gradients(state, ctx, everyone, self.primal_step, self.local_steps, self.beta2)
        tilted = self.tilt * ctx.report(losses, everyone) + ctx.prior.log()
        duals = followed_weights(state, ctx, tilted.softmax(dim=-1))
        direction = ctx.average(gradients, ctx.hosted(duals))
        return server_step(state, ctx, direction, self.primal_step, self.beta1, self.beta2, self.local_steps, duals)
