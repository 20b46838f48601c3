"""CHOCO-SGD: decentralized SGD with compressed gossip, the paper's non-robust baseline.

Koloskova, Stich, Jaggi: Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication,
ICML 2019.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from fairmesh.algorithms.base import Algorithm, AtStart, Round, Sent, prior_weights, with_steps
from fairmesh.algorithms.gossip import (
    PublicCopies,
    compressed_difference,
    gossip_step,
    steady_consensus_steps,
    updated_copies,
    zero_copies,
)
from fairmesh.algorithms.optimizers import Optimizer
from fairmesh.algorithms.schedules import Measured, Schedule
from fairmesh.algorithms.settings import STRUCTURAL
from fairmesh.algorithms.steps import descended
from fairmesh.compression.compressors import Compressor, Identity
from fairmesh.config.ranges import Count, UpToOne
from fairmesh.networks.base import Network
from fairmesh.networks.roles import ConsensusSteps, Models
from fairmesh.problems.oracle import Oracle


class ChocoState(NamedTuple):
    models: Models  # (..., nodes, dim)
    copies: PublicCopies
    consensus_steps: ConsensusSteps | None = None  # gamma, if it is chosen by itself (..., nodes, 1)


@dataclass(frozen=True)
class ChocoSGD(Algorithm):
    """CHOCO-SGD: decentralized SGD with compressed gossip; not robust.

    Minimises sum_i p_i f_i(theta):

        theta_i <- theta_i - eta n p_i grad f_i(theta_i) + gamma (sum_j w_ij x_hat_j - x_hat_i)
        x_hat_i <- x_hat_i + Q(theta_i - x_hat_i)                                   sent to the neighbours

    where the x_hat are public copies of the models. n p_i is 1 for sites of equal size. AD-GDA with dual step 0 is
    CHOCO-SGD with a primal step n times larger.

    Args:
        primal_step: eta, a number >= 0 or a schedule: the learning rate. Default: Measured(), which
            the run chooses before round 0 and which falls to 0 at its end.
        consensus_step: gamma in (0, 1], the share of its disagreement with the neighbours that a node removes per
            round; None to choose it from the compressor and the graph, 1 without compression. Default: None.
        compressor: Q, what a node sends of its model. Default: Identity(), no compression.
        local_steps: Steps between two exchanges, >= 1, each of length eta and on a batch of its own. Nothing corrects
            for how far the nodes' models drift apart meanwhile; `TrackedADGDA` does. Default: 1.
        optimizer: What each node makes of its gradients, such as `fm.optimizers.AdamW()`; None for SGD. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.ChocoSGD(primal_step=0.5, consensus_step=0.3, compressor=fm.compressors.TopK(0.1))
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), algorithm, rounds=5)
        >>> fm.run(experiment).weights() is None
        True

    References:
        Koloskova, Stich, Jaggi: Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
        Communication, ICML 2019.
    """

    primal_step: Schedule | float = field(default_factory=Measured)
    consensus_step: UpToOne | None = None
    compressor: Compressor = field(default_factory=Identity)
    local_steps: Count = field(default=1, metadata=STRUCTURAL, kw_only=True)
    optimizer: Optimizer | None = field(default=None, kw_only=True)

    def measured(self, start: AtStart) -> Algorithm:
        return with_steps(self, start, start.shares * start.curvatures)

    def message(self) -> tuple[Sent, ...]:
        return (Sent("model", compressor=self.compressor, followed=True),)

    def uses_losses(self) -> bool:
        return False

    def init(self, oracle: Oracle, network: Network) -> ChocoState:
        models = oracle.initial_models()
        steps = steady_consensus_steps(self.compressor, models, network) if self.consensus_step is None else None
        return ChocoState(models, zero_copies(models, network), steps)

    def step(self, state: ChocoState, ctx: Round) -> ChocoState:
        _, gradients = ctx.losses_and_gradients(state.models)
        step = ctx.step_size(self.primal_step) * prior_weights(ctx)
        models = descended(state.models, gradients, step, self.local_steps, ctx)
        del gradients
        gamma = state.consensus_steps if self.consensus_step is None else self.consensus_step
        models = gossip_step(models, state.copies, gamma, ctx)
        message = compressed_difference(models, state.copies, self.compressor, ctx)
        delivery = ctx.exchange(model=message)
        copies = updated_copies(state.copies, message, delivery, "model")
        return ChocoState(models, copies, state.consensus_steps)
