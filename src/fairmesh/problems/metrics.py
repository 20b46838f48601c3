"""Accuracy, loss and the user's metrics of many models on every site's held-out data."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from fairmesh.errors import BadInput
from fairmesh.problems.losses import as_floats, per_sample
from fairmesh.problems.problem import Problem

_FLOATS_AT_ONCE = 1 << 23  # of inputs times rows, so that a chunk of outputs and activations stays small


class Evaluator:
    """Judges rows by the different sets of a split, all in one pass; sites that share a set share the work. The data
    stays at `home` and visits the device in chunks."""

    def __init__(
        self,
        problem: Problem,
        split: Literal["test", "validation", "train"],
        device: torch.device | str,
        dtype: torch.dtype,
        home: torch.device | str | None = None,
        failed: Callable[[str, BadInput], None] | None = None,  # told of a metric that raises, which is NaN then
    ):
        self._failed = failed
        sets, of_site = problem.held_out(split)
        self._problem, self._dtype, self._device = problem, dtype, torch.device(device)
        self._of_site = torch.tensor(of_site, dtype=torch.int64)
        self._sizes = [len(samples) for samples in sets]
        self._model = problem.flat_model.to(self._device, dtype)
        if sets:
            home = home or device
            self._inputs = torch.cat([samples.inputs for samples in sets]).to(home)
            self._targets = as_floats(torch.cat([samples.targets for samples in sets]), dtype).to(home)
            self._set_of_sample = torch.repeat_interleave(torch.tensor(self._sizes))

    def __bool__(self) -> bool:
        return bool(self._sizes)

    @property
    def names(self) -> list[str]:
        """The metrics in the order they are shown."""
        return measured_names(self._problem)

    def of_sites(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns each metric of rows (replicas, dim) at every site: (replicas, sites), float64 on the CPU.

        It is NaN at sites that another process holds."""
        per_set = self._on_sets(rows, 0, len(self._sizes))
        there = (self._of_site < 0).expand(len(rows), -1)
        return {name: values[:, self._of_site].masked_fill(there, torch.nan) for name, values in per_set.items()}

    def of_own_models(self, models: Tensor, placements: Tensor) -> dict[str, Tensor]:
        """Returns each metric of every hosted node's own row on its own site's data: (replicas, nodes).

        `models` is (replicas, nodes, dim), and `placements` (replicas, nodes) is the site that each node holds."""
        which = self._of_site[placements.cpu()]
        result = {name: torch.zeros(models.shape[:2], dtype=torch.float64) for name in self.names}
        for k in range(len(self._sizes)):
            here = which == k
            if bool(here.any()):
                for name, values in self._on_sets(models[here.to(models.device)], k, k + 1).items():
                    result[name][here] = values[:, 0]
        return result

    @torch.no_grad()
    def _on_sets(self, rows: Tensor, first: int, last: int) -> dict[str, Tensor]:
        """Returns each metric of rows (k, dim) on the sets from `first` to `last` - 1: (k, sets)."""
        problem, sizes = self._problem, self._sizes[first:last]
        begin, count = sum(self._sizes[:first]), sum(sizes)
        chunk = max(1, _FLOATS_AT_ONCE // (len(rows) * max(1, self._inputs[0].numel())))
        losses = torch.zeros(len(rows), len(sizes), dtype=torch.float64)
        hits = torch.zeros_like(losses)
        kept: list[Tensor] = []
        for start in range(begin, begin + count, chunk):
            here = slice(start, min(start + chunk, begin + count))
            inputs = as_floats(self._inputs[here].to(self._device), self._dtype)
            targets = self._targets[here].to(self._device)
            owner = self._set_of_sample[here] - first
            outputs = vmap(self._model, in_dims=(0, None))(rows, inputs)
            each = vmap(lambda o, t=targets: per_sample(problem.loss, o, t))(outputs)
            losses.index_add_(1, owner, each.double().cpu())  # on the host: a GPU adds in no fixed order
            if problem.classes:
                hits.index_add_(1, owner, (outputs.argmax(dim=-1) == targets).double().cpu())
            if problem.metrics:
                kept.append(outputs.cpu())
        lengths = torch.tensor(sizes, dtype=torch.float64)
        found = {"loss": losses / lengths}
        if problem.classes:
            found["accuracy"] = hits / lengths
        if problem.metrics:
            pieces = torch.cat(kept, dim=1).split(sizes, dim=1)
            truths = self._targets[begin : begin + count].cpu().split(sizes)
            for name, metric in problem.metrics.items():
                scores = [[self._score(name, metric, o, t) for o in outputs] for outputs, t in zip(pieces, truths)]
                found[name] = torch.tensor(scores, dtype=torch.float64).T
        return {name: found[name] for name in self.names}

    def _score(self, name: str, metric: Callable[[Tensor, Tensor], Any], outputs: Tensor, targets: Tensor) -> float:
        try:
            return _score(name, metric, outputs, targets)
        except BadInput as error:
            if self._failed is None:
                raise
            self._failed(name, error)
            return torch.nan


class SplitEvaluator:
    """Judges the model of each replica by the sets of its own split of the data. It is used as `Evaluator` is.

    Args:
        splits: The split of each replica.
        others: As those of `Evaluator`.
    """

    def __init__(
        self,
        problem: Problem,
        splits: Sequence[int],
        split: Literal["test", "validation", "train"],
        device: torch.device | str,
        dtype: torch.dtype,
        home: torch.device | str | None = None,
    ):
        used = sorted(set(splits))
        self._of_split = {k: Evaluator(problem.of_split(k), split, device, dtype, home) for k in used}
        self._rows = {k: torch.tensor([one == k for one in splits]) for k in used}

    def __bool__(self) -> bool:
        return all(map(bool, self._of_split.values()))

    def of_sites(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns each metric of rows (replicas, dim) at every site: (replicas, sites)."""
        return self._joined({k: e.of_sites(rows[self._rows[k].to(rows.device)]) for k, e in self._of_split.items()})

    def of_own_models(self, models: Tensor, placements: Tensor) -> dict[str, Tensor]:
        """Returns each metric of every hosted node's own row on its own site's data: (replicas, nodes)."""
        return self._joined(
            {
                k: one.of_own_models(models[self._rows[k].to(models.device)], placements[self._rows[k]])
                for k, one in self._of_split.items()
            }
        )

    def _joined(self, found: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns each metric of all replicas, from those of the replicas of each split."""
        if len(found) == 1:
            return next(iter(found.values()))
        first = next(iter(found.values()))
        joined = {}
        for name, values in first.items():
            joined[name] = values.new_empty(sum(int(mine.sum()) for mine in self._rows.values()), *values.shape[1:])
            for k, of_split in found.items():
                joined[name][self._rows[k]] = of_split[name]
        return joined


def measured_names(problem: Problem) -> list[str]:
    """Returns the metrics in the order they are shown."""
    built_in = ["accuracy", "loss"] if problem.classes else ["loss"]
    return list(dict.fromkeys([*problem.metrics, *built_in]))


def measured(problem: Problem, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Returns each metric of a model, given its outputs for a whole set of samples."""
    found = {"loss": float(per_sample(problem.loss, outputs, targets).double().mean())}
    if problem.classes:
        found["accuracy"] = float((outputs.argmax(dim=-1) == targets).double().mean())
    found |= {name: _score(name, metric, outputs, targets) for name, metric in problem.metrics.items()}
    return {name: found[name] for name in measured_names(problem)}


def _score(name: str, metric: Callable[[Tensor, Tensor], Any], outputs: Tensor, targets: Tensor) -> float:
    try:
        return float(metric(outputs, targets))
    except Exception as error:  # a user's function may raise anything
        raise BadInput(
            f"metric {name!r} failed on outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def spread(values: Tensor, higher_is_better: bool, skip_nan: bool = False) -> dict[str, Tensor]:
    """Returns worst, mean, best and the gap between best and worst over the last axis. With `skip_nan` it leaves out
    NaN: a user's metric may be undefined at some sites, such as an AUC where all targets are equal."""
    absent = values.isnan() if skip_nan else torch.zeros_like(values, dtype=torch.bool)
    low = values.masked_fill(absent, torch.inf).amin(dim=-1)
    high = values.masked_fill(absent, -torch.inf).amax(dim=-1)
    nowhere = absent.all(dim=-1)
    worst, best = (low, high) if higher_is_better else (high, low)
    worst, best = (t.masked_fill(nowhere, torch.nan) for t in (worst, best))
    return {"worst": worst, "mean": _exact_mean(values, absent), "best": best, "gap": (best - worst).abs()}


def _exact_mean(values: Tensor, absent: Tensor) -> Tensor:
    """Returns the mean over the last axis, NaN where all is absent. The sum is exact until it is rounded, so that sites
    with other CPUs report the same number."""
    rows, out = values.reshape(-1, values.shape[-1]).tolist(), absent.reshape(-1, values.shape[-1]).tolist()
    kept = [[value for value, gone in zip(row, left) if not gone] for row, left in zip(rows, out)]
    means = [(math.fsum if max(map(abs, row)) < 1e300 else sum)(row) / len(row) if row else math.nan for row in kept]
    return torch.tensor(means, dtype=values.dtype, device=values.device).reshape(values.shape[:-1])


def group_means(values: Tensor, groups: Sequence[str], skip_nan: bool = False) -> dict[str, Tensor]:
    """Returns the mean over the sites of each group, leaving out sites without a number."""
    members = {g: [i for i, name in enumerate(groups) if name == g] for g in dict.fromkeys(groups)}
    return {g: spread(values[..., sites], True, skip_nan)["mean"] for g, sites in members.items()}
