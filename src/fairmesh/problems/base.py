"""A learning problem over sites: the model, the loss, and what each node holds, checked before anything runs."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from fairmesh.errors import BadInput
from fairmesh.problems.losses import Augmentation, Loss, as_floats, check_loss
from fairmesh.problems.rows import FlatModel

Metric = Callable[[Tensor, Tensor], Any]  # (outputs, targets) of a whole test set -> a number, higher is better


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs (samples, ...) and their targets."""

    inputs: Tensor
    targets: Tensor

    @staticmethod
    def of(source: Any, what: str) -> "Samples":
        """From Samples, a pair of tensors or arrays, or a torch Dataset of (input, target) items."""
        if isinstance(source, Samples):
            source = source.inputs, source.targets
        if isinstance(source, TensorDataset) and len(source.tensors) == 2:
            source = source.tensors
        elif isinstance(source, Dataset):
            items = [source[i] for i in range(len(source))]  # type: ignore[arg-type]
            if not items:
                raise BadInput(f"{what} is empty; give it samples, or leave the site out")
            source = default_collate(items)
        try:
            inputs, targets = source
            inputs, targets = torch.as_tensor(inputs), torch.as_tensor(targets)
        except (TypeError, ValueError) as error:
            raise BadInput(f"{what} must be a pair (inputs, targets) or a Dataset of such pairs: {error}") from error
        if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
            raise BadInput(f"{what}: {tuple(inputs.shape)} inputs do not go with {tuple(targets.shape)} targets")
        if len(inputs) == 0:
            raise BadInput(f"{what} is empty; give it samples, or leave the site out")
        for name, tensor in (("inputs", inputs), ("targets", targets)):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                bad = int(
                    (~torch.isfinite(tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None])).any(1).nonzero()[0]
                )
                raise BadInput(f"{what}: {name} of sample {bad} are not finite (NaN or infinite); clean the data first")
        if not targets.is_floating_point() and targets.dtype != torch.bool:
            targets = targets.long()  # what torch's losses want of labels, whatever they were stored as
        return Samples(inputs, targets)

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, eq=False)
class Site:
    """What one node holds. `train`, `test` and `validation` are (inputs, targets) or a torch Dataset; sites that share
    a test set are given the same object."""

    train: Any
    test: Any = None
    validation: Any = None
    group: str | None = None  # class, contrast, instrument, hospital; its own name where not given
    name: str | None = None


@dataclass(frozen=True)
class Sampling:
    """Which samples a node looks at in one step."""

    batch: int = 50  # samples, ignored for order = "full"
    order: Literal["random", "cyclic", "full"] = "random"  # random draws with replacement, or in order, or all
    batches_per_step: int = 1  # averaged, the paper's oracle averaging

    def __post_init__(self):
        if self.order not in ("random", "cyclic", "full"):
            raise BadInput(f"order is 'random', 'cyclic' or 'full', got {self.order!r}")
        if self.batch < 1:
            raise BadInput(f"batch must be >= 1, got {self.batch}")
        if self.batches_per_step < 1:
            raise BadInput(f"batches_per_step must be >= 1, got {self.batches_per_step}")


@dataclass(frozen=True, eq=False)
class Problem:
    """Train `model` on the sites' data under `loss(outputs, targets) -> scalar mean`.

    `model` is a module, whose weights every run starts from, or a function that makes one, called anew for each seed.
    `test` and `validation` are for sites without their own."""

    model: nn.Module | Callable[[], nn.Module]
    sites: Sequence[Site]
    loss: Loss = nn.functional.cross_entropy
    sampling: Sampling = field(default_factory=Sampling)
    prior: Sequence[float] | None = None  # p; each site's share of the samples where not given
    test: Any = None
    validation: Any = None
    weight_decay: float = 0.0
    clip_norm: float | None = None  # of each node's gradient
    augment: Augmentation | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    def __post_init__(self):
        if not self.sites:
            raise BadInput("a problem needs at least one site")
        if not math.isfinite(self.weight_decay) or self.weight_decay < 0:
            raise BadInput(f"weight_decay must be a finite number >= 0, got {self.weight_decay}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadInput(f"clip_norm must be > 0, got {self.clip_norm}")
        sites = [
            dataclasses.replace(
                site,
                name=site.name or f"node {i}",
                group=site.group if site.group is not None else site.name or f"node {i}",
                train=Samples.of(site.train, f"site {i} ({site.name or 'unnamed'})"),
            )
            for i, site in enumerate(s if isinstance(s, Site) else Site(s) for s in self.sites)
        ]
        object.__setattr__(self, "sites", sites)
        first = sites[0].train
        for i, site in enumerate(sites):
            for what in ("inputs", "targets"):
                here, there = getattr(site.train, what), getattr(first, what)
                if here.shape[1:] != there.shape[1:] or here.dtype != there.dtype:
                    raise BadInput(
                        f"site {i} ({site.name}): {what} are {tuple(here.shape[1:])} {here.dtype}, but site 0 has "
                        f"{tuple(there.shape[1:])} {there.dtype}; all sites need the same"
                    )
        self._probe()

    @property
    def n(self) -> int:
        return len(self.sites)

    @cached_property
    def prior_of_sites(self) -> Tensor:
        """p (n,), float64, sums to one."""
        sizes = [len(site.train) for site in self.sites]
        given = torch.as_tensor(sizes if self.prior is None else self.prior, dtype=torch.float64)
        unfit = ~(torch.isfinite(given) & (given > 0))
        if bool(unfit.any()):
            bad = int(unfit.nonzero()[0])
            raise BadInput(f"prior of site {bad} is {float(given[bad])}; every site needs a finite prior > 0")
        return given / given.sum()

    @cached_property
    def flat_model(self) -> FlatModel:
        return FlatModel(self._module(0))

    def _module(self, seed: int) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return self.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def initial_row(self, seed: int) -> Tensor:
        """The model every node of a replica starts from."""
        return self.flat_model.row_of(self._module(seed)).double()

    @cached_property
    def classes(self) -> int | None:
        """How many classes the model tells apart, or None where targets are not labels."""
        targets = self.sites[0].train.targets
        if targets.is_floating_point() or targets.ndim != 1:
            return None
        outputs = self._outputs_of_probe()
        return outputs.shape[-1] if outputs.ndim >= 2 else None

    def _outputs_of_probe(self) -> Tensor:
        model = self.flat_model.to(torch.device("cpu"), torch.float32)
        with torch.no_grad():
            return model(self.initial_row(0).float(), as_floats(self.sites[0].train.inputs[:2], torch.float32))

    @property
    def primary(self) -> str:
        """The metric by which the worst site is named."""
        return "accuracy" if self.classes or "accuracy" in self.metrics else "loss"

    def held_out(self, split: Literal["test", "validation", "train"]) -> tuple[list[Samples], list[int]]:
        """The different sets of a split, and which of them each site is judged by."""
        shared = {"test": self.test, "validation": self.validation, "train": None}[split]
        found: dict[int, int] = {}
        sets: list[Samples] = []
        of_site = []
        for i, site in enumerate(self.sites):
            source = getattr(site, split)
            source = shared if source is None else source
            if source is None:
                if of_site:
                    raise BadInput(
                        f"site {i} ({site.name}) has no {split} set though others have; give each one, or a shared one"
                    )
                continue
            if i and not of_site:
                raise BadInput(f"site 0 has no {split} set though site {i} has; give each one, or a shared one")
            if id(source) not in found:
                found[id(source)] = len(sets)
                sets.append(
                    self._checked(
                        Samples.of(source, f"{split} set of site {i} ({site.name})"), f"{split} set of site {i}"
                    )
                )
            of_site.append(found[id(source)])
        return sets, of_site

    def _checked(self, samples: Samples, what: str) -> Samples:
        first = self.sites[0].train
        for part in ("inputs", "targets"):
            here, there = getattr(samples, part), getattr(first, part)
            if here.shape[1:] != there.shape[1:] or here.dtype != there.dtype:
                raise BadInput(
                    f"{what}: {part} are {tuple(here.shape[1:])} {here.dtype}, but training {part} are "
                    f"{tuple(there.shape[1:])} {there.dtype}"
                )
        if self.classes is not None:
            lowest, highest = int(samples.targets.min()), int(samples.targets.max())
            if lowest < 0 or highest >= self.classes:
                raise BadInput(
                    f"{what}: labels run from {lowest} to {highest}, but the model tells {self.classes} classes apart: "
                    f"labels must lie in 0..{self.classes - 1}"
                )
        return samples

    def _probe(self) -> None:
        """Runs model and loss once as training will, so that what cannot work is refused now."""
        if len(self.prior_of_sites) != self.n:
            raise BadInput(f"prior has {len(self.prior_of_sites)} entries for {self.n} sites")
        model = self.flat_model.to(torch.device("cpu"), torch.float32)  # refuses what cannot be a row
        try:
            self._outputs_of_probe()
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            shape = tuple(self.sites[0].train.inputs.shape[1:])
            raise BadInput(f"the model does not accept inputs of shape {shape}: {error}") from error
        for i, site in enumerate(self.sites):
            self._checked(site.train, f"site {i} ({site.name})")
        for split in ("test", "validation"):
            self.held_out(split)
        some = [site.train for site in self.sites[:8]]  # of several sites: one alone may hold a single class
        two = torch.arange(2)
        inputs, targets = (
            torch.cat([getattr(samples, what)[two % len(samples)] for samples in some])
            for what in ("inputs", "targets")
        )
        batch = as_floats(inputs, torch.float32), as_floats(targets, torch.float32)
        check_loss(model, self.initial_row(0).float(), self.loss, self.augment, batch)

    def digest(self) -> str:
        """A fingerprint of data and model, so that a checkpoint is not continued on others."""
        hasher = hashlib.sha256()
        for site in self.sites:
            for tensor in (site.train.inputs, site.train.targets):
                hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                hasher.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
        hasher.update(self.prior_of_sites.numpy().tobytes())
        hasher.update(self.initial_row(0).numpy().tobytes())
        for tensor in self.flat_model.fixed():
            hasher.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
        described = (self._module(0), self.sampling, self.weight_decay, self.clip_norm)
        hasher.update(f"{described} {_named(self.loss)} {_named(self.augment)}".encode())
        return hasher.hexdigest()[:16]


def _named(function: Any) -> str:
    """A function's name, or what a module prints: the same in every process."""
    if isinstance(function, functools.partial):
        return f"{_named(function.func)} {function.args} {function.keywords}"
    return repr(function) if isinstance(function, nn.Module) else getattr(function, "__qualname__", str(type(function)))
