"""Tracked AD-GDA: robust decentralized training in which every node follows the whole network's weighted gradient.

Compressed gradient tracking with momentum (Zhao et al.: BEER, NeurIPS 2022; Islamov et al.: MoTEF, 2024) for the
objective and the gossip of AD-GDA (Zecchin, Kountouris, Gesbert, TMLR 2022), with steps scaled as Adam's (Kingma, Ba,
ICLR 2015). docs/frontier.md tells what each of these is worth.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import STRUCTURAL, Algorithm, Round, capped, check_loss_cap, check_rate
from fairmesh.algorithms.gossip import (
    PublicCopies,
    copies_of,
    difference,
    disagreement,
    followed,
    moved,
    no_copies,
    steady_rate,
    toward_neighbours,
)
from fairmesh.algorithms.schedules import Polynomial, Schedule, as_schedule
from fairmesh.algorithms.weighting import Price, Weighing
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
    rates: Tensor  # gamma (..., nodes, 1)
    weighing: Any

    @property
    def duals(self) -> Tensor | None:
        return getattr(self.weighing, "duals", None)

    @property
    def weights(self) -> Tensor | None:
        return getattr(self.weighing, "weights", None)


@dataclass(frozen=True)
class TrackedADGDA(Algorithm):
    """Descends along an estimate of the network's lambda-weighted gradient; models and trackers are gossiped as
    compressed differences to public copies.

    In units that do not depend on the number of nodes: a node's gradient weighs m lambda_i, one on average, so that
    `primal_step` is a step along the network's gradient, and alpha is m times AD-GDA's. Every ingredient can be left
    out: `momentum = 1`, `tracking = False`, `scaling = 0`, `vantage = 0`, `local_steps = 1`, `warm_start = False` and
    an `Ascent` give AD-GDA with m times the step; a `Fixed` weighing with tracking BEER, and with momentum MoTEF.

    A node's own model tends to be better at its own samples than the network's is, so the loss that it finds there is
    too small. With `vantage` it looks from a share of the way to the average of the public copies around it.

    A scaled step is as long for a small model as for a large one: about `primal_step`, in the Euclidean norm."""

    primal_step: Schedule | float = field(default_factory=lambda: Polynomial(0.7, power=3.0))  # eta_theta
    momentum: float = 0.1  # the share of the fresh gradient in what a node remembers of its own; 1: no memory
    tracking: bool = field(default=True, metadata=STRUCTURAL)
    scaling: float = field(default=0.99, metadata=STRUCTURAL)  # memory of the squares steps are divided by; 0: none are
    vantage: float = 1.0  # losses and gradients are taken at a node's own model (0), at the average around it (1)
    local_steps: int = field(default=1, metadata=STRUCTURAL)  # between exchanges, corrected by the tracker
    rate: float | None = None  # gamma, the consensus step size; from the compressor and the graph where not given
    compressor: Compressor = field(default_factory=lambda: Sign(block=64))  # Q, of models and of trackers
    weighing: Weighing = field(default_factory=Price)
    regularizer: Regularizer = field(default_factory=lambda: ChiSquare(0.05))  # alpha r
    loss_cap: float | None = None  # what the weighing sees of a loss at most
    warm_start: bool = field(default=True, metadata=STRUCTURAL)  # public copies begin at the model that all begin with

    needs_server: ClassVar[bool] = False
    alpha_of_sum: ClassVar[bool] = True
    copies_at_peak: ClassVar[int] = 22  # two states of eight, and what a compressor takes

    def __post_init__(self):
        object.__setattr__(self, "primal_step", as_schedule(self.primal_step))
        if self.rate is not None:
            check_rate(self.rate)
        check_loss_cap(self.loss_cap)
        if not 0 < self.momentum <= 1:
            raise BadInput(f"momentum, the share of the fresh gradient, lies in (0, 1], got {self.momentum}; 1 is none")
        if not 0 <= self.scaling < 1:
            raise BadInput(f"scaling lies in [0, 1), got {self.scaling}; 0 leaves steps as they are")
        if not 0 <= self.vantage <= 1:
            raise BadInput(
                f"vantage lies in [0, 1], got {self.vantage}; 0 is a node's own model, 1 its neighbourhood's average"
            )
        if self.local_steps < 1:
            raise BadInput(f"local_steps must be >= 1, got {self.local_steps}")

    def check(self, prior: Tensor, dim: int) -> None:
        self.weighing.check(self.regularizer, prior)

    def oracle_calls(self) -> int:
        return 1  # local steps look at the round's batch again

    def steps(self) -> dict[str, Schedule | float]:
        return {"primal_step": self.primal_step}

    def init(self, oracle: Oracle, network: Network) -> TrackedState:
        models = oracle.initial_models()
        rate = self.rate if self.rate is not None else steady_rate(self.compressor, models.shape[-1], network)
        return TrackedState(
            models=models,
            momenta=torch.zeros_like(models),
            balances=torch.zeros_like(models) if self.tracking else None,
            squares=torch.zeros_like(models) if self.scaling else None,
            copies=copies_of(models, network) if self.warm_start else no_copies(models, network),
            tracker_copies=no_copies(models, network) if self.tracking else None,
            rates=torch.ones_like(models[..., :1]) * rate,
            weighing=self.weighing.init(oracle, network),
        )

    def step(self, state: TrackedState, round: Round) -> TrackedState:
        apart = disagreement(state.copies, round)
        losses, gradients = round.losses_and_gradients(moved(state.models, apart, self.vantage))
        weights, parts, settled = self.weighing.weigh(
            state.weighing, capped(losses, self.loss_cap), self.regularizer, round
        )
        momenta = torch.lerp(state.momenta, weights * gradients, self.momentum)
        balances, trackers = state.balances, momenta
        if balances is not None and state.tracker_copies is not None:
            balances = toward_neighbours(balances, state.tracker_copies, state.rates, round)
            trackers = momenta + balances
        squares, step = state.squares, round.step_size(self.primal_step)
        if squares is not None:
            squares = torch.lerp(trackers.square(), squares, self.scaling)
            remembered = 1.0 - self.scaling ** (round.index + 1).double()  # below 1 in the first rounds
            step = step / squares.shape[-1] ** 0.5  # of each parameter, for a step that is as long as the schedule says
            step = step / (squares / remembered.to(squares.dtype)).sqrt_().add_(_TINY)
        models = state.models.addcmul(trackers, step, value=-1)
        for _ in range(1, self.local_steps):
            there = round.losses_and_gradients(moved(models, apart, self.vantage))[1]
            models = models.addcmul(trackers.addcmul(there.sub_(gradients), weights), step, value=-1)
        del gradients, step
        models = moved(models, apart, state.rates)
        del apart
        parts = {"model": difference(models, state.copies, self.compressor, round), **parts}
        if state.tracker_copies is not None:
            purpose = "tracker compression"
            parts["tracker"] = difference(trackers, state.tracker_copies, self.compressor, round, purpose)
        del trackers
        delivery = round.exchange(**parts)
        return TrackedState(
            models=models,
            momenta=momenta,
            balances=balances,
            squares=squares,
            copies=followed(state.copies, parts["model"], delivery, "model"),
            tracker_copies=state.tracker_copies
            and followed(state.tracker_copies, parts["tracker"], delivery, "tracker"),
            rates=state.rates,
            weighing=settled(delivery),
        )
