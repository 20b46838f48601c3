"""Momentum and AdamW at every node, with fixed and with robust weights; and why a weight must follow AdamW.

`WeighsGradients` is AD-GDA with the order that loses the weights: AdamW divides a gradient by its own size, and with it
by its weight. It also shows how an algorithm calls an optimizer by itself.

python examples/optimizers.py
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import fairmesh as fm
from fairmesh.algorithms import plain, prior_rows


class InnerState(NamedTuple):
    models: fm.roles.Models
    duals: fm.roles.Duals
    memory: Any


@dataclass(frozen=True)
class WeighsGradients(fm.algorithms.Algorithm):
    """AD-GDA without compression whose weights multiply the gradients before the optimizer sees them."""

    primal_step: fm.schedules.Schedule | float
    dual_step: fm.schedules.Schedule | float
    regularizer: fm.regularizers.Regularizer
    inner: fm.optimizers.Optimizer

    def init(self, oracle, network):
        models = oracle.initial_models()
        return InnerState(models, prior_rows(oracle, network), self.inner.init(models))

    def step(self, state, ctx):
        losses, gradients = ctx.losses_and_gradients(state.models)
        weights = ctx.n * (state.duals * ctx.own).sum(dim=-1, keepdim=True)
        direction, memory = self.inner.direction(state.memory, weights * gradients, state.models, ctx.layout)
        slopes = losses * ctx.own + self.regularizer.gradient(state.duals, ctx.prior, ctx.own)
        duals = self.regularizer.project(state.duals + ctx.step_size(self.dual_step) * slopes, ctx.prior)
        delivery = ctx.exchange(model=plain(state.models), dual=plain(duals, "weights"))
        models = delivery.mix("model") - ctx.step_size(self.primal_step) / ctx.n * direction
        return InnerState(models, delivery.mix("dual"), memory)


def main(rounds: int = 400, seeds: int = 5) -> dict[str, tuple[float, float]]:
    """Prints the accuracies at the worst site and on average, over seeds; returns them by name."""
    n, nearly = 10, fm.ChiSquare(0.001)
    adam, momentum = fm.optimizers.AdamW(beta2=0.99), fm.optimizers.Momentum()

    def falling(start: float) -> fm.schedules.Schedule:
        return fm.schedules.Polynomial(start, power=1.0)

    robust = {"dual_step": 0.05, "regularizer": nearly}
    fixed = {"dual_step": 0.0, "regularizer": nearly}
    algorithms = {
        "SGD, fixed weights": fm.ADGDA(falling(0.5 * n), **fixed),
        "SGD, robust weights": fm.ADGDA(falling(0.5 * n), **robust),
        "momentum, fixed weights": fm.ADGDA(falling(0.05 * n), **fixed, optimizer=momentum),
        "momentum, robust weights": fm.ADGDA(falling(0.05 * n), **robust, optimizer=momentum),
        "AdamW, fixed weights": fm.ADGDA(falling(0.01 * n), **fixed, optimizer=adam),
        "AdamW, robust weights on directions": fm.ADGDA(falling(0.01 * n), **robust, optimizer=adam),
        "AdamW, robust weights on gradients": WeighsGradients(falling(0.01 * n), **robust, inner=adam),
        "Tracked AD-GDA, fixed weights": fm.TrackedADGDA(weighting=fm.weighting.PriorWeights()),
        "Tracked AD-GDA, robust weights": fm.TrackedADGDA(),
    }
    found = {}
    for name, algorithm in algorithms.items():
        data = fm.data.Digits(nodes=n, split="instrument", odd=2)
        options = fm.Options(measure_every=rounds)
        experiment = fm.Experiment(
            data, fm.Ring(), algorithm, rounds=rounds, seeds=tuple(range(seeds)), options=options
        )
        final = fm.run(experiment).final
        worst, mean = (sum(r["accuracy"][key] for r in final) / len(final) for key in ("worst", "mean"))
        found[name] = worst, mean
        print(f"{name:38} worst site {worst:.1%}  mean {mean:.1%}")
    return found


if __name__ == "__main__":
    main()
