"""TERM: tilted empirical risk minimization over the sites, with a server.

Li, Beirami, Sanjabi, Smith: Tilted Empirical Risk Minimization, ICLR 2021.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fairmesh.algorithms.server import LocalSteps
from fairmesh.algorithms.settings import Emphasis


@dataclass(frozen=True)
class TERM(LocalSteps):
    """TERM: tilts the average towards large losses, by an exponential.

    Minimises (1 / t) log sum_i p_i exp(t f_i(x)) with a server. A client's gradient has the weight

        lambda_i = p_i exp(t f_i) / sum_j p_j exp(t f_j)

    These are the worst weights under a KL regularizer of strength 1 / t. So it solves the same problem as DR-DSGD with
    `temperature = 1 / t`. The steps are those of `FedAvg`; with `tilt = 0` it is `FedAvg`.

    Args:
        primal_step: eta, a number >= 0 or a schedule by rounds: the length of a round's step in the Euclidean norm; if
            `beta2 = 0`, the learning rate of the local steps. Default: Limited(0.7, power=3.0), which falls to 0 at
            the end of the run, and whose limit on local steps the run measures before round 0.
        beta1: Memory of the server's momentum, in [0, 1), as in Adam; 0 for no momentum. Default: 0.9.
        beta2: Memory of the mean squares that steps are divided by, in [0, 1), as in Adam; 0 for unscaled steps.
            Default: 0.99.
        local_steps: Local steps per round, >= 1. Default: 5.
        optimizer: What each client makes of the gradients of its local steps, such as `fm.optimizers.AdamW()`; None for
            SGD. Default: None.
        tilt: t >= 0, per unit of loss. 0 minimises the average; a large tilt comes near the worst case. Default: 1.0.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.algorithms.TERM(tilt=2.0)
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), algorithm, rounds=20)
        >>> fm.run(experiment).weights().shape
        torch.Size([1, 4])

    References:
        Li, Beirami, Sanjabi, Smith: Tilted Empirical Risk Minimization, ICLR 2021.
    """

    tilt: Emphasis = field(default=1.0, kw_only=True)

    emphasis: ClassVar[str] = "tilt"

    def emphasized(self, losses: Tensor) -> Tensor:
        return self.tilt * losses
