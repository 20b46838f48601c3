"""Algorithms on a stack of nodes in memory, round by round, and every tensor that a thing holds."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm, Round
from fairmesh.algorithms.companions import CompanionInputs, carried_at_start
from fairmesh.networks.base import Network, Traffic
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.problems.oracle import Oracle
from fairmesh.problems.prepared import Prepared
from fairmesh.topology.mixing import Mixing


def stack(
    problem: Prepared,
    cycle: Sequence[Mixing],
    algorithm: Algorithm,
    *,
    seeds: Sequence[int] = (0,),
    dtype: torch.dtype = torch.float64,
    **network: Any,
) -> tuple[MemoryNetwork, Oracle]:
    """Returns a network in memory over some mixing matrices, and the oracle of its nodes."""
    net = MemoryNetwork(cycle, dtype=dtype, **network)
    return net, oracle_of(problem, net, algorithm, seeds, dtype)


def oracle_of(
    problem: Prepared, network: Network, algorithm: Algorithm, seeds: Sequence[int], dtype: torch.dtype
) -> Oracle:
    """Returns the oracle of the nodes that a network hosts."""
    calls = algorithm.oracle_calls()
    return Oracle(
        problem, network.hosted, network.streams, seeds=seeds, calls_per_round=calls, dtype=dtype, trace=False
    )


class End(NamedTuple):
    """The end of some rounds."""

    state: Any  # of the algorithm
    sent: Traffic  # in these rounds
    carried: Any  # own parts of the model, and the memory of an optimizer


def after(
    algorithm: Algorithm,
    network: Network,
    oracle: Any,
    rounds: int,
    state: Any = None,
    first: int = 0,
    carried: Any = None,
) -> End:
    """Returns the state after some rounds, what was sent in them, and what is carried on."""
    state = algorithm.init(oracle, network) if state is None else state
    optimizer = algorithm.local_optimizer()
    carried = carried_at_start(CompanionInputs(oracle, optimizer)) if carried is None else carried
    of_nodes, of_server = (torch.zeros(len(oracle.seeds), *nodes).double() for nodes in ([len(network.hosted)], []))
    sent = Traffic(of_nodes, of_server, of_nodes, of_server)
    for t in range(first, first + rounds):
        ctx = Round(torch.tensor(t), oracle, network, carried=carried, optimizer=optimizer)
        state = algorithm.step(state, ctx)
        sent, carried = sent.plus(ctx.sent), ctx.carried_after()
    return End(state, sent, carried)


def relabelled(cycle: Sequence[Mixing], order: Sequence[int]) -> list[Mixing]:
    """Returns the mixing matrices when node order[k] is called k."""
    return [Mixing(scipy.sparse.csr_array(mixing.matrix.toarray()[np.ix_(order, order)])) for mixing in cycle]


def mixed_up(n: int) -> list[int]:
    """Returns the numbers below n in an order that leaves few in place."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()


def tensors_of(thing: Any) -> dict[str, Tensor]:
    """Returns a copy of every tensor and array reachable from an object's fields, lists and dictionaries."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()

    def visit(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            found[path] = value.detach().clone()
        elif isinstance(value, np.ndarray):
            found[path] = torch.tensor(value)
        elif scipy.sparse.issparse(value):
            found[path] = torch.tensor(value.toarray())
        elif id(value) not in seen and not isinstance(value, str | int | float | bool | type(None) | type):
            seen.add(id(value))
            for key, item in _inside(value):
                visit(item, f"{path}.{key}" if path else str(key))

    visit(thing, "")
    return found


def _inside(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if hasattr(value, "_fields"):  # a NamedTuple
        return list(zip(value._fields, value))
    if isinstance(value, list | tuple | set):
        return list(enumerate(value))
    known = dataclasses.is_dataclass(value) or type(value).__module__.startswith(("fairmesh", "torch.nn"))
    return list(vars(value).items()) if known and hasattr(value, "__dict__") else []
