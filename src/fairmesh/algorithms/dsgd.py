"""DSGD: decentralized SGD, uncompressed.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu: Can Decentralized Algorithms Outperform Centralized Algorithms?, NIPS 2017.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from fairmesh.algorithms.base import Algorithm, AtStart, Round, Sent, plain, prior_weights, with_steps
from fairmesh.algorithms.optimizers import Optimizer
from fairmesh.algorithms.schedules import Measured, Schedule
from fairmesh.networks.base import Network
from fairmesh.networks.roles import Models
from fairmesh.problems.oracle import Oracle


class DSGDState(NamedTuple):
    models: Models  # (..., nodes, dim)


@dataclass(frozen=True)
class DSGD(Algorithm):
    """DSGD: decentralized SGD, uncompressed; not robust.

    Minimises sum_i p_i f_i(x):

        x_i <- sum_j w_ij x_j - eta n p_i grad f_i(x_i)

    n p_i is 1 for sites of equal size.

    Args:
        primal_step: eta, a number >= 0 or a schedule: the learning rate. Default: Measured(), which
            the run chooses before round 0 and which falls to 0 at its end.
        optimizer: What each node makes of its gradients, such as `fm.optimizers.AdamW()`; None for SGD. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.algorithms.DSGD(primal_step=fm.schedules.Linear(0.5))
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), algorithm, rounds=5)
        >>> fm.run(experiment).rounds
        5

    References:
        Lian, Zhang, Zhang, Hsieh, Zhang, Liu: Can Decentralized Algorithms Outperform Centralized Algorithms?, NIPS
        2017.
    """

    primal_step: Schedule | float = field(default_factory=Measured)
    optimizer: Optimizer | None = field(default=None, kw_only=True)

    def measured(self, start: AtStart) -> Algorithm:
        return with_steps(self, start, start.shares * start.curvatures)

    def message(self) -> tuple[Sent, ...]:
        return (Sent("model"),)

    def uses_losses(self) -> bool:
        return False

    def init(self, oracle: Oracle, network: Network) -> DSGDState:
        return DSGDState(oracle.initial_models())

    def step(self, state: DSGDState, ctx: Round) -> DSGDState:
        delivery = ctx.exchange(model=plain(state.models))
        _, gradients = ctx.losses_and_gradients(state.models)
        step = ctx.step_size(self.primal_step) * prior_weights(ctx)
        return DSGDState(delivery.mix("model").addcmul_(gradients, step, value=-1))
