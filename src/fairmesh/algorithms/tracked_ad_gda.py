"""Tracked AD-GDA: robust decentralized training in which every node follows the whole network's weighted gradient.

Compressed gradient tracking with momentum (Zhao et al.: BEER, NeurIPS 2022; Islamov et al.: MoTEF, 2024) for the
objective and the gossip of AD-GDA (Zecchin, Kountouris, Gesbert, TMLR 2022), with steps scaled as Adam's (Kingma, Ba,
ICLR 2015). reproduction/frontier.md tells what each of these is worth.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import (
    EXACT,
    STRUCTURAL,
    Algorithm,
    Round,
    capped,
    check_beta,
    check_consensus_step,
    check_loss_cap,
    fresh_share,
)
from fairmesh.algorithms.gossip import (
    PublicCopies,
    compressed_difference,
    disagreement,
    gossip_step,
    moved,
    steady_consensus_step,
    updated_copies,
    warm_copies,
    zero_copies,
)
from fairmesh.algorithms.schedules import Polynomial, Schedule, as_schedule
from fairmesh.algorithms.weighting import ShadowPrice, Weighting
from fairmesh.compression.compressors import Compressor, Sign
from fairmesh.errors import BadInput
from fairmesh.networks.base import Network
from fairmesh.problems.oracle import Oracle
from fairmesh.regularizers.base import Regularizer
from fairmesh.regularizers.members import ChiSquare

_TINY = 1e-8  # beside the root of the squares: a coordinate without a gradient stays where it is


class TrackedState(NamedTuple):
    """`trackers` are momenta + balances: their average is the momenta's, whatever gossip does."""

    models: Tensor  # theta_i (..., nodes, dim)
    momenta: Tensor  # of the node's own weighted gradient (..., nodes, dim)
    balances: Tensor | None  # what gossip added to the momenta: sums to zero over all nodes (..., nodes, dim)
    squares: Tensor | None  # mean squares of the tracker (..., nodes, dim)
    copies: PublicCopies  # of the models
    tracker_copies: PublicCopies | None
    consensus_steps: Tensor  # gamma (..., nodes, 1)
    weighting: Any

    @property
    def duals(self) -> Tensor | None:
        return getattr(self.weighting, "duals", None)

    @property
    def weights(self) -> Tensor | None:
        return getattr(self.weighting, "weights", None)


@dataclass(frozen=True)
class TrackedADGDA(Algorithm):
    """Descends along an estimate of the network's lambda-weighted gradient; models and trackers are gossiped as
    compressed differences to public copies.

    In units that do not depend on the number of nodes: a node's gradient weighs m lambda_i, one on average, so that
    `primal_step` is a step along the network's gradient, and alpha is m times AD-GDA's. Every ingredient can be left
    out: `beta1 = 0`, `tracking = False`, `beta2 = 0`, `gradient_at_average = 0`, `local_steps = 1`,
    `warm_start = False` and a `ProjectedAscent` give AD-GDA with m times the step; `PriorWeights` with tracking give
    BEER, and with momentum MoTEF.

    A node's own model tends to be better at its own samples than the network's is, so the loss that it finds there is
    too small. With `gradient_at_average` the gradient is taken part of the way to the average of the public copies
    around it.

    A scaled step is as long for a small model as for a large one: about `primal_step`, in the Euclidean norm."""

    primal_step: Schedule | float = field(default_factory=lambda: Polynomial(0.7, power=3.0))  # eta_theta
    beta1: float = field(default=0.9, metadata=EXACT)  # memory of the node's own weighted gradient; 0: no momentum
    tracking: bool = field(default=True, metadata=STRUCTURAL)
    beta2: float = field(default=0.99, metadata=STRUCTURAL)  # memory of the squares steps are divided by; 0: none are
    gradient_at_average: float = (
        1.0  # losses and gradients are taken at a node's own model (0), at the average around it (1)
    )
    local_steps: int = field(default=1, metadata=STRUCTURAL)  # between exchanges, corrected by the tracker
    consensus_step: float | None = (
        None  # gamma, the consensus step size; from the compressor and the graph where not given
    )
    compressor: Compressor = field(default_factory=lambda: Sign(block=64))  # Q, of models and of trackers
    weighting: Weighting = field(default_factory=ShadowPrice)
    regularizer: Regularizer = field(default_factory=lambda: ChiSquare(0.05))  # alpha r
    loss_cap: float | None = None  # what the weighting sees of a loss at most
    warm_start: bool = field(default=True, metadata=STRUCTURAL)  # public copies begin at the model that all begin with

    needs_server: ClassVar[bool] = False
    alpha_of_sum: ClassVar[bool] = True
    copies_at_peak: ClassVar[int] = 22  # two states of eight, and what a compressor takes

    def __post_init__(self):
        object.__setattr__(self, "primal_step", as_schedule(self.primal_step))
        if self.consensus_step is not None:
            check_consensus_step(self.consensus_step)
        check_loss_cap(self.loss_cap)
        check_beta("beta1", self.beta1)
        check_beta("beta2", self.beta2)
        if not 0 <= self.gradient_at_average <= 1:
            raise BadInput(
                f"gradient_at_average must lie in [0, 1], got {self.gradient_at_average}; 0: at the node's own model"
            )
        if self.local_steps < 1:
            raise BadInput(f"local_steps must be >= 1, got {self.local_steps}")

    def check(self, prior: Tensor, dim: int) -> None:
        self.weighting.check(self.regularizer, prior)

    def oracle_calls(self) -> int:
        return 1  # local steps look at the round's batch again

    def steps(self) -> dict[str, Schedule | float]:
        return {"primal_step": self.primal_step}

    def init(self, oracle: Oracle, network: Network) -> TrackedState:
        models = oracle.initial_models()
        rate = (
            self.consensus_step
            if self.consensus_step is not None
            else steady_consensus_step(self.compressor, models.shape[-1], network)
        )
        return TrackedState(
            models=models,
            momenta=torch.zeros_like(models),
            balances=torch.zeros_like(models) if self.tracking else None,
            squares=torch.zeros_like(models) if self.beta2 else None,
            copies=warm_copies(models, network) if self.warm_start else zero_copies(models, network),
            tracker_copies=zero_copies(models, network) if self.tracking else None,
            consensus_steps=torch.ones_like(models[..., :1]) * rate,
            weighting=self.weighting.init(oracle, network),
        )

    def step(self, state: TrackedState, ctx: Round) -> TrackedState:
        apart = disagreement(state.copies, ctx)
        losses, gradients = ctx.losses_and_gradients(moved(state.models, apart, self.gradient_at_average))
        weights, parts, settled = self.weighting.weigh(
            state.weighting, capped(losses, self.loss_cap), self.regularizer, ctx
        )
        momenta = torch.lerp(state.momenta, weights * gradients, fresh_share(self.beta1, gradients.dtype))
        balances, trackers = state.balances, momenta
        if balances is not None and state.tracker_copies is not None:
            balances = gossip_step(balances, state.tracker_copies, state.consensus_steps, ctx)
            trackers = momenta + balances
        squares, step = state.squares, ctx.step_size(self.primal_step)
        if squares is not None:
            squares = torch.lerp(trackers.square(), squares, self.beta2)
            remembered = 1.0 - self.beta2 ** (ctx.index + 1).double()  # below 1 in the first rounds
            step = step / squares.shape[-1] ** 0.5  # of each parameter, for a step that is as long as the schedule says
            step = step / (squares / remembered.to(squares.dtype)).sqrt_().add_(_TINY)
        models = state.models.addcmul(trackers, step, value=-1)
        for _ in range(1, self.local_steps):
            there = ctx.losses_and_gradients(moved(models, apart, self.gradient_at_average))[1]
            models = models.addcmul(trackers.addcmul(there.sub_(gradients), weights), step, value=-1)
        del gradients, step
        models = moved(models, apart, state.consensus_steps)
        del apart
        parts = {"model": compressed_difference(models, state.copies, self.compressor, ctx), **parts}
        if state.tracker_copies is not None:
            purpose = "tracker compression"
            parts["tracker"] = compressed_difference(trackers, state.tracker_copies, self.compressor, ctx, purpose)
        del trackers
        delivery = ctx.exchange(**parts)
        return TrackedState(
            models=models,
            momenta=momenta,
            balances=balances,
            squares=squares,
            copies=updated_copies(state.copies, parts["model"], delivery, "model"),
            tracker_copies=state.tracker_copies
            and updated_copies(state.tracker_copies, parts["tracker"], delivery, "tracker"),
            consensus_steps=state.consensus_steps,
            weighting=settled(delivery),
        )
