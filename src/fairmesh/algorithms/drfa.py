"""DRFA: distributionally robust federated averaging, with a server.

Deng, Kamani, Mahdavi: Distributionally Robust Federated Averaging, NeurIPS 2020, Algorithm 1.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from fairmesh.algorithms.base import Round
from fairmesh.algorithms.schedules import Measured, Schedule
from fairmesh.algorithms.server import AscentState, ServerAscent, by_position, drawn_uniformly, number_of
from fairmesh.algorithms.settings import STRUCTURAL
from fairmesh.config.ranges import Count, UpToOne, Within
from fairmesh.regularizers.simplex import project_onto_simplex

_Floor = Annotated[float, Within("[0, 1)", "it is the smallest weight of a client")]


@dataclass(frozen=True)
class DRFA(ServerAscent):
    """DRFA: distributionally robust federated averaging, with a server.

    In a round, clients drawn by the weights lambda take local SGD steps from the server's model. They return their
    model and a snapshot of it at a random step, and the server averages both. Clients drawn uniformly then evaluate
    the averaged snapshot, and lambda ascends their losses:

        lambda <- P(lambda + eta_lambda tau f(snapshot))

    One round is `local_steps` iterations of the decentralized algorithms. The topology is not used. The published runs
    of the AD-GDA paper used `ascends = "error"`, `probed = "everyone"` and `floor = 1e-5`.

    Args:
        primal_step: eta, a number >= 0 or a schedule by rounds: the learning rate of the local steps. Default:
            Measured(factor=2.0), which the run chooses before round 0 and which falls to 0 at its end.
        dual_step: eta_lambda, a number >= 0 or a schedule by rounds, per local step; the DRFA paper calls it gamma.
            Default: 0.008.
        participation: The share of the clients that is drawn, in (0, 1], for the local steps and for the evaluation;
            at least one client is. Default: 0.5.
        local_steps: tau, local steps per round, >= 1. Default: 10.
        ascends: What lambda ascends: the "loss" or the 0-1 "error". Default: "loss".
        probed: Who evaluates the snapshot: the clients "drawn" for it, or "everyone". Default: "drawn".
        floor: Smallest weight of a client, in [0, 1), before all are scaled to sum to one. Default: 0.0.
        repeats: Whether a client may be drawn several times per round, and count as often. Without repeats, the few
            worst clients among many drawn count little. Default: True.
        optimizer: What each node makes of its gradients, such as `fm.optimizers.AdamW()`; None for SGD. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.algorithms.DRFA(participation=0.5, local_steps=2)
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), algorithm, rounds=5)
        >>> fm.run(experiment).rounds
        5

    References:
        Deng, Kamani, Mahdavi: Distributionally Robust Federated Averaging, NeurIPS 2020, Algorithm 1.
    """

    primal_step: Schedule | float = field(default_factory=lambda: Measured(factor=2.0))
    dual_step: Schedule | float = 8e-3
    participation: UpToOne = field(default=0.5, metadata=STRUCTURAL)
    local_steps: Count = 10
    ascends: Literal["loss", "error"] = "loss"
    probed: Literal["drawn", "everyone"] = "drawn"
    floor: _Floor = 0.0
    repeats: bool = True

    def oracle_calls(self) -> int:
        return self.local_steps + 1

    def step(self, state: AscentState, ctx: Round) -> AscentState:
        count = number_of(self.participation, ctx.n)
        order = ctx.by_identity
        duals, draws = state.duals.index_select(-1, order), ctx.server_draws("clients")
        if self.repeats:
            drawn = _drawn_by(duals, draws.uniforms(count))
        else:
            drawn = _drawn_once_by(duals, draws.uniforms(ctx.n), count)
        shares = by_position(drawn, order) / count  # (..., 1, n)
        snapshot_step = (ctx.server_draws("snapshot").uniforms(1) * self.local_steps).floor()  # (..., 1, 1)
        weights = ctx.hosted(shares)  # (..., nodes)
        models = ctx.broadcast(state.models, weights > 0)
        snapshots = models
        for call in range(self.local_steps):
            _, gradients = ctx.losses_and_gradients(models, call)
            models = models.addcmul(gradients, ctx.step_size(self.primal_step), value=-1)
            snapshots = torch.where(snapshot_step == call, models, snapshots)
        model, snapshot = ctx.average(models, weights), ctx.average(snapshots, weights)

        probes = ctx.n if self.probed == "everyone" else count
        chosen = drawn_uniformly(ctx.server_draws("probe").uniforms(ctx.n), probes)
        probed = by_position(chosen, order)  # (..., 1, n)
        asked = ctx.hosted(probed)
        at = ctx.broadcast(snapshot, asked > 0)
        values = (ctx.losses if self.ascends == "loss" else ctx.errors)(at, self.local_steps)
        estimates = ctx.report(values, asked > 0) * probed * (ctx.n / probes)  # unbiased for all clients' values
        ascent = ctx.step_of_weights(ctx.step_size(self.dual_step)) * self.local_steps
        duals = project_onto_simplex(state.duals + ascent * estimates).clamp(min=self.floor)
        return AscentState(model, duals / duals.sum(dim=-1, keepdim=True))


def _drawn_by(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Returns how often each entry is drawn, by its weight, with replacement: (..., 1, n)."""
    cumulative = weights.cumsum(dim=-1)
    cumulative = cumulative / cumulative[..., -1:]
    drawn = torch.searchsorted(cumulative.contiguous(), uniforms.contiguous(), right=True)
    drawn = drawn.clamp(max=weights.shape[-1] - 1)
    return torch.zeros_like(weights).scatter_add(-1, drawn, torch.ones_like(uniforms))


def _drawn_once_by(weights: Tensor, uniforms: Tensor, count: int) -> Tensor:
    """Returns 1 at `count` entries drawn one after another by weight, without replacement, and 0 elsewhere.

    Each entry has an exponential clock whose rate is its weight; those that ring first are drawn."""
    clocks = -uniforms.clamp(min=1e-12).log() / weights.clamp(min=1e-30)
    return torch.zeros_like(weights).scatter(-1, clocks.argsort(dim=-1, stable=True)[..., :count], 1.0)
