"""What a private run asks of data, model and loss. It is checked when a problem is prepared, before the training rows
are sealed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fairmesh.data.contract import Contract
from fairmesh.data.datasets.base import Data
from fairmesh.data.rows import SampleRows
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.data.site_tables import follows_rows
from fairmesh.data.units import units_of
from fairmesh.errors import BadInput, in_a_line, listed
from fairmesh.numerics import trees
from fairmesh.problems.row_loss import BoundModelLoss, answering, as_floats

if TYPE_CHECKING:
    from fairmesh.problems.prepared import Prepared

_MOVED = 0.1  # standard deviation of parameters around the initial ones, at which a model may show that it mixes rows
_CLOSE = 1e-3  # share of the largest output by which outputs may differ between batches: rounding errors
_TRIED = 4  # samples
_AT_ONCE = 256  # rows that are tried together
WHERE = "(docs/concepts/privacy.md lists what goes with privacy)"


def check_private_data(problem: "Prepared") -> None:
    """Raises BadInput if training rows would show in another way than by noised sums, or have no gradients by unit."""
    refuse_open_tables(problem.sites)
    for site in problem.sites:
        _refuse_left_to_rows(site.left_to_rows, f"{site.name}: ")
    _refuse_shared_memory(problem.sites)
    for i, site in enumerate(problem.sites):
        where = f"site {i} ({site.name})"
        if not site.train.here or site.train.sealed:
            continue
        if site.train.stream:
            raise BadInput(
                f"privacy: the training rows of {where} are streamed, and a private run needs them in memory, since "
                "each round draws whole units"
            )
        _check_units(site.train, str(site.unit), where)
    if isinstance(problem.loss, BoundModelLoss) and not problem.loss.each:
        raise BadInput(
            "privacy: the loss returns one number for a batch, in which units cannot be told apart; let the function "
            "of fm.losses.ModelLoss return one number per sample (samples,)"
        )
    _refuse_mixing(problem)
    _refuse_failing_rows(problem)


def refuse_open_tables(sites: Sequence[Site]) -> None:
    """Raises BadInput for tables whose preprocessing depends on the training rows of all sites."""
    tables = [str(site.name) for site in sites if follows_rows(site)]
    if tables:
        raise BadInput(
            'privacy: a table needs a [contract] in which no column has standardize = true or fill = "mean", and each '
            f"category and label lists its classes; else what columns of {listed(tables, 4)} are, and how they are "
            "scaled and filled, follows from the rows of all sites. `fairmesh data contract FILE` drafts one: replace "
            "centers, scales, fills and categories in it by what is known without these rows "
            f"{WHERE}"
        )


def refuse_left_to_rows(data: Data, contract: Contract | None) -> None:
    """Raises BadInput if the settings of the data let single rows decide something about all others."""
    left = data.left_to_rows()
    _refuse_left_to_rows(left if contract is None else contract.not_settled(left))


def _refuse_left_to_rows(left: Mapping[str, str], whose: str = "") -> None:
    if left:
        raise BadInput(f"privacy: {whose}{next(iter(left.values()))} {WHERE}")


def _check_units(samples: Samples, unit: str, where: str) -> None:
    if samples.units is None:
        return
    if units_of(samples) == 1:
        raise BadInput(
            f"privacy: all {len(samples)} training rows of {where} are of the same {unit}, so that nothing can be "
            f"learned without telling of it; is it the right column? Else leave the site out"
        )
    most = int(samples.units.unique(return_counts=True)[1].max())
    if 2 * most > len(samples):
        raise BadInput(
            f"privacy: one {unit} has {most} of the {len(samples)} training rows of {where}; is it a mark for rows of "
            f"which the {unit} is not known? Then leave these out. Else keep half of the rows at most from one {unit}: "
            f"every {unit} counts as much as any other, so that its further rows teach next to nothing"
        )


def _refuse_shared_memory(sites: Sequence[Site]) -> None:
    """Refuses rows that are in a training set and in one that is measured without noise, also of another site."""
    judges = {
        (site.name, what): _addresses(samples)
        for site in sites
        for what, samples in (("test", site.test), ("validation", site.validation))
        if samples is not None
    }
    every = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *judges.values()]))
    for site in sites:
        ours = _addresses(site.train)
        if not len(np.intersect1d(ours, every)):
            continue
        whose, what = next(key for key, theirs in judges.items() if len(np.intersect1d(ours, theirs)))
        raise BadInput(
            f"privacy: the {what} set of {whose} has training rows of {site.name}, and would show them without noise; "
            "give it a set of other units: fm.data.split(sites) holds some out"
        )


def _addresses(samples: Samples) -> np.ndarray:
    if samples.stream or samples.sealed or not samples.here:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([row_addresses(tensor) for tensor in trees.leaves(samples.inputs)])


def row_addresses(tensor: Tensor) -> np.ndarray:
    """Returns where each row of a tensor begins in memory."""
    return tensor.data_ptr() + np.arange(len(tensor)) * (tensor.stride(0) * tensor.element_size())


def _refuse_mixing(problem: "Prepared") -> None:
    """Refuses a model whose output for a sample depends on the other samples of its batch."""
    probe, generator = problem.probe, torch.Generator().manual_seed(0)
    row = probe.row + _MOVED * torch.randn(probe.row.shape, generator=generator)
    few = trees.at(probe.inputs, slice(_TRIED))
    inputs = trees.mapped(lambda part: _moved(part, generator), few)
    try:
        with torch.no_grad():
            whole = trees.leaves(probe.model(row, inputs))
            parts = [probe.model(row, trees.at(inputs, slice(k, k + 1))) for k in range(trees.length(inputs))]
            alone = [torch.cat(leaves) for leaves in zip(*map(trees.leaves, parts))]
    except Exception as error:  # the user's model may raise anything
        raise BadInput(
            f"privacy: the model cannot be run on a single sample, which a gradient per unit needs: {in_a_line(error)}"
        ) from error
    for together, apart in zip(whole, alone):
        scale = float(apart.abs().max().clamp(min=1e-6))
        if bool(torch.isfinite(together).all()) and float((together - apart).abs().max()) > _CLOSE * scale:
            raise BadInput(
                "privacy: the model's output for a sample depends on the other samples of its batch, so that a unit "
                "has no gradient of its own; leave out statistics of the batch, such as BatchNorm (batch_norm = "
                f'"convert" makes GroupNorm of it), and attention over the batch {WHERE}'
            )


def _refuse_failing_rows(problem: "Prepared") -> None:
    """Refuses rows that the model or the loss cannot take, such as codes beyond a vocabulary, also those that a model
    reads from floats: in a round they would end the run, or change the gradients of other units, since torch looks them
    up in one table of all units."""
    answers = answering(problem.flat_model, problem.loss, problem.at_once(torch.device("cpu")))
    row = problem.probe.row.float().unsqueeze(0)
    for site in problem.sites:
        for what in ("train", "test", "validation"):
            samples = getattr(site, what)
            if samples is None or not samples.here or samples.sealed or samples.stream:
                continue
            for _, pair in SampleRows([samples], torch.device("cpu")).chunks(0, len(samples), _AT_ONCE):
                inputs, targets = (as_floats(part, torch.float32) for part in pair)
                try:
                    with torch.no_grad():
                        answers(row, inputs, targets)
                except Exception:  # whatever the user's model raises; it may quote the row
                    raise BadInput(
                        f"privacy: the model or the loss fails on a {what} row of {site.name}, which has numbers that "
                        "they do not take, such as tokens beyond the vocabulary; leave such rows out, or make the "
                        "model's table larger"
                    ) from None


def has_tokens(problem: "Prepared") -> bool:
    """Returns whether inputs have whole numbers, or the model looks some up."""
    tables = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in problem.initial_model(0).modules())
    return tables or any(not part.is_floating_point() for part in trees.leaves(problem.probe.inputs))


def _moved(part: Tensor, generator: torch.Generator) -> Tensor:
    if not part.is_floating_point():
        return part
    return part + torch.randn(part.shape, generator=generator, dtype=part.dtype)
