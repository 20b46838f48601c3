"""The loss of one row on one batch, in training and in evaluation mode."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fairmesh.losses.base import NamedLoss
from fairmesh.numerics import random_streams, trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.flat_model import FlatModel

Loss = Callable[[Any, Any], Tensor]  # (outputs, targets) -> the mean over the samples
Augmentation = Callable[[Any, Callable[..., Tensor]], Any]  # (a batch, draw(*shape) -> uniforms) -> a batch


def as_floats(values: Tree, dtype: torch.dtype) -> Tree:
    """Returns data as the model sees it: floats in the run's dtype, bytes scaled to [0, 1], whole numbers unchanged."""
    if not isinstance(values, Tensor):
        return trees.mapped(lambda tensor: as_floats(tensor, dtype), values)
    if values.dtype == torch.uint8:
        return values.to(dtype).mul_(1.0 / 255.0)  # multiplied, since a division takes a CPU twice as long
    return values.to(dtype) if values.is_floating_point() else values


def augmented(augment: Augmentation | None, inputs: Tree, key: Tensor) -> Tree:
    """Returns a batch as an augmentation changes it, with draws from a key."""
    if augment is None:
        return inputs

    dtype = next((part.dtype for part in trees.leaves(inputs) if part.is_floating_point()), torch.get_default_dtype())
    one, calls = torch.zeros(1, dtype=torch.int64, device=key.device), itertools.count()

    def draw(*shape: int) -> Tensor:
        stream = random_streams.keys(key, "augmentation", next(calls), one).squeeze(-1)  # each call draws other numbers
        return random_streams.uniform(stream, torch.Size(shape).numel(), dtype).reshape(shape)

    return augment(inputs, draw)


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


def loss_in_spreads(loss: Loss, spread: float, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns a loss of numbers that are measured in multiples of their spread."""
    return loss(outputs / spread, targets / spread)


def _placed(loss: Loss, model: FlatModel) -> Loss:
    """Returns the loss with its constants where the model is, so that no round copies them there."""
    return loss.on(model.device, model.dtype) if isinstance(loss, NamedLoss) else loss


def batch_loss(model: FlatModel, loss: Loss, augment: Augmentation | None) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, key) -> loss in training mode."""

    loss = _placed(loss, model)

    def function(row: Tensor, inputs: Tree, targets: Tree, key: Tensor) -> Tensor:
        outputs = model(row, augmented(augment, inputs, key), key)
        plain = loss is nn.functional.cross_entropy and outputs.ndim == 2 and _is_vector(targets)
        return _cross_entropy(outputs, targets) if plain else loss(outputs, targets)

    return function


def batch_error(
    model: FlatModel, augment: Augmentation | None, right: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, key, ...) -> share of misclassified samples, in training mode."""

    def function(row: Tensor, inputs: Tree, targets: Tree, key: Tensor, *weights: Tensor) -> Tensor:
        wrong = (~right(model(row, augmented(augment, inputs, key), key), targets)).to(row.dtype)
        return (wrong * weights[0]).sum() if weights else wrong.mean()

    return function


def per_sample(loss: Loss, outputs: Tensor, targets: Tree) -> Tensor:
    """Returns the loss of every single sample: (samples,)."""

    def one(output: Tensor, target: Tree) -> Tensor:
        return loss(output.unsqueeze(0), trees.mapped(lambda part: part.unsqueeze(0), target))

    return vmap(one)(outputs, targets)


def weighted_loss(model: FlatModel, loss: Loss, augment: Augmentation | None) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, key, weights) -> loss in training mode; padding has weight zero."""

    loss = _placed(loss, model)

    def function(row: Tensor, inputs: Tree, targets: Tree, key: Tensor, weights: Tensor) -> Tensor:
        outputs = model(row, augmented(augment, inputs, key), key)
        return (per_sample(loss, outputs, targets) * weights).sum()

    return function


def losses_of_rows(model: FlatModel, loss: Loss, augment: Augmentation | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function (row, inputs, targets, key, weights) -> weighted loss and each sample's loss, in training
    mode."""

    loss = _placed(loss, model)

    def function(row: Tensor, inputs: Tree, targets: Tree, key: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        each = per_sample(loss, model(row, augmented(augment, inputs, key), key), targets)
        return (each * weights).sum(), each

    return function


def evaluation_losses(model: FlatModel, loss: Loss) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets) -> the loss of each sample, in evaluation mode."""

    loss = _placed(loss, model)

    def function(row: Tensor, inputs: Tree, targets: Tree) -> Tensor:
        outputs = model(row, inputs)
        if loss is nn.functional.cross_entropy and outputs.ndim == 2 and _is_vector(targets):
            return -outputs.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return per_sample(loss, outputs, targets)

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
