"""AAggFF-S: the server decides on the weights of its clients as an investor decides on shares, by online Newton steps.
Checked, and compared with FedAvg.

Hahn, Kim, Lee: Pursuing Overall Welfare in Federated Learning through Sequential Decision Making, ICML 2024.

python examples/research/aaggff.py
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

import fairmesh as fm
from fairmesh.algorithms import Limited, LocalSteps, Positive, ServerState, by_position

_ITERATIONS = 40  # of the decision's minimisation, which starts at the decision before
_LEAST = 1e-10  # of a mean loss

Response = Literal["weibull", "exponential", "frechet", "normal", "gumbel", "logistic"]


class DecisionState(NamedTuple):
    server: ServerState
    slopes: Annotated[Tensor, fm.roles.OVER_NODES]  # linear part of what decisions minimise (replicas, 1, nodes)
    curvatures: fm.roles.HeldByAll  # sum of g g^T, in the order of identities (replicas, nodes, nodes)


@dataclass(frozen=True)
class AAggFFS(LocalSteps):
    """AAggFF for few clients that all take part (cross-silo). Clients take the local steps of FedAvg, and the server
    averages their updates with weights that are decisions lambda_t on the simplex. The loss of a decision is
    -log(1 + <lambda, r>), with responses r_i = F(f_i / mean of f) / n in [0, 1 / n], where f_i is the client's loss at
    the server's model and F a distribution function. With g_t its gradient at lambda_t, the next decision minimises

        sum_t <g_t, lambda> + damping / 2 |lambda|^2 + n / 8 sum_t <g_t, lambda - lambda_t>^2

    which is an online Newton step. In the paper its constants are 4 K L and 1 / (4 L), so 4 and n / 4 with L = 1 / n
    for K = n clients. The updates of a round are averaged with the decision that follows from its losses, as in the
    authors' code. That code leaves lambda_t out of the squares and counts the damping twice; here the step is as usual.
    The first decision, and what the damping pulls to, are equal weights, whatever the sizes of the clients.

    Other arguments are those of `fm.algorithms.FedAvg`, with its scaled steps by default; the authors combine it with
    Adam at the server, too. `beta1 = beta2 = 0` gives plain averages.

    Args:
        damping: How strongly decisions are drawn to equal weights, > 0. Default: 4.0.
        response: F, with scale 1 and, where it has one, location 1; the shape of Weibull's is 2. Default: "weibull".
    """

    damping: Positive = field(default=4.0, kw_only=True)
    response: Response = field(default="weibull", kw_only=True)

    def init(self, oracle, network) -> Any:
        server = LocalSteps.init(self, oracle, network)
        equal = torch.full_like(oracle.prior, 1.0 / network.n)
        curvatures = torch.zeros_like(oracle.prior.mT * oracle.prior)
        return DecisionState(server._replace(duals=equal), torch.zeros_like(equal), curvatures)

    def step(self, state: Any, ctx) -> Any:
        clients = torch.ones_like(ctx.hosted(ctx.prior), dtype=torch.bool)
        losses, gradients = self.local_gradients(state.server, ctx, clients)
        losses, before = ctx.report(losses, clients), state.server.duals
        responses = responded(losses / losses.mean(dim=-1, keepdim=True).clamp(min=_LEAST), self.response) / ctx.n
        g = -responses / (1.0 + (before * responses).sum(dim=-1, keepdim=True))
        slopes = state.slopes + (1.0 - ctx.n / 4 * (g * before).sum(dim=-1, keepdim=True)) * g
        ordered = g.index_select(-1, ctx.by_identity)
        curvatures = state.curvatures + ordered.mT * ordered
        linear, start = (row.index_select(-1, ctx.by_identity) for row in (slopes, before))
        decided = by_position(minimiser(linear, self.damping, ctx.n / 4 * curvatures, start), ctx.by_identity)
        duals = before + ctx.step_of_weights(1.0) * (decided - before)
        direction = ctx.average(gradients, ctx.hosted(duals))
        server = self.server_step(state.server, ctx, direction, self.local_steps, duals)
        return DecisionState(server, slopes, curvatures)


def responded(ratios: Tensor, response: Response) -> Tensor:
    """Returns the distribution function at losses over their mean."""
    if response == "weibull":
        return 1.0 - (-ratios.square()).exp()
    if response == "exponential":
        return 1.0 - (-ratios).exp()
    if response == "frechet":
        return (-1.0 / ratios.clamp(min=_LEAST)).exp()
    if response == "normal":
        return torch.special.ndtr(ratios - 1.0)
    if response == "gumbel":
        return (-(1.0 - ratios).exp()).exp()
    return (ratios - 1.0).sigmoid()


def minimiser(slopes: Tensor, damping: float | Tensor, curvatures: Tensor, start: Tensor) -> Tensor:
    """Returns argmin of <slopes, x> + damping / 2 |x|^2 + x^T curvatures x / 2 over the simplex, by accelerated
    projected descent: rows (..., 1, n), a matrix (..., n, n), and a start near by."""
    largest = damping + curvatures.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]
    condition = (damping / largest) ** 0.5
    momentum = (1.0 - condition) / (1.0 + condition)
    point = ahead = start
    for _ in range(_ITERATIONS):
        slope = slopes + damping * ahead + ahead @ curvatures
        point, last = fm.regularizers.project_onto_simplex(ahead - slope / largest), point
        ahead = point + momentum * (point - last)
    return point


CANDIDATES = tuple(
    AAggFFS(Limited(step, power=3.0), damping=damping) for damping in (4.0, 40.0) for step in (0.35, 0.7, 1.4)
)


def worst(algorithm: fm.algorithms.Algorithm, rounds: int = 60) -> float:
    """The accuracy at the worst of ten sites, two of which have another instrument."""
    data = fm.data.Digits(nodes=10, split="instrument", odd=2)
    return fm.run(fm.Experiment(data, fm.Ring(), algorithm, rounds=rounds)).worst


if __name__ == "__main__":
    fm.testing.check_algorithm(AAggFFS())
    print(f"FedAvg: worst site {worst(fm.algorithms.FedAvg()):.1%}")
    for damping in (40.0, 4.0):
        print(f"AAggFF-S, damping {damping:g}: worst site {worst(AAggFFS(damping=damping)):.1%}")
