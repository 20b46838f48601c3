"""The samples of a site: tensors that are read once and checked on reading, or a stream of items."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from fairmesh.data.items import Targets, first_not_finite, has_items, is_whole, refuse_no_map, tensors_of, with_tensors
from fairmesh.data.streams import Stream, Streamed, too_large_to_hold
from fairmesh.errors import BadInput, in_a_line
from fairmesh.numerics import trees
from fairmesh.numerics.random_streams import GeneratorStates
from fairmesh.numerics.trees import Tree

if TYPE_CHECKING:
    from fairmesh.data.sealed import SealedRows

_FEW = 8  # rows of zeros that stand for sealed ones
_SOME, _SOME_BYTES = 256, 1 << 26  # rows of a stream that summaries of a set look at, at most


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and targets of a set of samples, in host memory or read from a stream.

    Of samples that another process holds, only the number, shape and dtype are known. So it is with the inputs and
    targets of a stream: its rows are read by `read`.

    Args:
        inputs: Inputs (samples, ...): a tensor, or a tuple or a dictionary of tensors, also nested. A model takes a
            tuple as its positional arguments, and a dictionary as its keyword arguments.
        targets: Their targets (samples, ...): labels as int64, or floats; a tensor, or several as above.
        subgroups: The subgroup of each sample, such as its scanner, as a number (samples,) int64; None if there are no
            subgroups. Default: None.
        subgroup_names: The names of these numbers. Default: ().
        stream: Where the samples are read from, if they are not in memory. Default: None.
        units: What each sample belongs to, such as its patient, as a number (samples,) int64: samples with equal
            numbers are never divided between training and judging. It is no input, and never leaves the site. None if
            every sample is a unit of its own. Default: None.
        sealed: The samples themselves, if a private run keeps them from the rest of the program; there is then one
            sample per unit, without values. Default: None.

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
    stream: Stream | None = None
    units: Tensor | None = None
    sealed: "SealedRows | None" = None

    @staticmethod
    def elsewhere(count: int, like: "Samples") -> "Samples":
        """Returns a stand-in for `count` samples that another process holds, shaped like the given ones."""

        def empty(tensor: Tensor) -> Tensor:
            return torch.empty(count, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

        return Samples(trees.mapped(empty, like.inputs), trees.mapped(empty, like.targets))

    @staticmethod
    def of_stream(stream: Stream, like: "Samples | None" = None) -> "Samples":
        """Returns the samples of a stream, shaped like the given ones or like its first items."""
        like = Samples(*stream.seen) if like is None else like
        return replace(Samples.elsewhere(len(stream), like), stream=stream)

    @property
    def here(self) -> bool:
        """Whether this process holds the samples, or can read them."""
        return bool(self.stream or self.sealed) or trees.leaves(self.inputs)[0].device.type != "meta"

    @property
    def nbytes(self) -> int:
        """The size of inputs and targets in bytes."""
        return trees.nbytes(self.inputs) + trees.nbytes(self.targets)

    @property
    def labels(self) -> Tensor | None:
        """The targets, if they are one whole number per sample; None for others, and if they are not known since they
        are read from a stream, or sealed."""
        if self.sealed:
            return None
        if self.stream:
            return self.stream.labels
        targets = self.targets
        return targets if isinstance(targets, Tensor) and is_whole(targets) and targets.ndim == 1 else None

    @property
    def seen(self) -> "Samples":
        """Samples in memory that can be looked at at any time: all of them, or the first that were read from a
        stream; zeros in the form of a few, if they are sealed."""
        if self.sealed:
            few = Samples.elsewhere(min(len(self), _FEW), self)
            return Samples(trees.mapped(_zeros, few.inputs), trees.mapped(_zeros, few.targets))
        return Samples(*self.stream.seen) if self.stream else self

    def some(self) -> "Samples":
        """Returns samples in memory that stand for the whole set: all of them, or at most 256 at even distances that
        are read from a stream."""
        self.refuse_sealed()
        if not self.stream or not len(self):
            return self
        count = min(len(self), _SOME, max(16, _SOME_BYTES * len(self) // self.nbytes))
        return self.read(torch.linspace(0, len(self) - 1, count).long().unique())

    def known_targets(self) -> Tree:
        """Returns targets in memory that stand for those of the whole set: all of them, or the labels of a stream, or
        the targets of some of its rows."""
        labels = self.labels
        return self.some().targets if labels is None else labels

    def read(self, rows: Tensor) -> "Samples":
        """Returns some of the samples in memory, by their numbers."""
        self.refuse_sealed()
        if not self.stream:
            return self.take(rows)
        return Samples(*self.stream.read_here(rows.tolist()), units=_rows_of(self.units, rows))

    def class_counts(self, classes: int) -> list[int] | None:
        """Returns how many samples each class has. Samples without a label, such as -1, are left out. None if that is
        not known, since they are read from a stream, or sealed."""
        if self.sealed:
            return None
        labels = self.stream.labels if self.stream else self.targets.reshape(-1).long()
        if labels is None:
            return None
        labels = labels[(labels >= 0) & (labels < classes)]
        return torch.bincount(labels, minlength=classes).tolist()

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Returns all tensors with what tells them apart: names of inputs and targets if there are several, "" if there
        is one of each; subgroups come last."""
        found = [*trees.named(self.inputs, ""), *trees.named(self.targets, "")]
        return found if self.subgroups is None else [*found, ("", self.subgroups)]

    def refuse_sealed(self) -> None:
        """Raises BadInput if a private run keeps the samples from the rest of the program."""
        if self.sealed:
            raise BadInput(
                "the training rows of a private run are sealed: what reads them without noise is refused; leave it "
                "out, or train without privacy (docs/concepts/privacy.md)"
            )

    def alone(self) -> "Samples":
        """Returns the same samples in memory of their own, so that the tensors they were cut from can be freed."""
        if self.stream or self.sealed:
            return self

        def own(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

        return replace(self, inputs=trees.mapped(own, self.inputs), targets=trees.mapped(own, self.targets))

    def take(self, rows: Tensor) -> "Samples":
        """Returns some of the samples, by their numbers or by a mask. Those of a stream are not read yet."""
        self.refuse_sealed()
        if self.stream:
            return replace(Samples.of_stream(self.stream.take(rows), self), units=_rows_of(self.units, rows))
        return replace(
            self,
            inputs=trees.at(self.inputs, rows),
            targets=trees.at(self.targets, rows),
            subgroups=_rows_of(self.subgroups, rows),
            units=_rows_of(self.units, rows),
        )

    def parts(self) -> Any:
        """Returns the pair (inputs, targets), or (inputs, targets, names of the subgroups); samples of a stream, and
        those that have units, as they are."""
        if self.stream or self.units is not None:
            return self
        if self.subgroups is None:
            return self.inputs, self.targets
        return self.inputs, self.targets, [self.subgroup_names[k] for k in self.subgroups.tolist()]

    @staticmethod
    def of(source: Any, what: str, target: Targets = None) -> "Samples":
        """Reads a set of samples.

        Args:
            source: Samples, a pair (inputs, targets) of tensors or arrays, or a torch Dataset of such pairs, which is
                not held in memory if it is `Streamed` or has more than 1 GiB. A third item is the subgroup of each
                sample: names or whole numbers. Or a dictionary of tensors or arrays, or a Dataset of dictionaries, of
                which `target` is the target and the others are the inputs.
            what: What the samples are, for error messages.
            target: The name of the target in a dictionary, its place in a tuple, or several names. None for the one
                that is called "labels", "label", "targets" or "target", and for the second of a tuple. Default: None.

        Raises:
            BadInput: The samples are empty, inconsistent, sparse or not finite.
        """
        if isinstance(source, Samples):
            if source.stream or source.sealed or not source.here:
                return source  # not read yet
            if source.units is not None:
                return replace(Samples.of(replace(source, units=None), what), units=source.units)
            source, target = source.parts(), None
        refuse_no_map(source, what)
        if isinstance(source, TensorDataset):
            source = source.tensors
        asked = isinstance(source, Streamed)
        if not asked and has_items(source) and too_large_to_hold(source):
            source = Streamed(source)
        if isinstance(source, Streamed):
            return Samples.of_stream(Stream(source, what, target, asked))
        inputs, targets, subgroups = _read(source, what, target)
        _check(inputs, targets, what)
        return Samples(inputs, targets, *_numbered(subgroups, trees.length(inputs), what))

    def __len__(self) -> int:
        return trees.length(self.inputs)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype)


def _rows_of(numbers: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if numbers is None else numbers[rows]


def _read(source: Any, what: str, target: Targets) -> tuple[Tree, Tree, Any]:
    """Returns inputs, targets and subgroups of a set in memory."""
    try:
        return tensors_of(_collated(source, what) if has_items(source) else source, target, what)
    except BadInput:
        raise
    except Exception as error:  # a user's Dataset may raise anything
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise BadInput(
                f"{what} does not fit into memory ({in_a_line(error)}); fm.data.Streamed(dataset) reads it batch by "
                "batch, and arrays may be of numpy.memmap"
            ) from error
        raise BadInput(
            f"{what} must be a pair (inputs, targets) of arrays, or (inputs, targets, subgroups), or a dictionary of "
            f"arrays, or a Dataset of such items: {in_a_line(error)}"
        ) from error


def _check(inputs: Tree, targets: Tree, what: str) -> None:
    """Refuses samples that are empty, inconsistent, sparse or not finite."""
    every = [*trees.named(inputs, "inputs"), *trees.named(targets, "targets")]
    if any(tensor.layout != torch.strided for _, tensor in every):
        raise BadInput(f"{what} holds sparse tensors; give dense ones")
    if any(tensor.ndim == 0 for _, tensor in every) or len({len(tensor) for _, tensor in every}) > 1:
        shapes = [f"{tuple(tensor.shape)} {name}" for name, tensor in every]
        raise BadInput(f"{what}: {' and '.join(shapes[:-1])} do not match {shapes[-1]}")
    if trees.length(inputs) == 0:
        raise BadInput(f"{what} is empty; give it samples, or leave the site out")
    for name, tensor in every:
        if (bad := first_not_finite(tensor)) >= 0:
            raise BadInput(f"{what}: {name} of sample {bad} are not finite (NaN or infinite); clean the data first")


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
    before = GeneratorStates.now()
    items = [with_tensors(dataset[i]) for i in range(len(dataset))]
    if not items:
        raise BadInput(f"{what} is empty; give it samples, or leave the site out")
    drawn = [f"it draws from the generator of {name}" for name in before.moved()]
    once, twice = (trees.leaves(default_collate([item])) for item in (items[0], with_tensors(dataset[0])))
    if not all(torch.equal(a, b) for a, b in zip(once, twice) if isinstance(a, Tensor)):  # by its own generator
        drawn.append("item 0 is another one each time it is asked for")
    if drawn:
        raise BadInput(
            f"{what} has random transforms ({'; '.join(drawn)}), which would be frozen by the one reading; have "
            "items read in every round with fm.data.Streamed(dataset), or augment with Problem(augment=...), which "
            "draws from fairmesh's streams"
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
