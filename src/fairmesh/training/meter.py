"""Measures a state: every site's metrics and their spread, the disagreement of nodes, and the traffic."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fairmesh.algorithms.own_parts import OwnState
from fairmesh.errors import BadInput
from fairmesh.metrics.over_sites import group_means, spread
from fairmesh.networks.base import Network, Traffic
from fairmesh.networks.roles import StateView
from fairmesh.problems.evaluator import Evaluator, Trouble, support
from fairmesh.problems.problem import Problem
from fairmesh.regularizers.simplex import normalized
from fairmesh.storage.run_folder import Record


class Meter:
    """Turns a state into one record per replica, the same at every process. Each process evaluates the sites whose data
    it has. Values by site are in the order of the sites, for every placement."""

    def __init__(
        self,
        problem: Problem,
        placements: Tensor,  # (replicas, n)
        device: torch.device,
        dtype: torch.dtype,
        network: Network,
        view: StateView,
        *,
        splits: Sequence[int],  # the split of each replica
        at_server: bool = False,  # a server has the only model
        home: torch.device | None = None,  # of the held-out data
        own_models: bool = False,
        announce: Callable[[str], None] | None = None,  # told once why a metric has no value; None for a warning
    ):
        self._announce, self._noted = announce, set[str]()
        self.notes: list[str] = []  # what a reader of the numbers must know
        self._problem, self._network, self._view, self._at_server = problem, network, view, at_server
        self._node_of_site = placements.cpu().argsort(dim=-1)
        self._sites_here = placements.cpu()[:, network.hosted.cpu()]  # (replicas, nodes)
        held = [set(sites) for sites in network.process_group.all_gather_json(problem.here)]
        self._holder = torch.tensor([next(k for k, sites in enumerate(held) if i in sites) for i in range(problem.n)])
        self._splits, self._placed = list(splits), (device, dtype, home)
        self._test = Evaluator(problem, "test", device, dtype, home, splits=splits)
        self._validation = Evaluator(problem, "validation", device, dtype, home, splits=splits)
        self._train = None if self._test else Evaluator(problem, "train", device, dtype, home, splits=splits)
        self._own_models = own_models

    @property
    def judged_on(self) -> Literal["test", "train"]:
        return "test" if self._test else "train"

    def own_of_sites(self, own: OwnState | None) -> Tensor | None:
        """Returns the own part of every site (replicas, sites, own_dim), from those of the hosted nodes; None if
        models have no own parts."""
        if own is None:
            return None
        every = self._network.gather(own.rows)
        nodes = self._node_of_site.to(every.device).unsqueeze(-1)
        return every.gather(-2, nodes.expand(-1, -1, every.shape[-1]))

    def by_site(self, rows: Tensor, split: str, own: Tensor | None = None) -> dict[str, Tensor]:
        """Returns each metric of the rows (replicas, dim) at every site: (replicas, sites). Sites are judged with their
        own parts (replicas, sites, own_dim), if they have any."""
        evaluator = {"test": self._test or self._train, "validation": self._validation, "train": self._train}[split]
        if not evaluator:
            return {}
        with self._network.process_group.fail_together():
            found = self._judged_by(evaluator, rows, own)
        self._explain(evaluator.troubles, split if evaluator is not self._train else "train")  # type: ignore[arg-type]
        return found if self._network.process_group.world_size == 1 else self._from_holders(found)

    def _judged_by(self, evaluator: Evaluator, rows: Tensor, own: Tensor | None) -> dict[str, Tensor]:
        if own is None:
            return evaluator.of_sites(rows)
        models = with_own_parts(self._problem, rows, own, self._splits)
        return evaluator.of_own_models(models, torch.arange(self._problem.n).expand(len(rows), -1))

    def _explain(self, troubles: Sequence[Trouble], split: Literal["test", "validation", "train"]) -> None:
        """Says once why a metric has no value at a site. Refuses a metric that fails at every site."""
        every = self._network.process_group.all_gather_json([list(one) for one in troubles])
        by_metric: dict[str, dict[int, Trouble]] = {}
        for one in (Trouble(*fields) for of_process in every for fields in of_process):
            by_metric.setdefault(one.metric, {}).setdefault(one.site, one)
        measured = [i for i in range(self._problem.n) if self._problem.has(i, split)]
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

    def note(self, text: str) -> None:
        """Keeps what a reader of the numbers must know, and says it."""
        self.notes.append(text)
        if self._announce is not None:
            self._announce(text)
        elif self._network.process_group.is_leader:
            warnings.warn(text, UserWarning, stacklevel=2)

    def support(self) -> list[dict[str, Any] | None]:
        """Returns how many samples judge each site, and of which classes; None for a site that is not measured. Of
        several splits, it is for the first."""
        mine = support(self._problem.of_split(0), "test" if self._test else "train")
        every = self._network.process_group.all_gather_json(sorted(mine.items()))
        known = {i: entry for of_process in every for i, entry in of_process}
        return [known.get(i) for i in range(self._problem.n)]

    def _from_holders(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns each metric at every site, from the first process that has the site's data."""
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
        average, mine = self.mean(models), self.own_of_sites(own_parts)
        columns: list[dict[str, Any]] = [{"round": round_index, "replica": r} for r in range(len(average))]
        if self._problem.splits:
            columns = [column | {"split": split} for column, split in zip(columns, self._splits)]
        with_spread(columns, self.by_site(average, "test", mine), self._problem, None)
        if self._validation:
            with_spread(columns, self.by_site(average, "validation", mine), self._problem, "validation")
        if self._own_models and self._network.n > 1:
            with self._network.process_group.fail_together():
                judge = self._test or self._train
                rows = models if own_parts is None else torch.cat([models, own_parts.rows], dim=-1)
                own = judge.of_own_models(rows, self._sites_here)  # type: ignore[union-attr]
            self._explain(judge.troubles, self.judged_on)  # type: ignore[union-attr]
            own = {k: self._of_nodes(v).gather(-1, self._node_of_site) for k, v in own.items()}
            with_spread(columns, own, self._problem, "own_models")
        nodes, node_bytes = self._of_nodes(sent.node_bits), self._of_nodes(sent.node_bytes)
        server, server_bytes = sent.server_bits.cpu(), sent.server_bytes.cpu()
        disagreement = self._consensus_error(models, average)
        for r, column in enumerate(columns):
            column["consensus_models"] = float(disagreement[r])
            column["nominal_bits_busiest"] = float(max(nodes[r].max(), server[r]))
            column["nominal_bits_total"] = float(nodes[r].sum() + server[r])
            column["bytes_busiest_node"] = int(max(node_bytes[r].max(), server_bytes[r]))
            column["bytes_total"] = int(node_bytes[r].sum() + server_bytes[r])
        if weights is not None:
            for r, column in enumerate(columns):
                column["lambda"] = weights[r].cpu().double()[self._node_of_site[r]].tolist()
        if duals is not None and weights is not None:
            for column, apart in zip(columns, self._consensus_error(duals, weights)):
                column["consensus_duals"] = float(apart)
        return columns


def with_own_parts(problem: Problem, rows: Tensor, own: Tensor, splits: Sequence[int]) -> Tensor:
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


def with_spread(columns: list[Record], values: dict[str, Tensor], problem: Problem, under: str | None) -> None:
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
