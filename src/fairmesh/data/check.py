"""What looks wrong with the data of sites, in words: duplicates, leaks, single classes, columns that differ."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import pdtrc
from torch import Tensor

from fairmesh.data import tables
from fairmesh.data.datasets.table import Table
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.data.site_files import Columns
from fairmesh.data.tables import Kind
from fairmesh.data.units import FEWEST_UNITS, identifier_text, too_few_units, units_of, with_units
from fairmesh.errors import BadInput, listed
from fairmesh.numerics import trees

FEW_TEST_ROWS = 30  # with fewer, a metric of the site says little
_FEW_UNITS = 5  # of test rows; with fewer, an interval over units is wide or unknown
_RARE = 0.05  # share of a class
_MISSING_APART = 0.3  # difference between the shares of missing values at two sites
_FEW_VALUES = 20  # different values of a column that may be compared with the target one by one
_BY_CHANCE = 0.1  # share of test rows that may be equal to training rows without misleading
_CHANCE = "that many can be equal by chance where columns have few values, but look for copies"
_COPIED = "test rows in training"
_TOO_GOOD = "so that metrics are too good; remove copies before the split, or at one site"
_UNLIKELY = 0.01  # so seldom, over all that is looked at, are rows that are equal by chance called copies
_COPIES = 3  # fewer equal rows are not called copies
_SHOWN = 4  # names in a sentence
_WORTH_COMPARING = 10  # rows of a site with which its columns are compared
_VALUES_OF_A_UNIT = 3  # different values at a site, on average; a column with fewer is a category
_LIKE_UNITS = {  # last words of the names of columns that tell whose a row is
    *("id", "uid", "uuid", "pid", "identifier", "patient", "subject", "mrn", "case", "person", "participant"),
    *("individual", "donor", "animal", "pseudonym", "device", "serial"),
}
_NUMBERED = {"no", "nr", "num", "number", "code", "key"}  # words that may follow these
_UNFIT = {"empty column", "constant column", "identifier", "unusable column"}


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong.

    Args:
        severity: "error" if the data cannot be used or results would mislead; "warning" if a person should look.
        what: A short name of the kind of finding.
        sentence: What, where, and what to do.
        column: The column of a table that it is about; "" for none. Default: "".
    """

    severity: Literal["error", "warning"]
    what: str
    sentence: str
    column: str = ""


def check_table(table: Table) -> Iterator[Finding]:
    """Yields what looks wrong with the columns of a table."""
    try:
        columns = table.read()
        names = table.input_names(columns)
    except BadInput as error:
        yield Finding("error", "unusable", str(error))
        return
    target = tables.column_of(columns, table.target, table.where)
    labels = map(tables.whole_number_text, target.tolist()) if table.predict == "labels" else ()
    if said := tables.two_spellings(labels):
        yield Finding("warning", "two spellings", f"the target {table.target!r}: {said}")
    if table.predict == "labels" and not table.classes and (said := _looks_like_numbers(target)):
        advice = 'to predict a number, write predict = "numbers"; if they are labels, list them as classes'
        yield Finding("warning", "numbers as labels", f"the target {table.target!r} {said}; {advice}")
    sites = _sites_of(table, columns)
    for name in names:
        values = columns[name]
        findings = list(check_column(table, name, columns))
        yield from findings
        kinds = {finding.what for finding in findings}
        if not kinds & _UNFIT and _tells_target(values, target, table.predict):
            said = (
                f"column {name!r} tells the target {table.target!r} in every row, so that the model learns to copy it"
            )
            advice = f'if it is not known when a prediction is made, leave it out: exclude = ["{name}"]'
            yield Finding("error", "leak", f"{said}; {advice}")
        if sites is not None and not kinds & {"identifier", "unusable column", "empty column"}:
            yield from _between_sites(table, name, values, sites)


def _looks_like_numbers(target: np.ndarray) -> str:
    """Returns why labels look like numbers to predict, in words; "" if they do not."""
    numbers = {number for value in set(target.tolist()) if math.isfinite(number := tables.number_in(value))}
    broken = next((number for number in numbers if number != round(number)), None)
    if broken is not None:
        return f"has values such as {broken:g}"
    return f"has {len(numbers):,} different whole numbers" if len(numbers) > _FEW_VALUES else ""


def _sites_of(table: Table, columns: Columns) -> np.ndarray | None:
    """Returns the site of every row; None if it is not known."""
    try:
        return table.site_of_rows(columns)
    except BadInput:  # which is said where sites are made
        return None


def check_column(table: Table, name: str, columns: Columns) -> Iterator[Finding]:
    """Yields what speaks against a column as an input."""
    values = columns[name]
    known = [tables.category_text(value) for value in values.tolist() if not tables.is_missing(value)]
    leave_out = f'leave it out: exclude = ["{name}"]'
    if not known:
        yield Finding("warning", "empty column", f"column {name!r} has no values; {leave_out}", name)
        return
    if len(set(known)) == 1:
        said = "has the same value in every row" if len(known) == len(values) else "has only one value and gaps"
        yield Finding("warning", "constant column", f"column {name!r} {said} ({known[0]!r}); {leave_out}")
        return
    try:
        kind = table.kind_of_column(columns, name)
        numbers = table.encoded(columns, name, kind)
        if _is_identifier(name, kind, numbers, known):
            yield Finding("error" if kind == "category" else "warning", "identifier", _identifier(name), name)
            return
        if kind == "category" and name not in table.categories:
            tables.refuse_many_categories(values, name, table.where)
    except BadInput as error:
        yield Finding("error", "unusable column", str(error), name)
        return
    if kind == "category" and (said := tables.two_spellings(known)):
        yield Finding("warning", "two spellings", f"categories of column {name!r}: {said}")
    if kind == "number" and (marker := _marker(numbers[~np.isnan(numbers)])):
        said = f"column {name!r} is {marker} in {known.count(marker):,} rows, far from all others"
        advice = f'if it stands for a missing value, write missing_values = {{ "{name}" = ["{marker}"] }}'
        yield Finding("warning", "marker", f"{said}; {advice}")


def _marker(numbers: np.ndarray) -> str:
    """Returns a number that looks like a mark for a missing value, such as -9 or 999: it is there several times, and
    the only negative one, or further from the others than these are apart. "" if there is none."""
    distinct, counts = np.unique(numbers, return_counts=True)
    for value in distinct[[0, -1]][counts[[0, -1]] >= _COPIES].tolist():
        others = distinct[distinct != value]
        if len(others) < 2 or not re.fullmatch(r"-?9+", tables.category_text(value)):
            continue
        alone = value < 0 <= others[0]
        if alone or np.abs(others - value).min() > others[-1] - others[0]:
            return tables.category_text(value)
    return ""


def _identifier(name: str) -> str:
    return (
        f'column {name!r} has a different value in every row, as an identifier has; leave it out: exclude = ["{name}"]'
    )


def check_inputs(site: Site) -> Iterator[Finding]:
    """Yields which inputs of a site's table look like identifiers, of single rows or of units with several."""
    if not site.table or not site.table.rows:
        return
    for column in site.table.plan.columns:
        values = site.table.columns[column.name]
        known = [str(value) for value in values[~tables.absent(values)].tolist()]
        if _is_identifier(column.name, column.kind, values, known):
            yield Finding("warning", "identifier", _identifier(column.name), column.name)
    yield from check_units(site.table.columns, [site])


def _is_identifier(name: str, kind: Kind, numbers: np.ndarray, known: Sequence[str]) -> bool:
    """Returns whether a column has in every row another text, or another whole number, if these are consecutive or
    have such a name."""
    if len(known) < _WORTH_COMPARING or len(set(known)) < len(known) or kind not in ("category", "number"):
        return False
    if kind == "category":
        return True
    numbers = numbers[~np.isnan(numbers)]
    consecutive = numbers.max() - numbers.min() == len(numbers) - 1
    named = re.search(r"(^|[^a-z])id$", name.lower()) is not None
    return bool((numbers == np.round(numbers)).all()) and (consecutive or named)


def looks_like_unit(name: str) -> bool:
    """Returns whether a column is called as what rows belong to, such as "patient_id", "subjectNo" or "MRN"."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())
    while len(words) > 1 and words[-1] in _NUMBERED:
        words.pop()
    last = words[-1] if words else ""
    return bool({last, last.removesuffix("s"), last.removesuffix("id")} & (_LIKE_UNITS | _NUMBERED))


def identifiers_in(values: np.ndarray) -> np.ndarray:
    """Returns the values of a column as identifiers; "" for missing ones."""
    return np.array(["" if tables.is_missing(value) else identifier_text(value) for value in values.tolist()])


def repeats(name: str, texts: np.ndarray, sites: np.ndarray, excluded: bool) -> bool:
    """Returns whether a column looks like the identifier of a unit with several rows: whole numbers or texts, by its
    name, or by many values if it was excluded.

    Args:
        name: Its name.
        texts: Its values; "" for missing ones.
        sites: The number of the site of each row.
        excluded: Whether a person has decided that it is no input.
    """
    known = texts != ""
    pairs = len(set(zip(sites[known].tolist(), texts[known].tolist())))
    distinct = set(texts[known].tolist())
    numbers = [tables.number_in(text) for text in distinct]
    fractions = any(number != round(number) for number in numbers if math.isfinite(number))
    dates = bool(distinct) and all(re.fullmatch(r"\d{4}-\d\d-\d\d.*", text) for text in distinct)
    if fractions or dates or known.sum() < 2 * pairs or pairs < _VALUES_OF_A_UNIT * len(set(sites.tolist())):
        return False
    return looks_like_unit(name) or (excluded and len(distinct) > _FEW_VALUES)


def check_units(
    columns: Mapping[str, np.ndarray], sites: Sequence[Site], exclude: Sequence[str] = ()
) -> Iterator[Finding]:
    """Yields columns that look like identifiers of units which have rows in the training and the test set of a site.

    Args:
        columns: The columns to look at, with the values of all rows of a table.
        sites: The sites that were made of it.
        exclude: Which of the columns are no inputs by choice. Default: ().
    """
    divisions = [site.table.rows for site in sites if site.table and site.table.rows]
    if not divisions or any(site.table.grouped.units is not None for site in sites if site.table):
        return
    place = np.zeros(len(next(iter(columns.values()), ())), np.int64)
    for k, rows in enumerate(divisions):
        for some in rows.values():
            place[some] = k
    for name, values in columns.items():
        texts = identifiers_in(values)
        if not repeats(name, texts, place, name in exclude):
            continue
        tested = shared = 0
        for rows in divisions:
            known = {*texts[rows["train"]].tolist()} - {""}
            test = texts[rows.get("test", rows["train"][:0])].tolist()
            tested, shared = tested + len(test), shared + sum(text in known for text in test)
        if shared:
            yield Finding(
                "warning",
                "units divided",
                f"column {name!r} looks like an identifier with several rows each: {shared:,} of {tested:,} test rows "
                "are of one that is also among the training rows of the site, so that metrics may tell of known ones, "
                f'not of new ones; if rows with one {name!r} belong together, write unit = "{name}"',
                name,
            )


def _tells_target(values: np.ndarray, target: np.ndarray, predict: Literal["labels", "numbers"]) -> bool:
    """Returns whether a column equals the target, or another name for it."""
    if predict == "numbers":
        (x, gone), (y, _) = tables.parsed(values), tables.parsed(target)
        both = ~gone & np.isfinite(x) & np.isfinite(y)
        if both.sum() < _WORTH_COMPARING or x[both].std() == 0 or y[both].std() == 0:
            return False
        return bool(abs(np.corrcoef(x[both], y[both])[0, 1]) > 0.9999)
    texts = ["" if tables.is_missing(value) else tables.category_text(value) for value in values.tolist()]
    labels = [tables.whole_number_text(label) for label in target.tolist()]
    if len(set(texts)) > _FEW_VALUES or len(set(labels)) < 2 or len(texts) < _WORTH_COMPARING:
        return False
    rows = Counter(zip(texts, labels))
    return len(rows) == len(set(texts)) and min(Counter(texts).values()) > 1


def _between_sites(table: Table, name: str, values: np.ndarray, sites: np.ndarray) -> Iterator[Finding]:
    """Yields how a column differs between sites: its kind, its categories, and how much is missing."""
    rows = {str(site): values[sites == site] for site in dict.fromkeys(sites.tolist())}
    empty = [site for site, mine in rows.items() if tables.missing_in(mine).all()]
    if empty:
        said = f"column {name!r} has no values at {listed(empty, _SHOWN)}, where all count as missing"
        yield Finding("warning", "no values at sites", f"{said}; is it called otherwise there?")
    rows = {site: mine for site, mine in rows.items() if site not in empty}
    rows = {site: mine for site, mine in rows.items() if len(mine) >= _WORTH_COMPARING}
    if len(rows) < 2:
        return
    known = {site: mine[~tables.missing_in(mine)] for site, mine in rows.items()}
    gaps = {site: 1 - len(known[site]) / len(mine) for site, mine in rows.items()}
    most, least = max(gaps, key=gaps.__getitem__), min(gaps, key=gaps.__getitem__)
    if gaps[most] - gaps[least] > _MISSING_APART:
        said = f"{gaps[most]:.0%} of the values are missing at {most}, {gaps[least]:.0%} at {least}"
        why = "a model may learn the site from it"
        yield Finding("warning", "missing values differ", f"column {name!r}: {said}; {why}")
    kinds = {site: _kind_at(mine, name, table.where) for site, mine in known.items() if len(mine)}
    telling = {site: kind for site, kind in kinds.items() if _has_two_values(known[site])}  # "f" alone may mean "no"
    if len(set(telling.values())) > 1:
        at = {kind: listed([s for s, k in telling.items() if k == kind], _SHOWN) for kind in telling.values()}
        said = "; ".join(f"{kind} at {some}" for kind, some in at.items())
        sentence = f"column {name!r} is not the same everywhere: {said}; write it in the same way"
        yield Finding("warning", "kinds differ", sentence)
    if list(kinds.values()) == ["category"] * len(rows):
        yield from _categories_apart(name, known)


def _categories_apart(name: str, known: Mapping[str, np.ndarray]) -> Iterator[Finding]:
    """Yields the sites of which most categories are found at no other site."""
    texts_of = {site: {tables.category_text(value) for value in values.tolist()} for site, values in known.items()}
    held = Counter(text for texts in texts_of.values() for text in texts)
    for site, texts in texts_of.items():
        alone = sorted(text for text in texts if held[text] == 1)
        if len(alone) > len(texts) / 2:
            said = f"{listed(alone, _SHOWN)}, which no other site has; perhaps another spelling"
            yield Finding("warning", "categories differ", f"column {name!r} at {site}: {said}")


def _has_two_values(values: np.ndarray) -> bool:
    return len({tables.category_text(value) for value in values.tolist()}) > 1


def _kind_at(values: np.ndarray, name: str, file: str) -> str:
    try:
        return tables.kind_of(values, name, file)
    except BadInput:
        return "mixed"


def check_sites(sites: Sequence[Site]) -> Iterator[Finding]:
    """Yields what looks wrong with the samples of sites, of whatever kind they are."""
    named = {site.name or f"node {i}": site for i, site in enumerate(sites)}
    named = dict(zip(named, with_units(list(named.values()))))
    train = {name: Samples.of(site.train, name) for name, site in named.items()}
    test = {name: Samples.of(site.test, name) for name, site in named.items() if site.test is not None}
    columns = {
        name: [len(column.inputs) for column in site.table.preprocessing.columns] if site.table else []
        for name, site in named.items()
    }
    yield from _duplicates(train, test, columns)
    timed = any(site.table and site.table.grouped.times is not None for site in sites)
    more = "hold out more (test_share in [data])"
    more += "" if timed else ", or repeat the split (splits = 10 at the top of the file)"
    yield from _few_units(train, test, more)
    for name in named:
        if name not in test:
            yield Finding("warning", "no test rows", f"{name} has no test rows, so that it will not be measured")
        for kind, sets in (("training", train), ("test", test)):
            labels = sets[name].labels if name in sets else None
            if labels is not None and len(labels) > 1 and len(labels.unique()) == 1:
                said = f"the {len(labels):,} {kind} rows of {name} are all of one class; is the label column right?"
                yield Finding("warning", "single class", f"{said} Some metrics are not defined there")
    labels_of = [labels for samples in train.values() if (labels := samples.labels) is not None]
    yield from _few_test_rows(test, len(labels_of) == len(train), more)
    if len(labels_of) == len(train):
        table = sites[0].table
        yield from _rare_classes(labels_of, table.preprocessing.classes if table else ())


def _few_test_rows(test: Mapping[str, Samples], classes: bool, advice: str) -> Iterator[Finding]:
    few = {name: len(samples) for name, samples in test.items() if len(samples) < FEW_TEST_ROWS}
    if few:
        least, said = min(few.values()), listed([f"{name} ({count})" for name, count in few.items()], _SHOWN)
        known = f"an accuracy from {least} rows is known to about {100 / math.sqrt(least):.0f} points only"
        why = known if classes else "a metric from so few says little"
        yield Finding("warning", "few test rows", f"few test rows at {said}; {why}; {advice}")


def _few_units(train: Mapping[str, Samples], test: Mapping[str, Samples], advice: str) -> Iterator[Finding]:
    """Yields sites with so few units that little can be said of new ones, or that none is held out in training."""
    few = {
        name: units_of(rows) for name, rows in test.items() if rows.units is not None and units_of(rows) < _FEW_UNITS
    }
    if few:
        said = listed([f"{name} ({count})" for name, count in few.items()], _SHOWN)
        yield Finding("warning", "few test units", f"few units in the test rows of {said}; {advice}")
    small = [name for name, rows in train.items() if too_few_units(rows)]
    if small:
        said = f"fewer than {FEWEST_UNITS} units to train on at {listed(small, _SHOWN)}"
        yield Finding("warning", "few units", f"{said}; no rows are held out there for weights and own models")


def _rare_classes(labels: Sequence[Tensor], names: Sequence[str]) -> Iterator[Finding]:
    counts = sum((Counter(of_site.tolist()) for of_site in labels), Counter())
    total = sum(counts.values())
    for label, count in sorted(counts.items()):
        if count < _RARE * total and len(counts) <= _FEW_VALUES:
            name = repr(names[label]) if names else label
            said = f"class {name} has {count:,} of {total:,} training rows ({count / total:.1%})"
            advice = 'accuracy hides how it does: judge by primary = "auroc" or "f1", or weigh classes in the loss'
            yield Finding("warning", "rare class", f"{said}; {advice}")


def _duplicates(
    train: Mapping[str, Samples], test: Mapping[str, Samples], columns: Mapping[str, Sequence[int]]
) -> Iterator[Finding]:
    """Yields rows that are there twice: within a site's training rows, in training and test rows, and at two sites.

    Args:
        train: The training rows of the sites, by name.
        test: Their test rows.
        columns: How many inputs each column of a table became, by site.
    """
    where: dict[bytes, set[str]] = defaultdict(set)
    for name, samples in train.items():
        keys = _keys(samples)
        for key in keys:
            where[key].add(name)
        # Within a unit, equal rows may be repeated measurements.
        units = samples.some().units
        apart = keys if units is None else [key for _, key in {*zip(units.tolist(), keys)}]
        if again := len(apart) - len(set(keys)):
            said = f"{again:,} of {len(keys):,} training rows of {name} repeat others; remove them if they are mistakes"
            yield Finding("warning", "duplicate rows", said)
    shared = Counter(tuple(sorted(names)) for names in where.values() if len(names) > 1)
    for names, count in shared.most_common(_SHOWN):
        chance = _is_chance(count, train[names[0]], train[names[1]], columns[names[0]], len(train) ** 2)
        said = f"{count:,} training rows are the same at {listed(names, _SHOWN)}"
        yield Finding("warning", "same rows at sites", f"{said}; {_CHANCE if chance else 'did they copy?'}")
    for name, samples in test.items():
        test_keys = _keys(samples)
        holders = Counter(holder for key in test_keys for holder in where.get(key, ()))
        copies = {name: holders.pop(name, 0), **dict(holders.most_common(1))}
        for holder, count in copies.items():
            if not count:
                continue
            looks, whose = (len(train), "its") if holder == name else (len(train) ** 2, f"{holder}'s")
            few = count <= _BY_CHANCE * len(samples)  # they do not mislead
            said = f"{count:,} of {len(test_keys):,} test rows of {name} are also among {whose} training rows"
            if few or _is_chance(count, samples, train[holder], columns[name], looks):
                yield Finding("warning", _COPIED, f"{said}; {_CHANCE}")
            else:
                yield Finding("error", _COPIED, f"{said}; {_TOO_GOOD}")


def _is_chance(count: int, rows: Samples, train: Samples, columns: Sequence[int], looks: int) -> bool:
    """Returns whether that many rows may equal a training row by chance, in one of these looks. One or two say nothing.

    It compares with rows of which every column is drawn by itself, with the values that the training rows have. Columns
    that depend on each other give more than expected of independent ones, hence the factor.

    Args:
        count: How many are equal.
        rows: The test rows, or the rows of another site.
        train: The training rows.
        columns: How many inputs each column of a table became; with none, every input is a column.
        looks: How often such rows are looked for.
    """
    if count < _COPIES:
        return True
    inputs, others = (_by_column(samples.some(), columns) for samples in (train, rows))
    logs = np.zeros(len(others[0]))
    for values, theirs in zip(inputs, others):
        counts = Counter(map(bytes, np.ascontiguousarray(values)))
        found = np.array([counts[bytes(row)] for row in np.ascontiguousarray(theirs)])
        logs += np.log(np.maximum(found - 1, 1e-300) / len(values))  # without the row that may be a copy
    expected = float(-np.expm1(len(inputs[0]) * np.log1p(-np.minimum(np.exp(logs), 1 - 1e-12))).sum())
    return bool(expected > 0 and pdtrc(count - 1, 2 * expected) > _UNLIKELY / looks)


def _by_column(samples: Samples, columns: Sequence[int]) -> list[np.ndarray]:
    """Returns the numbers (rows, ...) of each column, and of each target."""
    inputs, targets = ([_flat(part) for part in trees.leaves(tree)] for tree in (samples.inputs, samples.targets))
    if len(inputs) == 1 and sum(columns) == inputs[0].shape[1]:
        return np.split(inputs[0], np.cumsum(columns)[:-1], axis=1) + targets
    return [column for part in inputs for column in np.split(part, part.shape[1], axis=1)] + targets


def _flat(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(len(tensor), -1).contiguous().numpy()


def _keys(samples: Samples) -> list[bytes]:
    """Returns for each sample something that is equal for equal ones."""
    samples = samples.some()
    parts = [_flat(tensor) for tree in (samples.inputs, samples.targets) for tensor in trees.leaves(tree)]
    return [b"".join(part.tobytes() for part in row) for row in zip(*parts)]
