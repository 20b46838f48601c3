"""The samples of a site as two tensors, read once and checked on reading."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from fairmesh.errors import BadInput


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and targets of a set of samples, in host memory.

    Of samples that another process holds, only the number, shape and dtype are known.

    Args:
        inputs: Inputs (samples, ...).
        targets: Their targets (samples, ...): labels as int64, or floats.

    Example:
        >>> import numpy as np
        >>> import fairmesh as fm
        >>> samples = fm.data.Samples.of((np.zeros((5, 3)), np.arange(5)), "my samples")
        >>> len(samples), samples.targets.dtype
        (5, torch.int64)
    """

    inputs: Tensor
    targets: Tensor

    @staticmethod
    def elsewhere(count: int, like: "Samples") -> "Samples":
        """Returns a stand-in for `count` samples that another process holds, shaped like the given ones."""
        return Samples(
            *(torch.empty(count, *t.shape[1:], dtype=t.dtype, device="meta") for t in (like.inputs, like.targets))
        )

    @property
    def here(self) -> bool:
        """Whether this process holds the samples."""
        return self.inputs.device.type != "meta"

    def alone(self) -> "Samples":
        """Returns the same samples in memory of their own, so that the tensors they were cut from can be freed."""
        return Samples(
            *(t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for t in (self.inputs, self.targets))
        )

    @staticmethod
    def of(source: Any, what: str) -> "Samples":
        """Reads a set of samples.

        Args:
            source: Samples, a pair (inputs, targets) of tensors or arrays, or a torch Dataset of such pairs.
            what: What the samples are, for error messages.

        Raises:
            BadInput: The samples are empty, inconsistent, sparse or not finite.
        """
        if isinstance(source, Samples):
            if not source.here:
                return source
            source = source.inputs, source.targets
        try:
            if isinstance(source, TensorDataset) and len(source.tensors) == 2:
                source = source.tensors
            elif isinstance(source, Dataset):
                source = _collated(source, what)
            inputs, targets = source
            inputs, targets = torch.as_tensor(inputs).detach().cpu(), torch.as_tensor(targets).detach().cpu()
        except BadInput:
            raise
        except Exception as error:  # a user's Dataset may raise anything
            raise BadInput(
                f"{what} must be a pair (inputs, targets) of arrays or a Dataset of such pairs: "
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
        return Samples(inputs, targets)

    def __len__(self) -> int:
        return len(self.inputs)


def _collated(dataset: Dataset, what: str) -> Any:
    """Returns every item of a Dataset, stacked. Each item is read once, so random transforms are refused."""
    if isinstance(dataset, IterableDataset):
        raise BadInput(f"{what} is an IterableDataset; give a Dataset with a length and items by index")
    items = [dataset[i] for i in range(len(dataset))]  # type: ignore[arg-type]
    if not items:
        raise BadInput(f"{what} is empty; give it samples, or leave the site out")
    again = default_collate([dataset[0]])
    if any(not torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(default_collate(items[:1]), again)):
        raise BadInput(
            f"{what} gives another item 0 each time it is asked: random transforms would be frozen by the one reading; "
            "augment with Problem(augment=...), which draws from fairmesh's streams"
        )
    return default_collate(items)
