"""Accuracy, loss and the chosen metrics of many models on every site's held-out data."""

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fairmesh.data.rows import SampleRows
from fairmesh.errors import BadInput, in_a_line
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.row_loss import answering, as_floats, losses_of_samples

_FLOATS_AT_ONCE = 1 << 23  # of inputs times rows, so that a chunk of outputs and activations stays small


class Trouble(NamedTuple):
    """Why a metric has no value at a site."""

    metric: str
    site: int
    text: str
    raised: bool  # by the metric's own code


def evaluated_at_once(models: int, numbers: int) -> int:
    """Returns how many samples are evaluated at once, given their size and the number of models."""
    return max(1, _FLOATS_AT_ONCE // (models * max(1, numbers)))


class Evaluator:
    """Judges rows by the different sets of a split, all in one pass; sites that share a set share the work. The data
    stays at `home` and visits the device in chunks.

    A metric has no value at a site without such a set, or where it raises, or where the model predicts NaN; `troubles`
    says why, for the last evaluation.

    Args:
        problem: The problem.
        split: Which sets judge.
        device: Where models are evaluated.
        dtype: In which precision.
        home: Where the data stays. Default: None, on the device.
        failed: Told of a metric without a value. Default: a function that does nothing.
        splits: The split of the data whose sets judge each replica's model, or one for all. Default: (0,).
    """

    def __init__(
        self,
        problem: Prepared,
        split: Literal["test", "validation", "train"],
        device: torch.device | str,
        dtype: torch.dtype,
        home: torch.device | str | None = None,
        failed: Callable[[str, BadInput], None] = lambda metric, error: None,
        splits: Sequence[int] = (0,),
    ):
        self._failed, self._split = failed, split
        self.troubles: list[Trouble] = []
        self.names = measured_names(problem)
        self._dtype, self._device = dtype, torch.device(device)
        self._home = torch.device(home or device)
        used = sorted(set(splits))
        self._problems = [problem.of_split(k) for k in used]
        self._of_replica = torch.tensor([used.index(k) for k in splits])  # the split of each, among those used
        self._answers = [
            answering(one.flat_model.to(self._device, dtype), one.loss, one.at_once(self._device))
            for one in self._problems
        ]
        held = [one.held_out(split) for one in self._problems]
        counts = [len(sets) for sets, _ in held]
        self._has_sets = all(of_site for _, of_site in held)
        self._firsts = torch.tensor([0, *counts]).cumsum(0)  # where the sets of each split begin, and the end
        of_site = torch.tensor([of_site or [-1] * problem.n for _, of_site in held])
        self._of_site = torch.where(of_site < 0, of_site, of_site + self._firsts[:-1, None])  # (splits, sites)
        self._sets = [samples for sets, _ in held for samples in sets]
        self._sizes = [len(samples) for samples in self._sets]
        # Whether rows can be judged by several sets in one pass, and whether by sets of several splits.
        stacked = {one.at_once(self._device) for one in self._problems} == {None}
        self._stacks = stacked and not problem.metrics and not any(samples.stream for samples in self._sets)
        self._joins = self._stacks and len(used) > 1 and counts[0] > 0 and self._are_alike(counts)
        self._split_of_set = torch.repeat_interleave(torch.tensor(counts)).mul(not self._joins).tolist()

    def _are_alike(self, counts: Sequence[int]) -> bool:
        """Returns whether all splits have the same model, loss and number of sets."""
        return len({(id(p.flat_model), id(p.loss), count) for p, count in zip(self._problems, counts)}) == 1

    @cached_property
    def _rows(self) -> SampleRows:
        return SampleRows(self._sets, self._home)

    @cached_property
    def _set_of_sample(self) -> Tensor:
        return torch.repeat_interleave(torch.tensor(self._sizes))

    def __bool__(self) -> bool:
        """Returns whether some site has such a set, here or in another process."""
        return self._has_sets

    def of_sites(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns each metric of rows (replicas, dim) at every site: (replicas, sites), float64 on the CPU.

        It is NaN at sites that another process holds, and at those without such a set."""
        self.troubles = []
        of_replica = self._of_replica.expand(len(rows))
        first, of_site = self._firsts[of_replica].unsqueeze(1), self._of_site[of_replica]
        most = max(1, int(self._firsts.diff().max()))
        if self._joins:
            per_set = self._of_pairs(rows.unsqueeze(1).expand(-1, most, -1), first + torch.arange(most))
        else:
            per_set = {name: torch.full((len(rows), most), torch.nan, dtype=torch.float64) for name in self.names}
            for k, (begin, end) in enumerate(itertools.pairwise(self._firsts.tolist())):
                judged = of_replica == k
                if begin < end:  # else the sites of this process have no such set
                    for name, values in self._on_sets(rows[judged.to(rows.device)], begin, end).items():
                        per_set[name][judged, : end - begin] = values
        places = (of_site - first).clamp(min=0)
        return {name: values.gather(1, places).masked_fill(of_site < 0, torch.nan) for name, values in per_set.items()}

    def of_own_models(self, models: Tensor, placements: Tensor) -> dict[str, Tensor]:
        """Returns each metric of every hosted node's own row on its own site's data: (replicas, nodes).

        `models` is (replicas, nodes, dim), and `placements` (replicas, nodes) is the site that each node holds."""
        self.troubles = []
        return self._of_pairs(models, self._of_site[self._of_replica.expand(len(models))].gather(1, placements.cpu()))

    def _of_pairs(self, models: Tensor, which: Tensor) -> dict[str, Tensor]:
        """Returns each metric of every row of `models` (k, l, dim) on the set of that number in `which` (k, l); NaN
        where the number is -1."""
        result = {name: torch.full(models.shape[:2], torch.nan, dtype=torch.float64) for name in self.names}
        for sets in self._judged_together(which):
            rows = torch.stack([models[(which == k).to(models.device)] for k in sets])
            together = self._on_own_sets(rows, sets) if len(sets) > 1 else {}
            for j, k in enumerate(sets):
                values = together or self._on_sets(rows[j], k, k + 1)
                for name in self.names:
                    result[name][which == k] = values[name][:, j if together else 0]
        return result

    def _judged_together(self, which: Tensor) -> list[list[int]]:
        """Returns the sets that have rows, given the set of each row. Those that are judged in one pass are together:
        small sets of similar size that equally many rows are judged by."""
        counts = torch.bincount(which[which >= 0], minlength=len(self._sizes)).tolist()
        alike: dict[tuple[int, int, int], list[int]] = {}
        for k, count in enumerate(counts):
            if count:
                alike.setdefault((self._split_of_set[k], count, self._sizes[k].bit_length()), []).append(k)
        groups = []
        for (_, count, _), sets in alike.items():
            longest = max(self._sizes[k] for k in sets)
            few = longest <= evaluated_at_once(count * len(sets), self._rows.numbers_per_sample)
            groups += [sets] if few and self._stacks else [[k] for k in sets]
        return groups

    @torch.no_grad()
    def _on_own_sets(self, rows: Tensor, sets: Sequence[int]) -> dict[str, Tensor]:
        """Returns loss and accuracy of rows (sets, k, dim), each on its own set: (k, sets). Shorter sets are padded by
        their last sample. Nothing if a loss is NaN or a set has no labels, which `_on_sets` explains."""
        sizes = torch.tensor([self._sizes[k] for k in sets])
        places = torch.arange(int(sizes.max())).expand(len(sets), -1)
        numbers = torch.tensor([sum(self._sizes[:k]) for k in sets]).unsqueeze(1) + places.minimum(sizes[:, None] - 1)
        pair = self._rows.take(numbers.flatten().to(self._home))
        inputs, targets = (
            trees.mapped(
                lambda part: part.unflatten(0, places.shape), as_floats(_placed(tree, self._device), self._dtype)
            )
            for tree in pair
        )
        split, mine = self._split_of_set[sets[0]], (places < sizes[:, None]).unsqueeze(1)
        problem = self._problems[split]
        outputs, each = vmap(self._answers[split])(rows, inputs, targets)
        each = each.double().cpu()
        labelled = self._labelled(targets, axes=2)
        if bool(each.isnan().any()) or not bool((labelled & mine[:, 0]).any(dim=1).all()):
            return {}
        found = {"loss": ((each * mine).sum(dim=-1) / sizes[:, None]).T}
        if problem.classes:
            right = vmap(lambda o, t: vmap(lambda one: problem.right(one, t))(o))(outputs, targets).cpu()
            found["accuracy"] = ((right & mine).sum(dim=-1, dtype=torch.float64) / sizes[:, None]).T
        return found

    @torch.no_grad()
    def _on_sets(self, rows: Tensor, first: int, last: int) -> dict[str, Tensor]:
        """Returns each metric of rows (k, dim) on the sets from `first` to `last` - 1: (k, sets)."""
        split, sizes = self._split_of_set[first], self._sizes[first:last]
        problem, answers = self._problems[split], self._answers[split]
        begin, count = sum(self._sizes[:first]), sum(sizes)
        chunk = evaluated_at_once(len(rows), self._rows.numbers_per_sample)
        losses = torch.zeros(len(rows), len(sizes), dtype=torch.float64)
        hits, unpredicted = torch.zeros_like(losses), torch.zeros_like(losses, dtype=torch.bool)
        own = problem.metrics
        kept: list[Tensor] = []
        truths: list[Tree] = []
        with_label = torch.zeros(len(sizes), dtype=torch.int64)
        for here, pair in self._rows.chunks(begin, begin + count, chunk):
            inputs, targets = (as_floats(_placed(tree, self._device), self._dtype) for tree in pair)
            owner = self._set_of_sample[here] - first
            outputs, each = answers(rows, inputs, targets)
            each = each.double().cpu()
            losses.index_add_(1, owner, each)  # on the host: a GPU adds in no fixed order
            if bool(each.isnan().any()):
                lost = ~rows.isfinite().all(dim=1).cpu()
                unpredicted |= self._without_loss(each, outputs, lost, owner, here.start, first, len(sizes))
            labelled = self._labelled(targets, axes=1)
            with_label.index_add_(0, owner, labelled.long())
            if problem.classes:
                right = vmap(lambda o, t=targets: problem.right(o, t))(outputs)
                hits.index_add_(1, owner, right.double().cpu())
            if own:
                kept.append(vmap(problem.readings.predictions)(outputs).cpu())
                truths.append(_placed(targets, "cpu"))
        lengths, unlabelled = torch.tensor(sizes, dtype=torch.float64), with_label == 0
        for k in unlabelled.nonzero().flatten().tolist():
            text = (
                f"all targets of its {sizes[k]} {self._split} samples are {problem.ignored}, which the loss ignores, "
                "so no metric is defined there"
            )
            self._note("loss", first + k, text, raised=False)
        unpredicted |= unlabelled
        found = {"loss": (losses / lengths).masked_fill(unlabelled, torch.nan)}
        if problem.classes:
            found["accuracy"] = (hits / lengths).masked_fill(unpredicted, torch.nan)
        if own:
            pieces = torch.cat(kept, dim=1).split(sizes, dim=1)
            ends, whole = torch.tensor([0, *sizes]).cumsum(0).tolist(), trees.joined(truths)
            of_sets = [trees.at(whole, slice(*ends[k : k + 2])) for k in range(len(sizes))]
            for name, metric in own.items():
                found[name] = torch.full_like(losses, torch.nan)
                for k, (outputs, targets) in enumerate(zip(pieces, of_sets)):
                    for r in (~unpredicted[:, k]).nonzero().flatten().tolist():
                        found[name][r, k], failure = _score(name, metric, outputs[r], targets)
                        if failure:
                            self._note(name, first + k, failure, raised=True)
        return {name: found[name] for name in self.names}

    def _labelled(self, targets: Tree, axes: int) -> Tensor:
        """Returns which held-out samples have a target that the loss does not ignore, on the CPU. The first `axes` axes
        of the targets are those of the samples."""
        ignored = self._problems[0].ignored
        if ignored is None or self._split == "train" or not isinstance(targets, Tensor):
            return torch.ones(trees.leaves(targets)[0].shape[:axes], dtype=torch.bool)
        return (targets != ignored).reshape(*targets.shape[:axes], -1).any(dim=-1).cpu()

    def _without_loss(
        self, each: Tensor, outputs: Tensor, lost: Tensor, owner: Tensor, start: int, first: int, sets: int
    ) -> Tensor:
        """Names the first sample of each set whose loss is NaN. Models that are `lost`, since their parameters are not
        finite, are reported as diverged and not here. Returns at which sets (rows, sets) a model predicts NaN."""
        silent = outputs.isnan().flatten(2).any(dim=-1).cpu() if outputs.ndim > 2 else outputs.isnan().cpu()
        unpredicted = torch.zeros(len(each), sets, dtype=torch.bool)
        undefined = each.isnan()[~lost].any(dim=0)
        for k in owner[each.isnan().any(dim=0)].unique().tolist():
            mine = owner == k
            unpredicted[:, k] = (silent & mine).any(dim=1)
            if not bool((undefined & mine).any()):
                continue
            sample = start + int((undefined & mine).nonzero()[0]) - sum(self._sizes[: first + k])
            if bool(unpredicted[~lost, k].any()):
                text = f"the model predicts NaN for {self._split} sample {sample}, so no metric is defined there"
            else:
                text = f"the loss of {self._split} sample {sample} is NaN, so the loss is not defined there"
            self._note("loss", first + k, text, raised=False)
        return unpredicted

    def _note(self, metric: str, k: int, text: str, raised: bool) -> None:
        """Remembers why a metric has no value on set k."""
        site = int((self._of_site == k).nonzero()[0, -1])
        if (metric, site) not in {trouble[:2] for trouble in self.troubles}:
            self.troubles.append(Trouble(metric, site, text, raised))
        self._failed(metric, BadInput(text))


def measured_names(problem: Prepared) -> list[str]:
    """Returns the metrics in the order they are shown."""
    built_in = ["accuracy", "loss"] if problem.classes else ["loss"]
    return list(dict.fromkeys([*problem.metrics, *built_in]))


def measured(problem: Prepared, outputs: Tensor, targets: Tree, losses: Tensor | None = None) -> dict[str, float]:
    """Returns each metric of a model, given its outputs for a whole set of samples. It is NaN where it fails.

    Args:
        problem: The problem.
        outputs: What the model gives.
        targets: The targets of the samples.
        losses: The loss of each sample; None to compute it from the outputs. Default: None.
    """
    losses = losses_of_samples(problem.output_loss, outputs, targets) if losses is None else losses
    found = {"loss": float(losses.double().mean())}
    if bool(outputs.isnan().any()):
        return dict.fromkeys(measured_names(problem), torch.nan)
    if problem.classes:
        found["accuracy"] = float(problem.right(outputs, targets).double().mean())
    for name, metric in problem.metrics.items():
        found[name], _ = _score(name, metric, problem.readings.predictions(outputs), targets)
    return {name: found[name] for name in measured_names(problem)}


def _placed(tree: Tree, device: torch.device | str) -> Tree:
    return trees.mapped(lambda part: part.to(device), tree)


def _score(name: str, metric: Callable[[Tensor, Any], Any], outputs: Tensor, targets: Tree) -> tuple[float, str]:
    """Returns a metric, and ""; or NaN, and why it fails."""
    try:
        return float(metric(outputs, targets)), ""
    except Exception as error:  # a user's function may raise anything
        return torch.nan, (
            f"metric {name!r} failed on outputs {tuple(outputs.shape)} and targets {trees.form_in_words(targets)} per "
            f"sample: {in_a_line(error)}"
        )


def support(problem: Prepared, split: Literal["test", "validation", "train"]) -> dict[int, dict[str, Any]]:
    """Returns how many samples judge each site whose data is here, and of which classes: {"n": 40, "classes": [30, 10]}
    by the number of the site. Of several labels per sample it counts those that are 1."""
    sets, of_site = problem.held_out(split)
    found: list[dict[str, Any]] = []
    for samples in sets:
        entry: dict[str, Any] = {"n": len(samples)}
        if problem.classes:
            entry |= {} if (counts := samples.class_counts(problem.classes)) is None else {"classes": counts}
        elif problem.task == "multi-label" and not samples.stream:
            entry["classes"] = (samples.targets > 0.5).sum(dim=0).tolist()
        found.append(entry)
    return {i: found[k] for i, k in enumerate(of_site) if k >= 0}
