"""Tracked AD-GDA: robust decentralized training in which every node follows the whole network's weighted gradient.

It combines compressed gradient tracking with momentum (BEER, MoTEF), the objective and the gossip of AD-GDA, and steps
scaled as in Adam. reproduction/frontier.md measures what each of these contributes.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm, Round, Sent, capped, fresh_share
from fairmesh.algorithms.gossip import (
    PublicCopies,
    compressed_difference,
    disagreement,
    gossip_step,
    moved,
    steady_consensus_steps,
    updated_copies,
    warm_copies,
    zero_copies,
)
from fairmesh.algorithms.optimizers import Optimizer
from fairmesh.algorithms.schedules import Polynomial, Schedule
from fairmesh.algorithms.settings import EXACT, STRUCTURAL
from fairmesh.algorithms.steps import Moved, scaled_step
from fairmesh.algorithms.weighting import PriorWeights, ShadowPrice, Weighting
from fairmesh.compression.compressors import Compressor, Sign
from fairmesh.config.ranges import Count, Memory, Positive, UpToOne, Within
from fairmesh.networks.base import Network
from fairmesh.networks.roles import Common, ConsensusSteps, Models, SumsToZero
from fairmesh.problems.oracle import Oracle
from fairmesh.regularizers.base import Regularizer
from fairmesh.regularizers.builtin import ChiSquare

_SHORTER, _LONGER = 0.5, 1.25  # the most by which a node changes the length of its local steps in a round
_DRIFT_PER_MIXING, _LARGEST_DRIFT = 24.0, 2.0  # the default of max_drift (docs/concepts/algorithms.md)

_Between = Annotated[float, Within("[0, 1]", "0 is at the node's own model")]
_Drift = Annotated[float, Within("[0, inf)", "0 for full local steps, None for one from the graph")]


class TrackedState(NamedTuple):
    """Trackers are momenta + balances. Balances sum to zero, so trackers and momenta have the same average."""

    models: Models  # theta_i (..., nodes, dim)
    momenta: Tensor  # of the node's own weighted gradient (..., nodes, dim)
    balances: SumsToZero | None  # what gossip added to the momenta: sums to zero over all nodes (..., nodes, dim)
    squares: Common | None  # mean squares of the tracker (..., nodes, dim)
    copies: PublicCopies  # of the models
    tracker_copies: PublicCopies | None
    consensus_steps: ConsensusSteps  # gamma (..., nodes, 1)
    weighting: Any
    paces: Tensor | None  # share of a step that a local step has, if there are several (..., nodes, 1)
    drift_limits: Tensor | None  # max_drift, as chosen (..., nodes, 1)


@dataclass(frozen=True)
class TrackedADGDA(Algorithm):
    """Tracked AD-GDA: every node descends along an estimate of the whole network's lambda-weighted gradient.

    Solves min_theta max_lambda sum_i lambda_i f_i(theta) + alpha r(lambda) without a server. In every round node i
    finds its weight lambda_i by the `weighting`, averages its weighted gradient over time, tracks the network's average
    of these, and takes a scaled step along it:

        g_i <- beta1 g_i + (1 - beta1) n lambda_i grad f_i       momentum of its own weighted gradient
        b_i <- b_i + gamma (sum_j w_ij y_hat_j - y_hat_i)        what gossip adds; sums to zero over all nodes
        y_i <- g_i + b_i                                         tracker, near the network's average gradient
        v_i <- beta2 v_i + (1 - beta2) y_i^2                     mean squares, as in Adam
        theta_i <- theta_i - eta y_i / sqrt(dim v_i) + gamma (sum_j w_ij x_hat_j - x_hat_i)

    x_hat and y_hat are public copies of models and trackers; their differences travel compressed. A scaled step has a
    Euclidean norm of about `primal_step`, for small and large models alike. The defaults need no tuning to the number
    of nodes, since the weights n lambda_i are 1 on average.

    Every ingredient can be switched off. `beta1 = 0`, `tracking = False`, `beta2 = 0`, `gradient_at_average = 0`,
    `local_steps = 1`, `warm_start = False` and `weighting = ProjectedAscent()` give AD-GDA with n times the step and n
    times the strength. `PriorWeights` with tracking gives BEER, and with momentum MoTEF.

    Args:
        primal_step: eta, a number >= 0 or a schedule: the length of a step in the Euclidean norm, or the learning rate
            if `beta2 = 0`. Default: Polynomial(0.7, power=3.0), which falls to 0 at the end of the run.
        beta1: Memory of the momentum, in [0, 1), as in Adam; 0 for no momentum. Default: 0.9.
        tracking: Whether nodes track the network's average gradient; without it each follows its own. Doubles the
            traffic. Default: True.
        beta2: Memory of the mean squares that steps are divided by, in [0, 1), as in Adam; 0 for unscaled steps.
            Default: 0.99.
        gradient_at_average: Where losses and gradients are taken, in [0, 1]: 0 at the node's own model, 1 at the
            average of the public copies around it. A node's own model fits its own samples better than the network's
            does, so its loss there is too small. Default: 1.0.
        local_steps: K, steps between two exchanges, >= 1, each on a batch of its own. What gossip adds to the node's
            gradient, b_i, stays the same meanwhile and corrects for how the node's data differ. Default: 1.
        consensus_step: gamma in (0, 1], the share of its disagreement with the neighbours that a node removes per
            round; None to choose it from the compressor and the graph. Default: None.
        compressor: Q, what a node sends of its model and of its tracker. Default: Sign(block=64).
        weighting: How the weights lambda are found. Default: ShadowPrice().
        regularizer: alpha r, how far the weights may move from the prior. alpha is n times that of AD-GDA. Default:
            ChiSquare(0.05).
        loss_cap: Largest loss, > 0, that the weighting sees of a node, which limits what a broken site attracts; None
            for no limit. Default: None.
        warm_start: Whether public copies start at the initial model, which all nodes share, instead of at zero.
            Default: True.
        max_drift: How much a node's own gradient may change in its local steps, >= 0, in units of the tracker's norm.
            Beyond that the correction no longer holds, and the node shortens its local steps, down to 1 / K of a step.
            This takes one more gradient per round. 0 for local steps of full length; None for 24 gamma rho, at most 2,
            with the graph's spectral gap rho: a network that mixes slowly bears less drift. Default: None.
        optimizer: What each node makes of its gradients before they are weighed and tracked; None for nothing. Steps
            are already scaled as in Adam, along the tracked gradient (`beta2`). Default: None.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), fm.TrackedADGDA(), rounds=10)
        >>> fm.run(experiment).weights().shape
        torch.Size([1, 4])

    References:
        Zecchin, Kountouris, Gesbert: Communication-Efficient Distributionally Robust Decentralized Learning, TMLR 2022.
        Zhao, Li, Li, Richtarik, Chi: BEER, NeurIPS 2022. Islamov, Gao, Stich: MoTEF, 2024. Kingma, Ba: Adam, ICLR 2015.
        Liu, Lin, Koloskova, Stich: Decentralized gradient tracking with local steps (K-GT), 2023.
    """

    primal_step: Schedule | float = field(default_factory=lambda: Polynomial(0.7, power=3.0))
    beta1: Memory = field(default=0.9, metadata=EXACT)
    tracking: bool = field(default=True, metadata=STRUCTURAL)
    beta2: Memory = field(default=0.99, metadata=STRUCTURAL)
    gradient_at_average: _Between = 1.0
    local_steps: Count = field(default=1, metadata=STRUCTURAL)
    consensus_step: UpToOne | None = None
    compressor: Compressor = field(default_factory=lambda: Sign(block=64))
    weighting: Weighting = field(default_factory=ShadowPrice)
    regularizer: Regularizer = field(default_factory=lambda: ChiSquare(0.05))
    loss_cap: Positive | None = None
    warm_start: bool = field(default=True, metadata=STRUCTURAL)
    max_drift: _Drift | None = field(default=None, metadata=STRUCTURAL, kw_only=True)
    optimizer: Optimizer | None = field(default=None, kw_only=True)

    copies_at_peak: ClassVar[int] = 22  # two states of eight rows per node, and what a compressor needs

    def check(self, prior: Tensor, dim: int) -> None:
        self.weighting.check(self.regularizer, prior)

    def keeps_prior_weights(self) -> bool:
        return self.weighting == PriorWeights()

    def uses_losses(self) -> bool:
        return not self.keeps_prior_weights()

    def discounts_noise(self) -> bool:
        return self.weighting.discounts_noise

    def keeps_node_rows(self) -> bool:
        return self.weighting.keeps_rows

    def with_fixed_weights(self) -> "TrackedADGDA | None":
        return None if self.weighting == PriorWeights() else replace(self, weighting=PriorWeights())

    def message(self) -> tuple[Sent, ...] | None:
        of_weighting = self.weighting.message()
        if of_weighting is None:
            return None
        vectors = [Sent(name, compressor=self.compressor, followed=True) for name in ("model", "tracker")]
        return vectors[0], *of_weighting, *(vectors[1:] if self.tracking else ())

    def init(self, oracle: Oracle, network: Network) -> TrackedState:
        models = oracle.initial_models()
        if self.consensus_step is None:
            consensus_steps = steady_consensus_steps(self.compressor, models, network)
        else:
            consensus_steps = torch.ones_like(models[..., :1]) * self.consensus_step
        watched = self.local_steps > 1 and self.max_drift != 0
        return TrackedState(
            models=models,
            momenta=torch.zeros_like(models),
            balances=torch.zeros_like(models) if self.tracking else None,
            squares=torch.zeros_like(models) if self.beta2 else None,
            copies=warm_copies(models, network) if self.warm_start else zero_copies(models, network),
            tracker_copies=zero_copies(models, network) if self.tracking else None,
            consensus_steps=consensus_steps,
            weighting=self.weighting.init(oracle, network),
            paces=torch.full_like(models[..., :1], 1.0 / self.local_steps) if watched else None,
            drift_limits=self._drift_limits(consensus_steps, network) if watched else None,
        )

    def _drift_limits(self, consensus_steps: Tensor, network: Network) -> Tensor:
        if self.max_drift is not None:
            return torch.full_like(consensus_steps, self.max_drift)
        return (_DRIFT_PER_MIXING * round(network.gap(), 4) * consensus_steps).clamp(max=_LARGEST_DRIFT)

    def _stepped(
        self,
        before: TrackedState | Moved,
        weighted: Tensor,
        balances: Tensor | None,
        paces: Tensor | None,
        call: int,
        ctx: Round,
    ) -> tuple[Moved, Tensor]:
        """Returns models after one step along the tracker of the weighted gradients, and the tracker."""
        momenta = torch.lerp(before.momenta, weighted, fresh_share(self.beta1, weighted.dtype))
        trackers = momenta if balances is None else momenta + balances
        number = ctx.index * self.local_steps + call + 1
        squares, step = scaled_step(trackers, before.squares, self.beta2, ctx.step_size(self.primal_step), number)
        models = before.models.addcmul(trackers, step if paces is None else step * paces, value=-1)
        return Moved(models, momenta, squares), trackers

    def _next_paces(self, paces: Tensor, drift: Tensor, limits: Tensor) -> Tensor:
        """Returns longer paces where the own gradient changed by less than is allowed, and shorter ones elsewhere."""
        allowed = limits / drift.clamp(min=1e-30)
        return (paces * allowed.clamp(_SHORTER, _LONGER)).clamp(1.0 / self.local_steps, 1.0)

    def step(self, state: TrackedState, ctx: Round) -> TrackedState:
        apart = disagreement(state.copies, ctx)
        losses, gradients = ctx.losses_and_gradients(moved(state.models, apart, self.gradient_at_average))
        weights, parts, settled = self.weighting.weigh(
            state.weighting, capped(losses, self.loss_cap), self.regularizer, ctx
        )
        balances = state.balances
        if balances is not None and state.tracker_copies is not None:
            balances = gossip_step(balances, state.tracker_copies, state.consensus_steps, ctx)
        moving, trackers = self._stepped(state, weights * gradients, balances, state.paces, 0, ctx)
        watched = None
        if state.paces is not None and state.drift_limits is not None:
            watched = state.paces, gradients, state.drift_limits * _norm(trackers)
        del gradients
        for call in range(1, self.local_steps):
            del trackers
            there = ctx.losses_and_gradients(moved(moving.models, apart, self.gradient_at_average), call)[1]
            moving, trackers = self._stepped(moving, there.mul_(weights), balances, state.paces, call, ctx)
            del there
        models, momenta, squares = moving
        del moving
        paces = state.paces
        if watched is not None:
            paces, first, limits = watched
            again = ctx.losses_and_gradients(moved(models, apart, self.gradient_at_average))[1]  # on the first batch
            paces = self._next_paces(paces, _norm((again - first) * weights), limits)
            del again, first
        del watched
        models = moved(models, apart, state.consensus_steps)
        del apart
        parts = {"model": compressed_difference(models, state.copies, self.compressor, ctx), **parts}
        if state.tracker_copies is not None:
            purpose = "tracker compression"
            parts["tracker"] = compressed_difference(trackers, state.tracker_copies, self.compressor, ctx, purpose)
        del trackers
        delivery = ctx.exchange(**parts)
        # One after the other, each message freed before the next is decoded.
        copies = updated_copies(state.copies, parts.pop("model"), delivery, "model")
        tracker_copies = state.tracker_copies and updated_copies(
            state.tracker_copies, parts.pop("tracker"), delivery, "tracker"
        )
        return TrackedState(
            models=models,
            momenta=momenta,
            balances=balances,
            squares=squares,
            copies=copies,
            tracker_copies=tracker_copies,
            consensus_steps=state.consensus_steps,
            weighting=settled(delivery),
            paces=paces,
            drift_limits=state.drift_limits,
        )


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
