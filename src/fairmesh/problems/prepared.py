"""A problem that is ready to train: its settings, the samples of its sites, and the model bound to their form."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fairmesh.data.samples import Samples, Targets
from fairmesh.errors import BadInput
from fairmesh.losses import NamedLoss
from fairmesh.metrics.base import Metric, NamedMetric
from fairmesh.metrics.units import Unit
from fairmesh.numerics import trees
from fairmesh.problems.batches import Sampling
from fairmesh.problems.bound_model import BoundModel
from fairmesh.problems.checks import check_with_model
from fairmesh.problems.identity import digest_of, fingerprint, identity_of
from fairmesh.problems.learning import Learning
from fairmesh.problems.local_work import check_trainer
from fairmesh.problems.outputs import Readings
from fairmesh.problems.private_data import check_private_data
from fairmesh.problems.private_run import seal
from fairmesh.problems.site_samples import (
    SiteSamples,
    check_data,
    check_forms,
    check_splits,
    check_subgroups,
    read_sites,
)
from fairmesh.problems.stacking import AtOnce, slower_stacked
from fairmesh.problems.subgroups import numbered, own_names
from fairmesh.trainers.local_trainer import LocalTrainer

_BESIDE_THE_MODEL = {"sites", "prior", "objective"}  # settings that model and loss do not depend on


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared(Learning, SiteSamples, BoundModel):
    """A problem that is ready to train, made by `prepare(problem)`: settings, samples and bound model.

    `changed` returns a copy with other settings."""

    kind: type[Any]  # the class of the problem
    sampling: Sampling
    targets: Targets
    class_names: Sequence[str]
    metrics: dict[str, Callable[[Tensor, Tensor], Any]] = field(default_factory=dict)
    primary: str = "loss"  # the metric that sites are compared by
    trainer: LocalTrainer | None = None
    further: Mapping[str, Any]  # the problem's settings without a field here, also of a user's own class
    splits: tuple["Prepared", ...] = ()  # splits 1, 2, ...; this problem is split 0

    def settings(self) -> dict[str, Any]:
        """Returns the fields of a problem that is like this one, without its splits."""
        names = {setting.name for setting in dataclasses.fields(self.kind)} - self.further.keys()
        same = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name in names}
        return {**self.further, **same, "model": self.initial.model, "splits": ()}

    def check(self) -> None:
        """Raises BadInput if settings, samples, model and loss do not go together."""
        if self.trainer is not None:
            check_trainer(self)
        check_subgroups(self)
        check_data(self)
        check_with_model(self)

    def changed(self, **settings: Any) -> "Prepared":
        """Returns the same problem, without its splits, with other settings. Other sites with samples of the same form,
        another prior or another objective do not need another check of model and loss, which is skipped."""
        if "sites" in settings:
            settings["sites"] = read_sites(settings["sites"], {}, self.targets)
        if not settings.keys() <= _BESIDE_THE_MODEL or _form(settings.get("sites", self.sites)) != _form(self.sites):
            computed = {setting.name for setting in dataclasses.fields(self.kind) if not setting.init}
            given = {name: value for name, value in self.settings().items() if name not in computed}
            return self.kind(**given | settings).prepared
        made = dataclasses.replace(self, splits=(), **settings)
        if settings.keys() & {"sites", "prior"}:
            check_forms(made)
            check_data(made)
        check_subgroups(made)
        if made.privacy is None:
            return made
        check_private_data(made)
        return seal(made)

    def keeping(self, sites: Collection[int]) -> "Prepared":
        """Returns the same problem at a process that holds only these sites' data.

        Of the other sites it knows the number of samples."""
        return self.each(lambda split: split.changed(sites=split.sites_keeping(sites)))

    # Splits of the data -----------------------------------------------------------------------------------------------

    @property
    def every_split(self) -> list["Prepared"]:
        """This problem, which is split 0, and its other splits."""
        return [self, *self.splits]

    def of_split(self, k: int) -> "Prepared":
        """Returns the problem of split k, without the others."""
        if k:
            return self.splits[k - 1]
        return dataclasses.replace(self, splits=()) if self.splits else self

    @property
    def train_sets(self) -> list[Samples]:
        """The training samples that are here, of the sites of all splits."""
        return [split.sites[i].train for split in self.every_split for i in self.here]

    def each(self, change: Callable[["Prepared"], "Prepared"]) -> "Prepared":
        """Returns the problem with every split changed by a function."""
        return with_splits([change(self.of_split(k)) for k in range(len(self.every_split))], same_sites=False)

    # Metrics ----------------------------------------------------------------------------------------------------------

    def higher_is_better(self, metric: str) -> bool:
        """Returns whether a larger value of a metric is better."""
        chosen = self.metrics.get(metric)
        return chosen.higher_is_better if isinstance(chosen, Metric | NamedMetric) else metric != "loss"

    def is_share(self, metric: str) -> bool:
        """Returns whether a metric is a share, which tables show in per cent."""
        chosen = self.metrics.get(metric)
        return chosen.is_share if isinstance(chosen, NamedMetric) else metric == "accuracy"

    def unit(self, metric: str = "") -> Unit:
        """Returns how a metric is shown; the primary one without a name."""
        chosen = self.metrics.get(metric := metric or self.primary)
        target = self.preprocessing.target.unit if self.preprocessing else ""
        in_units = isinstance(chosen, NamedMetric) and chosen.in_target_units
        return Unit(metric, self.is_share(metric), target if in_units else "")

    # How models are evaluated -----------------------------------------------------------------------------------------

    def at_once(self, device: torch.device) -> AtOnce:
        """Returns how many models are evaluated at once on a device; None for all."""
        wanted = self.models_at_once
        if wanted == 1 or (wanted == "auto" and (self.slower_stacked[device.type] or self.why_not_stacked)):
            return 1
        if self.why_not_stacked:
            raise BadInput(
                f"models_at_once = {wanted!r}: torch.vmap cannot evaluate several of these models at once "
                f"({self.why_not_stacked}); use 1 or 'auto'"
            )
        return wanted if isinstance(wanted, int) else None

    @property
    def why_not_stacked(self) -> str:
        """Why vmap cannot evaluate several models at once; "" if it can."""
        return self.probe.why_not_stacked

    @cached_property
    def slower_stacked(self) -> dict[str, str]:
        """Why models are faster one at a time, by the kind of device."""
        full = self.sampling.order == "full"
        samples = max(len(self.sites[i].train) for i in self.here) if full else self.sampling.batch
        convolved = self.probe.products * samples // trees.length(self.probe.inputs)
        return {kind: slower_stacked(self.flat_model.evaluated, kind, convolved) for kind in ("cpu", "cuda")}

    @property
    def structured(self) -> str | None:
        """Which of "inputs", "targets" and "outputs" are not one plain tensor, joined by "and"; None if all are."""
        train = self.sites[0].train
        several = [name for name in ("inputs", "targets") if not isinstance(getattr(train, name), Tensor)]
        outputs = [] if self.readings == Readings() else ["outputs"]
        return " and ".join(several + outputs) or None

    def refuse_trainer(self, what: str) -> None:
        """Raises BadInput if sites train with code of their own, for what trains in another way."""
        if self.trainer is not None:
            raise BadInput(f"{what} trains by fairmesh's own gradients, so it does not go with a trainer; leave it out")

    def refuse_privacy(self, what: str) -> None:
        """Raises BadInput if the problem has privacy, for what reads training rows without noise."""
        if self.privacy is not None:
            raise BadInput(
                f"{what} reads training rows without noise, or trains on them once more, so it does not go with "
                "privacy; leave it out (docs/concepts/privacy.md)"
            )

    # Subgroups of rows ------------------------------------------------------------------------------------------------

    def subgroups_of(self, i: int) -> tuple[str, ...]:
        """Returns the names of the subgroups that have weights at site i, in the order of their numbers."""
        if self.objective.subgroups == "within":
            return own_names(self.sites[i].train)
        if not self.objective.subgroups or self.objective.subgroup_names:
            return self.objective.subgroup_names
        unknown = [site.name for site in self.sites if not site.train.subgroup_names and not site.train.here]
        if unknown:
            raise BadInput(
                f"objective.subgroup_names must list all subgroups, since those of {unknown[0]} are not known here"
            )
        return tuple(sorted({name for site in self.sites for name in site.train.subgroup_names}))

    def subgroup_numbers(self, i: int) -> Tensor:
        """Returns the subgroup of each training row of site i, as a number among `subgroups_of(i)`."""
        return numbered(self.sites[i].train, self.subgroups_of(i), f"site {i} ({self.sites[i].name})")

    @cached_property
    def subgroup_count(self) -> int:
        """The number of subgroups that a node distinguishes, the same at every node of a process."""
        if self.objective.subgroups == "within":  # those of a site that are too small share one
            return 1 + max(len(site.train.subgroup_names) for site in self.sites)
        return len(self.subgroups_of(0))

    # Identity ---------------------------------------------------------------------------------------------------------

    def digests_here(self) -> dict[int, str]:
        """Returns a fingerprint of the training data of every site that is here, in all splits."""
        return {i: " ".join(split._digests[i] for split in self.every_split) for i in self.here}

    @cached_property
    def _digests(self) -> dict[int, str]:
        names = ("train", "validation") if self.objective.judged_on == "validation" else ("train",)
        sets: dict[int, list[Samples | None]] = {i: [getattr(self.sites[i], name) for name in names] for i in self.here}
        return {i: " ".join(fingerprint(rows) for rows in of_site if rows) for i, of_site in sets.items()}

    def identity(self, of_sites: Mapping[int, str] = {}) -> dict[str, Any]:
        """Returns data, model and settings by name, so that a checkpoint is not continued with others.

        It covers the sites that are here, or those whose fingerprints are given."""
        return identity_of(self, of_sites or self.digests_here())

    def digest(self, of_sites: Mapping[int, str] = {}) -> str:
        """Returns a fingerprint of the identity."""
        return digest_of(self.identity(of_sites))


def _form(sites: Sequence[Any]) -> list[Any]:
    """Returns the form of the first site's inputs and targets."""
    return [trees.form(sites[0].train.inputs), trees.form(sites[0].train.targets)]


def with_splits(problems: Sequence[Prepared], same_sites: bool = True) -> Prepared:
    """Returns several problems as one whose replicas are trained on each of them.

    Args:
        problems: The problems, without splits of their own.
        same_sites: Whether their sites must have the same names. Default: True.
    """
    first, *others = problems
    names = [site.name for site in first.sites]
    for k, other in enumerate(others, start=1):
        theirs = [site.name for site in other.sites]
        if same_sites and theirs != names:
            raise BadInput(f"split {k} has the sites {theirs}, but split 0 has {names}; only their rows may differ")
    if isinstance(first.loss, NamedLoss):  # balanced class weights are those of the first split
        others = [one if one.loss is first.loss else one.changed(loss=first.loss) for one in others]
    check_splits(problems)
    return dataclasses.replace(first, splits=tuple(others)) if others else first
