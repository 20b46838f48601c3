"""A model with its loss and augmentation, bound to samples of one form: how it is started, read and evaluated."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fairmesh.config.registry import registered_name
from fairmesh.errors import BadInput, refusing
from fairmesh.losses import ModelLoss, NamedLoss
from fairmesh.losses.builtin import squared_error
from fairmesh.metrics.base import Task, predicted_labels, task_of
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.augmentation import Augmenter
from fairmesh.problems.batch_norm import BatchNormPolicy, under_policy
from fairmesh.problems.checks import refuse_no_shares, refuse_unwrapped, why_not_stacked
from fairmesh.problems.convolutions import products_in
from fairmesh.problems.flat_model import FlatModel, has_adapters, own_copy
from fairmesh.problems.lora import check_adapters
from fairmesh.problems.outputs import PackedLoss, Readings, is_built_in, readings
from fairmesh.problems.parts import ALL_SHARED, Parts
from fairmesh.problems.row_loss import Loss, as_floats, bound, losses_of_samples, reads_logits
from fairmesh.problems.site_samples import SiteSamples, few_samples

if TYPE_CHECKING:
    from fairmesh.problems.problem import Problem


@dataclass(frozen=True, eq=False)
class InitialModels:
    """The modules that replicas start from, by seed."""

    model: nn.Module | Callable[[], nn.Module]
    parts: Parts
    batch_norm: BatchNormPolicy

    @cached_property
    def first(self) -> nn.Module:
        """The module of seed 0, made once: a model may take long to load."""
        return self.made(0)

    def made(self, seed: int) -> nn.Module:
        """Returns a module as it is trained: frozen by name, and with its BatchNorm layers under the policy."""
        if isinstance(self.model, nn.Module):
            as_given = (self.parts, self.batch_norm) == (ALL_SHARED, "refuse")
            made = self.model if as_given else copy.deepcopy(self.model)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                made = self.model()
            if not isinstance(made, nn.Module):
                raise BadInput(f"the model function returned a {type(made).__name__}, not an nn.Module")
            made = made.cpu()
        if self.parts != ALL_SHARED:
            self.parts.freeze(made)
        normed = any(isinstance(layer, _BatchNorm) for layer in made.modules())
        return under_policy(made, self.batch_norm, self.parts.frozen) if normed else made


@dataclass(frozen=True, eq=False)
class Probe:
    """Model, loss and a few samples, which show whether they can be run and how: on the CPU, in float32."""

    model: FlatModel
    row: Tensor
    loss: Loss
    augmenter: Augmenter | None
    inputs: Tree
    targets: Tree
    more_targets: Tree  # of more samples

    @cached_property
    def augmented(self) -> tuple[Tree, Tree]:
        """Inputs and targets as an augmentation without `draw` changes them."""
        if self.augmenter is None:
            return self.inputs, self.targets
        return self.augmenter.check(self.inputs, self.targets)

    @cached_property
    def why_not_stacked(self) -> str:
        """Why vmap cannot evaluate several models at once; "" if it can."""
        return why_not_stacked(self)

    @cached_property
    def products(self) -> int:
        """How many products of numbers the trained convolutions compute for the inputs."""
        kernels = any(parameter.ndim > 2 for parameter in self.model.evaluated.parameters())
        return products_in(self.model, self.row, self.inputs) if kernels else 0


@dataclass(frozen=True, eq=False, kw_only=True)
class BoundModel:
    """A model and its loss, known for all samples of one form: the side of a `Prepared` that outlives other samples."""

    initial: InitialModels
    flat_model: FlatModel  # the model as one row of its trainable parameters
    loss: Loss
    readings: Readings
    augmenter: Augmenter | None  # how training batches are changed
    task: Task  # what is predicted
    classes: int | None  # the number of classes that the model distinguishes; None if targets are not labels
    # The number of classes that targets may have, and the target that the loss ignores; None if targets are not labels,
    # or are masks of which only a loss of the user's own knows the labels.
    label_range: tuple[int, int | None] | None
    probe: Probe

    @property
    def output_loss(self) -> Loss:
        """The loss as a function of outputs and targets.

        Raises:
            BadInput: It calls the model itself.
        """
        if isinstance(self.loss, ModelLoss):
            raise BadInput(
                "constant answers, personalization and references that are chosen by held-out rows need a loss of "
                "outputs and targets, but this one calls the model (fm.losses.ModelLoss)"
            )
        return self.loss

    @property
    def ignored(self) -> int | None:
        """The label of samples that the loss ignores."""
        return ignored_by(self.loss)

    @property
    def predicts_a_number(self) -> bool:
        """Whether the output is the number that is predicted, one per sample, in the number's own units: the loss is
        least where both are equal, and the same on both sides. That of the logarithm of a rate is not, nor that of a
        quantile. It does not depend on the rows, which differ between sites."""
        if self.task != "numbers" or isinstance(self.loss, ModelLoss | PackedLoss):
            return False
        with torch.no_grad(), suppress(Exception):  # a loss of the user's own may not accept these outputs
            like = self.probe.model(self.probe.row, self.probe.inputs)[:1], self.probe.targets[:1]
            truths = torch.tensor([0.5, 1.0, 2.0, 5.0])
            outputs, targets = (truths.reshape(len(truths), *tensor.shape[1:]) for tensor in like)  # one number each
            equal, below, above = (losses_of_samples(self.loss, outputs + away, targets) for away in (0.0, -0.25, 0.25))
            return bool((above > equal).all()) and torch.allclose(below, above, rtol=1e-3)
        return False

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns for each sample whether its class is predicted (samples,). One without a label, which the loss
        ignores, counts as right."""
        labels = predicted_labels(self.readings.predictions(outputs))
        truths, ignored = targets.reshape(labels.shape), self.ignored
        return labels == truths if ignored is None else (labels == truths) | (truths == ignored)

    def initial_model(self, seed: int) -> nn.Module:
        """Returns the module that every node of a replica starts from. It must not be changed."""
        if not seed or isinstance(self.initial.model, nn.Module):
            return self.initial.first
        made = self.initial.made(seed)
        self.flat_model.copy_fixed(made)  # held once for all seeds
        return made

    def initial_row(self, seed: int) -> Tensor:
        """Returns the shared parameters that every node of a replica starts from, as a row (dim,) in float64."""
        return self.initial_whole_row(seed)[: self.flat_model.dim]

    def initial_whole_row(self, seed: int) -> Tensor:
        """Returns the model that every node of a replica starts from, its own part included, as a row in float64."""
        return self.flat_model.row_of(self.initial_model(seed)).double()

    def refuse_own_parts(self, what: str) -> None:
        """Raises BadInput if parts of the model stay at their sites, for what does not know such parts."""
        if self.flat_model.own_dim:
            raise BadInput(
                f"{what} does not go with parts of a model that stay at their sites, which are personal already; leave "
                'out parts.local, and use batch_norm = "frozen" or "convert"'
            )


def bind(problem: "Problem", samples: SiteSamples) -> BoundModel:
    """Returns the model of a problem with its loss: how outputs are read, which loss is meant, what is predicted, and
    how batches are changed."""
    # A copy: training the module later must not change where runs start.
    model = own_copy(problem.model) if isinstance(problem.model, nn.Module) else problem.model
    initial = InitialModels(model, problem.parts, problem.batch_norm)
    whole = _flat(initial)
    two, row = torch.arange(min(2, len(samples.example))), whole.row_of(initial.first).float()
    inputs, targets = (trees.at(tree, two) for tree in (samples.example.inputs, samples.example.targets))
    loss = _meant(problem.loss, samples)
    outputs = _outputs(whole, row, inputs)
    read = readings(outputs, targets, loss, problem.read)
    outputs = read.for_loss(outputs)
    told_apart = functools.partial(_told_apart, outputs, targets)
    loss = _settled(loss, read, told_apart, samples)
    augmenter = _augmenter(problem, samples)
    flat = whole.reading(read.for_loss)
    on_cpu = flat.to(torch.device("cpu"), torch.float32)
    probe = Probe(on_cpu, row, loss, augmenter, *few_samples(samples))
    if isinstance(loss, ModelLoss):
        loss = bound(loss, probe.model, probe.row, (probe.inputs, probe.targets))
        probe = dataclasses.replace(probe, loss=loss)
        loss = dataclasses.replace(loss, by_vmap=not probe.why_not_stacked)
    predictions = read.predictions(outputs)
    task = _task(predictions, loss, samples, problem.privacy is not None)
    classes = {"binary": 2, "classes": predictions.shape[-1]}.get(task)
    label_range = (classes, ignored_by(loss)) if classes else _range_in_masks(task, loss, told_apart)
    return BoundModel(
        initial=initial, flat_model=flat, loss=loss, readings=read, augmenter=augmenter, task=task, classes=classes,
        label_range=label_range, probe=probe,
    )  # fmt: skip


def _flat(initial: InitialModels) -> FlatModel:
    names = initial.parts.local_names(initial.first) if initial.parts.local else set[str]()
    if has_adapters(initial.first):
        check_adapters(initial.first, names)
    return FlatModel(initial.first, names, initial.batch_norm == "local", initial.batch_norm == "shared")


def _outputs(model: FlatModel, row: Tensor, inputs: Tree) -> Any:
    """Returns what a model gives for a few samples."""
    what = f"the model does not accept inputs of shape {trees.form_in_words(inputs)}"
    advice = "a dictionary is handed to forward as keywords, a tuple as positional arguments"
    with refusing(what, RuntimeError, TypeError, ValueError, IndexError, advice=advice), torch.no_grad():
        return model.to(torch.device("cpu"), torch.float32)(row, as_floats(inputs, torch.float32))


def _meant(loss: Loss, samples: SiteSamples) -> Loss:
    """Returns the loss that is meant: the squared error for cross-entropy of numbers. Refuses what is no loss."""
    if isinstance(loss, ModelLoss):
        return loss
    targets = samples.sites[0].train.targets
    refuse_unwrapped(loss)
    if not isinstance(targets, Tensor) and is_built_in(loss):
        raise BadInput(
            f"targets are several tensors ({trees.form_in_words(targets)}), but the loss takes one; give "
            "loss=function(outputs, targets) of your own, or one target with Problem(targets=...)"
        )
    if loss is nn.functional.cross_entropy and targets.is_floating_point() and targets[0].numel() == 1:
        return squared_error
    refuse_no_shares(loss, samples.example.targets)
    return loss.function if isinstance(loss, PackedLoss) else loss


def _settled(loss: Loss, read: Readings, told_apart: Callable[[], int], samples: SiteSamples) -> Loss:
    """Returns the loss as it is trained: of all that the model returns if it is the user's own, and with the class
    weights of the data if these are to be balanced."""
    if read.packing is not None:
        return PackedLoss(loss, read.packing)
    if not isinstance(loss, NamedLoss):
        return loss
    if loss.of_labels and samples.sites[0].train.targets.is_floating_point():
        raise BadInput(
            f"the loss {registered_name(loss)!r} needs labels of classes, but targets are floats; give labels "
            "as whole numbers (targets.long()); for shares of classes, (samples, classes), use "
            "loss=torch.nn.functional.cross_entropy"
        )
    if loss.is_balanced:
        loss = loss.fitted(_label_counts(samples, told_apart(), ignored_by(loss)))
    loss.check(told_apart())
    return loss


def _label_counts(samples: SiteSamples, classes: int, ignored: int | None) -> list[int]:
    """Returns how often each class occurs in the training samples of all sites."""
    trained = [(site.name, site.train) for site in samples.sites]
    unknown = [name for name, rows in trained if not rows.here or (rows.stream and rows.labels is None)]
    if unknown:
        raise BadInput(
            f'loss: class_weights = "balanced" needs all labels, but those of {unknown[0]} are not known here; '
            "give the weights as a list, one number per class, or the labels of a Dataset as "
            "fm.data.Streamed(dataset, labels=...)"
        )
    labels = torch.cat([rows.known_targets().flatten() for _, rows in trained]).long()
    return torch.bincount(labels[(labels >= 0) & (labels != ignored)], minlength=classes).tolist()


def _told_apart(outputs: Tensor, targets: Tensor) -> int:
    """Returns how many classes the outputs of a model can tell apart; one logit tells two."""
    return 2 if outputs.numel() == targets.numel() else outputs.shape[1]


def ignored_by(loss: Loss) -> int | None:
    """Returns the label of samples that a loss ignores."""
    return getattr(loss, "ignore_index", None) if isinstance(loss, NamedLoss) else None


def _augmenter(problem: "Problem", samples: SiteSamples) -> Augmenter | None:
    if problem.augment is None:
        return None
    targets = samples.sites[0].train.targets
    labels = isinstance(targets, Tensor) and not targets.is_floating_point()
    return dataclasses.replace(Augmenter.of(problem.augment), label_axes=targets.ndim if labels else None)


def _task(predictions: Tensor, loss: Loss, samples: SiteSamples, private: bool) -> Task:
    every = [samples.sites[i].train.seen.targets for i in samples.here]
    if not isinstance(every[0], Tensor):
        return "several"
    logits = reads_logits(loss) and all(bool(((targets == 0) | (targets == 1)).all()) for targets in every)
    if private and reads_logits(loss) and not logits:
        raise BadInput(
            "privacy: targets are not all 0 or 1, so that they are no labels, and that would be told; round them, or "
            "use a loss of numbers"
        )
    return task_of(predictions, every[0][: len(predictions)], logits)


def _range_in_masks(task: Task, loss: Loss, told_apart: Callable[[], int]) -> tuple[int, int | None] | None:
    by_torch = loss is nn.functional.cross_entropy
    if task != "masks" or not (by_torch or isinstance(loss, NamedLoss)):
        return None
    return told_apart(), -100 if by_torch else ignored_by(loss)  # which torch ignores unless it is told otherwise
