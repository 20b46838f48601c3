"""CHOCO-SGD: decentralized SGD with compressed gossip, the paper's non-robust baseline.

Koloskova, Stich, Jaggi: Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication,
ICML 2019.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from fairmesh.algorithms.base import Algorithm, GossipSettings, Round, check_consensus_step, prior_weights
from fairmesh.algorithms.gossip import (
    PublicCopies,
    compressed_difference,
    gossip_step,
    updated_copies,
    zero_copies,
)
from fairmesh.algorithms.schedules import Geometric, Schedule, as_schedule
from fairmesh.compression.compressors import Compressor, Identity
from fairmesh.networks.base import Network
from fairmesh.networks.roles import Models
from fairmesh.problems.oracle import Oracle


class ChocoState(NamedTuple):
    models: Models  # (..., nodes, dim)
    copies: PublicCopies


@dataclass(frozen=True)
class ChocoSGD(Algorithm):
    """Minimises sum_i p_i f_i: node i's gradient is weighted by m p_i, which is 1 for nodes of equal size. AD-GDA with
    dual step 0 is this at a primal step m times larger."""

    primal_step: Schedule | float = field(default_factory=lambda: Geometric(0.1, 0.998))  # eta
    consensus_step: float = 1.0  # gamma, the consensus step size
    compressor: Compressor = field(default_factory=Identity)  # Q

    def __post_init__(self):
        object.__setattr__(self, "primal_step", as_schedule(self.primal_step))
        check_consensus_step(self.consensus_step)

    def gossip_settings(self) -> GossipSettings:
        return GossipSettings(self.compressor, self.consensus_step)

    def init(self, oracle: Oracle, network: Network) -> ChocoState:
        models = oracle.initial_models()
        return ChocoState(models, zero_copies(models, network))

    def step(self, state: ChocoState, ctx: Round) -> ChocoState:
        _, gradients = ctx.losses_and_gradients(state.models)
        models = state.models - ctx.step_size(self.primal_step) * prior_weights(ctx) * gradients
        del gradients
        models = gossip_step(models, state.copies, self.consensus_step, ctx)
        message = compressed_difference(models, state.copies, self.compressor, ctx)
        delivery = ctx.exchange(model=message)
        return ChocoState(models, updated_copies(state.copies, message, delivery, "model"))
