"""What a site holds, as two tensors: read once, checked at once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from fairmesh.errors import BadInput


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs (samples, ...) and their targets, on the host; of what another host holds only their number and form."""

    inputs: Tensor
    targets: Tensor

    @staticmethod
    def elsewhere(count: int, like: "Samples") -> "Samples":
        """So many samples of the form of others, held by another host."""
        return Samples(
            *(torch.empty(count, *t.shape[1:], dtype=t.dtype, device="meta") for t in (like.inputs, like.targets))
        )

    @property
    def here(self) -> bool:
        return self.inputs.device.type != "meta"

    def alone(self) -> "Samples":
        """The same samples in memory of their own, so that what they were cut out of can be freed."""
        return Samples(
            *(t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for t in (self.inputs, self.targets))
        )

    @staticmethod
    def of(source: Any, what: str) -> "Samples":
        """From Samples, a pair of tensors or arrays, or a torch Dataset of (input, target) items."""
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
        except Exception as error:  # whatever a user's Dataset raises
            raise BadInput(
                f"{what} must be a pair (inputs, targets) of arrays or a Dataset of such pairs: "
                f"{type(error).__name__}: {error}"
            ) from error
        if inputs.layout != torch.strided or targets.layout != torch.strided:
            raise BadInput(f"{what} holds sparse tensors; give dense ones")
        if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
            raise BadInput(f"{what}: {tuple(inputs.shape)} inputs do not go with {tuple(targets.shape)} targets")
        if len(inputs) == 0:
            raise BadInput(f"{what} is empty; give it samples, or leave the site out")
        for name, tensor in (("inputs", inputs), ("targets", targets)):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor.reshape(len(tensor), -1))).any(dim=1).nonzero()[0])
                raise BadInput(f"{what}: {name} of sample {bad} are not finite (NaN or infinite); clean the data first")
        if not targets.is_floating_point() and targets.dtype != torch.bool:
            targets = targets.long()  # what torch's losses want of labels, whatever they were stored as
        return Samples(inputs, targets)

    def __len__(self) -> int:
        return len(self.inputs)


def _collated(dataset: Dataset, what: str) -> Any:
    """Every item of a Dataset, stacked. Items are read once, so a transform that draws anew each time is refused."""
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
