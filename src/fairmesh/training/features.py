"""The outputs of a frozen prefix for all rows of the sites' data: computed once, kept on disk, found by fingerprint."""

import dataclasses
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fairmesh.data.rows import SampleRows
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.errors import BadInput, in_a_line
from fairmesh.numerics import trees
from fairmesh.problems.backbone import DTYPES, Backbone, BoundBackbone, Cut, close, returned_by, tensors_of
from fairmesh.problems.flat_model import FlatModel, architecture_of
from fairmesh.problems.identity import class_in_words, fingerprint
from fairmesh.problems.problem import Problem
from fairmesh.problems.row_loss import as_floats
from fairmesh.storage.feature_store import Form, StoredRows, in_bytes, refuse_full_disk

SETS = ("train", "test", "validation", "reserved")
_EVERY_S = 10.0  # seconds between two lines about progress
_TRIED = 2  # rows of a stored set that are computed again, to see whether they still are what the prefix gives
Say = Callable[[str], None]


def with_features(
    problem: Problem,
    device: torch.device,
    folder: Path | None = None,
    say: Say = lambda text: None,
    go_on: Callable[[], None] = lambda: None,
) -> Problem:
    """Returns the problem with the outputs of its frozen prefix as the sites' inputs; the same problem if it has no
    prefix. What is on disk already is not computed again.

    Args:
        problem: The problem.
        device: Where outputs are computed.
        folder: Where they are kept; None for where the backbone says. Default: None.
        say: Told in words what is computed, how much disk it takes, and how far it is. Default: nothing.
        go_on: Called after every portion; may raise to interrupt. Finished portions are kept. Default: nothing.

    Raises:
        BadInput: Outputs are not finite, or do not fit on the disk or into memory.
    """
    if problem.prefix is None or problem.on_features:
        return problem
    every = [_Split(problem.of_split(k), device) for k in range(len(problem.every_split))]
    place = folder or folder_of(problem.prefix)
    stored = {one.digest: one.store(place, say) for split in every for one in split.sets}
    _say_first(problem, every, stored, place, say)
    done = set[str]()  # equal sets are computed once
    for split in every:
        for one in split.sets:
            if one.digest not in done:
                split.compute(one, stored[one.digest], say, go_on)
                done.add(one.digest)
        split.release()
    first, *others = (split.problem_of(stored) for split in every)
    return first.with_splits(others)


def folder_of(settings: Backbone) -> Path:
    """Returns the folder where outputs are kept."""
    given = settings.folder or os.environ.get("FAIRMESH_FEATURES")
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fairmesh" / "features"


def bytes_of_features(problem: Problem) -> int:
    """Returns how many bytes the outputs of a problem's frozen prefix take on disk at most; 0 without a prefix."""
    if problem.prefix is None or problem.on_features:
        return 0
    sets = {id(samples): samples for _, _, samples in _sets_here(problem)}
    return sum(
        len(samples) * sum(form.nbytes for form in _forms(problem.cut, problem.prefix, samples))
        for samples in sets.values()
    )


def _sets_here(problem: Problem) -> Iterator[tuple[int, str, Samples]]:
    """Yields site, kind and samples of every set that is here."""
    for i, site in enumerate(problem.sites):
        for kind in SETS:
            samples = getattr(site, kind)
            if samples is not None and samples.here:
                yield i, kind, samples


def _forms(cut: Cut, settings: Backbone, samples: Samples) -> list[Form]:
    """Returns the tensors that are kept of a set: what the rest of the model gets and, of a stream, targets."""
    kept = [Form(*one) for one in cut.stored_as(DTYPES[settings.dtype])]
    targets = [] if samples.stream is None else trees.leaves(samples.targets)
    return [*kept, *(Form(tuple(leaf.shape[1:]), leaf.dtype) for leaf in targets)]


class _Set(NamedTuple):
    """One set of samples of a split, and where its outputs are kept."""

    what: str  # for people
    samples: Samples
    origin: str  # fingerprint of the samples
    digest: str  # of all that determines the outputs
    forms: list[Form]
    batch: int

    def store(self, folder: Path, say: Say) -> StoredRows:
        return StoredRows(folder / self.digest, self.forms, len(self.samples), self.batch, say)


def _say_first(
    problem: Problem, every: Sequence["_Split"], stored: dict[str, StoredRows], folder: Path, say: Say
) -> None:
    """Says how much is to be computed, and what disk it takes. Refuses what the disk has no room for."""
    sets = {one.digest: one for split in every for one in split.sets}
    rows, size = sum(len(one.samples) for one in sets.values()), sum(one.nbytes for one in stored.values())
    there = {digest: stored[digest].known() for digest in sets}
    new = sum(stored[digest].nbytes for digest, count in there.items() if not count)
    refuse_full_disk(folder, new, f"the outputs of {cast(Backbone, problem.prefix).module!r} (backbone)")
    known = sum(there.values())
    before = "" if not known else ", all of them known" if known == rows else f", {known:,} of them known"
    shapes = ", ".join(str(one.shape) for one in problem.cut.kept_outputs)
    say(
        f"{cast(Backbone, problem.prefix).in_words(problem.initial_model(0))}: {rows:,} rows{before}, {shapes} each, "
        f"{in_bytes(size)} in {folder}"
    )


class _Split:
    """One split of a problem, whose outputs are computed.

    Args:
        problem: The split.
        device: Where to compute.
    """

    def __init__(self, problem: Problem, device: torch.device):
        self._problem, self._settings, self._cut = problem, cast(Backbone, problem.prefix), problem.cut
        self._device, self._model, self._row = device, problem.flat_model, problem.initial_whole_row(0)
        prefix, known = self._digest_of_prefix(), dict[int, _Set]()
        for i, kind, samples in _sets_here(problem):
            if id(samples) not in known:
                what = f"{problem.sites[i].name}, {'training' if kind == 'train' else kind} rows"
                digest = hashlib.sha256(f"{prefix} {_of_inputs(samples)}".encode()).hexdigest()[:32]
                forms = _forms(self._cut, self._settings, samples)
                known[id(samples)] = _Set(what, samples, fingerprint(samples), digest, forms, self._settings.batch)
        self._known, self.sets = known, list(known.values())
        self._placed: FlatModel | None = None

    def _digest_of_prefix(self) -> str:
        """Returns a fingerprint of all that determines the outputs, besides the data."""
        module, hasher = self._problem.initial_model(0), hashlib.sha256()
        path, prefix = self._settings.module, self._settings.found_in(module)
        around = [(name, module.get_submodule(name)) for name in self._settings.around]
        layers = [*around, *prefix.named_modules(prefix=path)]
        cut, device = self._cut, self._device.type
        hasher.update(f"{self._settings.identity} {cut.read} {cut.kept} {device} {torch.__version__}".encode())
        if self._device.type == "cuda":
            hasher.update(torch.get_float32_matmul_precision().encode())
        hasher.update(architecture_of(prefix).encode())
        for name, layer in layers:
            hasher.update(f"{name} {type(layer).__qualname__} {_plain(vars(layer))}".encode())
        kinds = {type(layer) for _, layer in layers if not type(layer).__module__.startswith("torch.")}
        for text in sorted(f"{class_in_words(kind)} {_version(kind)}" for kind in kinds):
            hasher.update(text.encode())
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        for name, tensor in sorted((*module.named_parameters(), *module.named_buffers())):  # what comes before it too
            if name not in trained:
                hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                hasher.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
        return hasher.hexdigest()

    def compute(self, one: _Set, store: StoredRows, say: Say, go_on: Callable[[], None]) -> None:
        """Computes what is missing of a set."""

        def waiting() -> None:
            say(f"backbone: another process computes {one.what}; waiting for it")

        with store.locked(waiting):
            missing = store.missing()
            if len(missing) < store.count and not self._still_right(one, store, missing):
                say(f"backbone: what is stored of {one.what} is not what the prefix gives now; it is computed again")
                store.clear()
                missing = list(range(store.count))
            if missing:
                self._compute(one, store, missing, say, go_on)

    def _still_right(self, one: _Set, store: StoredRows, missing: Sequence[int]) -> bool:
        """Returns whether a few rows that are stored are what the prefix gives, by its code as it is now."""
        portion = min(set(range(store.count)) - set(missing))
        place = store.place(portion)
        rows = torch.arange(place.start, min(place.stop, place.start + _TRIED))
        few, stored = one.samples.read(rows), store.tensors()
        share = 2e-2 if self._settings.dtype == "bfloat16" else 1e-3
        made = self._made(one, few.inputs, few.targets)
        return all(close(a[rows].to(b.dtype), b, share) for a, b in zip(stored, made))

    def _compute(
        self, one: _Set, store: StoredRows, missing: Sequence[int], say: Say, go_on: Callable[[], None]
    ) -> None:
        rows, begun = sum(store.place(k).stop - store.place(k).start for k in missing), time.monotonic()
        done, told = 0, begun
        reader = SampleRows([one.samples], torch.device("cpu"))
        for portion in missing:
            place, parts = store.place(portion), []
            for at, (inputs, targets) in reader.chunks(place.start, place.stop, self._settings.batch):
                parts.append(self._made(one, inputs, targets, at.start))
                done += at.stop - at.start
                if time.monotonic() - told >= _EVERY_S:
                    told = time.monotonic()
                    left = (told - begun) * (rows - done) / done
                    say(f"backbone: {one.what}: {done:,} of {rows:,} computed, about {_duration(left)} left")
            store.write(portion, [torch.cat(tensors) for tensors in zip(*parts)])
            go_on()

    def _made(self, one: _Set, inputs: Any, targets: Any, first: int = 0) -> list[Tensor]:
        """Returns what is kept of some rows, the first of which has a number in its set."""
        dtype, settings, cut = self._settings.computed_in, self._settings, self._cut
        if self._placed is None:
            self._placed = self._model.to(self._device, dtype)
        seen = trees.mapped(lambda part: as_floats(part.to(self._device), dtype).clone(), inputs)
        try:
            with torch.no_grad():
                returned = returned_by(self._placed, self._row.to(self._device, dtype), seen, settings.module)
        except torch.OutOfMemoryError as error:
            raise BadInput(
                f"backbone: a batch of {settings.batch} rows does not fit into the memory of {self._device} "
                f"({in_a_line(error)}); use a smaller backbone.batch"
            ) from error
        every = tensors_of(returned, cut, trees.length(inputs))
        made = [every[k].cpu() for k in cut.read]
        for name, part in zip((output.name for output in cut.kept_outputs), made):
            stored = part.to(DTYPES[settings.dtype]) if part.is_floating_point() else part
            finite = torch.isfinite(stored).reshape(len(stored), -1).all(dim=1)
            if not bool(finite.all()):
                row = first + int((~finite).nonzero()[0])
                raise BadInput(
                    f"backbone: {name} of {settings.module!r} for {one.what}, row {row}, has values that are not "
                    "finite (NaN or infinite); look at this row, and at the weights of the module"
                )
        leaves = trees.leaves(inputs)
        kept = [leaves[k] for k in cut.kept]
        return [*made, *kept, *([] if one.samples.stream is None else trees.leaves(targets))]

    def problem_of(self, stored: dict[str, StoredRows]) -> Problem:
        """Returns the split with outputs as the sites' inputs."""
        made = {key: self._features(one, stored[one.digest].tensors()) for key, one in self._known.items()}
        like = next(iter(made.values()))

        def of_set(samples: Samples | None) -> Samples | None:
            if samples is None or id(samples) in made:
                return None if samples is None else made[id(samples)]
            away = Samples.elsewhere(len(samples), Samples(like.inputs, samples.targets))
            return dataclasses.replace(away, subgroup_names=samples.subgroup_names)

        def of_site(site: Site) -> Site:
            return dataclasses.replace(site, **{kind: of_set(getattr(site, kind)) for kind in SETS})

        bound = BoundBackbone(self._settings, self._cut)
        return self._problem.on_outputs(bound, [of_site(site) for site in self._problem.sites])

    def release(self) -> None:
        """Frees the memory of the device."""
        self._placed = None

    def _features(self, one: _Set, tensors: Sequence[Tensor]) -> Samples:
        samples, count = one.samples, len(self._cut.read) + len(self._cut.kept)
        inputs, targets = self._cut.together(tensors[:count]), samples.targets
        if samples.stream is not None:
            own = iter(tensors[count:])
            targets = trees.mapped(lambda leaf: next(own), targets)
        return Samples(inputs, targets, samples.subgroups, samples.subgroup_names, origin=one.origin)


def _of_inputs(samples: Samples) -> str:
    """Returns a fingerprint of the inputs of a set. That of a stream covers what `fingerprint` covers, and what its
    Dataset says of itself."""
    if samples.stream is not None:
        dataset = samples.stream.source.dataset
        own = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
        return f"{fingerprint(samples)} {own if isinstance(own, str) else ''}"
    nothing = torch.zeros(len(samples), 0)
    return fingerprint(Samples(samples.inputs, nothing))


def _plain(settings: Any) -> Any:
    """Returns the settings of a layer that are plain values, as text can hold them."""
    if isinstance(settings, dict):
        skipped = ("training", "transformers_version", "name_or_path")  # the folder may be moved
        kept = {str(k): _plain(v) for k, v in settings.items() if not str(k).startswith("_") and k not in skipped}
        return sorted((key, value) for key, value in kept.items() if value is not ...)
    if isinstance(settings, list | tuple):
        return [_plain(one) for one in settings]
    if settings is None or isinstance(settings, bool | int | float | str | torch.dtype):
        return repr(settings)
    if hasattr(settings, "to_dict"):  # a configuration, as Hugging Face has them
        return _plain(settings.to_dict())
    return ...


def _version(kind: type) -> str:
    """Returns the version of the package that a class comes from, if it has one."""
    package = sys.modules.get(kind.__module__.split(".")[0])  # none for a file of the user's
    return str(getattr(package, "__version__", ""))


def _duration(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
