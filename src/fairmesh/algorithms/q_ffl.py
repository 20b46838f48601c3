"""q-FFL: federated learning with fairer accuracies, by q-FedAvg.

Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, ICLR 2020.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fairmesh.algorithms.base import Round
from fairmesh.algorithms.server import LocalSteps
from fairmesh.algorithms.settings import Emphasis

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
            `beta2 = 0`, the learning rate of the local steps. Default: Limited(0.7, power=3.0), which falls to 0 at
            the end of the run, and whose limit on local steps the run measures before round 0.
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

    q: Emphasis = field(default=1.0, kw_only=True)

    emphasis: ClassVar[str] = "q"

    def emphasized(self, losses: Tensor) -> Tensor:
        return self.q * losses.clamp(min=_LEAST).log()

    def shortened(self, direction: Tensor, gradients: Tensor, losses: Tensor, weights: Tensor, ctx: Round) -> Tensor:
        if self.beta2:
            return direction
        norms = ctx.report(gradients.square().sum(dim=-1, keepdim=True), ctx.hosted(ctx.prior) > 0)
        curvature = (weights * norms / losses.clamp(min=_LEAST)).sum(dim=-1, keepdim=True)
        eta = ctx.step_size(self.primal_step)
        return direction / (1.0 + eta * self.local_steps**2 * self.q * curvature)
