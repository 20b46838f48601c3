"""The samples of every site: read, checked against each other and against the model's classes; which are here, what
judges whom, and how much each site counts."""

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.samples import Samples, Targets
from fairmesh.data.site import Site
from fairmesh.data.units import with_units
from fairmesh.errors import BadInput
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.row_loss import as_floats

if TYPE_CHECKING:
    from fairmesh.problems.prepared import Prepared

# The sets of a site, and how errors name them.
_SETS = {
    "train": "", "reserved": "reserved rows of ", "test": "test set of ", "validation": "validation set of "
}  # fmt: skip
_TARGETS_CHECKED = 32  # of each site, by which the loss is checked


@dataclass(frozen=True, eq=False, kw_only=True)
class SiteSamples:
    """The sites of a problem, all of whose sets are read: the side of a `Prepared` that knows no model."""

    sites: Sequence[Site]
    prior: Sequence[float] | None

    @property
    def n(self) -> int:
        """The number of nodes."""
        return len(self.sites)

    @cached_property
    def here(self) -> list[int]:
        """The sites whose data this process holds: all of them in a simulation."""
        return [i for i, site in enumerate(self.sites) if site.train.here]

    @property
    def example(self) -> Samples:
        """Training samples of the first site that is here: those that can be looked at."""
        return self.sites[self.here[0]].train.seen

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How rows of a table became inputs, or None if the sites' data is not from a table."""
        return next((site.table.preprocessing for site in self.sites if site.table), None)

    @cached_property
    def prior_of_sites(self) -> Tensor:
        """The prior p (n,), float64; sums to one."""
        return scaled_prior(self.prior, [len(site.train) for site in self.sites])

    @property
    def shares_of_samples(self) -> Tensor:
        """The share of each site in all training samples (n,), float64."""
        return scaled_prior(None, [len(site.train) for site in self.sites])

    def held_out(self, split: Literal["test", "validation", "train"]) -> tuple[list[Samples], list[int]]:
        """Returns the distinct sets of a split that are here, and the index of the one that judges each site.

        The index is -1 if another process holds the set, or if the site has none. There are no indices if no site has
        one."""
        every = [getattr(site, split) for site in self.sites]
        here = dict.fromkeys(samples for samples in every if samples and samples.here)
        places = {samples: k for k, samples in enumerate(here)}
        return list(places), [places.get(samples, -1) for samples in every] if any(every) else []

    def sites_keeping(self, kept: Collection[int]) -> list[Site]:
        """Returns the sites for a process that holds the data of some of them, and the sizes of the others."""

        @functools.cache
        def held(samples: Samples | None, here: bool) -> Samples | None:  # a set that sites share stays one
            if samples is None:
                return None
            if here:
                return samples.alone()
            away = Samples.elsewhere(len(samples), samples)
            return dataclasses.replace(away, subgroup_names=samples.subgroup_names)

        made = []
        for i, site in enumerate(self.sites):
            sets: dict[str, Any] = {name: held(getattr(site, name), i in kept) for name in _SETS}
            table = site.table and site.table.without_rows()
            made.append(dataclasses.replace(site, table=table, **sets))
        return made


def read_sites(sites: Sequence[Any], shared: Mapping[str, Any], targets: Targets) -> list[Site]:
    """Returns the sites, each with a name, a group, and every set as Samples; a set that sites share is read once.

    Args:
        sites: Sites, or just their training samples.
        shared: The sets "test" and "validation" of sites that have none of their own.
        targets: Which part of a sample is its target, as in `Problem`.
    """
    held_out: dict[int, tuple[Any, Samples]] = {}  # with its source, so that the id of that is not used again

    def read(i: int, site: Site) -> Site:
        name = site.name or f"node {i}"
        sets: dict[str, Samples | None] = {
            "train": Samples.of(site.train, f"site {i} ({site.name or 'unnamed'})", targets)
        }
        if site.reserved is not None:
            sets["reserved"] = Samples.of(site.reserved, f"reserved rows of site {i} ({name})", targets)
        for split in ("test", "validation"):
            source = getattr(site, split)
            source = shared.get(split) if source is None else source
            if source is None or is_empty(source):  # a site without test data is trained and not measured
                sets[split] = None
                continue
            if id(source) not in held_out:
                held_out[id(source)] = source, Samples.of(source, f"{split} set of site {i} ({name})", targets)
            sets[split] = held_out[id(source)][1]
        rows = _row_numbers(site, sets["test"], name)
        return dataclasses.replace(site, name=name, group=name if site.group is None else site.group, rows=rows, **sets)

    given = with_units([site if isinstance(site, Site) else Site(site) for site in sites], targets)
    return [read(i, site) for i, site in enumerate(given)]


def _row_numbers(site: Site, test: Samples | None, name: str) -> Tensor | None:
    """Returns what identifies each test row of a site as numbers (rows,) int64; None if it is not known."""
    given = site.rows
    if given is None and site.table:
        given = site.table.rows.get("test")
        given = None if test is None or given is None or len(given) != len(test) else given
    if given is None or test is None:
        return None
    values = np.asarray(given.tolist() if isinstance(given, Tensor) else given)
    if values.shape != (len(test),) or values.dtype.kind not in "iuUSO":
        raise BadInput(
            f"rows of site {name!r} have the shape {values.shape} and are {values.dtype}; give one whole number or "
            f"name for each of its {len(test)} test rows"
        )
    if values.dtype.kind in "iu":
        return torch.from_numpy(values.astype(np.int64))
    hashed = [hashlib.blake2b(str(one).encode(), digest_size=8).digest() for one in values.tolist()]
    return torch.tensor([int.from_bytes(one, "little", signed=True) for one in hashed])


def is_empty(source: Any) -> bool:
    """Returns whether a set of samples has none."""
    try:
        first = source[0] if isinstance(source, tuple | list) else source
        while isinstance(first, Mapping | tuple) and first:
            first = next(iter(first.values() if isinstance(first, Mapping) else first))
        return len(first) == 0
    except (TypeError, IndexError):  # then reading it says what is wrong
        return False


def check_form(samples: Samples, first: Samples, where: str) -> None:
    """Raises BadInput if samples differ from those of the first site in shapes, dtypes or names."""
    for part in ("inputs", "targets"):
        here, there = getattr(samples, part), getattr(first, part)
        if trees.form(here) != trees.form(there):
            raise BadInput(
                f"{where}: {part} are {trees.form_in_words(here)}, but training {part} of site 0 are "
                f"{trees.form_in_words(there)}; all sites need the same"
            )


def scaled_prior(prior: Sequence[float] | None, sizes: Sequence[int]) -> Tensor:
    """Returns a prior that sums to one, in float64: the one given, or each site's share of all samples."""
    try:
        given = torch.as_tensor(sizes if prior is None else prior, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise BadInput(f"prior must be a list of {len(sizes)} numbers, got {prior!r}") from error
    if given.shape != (len(sizes),):
        raise BadInput(f"prior has {given.numel()} entries for {len(sizes)} sites; give one number for each")
    unfit = ~(torch.isfinite(given) & (given > 0))
    if bool(unfit.any()):
        bad = int(unfit.nonzero()[0])
        raise BadInput(f"prior of site {bad} is {float(given[bad])}; every site needs a finite prior > 0")
    return given / given.sum()


def check_forms(samples: SiteSamples) -> None:
    """Raises BadInput if the training samples of sites have different forms, or if none are here."""
    if not samples.here:
        raise BadInput("none of the sites' data is here; a host needs that of one site at least")
    for i, site in enumerate(samples.sites):
        check_form(site.train, samples.sites[0].train, f"site {i} ({site.name})")


def check_subgroups(problem: "Prepared") -> None:
    """Raises BadInput if the objective needs subgroups that the samples here do not have."""
    if problem.objective.subgroups:
        for i in problem.here:
            problem.subgroup_numbers(i)


def check_data(problem: "Prepared") -> None:
    """Raises BadInput if samples do not fit each other, the model's classes or the way that they are drawn."""
    problem.prior_of_sites.sum()  # refuses an invalid prior
    for split, words in _SETS.items():
        checked: set[Samples | None] = {None}
        for i, site in enumerate(problem.sites):
            samples = getattr(site, split)
            if samples not in checked:
                judges = split in ("test", "validation")
                check_samples(problem, samples, f"{words}site {i} ({site.name})", judges)
                checked.add(samples)
    if len(problem.flat_model.momenta):
        check_batches(problem)


def check_samples(problem: "Prepared", samples: Samples, what: str, judges: bool) -> None:
    """Raises BadInput if a set does not fit the training samples, if labels are none of the model's classes, or if they
    are missing where they are needed. A mask may have entries without a label, and a held-out one may have no others.

    Args:
        problem: The problem.
        samples: The set.
        what: What it is called in errors.
        judges: Whether it judges models, so that every sample needs a label.
    """
    check_form(samples, problem.sites[0].train, what)
    if problem.label_range is not None and samples.here and not samples.sealed:  # which was checked before
        _check_labels(problem, samples, what, judges, *problem.label_range)


def _check_labels(
    problem: "Prepared", samples: Samples, what: str, judges: bool, classes: int, ignored: int | None
) -> None:
    labels, dense = samples.targets, problem.task == "masks"
    if samples.stream:
        samples.stream.classes = classes, ignored  # by which other items are checked when they are read
        labels = samples.seen.targets if dense or samples.labels is None else samples.labels
    lowest, highest, known = _range_of(labels, ignored)
    if dense and not known and not judges and not samples.stream:
        raise BadInput(
            f"{what}: all targets of its {len(labels)} samples are {ignored}, which the loss ignores; label some, or "
            "leave the site out"
        )
    if not dense and (not known or (judges and known < len(labels))):
        remedy = "leave them out, since they cannot judge a model" if judges else "label some"
        raise BadInput(
            f"{what}: {len(labels) - known} of {len(labels)} samples have no label (target {ignored}, which the loss "
            f"ignores); {remedy}"
        )
    if known and (lowest < 0 or highest >= classes):
        shown = "one output" if problem.task == "binary" else f"{classes} classes"
        unlabelled = lowest if lowest < 0 else highest
        left_out = (dense or lowest < 0) and problem.ignored is None
        advice = f"; to leave {unlabelled} out, loss = fm.losses.CrossEntropy(ignore_index={unlabelled})" * left_out
        raise BadInput(
            f"{what}: labels run from {lowest} to {highest}, but the model has {shown}: labels must lie in "
            f"0..{classes - 1}; to predict numbers, give targets as floats{advice}"
        )


def _range_of(labels: Tensor, ignored: int | None) -> tuple[int, int, int]:
    """Returns the lowest and the highest label, and how many are not ignored. Masks may be mapped from a file that is
    larger than memory."""
    lowest, highest, known = [], [], 0
    for some in labels.split(4096):
        given = some if ignored is None else some[some != ignored]
        if given.numel():
            lowest.append(int(given.min()))
            highest.append(int(given.max()))
            known += given.numel()
    return min(lowest, default=0), max(highest, default=0), known


def check_splits(splits: Sequence["Prepared"]) -> None:
    """Raises BadInput if splits of a problem differ in more than their rows."""
    first = _same_in_splits(splits[0])
    for k, other in enumerate(splits[1:], start=1):
        for what, theirs in _same_in_splits(other).items():
            if theirs != first[what]:
                raise BadInput(
                    f"split {k} differs from split 0 in its {what} ({theirs} and {first[what]}); only rows may differ"
                )
        if other.splits:
            raise BadInput(f"split {k} has splits of its own; give all of them in one list")
        if other.objective.subgroups:
            raise BadInput("objective.subgroups: subgroups of several splits differ; train one split at a time")


def _same_in_splits(problem: "Prepared") -> dict[str, Any]:
    """Returns what all splits of a problem have in common."""
    return {
        "number of sites": problem.n,
        "form of inputs": trees.form(problem.sites[0].train.inputs),
        "number of parameters": problem.flat_model.dim,
        "metrics": list(problem.metrics),
    } | {name: getattr(problem, name) for name in ("sampling", "models_at_once", "parts", "batch_norm", "privacy")}


def check_batches(problem: "Prepared") -> None:
    """Raises BadInput if BatchNorm layers cannot compute the statistics of a batch."""
    sizes, full = [len(site.train) for site in problem.sites], problem.sampling.order == "full"
    if full and len(set(sizes)) > 1:
        raise BadInput(
            f'batch_norm = "{problem.batch_norm}" with sampling.order = "full": batches of sites of different size '
            'are padded, which would change their statistics; use order = "random" or "cyclic", or batch_norm = '
            '"convert"'
        )
    small = [f"site {i} ({problem.sites[i].name}) has one" for i, size in enumerate(sizes) if size == 1]
    if small or (problem.sampling.batch == 1 and not full):
        raise BadInput(
            f'batch_norm = "{problem.batch_norm}" needs batches of 2 samples or more, since one has no statistics, '
            f"but {small[0] if small else 'sampling.batch is 1'}; use larger batches, leave sites with one sample out, "
            'or use batch_norm = "frozen" or "convert"'
        )


def refuse_one_hot(problem: "Prepared") -> None:
    """Raises BadInput if of several labels per sample exactly one is always 1, which a loss of labels would read as so
    many yes-or-no questions."""
    for i in problem.here:
        targets = problem.sites[i].train.seen.targets
        if len(targets) < 2 or not bool((((targets == 0) | (targets == 1)).all(1) & (targets.sum(1) == 1)).all()):
            return
    raise BadInput(
        f"targets are {trees.form_in_words(problem.sites[0].train.targets)} with a single 1 in each sample, so they "
        "seem to be one-hot; give the number of the class (targets.argmax(dim=1)), or loss = "
        "fm.losses.BinaryCrossEntropy() if they are yes-or-no labels"
    )


def few_samples(problem: SiteSamples) -> tuple[Tree, Tree, Tree]:
    """Returns inputs and targets of two samples of each of several sites, since one site may hold a single class;
    and targets of more samples, spread over these sites."""
    some = [problem.sites[i].train.seen for i in problem.here[:8]]
    two = torch.arange(2)
    inputs, targets = (
        trees.joined([trees.at(getattr(samples, what), two % len(samples)) for samples in some])
        for what in ("inputs", "targets")
    )
    spread = [torch.linspace(0, len(samples) - 1, min(len(samples), _TARGETS_CHECKED)).long() for samples in some]
    more = trees.joined([trees.at(samples.targets, rows) for samples, rows in zip(some, spread)])
    return as_floats(inputs, torch.float32), as_floats(targets, torch.float32), as_floats(more, torch.float32)
