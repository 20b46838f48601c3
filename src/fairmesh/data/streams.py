"""Datasets that are read by index when a batch needs them, and the processes that read them ahead of time."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # tensors then travel between processes by shared memory
from torch import Tensor
from torch.utils.data import Subset, default_collate

from fairmesh.data.items import Targets, first_not_finite, has_items, is_whole, refuse_no_map, tensors_of, with_tensors
from fairmesh.errors import BadInput, LostProcess, in_a_line, listed
from fairmesh.numerics import random_streams, trees
from fairmesh.numerics.random_streams import GeneratorStates, seed_generators
from fairmesh.numerics.trees import Tree

Pair = tuple[Tree, Tree]  # inputs and targets
HELD_UP_TO = 1 << 30  # bytes; a Dataset of more is not read into memory
_SEEN = 8  # items that are read at the start, for the checks and the fingerprint of a set
_ONE_SIZE = "pad or crop items to one size, in the Dataset or with fm.data.Streamed(dataset, collate=...)"
_THEN_RESUME = "; mend it, or leave it out of the Dataset; a run that was interrupted can be resumed then"


@dataclass(frozen=True, eq=False)
class Streamed:
    """A Dataset whose items are read when a batch needs them, and never held in memory as a whole.

    Results do not depend on the number of workers, and they are those of the same items in memory. Random transforms in
    the Dataset are allowed: before an item is read, the generators of torch, numpy and Python are seeded from
    fairmesh's streams. In training the seed depends on the run's seed, the site, the round and the place in the batch,
    so that an item is another one each time. In evaluation it depends on the item alone.

    At the start, 8 items are read for the checks and for the fingerprint that a resumed run is compared with. All
    other items are checked when they are read.

    Args:
        dataset: A torch Dataset with a length and items by index, or what looks like one, such as a set of Hugging
            Face's `datasets`. Its items are those that `Site` takes, without subgroups.
        workers: Processes that read items while the model computes, >= 0. With 0, the process that trains reads them,
            and waits. Default: 0.
        prefetch: How many rounds ahead the workers read, >= 1. A single site needs at least as many as it has workers.
            Default: 2.
        collate: The items of a batch -> the batch, such as a function that pads images to one size. All batches must
            have the same shapes. It also makes batches of test samples. None for torch's `default_collate`. Default:
            None.
        labels: The label of every item, if they are known without reading the items. Rows that are held out then have
            the classes in their proportions, and class counts are known. None for the `targets` of the Dataset if it
            has such an attribute. Default: None.

    Raises:
        BadInput: It has no length or no items by index, or a setting is out of range.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> class Scans(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 40
        ...     def __getitem__(self, k):  # such as an image file, read and decoded
        ...         return torch.full((3,), float(k)), k % 2
        >>> sites = [fm.Site(fm.data.Streamed(Scans())) for _ in range(3)]
        >>> problem = fm.Problem(torch.nn.Linear(3, 2), sites, sampling=fm.Sampling(batch=4))
        >>> fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.01), rounds=2).rounds
        2
    """

    dataset: Any
    workers: int = 0
    prefetch: int = 2
    collate: Callable[[list[Any]], Any] | None = None
    labels: Sequence[int] | Tensor | None = None

    def __post_init__(self):
        refuse_no_map(self.dataset, "Streamed")
        if not has_items(self.dataset):
            raise BadInput(
                f"Streamed takes a Dataset with a length and items by index, got a {type(self.dataset).__name__}; "
                "arrays need no Streamed: give the pair (inputs, targets), also of numpy.memmap"
            )
        for name, given, least in (("workers", self.workers, 0), ("prefetch", self.prefetch, 1)):
            if type(given) is not int or given < least:
                raise BadInput(f"{name} must be a whole number >= {least}, got {given!r}")
        if self.labels is not None and len(self.labels) != len(self):
            raise BadInput(f"labels: there are {len(self.labels)} for {len(self)} items; give one for each")

    def __len__(self) -> int:
        return len(self.dataset)

    @cached_property
    def seen(self) -> dict[str, Any]:
        """The items that were read at the start, and their form, by which part is the target."""
        return {}


def too_large_to_hold(dataset: Any) -> bool:
    """Returns whether the items of a Dataset, by the size of the first, are more than is read into memory."""
    before = GeneratorStates.now()
    try:
        item = default_collate([with_tensors(dataset[0])])
    except Exception:  # reading it says what is wrong, also that it is empty
        return False
    finally:
        before.restore()
    return len(dataset) * sum(leaf.nbytes for leaf in trees.leaves(item) if isinstance(leaf, Tensor)) > HELD_UP_TO


class Stream:
    """Some or all items of a Dataset, as the samples of a set.

    Args:
        source: The Dataset, and how it is read.
        what: What the set is, for errors.
        target: Which part of an item is its target.
        asked: Whether the user asked for a stream. Default: True.
        rows: The numbers of the items; None for all. Default: None.
    """

    def __init__(self, source: Streamed, what: str, target: Targets, asked: bool = True, rows: Tensor | None = None):
        self.source, self.what, self.asked, self._target = source, what, asked, target
        self.whole = rows is None
        self.rows = torch.arange(len(source)) if rows is None else rows
        self._form: Any = None
        self.classes: tuple[int, int | None] | None = None  # labels lie below the first, or are the second

    def __len__(self) -> int:
        return len(self.rows)

    def __bool__(self) -> bool:  # also without items: whether samples come from a stream
        return True

    def take(self, rows: Tensor) -> "Stream":
        """Returns some of the items, by their numbers or by a mask."""
        some = Stream(self.source, self.what, self._target, self.asked, self.rows[rows])
        some._form, some.classes = self._form, self.classes
        return some

    @cached_property
    def seen(self) -> Pair:
        """Inputs and targets of the items that are read at the start: the first two and others, drawn at random."""
        if len(self) == 0:
            raise BadInput(f"{self.what} is empty; give it samples, or leave the site out")
        key = repr(self._target)
        if self.whole and key in self.source.seen:
            found, self._form = self.source.seen[key]
            return found
        found = self.read_here(self.seen_rows)
        again = self.read_here(self.seen_rows[:1])
        if not all(torch.equal(a, b[:1]) for a, b in zip(trees.leaves(again), trees.leaves(found))):
            raise BadInput(
                f"{self.what}: item {self._number(0)} is another one each time it is read, although the generators of "
                "torch, numpy and Python are seeded before; draw from these, so that runs repeat"
            )
        if self.whole:
            self.source.seen[key] = found, self._form
        return found

    @cached_property
    def seen_rows(self) -> list[int]:
        """The rows that are read at the start, in order."""
        zero = torch.zeros(1, dtype=torch.int64)
        key = random_streams.keys(zero, "seen items", 0, zero)[0]
        drawn = random_streams.integers(key, _SEEN - 2, torch.tensor(len(self)))
        return sorted({0, min(1, len(self) - 1), *drawn.flatten().tolist()})

    @cached_property
    def labels(self) -> Tensor | None:
        """The label of every item, or None if they are not known without reading the items."""
        given = self.source.labels
        known = _targets_of(self.source.dataset) if given is None else given
        if known is None or not isinstance(self.seen[1], Tensor):
            return None
        labels = torch.as_tensor(known)
        if labels.ndim != 1 or not is_whole(labels):
            return None
        labels = labels.long()[self.rows]
        for row, target in zip(self.seen_rows, self.seen[1].tolist()):
            if labels[row].item() != target:
                if given is None:
                    return None  # the attribute is something else, such as labels before a transform
                said = f"labels say {int(labels[row])} for item {self._number(row)}, but the item's target is {target}"
                raise BadInput(f"{self.what}: {said}; give the labels of the items, in their order")
        return labels

    def read_here(self, rows: Sequence[int], seeds: Sequence[int] = ()) -> Pair:
        """Reads items in this process, and leaves its generators as they are."""
        before = GeneratorStates.now()
        try:
            return self.read(rows, seeds)
        finally:
            before.restore()

    def read(self, rows: Sequence[int], seeds: Sequence[int] = ()) -> Pair:
        """Returns inputs and targets of items.

        Args:
            rows: Which ones.
            seeds: Of the generators, for each item, in [0, 2^32); none for seeds that depend on the item alone.
                Default: ().
        """
        numbers = [self._number(row) for row in rows]
        seeds = seeds or [(number * 0x9E3779B1) & 0xFFFFFFFF for number in numbers]
        items: list[Any] = [None] * len(numbers)
        for k in sorted(range(len(numbers)), key=numbers.__getitem__):  # neighbours in a file one after another
            number = numbers[k]
            seed_generators(seeds[k])
            try:
                items[k] = with_tensors(self.source.dataset[number])
            except Exception as error:  # a user's Dataset may raise anything
                raise self._refusal(number, f"cannot be read: {in_a_line(error)}") from error
        batch = self._collated(items, numbers)
        self._check(batch, numbers)
        return batch

    def _number(self, row: int) -> int:
        """Returns the number of an item in the Dataset."""
        return int(self.rows[row])

    def named(self, rows: Sequence[int]) -> str:
        """Returns items of the set in words, for errors."""
        return f"{self.what}: items {listed(map(self._number, rows))}"

    def _refusal(self, number: object, reason: str) -> BadInput:
        return BadInput(f"{self.what}: item {number} {reason}{_THEN_RESUME}")

    def _collated(self, items: list[Any], numbers: Sequence[int]) -> Pair:
        try:
            made = (self.source.collate or default_collate)(items)
            inputs, targets, subgroups = tensors_of(made, self._target, self.what)
        except BadInput:
            raise
        except Exception as error:  # a user's function may raise anything
            if len(items) > 1:  # then one item is perhaps unlike the others
                for item, number in zip(items, numbers):
                    self._check(self._collated([item], [number]), [number])
            reason = f"items {listed(numbers)} cannot become a batch: {in_a_line(error)}"
            raise BadInput(f"{self.what}: {reason}; {_ONE_SIZE}") from error
        if subgroups is not None:
            raise BadInput(
                f"{self.what}: items of a Dataset that is not in memory have no subgroups; give pairs (inputs, targets)"
            )
        return inputs, targets

    def _check(self, batch: Pair, numbers: Sequence[int]) -> None:
        """Raises BadInput if a batch is not like those before, or is not finite."""
        inputs, targets = batch
        named = [*trees.named(inputs, "inputs"), *trees.named(targets, "targets")]
        lengths = {tensor.shape[0] if tensor.ndim else 0 for _, tensor in named}
        if lengths != {len(numbers)}:
            raise BadInput(
                f"{self.what}: collate gives {sorted(lengths)} rows for {len(numbers)} items; give one row per item"
            )
        form = trees.form(inputs), trees.form(targets)
        self._form = self._form or form
        if form != self._form:
            unlike = f"gives {form}, but earlier items {self._form}: (inputs, targets) as dtype and shape"
            raise self._refusal(listed(numbers), f"{unlike}; {_ONE_SIZE}")
        for name, tensor in named:
            if (bad := first_not_finite(tensor)) >= 0:
                raise self._refusal(numbers[bad], f"has {name} that are not finite (NaN or infinite)")
        if self.classes:
            classes, ignored = self.classes
            wrong = ((targets < 0) | (targets >= classes)) & (targets != ignored)
            if bool(wrong.any()):
                label, number = int(targets[wrong][0]), numbers[int(wrong.nonzero()[0, 0])]
                said = f"has the label {label}, but the model has {classes} classes"
                raise self._refusal(number, f"{said}: labels must lie in 0..{classes - 1}")


def _targets_of(dataset: Any) -> Any:
    """Returns the labels that torchvision's Datasets keep apart from the items, or None."""
    if isinstance(dataset, Subset):
        whole = _targets_of(dataset.dataset)
        return None if whole is None else torch.as_tensor(whole)[torch.as_tensor(list(dataset.indices))]
    known = getattr(dataset, "targets", None)
    fits = isinstance(known, Tensor | np.ndarray | list) and len(known) == len(dataset) and len(known) > 0
    return known if fits and (not isinstance(known, list) or isinstance(known[0], int)) else None


class Held:
    """A set in memory, which is read as a stream is.

    Args:
        inputs: Its inputs.
        targets: Its targets.
    """

    def __init__(self, inputs: Tree, targets: Tree):
        self._inputs, self._targets = inputs, targets

    def read(self, rows: Sequence[int], seeds: Sequence[int] = ()) -> Pair:
        """Returns inputs and targets of rows."""
        at = torch.tensor(rows)
        return trees.at(self._inputs, at), trees.at(self._targets, at)

    read_here = read

    def named(self, rows: Sequence[int]) -> str:
        """Returns rows of the set in words, for errors."""
        return f"rows {listed(rows)} of a set in memory"


Source = Stream | Held
Part = tuple[int, list[int], list[int]]  # the number of a set, rows of it, and their seeds, if they have any


def joined(pairs: Sequence[Pair]) -> Pair:
    """Returns inputs and targets of several parts, one after another."""
    if len(pairs) == 1:
        return pairs[0]
    inputs, targets = zip(*pairs)
    return trees.joined(inputs), trees.joined(targets)


class Workers:
    """Processes that read items of several sets. If one of them dies, all are started again.

    Args:
        sets: The sets.
        count: How many processes. With 0, this process reads items when it waits for them.
    """

    def __init__(self, sets: Sequence[Source], count: int):
        self._sets, self._count = list(sets), count
        self._pool: ProcessPoolExecutor | None = None

    def ask(self, parts: Sequence[Part]) -> Callable[[], Pair]:
        """Asks for parts of the sets, each of which becomes a batch by itself. Returns a function that waits for inputs
        and targets. It raises BadInput if an item cannot be read, and LostProcess if workers die of a part."""
        if not self._count:
            return lambda: joined([self._sets[of].read_here(rows, seeds) for of, rows, seeds in parts])
        answer = self._submit(parts)

        def result() -> Pair:
            try:
                return answer.result()
            except BrokenProcessPool:  # asked for once more, one by one, to see which part they die of
                return joined([self._alone(part) for part in parts])

        return result

    def _submit(self, parts: Sequence[Part]) -> "Future[Pair]":
        try:
            return (self._pool or self._start()).submit(_work, parts)
        except BrokenProcessPool:
            return self._start().submit(_work, parts)

    def _start(self) -> ProcessPoolExecutor:
        method = "fork" if sys.platform == "linux" else None  # as torch's DataLoader: the Dataset is not pickled
        context, given = multiprocessing.get_context(method), (self._sets, os.getpid())
        self._pool = ProcessPoolExecutor(self._count, context, _begin_work, given)
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        return self._pool

    def _alone(self, part: Part) -> Pair:
        try:
            return self._submit([part]).result()
        except BrokenProcessPool as error:
            raise LostProcess(
                f"{self._sets[part[0]].named(part[1])}: workers die while they are read; they are killed, or memory or "
                "shared memory (/dev/shm) runs out, or a library crashes: use fewer workers or a smaller prefetch, or "
                "workers=0 to see the cause; then resume the run"
            ) from error


_sets: list[Source] = []  # those of this worker


def _begin_work(sets: list[Source], parent: int) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _sets[:] = sets

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)  # the process that trains was killed

    threading.Thread(target=follow, daemon=True).start()


def _work(parts: Sequence[Part]) -> Pair:
    return joined([_sets[of].read(rows, seeds) for of, rows, seeds in parts])
