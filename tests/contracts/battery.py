"""What the contract tests share: a state in the middle of a run, and every tensor that a thing holds."""

import dataclasses
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.problems.oracle import Oracle
from fairmesh.storage.state_tree import flatten_state
from fairmesh.topology.graphs import Mixing


def stack(
    problem: fm.Problem,
    cycle: list[Mixing],
    algorithm: fm.algorithms.Algorithm,
    *,
    seeds=(0,),
    dtype: torch.dtype = torch.float64,
    **network: Any,
) -> tuple[MemoryNetwork, Oracle]:
    """Returns a network over some mixing matrices and the oracle of its nodes."""
    net = MemoryNetwork(cycle, dtype=dtype, count_bytes=False, **network)
    calls = algorithm.oracle_calls()
    return net, Oracle(problem, net.hosted, net.identities, seeds=seeds, calls_per_round=calls, dtype=dtype)


def after(algorithm: fm.algorithms.Algorithm, network, oracle, rounds: int, state: Any = None, first: int = 0):
    """Returns the state after some rounds, and the bits that nodes and server sent in them."""
    state = algorithm.init(oracle, network) if state is None else state
    nodes = torch.zeros(len(oracle.seeds), network.n, dtype=torch.float64)
    server = torch.zeros(len(oracle.seeds), dtype=torch.float64)
    for t in range(first, first + rounds):
        round = Round(torch.tensor(t), oracle, network)
        state = algorithm.step(state, round)
        nodes, server = nodes + sum(s.node_bits for s in round.sent), server + sum(s.server_bits for s in round.sent)
    return state, nodes, server


def tensors_of(thing: Any, name: str = "") -> dict[str, Tensor]:
    """Returns copies of all tensors reachable from an object's fields, lists and dictionaries."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()

    def visit(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            found[path] = value.detach().clone()
            return
        if isinstance(value, np.ndarray):
            found[path] = torch.tensor(value)
            return
        if scipy.sparse.issparse(value):
            found[path] = torch.tensor(value.toarray())
            return
        if id(value) in seen or isinstance(value, str | int | float | bool | type(None) | type):
            return
        seen.add(id(value))
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, list | tuple | set):
            items = list(enumerate(value))
        elif type(value).__module__.startswith(("fairmesh", "torch.nn", "tests")):
            items = list(vars(value).items()) if hasattr(value, "__dict__") else []
        else:
            items = []
        for key, item in items:
            visit(item, f"{path}.{key}")

    visit(thing, name)
    return found


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one
    )


def state_bits(state: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in flatten_state(state).items()}


def with_steps(algorithm: fm.algorithms.Algorithm, **steps: float) -> fm.algorithms.Algorithm:
    """Returns the algorithm with new values for those of the given fields that it has."""
    names = {field.name for field in dataclasses.fields(algorithm)}
    return dataclasses.replace(algorithm, **{name: value for name, value in steps.items() if name in names})


def relabelled(cycle: list[Mixing], order: list[int]) -> list[Mixing]:
    """Returns the mixing matrices when node order[k] is called k."""
    return [Mixing(scipy.sparse.csr_array(mixing.matrix.toarray()[np.ix_(order, order)])) for mixing in cycle]
