"""The loss of one row on one batch, as vmap runs it for all nodes, and the check of a user's loss."""

import itertools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from fairmesh.errors import BadInput
from fairmesh.metrics.base import predicted_labels
from fairmesh.numerics import random_streams
from fairmesh.problems.flat_model import FlatModel

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> the mean over the samples
Augmentation = Callable[[Tensor, Callable[..., Tensor]], Tensor]  # (a batch, draw(*shape) -> uniforms) -> a batch


def as_floats(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns data as the model sees it: floats in the run's dtype, bytes scaled to [0, 1], whole numbers unchanged."""
    if values.dtype == torch.uint8:
        return values.to(dtype).mul_(1.0 / 255.0)  # multiplied, since a division takes a CPU twice as long
    return values.to(dtype) if values.is_floating_point() else values


def _augmented(augment: Augmentation | None, inputs: Tensor, key: Tensor) -> Tensor:
    if augment is None:
        return inputs

    one, calls = torch.zeros(1, dtype=torch.int64, device=key.device), itertools.count()

    def draw(*shape: int) -> Tensor:
        stream = random_streams.keys(key, "augmentation", next(calls), one).squeeze(-1)  # each call draws other numbers
        return random_streams.uniform(stream, torch.Size(shape).numel(), inputs.dtype).reshape(shape)

    return augment(inputs, draw)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns nn.functional.cross_entropy of valid class labels, with a third of its operations under vmap."""
    return -outputs.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).mean()


def reads_logits(loss: Loss) -> bool:
    """Returns whether a loss reads each output as the logit of a yes-or-no label."""
    known = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
    return loss is nn.functional.binary_cross_entropy_with_logits or isinstance(loss, known)


def loss_in_spreads(loss: Loss, spread: float, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns a loss of numbers that are measured in multiples of their spread."""
    return loss(outputs / spread, targets / spread)


def batch_loss(model: FlatModel, loss: Loss, augment: Augmentation | None) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, key) -> loss in training mode."""

    def function(row: Tensor, inputs: Tensor, targets: Tensor, key: Tensor) -> Tensor:
        outputs = model(row, _augmented(augment, inputs, key), key)
        plain = loss is nn.functional.cross_entropy and outputs.ndim == 2 and targets.ndim == 1
        return _cross_entropy(outputs, targets) if plain else loss(outputs, targets)

    return function


def batch_error(model: FlatModel, augment: Augmentation | None) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, key, ...) -> share of misclassified samples, in training mode."""

    def function(row: Tensor, inputs: Tensor, targets: Tensor, key: Tensor, *weights: Tensor) -> Tensor:
        labels = predicted_labels(model(row, _augmented(augment, inputs, key), key))
        wrong = (labels != targets.reshape(labels.shape)).to(row.dtype)
        return (wrong * weights[0]).sum() if weights else wrong.mean()

    return function


def per_sample(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss of every single sample: (samples,)."""
    return vmap(lambda output, target: loss(output.unsqueeze(0), target.unsqueeze(0)))(outputs, targets)


def weighted_loss(model: FlatModel, loss: Loss, augment: Augmentation | None) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, key, weights) -> loss in training mode; padding has weight zero."""

    def function(row: Tensor, inputs: Tensor, targets: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        outputs = model(row, _augmented(augment, inputs, key), key)
        return (per_sample(loss, outputs, targets) * weights).sum()

    return function


def losses_of_rows(model: FlatModel, loss: Loss, augment: Augmentation | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function (row, inputs, targets, key, weights) -> weighted loss and each sample's loss, in training
    mode."""

    def function(row: Tensor, inputs: Tensor, targets: Tensor, key: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        each = per_sample(loss, model(row, _augmented(augment, inputs, key), key), targets)
        return (each * weights).sum(), each

    return function


def evaluation_losses(model: FlatModel, loss: Loss) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets) -> the loss of each sample, in evaluation mode."""

    def function(row: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = model(row, inputs)
        if loss is nn.functional.cross_entropy and outputs.ndim == 2 and targets.ndim == 1:
            return -outputs.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return per_sample(loss, outputs, targets)

    return function


def evaluation_loss(model: FlatModel, loss: Loss) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, weights) -> weighted loss in evaluation mode."""
    each = evaluation_losses(model, loss)

    def function(row: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (each(row, inputs, targets) * weights).sum()

    return function


def evaluation_error(model: FlatModel) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, weights) -> weighted share of errors in evaluation mode."""

    def function(row: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        labels = predicted_labels(model(row, inputs))
        return ((labels != targets.reshape(labels.shape)).to(row.dtype) * weights).sum()

    return function


def check_loss(
    model: FlatModel, row: Tensor, loss: Loss, augment: Augmentation | None, batch: tuple[Tensor, Tensor]
) -> None:
    """Computes one gradient on a small batch, as training does.

    Raises BadInput if the loss is not a scalar mean over samples, or if the model draws random numbers of its own."""
    inputs, targets = batch
    arguments = [t.unsqueeze(0) for t in (row, inputs, targets, torch.zeros((), dtype=torch.int64))]
    function = batch_loss(model, loss, augment)
    try:
        with warnings.catch_warnings():  # targets (batch,) against outputs (batch, 1): torch only warns
            warnings.filterwarnings("error", message="Using a target size")
            value = vmap(function)(*arguments)
        if value.ndim != 1:
            raise BadInput(
                f"the loss must return a scalar, the mean over the batch, got shape {tuple(value.shape[1:])}; "
                "use reduction='mean'"
            )
        vmap(grad_and_value(function))(*arguments)
        with torch.no_grad():
            outputs = model(row, inputs)
            whole, parts = loss(outputs, targets), per_sample(loss, outputs, targets)
    except BadInput:
        raise
    except Exception as error:  # the user's code may raise anything
        raise _explained(error) from error
    if not bool(torch.isfinite(whole)):
        raise BadInput(f"the loss of the first samples of site 0 is {float(whole)} before training has begun")
    for at in (outputs, *_drawn_like(outputs)):
        try:
            whole, parts = loss(at, targets), per_sample(loss, at, targets)
        except Exception:
            continue
        if bool(torch.isfinite(whole)) and not torch.allclose(whole, parts.mean(), rtol=1e-3, atol=1e-6):
            raise BadInput(
                f"the loss of {len(inputs)} samples is {float(whole):.6g}, but the mean of their single losses is "
                f"{float(parts.mean()):.6g}; every node is measured by the mean over its samples: use "
                f"reduction='mean', no class weights, and targets {tuple(targets.shape)} that go with outputs "
                f"{tuple(outputs.shape)}"
            )


def _drawn_like(outputs: Tensor) -> Iterator[Tensor]:
    """Yields other outputs: at initial ones, which may all be zero, a loss with class weights can look like a mean."""
    generator = torch.Generator().manual_seed(0)
    if outputs.is_floating_point():
        for _ in range(3):
            yield outputs + torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype)


def _explained(error: Exception) -> BadInput:
    text = str(error).splitlines()[0] if str(error) else repr(error)
    if "random" in text and "vmap" in text:
        return BadInput(
            "the model, loss or augmentation draws from torch's own generator, so runs could not be repeated; use "
            "nn.Dropout layers and, in augment(batch, draw), uniforms from draw(*shape)"
        )
    return BadInput(
        "model and loss cannot be run on a few samples of the first sites (under torch.vmap): "
        f"{type(error).__name__}: {text}"
    )
