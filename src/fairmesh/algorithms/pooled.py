"""Pooled: all data in one place. The bound that sites which keep their data cannot have."""

from dataclasses import dataclass
from typing import ClassVar

from fairmesh.algorithms.base import Round
from fairmesh.algorithms.server import ServerState, ServerSteps


@dataclass(frozen=True)
class Pooled(ServerSteps):
    """One model on the data of all sites in one place; sends nothing, since the data is already there.

    Minimises sum_i p_i f_i(x), by default the mean loss over all rows of all sites. A round draws a batch from each
    site, as the other algorithms do:

        g <- beta1 g + (1 - beta1) sum_i p_i grad f_i(x)
        v <- beta2 v + (1 - beta2) g^2
        x <- x - eta g / sqrt(dim v)

    It is a reference for what sites lose by keeping their data. Between organisations it is refused.

    Args:
        primal_step: eta, a number >= 0 or a schedule: the length of a step in the Euclidean norm, or the learning rate
            if `beta2 = 0`. Default: Polynomial(0.7, power=3.0), which falls to 0 at the end of the run.
        beta1: Memory of the momentum, in [0, 1), as in Adam; 0 for no momentum. Default: 0.9.
        beta2: Memory of the mean squares that steps are divided by, in [0, 1), as in Adam; 0 for unscaled steps.
            Default: 0.99.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.algorithms.Pooled(), rounds=20)
        >>> result = fm.run(experiment)
        >>> result.worst > 0.5, result.final[0]["bytes_total"]
        (True, 0)
    """

    sends: ClassVar[bool] = False

    def uses_losses(self) -> bool:
        return False

    def step(self, state: ServerState, ctx: Round) -> ServerState:
        _, gradients = ctx.losses_and_gradients(state.models.expand(-1, len(ctx.own), -1))
        return self.server_step(state, ctx, ctx.pooled(gradients, ctx.hosted(ctx.prior)))
