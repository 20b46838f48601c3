"""DR-DSGD: distributionally robust decentralized SGD with a KL regularizer and its exact inner maximum.

Ben Issaid, Elgabli, Bennis: DR-DSGD: A Distributionally Robust Decentralized Learning Algorithm over Graphs, TMLR 2022.
"""

from dataclasses import dataclass, field, replace

from fairmesh.algorithms.base import AtStart, Round, plain, prior_weights, with_steps
from fairmesh.algorithms.dsgd import DSGD, DSGDState
from fairmesh.algorithms.schedules import Measured, Schedule, two_digits
from fairmesh.algorithms.settings import MEASURED
from fairmesh.config.ranges import Positive

_TEMPERATURE = 2.6  # times the mean loss of the initial model
_LEAST_LOSS = 1e-6  # of an initial model, so that a temperature is positive


@dataclass(frozen=True)
class DRDSGD(DSGD):
    """DR-DSGD: distributionally robust decentralized SGD with a KL regularizer; uncompressed.

    The inner maximum over the weights is solved exactly, which scales each gradient by an exponential of the loss:

        x_i <- sum_j w_ij (x_j - eta n p_j exp(f_j(x_j) / mu) / mu * grad f_j(x_j))

    Args:
        primal_step: eta, a number >= 0 or a schedule: the learning rate of the scaled gradient. Default:
            Measured(factor=2.0), which the run chooses before round 0 and which falls to 0 at its end.
        temperature: mu > 0, in units of the loss. The smaller it is, the more weight large losses get. It is n times
            the strength alpha of AD-GDA's objective. None for 2.6 times the mean loss of the initial model, which is 6
            for ten classes. Default: None.
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

    primal_step: Schedule | float = field(default_factory=lambda: Measured(factor=2.0))
    temperature: Positive | None = field(default=None, metadata=MEASURED)

    def measured(self, start: AtStart) -> "DRDSGD":
        chosen, temperature = self, self.temperature
        if temperature is None:
            temperature = two_digits(_TEMPERATURE * max(start.mean_loss, _LEAST_LOSS))
            chosen = replace(self, temperature=temperature)
        emphasis = (start.losses / temperature).exp() / temperature
        curvatures = start.curvatures + start.slopes.square() / temperature  # the emphasis falls with the loss
        return with_steps(chosen, start, start.shares * emphasis * curvatures)

    def step(self, state: DSGDState, ctx: Round) -> DSGDState:
        losses, gradients = ctx.losses_and_gradients(state.models)
        temperature = _TEMPERATURE if self.temperature is None else self.temperature
        emphasis = prior_weights(ctx) * (losses / temperature).exp() / temperature
        models = state.models.addcmul(gradients, ctx.step_size(self.primal_step) * emphasis, value=-1)
        return DSGDState(ctx.exchange(model=plain(models)).mix("model"))
