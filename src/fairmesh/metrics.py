"""What is measured: every site's accuracy and loss, who is left behind, how far nodes disagree, what was sent."""

from typing import Any

import torch
from torch import Tensor

from fairmesh.ambiguity import Regularizer, worst_case
from fairmesh.networks.base import Traffic
from fairmesh.problems.base import Problem
from fairmesh.problems.evaluation import Evaluator, group_means, spread

Record = dict[str, Any]


def consensus_error(rows: Tensor) -> Tensor:
    """The mean over nodes of the squared distance to the network average: (replicas,)."""
    return (rows - rows.mean(dim=-2, keepdim=True)).square().sum(dim=-1).mean(dim=-1)


class Meter:
    """Turns a state into one record per replica. Everything by site is in the order of the sites, wherever placed."""

    def __init__(
        self,
        problem: Problem,
        placements: Tensor,  # (replicas, n)
        device: torch.device,
        dtype: torch.dtype,
        *,
        home: torch.device | None = None,  # of the held-out data
        own_models: bool = False,
        regularizer: Regularizer | None = None,  # given where Phi is to be measured
    ):
        self._problem, self._placements = problem, placements.cpu()
        self._node_of_site = self._placements.argsort(dim=-1)
        self._test = Evaluator(problem, "test", device, dtype, home)
        self._validation = Evaluator(problem, "validation", device, dtype, home)
        needs_train = regularizer is not None or not self._test
        self._train = Evaluator(problem, "train", device, dtype, home) if needs_train else None
        self._own_models, self._regularizer = own_models, regularizer

    @property
    def judged_on(self) -> str:
        return "test" if self._test else "train"

    def by_site(self, rows: Tensor, split: str) -> dict[str, Tensor]:
        """Each metric of the rows (replicas, dim) at every site: (replicas, sites)."""
        evaluator = {"test": self._test or self._train, "validation": self._validation, "train": self._train}[split]
        return evaluator.of_sites(rows) if evaluator else {}

    def worst_on_validation(self, rows: Tensor) -> Tensor:
        """The primary metric of the worst site on validation data, negated where lower is better: (replicas,)."""
        primary = self._problem.primary
        values = self.by_site(rows, "validation")[primary]
        return values.amin(dim=-1) if primary != "loss" else -values.amax(dim=-1)

    def records(self, round_index: int, models: Tensor, duals: Tensor | None, sent: Traffic) -> list[Record]:
        """One record per replica of the network-average model; `models` (replicas, n, dim) in the order of nodes."""
        average = models.mean(dim=-2)
        columns: list[dict[str, Any]] = [{"round": round_index, "replica": r} for r in range(len(average))]
        with_spread(columns, self.by_site(average, "test"), self._problem, None)
        if self._validation:
            with_spread(columns, self.by_site(average, "validation"), self._problem, "validation")
        if self._own_models and models.shape[-2] > 1:
            own = (self._test or self._train).of_own_models(models, self._placements)  # type: ignore[union-attr]
            with_spread(
                columns, {k: v.gather(-1, self._node_of_site) for k, v in own.items()}, self._problem, "own_models"
            )
        nodes, server, node_bytes, server_bytes = (t.cpu() for t in sent)
        disagreement = consensus_error(models).cpu()
        for r, column in enumerate(columns):
            column["consensus_models"] = float(disagreement[r])
            column["nominal_bits_busiest"] = float(max(nodes[r].max(), server[r]))
            column["nominal_bits_total"] = float(nodes[r].sum() + server[r])
            column["bytes_busiest_node"] = int(max(node_bytes[r].max(), server_bytes[r]))
            column["bytes_total"] = int(node_bytes[r].sum() + server_bytes[r])
        if duals is not None:
            weights = duals.mean(dim=-2).cpu().double()
            apart = consensus_error(duals).cpu()
            for r, column in enumerate(columns):
                column["lambda"] = weights[r][self._node_of_site[r]].tolist()
                column["consensus_duals"] = float(apart[r])
        if self._regularizer is not None:
            for column, value in zip(columns, self.worst_case(average)):
                column["phi"] = float(value)
        return columns

    def worst_case(self, rows: Tensor) -> Tensor:
        """Phi(theta) = max over lambda of g, from every site's whole training set: (replicas,)."""
        if self._regularizer is None:
            raise ValueError("this meter was made without a regularizer")
        losses = self.by_site(rows, "train")["loss"].unsqueeze(-2)
        prior = self._problem.prior_of_sites.expand_as(losses)
        return worst_case(self._regularizer, losses, prior).flatten()


def with_spread(columns: list[Record], values: dict[str, Tensor], problem: Problem, under: str | None) -> None:
    """Adds to each replica's record each metric's numbers by site, by group, and their worst, mean, best and gap."""
    names = [str(site.group) for site in problem.sites]
    for metric, by_site in values.items():
        higher, own = metric != "loss", metric in problem.metrics
        numbers = spread(by_site, higher, own)
        groups = group_means(by_site, names, own)
        over_groups = spread(torch.stack(list(groups.values()), dim=-1), higher, own)
        for r, column in enumerate(columns):
            entry: Record = {name: float(value[r]) for name, value in numbers.items()}
            entry["sites"] = by_site[r].tolist()
            entry["groups"] = {name: float(value[r]) for name, value in groups.items()}
            entry["over_groups"] = {name: float(value[r]) for name, value in over_groups.items()}
            entry["worst_group"] = entry["over_groups"]["worst"]
            (column if under is None else column.setdefault(under, {}))[metric] = entry
