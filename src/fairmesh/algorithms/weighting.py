"""Who weighs how much in a robust run: ways to find lambda with one message a round, and one that leaves it alone.

All work in the units of g(theta, lambda) = sum_i lambda_i f_i(theta) + alpha r(lambda), m times the paper's objective:
there neither a good alpha nor a good step depends on how many nodes there are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import (
    EXACT,
    STRUCTURAL,
    Round,
    check_beta,
    check_dual_step,
    fresh_share,
    plain,
    prior_rows,
    prior_weights,
)
from fairmesh.algorithms.gossip import PublicCopies, gossiped_rows, zero_copies
from fairmesh.algorithms.schedules import Polynomial, Schedule, as_schedule
from fairmesh.compression.compressors import Compressor
from fairmesh.config.tables import register
from fairmesh.errors import BadInput
from fairmesh.networks.base import Delivery, Network, Part
from fairmesh.networks.roles import OVER_NODES, Duals, OwnWeights, SumsToZero
from fairmesh.problems.oracle import Oracle
from fairmesh.regularizers.base import Regularizer
from fairmesh.regularizers.custom import Custom
from fairmesh.regularizers.members import check_priced, ratio_at


class Weighed(NamedTuple):
    """What a node's loss weighs in this round's descent, and what there is to tell the neighbours of it."""

    weights: Tensor  # m lambda_i (..., nodes, 1), one on average
    parts: dict[str, Part]
    settled: Callable[[Delivery], Any]  # the state after the exchange


class Weighting(ABC):
    """`init` gives the state before round 0, `weigh` this round's weights from the hosted nodes' losses (..., nodes,
    1). A state that holds lambda calls it `duals`, (..., nodes, n)."""

    keeps_rows: ClassVar[bool]  # every node holds a number for every node

    @abstractmethod
    def check(self, regularizer: Regularizer, prior: Tensor) -> None:
        """Refuses a regularizer that this way cannot serve."""

    @abstractmethod
    def init(self, oracle: Oracle, network: Network) -> Any:
        """The state before the first round."""

    @abstractmethod
    def weigh(self, state: Any, losses: Tensor, regularizer: Regularizer, ctx: Round) -> Weighed:
        """This round's weights."""


class Rows(NamedTuple):
    """Rows with a coordinate for every node, each node's estimate of all."""

    duals: Duals  # lambda_i (..., nodes, n)
    dual_copies: Annotated[PublicCopies | None, OVER_NODES]  # where rows travel compressed


def _of_own(rows: Tensor, ctx: Round) -> Tensor:
    """m times each hosted node's own entry: (..., nodes, 1)."""
    return ctx.n * (rows * ctx.own).sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class ProjectedAscent(Weighting):
    """AD-GDA's: every node raises its own coordinate of lambda by its loss, projects, and gossips the row."""

    step: Schedule | float = 0.01  # eta_lambda
    compressor: Compressor | None = None  # of the rows; without one they travel as they are

    keeps_rows: ClassVar[bool] = True

    def __post_init__(self):
        object.__setattr__(self, "step", as_schedule(self.step))

    def check(self, regularizer: Regularizer, prior: Tensor) -> None:
        check_dual_step(self.step, regularizer, prior, "weighting.step", times=prior.shape[-1])

    def init(self, oracle: Oracle, network: Network) -> Rows:
        duals = prior_rows(oracle, network)
        return Rows(duals, None if self.compressor is None else zero_copies(duals, network))

    def weigh(self, state: Rows, losses: Tensor, regularizer: Regularizer, ctx: Round) -> Weighed:
        slopes = losses * ctx.own + regularizer.gradient(state.duals, ctx.prior, ctx.own) / ctx.n
        allowed = partial(regularizer.project, prior=ctx.prior)
        duals = allowed(state.duals.addcmul(slopes, ctx.step_size(self.step)))
        parts, arrived = gossiped_rows(duals, state.dual_copies, self.compressor, ctx, allowed)
        return Weighed(_of_own(state.duals, ctx), parts, lambda delivery: Rows(*arrived(delivery)))


class Tables(NamedTuple):
    """What a node knows of all nodes' losses."""

    duals: Duals  # lambda_i (..., nodes, n)
    losses: Tensor  # f_i as remembered (..., nodes, 1)
    dual_balances: Annotated[
        SumsToZero, OVER_NODES
    ]  # what gossip added to m f_i at the node's own coordinate: sums to zero over all nodes
    dual_copies: Annotated[PublicCopies | None, OVER_NODES]


_LARGE = 10  # times the usual share of the data: a site beyond that would make the price swing, so its step is shorter
_NO_LOSS = 1e-6  # where all losses are zero their mean counts as this


@dataclass(frozen=True)
class ExactMaximum(Weighting):
    """The exact inner maximum for losses that all nodes gossip: node i puts m f_i at its own coordinate of a row, so
    that the rows' average is the table of losses, which each node then follows as its loss changes."""

    loss_ema: float = field(default=0.9, metadata=EXACT)  # memory of the loss that a node remembers; 0: none
    compressor: Compressor | None = None  # of the rows; without one they travel as they are

    keeps_rows: ClassVar[bool] = True

    def __post_init__(self):
        check_beta("loss_ema", self.loss_ema)

    def check(self, regularizer: Regularizer, prior: Tensor) -> None:
        if isinstance(regularizer, Custom):
            raise BadInput(
                "the inner maximum of a custom regularizer takes too long for every round; use a ProjectedAscent"
            )

    def init(self, oracle: Oracle, network: Network) -> Tables:
        duals = prior_rows(oracle, network)
        copies = None if self.compressor is None else zero_copies(duals, network)
        return Tables(duals, torch.zeros_like(duals[..., :1]), torch.zeros_like(duals), copies)

    def weigh(self, state: Tables, losses: Tensor, regularizer: Regularizer, ctx: Round) -> Weighed:
        losses = torch.lerp(state.losses, losses, fresh_share(self.loss_ema, losses.dtype))
        injected = ctx.n * losses * ctx.own
        rows = state.dual_balances + injected
        known = torch.where(ctx.own > 0, losses, rows)  # its own loss a node knows better
        duals = regularizer.maximiser(ctx.n * known, ctx.prior)
        parts, arrived = gossiped_rows(rows, state.dual_copies, self.compressor, ctx)

        def settled(delivery: Delivery) -> Tables:
            mixed, copies = arrived(delivery)
            return Tables(duals, losses, mixed - injected, copies)

        return Weighed(_of_own(duals, ctx), parts, settled)


class Prices(NamedTuple):
    """A few numbers a node."""

    losses: Tensor  # f_i as remembered (..., nodes, 1)
    prices: Tensor  # in units of the regularizer's softness (..., nodes, 1)
    balances: SumsToZero  # what gossip added to the prices last: sums to zero over all nodes (..., nodes, 1)
    weights: OwnWeights  # n lambda_i of the last round (..., nodes, 1)
    mean_balances: SumsToZero | None  # f_i and this are the mean of all losses: sums to zero (..., nodes, 1)


@dataclass(frozen=True)
class ShadowPrice(Weighting):
    """The inner maximum by its shadow price: lambda_i follows from f_i and the price of sum_i lambda_i = 1, which all
    nodes gossip and which rises where weights exceed their share. One number a message, however many nodes.

    Gossip alone would leave every node with a price of its neighbourhood. So what it added last is added again, which
    makes the one price of all nodes the only one that stays (exact diffusion: Yuan et al., IEEE TSP 2019).

    `relative` counts losses in units of their mean over all nodes, a second number that is gossiped: alpha then means
    the same whether losses are large, as at the start, or small. It needs losses that are not negative.

    `strength_annealing`, a schedule of its own, makes alpha larger while steps are long: losses respond to weights only
    rounds later, so sharp weights and long steps together make the model oscillate between the sites' needs."""

    loss_ema: float = field(default=0.9, metadata=EXACT)  # memory of the loss that a node remembers; 0: none
    step: float = 0.1  # of the price, in units in which 1 corrects a lone node's weight at once; under KullbackLeibler
    # too long where a node weighs more than 2 / step times its prior
    relative: bool = field(default=True, metadata=STRUCTURAL)
    strength_annealing: Schedule | float = field(
        default_factory=lambda: Polynomial(30.0, power=3.0)
    )  # alpha times 1 + this

    keeps_rows: ClassVar[bool] = False

    def __post_init__(self):
        object.__setattr__(self, "strength_annealing", as_schedule(self.strength_annealing))
        check_beta("loss_ema", self.loss_ema)
        if not 0 < self.step <= 1:
            raise BadInput(f"step of the price lies in (0, 1], got {self.step}; 0.1 is a good one")

    def check(self, regularizer: Regularizer, prior: Tensor) -> None:
        check_priced(regularizer)

    def init(self, oracle: Oracle, network: Network) -> Prices:
        nothing = torch.zeros_like(prior_rows(oracle, network)[..., :1])
        hosted = oracle.prior.squeeze(-2).index_select(-1, network.hosted).unsqueeze(-1)
        means = nothing.clone() if self.relative else None
        return Prices(nothing, nothing.clone(), nothing.clone(), network.n * hosted, means)

    def weigh(self, state: Prices, losses: Tensor, regularizer: Regularizer, ctx: Round) -> Weighed:
        losses = torch.lerp(state.losses, losses, fresh_share(self.loss_ema, losses.dtype))
        prior = prior_weights(ctx)  # m p_i
        means = None if state.mean_balances is None else losses + state.mean_balances
        # The mean of m losses is no less than a share 1 / m of each: a node is not fooled while gossip lags behind.
        units = losses if means is None else losses / torch.maximum(means, losses / ctx.n + _NO_LOSS)
        weights = prior * ratio_at(regularizer, units / (1.0 + ctx.step_size(self.strength_annealing)), state.prices)
        step = self.step / (ctx.n * ctx.prior.amax(dim=-1, keepdim=True) / _LARGE).clamp(min=1.0)
        raised = state.prices + step * (weights - prior)
        told = raised + state.balances

        def settled(delivery: Delivery) -> Prices:
            mixed = delivery.mix("price")
            prices = (told + mixed[..., :1]) / 2
            balances = None if means is None else mixed[..., 1:] - losses
            return Prices(losses, prices, prices - raised, weights, balances)

        return Weighed(weights, {"price": plain(told if means is None else torch.cat([told, means], dim=-1))}, settled)


@dataclass(frozen=True)
class PriorWeights(Weighting):
    """Every node weighs what the prior gives it: not robust."""

    keeps_rows: ClassVar[bool] = False

    def check(self, regularizer: Regularizer, prior: Tensor) -> None:
        pass

    def init(self, oracle: Oracle, network: Network) -> None:
        return None

    def weigh(self, state: None, losses: Tensor, regularizer: Regularizer, ctx: Round) -> Weighed:
        return Weighed(prior_weights(ctx), {}, lambda delivery: None)


register(
    Weighting,
    {
        "projected-ascent": ProjectedAscent,
        "exact-maximum": ExactMaximum,
        "shadow-price": ShadowPrice,
        "prior-weights": PriorWeights,
    },
)
