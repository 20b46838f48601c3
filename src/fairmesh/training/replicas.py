"""Replicas: runs that differ in seed, placement or numbers of the algorithm, as in a sweep, stacked into one batched
run."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fairmesh.algorithms.base import Algorithm
from fairmesh.algorithms.schedules import Schedule
from fairmesh.compression.compressors import Compressor
from fairmesh.config.overrides import put
from fairmesh.config.tables import from_table, to_table
from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams

Placements = int | Sequence[Sequence[int]] | Literal["by-seed"] | None


@dataclass(frozen=True)
class Replica:
    """One run of those trained together. Node i has the data of site placement[i] in a split of the rows."""

    seed: int
    placement: tuple[int, ...]
    algorithm: Algorithm
    split: int = 0


def replicas_of(
    algorithms: Sequence[Algorithm], seeds: Sequence[int], placements: Placements, n: int, splits: int = 1
) -> list[Replica]:
    """Returns a replica for every algorithm, split, placement and seed. A number of placements means random ones;
    placement k is the same in every experiment over n nodes. "by-seed" gives seed k only the random placement k."""
    seeds = _checked_seeds(seeds)
    if not algorithms or not seeds:
        raise BadInput("a run needs at least one algorithm and one seed")
    if placements == "by-seed":
        placed = [(seed, random_placement(seed, n)) for seed in seeds]
    else:
        placed = [(seed, placement) for placement in _checked_placements(placements, n) for seed in seeds]
    return [Replica(seed, placement, a, k) for a in algorithms for k in range(splits) for seed, placement in placed]


def _checked_seeds(seeds: Sequence[int]) -> list[int]:
    try:
        numbers = [int(seed) for seed in seeds]
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"seeds must be a list of whole numbers, got {seeds!r}; for three seeds write range(3)"
        ) from error
    if any(not 0 <= seed < 2**63 for seed in numbers):
        raise BadInput(f"seeds must lie in 0..2^63 - 1, got {numbers}")
    if len(set(numbers)) != len(numbers):
        raise BadInput(f"seeds repeat: {numbers}")
    return numbers


def _checked_placements(placements: int | Sequence[Sequence[int]] | None, n: int) -> list[tuple[int, ...]]:
    if placements is None:
        return [tuple(range(n))]
    if isinstance(placements, int):
        if placements < 1:
            raise BadInput(f"placements must be >= 1, got {placements}")
        return [random_placement(k, n) for k in range(placements)]
    try:
        chosen = [tuple(int(i) for i in placement) for placement in placements]
    except (TypeError, ValueError) as error:
        raise BadInput(f"placements must be a number or a list of permutations, got {placements!r}") from error
    if not chosen:
        raise BadInput("placements must be a number or a list of permutations, got none")
    for placement in chosen:
        if sorted(placement) != list(range(n)):
            raise BadInput(f"a placement must name each of the {n} sites once, got {list(placement)}")
    return chosen


def sites_at(nodes: Sequence[int], replicas: Sequence[Replica]) -> set[int]:
    """Returns the sites whose data these nodes have in any replica."""
    return {replica.placement[node] for node in nodes for replica in replicas}


def random_placement(k: int, n: int) -> tuple[int, ...]:
    """Returns the k-th random placement of n sites on n nodes."""
    key = random_streams.keys(torch.tensor([k]), "placement", 0, torch.tensor([0]))
    return tuple(random_streams.bits(key, n).flatten().argsort(stable=True).tolist())


def stacked(algorithms: Sequence[Algorithm], dtype: torch.dtype, device: torch.device) -> Algorithm:
    """Returns one algorithm whose numbers are tensors (replicas, 1, 1) where those of the given ones differ."""
    return _stacked(list(algorithms), dtype, device, "algorithm")


def _stacked(things: list[Any], dtype: torch.dtype, device: torch.device, where: str) -> Any:
    first = things[0]
    if all(thing == first for thing in things):
        return first
    same_kind = all(type(thing) is type(first) for thing in things)
    if same_kind and isinstance(first, float):
        return torch.tensor(things, dtype=dtype, device=device)[:, None, None]
    if same_kind and dataclasses.is_dataclass(first) and not isinstance(first, Compressor):
        # Schedules stay in float64, since ratio^t would lose digits. The step is rounded once, when it is used.
        inner = torch.float64 if isinstance(first, Schedule) else dtype
        copy = object.__new__(type(first))  # each replica's numbers were checked when its own object was made
        for field in dataclasses.fields(first):
            kind = torch.float64 if field.metadata.get("exact") else inner
            values = [getattr(thing, field.name) for thing in things]
            if field.type is float:  # so that 1 and 0.5 have the same type
                values = [float(value) for value in values]
            if field.metadata.get("structural") and any(value != values[0] for value in values):
                raise _cannot_stack(f"{where}.{field.name}", values)
            object.__setattr__(copy, field.name, _stacked(values, kind, device, f"{where}.{field.name}"))
        return copy
    raise _cannot_stack(where, things)


def _cannot_stack(where: str, values: list[Any]) -> BadInput:
    return BadInput(
        f"{where} differs between replicas ({values[0]!r} and {next(v for v in values if v != values[0])!r}), but only "
        "step sizes and strengths may differ within one batch; train these separately"
    )


def swept(algorithm: Algorithm, sweep: Mapping[str, Sequence[float]], sections: Collection[str]) -> list[Algorithm]:
    """Returns the algorithm with every combination of values, by the dotted names of its numbers. Refuses a number of
    another of an experiment's sections."""
    for path in sweep:
        section = path.split(".")[0]
        if section != "algorithm" and section in sections:
            raise BadInput(
                f"sweep: {path} is no number of the algorithm, and only these can be swept; for other settings, run "
                f"the experiment once for each value, with --set {path}=VALUE; for several splits of the data, write "
                "`splits = 10` at the top of the file"
            )
    tables = []
    for values in itertools.product(*sweep.values()):
        tables.append(to_table(algorithm))
        for path, value in zip(sweep, values):
            put(tables[-1], path.removeprefix("algorithm."), value, "sweep")
    return [from_table(Algorithm, table, "algorithm") for table in tables]
