"""DR-DSGD: distributionally robust decentralized SGD with a KL regularizer and its exact inner maximum.

Ben Issaid, Elgabli, Bennis: DR-DSGD: A Distributionally Robust Decentralized Learning Algorithm over Graphs, TMLR 2022.
"""

from dataclasses import dataclass, field

from fairmesh.algorithms.base import Round, plain, prior_weights
from fairmesh.algorithms.dsgd import DSGD, DSGDState
from fairmesh.algorithms.schedules import Linear, Schedule
from fairmesh.config.ranges import Positive


@dataclass(frozen=True)
class DRDSGD(DSGD):
    """DR-DSGD: distributionally robust decentralized SGD with a KL regularizer; uncompressed.

    The inner maximum over the weights is solved exactly, which scales each gradient by an exponential of the loss:

        x_i <- sum_j w_ij (x_j - eta n p_j exp(f_j(x_j) / mu) / mu * grad f_j(x_j))

    Args:
        primal_step: eta, a number >= 0 or a schedule: the learning rate of the scaled gradient. Default:
            Linear(3.0).
        temperature: mu > 0, in units of the loss. The smaller it is, the more weight large losses get. It is n times
            the strength alpha of AD-GDA's objective. Default: 6.0.
        optimizer: What each node makes of its gradients, such as `fm.optimizers.AdamW()`; None for SGD. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.algorithms.DRDSGD(temperature=3.0)
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), algorithm, rounds=5)
        >>> fm.run(experiment).rounds
        5

    References:
        Ben Issaid, Elgabli, Bennis: DR-DSGD: A Distributionally Robust Decentralized Learning Algorithm over Graphs,
        TMLR 2022.
    """

    primal_step: Schedule | float = field(default_factory=lambda: Linear(3.0))
    temperature: Positive = 6.0

    def step(self, state: DSGDState, ctx: Round) -> DSGDState:
        losses, gradients = ctx.losses_and_gradients(state.models)
        emphasis = prior_weights(ctx) * (losses / self.temperature).exp() / self.temperature
        models = state.models.addcmul(gradients, ctx.step_size(self.primal_step) * emphasis, value=-1)
        return DSGDState(ctx.exchange(model=plain(models)).mix("model"))
