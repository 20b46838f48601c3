"""Items of a Dataset, and arrays, as the tensors of samples."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fairmesh.errors import BadInput
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree

TARGET_NAMES = ("labels", "label", "targets", "target")  # of the target in samples with names, if it is not given
_AT_ONCE = 1 << 22  # numbers that are checked together
Targets = str | int | Sequence[str] | None  # which part of a sample is the target


def first_not_finite(tensor: Tensor) -> int:
    """Returns the first sample with a number that is not finite, -1 if all are. It reads the samples in portions, since
    they may be more than memory can hold."""
    if not tensor.is_floating_point():
        return -1
    rows = max(1, _AT_ONCE // max(1, tensor[0].numel()))
    for start in range(0, len(tensor), rows):
        finite = torch.isfinite(tensor[start : start + rows])
        if not bool(finite.all()):
            return start + int((~finite.reshape(len(finite), -1)).any(dim=1).nonzero()[0])
    return -1


def is_whole(tensor: Tensor) -> bool:
    """Returns whether a tensor has whole numbers, such as labels."""
    return not (tensor.is_floating_point() or tensor.dtype == torch.bool)


def refuse_no_map(dataset: Any, what: str) -> None:
    """Raises BadInput for what is no Dataset with items by index."""
    if isinstance(dataset, DataLoader):
        raise BadInput(
            f"{what} is a DataLoader; give the Dataset itself (loader.dataset), and the size of batches as "
            "Problem(sampling=fm.Sampling(batch=...))"
        )
    if isinstance(dataset, IterableDataset):
        raise BadInput(f"{what} is an IterableDataset; give a Dataset with a length and items by index")


def has_items(source: Any) -> bool:
    """Returns whether a set is read item by item: a torch Dataset, or what looks like one, such as those of Hugging
    Face."""
    if isinstance(source, Dataset):
        return True
    plain = isinstance(source, tuple | list | Mapping | Tensor | np.ndarray | str)
    return not plain and hasattr(source, "__getitem__") and hasattr(source, "__len__")


def tensors_of(source: Any, target: Targets, what: str) -> tuple[Tree, Tree, Any]:
    """Returns inputs and targets of a set as tensors, and its subgroups, None if there are none. Targets that are whole
    numbers are int64, which torch's losses need."""
    inputs, targets, subgroups = divided(source, target, what)
    inputs, targets = as_tensors(inputs, f"{what}: inputs"), as_tensors(targets, f"{what}: targets")
    for name, tensor in trees.named(targets, "targets"):
        if tensor.is_complex():
            raise BadInput(f"{what}: {name} are complex numbers; give real ones: torch.view_as_real(targets)")
    return inputs, trees.mapped(lambda part: part.long() if is_whole(part) else part, targets), subgroups


def divided(source: Any, target: Targets, what: str) -> tuple[Any, Any, Any]:
    """Returns inputs, targets and subgroups of a set, None if there are none."""
    if isinstance(source, Mapping):
        return *_divided_by_name(source, target, what), None
    if isinstance(target, str | Sequence):
        raise BadInput(f"{what} has samples without names, so targets = {target!r} is none; give its place, such as 1")
    source = (source,) if isinstance(source, Tensor | np.ndarray) else tuple(source)
    if len(source) == 1:
        raise BadInput(
            f"{what} has inputs and no targets; give pairs (inputs, targets); to learn without labels, as autoencoders "
            "do, the inputs are the targets too: fm.Site((x, x)) and Problem(loss=torch.nn.functional.mse_loss)"
        )
    if target is not None:
        if not 0 <= target < len(source) or len(source) < 2:
            raise BadInput(f"{what} has {len(source)} parts, so that none is number {target}, which targets names")
        inputs = source[:target] + source[target + 1 :]
        return (inputs[0] if len(inputs) == 1 else inputs), source[target], None
    if len(source) not in (2, 3):
        raise BadInput(
            f"{what} has samples of {len(source)} parts; give pairs (inputs, targets), or say with "
            "Problem(targets=...) which part is the target, from 0"
        )
    return source if len(source) == 3 else (*source, None)


def _divided_by_name(source: Mapping[str, Any], target: Targets, what: str) -> tuple[Any, Any]:
    names = [target] if isinstance(target, str) else list(_target_names(source, target, what))
    for name in names:
        if name not in source:
            raise BadInput(f"{what} has no {name!r}, which Problem(targets=...) names; it has {_listed(source)}")
    inputs = {key: value for key, value in source.items() if key not in names}
    if not inputs:
        raise BadInput(f"{what} has nothing but its targets, {_listed(source)}; inputs are missing")
    return inputs, source[names[0]] if len(names) == 1 else {name: source[name] for name in names}


def _target_names(source: Mapping[str, Any], target: Any, what: str) -> Sequence[str]:
    if isinstance(target, int):
        raise BadInput(f"{what} has samples with names, so targets = {target} is none; it has {_listed(source)}")
    found = [name for name in TARGET_NAMES if name in source] if target is None else target
    if not found or (target is None and len(found) > 1):
        raise BadInput(
            f"{what} has the parts {_listed(source)}; say which one is the target: Problem(targets={TARGET_NAMES[0]!r})"
        )
    return found


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in names)


def as_tensors(values: Any, where: str) -> Tree:
    """Returns arrays as tensors. A dictionary, sorted by name, and a tuple of arrays stay what they are."""
    if isinstance(values, Mapping):
        return {str(key): as_tensors(values[key], f"{where} {key!r}") for key in sorted(values, key=str)}
    if isinstance(values, tuple | list) and values and all(_is_part(value, type(values)) for value in values):
        return tuple(as_tensors(value, f"{where} {k}") for k, value in enumerate(values))
    if isinstance(values, list) and values and isinstance(values[0], str):
        raise BadInput(f"{where} are text, such as {values[0][:20]!r}; turn it into numbers, or leave it out")
    with warnings.catch_warnings():  # data that is mapped read-only is only read
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(values).detach().cpu()


def _is_part(value: Any, of: type = list) -> bool:
    """Returns whether a value is one of several inputs in a tuple or list. A list of numpy arrays is one input, whose
    samples are the arrays."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0 and (of is tuple or isinstance(value, Tensor))
    return isinstance(value, Mapping) or (
        isinstance(value, tuple | list) and bool(value) and all(_is_part(part, type(value)) for part in value)
    )


def with_tensors(item: Any) -> Any:
    """Returns an item with lists of numbers as tensors, as tokenizers and Hugging Face's datasets give them, and with
    images of PIL as bytes (channels, height, width)."""
    if isinstance(item, Mapping):
        item = {key: _pixels(value) for key, value in item.items()}
        return {key: torch.as_tensor(value) if _is_numbers(value) else value for key, value in item.items()}
    return tuple(map(_pixels, item)) if isinstance(item, tuple | list) else item


def _pixels(value: Any) -> Any:
    if not type(value).__module__.startswith("PIL."):
        return value
    if value.mode not in ("L", "RGB"):
        raise TypeError(f"an image of PIL has the mode {value.mode!r}; convert it: .convert('RGB'), or 'L' for grey")
    pixels = torch.from_numpy(np.array(value))
    return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def _is_numbers(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float)
