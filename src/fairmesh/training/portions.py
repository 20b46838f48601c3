"""Runs replicas in portions, one after another, if they do not fit into memory together; merges their results."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.roles import StateView
from fairmesh.problems.problem import Problem
from fairmesh.storage.occupied import portion_name
from fairmesh.storage.run_folder import Record
from fairmesh.storage.state_tree import equally_long, flatten_state, unflatten_state
from fairmesh.training.memory_estimate import Footprint, footprint, replicas_that_fit
from fairmesh.training.options import (
    DTYPES,
    Options,
    device_of,
    home_of_data,
)
from fairmesh.training.replicas import Replica
from fairmesh.training.result import Result


def footprint_of(
    problem: Problem, replicas: Sequence[Replica], options: Options, process_group: ProcessGroup
) -> Footprint:
    """Returns the memory that the replicas need in this process."""
    device = device_of(options.device)
    data_counts = home_of_data(problem, device, options.data_on).type == device.type
    nodes = len(process_group.nodes(problem.n))
    algorithm, dtype = replicas[0].algorithm, DTYPES[options.dtype]
    return footprint(problem, algorithm, dtype, data_counts, nodes, device, options.tune_malloc)


def that_fit(
    problem: Problem, replicas: Sequence[Replica], options: Options, process_group: ProcessGroup
) -> tuple[int, str]:
    """Returns how many replicas can run at once, and a sentence about the memory they need in this process."""
    need = footprint_of(problem, replicas, options, process_group)
    if options.compare_weights and device_of(options.device).type == "cpu":  # the run with fixed weights waits
        waits = need.kept // 2
        text = (
            f"{need.description}, models with fixed weights ({waits / 2.0**30:.2f} GiB; not if compare_weights = False)"
        )
        need = need._replace(per_replica=need.per_replica + waits, description=text)
    shared_by = process_group.local_world_size
    return replicas_that_fit(need, len(replicas), options.memory_gib, device_of(options.device), shared_by)


class Portion(NamedTuple):
    """Consecutive replicas that run at once."""

    first: int
    replicas: list[Replica]
    all: int  # replicas of the whole run

    def folder(self, path: Path) -> Path:
        return path / portion_name(self.first, self.first + len(self.replicas) - 1)


def portions(replicas: Sequence[Replica], at_once: int) -> Iterator[Portion]:
    for first in range(0, len(replicas), at_once):
        yield Portion(first, list(replicas[first : first + at_once]), len(replicas))


def _numbered(records: Sequence[Record], first: int) -> list[Record]:
    """Returns a portion's records with replicas numbered as in the whole run."""
    return [record | {"replica": first + record["replica"]} for record in records]


def put_aside(result: Result) -> Result:
    """Returns a result that waits in main memory while another run trains: with its models and weights, without what
    only further rounds would need."""
    state = result.state
    slim = state._replace(
        algorithm=StateView(state.algorithm).only_shown(state.algorithm), optimizer=None, trainer=None
    )
    on_host = unflatten_state(slim, {name: tensor.cpu() for name, tensor in flatten_state(slim).items()})
    return replace(result, state=on_host)


def merged(results: Sequence[Result], replicas: Sequence[Replica]) -> Result:
    """Returns one result of all replicas, in their order."""
    records, diverged, first = [], [], 0
    for result in results:
        records += _numbered(result.records, first)
        diverged += [first + r for r in result.diverged]
        first += len(result.replicas)
    records.sort(key=lambda record: (record["round"], record["replica"]))
    states = [flatten_state(result.state) for result in results]
    whole: dict[str, Tensor] = {name: torch.cat(equally_long([state[name] for state in states])) for name in states[0]}
    one = results[0]
    return Result(
        one.problem,
        list(replicas),
        one.rounds,
        records,
        unflatten_state(one.state, whole),
        diverged,
        one.judged_on,
        personal=[personal for result in results for personal in result.personal],
        support=one.support,
        notes=list(dict.fromkeys(note for result in results for note in result.notes)),
        cvar_level=one.cvar_level,
        worst_needs_rows=one.worst_needs_rows,
    )
