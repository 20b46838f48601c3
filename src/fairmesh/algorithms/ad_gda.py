"""AD-GDA: agnostic decentralized gradient descent/ascent with compressed communication.

Zecchin, Kountouris, Gesbert: Communication-Efficient Distributionally Robust Decentralized Learning, TMLR 2022,
Algorithm 1.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal, NamedTuple

from torch import Tensor

from fairmesh.algorithms.base import Algorithm, AtStart, Round, Sent, capped, check_dual_step, prior_rows, with_steps
from fairmesh.algorithms.gossip import (
    PublicCopies,
    compressed_difference,
    gossip_step,
    gossiped_rows,
    steady_consensus_steps,
    updated_copies,
    zero_copies,
)
from fairmesh.algorithms.optimizers import Optimizer
from fairmesh.algorithms.schedules import Measured, Schedule, limited, two_digits
from fairmesh.algorithms.settings import STRUCTURAL
from fairmesh.algorithms.steps import descended
from fairmesh.compression.compressors import Compressor, Identity
from fairmesh.config.ranges import Count, Positive, UpToOne
from fairmesh.networks.base import Network
from fairmesh.networks.roles import OVER_NODES, ConsensusSteps, Duals, Models
from fairmesh.problems.oracle import Oracle
from fairmesh.regularizers.base import Regularizer
from fairmesh.regularizers.builtin import ChiSquare

_CONCENTRATED = 3.0  # how many times its prior a weight may be for a measured step


class ADGDAState(NamedTuple):
    models: Models  # theta_i (..., nodes, dim)
    duals: Duals  # lambda_i (..., nodes, n)
    copies: PublicCopies
    dual_copies: Annotated[PublicCopies | None, OVER_NODES]  # where duals travel compressed
    consensus_steps: ConsensusSteps | None = None  # gamma, if it is chosen by itself (..., nodes, 1)


@dataclass(frozen=True)
class ADGDA(Algorithm):
    """AD-GDA: agnostic decentralized gradient descent/ascent with compressed communication.

    Solves min_theta max_lambda (1/n) sum_i lambda_i f_i(theta) + alpha r(lambda) without a server. In every round each
    node descends its own loss, weighted by its own lambda_i[i], ascends in its estimate lambda_i of all weights, and
    gossips both:

        theta_i  <- theta_i - eta_theta lambda_i[i] grad f_i(theta_i) + gamma (sum_j w_ij x_hat_j - x_hat_i)
        x_hat_i  <- x_hat_i + Q(theta_i - x_hat_i)                                   sent to the neighbours
        lambda_i <- sum_j w_ij P(lambda_j + eta_lambda (f_j(theta_j) e_j + alpha grad r(lambda_j)))

    where the x_hat are public copies of the models and P projects onto the regularizer's ambiguity set.

    Args:
        primal_step: eta_theta, a number >= 0 or a schedule: the learning rate of the weighted gradient. lambda_i[i] is
            about 1 / n, so it is about n times the learning rate of SGD. Default: Measured(factor=4.0),
            which the run chooses before round 0 and which falls to 0 at its end; so that a weight far above its prior
            does not make it unstable, it limits the learning rate of a node.
        dual_step: eta_lambda, a number >= 0 or a schedule: how much a unit of loss raises a node's weight per round. At
            0 the weights stay at the prior. Steps that the regularizer makes unstable are refused. Default: 0.01.
        consensus_step: gamma in (0, 1], the share of its disagreement with the neighbours that a node removes per
            round; None to choose it from the compressor and the graph, 1 without compression. Default: None.
        compressor: Q, what a node sends of its model. Default: Identity(), no compression.
        regularizer: alpha r, how far the weights may move from the prior. Default: ChiSquare(), with alpha 0.01.
        dual_compressor: What a node sends of its weights, as compressed differences to public copies; None to send them
            uncompressed, as in the paper. Default: None.
        dual_order: Which weights the descent uses: "simultaneous" those before this round's ascent, "dual-first" those
            after it, as in the published runs. Default: "simultaneous".
        loss_cap: Largest loss, > 0, that the ascent sees of a node, which limits what a broken site attracts; None for
            no limit. Default: None.
        local_steps: Steps between two exchanges, >= 1, each of length eta_theta and on a batch of its own. Weights
            follow the loss at the first. Nothing corrects for how far the nodes' models drift apart meanwhile;
            `TrackedADGDA` does. Default: 1.
        optimizer: What each node makes of its gradients, such as `fm.optimizers.AdamW()`; None for SGD. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.ADGDA(primal_step=2.0, consensus_step=0.5, compressor=fm.compressors.Quantize(bits=4))
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), algorithm, rounds=10)
        >>> fm.run(experiment).weights().shape
        torch.Size([1, 4])

    References:
        Zecchin, Kountouris, Gesbert: Communication-Efficient Distributionally Robust Decentralized Learning, TMLR 2022,
        Algorithm 1.
    """

    primal_step: Schedule | float = field(default_factory=lambda: Measured(factor=4.0))
    dual_step: Schedule | float = 0.01
    consensus_step: UpToOne | None = None
    compressor: Compressor = field(default_factory=Identity)
    regularizer: Regularizer = field(default_factory=ChiSquare)
    dual_compressor: Compressor | None = None
    dual_order: Literal["simultaneous", "dual-first"] = "simultaneous"
    loss_cap: Positive | None = None
    local_steps: Count = field(default=1, metadata=STRUCTURAL, kw_only=True)
    optimizer: Optimizer | None = field(default=None, kw_only=True)

    def check(self, prior: Tensor, dim: int) -> None:
        check_dual_step(self.dual_step, self.regularizer, prior)

    def measured(self, start: AtStart) -> "ADGDA":
        at_most = (_CONCENTRATED * start.prior).clamp(max=1.0)  # of a weight
        chosen, largest = with_steps(self, start, at_most * start.curvatures), float(start.curvatures.max())
        if not isinstance(chosen.primal_step, Measured) or not 0 < largest < math.inf:
            return chosen
        limit = two_digits(start.leeway / largest)  # also where a weight is far above its prior
        return replace(chosen, primal_step=replace(chosen.primal_step, limit=limit))

    def keeps_node_rows(self) -> bool:
        return True

    def with_fixed_weights(self) -> "ADGDA":
        return replace(self, dual_step=0.0)

    def message(self) -> tuple[Sent, ...]:
        model = Sent("model", compressor=self.compressor, followed=True)
        return model, Sent("dual", "weights", self.dual_compressor, followed=self.dual_compressor is not None)

    def init(self, oracle: Oracle, network: Network) -> ADGDAState:
        models = oracle.initial_models()
        duals = prior_rows(oracle, network)
        dual_copies = None if self.dual_compressor is None else zero_copies(duals, network)
        steps = steady_consensus_steps(self.compressor, models, network) if self.consensus_step is None else None
        return ADGDAState(models, duals, zero_copies(models, network), dual_copies, steps)

    def step(self, state: ADGDAState, ctx: Round) -> ADGDAState:
        losses, gradients = ctx.losses_and_gradients(state.models)
        slopes = capped(losses, self.loss_cap) * ctx.own + self.regularizer.gradient(state.duals, ctx.prior, ctx.own)
        allowed = partial(self.regularizer.project, prior=ctx.prior)
        duals = allowed(state.duals.addcmul(slopes, ctx.step_of_weights(ctx.step_size(self.dual_step))))
        weighting = state.duals if self.dual_order == "simultaneous" else duals
        own_weights = (weighting * ctx.own).sum(dim=-1, keepdim=True)  # lambda_i[i]
        step = limited(ctx.step_size(self.primal_step) * own_weights, self.primal_step)
        models = descended(state.models, gradients, step, self.local_steps, ctx)
        del gradients
        gamma = state.consensus_steps if self.consensus_step is None else self.consensus_step
        models = gossip_step(models, state.copies, gamma, ctx)
        message = compressed_difference(models, state.copies, self.compressor, ctx)
        parts, arrived = gossiped_rows(duals, state.dual_copies, self.dual_compressor, ctx, allowed)
        delivery = ctx.exchange(model=message, **parts)
        duals, dual_copies = arrived(delivery)
        copies = updated_copies(state.copies, message, delivery, "model")
        return ADGDAState(models, duals, copies, dual_copies, state.consensus_steps)
