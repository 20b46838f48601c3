"""Units: which rows belong together, such as those of one patient, and how rows are divided without dividing a unit.

Rows of one patient look alike. With some of them in training and others in the test set, a metric tells how well the
model knows this patient, not how well it does for the next one."""

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh.data.items import Targets
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.data.tables import category_text, is_missing, number_in
from fairmesh.errors import BadInput
from fairmesh.numerics import random_streams, trees

FEWEST_UNITS = 4  # a site with fewer holds none out: one of them would be a third of its rows
_A_DAY = 86400.0  # seconds, for zones in which it is tomorrow
_SETS = {"train": "training", "test": "test", "validation": "validation", "reserved": "reserved"}  # and their names


class DivisionWarning(UserWarning):
    """Something to look at in how rows are divided."""


class SpanningWarning(DivisionWarning):
    """Units that are tested on at one site and trained on at another."""


class FutureTimesWarning(DivisionWarning):
    """Times that have not come."""


class LeftOutWarning(DivisionWarning):
    """Rows that are neither for training nor for testing."""


@contextmanager
def noticed(said: list[str]) -> Iterator[None]:
    """Adds what is to look at in the division of rows to a list, instead of warning of it."""
    with _caught() as found:
        yield
    said += map(str, found)


@contextmanager
def announced(announce: Callable[[str], None] | None) -> Iterator[None]:
    """Announces what is to look at in the division of rows, or warns of it: one sentence of each kind, though every
    split of the rows has its own."""
    with _caught() as found:
        yield
    for warning in {type(warning): warning for warning in reversed(found)}.values():
        if announce:
            announce(str(warning))
        else:
            warnings.warn(warning, stacklevel=3)


@contextmanager
def _caught() -> Iterator[list[DivisionWarning]]:
    """Yields a list that has the warnings of the division of rows in the end. Others are shown as ever."""
    found: list[DivisionWarning] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    for warning in caught:
        if isinstance(warning.message, DivisionWarning):
            found.append(warning.message)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


# Identifiers


def identifier_text(value: Any) -> str:
    """Returns an identifier as it is compared: 4, 4.0, "04" and " 4" are one."""
    text = category_text(value)
    whole = re.fullmatch(r"(-?\d{1,18})(?:\.0*)?", text)
    return str(int(whole[1])) if whole else text


def numbered(identifiers: Any, count: int, what: str) -> Tensor:
    """Returns a number for every row (rows,) int64, equal exactly if the identifiers are. It is a hash of the text, so
    that a unit has the same number in every set, split and process.

    Args:
        identifiers: Names or whole numbers, one per row.
        count: The number of rows.
        what: Whose rows they are, for errors.

    Raises:
        BadInput: There is not one identifier per row.
    """
    values = np.asarray(identifiers.tolist() if isinstance(identifiers, Tensor) else identifiers)
    if values.shape != (count,):
        raise BadInput(f"{what}: units have the shape {values.shape}; give one identifier for each of its {count} rows")
    given = values.tolist()
    missing = [k for k, value in enumerate(given) if is_missing(value)]
    if missing:
        raise BadInput(
            f"{what}: row {missing[0] + 1} has no unit; give it the identifier of its unit, or, if it belongs to no "
            f"other row, one of its own, such as 'row {missing[0] + 1}'"
        )
    fractions = [value for value in given if isinstance(value, float) and value != round(value)]
    if fractions:
        raise BadInput(f"{what}: units are identifiers, names or whole numbers, got {fractions[0]}")
    texts = [identifier_text(value) for value in given]
    numbers = {text: _hash(text) for text in set(texts)}
    return torch.tensor([numbers[text] for text in texts], dtype=torch.int64)


def _hash(text: str) -> int:
    """Returns a number of 63 bits that is the same in every process, which Python's `hash` is not."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def with_units(sites: Sequence[Site], targets: Targets = None) -> list[Site]:
    """Returns sites whose sets know the units that `Site.units` names, in `Samples.units`.

    Args:
        sites: The sites. Those without `units` stay as they are.
        targets: Which part of a sample is its target, as in `Problem`. Default: None.

    Raises:
        BadInput: Rows have no identifier, or a unit has rows in two sets of a site.
    """
    known: dict[tuple[int, int], Samples] = {}  # sites that share a set and its units still share them

    def attached(samples: Any, identifiers: Any, what: str) -> Samples:
        key = id(samples), id(identifiers)
        if key not in known:
            read = Samples.of(samples, what, targets)
            known[key] = replace(read, units=numbered(identifiers, len(read), what))
        return known[key]

    made = []
    for i, site in enumerate(sites):
        if site.units is None:
            made.append(site)
            continue
        where, table = site.name or f"site {i}", _by_set(site, site.name or f"site {i}")
        sets = {
            name: attached(getattr(site, name), identifiers, f"{where}, {_SETS[name]} samples")
            for name, identifiers in table.items()
            if len(identifiers)
        }
        _refuse_shared(table, where)
        made.append(replace(site, units=None, **sets))
    return made


def _by_set(site: Site, where: str) -> Mapping[str, Any]:
    """Returns the identifiers of each set of a site that has some."""
    given = site.units if isinstance(site.units, Mapping) else {"train": site.units}
    for name in given:
        if name not in _SETS:
            raise BadInput(f"{where}: units names the set {name!r}; the sets of a site are {', '.join(_SETS)}")
        if getattr(site, name) is None and len(given[name]):
            raise BadInput(f"{where}: units has identifiers of {name!r}, but the site has no such set; remove them")
    unknown = [name for name in _SETS if name not in given and getattr(site, name) is not None]
    if unknown:
        raise BadInput(
            f"{where}: units of its {_SETS[unknown[0]]} rows are not known, so that nobody can tell whether a unit is "
            f"in two sets; give units = {{{', '.join(f'{name!r}: ...' for name in (*given, *unknown))}}}"
        )
    return given


def _refuse_shared(table: Mapping[str, Any], where: str) -> None:
    """Refuses a unit that has rows in two sets of a site."""
    texts = {name: {*map(identifier_text, np.asarray(identifiers).tolist())} for name, identifiers in table.items()}
    for one, other in combinations(texts, 2):
        if common := sorted(texts[one] & texts[other]):
            raise BadInput(
                f"{where}: unit {common[0]!r} has {_SETS[one]} rows and {_SETS[other]} rows, as {len(common)} of "
                f"{len(texts[one])} units have, so that "
                "metrics would tell of units that the model knows; divide by unit: fm.data.split takes a site with all "
                "its rows in train, and their units"
            )


def warn_of_spanning(sites: Sequence[Site]) -> None:
    """Warns if sites test on units that other sites train on, with the number of such units and two of these sites."""
    names = [site.name or f"site {i}" for i, site in enumerate(sites)]
    trainers: dict[int, list[str]] = {}
    for name, site in zip(names, sites):
        for unit in _units_in(site, "train", "reserved"):
            trainers.setdefault(unit, []).append(name)
    shared: dict[int, tuple[str, str]] = {}
    for name, site in zip(names, sites):
        for unit in _units_in(site, "test", "validation"):
            others = [other for other in trainers.get(unit, ()) if other != name]
            shared |= {unit: (name, others[0])} if others else {}
    if shared:
        tested, trained = next(iter(shared.values()))
        many = f"{len(shared)} units are" if len(shared) > 1 else "one unit is"
        warnings.warn(
            f"{many} tested on at one site and trained on at another, such as {tested} and {trained}. If sites number "
            "their units by themselves, these are different ones, and all is well; else metrics may be too good: leave "
            "such units to one site",
            SpanningWarning,
            stacklevel=3,
        )


def _units_in(site: Site, *names: str) -> list[int]:
    """Returns the units that some sets of a site have."""
    sets = [getattr(site, name) for name in names]
    units = [part.units for part in sets if isinstance(part, Samples) and part.units is not None]
    return torch.cat(units).unique().tolist() if units else []


def joined_units(sets: Sequence[Samples]) -> Tensor | None:
    """Returns the units of several sets as one; a row without a unit is one of its own. None if no set has any."""
    if all(samples.units is None for samples in sets):
        return None
    alone = -1 - torch.arange(sum(map(len, sets)))
    parts = zip(sets, alone.split([len(samples) for samples in sets]))
    return torch.cat([own if samples.units is None else samples.units for samples, own in parts])


# Files


class Grouped(NamedTuple):
    """What divides the rows of a file other than chance."""

    identifiers: np.ndarray | None = None  # the unit of each row, as text
    units: Tensor | None = None  # as numbers
    times: Tensor | None = None
    unit: str = "unit"  # what a unit is called

    @property
    def noun(self) -> str:
        """What there is too little of, if nothing can be divided."""
        return "samples" if self.units is None is self.times else "units" if self.times is None else "different times"

    def of_rows(self, rows: np.ndarray) -> Tensor | None:
        """Returns the units of some rows."""
        return None if self.units is None else self.units[rows]

    def named(self, site: Site, rows: Mapping[str, Any]) -> Site:
        """Returns a site with the units of its sets, given the numbers of their rows; None for a set that is not."""
        if self.identifiers is None:
            return site
        named = {k: self.identifiers[np.asarray(some)] for k, some in rows.items() if some is not None}
        dates = f"data.time leaves out rows of each {self.unit} by when others were first there; leave time out"
        left = {} if self.times is None else {"time": dates}
        return replace(site, units=named, unit=self.unit, left_to_rows={**site.left_to_rows, **left})

    def division(
        self, rows: np.ndarray, targets: Tensor, share: float, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns masks of a site's rows to test on, and of those to train on."""
        units, count = self.of_rows(rows), max(1, round(share * len(rows)))
        if self.times is None:
            numbers = targets.reshape(len(rows), -1)[:, 0]
            test = torch.zeros(len(rows), dtype=torch.bool)
            test[divided(len(rows), share, generator, units, numbers)[1]] = True
            return test.numpy(), (~test).numpy()
        test, left_out = latest(self.times[rows], units, count)
        return test.numpy(), (~test & ~left_out).numpy()


UNGROUPED = Grouped()


def grouped_by(identifiers: Any, where: str, times: Tensor | None = None, unit: str = "unit") -> Grouped:
    """Returns rows with these units, if there are any, and times."""
    if identifiers is None:
        return UNGROUPED if times is None else Grouped(times=times)
    units = numbered(identifiers, len(identifiers), where)
    texts = np.array([identifier_text(value) for value in np.asarray(identifiers).tolist()])
    return Grouped(texts, units, times, unit)


def read_groups(data: Any, column: Callable[[str], np.ndarray]) -> Grouped:
    """Returns the units and times of the rows of a file.

    Args:
        data: The source, with its settings `unit`, `time` and `file`.
        column: The name of a column -> its values.
    """
    where = getattr(data, "where", data.file)
    times = None if data.time is None else times_of(column(data.time), f"{where}, column {data.time!r}")
    identifiers = None if data.unit is None else column(data.unit)
    return grouped_by(identifiers, f"{where}, column {data.unit!r}", times, data.unit or "unit")


def times_of(values: np.ndarray, where: str) -> Tensor:
    """Returns times as numbers (rows,) float64: seconds since 1970 of dates, and numbers as they are.

    Raises:
        BadInput: A time is missing, or not understood.
    """
    given = values.astype("datetime64[us]").tolist() if values.dtype.kind == "M" else values.tolist()
    dates = [None if is_missing(value) else _date(value) for value in given]
    numbers = [number_in(value) for value in given]
    whole = not any(map(math.isnan, numbers))
    for row, (value, date) in enumerate(zip(given, dates), 1):
        if is_missing(value):
            raise BadInput(f"{where}, row {row}: there is no time, so that nobody can tell what came first; fill it in")
        if date is None and not whole:
            raise BadInput(f"{where}, row {row}: {str(value)!r} is no time; write dates as 2026-11-30, or numbers")
    if whole:
        if not all(map(math.isfinite, numbers)):
            raise BadInput(f"{where}: times must be finite numbers, or dates such as 2026-11-30")
        return torch.tensor(numbers, dtype=torch.float64)
    seconds = torch.tensor([date.timestamp() for date in dates if date], dtype=torch.float64)
    late = int((seconds > datetime.now(UTC).timestamp() + _A_DAY).sum())
    if late:
        some = f"{where}: {late} of {len(seconds)} times are in the future"
        warnings.warn(
            f"{some}; correct them if they are mistakes, since they decide what is tested on",
            FutureTimesWarning,
            stacklevel=3,
        )
    return seconds


def _date(value: Any) -> datetime | None:
    """Returns a date, with or without a time of day, in UTC if it names no zone; None if it is none."""
    if isinstance(value, datetime):
        read = value
    else:
        try:
            read = datetime.fromisoformat(str(value).strip())
        except ValueError:
            return None
    return read if read.tzinfo else read.replace(tzinfo=UTC)


def warn_of_left_out(count: int, rows: int) -> None:
    """Warns that rows are left out, if some are, since they come neither before all test rows nor are tested on."""
    if count:
        warnings.warn(
            f"{count:,} of {rows:,} rows are left out, in training and in testing: they are of units that began before "
            "the test units, but not earlier than the first test row of their site; without time, all rows are used",
            LeftOutWarning,
            stacklevel=4,
        )


# Dividing rows


def units_of(samples: Samples) -> int:
    """Returns how many units a set has; as many as rows if none are known."""
    return len(samples) if samples.units is None else len(samples.units.unique())


def too_few_units(samples: Samples, fewest: int = FEWEST_UNITS) -> bool:
    """Returns whether a set has so few units that none is held out."""
    return samples.units is not None and units_of(samples) < fewest


def drawn_units(samples: Samples, count: int, key: Tensor) -> Tensor:
    """Returns a mask of the rows of some units, as `whole_units` does, drawn by the key of a random stream."""
    units = _units(samples)
    return whole_units(units, sortable_targets(samples), count, _draws(units, key))


def _units(samples: Samples) -> Tensor:
    return torch.arange(len(samples)) if samples.units is None else samples.units


def _draws(units: Tensor, key: Tensor) -> Tensor:
    """Returns a random number for every distinct unit, in the order of their numbers, by the key of a stream."""
    return random_streams.bits(key.reshape(()), len(units.unique())).double()


def sortable_targets(samples: Samples) -> Tensor | None:
    """Returns a number for each row by which classes or targets are spread over parts; None if a stream does not know
    its labels."""
    if samples.stream:
        return samples.labels
    first = trees.leaves(samples.targets)[0]
    return first if first.ndim == 1 else first.flatten(1)[:, 0]


def whole_units(units: Tensor, targets: Tensor | None, count: int, draws: Tensor) -> Tensor:
    """Returns a mask of the rows of some units, `count` rows or as near as whole units come.

    Units are sorted by their mean target and cut into as many neighbourhoods as units are wanted. One of each is drawn,
    then a second of each, and so on. A unit is taken if that brings the number of rows nearer to `count`, so the
    distance to it is at most half of the largest unit. At least one unit is taken, and one is left.

    Args:
        units: The unit of each row (rows,).
        targets: A number of each row by which units are spread; None if there is none.
        count: How many rows are wanted.
        draws: A random number for every distinct unit, in the order of their numbers.
    """
    _, owner, sizes = units.unique(return_inverse=True, return_counts=True)
    taken, held = [], 0
    for unit, size in _in_turn(owner, sizes, targets, count, draws):
        if held + size / 2 <= count and len(taken) < len(sizes) - 1:
            taken.append(unit)
            held += size
    if not taken and len(sizes) > 1:
        taken.append(int(sizes.argmin()))
    chosen = torch.zeros(len(sizes), dtype=torch.bool)
    chosen[taken] = True
    return chosen[owner]


def _in_turn(owner: Tensor, sizes: Tensor, targets: Tensor | None, count: int, draws: Tensor) -> list[tuple[int, int]]:
    """Returns all units with their sizes in the order in which they are tried: one of every neighbourhood, then the
    next of each."""
    wanted = max(1, round(count / len(owner) * len(sizes)))
    ranked = _by_target(owner, sizes, targets, draws)
    neighbourhood = torch.empty(len(sizes), dtype=torch.int64)
    neighbourhood[ranked] = torch.arange(len(sizes)) * wanted // len(sizes)
    drawn = draws.argsort(stable=True)
    drawn = drawn[neighbourhood[drawn].argsort(stable=True)]  # by neighbourhood, and drawn within it
    first = torch.searchsorted(neighbourhood[drawn].contiguous(), neighbourhood[drawn])
    turn = torch.arange(len(sizes)) - first
    by_turn = sorted(zip(turn.tolist(), draws[drawn].tolist(), drawn.tolist(), sizes[drawn].tolist()))
    return [(unit, size) for _, _, unit, size in by_turn]


def _by_target(owner: Tensor, sizes: Tensor, targets: Tensor | None, draws: Tensor) -> Tensor:
    """Returns the units in the order of their mean target, and of their draws where these are equal."""
    order = draws.argsort(stable=True)
    if targets is None:
        return order
    means = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, owner, targets.double()) / sizes
    return order[means[order].argsort(stable=True)]


def folds_of_units(samples: Samples, folds: int, key: Tensor) -> Tensor:
    """Returns the fold of every row. Units of similar targets go to different folds, the larger ones to folds with
    fewer rows."""
    units, targets = _units(samples), sortable_targets(samples)
    draws = _draws(units, key)
    _, owner, sizes = units.unique(return_inverse=True, return_counts=True)
    fold = torch.empty(len(sizes), dtype=torch.int64)
    filled = torch.zeros(folds, dtype=torch.int64)
    for alike in _by_target(owner, sizes, targets, draws).split(folds):
        emptiest = filled.argsort(stable=True)[: len(alike)]
        fold[alike[sizes[alike].argsort(descending=True, stable=True)]] = emptiest
        filled.index_add_(0, fold[alike], sizes[alike])
    return fold[owner]


def latest(times: Tensor, units: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Returns masks of the rows to test on, and of those to leave out, so that all other rows come before.

    The units that begin last are for testing, about `count` rows. Those that begin at the same time stay together. Rows
    of other units that are not before the first test row are left out.

    Args:
        times: The time of each row (rows,).
        units: The unit of each row; None if each is its own.
        count: How many rows are wanted for testing.
    """
    owner = torch.arange(len(times)) if units is None else units.unique(return_inverse=True)[1]
    begins = torch.full((int(owner.max()) + 1,), torch.inf, dtype=torch.float64)
    begins = begins.scatter_reduce(0, owner, times.double(), "amin")[owner]
    starts, sizes = begins.unique(return_counts=True)
    tested, first = 0, torch.inf
    for start, size in zip(starts.flip(0)[:-1].tolist(), sizes.flip(0)[:-1].tolist()):  # the first block trains
        if tested and tested + size / 2 > count:
            break
        tested, first = tested + size, start
    test = begins >= first
    return test, ~test & (times.double() >= first)


def divided(
    rows: int, share: float, generator: np.random.Generator, units: Tensor | None, targets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the numbers of the rows that stay, and of those that are held out: about a share of them, at random, by
    unit if there are any. Nothing is held out of a single row or unit.

    Args:
        rows: How many rows there are.
        share: The share to hold out.
        generator: What draws.
        units: The unit of each row; None if each is its own.
        targets: A number of each row by which units are spread; None if there is none.
    """
    count = max(1, round(share * rows))
    if units is None:
        order, count = torch.from_numpy(generator.permutation(rows)), min(count, rows - 1)
        return order[count:].sort().values, order[:count].sort().values
    draws = torch.from_numpy(generator.random(len(units.unique())))
    out = whole_units(units, targets, count, draws)
    return (~out).nonzero().flatten(), out.nonzero().flatten()


def split(sites: Sequence[Site], test_share: float = 0.2, seed: int = 0) -> list[Site]:
    """Moves a share of every site's training rows into its test set, whole units if the sites name them.

    Args:
        sites: The sites, without test sets.
        test_share: The share of each site's rows to test on, in (0, 1). Default: 0.2.
        seed: Seed of the draw, >= 0. Default: 0.

    Returns:
        The sites with test sets. A site of one row or one unit trains on it and is not measured.

    Raises:
        BadInput: The share is not between 0 and 1, a site has a test set already, or no site has two units.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> inputs, labels = torch.randn(50, 3), torch.arange(50) % 2
        >>> patients = [f"patient {row // 5}" for row in range(50)]
        >>> (site,) = fm.data.split([fm.Site((inputs, labels), units=patients)])
        >>> len(site.train), len(site.test), len(site.test.units.unique())
        (40, 10, 2)
    """
    if not 0 < test_share < 1:
        raise BadInput(f"test_share must lie in (0, 1), got {test_share}")
    made = []
    for i, site in enumerate(with_units(sites)):
        where = site.name or f"site {i}"
        if site.test is not None:
            raise BadInput(f"{where} has a test set already; give all its rows in train to divide them")
        samples = Samples.of(site.train, where)
        generator = np.random.default_rng((seed, i))
        rest, out = divided(len(samples), test_share, generator, samples.units, sortable_targets(samples))
        test = samples.take(out) if len(out) else None
        made.append(replace(site, train=samples.take(rest), test=test))
    if all(site.test is None for site in made):
        raise BadInput("every site has a single row or unit, so that none can be tested on; give more")
    return made
