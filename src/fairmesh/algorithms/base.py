"""The base class of algorithms: configured objects that turn the state of one round into that of the next."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from fairmesh.algorithms.optimizers import Optimizer
from fairmesh.algorithms.own_parts import OwnState, initial_own_state, stepped
from fairmesh.algorithms.schedules import Schedule, as_schedule
from fairmesh.algorithms.subgroups import SubgroupRound, SubgroupState, initial_state
from fairmesh.compression.codes import Dense
from fairmesh.compression.compressors import FLOAT_BITS, Compressor
from fairmesh.errors import BadInput
from fairmesh.networks.base import Delivery, Network, Part, Traffic
from fairmesh.networks.bounds import Content
from fairmesh.networks.roles import Role
from fairmesh.numerics import random_streams
from fairmesh.numerics.layout import Layout
from fairmesh.numerics.random_streams import SERVER, Draw, SecretIdentities
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.problems.oracle import Oracle
from fairmesh.regularizers.base import Regularizer

EXACT = {"exact": True}  # metadata of a number that replicas stack in float64 in every run
STRUCTURAL = {"structural": True}  # metadata of a number on which shapes depend: equal in all replicas of a run


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
    def step(self, state: Any, ctx: "Round") -> Any:
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
        """Returns the step sizes by their field names, for messages about what to lower. Default: every schedule
        among the fields of the dataclass."""
        fields = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        values = {field.name: getattr(self, field.name) for field in fields}
        return {name: value for name, value in values.items() if isinstance(value, Schedule)}

    def with_fixed_weights(self) -> "Algorithm | None":
        """Returns the same algorithm with the weights of the prior, if it has others. Default: None."""
        return None

    def keeps_prior_weights(self) -> bool:
        """Returns whether sites have the weights of their prior, so that subgroups that span them can be weighed.
        Default: False."""
        return False

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
        """Returns what turns gradients into directions before the algorithm sees them; None for the gradients
        themselves. Default: the field `optimizer`, if the class has one."""
        return getattr(self, "optimizer", None)


TrainerMemory = Annotated[Tensor, Role(held_by="node", any_length=True)]


class Carried(NamedTuple):
    """What a run carries from round to round next to the algorithm's state. An algorithm sees nothing of it."""

    subgroups: SubgroupState | None = None  # of the hosted nodes, if they have weights
    own: OwnState | None = None  # what stays at each of the hosted nodes, if the model has such parts
    optimizer: Annotated[Any, Role(held_by="node")] = None  # the memory of each hosted node's optimizer, if it has any
    trainer: TrainerMemory | None = None  # what sites' own training functions keep, as bytes (replicas, nodes, length)


def carried_at_start(algorithm: Algorithm, oracle: Oracle) -> Carried:
    """Returns what a run of an algorithm carries before round 0."""
    optimizer = algorithm.local_optimizer()
    memory = None if optimizer is None else optimizer.init(oracle.initial_models())
    return Carried(initial_state(oracle), initial_own_state(oracle), memory, oracle.initial_memory())


class Companion:
    """A state next to the algorithm's that advances once with each batch of a round, at the nodes that take part.

    Args:
        state: The state before the round, a NamedTuple of tensors (..., nodes, any), or None."""

    def __init__(self, state: Any):
        self.state = state
        self._before: dict[int, Any] = {}

    def before(self, call: int) -> Any:
        """Returns the state with which a batch was seen first."""
        return self._before.get(call, self.state)

    def advance(self, call: int, after: Callable[[], Any], receivers: Tensor | None) -> None:
        """Takes over the state after a batch, the first time for each batch, at the `receivers` (..., nodes) of the
        server's model, or everywhere."""
        if call in self._before:
            return
        before = self._before[call] = self.state
        self.state = after()
        if receivers is not None and before is not None:
            chosen = receivers.unsqueeze(-1)
            self.state = type(before)(*(torch.where(chosen, new, old) for new, old in zip(self.state, before)))


class Round:
    """One round as an algorithm sees it: its number, the local data, the random streams, and the neighbours.

    An algorithm gets it as the argument `ctx` of `step`, and never makes one. `ctx.losses_and_gradients(models)`
    evaluates the nodes' losses, `ctx.step_size(schedule)` is a step size in this round, `ctx.draws(purpose)` gives
    random numbers, and `ctx.exchange(name=part)` sends one message to each neighbour. `ctx.index` is the round t,
    `ctx.n` the number of nodes, `ctx.prior` is p (..., 1, n), and `ctx.own` (nodes, n) is 1 at each hosted node's own
    coordinate.
    """

    def __init__(
        self,
        index: Tensor,
        oracle: Oracle,
        network: Network,
        round_cache: RoundCache | None = None,
        carried: Carried | None = None,
        optimizer: Optimizer | None = None,
    ):
        self.index = index  # t, a scalar tensor
        self._oracle, self._network, self._round_cache = oracle, network, round_cache or RoundCache()
        self.prior = oracle.prior  # p (..., 1, n)
        self.own = network.own  # (nodes, n) each hosted node's own coordinate
        self.n = network.n
        self.by_identity = network.by_identity  # (n,) so that a server's draws depend on identities, not on positions
        self.sent: list[Traffic] = []
        self._exchanged = False
        subgroups, own, memory, self._trainer_memory = carried or Carried()
        self._subgroups = None if subgroups is None else SubgroupRound(subgroups, oracle, prior_weights(self))
        self._own_parts = None if own is None else Companion(own)
        self._optimizer, self._optimizer_memory = optimizer, Companion(memory)
        self._trained = False
        self._receivers: Tensor | None = None  # nodes that have got the server's model in this round (..., nodes)

    def losses_and_gradients(self, models: Tensor, call: int = 0) -> tuple[Tensor, Tensor]:
        """Returns each node's loss and gradient on its batch: (..., nodes, 1) and (..., nodes, dim). With an optimizer,
        the gradients are the directions that it makes of them. With a trainer, they are the updates that the sites' own
        training functions make.

        Args:
            models: Where to evaluate, one row per hosted node: (..., nodes, dim).
            call: Which batch of the round to use, from 0 to `oracle_calls()` - 1. Asking for one call twice gives the
                same batch and the same random numbers, at other models too. So two gradients can be compared on one
                batch, as variance reduction needs it (examples/research/dm_hsgd.py).
        """
        rows = self._whole(models, call)
        if self._trainer_memory is not None:
            return self._losses_and_updates(rows, call)
        if self._subgroups is None:
            losses, gradients = self._oracle.losses_and_gradients(rows, self.index, call)
        else:
            losses, gradients, seen = self._oracle.by_subgroup(rows, self.index, call, self._subgroups.ratios)
            self._subgroups.saw(seen, self.while_open(1.0))
        if self._own_parts is not None:
            self._step_own_parts(self._own_parts, call, gradients[..., models.shape[-1] :])
            gradients = gradients[..., : models.shape[-1]]
        if self._optimizer is not None:
            memory = self._optimizer_memory
            gradients, after = self._optimizer.direction(memory.before(call), gradients, models, self.layout)
            memory.advance(call, lambda: after, self._receivers)
        return losses, gradients

    def _step_own_parts(self, own: Companion, call: int, gradients: Tensor) -> None:
        """Takes a step with the gradients of the own parts (..., nodes, own_dim), the first time for each batch."""
        own.advance(call, lambda: stepped(own.state, gradients, self._oracle), self._receivers)

    def _losses_and_updates(self, rows: Tensor, call: int) -> tuple[Tensor, Tensor]:
        """Returns losses, and the updates of the sites' own training functions in the place of gradients."""
        if self._trained:
            raise BadInput(
                "the algorithm asks for gradients more than once per round, but a trainer gives one update; use "
                "an algorithm or settings with one gradient per round"
            )
        memory, self._trained = cast(Tensor, self._trainer_memory), True
        work = self._oracle.trained(rows, self.index, call, memory, self._receivers)
        self._trainer_memory = work.memory
        if self._own_parts is not None:
            own_parts = self._own_parts.state._replace(rows=work.own)
            self._own_parts.advance(call, lambda: own_parts, self._receivers)
        return work.losses, work.updates

    def _whole(self, models: Tensor, call: int) -> Tensor:
        """Returns models with the nodes' own parts behind them, if they have any, as a batch is evaluated."""
        own = self._own_parts
        return models if own is None else torch.cat([models, own.before(call).rows], dim=-1)

    def losses(self, models: Tensor, call: int = 0) -> Tensor:
        """Returns each node's loss on its batch: (..., nodes, 1). Arguments as in `losses_and_gradients`."""
        return self._oracle.losses(self._whole(models, call), self.index, call)

    def errors(self, models: Tensor, call: int = 0) -> Tensor:
        """Returns each node's 0-1 error on its batch: (..., nodes, 1). Arguments as in `losses_and_gradients`."""
        return self._oracle.errors(self._whole(models, call), self.index, call)

    def sample_losses(self, models: Tensor, call: int = 0) -> Tensor:
        """Returns the loss of every sample of each node's batch: (..., nodes, samples). Arguments as in
        `losses_and_gradients`. Refused for models that are evaluated one by one."""
        return self._oracle.sample_losses(self._whole(models, call), self.index, call)

    def sample_gradients(self, models: Tensor, call: int = 0) -> Tensor:
        """Returns the gradient of every sample's loss: (..., nodes, samples, dim). Their mean is the batch's gradient
        without weight decay, clipping and optimizer. Arguments as in `losses_and_gradients`; refused as `sample_losses`
        is. Parts that stay at a node take a step with the mean of their gradients."""
        found = self._oracle.sample_gradients(self._whole(models, call), self.index, call)
        if self._own_parts is None:
            return found
        shared = models.shape[-1]
        self._step_own_parts(self._own_parts, call, found[..., shared:].mean(dim=-2))
        return found[..., :shared]

    @property
    def sizes(self) -> Tensor:
        """How many training rows each hosted node has, (..., nodes, 1)."""
        return self._oracle.sizes

    @property
    def all_sizes(self) -> Tensor:
        """How many training rows every node of the network has, (..., 1, n)."""
        return self._oracle.all_sizes

    @property
    def layout(self) -> Layout:
        """Names, shapes and places of the parameters in a row of `models`."""
        return self._oracle.model.layout

    def learnable_shares(self, losses: Tensor) -> Tensor:
        """Returns how much of each node's loss a model can lower, (..., nodes, 1) in [0, 1]."""
        return self._oracle.learnable_shares(losses)

    @property
    def rows_apart(self) -> Tensor:
        """How many rows judge each node that it does not train on, (..., nodes, 1)."""
        return self._oracle.rows_apart

    def while_open(self, step: Any) -> Any:
        """Returns a step of the weights while they follow the losses, and 0 once they only remember them, as the
        problem's objective says."""
        still = self._oracle.weights_open(self.index)
        return step if still is None else step * still

    def step_size(self, schedule: Schedule | float) -> Tensor:
        """Returns the schedule's value in this round, in the models' dtype: a scalar, or (replicas, 1, 1)."""
        what = id(schedule) if isinstance(schedule, Schedule) else float(schedule)
        schedule = as_schedule(schedule)

        def steps(rounds: Tensor) -> Tensor:
            return schedule.at(rounds[:, None, None, None]).to(dtype=self.own.dtype, device=self.own.device)

        return self._round_cache.at(("step", what), steps, self.index, schedule)

    def draws(self, purpose: str) -> Draw:
        """Returns the random numbers of each hosted node for one purpose: `.uniforms(count)` is (..., nodes, count)."""
        return self._draw("nodes", purpose, self._network.streams)

    def server_draws(self, purpose: str) -> Draw:
        """Returns a server's random numbers for one purpose: `.uniforms(count)` is (..., 1, count)."""
        return self._draw("server", purpose, torch.full((1,), SERVER, device=self.own.device))

    def _draw(self, whose: str, purpose: str, identities: Tensor | SecretIdentities) -> Draw:
        def keys(rounds: Tensor) -> Tensor:
            return random_streams.keys(self._oracle.seeds, purpose, rounds.unsqueeze(-1), identities)

        def ahead(count: int) -> Tensor:
            bits = partial(random_streams.sixteen_bits, count=count)
            return self._round_cache.at((whose, purpose, count), lambda rounds: bits(keys(rounds)), self.index)

        return Draw(self._round_cache.at((whose, purpose), keys, self.index), self.own.dtype, ahead)

    def exchange(self, **parts: Part) -> Delivery:
        """Sends one message, made of these parts, from each node to each of its neighbours; returns the delivery.

        Raises:
            BadInput: The round has sent its message already.
        """
        if self._exchanged:
            raise BadInput(
                "the algorithm calls ctx.exchange twice in a round, but a node sends one message per round, by whose "
                "number it is journalled and expected; send all parts in one call, or let the second part wait in the "
                "state for the next round"
            )
        self._exchanged = True
        table = None if self._subgroups is None else self._subgroups.to_send()
        if table is not None:
            parts["subgroups"] = plain(table, "losses")
        delivery = self._network.exchange(parts, self.index)
        self.sent.append(delivery.sent)
        if self._subgroups is not None and table is not None:
            self._subgroups.delivery = delivery
        return delivery

    def carried_after(self) -> Carried:
        """Returns what the run carries on after the round."""
        return Carried(
            None if self._subgroups is None else self._subgroups.after(),
            None if self._own_parts is None else self._own_parts.state,
            self._optimizer_memory.state,
            self._trainer_memory,
        )

    def hosted(self, row: Tensor) -> Tensor:
        """Returns the hosted nodes' entries (..., nodes) of a row over all nodes (..., 1, n)."""
        return row.squeeze(-2).index_select(-1, self._network.hosted)

    def mixed_copies(self, kept: Tensor) -> Tensor:
        """Returns s_i = sum_j w_ij x_hat_j from what each node keeps of its neighbours' copies: (..., nodes, dim)."""
        return self._network.mixed_copies(kept, self.index)

    def disagreement(self, own: Tensor, kept: Tensor) -> Tensor:
        """Returns sum_j w_ij (x_hat_j - x_hat_i) from a node's own copy and what it keeps of its neighbours' copies,
        (..., nodes, dim); clipped if the topology is."""
        return self._network.disagreement(own, kept, self.index)

    def broadcast(self, row: Tensor, receivers: Tensor) -> Tensor:
        """Returns a server's row (..., 1, dim) at every node; it is sent where `receivers` (..., nodes) is true."""
        self._receivers = receivers
        return self._counted(self._network.broadcast(row, receivers))

    def average(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returns sum_i weights[i] rows[i] at the server: (..., 1, dim). A node of weight zero sends nothing."""
        return self._counted(self._network.average(rows, weights))

    def pooled(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returns sum_i weights[i] rows[i], (..., 1, dim), where all data is in one place: nothing is sent."""
        return self._network.average(rows, weights)[0]

    def report(self, values: Tensor, senders: Tensor) -> Tensor:
        """Returns one number per node (..., 1, n) at the server; it is sent where `senders` (..., nodes) is true."""
        return self._counted(self._network.report(values, senders))

    def _counted(self, result: tuple[Tensor, Traffic]) -> Tensor:
        rows, sent = result
        self.sent.append(sent)
        return rows


def plain(rows: Tensor, content: Content = "vectors") -> Part:
    """Returns rows to be sent as they are, with 32 nominal bits per entry."""
    return Part(Dense(rows), FLOAT_BITS * rows.shape[-1], content=content)


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
