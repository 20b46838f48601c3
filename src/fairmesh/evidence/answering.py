"""What models answer on the test rows of every site."""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fairmesh.data.rows import SampleRows
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.evidence.outcomes import UNPREDICTED, Answers, Outcomes, in_common
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.identity import fingerprint
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.row_loss import answering, as_floats, lowest_loss, per_sample

_FLOATS_AT_ONCE = 1 << 22  # of inputs and outputs times models
_OUTPUTS_UP_TO = 1 << 22  # floats of outputs that are kept with a run; losses and right or wrong always are


def judged(
    problem: Prepared,
    rows: Mapping[int, Tensor],
    *,
    on: str = "test",
    own_models: bool = False,
    trained_alone: bool = False,
) -> Outcomes:
    """Returns what models answer on the test rows of every site.

    Args:
        problem: The problem, with all its splits.
        rows: For each split, the models as rows: (seeds, dim), or (seeds, sites, dim) with `own_models`.
        on: "test", "validation" or "train". Default: "test".
        own_models: Whether every site is judged by a model of its own. Default: False.
        trained_alone: Whether these models were trained on the rows of their sites only. Default: False.
    """
    answers: list[Answers] = []
    of_sites, room = [], _OUTPUTS_UP_TO
    known: dict[int, tuple[str, Tensor]] = {}  # of each set: its fingerprint and the numbers of its rows
    for split, models in rows.items():
        of_split = problem.of_split(split)
        sets, which = of_split.held_out(on)  # type: ignore[arg-type]
        first, own = len(answers), {}
        for k, samples in enumerate(sets):
            judges = [i for i, one in enumerate(which) if one == k]
            found = _answers(of_split, samples, models[:, judges].flatten(0, 1) if own_models else models, known, room)
            if on == "test" and (identities := of_split.sites[judges[0]].rows) is not None:
                found = replace(found, rows=identities)
            room -= 0 if found.outputs is None else found.outputs.numel()
            own |= zip(judges, found.apart(len(judges))) if own_models else {k: found}
        answers += [own[i] for i in sorted(own)]
        numbers = [sum(one >= 0 for one in which[:i]) if own_models else k for i, k in enumerate(which)]
        of_sites.append(tuple(first + n if k >= 0 else -1 for n, k in zip(numbers, which)) or (-1,) * problem.n)
    return _gathered(problem, answers, of_sites, list(rows), on, trained_alone)


def judged_by_outputs(
    problem: Prepared, outputs: Mapping[int, Mapping[int, Tensor]], *, trained_alone: bool = False
) -> Outcomes:
    """Returns what models of the sites' own answer on their test rows, given the outputs.

    Args:
        problem: The problem, with all its splits.
        outputs: For each split, the outputs for each measured site's test rows (seeds, rows, ...), by its number.
        trained_alone: Whether these models were trained on the rows of their sites only. Default: False.
    """
    answers: list[Answers] = []
    of_sites = []
    for split, of_split in outputs.items():
        sites, numbers = problem.of_split(split).sites, {}
        for i, made in of_split.items():
            numbers[i] = len(answers)
            found = _answers_of_outputs(problem, sites[i].test, made)
            answers.append(found if sites[i].rows is None else replace(found, rows=sites[i].rows))
        of_sites.append(tuple(numbers.get(i, -1) for i in range(problem.n)))
    return _gathered(problem, answers, of_sites, list(outputs), "test", trained_alone)


def _answers_of_outputs(problem: Prepared, samples: Samples, outputs: Tensor) -> Answers:
    truth = as_floats(samples.targets, outputs.dtype)
    losses = torch.stack([per_sample(problem.output_loss, of_seed, truth) for of_seed in outputs]).float()
    right = None
    if problem.classes:
        right = torch.stack([problem.right(of_seed, truth) for of_seed in outputs]).to(torch.uint8)
        right = right.masked_fill(losses.isnan() & outputs.isnan().flatten(2).any(dim=-1), UNPREDICTED)
    predicted = vmap(problem.readings.predictions)(outputs).float()
    return Answers(digest_of(samples), losses, right, predicted, samples.targets, _numbered(samples), samples.units)


def _gathered(
    problem: Prepared,
    answers: Sequence[Answers],
    of_sites: Sequence[tuple[int, ...]],
    splits: Sequence[int],
    on: str,
    trained_alone: bool,
) -> Outcomes:
    """Returns answers as outcomes of a problem."""
    return Outcomes(
        tuple(str(site.name) for site in problem.sites),
        problem.primary,
        problem.higher_is_better(problem.primary),
        tuple(_with_unit_numbers(answers)),
        tuple(of_sites),
        on,
        dict(problem.metrics),
        _trained_in_common(problem, splits) if trained_alone else (),
        -math.inf if (lowest := lowest_loss(problem.loss)) is None else lowest,
        _guessed_overlaps(problem, splits) if on == "test" else {},
        target_unit=problem.preprocessing.target.unit if problem.preprocessing else "",
    )


def _with_unit_numbers(answers: Sequence[Answers]) -> list[Answers]:
    """Returns answers whose units are numbered 0, 1, ...: they are kept in files, where they must not tell by which
    identifiers units are known."""
    known = [one.units for one in answers if one.units is not None]
    if not known:
        return list(answers)
    numbers = torch.cat(known).unique()
    return [one if one.units is None else replace(one, units=torch.searchsorted(numbers, one.units)) for one in answers]


def _guessed_overlaps(problem: Prepared, splits: Sequence[int]) -> dict[int, float]:
    """Returns, for each site whose splits have the same number of rows and the same targets but not one row, the share
    of test rows that random splits have in common. Such inputs were changed in each split, as by scaling with its
    training rows."""
    if len(splits) < 2:
        return {}
    sites = zip(*(problem.of_split(split).sites for split in splits))
    found = {i: _guessed_overlap(of_site) for i, of_site in enumerate(sites)}
    return {i: overlap for i, overlap in found.items() if overlap}


def _guessed_overlap(of_splits: Sequence[Site]) -> float:
    """Returns the share of a site's test rows that random splits have in common; 0 if there is nothing to guess."""
    if any(site.rows is not None or site.test is None or site.test.units is not None for site in of_splits):
        return 0.0
    sets = [[one for one in (site.train, site.test, site.validation) if one is not None] for site in of_splits]
    if not all(map(_is_readable, itertools.chain(*sets))):
        return 0.0
    targets = [torch.cat([one.targets for one in of]).sort(dim=0).values for of in sets]
    same = all(torch.equal(one, targets[0]) for one in targets[1:])
    apart = same and in_common([torch.cat([_numbered(one) for one in of]) for of in sets]) == 0.0
    return len(of_splits[0].test) / len(targets[0]) if apart else 0.0


def _is_readable(samples: Samples) -> bool:
    return samples.here and not samples.stream and not samples.sealed and isinstance(samples.targets, Tensor)


def _trained_in_common(problem: Prepared, splits: Sequence[int]) -> tuple[float, ...]:
    """Returns, for each site, the share of its training rows that a split has in common with another; nothing if there
    is one split, or rows are elsewhere."""
    of_splits = [[site.train for site in problem.of_split(split).sites] for split in splits]
    if len(splits) < 2 or not all(rows.here and not rows.sealed for of_split in of_splits for rows in of_split):
        return ()
    # Inputs need not be equal where rows are, if these have names.
    known = [site.rows is None or site.train.units is not None for site in problem.sites]
    shares = [in_common([_unit_names(samples) for samples in of_site]) for of_site in zip(*of_splits)]
    return tuple(share if told and share > 0 else 1.0 for share, told in zip(shares, known))


@torch.no_grad()
def _answers(problem: Prepared, samples: Samples, models: Tensor, known: dict[int, Any], room: int) -> Answers:
    """Returns what models (seeds, dim) answer on a set, with the outputs if they are no more than `room` floats."""
    model = problem.flat_model.to(models.device, models.dtype)
    answers = answering(model, problem.loss, problem.at_once(models.device))
    rows = SampleRows([samples], torch.device("cpu"))
    chunk = max(1, _FLOATS_AT_ONCE // (len(models) * trees.numbers_per_sample(samples.inputs)))
    losses, rights, kept, truths, equal = [], [], [], [], []
    single = isinstance(samples.targets, Tensor)  # metrics of several targets are not bootstrapped
    for _, (given, true) in rows.chunks(0, len(samples), chunk):
        inputs, truth = (
            as_floats(trees.mapped(lambda part: part.to(models.device), tree), models.dtype) for tree in (given, true)
        )
        if samples.stream:
            equal.append(_numbers_of(given))
        outputs, each = answers(models, inputs, truth)
        losses.append(each.cpu().float())
        right = vmap(lambda o, t=truth: problem.right(o, t))(outputs) if problem.classes else None
        outputs = vmap(problem.readings.predictions)(outputs)
        if right is not None:
            silent = each.isnan() & outputs.isnan().reshape(*each.shape, -1).any(dim=-1)
            rights.append(right.to(torch.uint8).masked_fill(silent, UNPREDICTED).cpu())
        if single and outputs[:, :1].numel() * len(samples) <= room:
            kept.append(outputs.cpu().float())
            truths.append(true)
    if id(samples) not in known:
        known[id(samples)] = digest_of(samples), torch.cat(equal) if equal else _numbered(samples)
    digest, numbers = known[id(samples)]
    right = torch.cat(rights, dim=1) if rights else None
    outputs = torch.cat(kept, dim=1) if kept else None
    return Answers(
        digest,
        torch.cat(losses, dim=1),
        right,
        outputs,
        None if outputs is None else torch.cat(truths),
        numbers,
        samples.units,
    )


def digest_of(samples: Samples) -> str:
    """Returns a fingerprint of a set of rows, in their order.

    Args:
        samples: The rows.
    """
    if samples.stream:
        return fingerprint(samples)[:16]
    hasher = hashlib.sha256()
    for name, tensor in samples.named_tensors()[: None if samples.subgroups is None else -1]:
        hasher.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()[:16]


def _unit_names(samples: Samples) -> Tensor:
    """Returns the numbers of the units of some rows, or of the rows if every row is its own unit."""
    return _numbered(samples) if samples.units is None else samples.units.unique()


def _numbered(samples: Samples) -> Tensor:
    """Returns a number for each row that is equal for equal inputs, or for the same items of a stream."""
    if samples.stream:
        return samples.stream.rows
    return _numbers_of(samples.inputs)


def _numbers_of(inputs: Tree) -> Tensor:
    """Returns a number for each row that is equal for equal inputs."""
    parts = [part.reshape(len(part), -1).double() for part in trees.leaves(inputs)]
    words = torch.cat(parts, dim=1).numpy().view(np.uint64)
    factors = np.random.default_rng(0).integers(1, 1 << 63, size=words.shape[1], dtype=np.uint64) | np.uint64(1)
    return torch.from_numpy((words * factors).sum(axis=1, dtype=np.uint64).view(np.int64))
