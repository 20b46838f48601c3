"""The model and the loss of an experiment, fitted to the samples of its sites."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairmesh.config.registry import registered_name
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.errors import BadInput
from fairmesh.losses import BinaryCrossEntropy
from fairmesh.losses.builtin import squared_error
from fairmesh.numerics import trees
from fairmesh.problems.models import (
    FullyConnected,
    ImportedModel,
    Logistic,
    LoRA,
    Model,
    PaperCNN,
    build_in_units,
)
from fairmesh.problems.private_data import refuse_open_tables
from fairmesh.problems.row_loss import loss_in_spreads

_LOSSES = {"cross-entropy": nn.functional.cross_entropy, "squared-error": squared_error}


class Fitted(NamedTuple):
    """What a problem needs besides the sites."""

    model: partial  # makes the module
    loss: Any
    class_names: Sequence[str]


def fitted(
    sites: Sequence[Site],
    model: Model,
    loss: Any,
    names: Sequence[str],
    outputs: int | None = None,
    settled: int | None = None,
) -> Fitted:
    """Returns the model and the loss for the samples of the sites.

    Args:
        sites: The sites.
        model: The model.
        loss: The name of a loss, or a loss. If targets are numbers, cross-entropy stands for the squared error.
        names: The names of the classes, if they are known.
        outputs: The number of outputs of the model; None for as many as the labels need. Default: None.
        settled: For a private run, the number of classes that is known without its rows, 0 for none. None for as many
            as the labels have. Default: None.
    """
    if settled is None:
        shape, needed = shape_of(sites)
    else:
        shape, needed = _shape_alone(sites, model, outputs or len(names) or settled)
    outputs = outputs or needed or len(names)
    _refuse_unfit(model, shape, outputs)
    if isinstance(loss, BinaryCrossEntropy) and _is_vector(Samples.of(sites[0].train, "site 0").targets):
        outputs = 1  # one logit for labels 0 and 1
    target = next((site.table.preprocessing.target for site in sites if site.table), None)
    function = _LOSSES[loss] if isinstance(loss, str) else loss
    if target is None or target.kind != "number":
        return Fitted(partial(model.build, shape, outputs), function, names or (target.classes if target else ()))
    function = squared_error if loss == "cross-entropy" else function  # which needs classes
    if (target.center, target.scale) == (0.0, 1.0):
        return Fitted(partial(model.build, shape, outputs), function, names)
    in_units = partial(build_in_units, model, shape, target.center, target.scale)
    return Fitted(in_units, partial(loss_in_spreads, function, target.scale), names)


def _refuse_unfit(model: Model, shape: Any, outputs: int) -> None:
    """Refuses a model of fairmesh that cannot be made for such samples."""
    if type(model) not in (FullyConnected, Logistic, PaperCNN):
        return
    if not isinstance(shape, torch.Size):
        raise BadInput(
            f"model: {registered_name(model)!r} takes one tensor, but samples have several inputs; name a "
            'module of your own: model = { name = "import", path = "mine.py:Module" }'
        )
    if not outputs:
        raise BadInput(
            f"model: {registered_name(model)!r} needs the number of classes, but labels are read with the "
            "items of a Dataset that is not in memory; give them as fm.data.Streamed(dataset, labels=...)"
        )


def _is_vector(targets: Any) -> bool:
    return isinstance(targets, Tensor) and targets.ndim == 1


def _shape_alone(sites: Sequence[Site], model: Model, outputs: int) -> tuple[Any, int]:
    """Returns the shape of one input, and the number of outputs, of which the values of rows tell nothing."""
    refuse_open_tables(sites)
    first = Samples.of(sites[0].train, "site 0")
    shape = trees.mapped(lambda part: part.shape[1:], first.inputs)
    targets = first.targets
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return shape, max(1, trees.leaves(targets)[0].shape[1:].numel())
    outputs = outputs or max((site.train.sealed.outputs for site in sites if _is_sealed(site)), default=0)
    if not outputs and not isinstance(model, ImportedModel | LoRA):
        raise BadInput(
            "privacy: how many classes there are would follow from the labels of the training rows; name them, as "
            'classes = ["no", "yes"] in [data], or as the classes of the target in [contract], or bring a module of '
            "your own as the model"
        )
    return shape, outputs


def _is_sealed(site: Site) -> bool:
    return isinstance(site.train, Samples) and site.train.sealed is not None


def shape_of(sites: Sequence[Site]) -> tuple[Any, int]:
    """Returns the shape of one input, or of each of several, and the number of outputs that a model needs: classes, or
    numbers to predict."""
    if not sites:
        raise BadInput("data: no site")
    every = [Samples.of(site.train, f"site {i} ({site.name or 'unnamed'})") for i, site in enumerate(sites)]
    inputs, targets = every[0].inputs, every[0].targets
    shape = trees.mapped(lambda part: part.shape[1:], inputs)
    if not isinstance(targets, Tensor):
        return shape, 1  # a model of several targets knows what it predicts
    if targets.is_floating_point():
        return shape, max(1, targets.shape[1:].numel())
    if any(samples.stream and samples.labels is None for samples in every):
        return shape, 0  # known to the model, if it is the user's own
    labels = max(
        samples.sealed.outputs if samples.sealed else 1 + int(samples.known_targets().max())
        for samples in every
        if samples.here
    )
    return shape, max([labels, *(len(site.table.preprocessing.classes) for site in sites if site.table)])
