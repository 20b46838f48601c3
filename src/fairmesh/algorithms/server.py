"""What algorithms with a server share: which clients take part, their local steps, and the server's step."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm, AtStart, Round, with_steps
from fairmesh.algorithms.optimizers import Optimizer
from fairmesh.algorithms.schedules import Limited, Schedule, limited
from fairmesh.algorithms.settings import STRUCTURAL
from fairmesh.algorithms.steps import Moved, ScaledSteps, coordinate_steps
from fairmesh.config.ranges import Count
from fairmesh.networks.base import Network
from fairmesh.networks.roles import Duals, Models
from fairmesh.problems.oracle import Oracle


class ServerState(NamedTuple):
    models: Models  # the server's (..., 1, dim)
    momenta: Tensor  # (..., 1, dim)
    squares: Tensor | None  # mean squares of the momenta (..., 1, dim)
    duals: Duals | None  # lambda (..., 1, n), if clients are weighed by their losses


class AscentState(NamedTuple):
    models: Models  # the server's w (..., 1, dim)
    duals: Duals  # the server's lambda (..., 1, n)


@dataclass(frozen=True)
class ServerSteps(ScaledSteps):
    """An algorithm whose server holds the model and takes the steps of `ScaledSteps`.

    Args:
        primal_step: As in `ScaledSteps`.
        beta1: As in `ScaledSteps`, at the server.
        beta2: As in `ScaledSteps`, at the server.
    """

    needs_server: ClassVar[bool] = True

    def init(self, oracle: Oracle, network: Network) -> ServerState:
        return ServerState(*self.at_rest(oracle.initial_models()[..., :1, :].clone()), None)

    def server_step(
        self, state: ServerState, ctx: Round, direction: Tensor, times: int = 1, duals: Tensor | None = None
    ) -> ServerState:
        """Returns the state after the server's step along a mean gradient (..., 1, dim)."""
        before = Moved(state.models, state.momenta, state.squares)
        return ServerState(*self.moved(before, direction, ctx, times), duals)


@dataclass(frozen=True)
class LocalSteps(ServerSteps):
    """FedAvg, and what differs from it by a few lines: clients take local steps from the server's model.

    Args:
        primal_step: As in `ScaledSteps`: the length of a round's step; if `beta2 = 0`, the learning rate of the local
            steps. Default: Limited(0.7, power=3.0).
        beta1: As in `ServerSteps`.
        beta2: As in `ServerSteps`.
        local_steps: Local steps per round, >= 1. Default: 5.
        optimizer: What each client makes of the gradients of its local steps, such as `fm.optimizers.AdamW()`; None for
            SGD. Default: None.
    """

    primal_step: Schedule | float = field(default_factory=lambda: Limited(0.7, power=3.0))
    local_steps: Count = field(default=5, metadata=STRUCTURAL, kw_only=True)
    optimizer: Optimizer | None = field(default=None, kw_only=True)

    emphasis: ClassVar[str] = ""  # the field by which large losses count more, if there is one; at 0, none does

    def uses_losses(self) -> bool:
        return bool(self.emphasis)

    def measured(self, start: AtStart) -> "LocalSteps":
        chosen = with_steps(self, start._replace(bounded=False), start.curvatures)  # scaled local steps have no leeway
        step = chosen.primal_step
        if self.beta2 or not isinstance(step, Limited) or step.limit is None:
            return chosen
        return replace(chosen, primal_step=replace(step, start=min(step.start, step.limit)))  # a learning rate, too

    def with_fixed_weights(self) -> "LocalSteps | None":
        if not self.emphasis or getattr(self, self.emphasis) == 0:
            return None
        return replace(self, **{self.emphasis: 0.0})

    def init(self, oracle: Oracle, network: Network) -> ServerState:
        state = super().init(oracle, network)
        return state._replace(duals=oracle.prior.clone()) if self.emphasis else state

    def step(self, state: ServerState, ctx: Round) -> ServerState:
        weights, duals = self.taking_part(ctx), None
        clients = ctx.hosted(weights) > 0
        losses, gradients = self.local_gradients(state, ctx, clients)
        if state.duals is not None:
            losses = ctx.report(losses, clients)
            followed = (self.emphasized(losses) + ctx.prior.log()).softmax(dim=-1)
            weights = duals = state.duals + ctx.step_of_weights(1.0) * (followed - state.duals)
        direction = self.shortened(ctx.average(gradients, ctx.hosted(weights)), gradients, losses, weights, ctx)
        return self.server_step(state, ctx, direction, self.local_steps, duals)

    def taking_part(self, ctx: Round) -> Tensor:
        """Returns p_i, scaled to sum to one, of the clients that take part in a round, and 0 elsewhere: (..., 1, n).
        Default: all do."""
        return ctx.prior

    def emphasized(self, losses: Tensor) -> Tensor:
        """Returns log(lambda_i / p_i), up to a constant, from the losses of all clients (..., 1, n). Only algorithms
        with an `emphasis` have it."""
        raise NotImplementedError(f"{type(self).__name__} has an emphasis, but does not say how weights follow losses")

    def shortened(self, direction: Tensor, gradients: Tensor, losses: Tensor, weights: Tensor, ctx: Round) -> Tensor:
        """Returns the direction (..., 1, dim) of the server's step. Default: the mean gradient as it is."""
        return direction

    def pull(self) -> float | Tensor | None:
        """Returns mu, if local steps contain mu / 2 times the squared distance to the server's model. Each is then a
        proximal step, which is stable for every mu, and the mean gradient contains the pull. Default: None."""
        return None

    def local_gradients(self, state: ServerState, ctx: Round, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each client's loss at the server's model (..., nodes, 1), and its mean gradient along its local
        steps, each on a batch of its own (..., nodes, dim).

        The server's model is sent to the `clients` (..., nodes). Steps that are scaled are scaled by the server's mean
        squares of earlier rounds, which it sends as well; before round 0 there are none, so clients stay where they
        are."""
        pull = self.pull()
        start = models = ctx.broadcast(state.models, clients)
        losses, total = ctx.losses_and_gradients(models, 0)
        if self.local_steps == 1 and pull is None:
            return losses, total
        step = ctx.step_size(self.primal_step)
        if state.squares is not None:
            scaled = coordinate_steps(state.squares, self.beta2, step / self.local_steps, ctx.index)
            step = ctx.broadcast(torch.where(ctx.index > 0, limited(scaled, self.primal_step), 0.0), clients)
        shrink = 1.0 if pull is None else 1.0 / (1.0 + step * pull)
        total = total * shrink
        for call in range(1, self.local_steps):
            models = start - step * total
            _, gradients = ctx.losses_and_gradients(models, call)
            total = (total + gradients) * shrink
        return losses, total / self.local_steps


@dataclass(frozen=True)
class ServerAscent(Algorithm):
    """An algorithm whose server ascends the weights of clients along their losses.

    Args:
        primal_step: The learning rate.
        dual_step: How much a unit of loss raises a weight.
        optimizer: What each node makes of its gradients.
    """

    primal_step: Schedule | float
    dual_step: Schedule | float
    optimizer: Optimizer | None = field(default=None, kw_only=True)

    needs_server: ClassVar[bool] = True

    def with_fixed_weights(self) -> "ServerAscent":
        return replace(self, dual_step=0.0)

    def init(self, oracle: Oracle, network: Network) -> AscentState:
        return AscentState(oracle.initial_models()[..., :1, :].clone(), oracle.prior.clone())


def number_of(share: float, clients: int) -> int:
    """Returns how many clients a share of them is, at least one."""
    return max(1, int(share * clients + 0.5))


def by_position(row: Tensor, order: Tensor) -> Tensor:
    """Returns a row over nodes, given in the order of their identities, in the order of their positions."""
    return torch.empty_like(row).index_copy_(-1, order, row)


def drawn_uniformly(uniforms: Tensor, count: int) -> Tensor:
    """Returns 1 at `count` entries drawn uniformly, without replacement, and 0 elsewhere."""
    chosen = uniforms.argsort(dim=-1, stable=True)[..., :count]
    return torch.zeros_like(uniforms).scatter(-1, chosen, 1.0)
