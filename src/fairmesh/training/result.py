"""What a run gave: its records, its models, and its end in one table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fairmesh.config.overrides import flat_table
from fairmesh.config.registry import registered_name
from fairmesh.config.tables import to_table
from fairmesh.errors import BadInput
from fairmesh.networks.roles import StateView
from fairmesh.problems.problem import Problem
from fairmesh.regularizers.simplex import normalized
from fairmesh.storage.run_folder import Record
from fairmesh.training.loop import TrainingState
from fairmesh.training.replicas import Replica


class Averages(NamedTuple):
    """Of the last round, over all nodes."""

    model: Tensor  # (replicas, dim)
    dual: Tensor | None  # (replicas, n)


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gave. `records` holds every measurement; rows of models are (replicas, dim)."""

    problem: Problem
    replicas: list[Replica]
    rounds: int
    records: list[Record]
    state: TrainingState = field(repr=False)
    diverged: list[int] = field(default_factory=list)  # replicas, where told to go on without them
    judged_on: str = "test"
    averages: Averages | None = None  # where not all nodes are hosted here
    stop_reason: str | None = None  # why an observer ended the run early
    seconds: float = 0.0  # that the run took

    @property
    def final(self) -> list[Record]:
        """The last record of each replica."""
        last = max(record["round"] for record in self.records)
        return [record for record in self.records if record["round"] == last]

    def values(self, what: str = "worst", metric: str | None = None) -> list[float]:
        """worst, mean, best, gap or worst_group of each replica at the end."""
        return [record[metric or self.problem.primary][what] for record in self.final]

    @property
    def worst(self) -> float:
        """The worst site's primary metric at the end, averaged over replicas."""
        values = self.values("worst")
        return sum(values) / len(values)

    def row(self, which: Literal["last", "time-average", "iterate", "best"] = "last") -> Tensor:
        """Network-average models (replicas, dim): of the last round, theta_o, a drawn iterate, or the best round's."""
        rows = {
            "last": self._last.model,
            "time-average": self.state.average_model,
            "iterate": self.state.iterate,
            "best": None if self.state.best is None else self.state.best.model,
        }
        found = rows[which]
        if found is None:
            raise BadInput(f"the run did not keep {which!r}; train with keep_{which} = True")
        return found

    def weights(self, which: Literal["last", "time-average"] = "last") -> Tensor | None:
        """lambda of each replica by node (replicas, n): the last network average, or lambda_o."""
        if which == "time-average":
            return self.state.average_dual
        return self._last.dual

    @property
    def _last(self) -> Averages:
        if self.averages is not None:
            return self.averages
        state, view = self.state.algorithm, StateView(self.state.algorithm)
        duals, own = view.duals(state), view.own_weights(state)
        weights = None if own is None else normalized(own.squeeze(-1))
        return Averages(view.models(state).mean(dim=-2), weights if duals is None else duals.mean(dim=-2))

    def state_dict(self, replica: int = 0, which: Literal["last", "time-average", "iterate", "best"] = "last"):
        """The network-average model as a plain state_dict of the user's module."""
        return self.problem.flat_model.state_dict(self.row(which)[replica])


def _numbers(records: Sequence[Record], metric: str) -> dict[str, float]:
    """Each number's mean over replicas and its standard deviation."""
    numbers = {}
    for name in ("worst", "mean", "best", "gap", "worst_group"):
        values = torch.tensor([record[metric][name] for record in records], dtype=torch.float64)
        numbers[name] = float(values.mean())
        numbers[f"{name}_std"] = float(values.std(correction=1)) if len(values) > 1 else 0.0
    return numbers


def _variants(replicas: Sequence[Replica]) -> list[dict[str, Any]]:
    """The different algorithms among the replicas: what each changes, by dotted name, and which replicas have it."""
    tables = [flat_table(to_table(replica.algorithm)) for replica in replicas]
    varying = [key for key in tables[0] if any(table.get(key) != tables[0][key] for table in tables)]
    variants: dict[str, dict[str, Any]] = {}
    for r, table in enumerate(tables):
        changes = {key: table.get(key) for key in varying}
        variants.setdefault(repr(changes), {"changes": changes, "replicas": []})["replicas"].append(r)
    return list(variants.values())


def summary_of(result: Result) -> dict[str, Any]:
    """The end of a run in one table. Its numbers are means over all replicas; `variants` has those of each algorithm
    of a sweep."""
    primary, final = result.problem.primary, result.final
    best = result.state.best
    variants = _variants(result.replicas)
    return {
        "algorithm": registered_name(result.replicas[0].algorithm),
        "metric": primary,
        "higher_is_better": result.problem.higher_is_better(primary),
        "judged_on": result.judged_on,
        **_numbers(final, primary),
        "rounds": result.rounds,
        "replicas": len(result.replicas),
        "variants": [v | _numbers([final[r] for r in v["replicas"]], primary) for v in variants],
        "diverged": result.diverged,
        **({} if result.stop_reason is None else {"stopped_early": result.stop_reason}),
        "nodes": result.problem.n,
        "parameters": result.problem.flat_model.dim,
        "nominal_bits_busiest": max(record["nominal_bits_busiest"] for record in final),
        "bytes_busiest_node": max(record["bytes_busiest_node"] for record in final),
        "bytes_total": max(record["bytes_total"] for record in final),
        "seconds": round(result.seconds, 3),
        **({} if best is None else {"best_round": best.round.tolist()}),
        "sites": [site.name for site in result.problem.sites],
        "groups": [site.group for site in result.problem.sites],
        "final": final,
    }
