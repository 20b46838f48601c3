"""What algorithms with a server share: which clients take part, their local steps, and the server's step."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import STRUCTURAL, Round
from fairmesh.algorithms.optimizers import Optimizer
from fairmesh.algorithms.steps import Moved, ScaledSteps, check_local_steps, coordinate_steps
from fairmesh.errors import BadInput
from fairmesh.networks.base import Network
from fairmesh.networks.roles import Duals, Models
from fairmesh.problems.oracle import Oracle


class ServerState(NamedTuple):
    models: Models  # the server's (..., 1, dim)
    momenta: Tensor  # (..., 1, dim)
    squares: Tensor | None  # mean squares of the momenta (..., 1, dim)
    duals: Duals | None  # lambda (..., 1, n), if clients are weighed by their losses


@dataclass(frozen=True)
class ServerSteps(ScaledSteps):
    """An algorithm whose server holds the model and takes the steps of `ScaledSteps`.

    Args:
        primal_step: As in `ScaledSteps`.
        beta1: As in `ScaledSteps`, at the server.
        beta2: As in `ScaledSteps`, at the server.
    """

    needs_server: ClassVar[bool] = True
    weighs: ClassVar[bool] = False  # whether clients are weighed by their losses

    def init(self, oracle: Oracle, network: Network) -> ServerState:
        models = oracle.initial_models()[..., :1, :].clone()
        return ServerState(*self.at_rest(models), oracle.prior.clone() if self.weighs else None)

    def server_step(
        self, state: ServerState, ctx: Round, direction: Tensor, times: int = 1, duals: Tensor | None = None
    ) -> ServerState:
        """Returns the state after the server's step along a mean gradient (..., 1, dim)."""
        before = Moved(state.models, state.momenta, state.squares)
        return ServerState(*self.moved(before, direction, ctx, times), duals)


@dataclass(frozen=True)
class LocalSteps(ServerSteps):
    """An algorithm whose clients take local steps from the server's model, as in `FedAvg`.

    Args:
        primal_step: As in `ScaledSteps`: the length of a round's step; if `beta2 = 0`, the learning rate of the local
            steps.
        beta1: As in `ServerSteps`.
        beta2: As in `ServerSteps`.
        local_steps: Local steps per round, >= 1. Default: 5.
        optimizer: What each client makes of the gradients of its local steps, such as `fm.optimizers.AdamW()`; None for
            SGD. Default: None.
    """

    local_steps: int = field(default=5, metadata=STRUCTURAL, kw_only=True)
    optimizer: Optimizer | None = field(default=None, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check_local_steps(self.local_steps)

    def oracle_calls(self) -> int:
        return self.local_steps

    def local_gradients(
        self, state: ServerState, ctx: Round, receivers: Tensor, pull: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns each client's loss at the server's model (..., nodes, 1), and its mean gradient along its local
        steps, each on a batch of its own (..., nodes, dim).

        The server's model is sent where `receivers` (..., nodes) is true. Steps that are scaled are scaled by the
        server's mean squares of earlier rounds, which it sends as well; before round 0 there are none, so clients stay
        where they are. With a `pull` mu, a step is a proximal one for mu / 2 times the squared distance to the server's
        model, which is stable for every mu; the mean gradient then contains the pull."""
        start = models = ctx.broadcast(state.models, receivers)
        losses, total = ctx.losses_and_gradients(models, 0)
        if self.local_steps == 1 and pull is None:
            return losses, total
        step = ctx.step_size(self.primal_step)
        if state.squares is not None:
            scaled = coordinate_steps(state.squares, self.beta2, step / self.local_steps, ctx.index)
            step = ctx.broadcast(torch.where(ctx.index > 0, scaled, 0.0), receivers)
        shrink = 1.0 if pull is None else 1.0 / (1.0 + step * pull)
        total = total * shrink
        for call in range(1, self.local_steps):
            models = start - step * total
            _, gradients = ctx.losses_and_gradients(models, call)
            total = (total + gradients) * shrink
        return losses, total / self.local_steps


def check_participation(participation: float) -> None:
    if not 0 < participation <= 1:
        raise BadInput(f"participation must be a share in (0, 1], got {participation}")


def followed_weights(state: ServerState, ctx: Round, found: Tensor) -> Tensor:
    """Returns lambda (..., 1, n): what was found in this round, or what is remembered once the problem's objective says
    that weights follow the losses no longer."""
    if state.duals is None:
        raise TypeError("the state has no weights")
    return state.duals + ctx.while_open(1.0) * (found - state.duals)


def participants(participation: float, ctx: Round) -> Tensor:
    """Returns p_i, scaled to sum to one, of the clients that take part, drawn uniformly, and 0 elsewhere:
    (..., 1, n)."""
    if participation == 1.0:
        return ctx.prior
    count = max(1, int(participation * ctx.n + 0.5))
    chosen = drawn_uniformly(ctx.server_draws("clients").uniforms(ctx.n), count)
    weights = ctx.prior * by_position(chosen, ctx.by_identity)
    return weights / weights.sum(dim=-1, keepdim=True)


def by_position(row: Tensor, order: Tensor) -> Tensor:
    """Returns a row over nodes, given in the order of their identities, in the order of their positions."""
    return torch.empty_like(row).index_copy_(-1, order, row)


def drawn_uniformly(uniforms: Tensor, count: int) -> Tensor:
    """Returns 1 at `count` entries drawn uniformly, without replacement, and 0 elsewhere."""
    chosen = uniforms.argsort(dim=-1, stable=True)[..., :count]
    return torch.zeros_like(uniforms).scatter(-1, chosen, 1.0)
