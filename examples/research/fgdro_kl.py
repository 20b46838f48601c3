"""FGDRO-KL-Adam: a robust objective with a server as a problem of nested expectations, solved by local steps of Adam.
Checked, and compared over two strengths.

Guo, Yang: Communication-Efficient Federated Group Distributionally Robust Optimization, NeurIPS 2024.

python examples/research/fgdro_kl.py
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

import fairmesh as fm
from fairmesh.algorithms import EXACT, STRUCTURAL, Count, Memory, Positive, fresh_share

_TINY = 1e-8  # added to roots of squares, so that a coordinate without a gradient does not move
_LARGEST_EXPONENT = 60.0  # exp of it is a float32, and so is its inverse


class NestedState(NamedTuple):
    """All of it is at the server; every client gets it at the start of a round, of the losses only its own."""

    models: fm.roles.Models  # x (replicas, 1, parameters)
    duals: fm.roles.Duals  # lambda_i = p_i exp(u_i / alpha) / sum_j p_j exp(u_j / alpha) (replicas, 1, nodes)
    losses: Annotated[Tensor, fm.roles.OVER_NODES]  # u_i
    logs: Tensor  # log v (replicas, 1, 1)
    momenta: Tensor  # m
    squares: Tensor  # q


@dataclass(frozen=True)
class FGDROKL(fm.algorithms.Algorithm):
    """Minimises alpha log sum_i p_i exp(f_i(x) / alpha), which is the worst case over the weights of the clients under
    a KL regularizer of strength alpha. In a round, every client takes K local steps, each on a batch of its own:

        u_i <- a u_i + (1 - a) f_i(x_i)                           moving average of its loss
        v_i <- b v_i + (1 - b) exp(u_i / alpha)                   moving average of the exponentials
        h_i  = exp(u_i / alpha) / v_i grad f_i(x_i)
        m_i <- beta1 m_i + (1 - beta1) h_i,   q_i <- beta2 q_i + (1 - beta2) h_i^2
        x_i <- x_i - eta / (K sqrt(dim)) m_i / sqrt(q_i)

    The server then sets x, v, m and q to the averages over the clients, from which the next round starts; u_i stays
    with its client, which also reports it so that the weights are known.

    p is 1 / n, as in the paper, unless `by_prior`. Not taken from the paper: moments are corrected for the first steps,
    as in Adam; u_i starts at the client's first loss and v_i at exp(u_i / alpha), so that all weights are 1 in the
    first step; the logarithm of v is kept, so that small strengths do not overflow. The step is given as the length of
    a round's step, so that it does not depend on the size of the model.

    Args:
        primal_step: eta, a number >= 0 or a schedule. Default: Polynomial(2.0, power=3.0).
        strength: alpha, > 0. The smaller it is, the more weight the worst clients get. Default: 0.5.
        loss_memory: a, in [0, 1). Default: 0.8.
        scale_memory: b, in [0, 1). Default: 0.8.
        beta1: Memory of the momentum, in [0, 1). Default: 0.9.
        beta2: Memory of the squares, in [0, 1). Default: 0.99.
        local_steps: K, >= 1. Default: 5.
        by_prior: Whether p is the prior of the problem, by default the sizes of the sites. Default: False.
    """

    primal_step: fm.schedules.Schedule | float = field(default_factory=lambda: fm.schedules.Polynomial(2.0, power=3.0))
    strength: Positive = 0.5
    loss_memory: Memory = 0.8
    scale_memory: Memory = 0.8
    beta1: Memory = field(default=0.9, metadata=EXACT)
    beta2: Memory = field(default=0.99, metadata=EXACT)
    local_steps: Count = field(default=5, metadata=STRUCTURAL)
    by_prior: bool = field(default=False, metadata=STRUCTURAL)

    needs_server: ClassVar[bool] = True

    def _reference(self, prior: Tensor) -> Tensor:
        return prior.clone() if self.by_prior else torch.full_like(prior, 1.0 / prior.shape[-1])

    def init(self, oracle, network):
        model = oracle.initial_models()[..., :1, :].clone()
        zeros = torch.zeros_like(model)
        losses = torch.zeros_like(oracle.prior)
        return NestedState(model, self._reference(oracle.prior), losses, zeros[..., :1].clone(), zeros, zeros.clone())

    def step(self, state, ctx):
        reference = self._reference(ctx.prior)
        clients = torch.ones_like(ctx.hosted(reference), dtype=torch.bool)
        x, logs, m, q = (
            ctx.broadcast(row, clients) for row in (state.models, state.logs, state.momenta, state.squares)
        )
        u = ctx.hosted(state.losses).unsqueeze(-1)
        follow = ctx.step_of_weights(fresh_share(self.loss_memory, x.dtype))
        eta = ctx.step_size(self.primal_step) / (self.local_steps * x.shape[-1] ** 0.5)
        for call in range(self.local_steps):
            losses, gradients = ctx.losses_and_gradients(x, call)
            number = ctx.index * self.local_steps + call + 1
            u = torch.where(number == 1, losses, u + follow * (losses - u))
            logs = torch.where(number == 1, u / self.strength, logs)
            ratio = (u / self.strength - logs).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).exp()
            growth = self.scale_memory + (1.0 - self.scale_memory) * ratio  # of v_i
            logs = logs + growth.log()
            h = (ratio / growth) * gradients
            m = self.beta1 * m + fresh_share(self.beta1, x.dtype) * h
            q = self.beta2 * q + fresh_share(self.beta2, x.dtype) * h.square()
            seen, seen_squares = ((1.0 - beta ** number.double()).to(x.dtype) for beta in (self.beta1, self.beta2))
            x = x - eta * (m / seen) / ((q / seen_squares).sqrt() + _TINY)
        weights = ctx.hosted(reference)
        losses = ctx.report(u, clients)
        return NestedState(
            models=ctx.average(x, weights),
            duals=(losses / self.strength + reference.log()).softmax(dim=-1),
            losses=losses,
            logs=(ctx.report(logs, clients) + reference.log()).logsumexp(dim=-1, keepdim=True),
            momenta=ctx.average(m, weights),
            squares=ctx.average(q, weights),
        )


CANDIDATES = tuple(
    replace(FGDROKL(), primal_step=fm.schedules.Polynomial(step, power=3.0), strength=strength)
    for strength in (0.2, 1.0)
    for step in (1.0, 2.0, 4.0)
)


def worst(strength: float, rounds: int = 60) -> float:
    """The accuracy at the worst of ten sites, two of which have another instrument."""
    data = fm.data.Digits(nodes=10, split="instrument", odd=2)
    return fm.run(fm.Experiment(data, fm.Ring(), FGDROKL(strength=strength), rounds=rounds)).worst


if __name__ == "__main__":
    fm.testing.check_algorithm(FGDROKL())
    for strength in (100.0, 0.2):
        print(f"strength {strength:g}: worst site {worst(strength):.1%}")
