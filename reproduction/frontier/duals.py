"""Compares weightings with many nodes: their cost, and how near they come to the exact inner maximum.

Problem and algorithm stay the same; graphs mix quickly or slowly; only the weighting differs. Times are those of all
nodes in one process, bytes those of a node's message to one neighbour."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairmesh.algorithms.base import Round
from fairmesh.algorithms.schedules import Linear
from fairmesh.algorithms.tracked_ad_gda import TrackedADGDA
from fairmesh.algorithms.weighting import (
    ExactMaximum,
    PriorWeights,
    ProjectedAscent,
    ShadowPrice,
    Weighting,
)
from fairmesh.compression.compressors import Threshold
from fairmesh.config.tables import to_table
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.topology.graphs import Circulant, RandomRegular, Topology
from fairmesh.training.loop import Training, TrainingState
from fairmesh.training.options import Options
from fairmesh.training.replicas import Replica
from reproduction.frontier.sites import PARAMETERS, REGULARIZER, Sites, exact, quality
from reproduction.lines import Line

FAST, SLOW = RandomRegular(8), Circulant((1, 2))
PRIMAL_STEP, ROUNDS = 0.02 * PARAMETERS**0.5, 300  # 0.02 per parameter
COST_ONLY = 4  # rounds, where rows over all nodes make a round take seconds
ROWS_UP_TO = 2000  # nodes; above that, weightings with rows run only for their cost
FINE = 0.1  # a threshold omits changes of a weight below about this share of an even one, 1 / n
STEP, SMALLER_STEP = 0.1, 0.01  # of the projected ascent


def weightings(n: int) -> dict[str, Weighting]:
    """Returns the weightings to compare.

    The rows of ProjectedAscent are weights, an even one of which is 1 / n. The rows of ExactMaximum are losses: a
    difference as large as the regularizer's softness changes a weight by about its own size."""
    return {
        "prior weights": PriorWeights(),
        "shadow price": ShadowPrice(relative=False, strength_annealing=0.0),  # in the units of the others
        "exact maximum": ExactMaximum(),
        "exact maximum, thresholded": ExactMaximum(compressor=Threshold(FINE * float(REGULARIZER.softness()))),
        "projected ascent": ProjectedAscent(STEP),
        "projected ascent, thresholded": ProjectedAscent(STEP, Threshold(FINE / n)),
        "projected ascent, smaller step": ProjectedAscent(SMALLER_STEP),
    }


class _Bench:
    """Sites on a graph on which algorithms are compared."""

    def __init__(self, sites: Sites, topology: Topology):
        self.sites, self.problem, self.topology = sites, sites.problem(), topology
        cycle = topology.build(self.problem.n)
        self.degrees = torch.as_tensor(cycle[0].degrees)
        self.networks = [MemoryNetwork(cycle, count_bytes=counting) for counting in (False, True)]

    def line(self, algorithm: TrackedADGDA, rounds: int, judged: bool) -> Line:
        """Runs an algorithm. Counts the bytes of one round in twenty and times the others."""
        n = self.problem.n
        replica = Replica(0, tuple(range(n)), algorithm)
        plain, counting = (
            Training(self.problem, self.topology, [replica], Options(), network=network) for network in self.networks
        )
        state, times, counted, every = plain.initial(), [], [], max(2, rounds // 20)
        for t in range(rounds):
            if t % every == every - 1:
                before = state.sent.node_bytes
                state = counting.advance(state, t)
                counted.append(float(((state.sent.node_bytes - before) / self.degrees).mean()))
            else:
                start = time.perf_counter()
                state = plain.advance(state, t)
                times.append(1e3 * (time.perf_counter() - start))
        line = {
            "rounds": rounds,
            "message_bytes": round(statistics.mean(counted), 1),
            "ms_per_round": round(statistics.median(times), 2),
            "dual_state_bytes": _held(state.algorithm.weighting) // n,
        }
        return line | (self._judged(plain, state, rounds) if judged else {})

    def _judged(self, training: Training, state: TrainingState, rounds: int) -> Line:
        """Returns the quality of the average model and of the weights that the next round would use.

        The weights are compared with those that are exact for the average model, and with those that are exact for the
        losses of each node's own model."""
        models, weighting = state.algorithm.models, training.replicas[0].algorithm.weighting  # type: ignore[attr-defined]
        following = Round(torch.tensor(rounds), training.oracle, training.network)
        weighed = weighting.weigh(state.algorithm.weighting, following.losses(models), REGULARIZER, following)
        weights = weighed.weights.flatten().double() / self.problem.n
        models = models[0].double()
        losses, accuracies = self.sites.outcome(models.mean(dim=0))
        aims = {"apart": exact(losses), "apart_at_own_models": exact(self.sites.outcome(models)[0])}
        return quality(losses, accuracies) | {
            "weights_sum": round(float(weights.sum()), 4),
            **{name: round(float((weights - aim).abs().sum()), 4) for name, aim in aims.items()},
            "apart_when_scaled": round(float((weights / weights.sum() - aims["apart"]).abs().sum()), 4),
        }


def _held(state: Any) -> int:
    """Returns the bytes of the tensors in a state."""
    return state.nbytes if isinstance(state, Tensor) else sum(map(_held, state)) if isinstance(state, tuple) else 0


def lines(
    sizes: Sequence[int] = (50, 1000, 10_000), say: Callable[[str], None] = lambda text: None, miniature: bool = False
) -> list[Line]:
    """Returns a line for each size, graph and weighting. A miniature has few nodes and rounds."""
    sizes, rounds, cost_only, rows_up_to = ((10, 20), 6, 4, 10) if miniature else (sizes, ROUNDS, COST_ONLY, ROWS_UP_TO)
    made: list[Line] = []
    for n in sizes:
        sites = Sites.drawn(n)
        made.append({"nodes": n, "weighting": "the optimum itself"} | quality(*sites.outcome(sites.best())))
        for graph, topology in {"fast": FAST, "slow": SLOW}.items():
            if graph == "slow" and n > rows_up_to:
                continue  # information needs about n^2 rounds to reach all nodes
            bench, without = _Bench(sites, topology), 0.0
            for name, weighting in weightings(n).items():
                whole = n <= rows_up_to or isinstance(weighting, (PriorWeights, ShadowPrice))
                if name == "projected ascent, smaller step" and not whole:
                    continue  # costs as much as the other ascent
                step = Linear(PRIMAL_STEP, rounds)
                algorithm = TrackedADGDA(
                    step, beta1=0.9, gradient_at_average=0.0, weighting=weighting, regularizer=REGULARIZER
                )
                line = bench.line(algorithm, rounds if whole else cost_only, judged=whole)
                without = line["message_bytes"] if name == "prior weights" else without
                line["dual_bytes"] = round(line["message_bytes"] - without, 1)
                settings = {"topology": to_table(topology), "algorithm": to_table(algorithm)}
                made.append({"nodes": n, "graph": graph, "weighting": name} | line | {"settings": settings})
                say(f"  {n} nodes, {graph}: {name}: {line}")
    return made
