"""The samples of a site as tensors, read once and checked on reading."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from fairmesh.errors import BadInput, in_a_line
from fairmesh.numerics import trees
from fairmesh.numerics.generators import GeneratorStates
from fairmesh.numerics.trees import Tree

TARGET_NAMES = ("labels", "label", "targets", "target")  # of the target in samples with names, if it is not given
_AT_ONCE = 1 << 24  # numbers that are checked together
Targets = str | int | Sequence[str] | None  # which part of a sample is the target


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and targets of a set of samples, in host memory.

    Of samples that another process holds, only the number, shape and dtype are known.

    Args:
        inputs: Inputs (samples, ...): a tensor, or a tuple or a dictionary of tensors, also nested. A model takes a
            tuple as its positional arguments, and a dictionary as its keyword arguments.
        targets: Their targets (samples, ...): labels as int64, or floats; a tensor, or several as above.
        subgroups: The subgroup of each sample, such as its scanner, as a number (samples,) int64; None if there are no
            subgroups. Default: None.
        subgroup_names: The names of these numbers. Default: ().

    Example:
        >>> import numpy as np
        >>> import fairmesh as fm
        >>> samples = fm.data.Samples.of((np.zeros((5, 3)), np.arange(5)), "my samples")
        >>> len(samples), samples.targets.dtype
        (5, torch.int64)
    """

    inputs: Tree
    targets: Tree
    subgroups: Tensor | None = None
    subgroup_names: tuple[str, ...] = ()

    @staticmethod
    def elsewhere(count: int, like: "Samples") -> "Samples":
        """Returns a stand-in for `count` samples that another process holds, shaped like the given ones."""

        def empty(tensor: Tensor) -> Tensor:
            return torch.empty(count, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

        return Samples(trees.mapped(empty, like.inputs), trees.mapped(empty, like.targets))

    @property
    def here(self) -> bool:
        """Whether this process holds the samples."""
        return trees.leaves(self.inputs)[0].device.type != "meta"

    @property
    def nbytes(self) -> int:
        """The size of inputs and targets in bytes."""
        return trees.nbytes(self.inputs) + trees.nbytes(self.targets)

    @property
    def labels(self) -> Tensor | None:
        """The targets, if they are one whole number per sample; None for others."""
        targets = self.targets
        whole = isinstance(targets, Tensor) and not targets.is_floating_point() and targets.dtype != torch.bool
        return targets if whole and targets.ndim == 1 else None

    def class_counts(self, classes: int) -> list[int]:
        """Returns how many samples each class has. Samples without a label, such as -1, are left out."""
        labels = self.targets.reshape(-1).long()
        labels = labels[(labels >= 0) & (labels < classes)]
        return torch.bincount(labels, minlength=classes).tolist()

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Returns all tensors with what tells them apart: names of inputs and targets if there are several, "" if there
        is one of each; subgroups come last."""
        found = [*trees.named(self.inputs, ""), *trees.named(self.targets, "")]
        return found if self.subgroups is None else [*found, ("", self.subgroups)]

    def alone(self) -> "Samples":
        """Returns the same samples in memory of their own, so that the tensors they were cut from can be freed."""

        def own(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

        return replace(self, inputs=trees.mapped(own, self.inputs), targets=trees.mapped(own, self.targets))

    def take(self, rows: Tensor) -> "Samples":
        """Returns some of the samples, by their numbers or by a mask."""
        subgroups = None if self.subgroups is None else self.subgroups[rows]
        return Samples(trees.at(self.inputs, rows), trees.at(self.targets, rows), subgroups, self.subgroup_names)

    def parts(self) -> tuple[Any, ...]:
        """Returns the pair (inputs, targets), or (inputs, targets, names of the subgroups)."""
        if self.subgroups is None:
            return self.inputs, self.targets
        return self.inputs, self.targets, [self.subgroup_names[k] for k in self.subgroups.tolist()]

    @staticmethod
    def of(source: Any, what: str, target: Targets = None) -> "Samples":
        """Reads a set of samples.

        Args:
            source: Samples, a pair (inputs, targets) of tensors or arrays, or a torch Dataset of such pairs. A third
                item is the subgroup of each sample: names or whole numbers. Or a dictionary of tensors or arrays, or a
                Dataset of dictionaries, of which `target` is the target and the others are the inputs.
            what: What the samples are, for error messages.
            target: The name of the target in a dictionary, its place in a tuple, or several names. None for the one
                that is called "labels", "label", "targets" or "target", and for the second of a tuple. Default: None.

        Raises:
            BadInput: The samples are empty, inconsistent, sparse or not finite.
        """
        if isinstance(source, Samples):
            if not source.here:
                return source
            source, target = source.parts(), None
        if isinstance(source, DataLoader):
            raise BadInput(
                f"{what} is a DataLoader; give the Dataset itself (loader.dataset), and the size of batches as "
                "Problem(sampling=fm.Sampling(batch=...))"
            )
        try:
            if isinstance(source, TensorDataset):
                source = source.tensors
            elif _has_items(source):
                source = _collated(source, what)
            inputs, targets, subgroups = _divided(source, target, what)
            inputs, targets = _read(inputs, f"{what}: inputs"), _read(targets, f"{what}: targets")
        except BadInput:
            raise
        except Exception as error:  # a user's Dataset may raise anything
            raise BadInput(
                f"{what} must be a pair (inputs, targets) of arrays, or (inputs, targets, subgroups), or a dictionary "
                f"of arrays, or a Dataset of such items: {in_a_line(error)}"
            ) from error
        every = [*trees.named(inputs, "inputs"), *trees.named(targets, "targets")]
        if any(tensor.layout != torch.strided for _, tensor in every):
            raise BadInput(f"{what} holds sparse tensors; give dense ones")
        if any(tensor.ndim == 0 for _, tensor in every) or len({len(tensor) for _, tensor in every}) > 1:
            shapes = [f"{tuple(tensor.shape)} {name}" for name, tensor in every]
            raise BadInput(f"{what}: {' and '.join(shapes[:-1])} do not match {shapes[-1]}")
        if len(every[0][1]) == 0:
            raise BadInput(f"{what} is empty; give it samples, or leave the site out")
        for name, tensor in every:
            bad = _first_not_finite(tensor)
            if bad is not None:
                raise BadInput(f"{what}: {name} of sample {bad} are not finite (NaN or infinite); clean the data first")
        return Samples(inputs, trees.mapped(_as_labels, targets), *_numbered(subgroups, len(every[0][1]), what))

    def __len__(self) -> int:
        return trees.length(self.inputs)


def _first_not_finite(tensor: Tensor) -> int | None:
    """Returns the first sample with a number that is not finite, or None. It reads the samples in portions, since they
    may be more than memory can hold."""
    if not tensor.is_floating_point():
        return None
    rows = max(1, _AT_ONCE // max(1, tensor[0].numel()))
    for start in range(0, len(tensor), rows):
        finite = torch.isfinite(tensor[start : start + rows])
        if not bool(finite.all()):
            return start + int((~finite.reshape(len(finite), -1)).any(dim=1).nonzero()[0])
    return None


def _as_labels(targets: Tensor) -> Tensor:
    """Returns whole numbers as int64, which torch's losses need; others as they are."""
    return targets if targets.is_floating_point() or targets.dtype == torch.bool else targets.long()


def _has_items(source: Any) -> bool:
    """Returns whether a set is read item by item: a torch Dataset, or what looks like one, such as those of Hugging
    Face."""
    if isinstance(source, Dataset):
        return True
    plain = isinstance(source, tuple | list | Mapping | Tensor | np.ndarray | str)
    return not plain and hasattr(source, "__getitem__") and hasattr(source, "__len__")


def _divided(source: Any, target: Targets, what: str) -> tuple[Any, Any, Any]:
    """Returns inputs, targets and subgroups of a set, None if there are none."""
    if isinstance(source, Mapping):
        names = [target] if isinstance(target, str) else list(_target_names(source, target, what))
        for name in names:
            if name not in source:
                raise BadInput(f"{what} has no {name!r}, which Problem(targets=...) names; it has {_listed(source)}")
        inputs = {key: value for key, value in source.items() if key not in names}
        if not inputs:
            raise BadInput(f"{what} has nothing but its targets, {_listed(source)}; inputs are missing")
        targets = source[names[0]] if len(names) == 1 else {name: source[name] for name in names}
        return inputs, targets, None
    if isinstance(target, str | Sequence):
        raise BadInput(f"{what} has samples without names, so targets = {target!r} is none; give its place, such as 1")
    source = tuple(source)
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
    return *source[:2], source[2] if len(source) == 3 else None


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


def _read(values: Any, where: str) -> Tree:
    """Returns arrays as tensors. A dictionary, sorted by name, and a tuple of arrays stay what they are."""
    if isinstance(values, Mapping):
        return {str(key): _read(values[key], f"{where} {key!r}") for key in sorted(values, key=str)}
    if isinstance(values, tuple | list) and values and all(_is_part(value, type(values)) for value in values):
        return tuple(_read(value, f"{where} {k}") for k, value in enumerate(values))
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


def _numbered(subgroups: Any, count: int, what: str) -> tuple[Tensor | None, tuple[str, ...]]:
    """Returns the subgroups as numbers, and their names in order."""
    if subgroups is None:
        return None, ()
    values = np.asarray(subgroups.tolist() if isinstance(subgroups, Tensor) else subgroups)
    if values.shape != (count,):
        raise BadInput(f"{what}: subgroups have the shape {values.shape}; give one name for each of {count} samples")
    if values.dtype.kind not in "OUSiub":
        raise BadInput(f"{what}: subgroups are {values.dtype} numbers; give names or whole numbers")
    missing = [k for k, value in enumerate(values.tolist()) if value is None or value == "" or value != value]
    if missing:
        raise BadInput(f"{what}: sample {missing[0]} has no subgroup; give it a name, such as 'unknown'")
    names, numbers = np.unique(values.astype(str), return_inverse=True)
    return torch.from_numpy(numbers.reshape(-1)).long(), tuple(names.tolist())


def _collated(dataset: Any, what: str) -> Any:
    """Returns every item of a Dataset, stacked. Each item is read once, so random transforms are refused."""
    if isinstance(dataset, IterableDataset):
        raise BadInput(f"{what} is an IterableDataset; give a Dataset with a length and items by index")
    before = GeneratorStates.now()
    items = [_item(dataset[i]) for i in range(len(dataset))]
    if not items:
        raise BadInput(f"{what} is empty; give it samples, or leave the site out")
    drawn = [f"it draws from the generator of {name}" for name in before.moved()]
    once, twice = (_parts(default_collate([item])) for item in (items[0], _item(dataset[0])))
    if any(
        not torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(once, twice)
    ):  # by its own generator
        drawn.append("item 0 is another one each time it is asked for")
    if drawn:
        raise BadInput(
            f"{what} has random transforms ({'; '.join(drawn)}), which would be frozen by the one reading; augment "
            "with Problem(augment=...), which draws from fairmesh's streams"
        )
    try:
        return default_collate(items)
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        raise BadInput(
            f"{what} has items of unequal size ({in_a_line(error)}); pad or crop them to one size, such as "
            "tokenizer(..., padding='max_length', truncation=True)"
        ) from error


def _item(item: Any) -> Any:
    """Returns an item with lists of numbers as tensors, as tokenizers and Hugging Face's datasets give them."""
    if not isinstance(item, Mapping):
        return item
    return {key: torch.as_tensor(value) if _is_numbers(value) else value for key, value in item.items()}


def _is_numbers(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float)


def _parts(item: Any) -> list[Any]:
    """Returns inputs and target of one collated item, without its subgroup or any text."""
    parts = item.values() if isinstance(item, Mapping) else item[:2]
    found = [one for part in parts for one in (trees.leaves(part) if isinstance(part, Mapping | list) else [part])]
    return [part for part in found if isinstance(part, Tensor)]
