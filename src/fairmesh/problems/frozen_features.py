"""Outputs of a frozen encoder as the data of the sites: computed once, kept in files, found again by fingerprint."""

import copy
import fcntl
import hashlib
import logging
import math
import mmap
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairmesh.data.items import Targets, first_not_finite
from fairmesh.data.rows import SampleRows
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site, with_sets
from fairmesh.data.site_tables import follows_rows
from fairmesh.errors import BadInput, in_a_line, refusing
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.flat_model import architecture_of, called_with
from fairmesh.problems.identity import class_in_words, described, hash_into, hashed
from fairmesh.problems.row_loss import as_floats

_FORMAT = 1
_TRIED = 3  # rows that are also computed one by one
_CLOSE = 1e-3  # share of the largest number by which the features of a row may differ between batches: rounding errors
_EVERY_S = 10.0  # seconds between two lines about progress
_IN_EVERY_ROUND = 'or freeze it in a whole model with parts.frozen = ["encoder.*"], which computes it in every round'
_logger = logging.getLogger("fairmesh")


def frozen_features(
    encoder: nn.Module,
    sites: Sequence[Site],
    *,
    batch: int = 64,
    folder: str | os.PathLike | None = None,
    targets: Targets = None,
) -> list[Site]:
    """Returns sites whose inputs are the features of a frozen encoder, to train a head on.

    The encoder is computed once for every row, in evaluation mode and without gradients, on the device and in the dtype
    that it has. Features are kept in one file for each set of rows, which only its owner can read. A file is found
    again by a fingerprint of the rows and of the encoder: weights, settings, the code of its classes, versions of their
    packages. Features are mapped into memory, so they may be larger than memory (docs/howto/backbones.md).

    `fm.inference.TrainedModel.with_encoder` joins encoder and trained head for export and prediction.

    Args:
        encoder: The encoder. A tuple of inputs is its positional arguments, a dictionary its keyword arguments. It
            returns a tensor with one row for each row of its inputs, or a tuple or dictionary of such tensors, which
            the head takes in the same way. It is left as it is.
        sites: The sites, whose inputs are the encoder's. Rows of a streamed Dataset are read twice, for the fingerprint
            and for the features; then only for the fingerprint.
        batch: How many rows are computed at once, >= 1. Default: 64.
        folder: Where features are kept; None for $FAIRMESH_FEATURES, or `fairmesh/features` in $XDG_CACHE_HOME or
            ~/.cache. Default: None.
        targets: Which part of a sample is its target, as in `Problem`. Default: None.

    Raises:
        BadInput: The encoder does not take these inputs; features are not finite, or are no features of a row: they
            depend on chance or on the other rows of a batch; or the disk is full.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import fairmesh as fm
        >>> encoder = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh())
        >>> labels = torch.arange(20) % 2
        >>> sites = [fm.Site((torch.randn(20, 3) + labels[:, None], labels)) for _ in range(3)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     features = fm.models.frozen_features(encoder, sites, folder=folder)
        ...     problem = fm.Problem(torch.nn.Linear(8, 2), features)
        >>> problem.flat_model.dim  # parameters that are trained and sent
        18
    """
    if not isinstance(encoder, nn.Module):
        raise BadInput(f"the encoder must be an nn.Module, got {type(encoder).__name__}")
    if batch < 1:
        raise BadInput(f"batch must be a whole number >= 1, got {batch}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept_in = Path(folder or os.environ.get("FAIRMESH_FEATURES") or cache / "fairmesh" / "features").expanduser()
    tensors = {id(tensor): tensor for tensor in (*encoder.parameters(), *encoder.buffers())}
    encoder = copy.deepcopy(encoder, tensors).eval()  # shares all tensors, but not the modes of the layers
    of_encoder = _fingerprint_of_encoder(encoder, batch)

    def features_of(source: Any, what: str) -> Any:
        return _features(encoder, Samples.of(source, what, targets), what, of_encoder, kept_in, batch)

    named = [site if isinstance(site, Site) else Site(site) for site in sites]
    return with_sets([replace(site, table=None, left_to_rows=_left_to_rows(site)) for site in named], features_of)


def _left_to_rows(site: Site) -> dict[str, str]:
    table = "its features are of a table that is scaled or filled by all rows; give the table a [contract]"
    return {**site.left_to_rows, **({"table": table} if follows_rows(site) else {})}


# Fingerprints


def _fingerprint_of_encoder(encoder: nn.Module, batch: int) -> str:
    """Returns a fingerprint of all that determines features, besides the rows."""
    device, dtype = _place_of(encoder)
    parts: list[Any] = [_FORMAT, batch, device.type, dtype, torch.__version__, torch.get_float32_matmul_precision()]
    parts += [architecture_of(encoder), *chain(*encoder.named_parameters(), *encoder.named_buffers())]
    for name, layer in encoder.named_modules():
        for key, value in sorted(vars(layer).items()):
            if isinstance(value, Tensor) or (key[0] != "_" and key != "training"):  # a tensor is a plain attribute here
                parts += [f"{name}.{key} ", value if isinstance(value, Tensor) else described(value)]
    own = {type(layer) for layer in encoder.modules() if not type(layer).__module__.startswith("torch.")}
    packages = {kind: sys.modules.get(kind.__module__.split(".")[0]) for kind in own}
    code = sorted(f"{class_in_words(kind)} {getattr(packages[kind], '__version__', '')}" for kind in own)
    return hashed(*parts, code, digits=64)


def _place_of(encoder: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Returns where an encoder computes, and in which dtype."""
    tensors = [tensor for tensor in (*encoder.parameters(), *encoder.buffers()) if tensor.is_floating_point()]
    return (tensors[0].device, tensors[0].dtype) if tensors else (torch.device("cpu"), torch.float32)


# One set of rows


def _features(encoder: nn.Module, samples: Samples, what: str, of_encoder: str, folder: Path, batch: int) -> Any:
    """Returns a set of samples with features as inputs: those of its file, or those that are computed now."""
    rows, streamed = SampleRows([samples], torch.device("cpu")), bool(samples.stream)
    if samples.stream:
        few = samples.stream.seen_rows[:2]
        first, again = (trees.leaves(samples.stream.read_here(few, [seed] * len(few))[0]) for seed in (1, 2))
        if not all(map(torch.equal, first, again)):
            raise BadInput(
                f"{what} have random transforms, but features are computed once, so that all rounds would see the same "
                f"random version of a row; remove the transforms; {_IN_EVERY_ROUND}"
            )
    hasher = hashlib.sha256(of_encoder.encode())
    for _, (inputs, targets) in rows.chunks(0, len(samples), batch):
        hash_into(hasher, *chain(*trees.named((inputs, targets) if streamed else inputs, "")))
    path = folder / f"{hasher.hexdigest()[:32]}.features"
    # RuntimeError, since torch.save may be what could not write.
    where, advice = f"the features of {what} in {folder}", "free some space, or give another folder"
    with refusing(f"cannot keep {where}", OSError, RuntimeError, advice=advice):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(path.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits, and reads what the first has written
            if not _is_whole(path):
                _write(path, encoder, rows, len(samples), what, batch, streamed)
        kept = _mapped(path)["kept"]
    features, targets = kept if streamed else (kept, samples.targets)
    return replace(samples, inputs=features, targets=targets, stream=None).parts()


def _mapped(path: Path) -> dict[str, Any]:
    """Returns what a file holds, mapped into memory. A private mapping would count as memory that the process takes."""
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, mmap=True, weights_only=True)


def _is_whole(path: Path) -> bool:
    """Returns whether a file is there, is undamaged by its checksums, and holds the features that its name promises."""
    if not path.exists():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            whole = archive.testzip() is None
        if whole and _mapped(path)["fingerprint"] == path.stem:
            return True
    except Exception:  # whatever a damaged file makes zipfile and torch raise
        pass
    _logger.warning(f"{path} is damaged or holds something else; its features are computed again")
    return False


def _write(path: Path, encoder: nn.Module, rows: SampleRows, count: int, what: str, batch: int, streamed: bool) -> None:
    """Computes the features of all rows, batch by batch, and gives them their name when all are on disk."""
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=path.parent) as scratch:
        kept: Tree | None = None
        begun = said = time.monotonic()
        for place, (inputs, targets) in rows.chunks(0, count, batch):
            features = _encoded(encoder, inputs, what, place.start)
            made = (features, targets) if streamed else features
            if kept is None:
                _refuse_unsteady(encoder, inputs, features, what)
                kept = trees.mapped(lambda part: _room(scratch, count, part), made)
            trees.mapped(lambda into, part, place=place: into[place].copy_(part), kept, made)
            if time.monotonic() - said >= _EVERY_S:
                said = time.monotonic()
                left = (said - begun) * (count - place.stop) / place.stop
                _logger.warning(f"features of {what}: {place.stop:,} of {count:,}, about {left:.0f} s left")
        whole = Path(scratch) / "whole"
        with open(whole, "wb", opener=lambda file, flags: os.open(file, flags, 0o600)) as file:
            torch.save({"fingerprint": path.stem, "kept": kept}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(whole, path)


def _room(folder: str, count: int, like: Tensor) -> Tensor:
    """Returns a tensor for as many rows like these as are asked for, in a file that the disk has room for."""
    shape = (count, *like.shape[1:])
    number, name = tempfile.mkstemp(dir=folder)
    with open(number, "wb"):
        os.posix_fallocate(number, 0, max(1, count * like[0].nbytes))
    return torch.from_file(name, shared=True, size=math.prod(shape), dtype=like.dtype).reshape(shape)


def _encoded(encoder: nn.Module, inputs: Tree, what: str, start: int) -> Tree:
    """Returns the features of some rows, the first of which has a number."""
    device, dtype = _place_of(encoder)
    seen = trees.mapped(lambda part: as_floats(part.to(device), dtype).clone(), inputs)
    try:
        with torch.no_grad():
            returned = called_with(encoder, seen)
    except Exception as error:  # a user's module may raise anything
        smaller = "; use a smaller batch" if isinstance(error, torch.OutOfMemoryError) else ""
        raise BadInput(f"the encoder cannot compute the features of {what}: {in_a_line(error)}{smaller}") from error
    features = _as_tree(returned, trees.length(inputs))
    for _, tensor in trees.named(features, ""):
        if (row := first_not_finite(tensor)) >= 0:
            raise BadInput(
                f"the features of {what}, row {start + row}, are not finite (NaN or infinite); look at this row, and "
                "at the weights of the encoder"
            )
    return features


def _as_tree(returned: Any, rows: int) -> Tree:
    """Returns what an encoder returns as tensors, tuples and dictionaries. Refuses what has no rows."""
    if isinstance(returned, Tensor):
        if returned.ndim == 0 or len(returned) != rows:
            raise BadInput(
                f"the encoder returns a tensor of the shape {tuple(returned.shape)} for {rows} rows; its first axis "
                "must be the rows, since features are kept row by row"
            )
        short = returned.dtype in (torch.float16, torch.bfloat16)
        return (returned.float() if short else returned).cpu()
    if isinstance(returned, Mapping) and returned:
        return {str(key): _as_tree(part, rows) for key, part in returned.items()}
    if isinstance(returned, tuple | list) and returned:
        return tuple(_as_tree(part, rows) for part in returned)
    raise BadInput(
        f"the encoder returns a {type(returned).__name__}, which cannot be kept row by row; let it return a tensor, or "
        "a tuple or dictionary of tensors; for a language model, set config.use_cache = False"
    )


def _refuse_unsteady(encoder: nn.Module, inputs: Tree, features: Tree, what: str) -> None:
    """Raises BadInput if the features of a row are others when it is computed again and alone."""
    for row in range(min(_TRIED, trees.length(inputs))):
        alone = _encoded(encoder, trees.at(inputs, slice(row, row + 1)), what, row)
        for before, now in zip(trees.leaves(features), trees.leaves(alone)):
            apart = (before[row].double() - now[0].double()).abs()
            if bool((apart > _CLOSE * before[row].double().abs().max().clamp(min=1e-6)).any()):
                raise BadInput(
                    "the encoder is random in evaluation mode, or its features of a row depend on the other rows of "
                    "the batch, so a row has no features of its own; make it deterministic, without statistics of the "
                    f"batch; {_IN_EVERY_ROUND}"
                )
