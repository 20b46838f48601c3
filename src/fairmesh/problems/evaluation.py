"""Accuracy, loss and the user's metrics of many rows on every site's held-out data."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from fairmesh.problems.base import Problem, Samples
from fairmesh.problems.losses import as_floats, per_sample

_FLOATS_AT_ONCE = 1 << 23  # of inputs times rows, so that a chunk of outputs and activations stays small


class Evaluator:
    """Judges rows by the different sets of a split; sites that share a set share the work."""

    def __init__(self, problem: Problem, split: Literal["test", "validation", "train"], device, dtype: torch.dtype):
        sets, of_site = problem.held_out(split)
        self._problem, self._dtype, self._device = problem, dtype, torch.device(device)
        self._sets = [self._placed(samples) for samples in sets]
        self._of_site = torch.tensor(of_site, dtype=torch.int64)
        self._model = problem.flat_model.to(self._device, dtype)

    def __bool__(self) -> bool:
        return bool(self._sets)

    @property
    def names(self) -> list[str]:
        """The metrics in the order they are shown."""
        built_in = ["accuracy", "loss"] if self._problem.classes else ["loss"]
        return list(dict.fromkeys([*self._problem.metrics, *built_in]))

    def _placed(self, samples: Samples) -> tuple[Tensor, Tensor]:
        return samples.inputs.to(self._device), as_floats(samples.targets, self._dtype).to(self._device)

    def of_sites(self, rows: Tensor) -> dict[str, Tensor]:
        """Each metric of rows (replicas, dim) at every site: (replicas, sites), float64 on the CPU."""
        per_set = [self._on_set(rows, inputs, targets) for inputs, targets in self._sets]
        return {name: torch.stack([s[name] for s in per_set], dim=-1)[:, self._of_site] for name in self.names}

    def of_own_models(self, models: Tensor, placements: Tensor) -> dict[str, Tensor]:
        """Each metric of every node's own row (replicas, n, dim) on the data of the site it holds: (replicas, n)."""
        which = self._of_site[placements.cpu()]
        result = {name: torch.zeros(models.shape[:2], dtype=torch.float64) for name in self.names}
        for k, (inputs, targets) in enumerate(self._sets):
            here = which == k
            if bool(here.any()):
                for name, values in self._on_set(models[here.to(models.device)], inputs, targets).items():
                    result[name][here] = values
        return result

    @torch.no_grad()
    def _on_set(self, rows: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Each metric of rows (k, dim) on one set: (k,)."""
        problem = self._problem
        chunk = max(1, _FLOATS_AT_ONCE // (len(rows) * max(1, inputs[0].numel())))
        losses = torch.zeros(len(rows), dtype=torch.float64, device=self._device)
        hits = torch.zeros_like(losses)
        kept: list[Tensor] = []
        for start in range(0, len(inputs), chunk):
            x, y = as_floats(inputs[start : start + chunk], self._dtype), targets[start : start + chunk]
            outputs = vmap(self._model, in_dims=(0, None))(rows, x)
            losses += vmap(lambda o, y=y: per_sample(problem.loss, o, y))(outputs).double().sum(dim=-1)
            if problem.classes:
                hits += (outputs.argmax(dim=-1) == y).double().sum(dim=-1)
            if problem.metrics:
                kept.append(outputs)
        found = {"loss": losses / len(inputs)}
        if problem.classes:
            found["accuracy"] = hits / len(inputs)
        for name, metric in problem.metrics.items():
            every, truth = torch.cat(kept, dim=1).cpu(), targets.cpu()  # scikit-learn's functions know no other device
            found[name] = torch.tensor([float(metric(o, truth)) for o in every], dtype=torch.float64)
        return {name: found[name].cpu() for name in self.names}


def spread(values: Tensor, higher_is_better: bool) -> dict[str, Tensor]:
    """Worst, mean, best and the gap between best and worst over the last axis."""
    low, high = values.amin(dim=-1), values.amax(dim=-1)
    worst, best = (low, high) if higher_is_better else (high, low)
    return {"worst": worst, "mean": values.mean(dim=-1), "best": best, "gap": (best - worst).abs()}


def group_means(values: Tensor, groups: Sequence[str]) -> dict[str, Tensor]:
    """The mean over the sites of each group."""
    return {
        g: values[..., [i for i, name in enumerate(groups) if name == g]].mean(dim=-1) for g in dict.fromkeys(groups)
    }
