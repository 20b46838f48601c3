"""Measures a state: every site's metrics and their spread, the disagreement of nodes, and the traffic."""

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fairmesh.algorithms.companions.own_parts import OwnState
from fairmesh.algorithms.fitting import trains_alone
from fairmesh.errors import BadInput
from fairmesh.metrics.base import NamedMetric
from fairmesh.metrics.over_sites import group_means, spread
from fairmesh.networks.base import Traffic
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.problems.evaluator import Evaluator, Trouble, support
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.primary import undefined_everywhere, undefined_in_words, undefined_sites
from fairmesh.regularizers.simplex import normalized
from fairmesh.storage.run_folder import Record
from fairmesh.training.loop import Training

Split = Literal["test", "validation", "train"]


class Meter:
    """Turns a state into one record per replica, the same at every process. Each process evaluates the sites whose data
    it has. Values by site are in the order of the sites, for every placement."""

    def __init__(self, training: Training, announce: Callable[[str], None] | None):
        """`announce` is told once why a metric has no value; None for a warning."""
        problem, network, placements = training.problem, training.network, training.placements.cpu()
        self._announce, self._noted = announce, set[str]()
        self.notes: list[str] = []  # what a reader of the numbers must know
        self._problem, self._network, self._view = problem, network, training.view
        self._private = training.private
        self._at_server = training.algorithm.needs_server  # which has the only model
        self._own_models = training.options.own_models or trains_alone(training.algorithm)
        self._node_of_site = placements.argsort(dim=-1)
        self._sites_here = placements[:, network.hosted.cpu()]  # (replicas, nodes)
        held = [set(sites) for sites in network.process_group.all_gather_json(problem.here)]
        self._holder = torch.tensor([next(k for k, sites in enumerate(held) if i in sites) for i in range(problem.n)])
        self._splits = [replica.split for replica in training.replicas]
        placed = (training.device, training.dtype, training.data_home)
        self._judge = Evaluator(problem, "test", *placed, splits=self._splits)
        self.judged_on: Literal["test", "train"] = "test" if self._judge else "train"
        if not self._judge:
            self._judge = Evaluator(problem, "train", *placed, splits=self._splits)
        self._validation = Evaluator(problem, "validation", *placed, splits=self._splits)
        if undefined := undefined_primary(problem, network.process_group, self.judged_on):
            self.note(undefined_in_words(problem, undefined, self.judged_on))

    def own_of_sites(self, own: OwnState | None) -> Tensor | None:
        """Returns the own part of every site (replicas, sites, own_dim), from those of the hosted nodes; None if
        models have no own parts."""
        if own is None:
            return None
        every = self._network.gather(own.rows)
        nodes = self._node_of_site.to(every.device).unsqueeze(-1)
        return every.gather(-2, nodes.expand(-1, -1, every.shape[-1]))

    def _by_site(self, judge: Evaluator, split: Split, rows: Tensor, sites: Tensor | None = None) -> dict[str, Tensor]:
        """Returns each metric of common models (replicas, dim) at every site here: (replicas, sites); or of the models
        (replicas, k, dim) of the given sites (replicas, k)."""
        with self._network.process_group.fail_together():
            found = judge.of_sites(rows) if sites is None else judge.of_own_models(rows, sites)
        self._explain(judge.troubles, split)
        return found

    def _explain(self, troubles: Sequence[Trouble], split: Split) -> None:
        """Says once why a metric has no value at a site. Refuses a metric that fails at every site."""
        every = self._network.process_group.all_gather_json([list(one) for one in troubles])
        by_metric: dict[str, dict[int, Trouble]] = {}
        for one in (Trouble(*fields) for of_process in every for fields in of_process):
            by_metric.setdefault(one.metric, {}).setdefault(one.site, one)
        measured = [i for i, site in enumerate(self._problem.sites) if getattr(site, split) is not None]
        for metric, at in by_metric.items():
            first = at[min(at)]
            with self._network.process_group.fail_together():
                if all(i in at and at[i].raised for i in measured):
                    raise BadInput(f"{first.text} (at every site)" if len(measured) > 1 else first.text)
            if metric not in self._noted:
                self._noted.add(metric)
                others = f", and {len(at) - 1} other site{'s' * (len(at) > 2)}" if len(at) > 1 else ""
                self.note(
                    f"{metric} is not defined at {self._problem.sites[first.site].name}{others}: {first.text}; the "
                    "sites that remain keep their numbers"
                )

    def note(self, text: str, warn: bool = True) -> None:
        """Keeps what a reader of the numbers must know, and says it: without `announce` by a warning, or in the log."""
        self.notes.append(text)
        if self._announce:
            self._announce(text)
        elif self._network.process_group.is_leader:
            warnings.warn(text, UserWarning, stacklevel=2) if warn else logging.getLogger("fairmesh").warning(text)

    def support(self) -> list[dict[str, Any] | None]:
        """Returns how many samples judge each site, and of which classes; None for a site that is not measured. Of
        several splits, it is for the first."""
        mine = support(self._problem.of_split(0), self.judged_on)
        every = self._network.process_group.all_gather_json(sorted(mine.items()))
        known = {i: entry for of_process in every for i, entry in of_process}
        return [known.get(i) for i in range(self._problem.n)]

    def _from_holders(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns each metric at every site, from the first process that has the site's data."""
        if self._network.process_group.world_size == 1:
            return found
        mine = torch.stack(list(found.values()))  # (metrics, replicas, sites)
        every = self._network.process_group.all_gather(mine.numpy().tobytes())
        of_processes = torch.stack([torch.frombuffer(bytearray(one), dtype=mine.dtype).view_as(mine) for one in every])
        chosen = of_processes[self._holder, :, :, torch.arange(len(self._holder))]  # (sites, metrics, replicas)
        return dict(zip(found, chosen.permute(1, 2, 0)))

    def mean(self, rows: Tensor) -> Tensor:
        """Returns the network average of hosted rows (replicas, nodes, dim), or the server's row: (replicas, dim)."""
        return rows.mean(dim=-2) if self._at_server else self._network.mean(rows)

    def _consensus_error(self, rows: Tensor, average: Tensor) -> Tensor:
        """Returns the mean over nodes of the squared distance to the network average: (replicas,)."""
        distances = (rows - average.unsqueeze(-2)).square().sum(dim=-1, keepdim=True)
        return self.mean(distances).squeeze(-1).cpu()

    def _of_nodes(self, values: Tensor) -> Tensor:
        """Returns all nodes' numbers (replicas, n) from those of the hosted nodes."""
        return self._network.gather(values.to(self._network.own.device).unsqueeze(-1)).squeeze(-1).cpu()

    def weights(self, state: Any) -> Tensor | None:
        """Returns lambda by node (replicas, n): the network's average, or each node's own weight, scaled to sum to
        one."""
        duals, own = self._view.duals(state), self._view.own_weights(state)
        if duals is not None:
            return self.mean(duals)
        return None if own is None else normalized(self._network.gather(own).squeeze(-1))

    def records(self, round_index: int, state: Any, sent: Traffic, own_parts: OwnState | None = None) -> list[Record]:
        """Returns one record per replica for the network-average model. `state` is the algorithm's, of the hosted
        nodes. Each site is judged with its own part of the model, if there is one."""
        models, duals, weights = self._view.models(state), self._view.duals(state), self.weights(state)
        rows, sites, own = self.mean(models), None, self.own_of_sites(own_parts)
        disagreement = self._consensus_error(models, rows)
        columns: list[Record] = [{"round": round_index, "replica": r} for r in range(len(rows))]
        if self._problem.splits:
            columns = [column | {"split": split} for column, split in zip(columns, self._splits)]
        if own is not None:  # sites are judged with their own parts
            rows = with_own_parts(self._problem, rows, own, self._splits)
            sites = torch.arange(self._problem.n).expand(len(rows), -1)
        found = self._by_site(self._judge, self.judged_on, rows, sites)
        with_spread(columns, self._from_holders(found), self._problem, None)
        if self._validation:
            found = self._by_site(self._validation, "validation", rows, sites)
            with_spread(columns, self._from_holders(found), self._problem, "validation")
        if self._own_models and self._network.n > 1:
            rows = models if own_parts is None else torch.cat([models, own_parts.rows], dim=-1)
            found = self._by_site(self._judge, self.judged_on, rows, self._sites_here)
            found = {name: self._of_nodes(v).gather(-1, self._node_of_site) for name, v in found.items()}
            with_spread(columns, found, self._problem, "own_models")
        bits, size = self._of_nodes(sent.node_bits), self._of_nodes(sent.node_bytes)
        duals_apart = None if duals is None or weights is None else self._consensus_error(duals, weights)
        for r, column in enumerate(columns):
            column["consensus_models"] = float(disagreement[r])
            column |= traffic(bits[r], size[r], float(sent.server_bits[r]), float(sent.server_bytes[r]))
            if weights is not None:
                column["lambda"] = weights[r].cpu().double()[self._node_of_site[r]].tolist()
            if self._private is not None:
                column["epsilon"] = self._private.spent(round_index)
            if duals_apart is not None:
                column["consensus_duals"] = float(duals_apart[r])
        return columns


def undefined_primary(problem: Prepared, process_group: ProcessGroup, split: Split) -> list[int]:
    """Returns the sites, of all processes, whose rows do not define the primary metric.

    Raises:
        BadInput: It is defined at no site.
    """
    if not isinstance(problem.metrics.get(problem.primary), NamedMetric):
        return []
    found = {i for sites in process_group.all_gather_json(undefined_sites(problem, split)) for i in sites}
    judged = {i for i, site in enumerate(problem.sites) if getattr(site, split) is not None}
    with process_group.fail_together():
        if judged and judged <= found:
            raise undefined_everywhere(problem, split)
    return sorted(found)


def traffic(bits: Tensor, size: Tensor, server_bits: float = 0.0, server_bytes: float = 0.0) -> Record:
    """Returns the traffic of all nodes (n,), and of a server if there is one, as a record has it."""
    return {
        "nominal_bits_busiest": max(float(bits.max()), server_bits),
        "nominal_bits_total": float(bits.sum()) + server_bits,
        "bytes_busiest_node": int(max(float(size.max()), server_bytes)),
        "bytes_total": int(float(size.sum()) + server_bytes),
    }


def with_own_parts(problem: Prepared, rows: Tensor, own: Tensor, splits: Sequence[int]) -> Tensor:
    """Returns the models that sites are judged by: the common rows (replicas, dim) with each site's own part.

    Args:
        problem: The problem.
        rows: The shared parameters of each replica.
        own: The own part of every site (replicas, sites, own_dim).
        splits: The split of each replica.
    """
    shares = torch.stack([problem.of_split(k).shares_of_samples for k in splits])
    own = problem.flat_model.own_for_judging(own, shares)
    return torch.cat([rows.unsqueeze(1).expand(-1, problem.n, -1), own.to(rows)], dim=-1)


def with_spread(columns: list[Record], values: dict[str, Tensor], problem: Prepared, under: str | None) -> None:
    """Adds each metric's values by site and by group, and their worst, mean, best and gap, to each replica's record."""
    names = [str(site.group) for site in problem.sites]
    for metric, by_site in values.items():
        higher = problem.higher_is_better(metric)
        numbers = spread(by_site, higher)
        groups = group_means(by_site, names)
        over_groups = spread(torch.stack(list(groups.values()), dim=-1), higher)
        for r, column in enumerate(columns):
            entry: Record = {name: float(value[r]) for name, value in numbers.items()}
            entry["sites"] = by_site[r].tolist()
            entry["groups"] = {name: float(value[r]) for name, value in groups.items()}
            entry["over_groups"] = {name: float(value[r]) for name, value in over_groups.items()}
            entry["worst_group"] = entry["over_groups"]["worst"]
            (column if under is None else column.setdefault(under, {}))[metric] = entry
