"""The loss of one row on one batch, in training and in evaluation mode: of outputs and targets, or of the model."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fairmesh.errors import BadInput, in_a_line
from fairmesh.losses.base import ModelLoss, NamedLoss
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.augmentation import Augmenter
from fairmesh.problems.flat_model import FlatModel
from fairmesh.problems.stacking import AtOnce, over_models
from fairmesh.problems.torch_draws import TorchDraws

Loss = Callable[[Any, Any], Tensor]  # (outputs, targets) -> the mean over the samples

_NEVER_NEGATIVE: dict[Any, type[nn.Module]] = {  # functions, and the modules that compute them
    nn.functional.cross_entropy: nn.CrossEntropyLoss,
    nn.functional.mse_loss: nn.MSELoss,
    nn.functional.l1_loss: nn.L1Loss,
    nn.functional.smooth_l1_loss: nn.SmoothL1Loss,
    nn.functional.huber_loss: nn.HuberLoss,
    nn.functional.binary_cross_entropy: nn.BCELoss,
    nn.functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}
_AT_ONCE = 256  # samples, each a batch of one
_MOVED = (0.0, 0.1, 0.5)  # standard deviation of the parameters around the initial ones, at which a loss is checked


def as_floats(values: Tree, dtype: torch.dtype) -> Tree:
    """Returns data as the model sees it: floats in the run's dtype, bytes scaled to [0, 1], whole numbers unchanged."""
    if not isinstance(values, Tensor):
        return trees.mapped(lambda tensor: as_floats(tensor, dtype), values)
    if values.dtype == torch.uint8:
        return values.to(dtype).mul_(1.0 / 255.0)  # multiplied, since a division takes a CPU twice as long
    return values.to(dtype) if values.is_floating_point() else values


# What is known of a loss of outputs and targets -----------------------------------------------------------------------


def reads_logits(loss: Loss) -> bool:
    """Returns whether a loss reads each output as the logit of a yes-or-no label."""
    if isinstance(loss, NamedLoss):
        return loss.reads_logits
    modules = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
    return loss is nn.functional.binary_cross_entropy_with_logits or isinstance(loss, modules)


def takes_shares(loss: Loss) -> bool:
    """Returns whether a loss reads floats as shares of classes, not as numbers to predict."""
    return loss is nn.functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def lowest_loss(loss: Loss) -> float | None:
    """Returns the lowest possible loss of a sample; None if that is not known."""
    if isinstance(loss, functools.partial) and loss.func is loss_in_spreads:
        return lowest_loss(loss.args[0])
    if isinstance(loss, NamedLoss):
        return loss.lowest
    never = loss in list(_NEVER_NEGATIVE) or type(loss) in _NEVER_NEGATIVE.values()
    return 0.0 if never else None


def loss_in_spreads(loss: Loss, spread: float, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns a loss of numbers that are measured in multiples of their spread."""
    return loss(outputs / spread, targets / spread)


# In training mode -----------------------------------------------------------------------------------------------------


def batch_loss(model: FlatModel, loss: Loss, augment: Augmenter | None) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, key) -> loss in training mode."""
    of_outputs = _training_loss(model, loss, augment)

    def function(row: Tensor, inputs: Tree, targets: Tree, key: Tensor) -> Tensor:
        inputs, targets = augmented(augment, inputs, targets, key)
        if isinstance(loss, BoundModelLoss):
            return loss.of_batch(model, row, inputs, targets, key)
        outputs = model(row, inputs, key)
        if _is_plain(of_outputs, outputs, targets):
            return -_right_logs(outputs, targets).mean()
        return of_outputs(outputs, targets)

    return function


def losses_of_rows(model: FlatModel, loss: Loss, augment: Augmenter | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function (row, inputs, targets, key, weights) -> weighted loss and each sample's loss, in training
    mode; padding has weight zero."""
    of_outputs = _training_loss(model, loss, augment)

    def function(row: Tensor, inputs: Tree, targets: Tree, key: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = augmented(augment, inputs, targets, key)
        if isinstance(loss, BoundModelLoss):
            each = loss.of_samples(model, row, inputs, targets, key)
        else:
            each = per_sample(of_outputs, model(row, inputs, key), targets)
        return (each * weights).sum(), each

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


def augmented(augment: Augmenter | None, inputs: Tree, targets: Tree, key: Tensor) -> tuple[Tree, Tree]:
    """Returns a batch as an augmentation changes it, with draws from a key."""
    return (inputs, targets) if augment is None else augment.drawn(inputs, targets, key)


def _placed(loss: Loss, model: FlatModel) -> Loss:
    """Returns the loss with its constants where the model is, so that no round copies them there."""
    return loss.on(model.device, model.dtype) if isinstance(loss, NamedLoss) else loss


def _is_plain(loss: Loss, outputs: Tensor, targets: Tree) -> bool:
    """Returns whether this is torch's cross-entropy of one label per sample."""
    one_label = isinstance(targets, Tensor) and targets.ndim == 1
    return loss is nn.functional.cross_entropy and outputs.ndim == 2 and one_label


def _right_logs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the logarithm of the probability of each sample's label, which is valid: (samples, 1). Under vmap, this
    takes a third of the operations of torch's cross-entropy."""
    return outputs.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1))


# In evaluation mode ---------------------------------------------------------------------------------------------------


def per_sample(loss: Loss, outputs: Tensor, targets: Tree) -> Tensor:
    """Returns the loss of every single sample: (samples,)."""

    def alone(output: Tensor, target: Tree) -> Tensor:
        return loss(output.unsqueeze(0), trees.mapped(lambda part: part.unsqueeze(0), target))

    return vmap(alone)(outputs, targets)


def evaluation_losses(model: FlatModel, loss: Loss) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets) -> the loss of each sample, in evaluation mode."""
    if isinstance(loss, BoundModelLoss):
        return functools.partial(loss.of_samples, model)
    placed = _placed(loss, model)
    return lambda row, inputs, targets: losses_of_samples(placed, model(row, inputs), targets)


def evaluation_errors(model: FlatModel, right: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets) -> 1 for each sample that is misclassified, in evaluation mode."""
    return lambda row, inputs, targets: (~right(model(row, inputs), targets)).to(row.dtype)


def sample_losses_of(model: FlatModel, loss: Loss) -> Callable[[Tensor, Tree], Tensor]:
    """Returns a function (outputs, targets) -> the loss of each sample, for a loss of outputs."""
    placed = _placed(loss, model)
    return lambda outputs, targets: losses_of_samples(placed, outputs, targets)


def weighed(each: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a function (row, inputs, targets, weights) -> the weighted sum over the samples of what a function gives
    for each."""
    return lambda row, inputs, targets, weights: (each(row, inputs, targets) * weights).sum()


def answering(model: FlatModel, loss: Loss, at_once: AtOnce) -> Callable[[Tensor, Tree, Tree], tuple[Tensor, Tensor]]:
    """Returns a function (rows, inputs, targets) -> outputs (rows, samples, ...) and the loss of each sample (rows,
    samples), in evaluation mode, of several models on the same samples."""

    def function(rows: Tensor, inputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
        outputs = over_models(lambda row: model(row, inputs), at_once)(rows)
        if isinstance(loss, BoundModelLoss):
            each = functools.partial(loss.of_samples, model, inputs=inputs, targets=targets)
            return outputs, over_models(each, at_once)(rows)
        return outputs, vmap(lambda of_model: losses_of_samples(loss, of_model, targets))(outputs)

    return function


def losses_of_samples(loss: Loss, outputs: Tensor, targets: Tree) -> Tensor:
    """Returns the loss of every single sample, whose labels are valid: (samples,)."""
    if _is_plain(loss, outputs, targets):
        return -_right_logs(outputs, targets).squeeze(-1)
    return per_sample(loss, outputs, targets)


# Losses that call the model -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BoundModelLoss(ModelLoss):
    """A loss of the user's own that calls the model, and how it is evaluated.

    Args:
        function: (module, (inputs, targets)) -> a scalar, or a number per sample.
        each: Whether it gives a number per sample. Default: False.
        by_vmap: Whether vmap can evaluate it for several samples at once. Default: True.
    """

    each: bool = False
    by_vmap: bool = True

    def of_batch(self, model: FlatModel, row: Tensor, inputs: Tree, targets: Tree, key: Tensor) -> Tensor:
        """Returns the loss of a batch, in training mode."""
        value = model.within(row, lambda module: self.function(module, (inputs, targets)), key)
        return value.mean() if self.each else value

    def of_samples(
        self, model: FlatModel, row: Tensor, inputs: Tree, targets: Tree, key: Tensor | None = None
    ) -> Tensor:
        """Returns the loss of each sample (samples,); with a key in training mode, which a loss that gives a scalar
        does not have for single samples."""
        if self.each:
            return model.within(row, lambda module: self.function(module, (inputs, targets)), key)
        if key is not None:
            raise BadInput(
                "subgroups, full batches of sites of unequal size and an algorithm's sample_losses need the losses of "
                "single samples; let the function of fm.losses.ModelLoss return one number per sample (samples,)"
            )

        def alone(*sample: Tree) -> Tensor:
            batch = trees.mapped(lambda part: part.unsqueeze(0), sample)
            return model.within(row, lambda module: self.function(module, batch))

        if self.by_vmap:
            return vmap(alone, chunk_size=_AT_ONCE)(inputs, targets)
        return torch.stack([alone(trees.at(inputs, i), trees.at(targets, i)) for i in range(trees.length(inputs))])


class _SameDraws(TorchDraws):
    """Answers a draw with one number in all places, so that a batch and its single samples draw the same."""

    def uniforms(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        drawn = super().uniforms((1,), dtype, device)
        return drawn.expand(math.prod(shape)).reshape(tuple(shape)).clone()


def bound(loss: ModelLoss, model: FlatModel, row: Tensor, batch: tuple[Tree, Tree]) -> BoundModelLoss:
    """Returns the loss with how it is evaluated, found on a few samples.

    Args:
        loss: The user's loss.
        model: The model.
        row: Its initial parameters.
        batch: Inputs and targets of a few samples.

    Raises:
        BadInput: It fails, returns something else, or its value for a batch is not the mean over the samples.
    """
    count, each = trees.length(batch[0]), False
    for moved in _MOVED:
        noise = torch.randn(row.shape, generator=torch.Generator().manual_seed(0), dtype=row.dtype)
        at = row + moved * noise

        def value(part: tuple[Tree, Tree], at: Tensor = at) -> Tensor:
            key = torch.zeros((), dtype=torch.int64)
            with torch.no_grad():
                return model.within(at, lambda module: loss.function(module, part), draws=_SameDraws(key))

        try:
            whole = value(trees.mapped(torch.clone, batch))
        except BadInput:
            raise
        except Exception as error:  # the user's function may raise anything
            if moved:
                continue  # a model may not accept all parameters
            raise BadInput(
                f"loss: the function of fm.losses.ModelLoss fails for (model, (inputs, targets)) of {count} samples, "
                f"with inputs {trees.form_in_words(batch[0])} and targets {trees.form_in_words(batch[1])}: "
                f"{in_a_line(error)}"
            ) from error
        if not isinstance(whole, Tensor) or whole.shape not in ((), (count,)):
            shown = f"shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else f"a {type(whole).__name__}"
            raise BadInput(
                f"loss: the function of fm.losses.ModelLoss must return one number per sample, ({count},) for {count} "
                f"samples, or a scalar, got {shown}"
            )
        each = whole.ndim == 1
        alone = torch.cat([value(trees.at(batch, slice(i, i + 1))).reshape(-1) for i in range(count)])
        alone = alone if each else alone.mean()
        if bool(torch.isfinite(whole).all()) and not torch.allclose(whole, alone, rtol=1e-3, atol=1e-5):
            i = int((whole - alone).abs().argmax())
            where = f"sample {i} in a batch of {count}" if each else f"a batch of {count} samples"
            raise BadInput(
                f"loss: {where} has the loss {float(whole.flatten()[i]):.6g}, but {float(alone.flatten()[i]):.6g} if "
                "every sample is evaluated alone; every node is measured by the mean over its samples, so the loss of "
                "a sample must not depend on the others. Let the function return one number per sample (samples,), "
                "such as the mean over a sample's own tokens"
            )
    return BoundModelLoss(loss.function, each)
