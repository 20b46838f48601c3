"""What sites announce: every kind with what it tells, its fields with their types and ranges, and what these must mean
together. A new kind is one entry of `KINDS`.

Other sites' numbers are hostile input. This is the one wall that they pass, when they arrive and when they are read
from disk again: nothing is computed from a body, and nothing of it is written, before `wrong` finds nothing wrong."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fairmesh.errors import BadInput

Field = Callable[[Any], bool]

LARGEST_COUNT = 1 << 53
SAMPLES_AT_MOST = 10**12  # so that its product with the size of an input stays exact, and intervals are quick
_FINITE = 1.7e308
FOLLOW_AT_MOST = TABLE_AT_MOST = 1 << 18  # bytes; `follow` has all sites' signatures
_SHORT = 200  # characters of a string that is shown to people
_DEEP = 24  # tables within tables, of any body
_ENTRIES = 1 << 14  # of a list or table; the bytes of an announcement are bounded too

CELLS = ("both", "only_common", "only_local", "neither")  # which of the two models answer a test row right
FEWEST, FEW = 5, "<5"  # the smallest count that is told, and what is told of a smaller one
ROWS_AT_LEAST = 20  # of a test set; with fewer, counts would say much about single rows
VERDICTS = ("better", "worse", "unclear")  # of a comparison of which no number is told
FURTHER = ("weight", "bits", "bytes")  # what a measured row has after its metrics
STATISTICS = (1e-30, 1e15)  # the smallest and the largest number in a site's statistics, unless it is 0
INPUTS_AT_MOST, CLASSES_AT_MOST = 64, 100  # of a site's statistics


def count(low: int = 0, high: int = LARGEST_COUNT) -> Field:
    """A whole number; true and false are none."""
    return lambda value: type(value) is int and low <= value <= high


def number(low: float = -_FINITE, high: float = _FINITE, smallest: float = 0.0) -> Field:
    """A finite number of either sign, unless a range is given. One that is closer to 0 than `smallest` must be 0."""

    def holds(value: Any) -> bool:
        if type(value) not in (int, float) or not low <= value <= high:
            return False
        return (type(value) is float or abs(value) <= LARGEST_COUNT) and (value == 0 or abs(value) >= smallest)

    return holds


def text(at_most: int = _SHORT, printable: bool = True) -> Field:
    """A string of bounded length that may be shown to people."""
    return lambda value: isinstance(value, str) and len(value) <= at_most and (value.isprintable() or not printable)


_NAME = text()


def one_of(*values: Any) -> Field:
    """One of some values."""
    return lambda value: any(type(value) is type(allowed) and value == allowed for allowed in values)


def maybe(of: Field) -> Field:
    """Something, or null."""
    return lambda value: value is None or of(value)


def list_of(of: Field, at_most: int = _ENTRIES, at_least: int = 0) -> Field:
    """A list of as many entries as allowed, all of one form."""
    return lambda value: isinstance(value, list) and at_least <= len(value) <= at_most and all(map(of, value))


def table_of(of: Field, at_most: int = _ENTRIES, keys: Field = _NAME) -> Field:
    """A table from names to entries of one form."""
    return lambda value: (
        isinstance(value, dict) and len(value) <= at_most and all(map(keys, value)) and all(map(of, value.values()))
    )


def record(**fields: Field) -> Field:
    """A table with exactly these fields."""
    return lambda value: isinstance(value, dict) and value.keys() == fields.keys() and not _wrong_fields(fields, value)


def _sample_form(value: Any, depth: int = 0) -> bool:
    """Returns whether this is a dtype and the shape of one sample, or a list or table of such, of which samples have
    several."""
    parts, deep = 64, 4
    if isinstance(value, list) and value and isinstance(value[0], str):
        return len(value) == 2 and _NAME(value[0]) and list_of(count(high=1 << 32), 8)(value[1])
    if not isinstance(value, dict | list) or not 1 <= len(value) <= parts or depth >= deep:
        return False
    names = value if isinstance(value, dict) else ()
    return all(map(_NAME, names)) and all(_sample_form(part, depth + 1) for part in _within(value))


def _table(value: Any) -> bool:
    """Returns whether this is what a site tells about its table."""
    from fairmesh.data.sums import TableSums

    try:
        return isinstance(value, dict) and TableSums.from_table(value) is not None
    except BadInput:
        return False


def _row(value: Any) -> bool:
    """Returns whether this is a round with the numbers that were measured after it."""
    return list_of(maybe(number()), 1000, 1)(value) and count()(value[0])


_NAMES = list_of(text())
_GENERATION = count()
_PROPOSAL: dict[str, Field] = {
    "generation": _GENERATION,
    "sites": _NAMES,
    "round": maybe(count()),
    "restored": _NAMES,
}
_CLAIM: dict[str, Field] = {"begun": list_of(list_of(count(), 4, 4), 256), "outputs": count()}
_VOTES = table_of(count())
_COMMIT = record(**_CLAIM, number=count(), signature=text())
_MOMENT = number(-LARGEST_COUNT, LARGEST_COUNT)
_WEIGHT = number(-LARGEST_COUNT, LARGEST_COUNT)  # estimates of lambda may be a little below 0
_STATISTICS = number(-STATISTICS[1], STATISTICS[1], STATISTICS[0])

# What the fields of a body must mean together. Each function returns what is wrong, as `wrong` does.


def _wrong_statistics(body: Mapping[str, Any]) -> str:
    inputs = len(body["mean"])
    if len(body["spread"]) != inputs:
        return f"spread of {len(body['spread'])} inputs and mean of {inputs}"
    return "" if len(body["relation"]) in (0, inputs) else f"relation of {len(body['relation'])} of {inputs} inputs"


def _wrong_rows(body: Mapping[str, Any]) -> str:
    columns = body["columns"]
    if tuple(columns[-len(FURTHER) :]) != FURTHER:
        return "columns that are not those of measured rows"
    for before, row in zip([[-1], *body["rows"]], body["rows"]):
        wrong = wrong_row(columns, row)
        if wrong:
            return f"rows of which that of round {row[0]} has {wrong}"
        if row[0] <= before[0]:
            return f"rows that go from round {before[0]} to {row[0]}"
    kept = body["kept"] or []
    return "" if kept == sorted(set(kept)) else "kept rounds that are not in order"


def wrong_row(columns: Collection[str], row: Any) -> str:
    """Returns what is wrong with a measured row, of a site or on disk, "" if nothing is: it has a round and a number
    per column, and the traffic is known and not negative."""
    if not _row(row) or len(row) != 1 + len(columns):
        return f"another form than a round and {len(columns)} numbers"
    weight, *traffic = row[-len(FURTHER) :]
    if not maybe(_WEIGHT)(weight):
        return "a weight that is too large"
    return "" if all(map(number(0, 2.0**63), traffic)) else "traffic that is negative, too large or not known"


def _wrong_cells(body: Mapping[str, Any]) -> str:
    cells, verdict, why_not = body["cells"], body["verdict"], body["why_not"]
    if bool(cells) + bool(verdict) + bool(why_not) > 1:
        return "cells, verdict and why_not, of which it can have one only,"
    if cells and (cells.keys() != set(CELLS) or most_rows(cells) < ROWS_AT_LEAST):
        return f"cells that are not the counts of {', '.join(CELLS)} in {ROWS_AT_LEAST} rows or more"
    return ""


def most_rows(cells: Mapping[str, int | str]) -> int:
    """Returns of how many rows counts can be at most, of which small ones are not told."""
    return sum(FEWEST - 1 if isinstance(count, str) else count for count in cells.values())


@dataclass(frozen=True)
class Announced:
    """A kind of announcement, declared once: how it is checked, what operators read about it, and how it is filled.

    Args:
        tells: What it tells about a site, in words, for those who decide whether to take part (`fairmesh mesh show`).
        fields: The fields that its body must have, with the type and the range of each.
        meaning: Returns which fields contradict each other, as `wrong` does. Default: none.
        at_most: How many bytes an announcement may have. Default: 16 KiB.
        told: (a `Node`) -> the values of the fields, and maybe others. They are announced every few seconds, and
            `fairmesh status` shows them for every site. Default: None, the code of a run's step announces it.
    """

    tells: str
    fields: Mapping[str, Field]
    meaning: Callable[[Mapping[str, Any]], str] = lambda body: ""
    at_most: int = 1 << 14
    told: Callable[[Any], Mapping[str, Any]] | None = None


KINDS = {
    "facts": Announced(
        "number of samples, shape and type of inputs and targets, number of outputs, name of its group, and whether "
        "it has test and validation data",
        fields={
            "samples": count(1, SAMPLES_AT_MOST),
            "inputs": _sample_form,
            "targets": _sample_form,
            "outputs": count(),
            "test": one_of(True, False),
            "validation": one_of(True, False),
            "group": text(),
        },
        at_most=1 << 12,
    ),
    "statistics": Announced(
        "mean and spread of each input as the model sees it, to 2 digits (with more than 64 inputs, or images: one "
        "mean and one spread of all together), the share of each class to 5 %, and the correlation of each input with "
        "the class number, to 0.1",
        fields={
            "mean": list_of(_STATISTICS, INPUTS_AT_MOST),
            "spread": list_of(number(0, STATISTICS[1], STATISTICS[0]), INPUTS_AT_MOST),
            "shares": list_of(number(0, 1, STATISTICS[0]), CLASSES_AT_MOST),
            "relation": list_of(number(-1, 1, STATISTICS[0]), INPUTS_AT_MOST),
        },
        meaning=_wrong_statistics,
    ),
    "table": Announced(
        "of a table whose columns are scaled or filled by the rows of all sites: names, kinds and settings of its "
        "columns, its labels, the categories that at least 5 of its training rows have and, unless "
        "announce_statistics = false, the mean, the sum of squared deviations and the number of values of each column "
        "of numbers, and of missing values from 5 on",
        fields={"sums": _table, "fitted_by": _NAMES},
        at_most=TABLE_AT_MOST,
    ),
    "ready": Announced(
        "a digest of what all sites said about their data",
        fields={"facts": text()},
    ),
    "status": Announced(
        "round, activity, latest metric on its own data, weight, sites it waits for, and bytes sent, every few seconds",
        fields={
            "round": count(),
            "activity": text(),
            "metric": maybe(number()),
            "metric_round": maybe(count()),
            "weight": maybe(_WEIGHT),
            "waiting_for": table_of(_MOMENT),
            "bytes_out": count(),
            "time": _MOMENT,
        },
        at_most=1 << 13,
        told=lambda node: node.oversight.seen,
    ),
    "measured": Announced(
        "every few rounds (measure_every): the metrics of its own model on its own held-out data, its weight and its "
        "traffic; at the end, of which of these rounds it keeps its model",
        fields={
            "generation": _GENERATION,
            "columns": list_of(text(), 999),
            "rows": list_of(_row),
            "complete": count(),
            "kept": maybe(list_of(count())),
        },
        meaning=_wrong_rows,
        at_most=1 << 16,
    ),
    "refusing": Announced(
        "whose messages it refuses, and why",
        fields={"sites": table_of(record(reason=text(), since=_MOMENT))},
    ),
    "diverged": Announced(
        "if its numbers are no longer finite, or explode: since which round, and how large they are",
        fields={"generation": _GENERATION, "since": count(), "round": count(), "what": text()},
    ),
    "result": Announced(
        "at the end: its metrics of the common models on its own data, and the digests of its result and of all "
        "sites' metrics",
        fields={
            "generation": _GENERATION,
            "digest": text(),
            "metrics": table_of(maybe(number())),
            "measured": table_of(text()),
        },
    ),
    "versus_local": Announced(
        "at the end: how many of its test rows both the common model and one that it trained alone, only one of them, "
        "or neither answers right, counts below 5 not told; of models that predict numbers, only whether the common "
        "one is better, worse, or not clearly different; nothing of fewer than 20 rows",
        fields={
            "generation": _GENERATION,
            "cells": table_of(
                lambda value: one_of(FEW)(value) or count(FEWEST, SAMPLES_AT_MOST)(value), len(CELLS), one_of(*CELLS)
            ),
            "verdict": one_of("", *VERDICTS),
            "why_not": text(),
        },
        meaning=_wrong_cells,
    ),
    "certificate": Announced(
        "its certificate",
        fields={"pem": text(1 << 12, printable=False)},
        at_most=1 << 12,
    ),
    "vote": Announced(
        "its votes to continue without a site, to restore one, or to go back to a round",
        fields=_PROPOSAL,
    ),
    "commit": Announced(
        "that it is bound to such votes, and its round",
        fields=_PROPOSAL | {"votes": _VOTES, **_CLAIM},
    ),
    "follow": Announced(
        "what was decided so",
        fields={"certificates": list_of(record(**_PROPOSAL, votes=_VOTES, commits=table_of(_COMMIT)))},
        at_most=FOLLOW_AT_MOST,
    ),
}


TOLD = {kind: announced.told for kind, announced in KINDS.items() if announced.told is not None}
SHOWN = [field for kind in TOLD if kind != "status" for field in KINDS[kind].fields]  # columns of `status`


def wrong(kind: str, body: Mapping[str, Any], outputs: int) -> str:
    """Returns what is wrong with the body of an announcement, as words for "news with ... in it", or "" if nothing is.

    Args:
        kind: A kind of `KINDS`.
        body: The body.
        outputs: How many outputs of the model it may declare.
    """
    form = KINDS[kind].fields
    found = _wrong_fields(form, body) or next((name[:_SHORT] for name in body if name not in form), "")
    if found:
        return found
    declared = max(_outputs_in(body), default=0)
    if declared > outputs:
        return f"{declared} outputs, more than the {outputs} of this experiment,"
    return KINDS[kind].meaning(body)


def _wrong_fields(form: Mapping[str, Field], body: Mapping[str, Any]) -> str:
    return next((name for name, holds in form.items() if name not in body or not holds(body[name])), "")


def too_deep(value: Any, deep: int = _DEEP) -> bool:
    """Returns whether tables are nested deeper than in any announcement."""
    return deep < 0 or any(too_deep(inner, deep - 1) for inner in _within(value) if isinstance(inner, dict | list))


def _within(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _outputs_in(value: Any) -> Iterator[int]:
    """Yields the numbers of outputs that the body of an announcement declares, anywhere in it."""
    if isinstance(value, dict) and type(value.get("outputs")) is int:
        yield value["outputs"]
    for inner in _within(value):
        yield from _outputs_in(inner)


def shortened(words: str, at_most: int = _SHORT) -> str:
    """Returns a text of others as it may be shown to people: printable, and of bounded length."""
    return "".join(c if c.isprintable() else "?" for c in words[:at_most])
