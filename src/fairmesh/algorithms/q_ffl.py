"""q-FFL: federated learning with fairer accuracies, by q-FedAvg.

Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, ICLR 2020.
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from fairmesh.algorithms.base import Round
from fairmesh.algorithms.server import LocalSteps, ServerState, followed_weights
from fairmesh.errors import BadInput

_LEAST = 1e-10  # of a loss, so that its powers are finite


@dataclass(frozen=True)
class QFFL(LocalSteps):
    """q-FFL: a softer fairness than the worst case. Large losses count more, by their power q.

    Minimises sum_i p_i f_i(x)^(q + 1) / (q + 1) with a server. A client's gradient has the weight

        lambda_i = p_i f_i^q / sum_j p_j f_j^q

    With `beta1 = beta2 = 0` this is q-FedAvg. Its step is shortened by q-FedAvg's estimate of how much the power q
    raises the curvature:

        x <- x - eta K sum_i lambda_i g_i / (1 + eta K^2 q sum_i lambda_i ||g_i||^2 / f_i)

    where g_i is the mean gradient along K local steps. By default the steps are scaled as in `FedAvg`, which needs no
    such estimate. With `q = 0` it is `FedAvg`.

    Args:
        primal_step: eta, a number >= 0 or a schedule by rounds: the length of a round's step in the Euclidean norm; if
            `beta2 = 0`, the learning rate of the local steps. Default: Polynomial(0.7, power=3.0), which falls to 0 at
            the end of the run.
        beta1: Memory of the server's momentum, in [0, 1), as in Adam; 0 for no momentum. Default: 0.9.
        beta2: Memory of the mean squares that steps are divided by, in [0, 1), as in Adam; 0 for unscaled steps.
            Default: 0.99.
        local_steps: K, local steps per round, >= 1. Default: 5.
        optimizer: What each client makes of the gradients of its local steps, such as `fm.optimizers.AdamW()`; None for
            SGD. Default: None.
        q: The power, >= 0. 0 minimises the average; a large q comes near the worst case. Default: 1.0.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.algorithms.QFFL(q=2.0)
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), algorithm, rounds=20)
        >>> fm.run(experiment).weights().shape
        torch.Size([1, 4])

    References:
        Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, ICLR 2020.
    """

    q: float = field(default=1.0, kw_only=True)

    weighs: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if not (math.isfinite(self.q) and self.q >= 0):
            raise BadInput(f"q must be a finite number >= 0, got {self.q}; 0 minimises the average loss")

    def with_fixed_weights(self) -> "QFFL | None":
        return None if self.q == 0 else replace(self, q=0.0)

    def step(self, state: ServerState, ctx: Round) -> ServerState:
        everyone = torch.ones_like(ctx.hosted(ctx.prior), dtype=torch.bool)
        losses, gradients = self.local_gradients(state, ctx, everyone)
        reported = ctx.report(losses, everyone).clamp(min=_LEAST)
        duals = followed_weights(state, ctx, (self.q * reported.log() + ctx.prior.log()).softmax(dim=-1))
        direction = ctx.average(gradients, ctx.hosted(duals))
        if state.squares is None:
            norms = ctx.report(gradients.square().sum(dim=-1, keepdim=True), everyone)
            curvature = (duals * norms / reported).sum(dim=-1, keepdim=True)
            eta = ctx.step_size(self.primal_step)
            direction = direction / (1.0 + eta * self.local_steps**2 * self.q * curvature)
        return self.server_step(state, ctx, direction, self.local_steps, duals)
