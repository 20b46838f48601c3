"""The samples of a site as two tensors, read once and checked on reading."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from fairmesh.errors import BadInput
from fairmesh.numerics.generators import GeneratorStates


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and targets of a set of samples, in host memory.

    Of samples that another process holds, only the number, shape and dtype are known.

    Args:
        inputs: Inputs (samples, ...).
        targets: Their targets (samples, ...): labels as int64, or floats.
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

    inputs: Tensor
    targets: Tensor
    subgroups: Tensor | None = None
    subgroup_names: tuple[str, ...] = ()

    @staticmethod
    def elsewhere(count: int, like: "Samples") -> "Samples":
        """Returns a stand-in for `count` samples that another process holds, shaped like the given ones."""
        inputs, targets = (
            torch.empty(count, *t.shape[1:], dtype=t.dtype, device="meta") for t in (like.inputs, like.targets)
        )
        return Samples(inputs, targets)

    @property
    def here(self) -> bool:
        """Whether this process holds the samples."""
        return self.inputs.device.type != "meta"

    def alone(self) -> "Samples":
        """Returns the same samples in memory of their own, so that the tensors they were cut from can be freed."""
        inputs, targets = (
            t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for t in (self.inputs, self.targets)
        )
        return replace(self, inputs=inputs, targets=targets)

    def take(self, rows: Tensor) -> "Samples":
        """Returns some of the samples, by their numbers or by a mask."""
        subgroups = None if self.subgroups is None else self.subgroups[rows]
        return Samples(self.inputs[rows], self.targets[rows], subgroups, self.subgroup_names)

    def parts(self) -> tuple[Any, ...]:
        """Returns the pair (inputs, targets), or (inputs, targets, names of the subgroups)."""
        if self.subgroups is None:
            return self.inputs, self.targets
        return self.inputs, self.targets, [self.subgroup_names[k] for k in self.subgroups.tolist()]

    @staticmethod
    def of(source: Any, what: str) -> "Samples":
        """Reads a set of samples.

        Args:
            source: Samples, a pair (inputs, targets) of tensors or arrays, or a torch Dataset of such pairs. A third
                item is the subgroup of each sample: names or whole numbers.
            what: What the samples are, for error messages.

        Raises:
            BadInput: The samples are empty, inconsistent, sparse or not finite.
        """
        if isinstance(source, Samples):
            if not source.here:
                return source
            source = source.parts()
        try:
            if isinstance(source, TensorDataset) and len(source.tensors) in (2, 3):
                source = source.tensors
            elif isinstance(source, Dataset):
                source = _collated(source, what)
            inputs, targets, *rest = source
            (subgroups,) = rest or [None]
            inputs, targets = torch.as_tensor(inputs).detach().cpu(), torch.as_tensor(targets).detach().cpu()
        except BadInput:
            raise
        except Exception as error:  # a user's Dataset may raise anything
            raise BadInput(
                f"{what} must be a pair (inputs, targets) of arrays, or (inputs, targets, subgroups), or a Dataset of "
                f"such items: "
                f"{type(error).__name__}: {error}"
            ) from error
        if inputs.layout != torch.strided or targets.layout != torch.strided:
            raise BadInput(f"{what} holds sparse tensors; give dense ones")
        if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
            raise BadInput(f"{what}: {tuple(inputs.shape)} inputs do not match {tuple(targets.shape)} targets")
        if len(inputs) == 0:
            raise BadInput(f"{what} is empty; give it samples, or leave the site out")
        for name, tensor in (("inputs", inputs), ("targets", targets)):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor.reshape(len(tensor), -1))).any(dim=1).nonzero()[0])
                raise BadInput(f"{what}: {name} of sample {bad} are not finite (NaN or infinite); clean the data first")
        if not targets.is_floating_point() and targets.dtype != torch.bool:
            targets = targets.long()  # torch's losses need labels as int64
        return Samples(inputs, targets, *_numbered(subgroups, len(inputs), what))

    def __len__(self) -> int:
        return len(self.inputs)


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


def _collated(dataset: Dataset, what: str) -> Any:
    """Returns every item of a Dataset, stacked. Each item is read once, so random transforms are refused."""
    if isinstance(dataset, IterableDataset):
        raise BadInput(f"{what} is an IterableDataset; give a Dataset with a length and items by index")
    before = GeneratorStates.now()
    items = [dataset[i] for i in range(len(dataset))]  # type: ignore[arg-type]
    if not items:
        raise BadInput(f"{what} is empty; give it samples, or leave the site out")
    drawn = [f"it draws from the generator of {name}" for name in before.moved()]
    pairs = list(zip(default_collate(items[:1]), default_collate([dataset[0]])))[:2]
    if any(not torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs):  # by a generator of its own
        drawn.append("item 0 is another one each time it is asked for")
    if drawn:
        raise BadInput(
            f"{what} has random transforms ({'; '.join(drawn)}), which would be frozen by the one reading; augment "
            "with Problem(augment=...), which draws from fairmesh's streams"
        )
    return default_collate(items)
