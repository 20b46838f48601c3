"""Checks of model and loss on a few samples, before anything is trained."""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fairmesh.config.registry import registered_name
from fairmesh.errors import BadInput, in_a_line
from fairmesh.losses import NamedLoss
from fairmesh.losses.builtin import squared_error
from fairmesh.metrics.base import TASKS, NamedMetric
from fairmesh.numerics import trees
from fairmesh.numerics.random_streams import GeneratorStates
from fairmesh.numerics.trees import Tree
from fairmesh.problems.flat_model import FlatModel
from fairmesh.problems.outputs import PackedLoss
from fairmesh.problems.row_loss import BoundModelLoss, Loss, batch_loss, losses_of_samples, takes_shares
from fairmesh.problems.site_samples import refuse_one_hot
from fairmesh.problems.stacking import grad_and_value, refuse_moved

if TYPE_CHECKING:
    from fairmesh.problems.bound_model import Probe
    from fairmesh.problems.prepared import Prepared

_NUMBERS = 1 << 20  # of drawn outputs at most
_SPREAD = 3.0  # standard deviation of drawn outputs around those of the model


def refuse_autocast() -> None:
    """Raises BadInput within a block of torch.autocast, which would change what is computed, and checked."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            raise BadInput(
                f"fairmesh was called within torch.autocast({kind!r}); call it outside, and set precision = 'bf16' "
                "(fm.train(..., precision='bf16')) to compute gradients in bfloat16"
            )


def check_with_model(problem: "Prepared") -> None:
    """Runs model and loss once as training will, so that an unsuitable problem is refused now."""
    probe, loss, task = problem.probe, problem.loss, problem.task
    if isinstance(loss, NamedLoss) and loss.of_numbers and task in ("classes", "masks"):
        raise BadInput(
            f"the loss {registered_name(loss)!r} needs numbers to predict, but the problem predicts "
            f'{TASKS[task]}; write loss = "cross-entropy", or, in the [data] of a table, predict = "numbers"'
        )
    if isinstance(loss, NamedLoss) and loss.of_labels and task == "multi-label":
        refuse_one_hot(problem)
    _check_gradient(probe)
    if not isinstance(loss, BoundModelLoss):
        with torch.no_grad():
            outputs = probe.model(probe.row, probe.inputs)
            check_mean(loss, outputs, trees.joined([probe.targets, probe.more_targets]))
    problem.at_once(torch.device("cpu"))  # refuses a model that cannot be evaluated in the way that is asked for
    for name, metric in problem.metrics.items():
        if isinstance(metric, NamedMetric):
            metric.check(name, task, problem.classes)


def _check_gradient(probe: "Probe") -> None:
    """Computes one gradient on a small batch. Raises BadInput if model and loss cannot be run, if the loss is not a
    finite scalar, or if random numbers are drawn that are not the node's own."""
    model, row, arguments = probe.model, probe.row, (*probe.augmented, torch.zeros((), dtype=torch.int64))
    loss, before = batch_loss(model, probe.loss, probe.augmenter), GeneratorStates.now()
    try:
        with warnings.catch_warnings():  # targets (batch,) against outputs (batch, 1): torch only warns
            warnings.filterwarnings("error", message="Using a target size")
            value = model.with_gradient(_scalar(loss), row, arguments, torch.empty_like(row))
    except BadInput:
        raise
    except Exception as error:  # the user's code may raise anything
        raise _failed(error, arguments[1], probe.loss) from error
    if before.moved():
        refuse_moved(before, *_layers_that_draw(model, row, arguments[0])[:1])
    if not bool(torch.isfinite(value)):
        raise BadInput(f"the loss of the first samples of site 0 is {float(value)} before training has begun")


def _layers_that_draw(model: FlatModel, row: Tensor, inputs: Tree) -> list[str]:
    """Returns the layers that draw from torch's generator in training mode, inner ones before those they are in."""
    names = {layer: f"layer {name}" if name else "the model" for name, layer in model.evaluated.named_modules()}
    before: list[Tensor] = []
    drawing: list[str] = []

    def after(layer: nn.Module, *_: Any) -> None:
        if not torch.equal(before.pop(), torch.get_rng_state()) and layer in names:
            drawing.append(f"{names[layer]} ({type(layer).__name__})")

    with (
        register_module_forward_pre_hook(lambda *_: before.append(torch.get_rng_state())),
        register_module_forward_hook(after),
        suppress(Exception),  # a loss of the user's own may call the model in another way
        torch.no_grad(),
    ):
        model(row, inputs, torch.zeros((), dtype=torch.int64))
    return drawing


def refuse_unwrapped(loss: Any) -> None:
    """Raises BadInput if this is no function of outputs and targets. A loss of the model is told by the name of its
    first parameter."""
    if isinstance(loss, type) or not callable(loss):
        named = f"the class {loss.__name__}; write {loss.__name__}()" if isinstance(loss, type) else repr(loss)
        raise BadInput(
            f"loss must be one of fm.losses, such as fm.losses.CrossEntropy(), or a function (outputs, targets), "
            f"got {named}"
        )
    try:
        first = next(iter(inspect.signature(loss).parameters), None)
    except (TypeError, ValueError):
        return
    if first == "model":
        raise BadInput(
            "loss: the first parameter of this function is called model, but a loss is called with (outputs, targets); "
            "one that calls the model itself is given as fm.losses.ModelLoss(function)"
        )


def refuse_no_shares(loss: Loss, targets: Tree) -> None:
    """Raises BadInput if torch's cross-entropy would take numbers for shares of classes."""
    if not takes_shares(loss) or not isinstance(targets, Tensor) or not targets.is_floating_point() or targets.ndim < 2:
        return
    sums = targets.sum(dim=1)
    if bool((targets < 0).any()) or not torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
        raise BadInput(
            f"targets are {targets.shape[1]} floats per sample, which cross-entropy takes for shares of classes, but "
            "they are negative or do not sum to 1; to predict numbers, use loss=torch.nn.functional.mse_loss (in a "
            'file "squared-error"), and for several labels 0 and 1, loss=fm.losses.BinaryCrossEntropy()'
        )


def _scalar(function):
    """Returns the same function, which refuses to return anything but a scalar."""

    def checked(*arguments: Tensor) -> Tensor:
        value = function(*arguments)
        if not isinstance(value, Tensor) or value.ndim:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise BadInput(
                f"the loss must return a scalar tensor, the mean over the batch, got {got}; use reduction='mean'"
            )
        return value

    return checked


def why_not_stacked(probe: "Probe") -> str:
    """Returns why vmap cannot evaluate several models at once, in a sentence; "" if it can."""
    key = torch.zeros((), dtype=torch.int64)
    arguments = trees.mapped(lambda t: t.unsqueeze(0), (probe.row, *probe.augmented, key))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an operation falls back to a loop
            vmap(grad_and_value(batch_loss(probe.model, probe.loss, probe.augmenter)))(*arguments)
            vmap(probe.model)(*arguments[:2])
    except Exception as error:  # vmap may raise anything
        return in_a_line(error).split(". ")[0]  # torch goes on with advice to its own developers
    return ""


def check_mean(loss: Loss, outputs: Tensor, targets: Tree) -> None:
    """Raises BadInput if the loss of a batch is not the mean of the losses of its samples.

    Args:
        loss: The loss.
        outputs: What the model gives for some of the samples.
        targets: The targets of these samples and of more.
    """
    outputs = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs  # sums would round
    for at in (outputs, *_drawn_like(outputs, trees.length(targets))):
        wanted = trees.at(targets, slice(len(at)))
        try:
            whole, parts = loss(at, wanted), losses_of_samples(loss, at, wanted)
        except Exception as error:
            if at is outputs:
                raise _failed(error, wanted, loss) from error
            continue  # a loss may not accept all outputs
        if bool(torch.isfinite(whole)) and not torch.allclose(whole, parts.mean(), rtol=1e-3, atol=1e-6):
            raise BadInput(
                f"the loss of {len(at)} samples is {float(whole):.6g}, but the mean of their single losses is "
                f"{float(parts.mean()):.6g}; every node is measured by the mean over its samples: use "
                f"reduction='mean', no class weights, targets {trees.form_in_words(wanted)} that go with outputs "
                f"{tuple(at.shape[1:])}, and for padding, masks or class weights a loss of fm.losses, such as "
                "fm.losses.CrossEntropy(ignore_index=-100, class_weights=...); if the loss compares samples with each "
                "other, give what belongs together as one sample, such as a tuple of inputs"
            )


def _drawn_like(outputs: Tensor, samples: int) -> Iterator[Tensor]:
    """Yields other outputs, for more samples: where initial outputs are about equal, any loss looks like a mean."""
    if not outputs.is_floating_point():
        return
    generator = torch.Generator().manual_seed(0)
    count = max(len(outputs), min(samples, _NUMBERS // max(1, outputs[0].numel())))
    centre = outputs[torch.arange(count) % len(outputs)]
    for _ in range(3):
        noise = torch.randn(centre.shape, generator=generator, dtype=outputs.dtype)
        yield centre + _SPREAD * noise
        if outputs.ndim > 1:
            yield torch.softmax(noise, dim=1)  # for a loss of probabilities


def _failed(error: Exception, targets: Tree, loss: Loss) -> BadInput:
    said = in_a_line(error)
    whole = isinstance(targets, Tensor) and not targets.is_floating_point()
    remedy = f"; the loss gets all that the model returns, and targets {trees.form_in_words(targets)}"
    if whole and targets.dtype == torch.bool:
        remedy = "; targets are True and False: give labels as whole numbers (targets.long()), or numbers as floats"
    elif whole and targets.ndim == 2 and targets.shape[1] == 1:
        remedy = "; targets are (samples, 1): if they are labels, give one per sample (targets.squeeze(1))"
    elif loss is squared_error:
        remedy = (
            "; targets are floats, so that the loss is the squared error, which needs one output for each number; if "
            "they are labels of classes, give them as whole numbers (targets.long())"
        )
    elif whole and ("Long" in said or "Bool" in said or "Target size" in said):  # such as those of several labels
        remedy = "; targets are whole numbers: give floats, or loss=fm.losses.BinaryCrossEntropy() for labels 0 and 1"
    elif whole and targets.ndim > 1 and int(targets.min()) < 0:
        remedy = f"; to leave targets out: loss=fm.losses.CrossEntropy(ignore_index={int(targets.min())})"
    elif whole and "with size 1" in said:
        remedy = "; labels need one output per class, or one output and loss=fm.losses.BinaryCrossEntropy() for 0 and 1"
    elif "dense and sparse" in said:
        remedy = "; the model makes sparse gradients: leave out sparse=True, which gives the same numbers"
    elif not isinstance(loss, PackedLoss):
        remedy = ""
    return BadInput(f"model and loss cannot be run on a few samples of the first sites: {said}{remedy}")
