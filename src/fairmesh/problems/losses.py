"""The loss of one row on one batch, in training and in evaluation mode."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fairmesh.losses.base import NamedLoss
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.augmentation import Augmenter
from fairmesh.problems.flat_model import FlatModel
from fairmesh.problems.model_loss import BoundModelLoss
from fairmesh.problems.stacking import AtOnce, over_models

Loss = Callable[[Any, Any], Tensor]  # (outputs, targets) -> the mean over the samples

_NEVER_NEGATIVE = [
    nn.functional.cross_entropy,
    nn.functional.mse_loss,
    nn.functional.l1_loss,
    nn.functional.smooth_l1_loss,
    nn.functional.huber_loss,
    nn.functional.binary_cross_entropy,
    nn.functional.binary_cross_entropy_with_logits,
]
_NEVER_NEGATIVE_MODULES = (
    nn.CrossEntropyLoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
)


def as_floats(values: Tree, dtype: torch.dtype) -> Tree:
    """Returns data as the model sees it: floats in the run's dtype, bytes scaled to [0, 1], whole numbers unchanged."""
    if not isinstance(values, Tensor):
        return trees.mapped(lambda tensor: as_floats(tensor, dtype), values)
    if values.dtype == torch.uint8:
        return values.to(dtype).mul_(1.0 / 255.0)  # multiplied, since a division takes a CPU twice as long
    return values.to(dtype) if values.is_floating_point() else values


def augmented(augment: Augmenter | None, inputs: Tree, targets: Tree, key: Tensor) -> tuple[Tree, Tree]:
    """Returns a batch as an augmentation changes it, with draws from a key."""
    return (inputs, targets) if augment is None else augment.drawn(inputs, targets, key)


def _is_vector(targets: Tree) -> bool:
    return isinstance(targets, Tensor) and targets.ndim == 1


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns nn.functional.cross_entropy of valid class labels, with a third of its operations under vmap."""
    return -outputs.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).mean()


def reads_logits(loss: Loss) -> bool:
    """Returns whether a loss reads each output as the logit of a yes-or-no label."""
    if isinstance(loss, NamedLoss):
        return loss.reads_logits
    known = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
    return loss is nn.functional.binary_cross_entropy_with_logits or isinstance(loss, known)


def takes_shares(loss: Loss) -> bool:
    """Returns whether a loss reads floats as shares of classes, not as numbers to predict."""
    return loss is nn.functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def lowest_loss(loss: Loss) -> float | None:
    """Returns the lowest possible loss of a sample; None if that is not known."""
    if isinstance(loss, functools.partial) and loss.func is loss_in_spreads:
        return lowest_loss(loss.args[0])
    if isinstance(loss, NamedLoss):
        return loss.lowest
    return 0.0 if loss in _NEVER_NEGATIVE or isinstance(loss, _NEVER_NEGATIVE_MODULES) else None


def loss_in_spreads(loss: Loss, spread: float, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns a loss of numbers that are measured in multiples of their spread."""
    return loss(outputs / spread, targets / spread)


def _placed(loss: Loss, model: FlatModel) -> Loss:
    """Returns the loss with its constants where the model is, so that no round copies them there."""
    return loss.on(model.device, model.dtype) if isinstance(loss, NamedLoss) else loss


def _training_loss(model: FlatModel, loss: Loss, augment: Augmenter | None) -> Loss:
    """Returns the loss of a batch that may have been augmented, so that its labels may be mixed."""
    hard = _placed(loss, model)
    if augment is None or not augment.changes_targets or not isinstance(loss, NamedLoss):
        return hard
    soft = loss.on(model.device, model.dtype, soft=True)

    def either(outputs: Tensor, targets: Tree) -> Tensor:
        mixed = augment.probabilities(targets)
        return hard(outputs, targets) if mixed is None else soft(outputs, mixed)

    return either


def batch_loss(model: FlatModel, loss: Loss, augment: Augmenter | None) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, key) -> loss in training mode."""
    if isinstance(loss, BoundModelLoss):

        def of_model(row: Tensor, inputs: Tree, targets: Tree, key: Tensor) -> Tensor:
            return loss.of_batch(model, row, *augmented(augment, inputs, targets, key), key)

        return of_model
    of_outputs = _training_loss(model, loss, augment)

    def function(row: Tensor, inputs: Tree, targets: Tree, key: Tensor) -> Tensor:
        inputs, targets = augmented(augment, inputs, targets, key)
        outputs = model(row, inputs, key)
        plain = of_outputs is nn.functional.cross_entropy and outputs.ndim == 2 and _is_vector(targets)
        return _cross_entropy(outputs, targets) if plain else of_outputs(outputs, targets)

    return function


def batch_error(
    model: FlatModel, augment: Augmenter | None, right: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, key, ...) -> share of misclassified samples, in training mode. Of mixed
    labels the largest counts."""

    def function(row: Tensor, inputs: Tree, targets: Tree, key: Tensor, *weights: Tensor) -> Tensor:
        inputs, targets = augmented(augment, inputs, targets, key)
        mixed = None if augment is None else augment.probabilities(targets)
        targets = targets if mixed is None else mixed.argmax(dim=1)
        wrong = (~right(model(row, inputs, key), targets)).to(row.dtype)
        return (wrong * weights[0]).sum() if weights else wrong.mean()

    return function


def per_sample(loss: Loss, outputs: Tensor, targets: Tree) -> Tensor:
    """Returns the loss of every single sample: (samples,)."""

    def one(output: Tensor, target: Tree) -> Tensor:
        return loss(output.unsqueeze(0), trees.mapped(lambda part: part.unsqueeze(0), target))

    return vmap(one)(outputs, targets)


def losses_of_rows(model: FlatModel, loss: Loss, augment: Augmenter | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function (row, inputs, targets, key, weights) -> weighted loss and each sample's loss, in training
    mode; padding has weight zero."""
    of_outputs = None if isinstance(loss, BoundModelLoss) else _training_loss(model, loss, augment)

    def function(row: Tensor, inputs: Tree, targets: Tree, key: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = augmented(augment, inputs, targets, key)
        if isinstance(loss, BoundModelLoss):
            each = loss.of_samples(model, row, inputs, targets, key)
        else:
            each = per_sample(of_outputs, model(row, inputs, key), targets)  # type: ignore[arg-type]
        return (each * weights).sum(), each

    return function


def weighted_loss(model: FlatModel, loss: Loss, augment: Augmenter | None) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, key, weights) -> loss in training mode; padding has weight zero."""
    both = losses_of_rows(model, loss, augment)
    return lambda *arguments: both(*arguments)[0]


def evaluation_losses(model: FlatModel, loss: Loss) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets) -> the loss of each sample, in evaluation mode."""
    if isinstance(loss, BoundModelLoss):
        return lambda row, inputs, targets: loss.of_samples(model, row, inputs, targets)
    placed = _placed(loss, model)

    return lambda row, inputs, targets: _judged(placed, model(row, inputs), targets)


def _judged(loss: Loss, outputs: Tensor, targets: Tree) -> Tensor:
    """Returns the loss of every single sample, whose labels are valid: (samples,)."""
    if loss is nn.functional.cross_entropy and outputs.ndim == 2 and _is_vector(targets):
        return -outputs.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return per_sample(loss, outputs, targets)


def answering(model: FlatModel, loss: Loss, at_once: AtOnce) -> Callable[[Tensor, Tree, Tree], tuple[Tensor, Tensor]]:
    """Returns a function (rows, inputs, targets) -> outputs (rows, samples, ...) and the loss of each sample (rows,
    samples), in evaluation mode, of several models on the same samples."""
    outputs_of = over_models(model, at_once, in_dims=(0, None))
    if isinstance(loss, BoundModelLoss):
        losses_of = over_models(evaluation_losses(model, loss), at_once, in_dims=(0, None, None))
        return lambda rows, inputs, targets: (outputs_of(rows, inputs), losses_of(rows, inputs, targets))

    def function(rows: Tensor, inputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
        outputs = outputs_of(rows, inputs)
        return outputs, vmap(lambda one: _judged(loss, one, targets))(outputs)

    return function


def evaluation_loss(model: FlatModel, loss: Loss) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, weights) -> weighted loss in evaluation mode."""
    each = evaluation_losses(model, loss)

    def function(row: Tensor, inputs: Tree, targets: Tree, weights: Tensor) -> Tensor:
        return (each(row, inputs, targets) * weights).sum()

    return function


def evaluation_error(model: FlatModel, right: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, weights) -> weighted share of errors in evaluation mode."""

    def function(row: Tensor, inputs: Tree, targets: Tree, weights: Tensor) -> Tensor:
        return ((~right(model(row, inputs), targets)).to(row.dtype) * weights).sum()

    return function
