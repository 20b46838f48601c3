"""What a user is told of a problem when training starts: choices that fairmesh made, in a line each."""

from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fairmesh.data.rows import stays_apart
from fairmesh.data.site_tables import without_values
from fairmesh.data.streams import HELD_UP_TO
from fairmesh.data.units import FEWEST_UNITS, too_few_units
from fairmesh.errors import listed
from fairmesh.losses.builtin import squared_error
from fairmesh.problems.flat_model import has_adapters
from fairmesh.problems.lora import said_of_adapters

_SHOWN = 4  # sites of a column in a sentence
_NORMS = {
    "frozen": "keep their statistics",
    "local": "keep statistics and affine parameters at their site",
    "shared": "share affine parameters, and average their statistics for the common model",
}

if TYPE_CHECKING:
    from fairmesh.problems.prepared import Prepared


def on_empty_columns(problem: "Prepared") -> str | None:
    """Returns which columns of tables have no values at some sites."""
    empty = without_values(problem.sites)
    said = (f"{column} at {listed(sites, _SHOWN)}" for column, sites in empty.items())
    return f"columns without values, which count as missing: {listed(said)}" if empty else None


def on_stacking(problem: "Prepared", device: torch.device) -> str | None:
    """Returns why models are evaluated one after another on a device, unless that was asked for or they are not."""
    if problem.models_at_once != "auto" or problem.at_once(device) is None:
        return None
    cause = problem.slower_stacked[device.type]
    cause = cause or f"torch.vmap cannot evaluate several at once ({problem.why_not_stacked})"
    return f"models are evaluated one after another: {cause}"


def on_data(problem: "Prepared", home: torch.device, device: torch.device) -> str:
    """Returns where training data is, and why: on the device, in memory, or in a Dataset that is read.

    Args:
        problem: The problem.
        home: Where data in memory is kept.
        device: Where the run is.
    """
    sets = problem.train_sets
    size = sum(samples.nbytes for samples in sets) / 2.0**30
    data, streams = f"training data ({size:.2f} GiB)", [one.stream for one in sets if one.stream]
    if streams:
        asked = all(stream.asked for stream in streams)
        why = "as asked for" if asked else f"since a Dataset of more than {HELD_UP_TO >> 30} GiB is not held in memory"
        workers = max(stream.source.workers for stream in streams)
        ahead = max(stream.source.prefetch for stream in streams)
        how = f"{ahead} rounds ahead" if workers else "while training waits"
        judged = "" if problem.held_out("test")[1] else "; without test samples, every measurement reads all of it"
        where = f"at {len(streams)} of {len(sets)} sites"
        return f"{data} is streamed {where}, {why}: each batch is read {how} (workers = {workers}){judged}"
    if stays_apart([samples.inputs for samples in sets], home):
        return f"{data} stays where it is, and batches are gathered from it, since a copy of so much takes long"
    if home.type != "cpu":
        return f"{data} is all on the device, where there is room for it"
    there = "" if device.type == "cpu" else ", since the device has no room for it"
    return f"{data} is all in memory{there}"


def on_augmentation(problem: "Prepared") -> str | None:
    """Returns that an augmentation runs on the CPU, and how often, or None."""
    if problem.augmenter is None or problem.augmenter.with_model:
        return None
    once = "batch of a node" if problem.augmenter.changes_targets else "sample"
    return f"augment runs on the CPU, once for every {once}, with torch, random and np.random seeded for each call"


def on_evaluation_mode(problem: "Prepared") -> str | None:
    """Returns which layers a module in evaluation mode trains without, or None."""
    layers = problem.flat_model.switched_off()
    return layers and (
        f"the model is in evaluation mode, as from_pretrained returns it, so {layers} will not drop anything; call "
        "model.train() before fm.Problem(model, ...) to train with dropout"
    )


def on_short_floats(problem: "Prepared") -> str | None:
    """Returns that a model in half precision is trained in float32, or None."""
    kinds = {tensor.dtype for tensor in problem.initial_model(0).parameters() if tensor.is_floating_point()}
    short = sorted(str(kind).removeprefix("torch.") for kind in kinds - {torch.float32, torch.float64})
    if not short:
        return None
    return (
        f"the model has parameters in {' and '.join(short)}, which are trained in float32; precision = 'bf16' computes "
        "gradients in bfloat16"
    )


def on_binary_numbers(problem: "Prepared") -> str | None:
    """Returns that targets 0 and 1 are predicted as numbers, by squared error, or None."""
    if problem.loss is not squared_error or problem.privacy is not None:
        return None
    targets = [problem.sites[i].train.seen.targets for i in problem.here]
    if not all(bool(((t == 0) | (t == 1)).all()) for t in targets):
        return None
    return (
        "all targets are 0.0 or 1.0, which are floats, so they are predicted as numbers, by squared error; to tell two "
        "classes apart, use loss=fm.losses.BinaryCrossEntropy(), or labels as whole numbers (targets.long()) and two "
        "outputs"
    )


def on_single_classes(problem: "Prepared") -> str | None:
    """Returns which sites have training rows of one class only, or None."""
    if problem.privacy is not None or not problem.classes:
        return None
    labels = {problem.sites[i].name: problem.sites[i].train.labels for i in problem.here}
    single = [name for name, of_site in labels.items() if of_site is not None and bool((of_site == of_site[0]).all())]
    said = f"the training rows of {listed(single, 10)} are all of one class"
    return f"{said}: a model trained there alone can only answer it" if single else None


def on_parts(problem: "Prepared") -> str | None:
    """Returns which parts of the model stay at their site or are not trained, and what BatchNorm layers do, or None
    if there is nothing to say."""
    flat, module, said = problem.flat_model, problem.initial_model(0), []
    layers = sum(isinstance(layer, _BatchNorm) for layer in module.modules())
    if problem.batch_norm == "convert":
        said.append('batch_norm = "convert": nn.GroupNorm stands for BatchNorm')
    elif layers:
        policy = "frozen" if problem.batch_norm == "refuse" else problem.batch_norm
        said.append(f'batch_norm = "{policy}": BatchNorm layers ({layers}) {_NORMS[policy]}')
    if has_adapters(module):
        said.append(said_of_adapters(module, problem.parts.local_names(module)))
    if flat.local_dim or problem.parts.frozen:
        every = sum(p.numel() for p in module.parameters())
        still = every - flat.dim - flat.local_dim
        said.append(f"parameters: {flat.dim:,} shared, {flat.local_dim:,} local and never sent, {still:,} frozen")
    return "; ".join(filter(None, said)) or None


def on_units(problem: "Prepared") -> str | None:
    """Returns at which sites no rows are held out since they have too few units, or None."""
    few = [problem.sites[i].name for i in problem.here if too_few_units(problem.sites[i].train)]
    if not few or problem.objective.judged_on != "held-out":
        return None
    return (
        f"fewer than {FEWEST_UNITS} units at {listed(few, 4)}: no rows are held out there, and the weight follows the "
        "loss on training rows"
    )
