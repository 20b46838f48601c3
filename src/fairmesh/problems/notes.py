"""What a user is told of a problem when training starts: choices that fairmesh made, in a line each."""

from typing import TYPE_CHECKING

import torch

from fairmesh.data.rows import stays_apart
from fairmesh.numerics import trees
from fairmesh.problems.batch_norm import layers_of

if TYPE_CHECKING:
    from fairmesh.problems.problem import Problem


def on_stacking(problem: "Problem", device: torch.device) -> str | None:
    """Returns why models are evaluated one after another on a device, unless that was asked for or they are not."""
    if problem.models_at_once != "auto" or problem.at_once(device) is None:
        return None
    cause = problem.slower_stacked[device.type]
    cause = cause or f"torch.vmap cannot evaluate several at once ({problem.why_not_stacked})"
    return f"models are evaluated one after another: {cause}"


def on_data(problem: "Problem", device: torch.device) -> str | None:
    """Returns that training data is too large to be copied on a device, or None."""
    sets = [split.sites[i].train.inputs for split in problem.every_split for i in problem.here]
    size = sum(map(trees.nbytes, sets)) / 2.0**30
    return (
        f"training data ({size:.2f} GiB) stays where it is, and batches are gathered from it"
        if stays_apart(sets, device)
        else None
    )


def on_evaluation_mode(problem: "Problem") -> str | None:
    """Returns which layers a module in evaluation mode trains without, or None."""
    layers = problem.flat_model.switched_off()
    return layers and (
        f"the model is in evaluation mode, as from_pretrained returns it, so {layers} will not drop anything; call "
        "model.train() before fm.Problem(model, ...) to train with dropout"
    )


def on_parts(problem: "Problem") -> str | None:
    """Returns which parts of the model stay at their site or are not trained, and what BatchNorm layers do, or None
    if there is nothing to say."""
    flat, module, said = problem.flat_model, problem.initial_model(0), []
    layers = layers_of(module)
    if problem.batch_norm == "convert":
        said.append('batch_norm = "convert": nn.GroupNorm stands for BatchNorm')
    elif layers:
        policy = "frozen" if problem.batch_norm == "refuse" else problem.batch_norm
        does = {
            "frozen": "keep their statistics",
            "local": "keep statistics and affine parameters at their site",
            "shared": "share affine parameters, and average their statistics for the common model",
        }[policy]
        said.append(f'batch_norm = "{policy}": BatchNorm layers ({len(layers)}) {does}')
    if flat.local_dim or problem.parts.frozen:
        every = sum(p.numel() for p in module.parameters())
        still = every - flat.dim - flat.local_dim
        said.append(f"parameters: {flat.dim:,} shared, {flat.local_dim:,} local and never sent, {still:,} frozen")
    return "; ".join(said) or None
