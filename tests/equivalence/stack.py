"""The stack as the reference sees it, and how far the two are apart."""

import numpy as np
import torch

import fairmesh as fm
from fairmesh.testing.messages import NoGradients
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests.equivalence.reference import Trace


def on_the_stack(
    problem: fm.Problem, topology: fm.topologies.Topology, algorithm: fm.algorithms.Algorithm, rounds: int, seed=0
) -> Trace:
    """A float64 run of one replica, through the loop that every run goes through."""
    replicas = replicas_of([algorithm], [seed], None, problem.n)
    training = Training(problem, topology, replicas, Options(dtype="float64", count_bytes=False))
    state, trace = training.initial(), Trace()
    for t in range(rounds):
        state = training.advance(state, t)
        now = state.algorithm
        trace.models.append(now.models[0].numpy())
        weighting = getattr(now, "weighting", now)
        duals = training.view.duals(now)
        if duals is not None:
            trace.duals.append(duals[0].numpy())
        if getattr(weighting, "dual_copies", None) is not None:
            trace.dual_copies.append(weighting.dual_copies.own[0].numpy())
        if getattr(weighting, "weights", None) is not None:
            trace.weights.append(weighting.weights[0].numpy())
        if getattr(now, "tracker_copies", None) is not None:
            trace.tracker_copies.append(now.tracker_copies.own[0].numpy())
        if hasattr(now, "copies"):
            trace.copies.append(now.copies.own[0].numpy())
            trace.mixed.append(training.network.mixed_copies(now.copies.of_neighbours, torch.tensor(t + 1))[0].numpy())
    trace.bits_of_nodes, trace.bits_of_server = state.sent.node_bits[0].numpy(), float(state.sent.server_bits[0])
    return trace


def apart(one: Trace, other: Trace) -> float:
    """The largest difference of any number in any round."""
    largest = 0.0
    for name in ("models", "duals", "copies", "mixed", "dual_copies", "tracker_copies", "weights"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert len(ours) == len(theirs), f"{len(ours)} and {len(theirs)} rounds of {name}"
        for a, b in zip(ours, theirs):
            assert a.shape == b.shape
            assert np.isfinite(a).all()
            assert np.isfinite(b).all()
            largest = max(largest, float(np.abs(a - b).max()))
    return largest


class NoData(NoGradients):
    """An oracle of nodes that have nothing to learn, and no loss either: what is left of an algorithm is its gossip."""

    def losses_and_gradients(self, models, round_index, call):
        return torch.zeros_like(models[..., :1]), torch.zeros_like(models)

    def losses(self, models, round_index, call):
        return torch.zeros_like(models[..., :1])
