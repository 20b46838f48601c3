"""Ways to find the nodes' weights lambda with one message per round. Public as `fm.weighting`.

All work in the units of g(theta, lambda) = sum_i lambda_i f_i(theta) + alpha r(lambda), n times the paper's objective.
In these units neither a good alpha nor a good step depends on the number of nodes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import Round, Sent, check_dual_step, fresh_share, plain, prior_rows, prior_weights
from fairmesh.algorithms.gossip import PublicCopies, gossiped_rows, zero_copies
from fairmesh.algorithms.schedules import Polynomial, Schedule
from fairmesh.algorithms.settings import EXACT, STRUCTURAL
from fairmesh.compression.compressors import Compressor
from fairmesh.config.ranges import Memory, Within
from fairmesh.config.tables import register
from fairmesh.errors import BadInput
from fairmesh.networks.base import Delivery, Network, Part
from fairmesh.networks.roles import OVER_NODES, Common, Duals, OwnWeights, Role, SumsToZero
from fairmesh.problems.objective import beyond_chance, counted_losses
from fairmesh.problems.oracle import Oracle
from fairmesh.regularizers.base import Regularizer
from fairmesh.regularizers.builtin import check_priced, ratio_at

__all__ = ["ExactMaximum", "PriorWeights", "ProjectedAscent", "ShadowPrice", "Weighed", "Weighting"]


class Weighed(NamedTuple):
    """What `Weighting.weigh` returns: the weights of a round, and what to send to the neighbours.

    Args:
        weights: n lambda_i of each hosted node, (..., nodes, 1), 1 on average.
        parts: What goes into the message to the neighbours, by name.
        settled: A function of the delivery, which returns the weighting's state after the exchange.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.weighting.Weighed(torch.ones(1, 4, 1), {}, lambda delivery: None).parts
        {}
    """

    weights: Tensor
    parts: dict[str, Part]
    settled: Callable[[Delivery], Any]


class Weighting(ABC):
    """Base class of the ways in which `TrackedADGDA` finds the nodes' weights lambda.

    `init` returns the state before round 0. `weigh` returns the weights of a round. A state that holds lambda calls it
    `duals`, (..., nodes, n).

    Example:
        >>> import fairmesh as fm
        >>> fm.TrackedADGDA(weighting=fm.weighting.PriorWeights()).weighting
        PriorWeights()
    """

    keeps_rows: ClassVar[bool] = False  # every node holds a number for every node

    @property
    def discounts_noise(self) -> bool:
        """Whether `Objective(discount_noise=True)` works with this weighting. Default: False."""
        return False

    def message(self) -> tuple[Sent, ...] | None:
        """Returns what `weigh` sends, as in `Algorithm.message`. Default: None, which says that only its code knows."""
        return None

    @abstractmethod
    def check(self, regularizer: Regularizer, prior: Tensor) -> None:
        """Raises BadInput if the regularizer cannot be used with this weighting."""

    @abstractmethod
    def init(self, oracle: Oracle, network: Network) -> Any:
        """Returns the state before the first round."""

    @abstractmethod
    def weigh(self, state: Any, losses: Tensor, regularizer: Regularizer, ctx: Round) -> Weighed:
        """Returns the weights of a round, what to send, and how the state follows from the delivery.

        Args:
            state: The weighting's own state.
            losses: The hosted nodes' losses (..., nodes, 1).
            regularizer: The regularizer of the run.
            ctx: The round.
        """


class Rows(NamedTuple):
    """Each node's estimate of all weights: a row with one coordinate per node."""

    duals: Duals  # lambda_i (..., nodes, n)
    dual_copies: Annotated[PublicCopies | None, OVER_NODES]  # if rows travel compressed


def _of_own(rows: Tensor, ctx: Round) -> Tensor:
    """Returns n times each hosted node's own entry: (..., nodes, 1)."""
    return ctx.n * (rows * ctx.own).sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class ProjectedAscent(Weighting):
    """The weighting of AD-GDA: every node ascends its own loss, projects its row of weights, and gossips the row.

        lambda_i <- sum_j w_ij P(lambda_j + eta_lambda (f_j e_j + (alpha / n) grad r(lambda_j)))

    A message holds one number per node of the network.

    Args:
        step: eta_lambda, a number >= 0 or a schedule: how much a unit of loss raises a node's weight per round.
            Default: 0.01.
        compressor: What a node sends of its row, as compressed differences to public copies; None to send it as it is.
            Default: None.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.TrackedADGDA(weighting=fm.weighting.ProjectedAscent(step=0.05))
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), algorithm, rounds=5)
        >>> fm.run(experiment).weights().shape
        torch.Size([1, 4])

    References:
        Zecchin, Kountouris, Gesbert: Communication-Efficient Distributionally Robust Decentralized Learning, TMLR 2022.
    """

    step: Schedule | float = 0.01
    compressor: Compressor | None = None

    keeps_rows: ClassVar[bool] = True

    def message(self) -> tuple[Sent, ...]:
        return (Sent("dual", "weights", self.compressor, followed=self.compressor is not None),)

    def check(self, regularizer: Regularizer, prior: Tensor) -> None:
        check_dual_step(self.step, regularizer, prior, "weighting.step", times=prior.shape[-1])

    def init(self, oracle: Oracle, network: Network) -> Rows:
        duals = prior_rows(oracle, network)
        return Rows(duals, None if self.compressor is None else zero_copies(duals, network))

    def weigh(self, state: Rows, losses: Tensor, regularizer: Regularizer, ctx: Round) -> Weighed:
        slopes = losses * ctx.own + regularizer.gradient(state.duals, ctx.prior, ctx.own) / ctx.n
        allowed = partial(regularizer.project, prior=ctx.prior)
        duals = allowed(state.duals.addcmul(slopes, ctx.step_of_weights(ctx.step_size(self.step))))
        parts, arrived = gossiped_rows(duals, state.dual_copies, self.compressor, ctx, allowed)
        return Weighed(_of_own(state.duals, ctx), parts, lambda delivery: Rows(*arrived(delivery)))


class Tables(NamedTuple):
    """What a node knows of all nodes' losses."""

    duals: Duals  # lambda_i (..., nodes, n)
    losses: Tensor  # f_i as remembered (..., nodes, 1)
    dual_balances: Annotated[
        SumsToZero, OVER_NODES
    ]  # what gossip added to n f_i at the node's own coordinate: sums to zero over all nodes
    dual_copies: Annotated[PublicCopies | None, OVER_NODES]


_LARGE = 10  # times the mean share of the data; a larger site would make the price oscillate, so its step is shorter
_NO_LOSS = 1e-6  # the mean of all losses counts as at least this


@dataclass(frozen=True)
class ExactMaximum(Weighting):
    """Every node knows all losses by gossip and computes the exact inner maximum from them.

        lambda_i = argmax over the ambiguity set of sum_j lambda_j f_j + alpha r(lambda)

    Node i puts n f_i at its own coordinate of a row, so that the rows' average over the nodes is the table of all
    losses. Gossip tracks that average while the losses change. A message holds one number per node of the network.
    `Custom` regularizers are refused, since computing their inner maximum in every round takes too long.

    Args:
        loss_ema: Memory of the moving average of a node's loss, in [0, 1); 0 uses the loss of this round alone.
            Default: 0.9.
        compressor: What a node sends of its row, as compressed differences to public copies; None to send it as it is.
            Default: None.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.TrackedADGDA(weighting=fm.weighting.ExactMaximum(loss_ema=0.8))
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), algorithm, rounds=5)
        >>> fm.run(experiment).weights().shape
        torch.Size([1, 4])
    """

    loss_ema: Memory = field(default=0.9, metadata=EXACT)
    compressor: Compressor | None = None

    keeps_rows: ClassVar[bool] = True

    def message(self) -> tuple[Sent, ...]:
        return (Sent("dual", "losses", self.compressor, followed=self.compressor is not None),)

    def check(self, regularizer: Regularizer, prior: Tensor) -> None:
        if not regularizer.fast_maximiser:
            raise BadInput(
                f"ExactMaximum needs the inner maximum in every round, which takes too long for a "
                f"{type(regularizer).__name__} regularizer; use the weighting ProjectedAscent"
            )

    def init(self, oracle: Oracle, network: Network) -> Tables:
        duals = prior_rows(oracle, network)
        copies = None if self.compressor is None else zero_copies(duals, network)
        return Tables(duals, torch.zeros_like(duals[..., :1]), torch.zeros_like(duals), copies)

    def weigh(self, state: Tables, losses: Tensor, regularizer: Regularizer, ctx: Round) -> Weighed:
        losses = torch.lerp(state.losses, losses, ctx.step_of_weights(fresh_share(self.loss_ema, losses.dtype)))
        injected = ctx.n * losses * ctx.own
        rows = state.dual_balances + injected
        known = torch.where(ctx.own > 0, losses, rows)  # a node knows its own loss exactly
        duals = regularizer.maximiser(ctx.n * known, ctx.prior)
        parts, arrived = gossiped_rows(rows, state.dual_copies, self.compressor, ctx, content="losses")

        def settled(delivery: Delivery) -> Tables:
            mixed, copies = arrived(delivery)
            return Tables(duals, losses, mixed - injected, copies)

        return Weighed(_of_own(duals, ctx), parts, settled)


class Prices(NamedTuple):
    """The state of a ShadowPrice: a few numbers per node."""

    losses: Annotated[Tensor, Role(if_lost="means")]  # f_i as remembered (..., nodes, 1)
    prices: Common  # in units of the regularizer's softness (..., nodes, 1)
    balances: SumsToZero  # what gossip added to the prices last: sums to zero over all nodes (..., nodes, 1)
    weights: OwnWeights  # n lambda_i of the last round (..., nodes, 1)
    mean_balances: SumsToZero | None  # f_i plus this estimates the mean of all losses: sums to zero (..., nodes, 1)
    means: Common | None  # that estimate in the last round, if the objective discounts noise (..., nodes, 1)


_PriceStep = Annotated[float, Within("(0, 1]", "it is the step of a price, for which 0.1 is a good value")]


@dataclass(frozen=True)
class ShadowPrice(Weighting):
    """Finds the exact inner maximum by its shadow price, with one or two numbers per message for any number of nodes.

    With ChiSquare or KullbackLeibler, lambda_i follows from node i's loss and from one number that is common to all
    nodes: the price of the constraint sum_i lambda_i = 1. Each node raises its price while its weight exceeds its
    prior, and gossips it:

        lambda_i = p_i ratio(f_i / softness - price_i)
        price_i <- gossip of (price_i + step (n lambda_i - n p_i))

    Gossip alone would settle at a different price in every neighbourhood. Adding the last gossip correction again makes
    the common price the only fixed point (exact diffusion).

    Args:
        loss_ema: Memory of the moving average of a node's loss, in [0, 1); 0 uses the loss of this round alone.
            Default: 0.9.
        step: Step size of the price, in (0, 1]; at 1, a single node corrects its weight at once. Under KullbackLeibler
            it is too long for nodes that weigh more than 2 / step times their prior. Default: 0.1.
        relative: Whether losses count in units of their mean over all nodes, which is gossiped as a second number. Then
            alpha means the same for large losses, early in training, and for small ones. Losses must not be negative.
            Default: True.
        strength_annealing: a_t, a number >= 0 or a schedule: in round t, alpha is multiplied by 1 + a_t. Losses follow
            the weights only some rounds later, so sharp weights together with long steps make the model oscillate
            between sites. Default: Polynomial(30.0, power=3.0), which falls to 0 at the end of the run.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.TrackedADGDA(weighting=fm.weighting.ShadowPrice(loss_ema=0.95))
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), algorithm, rounds=5)
        >>> fm.run(experiment).weights().shape
        torch.Size([1, 4])

    References:
        Yuan, Ying, Zhao, Sayed: Exact Diffusion for Distributed Optimization and Learning, IEEE TSP 2019.
    """

    loss_ema: Memory = field(default=0.9, metadata=EXACT)
    step: _PriceStep = 0.1
    relative: bool = field(default=True, metadata=STRUCTURAL)
    strength_annealing: Schedule | float = field(default_factory=lambda: Polynomial(30.0, power=3.0))

    @property
    def discounts_noise(self) -> bool:
        return self.relative

    def message(self) -> tuple[Sent, ...]:
        return (Sent("price", "losses"),)

    def check(self, regularizer: Regularizer, prior: Tensor) -> None:
        check_priced(regularizer)

    def init(self, oracle: Oracle, network: Network) -> Prices:
        nothing = torch.zeros_like(prior_rows(oracle, network)[..., :1])
        hosted = oracle.prior.squeeze(-2).index_select(-1, network.hosted).unsqueeze(-1)
        balances = nothing.clone() if self.relative else None
        means = nothing.clone() if oracle.standard.discounts_noise else None
        return Prices(nothing, nothing.clone(), nothing.clone(), network.n * hosted, balances, means)

    def weigh(self, state: Prices, losses: Tensor, regularizer: Regularizer, ctx: Round) -> Weighed:
        losses = torch.lerp(state.losses, losses, ctx.step_of_weights(fresh_share(self.loss_ema, losses.dtype)))
        prior = prior_weights(ctx)  # n p_i
        counted = losses
        if state.means is not None:
            counted = counted_losses(losses, ctx.learnable_shares(losses), state.means)
        means = None if state.mean_balances is None else counted + state.mean_balances
        # The mean of n losses is at least 1 / n of each one; this bounds a node's estimate while gossip lags behind.
        units = counted if means is None else counted / torch.maximum(means, counted / ctx.n + _NO_LOSS)
        if state.means is not None:
            units = beyond_chance(units, ctx.judging_rows)
        weights = prior * ratio_at(regularizer, units / (1.0 + ctx.step_size(self.strength_annealing)), state.prices)
        step = self.step / (ctx.n * ctx.prior.amax(dim=-1, keepdim=True) / _LARGE).clamp(min=1.0)
        raised = state.prices + step * (weights - prior)
        sent = raised + state.balances

        def settled(delivery: Delivery) -> Prices:
            mixed = delivery.mix("price")
            prices = (sent + mixed[..., :1]) / 2
            balances = None if means is None else mixed[..., 1:] - counted
            return Prices(
                losses, prices, prices - raised, weights, balances, None if state.means is None else mixed[..., 1:]
            )

        row = sent if means is None else torch.cat([sent, means], dim=-1)
        return Weighed(weights, {"price": plain(row, "losses")}, settled)


@dataclass(frozen=True)
class PriorWeights(Weighting):
    """Every node keeps the weight of the prior: not robust.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.TrackedADGDA(weighting=fm.weighting.PriorWeights())
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), algorithm, rounds=5)
        >>> fm.run(experiment).weights() is None
        True
    """

    @property
    def discounts_noise(self) -> bool:
        return True  # there is nothing to discount

    def message(self) -> tuple[Sent, ...]:
        return ()

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
