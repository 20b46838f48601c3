"""The base class of algorithms: configured objects that turn the state of one round into that of the next."""

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fairmesh.algorithms.optimizers import Optimizer
from fairmesh.algorithms.round import Round
from fairmesh.algorithms.schedules import Schedule, as_schedule, with_curvature
from fairmesh.compression.compressors import Compressor
from fairmesh.errors import BadInput
from fairmesh.networks.base import Network
from fairmesh.networks.base import plain as plain
from fairmesh.networks.bounds import Content
from fairmesh.problems.oracle import Oracle
from fairmesh.regularizers.base import Regularizer


class GossipSettings(NamedTuple):
    """The compressor and the consensus step of an algorithm, for messages about what to lower."""

    compressor: Compressor
    consensus_step: float | None  # None: found by the run


class Sent(NamedTuple):
    """One part of the message that a node sends to each neighbour in a round."""

    name: str  # as in `ctx.exchange(name=...)`
    content: Content = "vectors"  # which show gradients; weights and losses show how well a site is served
    compressor: Compressor | None = None  # None if its numbers travel as they are
    followed: bool = False  # the change of something that receivers keep a copy of


class AtStart(NamedTuple):
    """What is measured before round 0, at the initial model and on the first batches: a number for every node of every
    replica, since all of them use the same steps."""

    n: int  # nodes of a replica
    prior: Tensor  # p
    losses: Tensor  # that weights follow
    slopes: Tensor  # norms of the gradients
    curvatures: Tensor  # how much a gradient changes per unit of change of the model, at most
    bounded: bool = False  # gradients are, as those of cross-entropy: a step that is too long does not run away

    @property
    def leeway(self) -> float:
        """Returns how much longer steps may be than the curvature at the start allows: that of cross-entropy falls, and
        an overshoot does not grow."""
        return 2.0 if self.bounded else 1.0

    @property
    def shares(self) -> Tensor:
        """Returns n p_i of each node: 1 if all sites have equal size."""
        return self.n * self.prior

    @property
    def mean_loss(self) -> float:
        """Returns the mean of the losses, weighted by the prior."""
        return float((self.prior * self.losses).sum() / self.prior.sum())


class Algorithm(ABC):
    """A training algorithm, written once over a stack of nodes.

    A minimal algorithm is a frozen dataclass with `init` and `step`. `init` returns the state before round 0, `step`
    returns the state after a round; neither changes anything else. A state is a NamedTuple of tensors with a field
    `models`, (..., nodes, dim), or (..., 1, dim) where a server holds the model. Other fields declare what they are by
    the annotations of `fairmesh.networks.roles`. The remaining methods have defaults that suit most algorithms.

    Attributes:
        needs_server: Nodes send to a server instead of to their neighbours. Default: False.
        sends: Nodes send messages. Default: True.
        copies_at_peak: How many copies of all models a round holds at most, for the memory estimate. Default: 12.

    Example:
        >>> import fairmesh as fm
        >>> fm.algorithms.DSGD(primal_step=0.1).steps()
        {'primal_step': Constant(value=0.1)}

        `docs/howto/extending.md` writes an algorithm from scratch.
    """

    needs_server: ClassVar[bool] = False
    sends: ClassVar[bool] = True
    copies_at_peak: ClassVar[int] = 12  # tests/contracts/test_memory.py checks it for the built-in algorithms

    @abstractmethod
    def init(self, oracle: Oracle, network: Network) -> Any:
        """Returns the state before the first round.

        Args:
            oracle: Losses, gradients and initial models of the hosted nodes.
            network: The graph and its hosted nodes.
        """

    @abstractmethod
    def step(self, state: Any, ctx: Round) -> Any:
        """Returns the state after one more round.

        Args:
            state: The state before the round.
            ctx: The round: the nodes' data, random numbers and neighbours.
        """

    def check(self, prior: Tensor, dim: int) -> None:  # noqa: B027
        """Raises BadInput for settings that cannot work for nodes with this prior (n,) and models of this size."""

    def oracle_calls(self) -> int:
        """Returns how many different batches a node looks at per round. Default: the field `local_steps`, or else 1."""
        return getattr(self, "local_steps", 1)

    def steps(self) -> dict[str, Schedule | float]:
        """Returns the step sizes by their field names, for messages about what to lower. Default: all schedules."""
        fields = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        values = {field.name: getattr(self, field.name) for field in fields}
        return {name: value for name, value in values.items() if isinstance(value, Schedule)}

    def measured(self, start: AtStart) -> "Algorithm":
        """Returns the algorithm with the numbers that it leaves to the run, by what is measured before round 0."""
        return with_steps(self, start, start.curvatures)

    def with_fixed_weights(self) -> "Algorithm | None":
        """Returns the same algorithm with the weights of the prior, if it has others. Default: None."""
        return None

    def keeps_prior_weights(self) -> bool:
        """Returns whether sites have the weights of their prior, so that subgroups that span them can be weighed.
        Default: False."""
        return False

    def uses_losses(self) -> bool:
        """Returns whether a step depends on the nodes' losses, which cost a private run something. Default: True."""
        return True

    def discounts_noise(self) -> bool:
        """Returns whether `Objective(discount_noise=True)` works with the algorithm. Default: False."""
        return False

    def keeps_node_rows(self) -> bool:
        """Returns whether every node holds a number for every node, for the memory estimate. Default: False."""
        return False

    def gossip_settings(self) -> GossipSettings | None:
        """Returns the compressor and the consensus step, if the algorithm gossips compressed differences. A step of
        None is chosen by the run. Default: the fields `compressor` and `consensus_step`, or else None."""
        if not (hasattr(self, "compressor") and hasattr(self, "consensus_step")):
            return None
        return GossipSettings(self.compressor, self.consensus_step)  # type: ignore[attr-defined]

    def message(self) -> tuple[Sent, ...] | None:
        """Returns the parts of the message that a node sends to each neighbour in every round: what the operator of a
        site reads before the site takes part. None if only the code of `step` knows. Default: None, or nothing if the
        algorithm sends nothing to neighbours. `fm.testing.check_algorithm` compares it with what is sent."""
        return None if self.sends and not self.needs_server else ()

    def local_optimizer(self) -> Optimizer | None:
        """Returns what makes directions of gradients; None for the gradients themselves. Default: `self.optimizer`."""
        return getattr(self, "optimizer", None)


A = TypeVar("A", bound=Algorithm)


def with_steps(algorithm: A, start: AtStart, curvatures: Tensor) -> A:
    """Returns the algorithm with the steps that it leaves to the run; as it is where the loss has no curvature.

    Args:
        algorithm: The algorithm.
        start: What is measured before round 0.
        curvatures: The curvature that a unit of the step meets at each node: that of the node's loss, times what the
            algorithm multiplies its gradient with.
    """
    curvature = float(curvatures.max()) / start.leeway
    return with_curvature(algorithm, curvature) if 0 < curvature < torch.inf else algorithm


def unmeasured(algorithm: Algorithm) -> list[str]:
    """Returns the fields of an algorithm whose numbers the run measures before round 0."""
    return [field.name for field in _fields(algorithm) if _is_open(field, getattr(algorithm, field.name))]


def could_be_measured(algorithm: Algorithm) -> list[str]:
    """Returns the fields with schedules whose numbers the run would measure if they were left out."""
    found = []
    for field in _fields(algorithm):
        default = field.default_factory() if callable(field.default_factory) else None
        if (
            isinstance(default, Schedule)
            and default.unmeasured
            and type(getattr(algorithm, field.name)) is not type(default)
        ):
            found.append(field.name)
    return found


def _fields(algorithm: Algorithm) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(algorithm) if dataclasses.is_dataclass(algorithm) else ()


def _is_open(field: dataclasses.Field, value: Any) -> bool:
    return value.unmeasured if isinstance(value, Schedule) else value is None and bool(field.metadata.get("measured"))


def prior_rows(oracle: Oracle, network: Network) -> Tensor:
    """Returns p at every hosted node, lambda before the first round: (..., nodes, n)."""
    return oracle.prior.expand(-1, len(network.hosted), -1).clone()


def prior_weights(ctx: Round) -> Tensor:
    """Returns n p_i of each hosted node, (..., nodes, 1): 1 if all sites have equal size."""
    return (ctx.n * ctx.hosted(ctx.prior)).unsqueeze(-1)


def capped(losses: Tensor, cap: float | None) -> Tensor:
    """Returns losses clipped at the cap, if there is one; a loss that is not finite counts as the cap."""
    return losses if cap is None else torch.where(losses.isfinite() & (losses < cap), losses, cap)


def fresh_share(beta: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """Returns 1 - beta, the weight of the new value in an exponential moving average that remembers a share beta.

    Rounded to 12 decimals, so that 0.9 gives the float nearest to 0.1."""
    if isinstance(beta, Tensor):
        return (1.0 - beta).round(decimals=12).to(dtype)
    return round(1.0 - beta, 12)


def check_dual_step(
    dual_step: Schedule | float, regularizer: Regularizer, prior: Tensor, name: str = "dual_step", times: int = 1
) -> None:
    """Raises BadInput if the dual step is too long to be stable; alpha is `times` that of the objective."""
    regularizer.check(prior)
    first = float(as_schedule(dual_step).at(torch.zeros((), dtype=torch.int64)))
    bound = times * regularizer.max_stable_dual_step(prior)
    if first > bound:
        raise BadInput(
            f"{name} {first:g} is beyond the stable range of {regularizer} with smallest prior "
            f"{float(prior.min()):.3g}: use at most {bound:.3g}, or a smaller strength"
        )
