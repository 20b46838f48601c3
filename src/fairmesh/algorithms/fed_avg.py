"""FedAvg: federated averaging, with a server.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017.
"""

from dataclasses import dataclass, field

from torch import Tensor

from fairmesh.algorithms.base import Round
from fairmesh.algorithms.server import LocalSteps, by_position, drawn_uniformly, number_of
from fairmesh.algorithms.settings import STRUCTURAL
from fairmesh.config.ranges import UpToOne


@dataclass(frozen=True)
class FedAvg(LocalSteps):
    """FedAvg: clients take local steps from the server's model, and the server averages them; not robust.

    Minimises sum_i p_i f_i(x). In a round every client that takes part does

        x_i <- x,   then `local_steps` times, each on a batch of its own:   x_i <- x_i - eta grad f_i(x_i)

    and the server sets x to the average of the x_i, weighted by p_i. This is `beta1 = beta2 = 0`.

    By default the steps are scaled as in Adam, so that they need no tuning. Clients send their mean gradient along the
    local steps. The server averages it, takes the momentum (`beta1`) and divides each coordinate by the root of its
    mean squares (`beta2`). Local steps use the same division, which the server sends with the model.

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
        participation: The share of the clients that take part in a round, in (0, 1], drawn uniformly; at least one
            does. Default: 1.0.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.algorithms.FedAvg(local_steps=2)
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), algorithm, rounds=20)
        >>> fm.run(experiment).worst > 0.5
        True

    References:
        McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from
        Decentralized Data, AISTATS 2017. Scaled steps: Reddi et al.: Adaptive Federated Optimization, ICLR 2021;
        Karimireddy et al.: Breaking the Centralized Barrier for Cross-Device Federated Learning, NeurIPS 2021.
    """

    participation: UpToOne = field(default=1.0, metadata=STRUCTURAL, kw_only=True)

    def taking_part(self, ctx: Round) -> Tensor:
        if self.participation == 1.0:
            return ctx.prior
        uniforms = ctx.server_draws("clients").uniforms(ctx.n)
        chosen = drawn_uniformly(uniforms, number_of(self.participation, ctx.n))
        weights = ctx.prior * by_position(chosen, ctx.by_identity)
        return weights / weights.sum(dim=-1, keepdim=True)
