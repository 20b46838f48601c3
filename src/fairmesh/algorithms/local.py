"""Local: every node trains alone. The reference for what a site gains by joining."""

from dataclasses import dataclass, field
from typing import ClassVar

from fairmesh.algorithms.base import Round
from fairmesh.algorithms.optimizers import Optimizer
from fairmesh.algorithms.steps import Moved, ScaledSteps
from fairmesh.networks.base import Network
from fairmesh.problems.oracle import Oracle


@dataclass(frozen=True)
class Local(ScaledSteps):
    """Every node trains a model of its own on its own data, and sends nothing.

    The steps are those of `TrackedADGDA` without neighbours:

        g_i <- beta1 g_i + (1 - beta1) grad f_i(theta_i)
        v_i <- beta2 v_i + (1 - beta2) g_i^2
        theta_i <- theta_i - eta g_i / sqrt(dim v_i)

    These are plain: no penalty is chosen for a site. The reference model of a site alone, which `--with-references` and
    `fm.compare_with_references` train, has one that held-out rows support, and is the better yardstick.

    Train with `own_models=True` to measure each node's own model at its own site.

    Args:
        primal_step: eta, a number >= 0 or a schedule: the length of a step in the Euclidean norm, or the learning rate
            if `beta2 = 0`. Default: Polynomial(0.7, power=3.0), which falls to 0 at the end of the run.
        beta1: Memory of the momentum, in [0, 1), as in Adam; 0 for no momentum. Default: 0.9.
        beta2: Memory of the mean squares that steps are divided by, in [0, 1), as in Adam; 0 for unscaled steps.
            Default: 0.99.
        optimizer: What each node makes of its gradients, such as `fm.optimizers.AdamW()`; None for SGD. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> options = fm.Options(own_models=True)
        >>> experiment = fm.Experiment(fm.data.Digits(4), fm.Ring(), fm.algorithms.Local(), rounds=20, options=options)
        >>> record = fm.run(experiment).final[0]
        >>> len(record["own_models"]["accuracy"]["sites"]), record["bytes_total"]
        (4, 0)
    """

    optimizer: Optimizer | None = field(default=None, kw_only=True)

    sends: ClassVar[bool] = False

    def uses_losses(self) -> bool:
        return False

    def init(self, oracle: Oracle, network: Network) -> Moved:
        return self.at_rest(oracle.initial_models())

    def step(self, state: Moved, ctx: Round) -> Moved:
        _, gradients = ctx.losses_and_gradients(state.models)
        return self.moved(state, gradients, ctx)
