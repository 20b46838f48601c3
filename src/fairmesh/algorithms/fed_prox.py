"""FedProx: federated averaging whose clients stay near the server's model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from dataclasses import dataclass, field
from typing import Annotated

from fairmesh.algorithms.fed_avg import FedAvg
from fairmesh.config.ranges import Within

_Pull = Annotated[float, Within("[0, inf)", "0 is fedavg")]


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedProx: federated averaging in which a proximal term keeps clients near the server's model; not robust.

    Minimises sum_i p_i f_i(x), as `FedAvg` does. The local steps of a client are those for

        f_i(x_i) + mu / 2 ||x_i - x||^2

    where x is the server's model. The gradient of f_i is followed by the exact minimum over the proximal term, so steps
    are stable for every mu. With `proximal = 0` it is `FedAvg`, also where steps are scaled.

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
        proximal: mu >= 0, how strongly a client is held at the server's model. Default: 0.1.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.algorithms.FedProx(proximal=1.0)
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), algorithm, rounds=20)
        >>> fm.run(experiment).worst > 0.5
        True

    References:
        Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020.
    """

    proximal: _Pull = field(default=0.1, kw_only=True)

    def pull(self) -> float:
        return self.proximal
