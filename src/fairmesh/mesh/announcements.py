"""What sites announce: every kind with what it tells, its fields with their types and ranges, about whom it may speak,
what the fields must mean together, and how often it may be said. A new kind is one entry of `KINDS`.

Other sites' numbers are hostile input. This is the one wall that they pass, when they arrive and when they are read
from disk again: nothing is computed from a body, and nothing of it is written, before `wrong` finds nothing wrong."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from fairmesh.errors import BadInput

LARGEST_COUNT = 1 << 53
SAMPLES_AT_MOST = 10**12  # so that its product with the size of an input stays exact, and intervals are quick
_FINITE = 1.7e308
FOLLOW_AT_MOST = TABLE_AT_MOST = 1 << 18  # bytes; `follow` has all sites' signatures
_SHORT = 200  # characters of a string that is shown to people
_SHOWN = 60  # characters of a value that is refused
_DEEP = 24  # tables within tables, of any body
_ENTRIES = 1 << 14  # of a list or table; the bytes of an announcement are bounded too

CELLS = ("both", "only_common", "only_local", "neither")  # which of the two models answer a test row right
FEWEST, FEW = 5, "<5"  # the smallest count that is told, and what is told of a smaller one
ROWS_AT_LEAST = 20  # of a test set; with fewer, counts would say much about single rows
VERDICTS = ("better", "worse", "unclear")  # of a comparison of which no number is told
FURTHER = ("weight", "bits", "bytes", "sent")  # what a measured row has after its metrics; the last is no number
OUTPUTS = 10_000  # of a model, unless the experiment lists more classes
STATISTICS = (1e-30, 1e15)  # the smallest and the largest number in a site's statistics, unless it is 0
INPUTS_AT_MOST, CLASSES_AT_MOST = 64, 100  # of a site's statistics


@dataclass(frozen=True)
class Terms:
    """What all sites of a mesh have agreed on before anything is announced. It is the same at every site and does not
    change, so that what one site accepts, those to which it passes it on accept too.

    Args:
        neighbours: Of every site that the mesh ever had, those of the mesh file.
        rounds: Of the run.
        outputs: How many outputs of the model a site may declare.
        site: Who speaks.
    """

    neighbours: Mapping[str, Collection[str]] = field(default_factory=dict)
    rounds: int = LARGEST_COUNT
    outputs: int = OUTPUTS
    site: str = ""

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.neighbours)

    def by(self, site: str) -> "Terms":
        """Returns the same, for what a site says."""
        return replace(self, site=site)


_NO_TERMS = Terms()


@dataclass(frozen=True)
class Field:
    """A field of an announcement: what it may hold, and how tests draw such values.

    Args:
        holds: (value, terms) -> whether the value is one of this field.
        draw: (random, terms) -> such a value.
        about: Whom a value names, in words; "" if nobody but the site that says it.
    """

    holds: Callable[[Any, Terms], bool]
    draw: Callable[[Random, Terms], Any]
    about: str = ""

    def __call__(self, value: Any, terms: Terms = _NO_TERMS) -> bool:
        return self.holds(value, terms)


def _between(draws: Random, low: float, high: float) -> float:
    """Returns a number of a range: an end of it, one near 0, or any."""
    near = draws.uniform(max(low, -10.0), min(high, 10.0)) if low <= 10 and high >= -10 else low
    return draws.choice([low, high, near, near, near, draws.uniform(low / 2, high / 2)])


def count(low: int = 0, high: int = LARGEST_COUNT) -> Field:
    """A whole number; true and false are none."""
    return _count(lambda terms: range(low, high + 1))


def _count(allowed: Callable[[Terms], range]) -> Field:
    def draw(draws: Random, terms: Terms) -> int:
        numbers = allowed(terms)
        return draws.choice([numbers[0], numbers[-1], numbers[draws.randrange(min(len(numbers), 50))]])

    return Field(lambda value, terms: type(value) is int and value in allowed(terms), draw)


ROUND = _count(lambda terms: range(terms.rounds + 1))
NUMBER_OF_OUTPUTS = _count(lambda terms: range(terms.outputs + 1))


def number(low: float = -_FINITE, high: float = _FINITE, smallest: float = 0.0) -> Field:
    """A finite number of either sign, unless a range is given. One that is closer to 0 than `smallest` must be 0."""

    def holds(value: Any, terms: Terms = _NO_TERMS) -> bool:
        if type(value) not in (int, float) or not low <= value <= high:
            return False
        return (type(value) is float or abs(value) <= LARGEST_COUNT) and (value == 0 or abs(value) >= smallest)

    def draw(draws: Random, terms: Terms) -> float:
        value = _between(draws, low, high)
        return value if holds(value) else 0.0 if low <= 0 <= high else high

    return Field(holds, draw)


def text(at_most: int = _SHORT, printable: bool = True) -> Field:
    """A string of bounded length that may be shown to people."""
    return Field(
        lambda value, terms: (
            isinstance(value, str) and len(value) <= at_most and (value.isprintable() or not printable)
        ),
        lambda draws, terms: draws.choice(["", "a", "loss", "<b>", "\N{SNOWMAN}", "x" * at_most]),
    )


_NAME = text()


DIGEST = Field(  # a SHA-256, as 64 hex digits
    lambda value, terms: isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef"),
    lambda draws, terms: f"{draws.getrandbits(256):064x}",
)


def one_of(*values: Any) -> Field:
    """One of some values."""
    return Field(
        lambda value, terms: any(type(value) is type(allowed) and value == allowed for allowed in values),
        lambda draws, terms: draws.choice(values),
    )


def _named(allowed: Callable[[Terms], Collection[str]], about: str) -> Field:
    return Field(
        lambda value, terms: isinstance(value, str) and value in allowed(terms),
        lambda draws, terms: draws.choice([*allowed(terms)]),
        about,
    )


SITE = _named(lambda terms: terms.neighbours, "sites of the mesh")
NEIGHBOUR = _named(lambda terms: terms.neighbours.get(terms.site, ()), "its neighbours")


def maybe(of: Field) -> Field:
    """Something, or null."""
    return either(one_of(None), of)


def either(*fields: Field) -> Field:
    """A value of one of some fields."""
    return Field(
        lambda value, terms: any(one.holds(value, terms) for one in fields),
        lambda draws, terms: draws.choice(fields).draw(draws, terms),
        _whom(fields),
    )


def _whom(fields: Iterable[Field]) -> str:
    return next((one.about for one in fields if one.about), "")


def _length(draws: Random, at_least: int, at_most: int) -> int:
    return min(at_most, at_least + draws.choice((0, 1, 2, 3, 9)))


def list_of(of: Field, at_most: int = _ENTRIES, at_least: int = 0) -> Field:
    """A list of as many entries as allowed, all of one form."""
    return Field(
        lambda value, terms: (
            isinstance(value, list)
            and at_least <= len(value) <= at_most
            and all(of.holds(entry, terms) for entry in value)
        ),
        lambda draws, terms: [of.draw(draws, terms) for _ in range(_length(draws, at_least, at_most))],
        of.about,
    )


def set_of(of: Field) -> Field:
    """A list of which no two entries are the same."""
    several = list_of(of)
    return Field(
        lambda value, terms: several.holds(value, terms) and len(set(value)) == len(value),
        lambda draws, terms: list(dict.fromkeys(several.draw(draws, terms))),
        of.about,
    )


def table_of(of: Field, at_most: int = _ENTRIES, keys: Field = _NAME) -> Field:
    """A table from names to entries of one form."""
    return Field(
        lambda value, terms: (
            isinstance(value, dict)
            and len(value) <= at_most
            and all(keys.holds(key, terms) and of.holds(entry, terms) for key, entry in value.items())
        ),
        lambda draws, terms: {
            keys.draw(draws, terms): of.draw(draws, terms) for _ in range(_length(draws, 0, at_most))
        },
        _whom((keys, of)),
    )


def record(**fields: Field) -> Field:
    """A table with exactly these fields."""
    return Field(
        lambda value, terms: (
            isinstance(value, dict) and value.keys() == fields.keys() and not _wrong_fields(fields, value, terms)
        ),
        lambda draws, terms: {name: one.draw(draws, terms) for name, one in fields.items()},
        _whom(fields.values()),
    )


def _is_sample_form(value: Any, depth: int = 0) -> bool:
    """Returns whether this is a dtype and the shape of one sample, or a list or table of such, of which samples have
    several."""
    parts, deep = 64, 4
    if isinstance(value, list) and value and isinstance(value[0], str):
        return len(value) == 2 and _NAME(value[0]) and list_of(count(high=1 << 32), 8)(value[1])
    if not isinstance(value, dict | list) or not 1 <= len(value) <= parts or depth >= deep:
        return False
    names = value if isinstance(value, dict) else ()
    return all(map(_NAME, names)) and all(_is_sample_form(part, depth + 1) for part in _within(value))


_SAMPLE_FORM = Field(
    lambda value, terms: _is_sample_form(value),
    lambda draws, terms: draws.choice(
        [["torch.float32", [8, 8]], ["table", []], {"a": [["torch.int64", []]]}, ["torch.float32", [1 << 32] * 8]]
    ),
)


def _is_table(value: Any, terms: Terms) -> bool:
    """Returns whether this is what a site tells about its table."""
    from fairmesh.data.sums import TableSums

    try:
        return isinstance(value, dict) and TableSums.from_table(value) is not None
    except BadInput:
        return False


def _drawn_table(draws: Random, terms: Terms) -> dict[str, Any]:
    """Returns what a site could tell about a table with a column of numbers, one of categories, and labels."""
    ages = [draws.randrange(1 << 40), draws.randrange(9), draws.uniform(-1e9, 1e9), draws.uniform(0, 1e9), []]
    wards = [f"ward {i}" for i in range(draws.choice((0, 1, 30)))]
    return {
        "plan": {
            "columns": [
                {"name": "age", "fill": "mean", "standardize": True, "indicator": True},
                {"name": "ward", "type": "category", "fill": "mean", "indicator": True},
            ],
            "target": {"name": "ill", "type": "label"},
        },
        "columns": {"age": ages, "ward": [0, draws.randrange(9), 0.0, 0.0, wards]},
        "target": [0, 0, 0.0, 0.0, ["0", "1"]],
    }


_TABLE = Field(_is_table, _drawn_table)


_NUMBERS = list_of(maybe(number()), 1000, 1)
_ROW = Field(  # a round, the numbers that were measured after it, and the running hash of the messages sent so far
    lambda value, terms: (
        isinstance(value, list) and _NUMBERS(value[:-1]) and ROUND(value[0], terms) and maybe(DIGEST)(value[-1])
    ),
    lambda draws, terms: [
        ROUND.draw(draws, terms),
        *_NUMBERS.draw(draws, terms),
        maybe(DIGEST).draw(draws, terms),
    ],
)


_GENERATION = count()
_PROPOSAL: dict[str, Field] = {
    "generation": _GENERATION,
    "sites": set_of(SITE),
    "round": maybe(ROUND),
    "restored": set_of(SITE),
}
_CLAIM: dict[str, Field] = {"begun": list_of(list_of(count(), 4, 4), 256), "outputs": NUMBER_OF_OUTPUTS}
_VOTES = table_of(count(), keys=SITE)
_COMMIT = record(**_CLAIM, number=count(), signature=text())
_MOMENT = number(-LARGEST_COUNT, LARGEST_COUNT)
_WEIGHT = number(-LARGEST_COUNT, LARGEST_COUNT)  # estimates of lambda may be a little below 0
_UNLIKE = table_of(record(since=ROUND, round=ROUND, signed=DIGEST, other=DIGEST, both=one_of(True, False)), keys=SITE)
_STATISTICS = number(-STATISTICS[1], STATISTICS[1], STATISTICS[0])

# What the fields of a body must mean together. Each function returns what is wrong, as `wrong` does.


def _wrong_statistics(body: Mapping[str, Any], terms: Terms) -> str:
    inputs = len(body["mean"])
    if len(body["spread"]) != inputs:
        return f"spread of {len(body['spread'])} inputs and mean of {inputs}"
    return "" if len(body["relation"]) in (0, inputs) else f"relation of {len(body['relation'])} of {inputs} inputs"


def _wrong_rows(body: Mapping[str, Any], terms: Terms) -> str:
    columns = body["columns"]
    if tuple(columns[-len(FURTHER) :]) != FURTHER:
        return "columns that are not those of measured rows"
    for before, row in zip([[-1], *body["rows"]], body["rows"]):
        wrong = wrong_row(columns, row, terms)
        if wrong:
            return f"rows of which that of round {row[0]} has {wrong}"
        if row[0] <= before[0]:
            return f"rows that go from round {before[0]} to {row[0]}"
    kept = body["kept"] or []
    return "" if kept == sorted(set(kept)) else "kept rounds that are not in order"


def wrong_row(columns: Collection[str], row: Any, terms: Terms = _NO_TERMS) -> str:
    """Returns what is wrong with a measured row, of a site or on disk, "" if nothing is: it has a round and a number
    per column but the last, which is a hash, and the traffic is known and not negative."""
    if not _ROW(row, terms) or len(row) != 1 + len(columns):
        return f"another form than a round, {len(columns) - 1} numbers and a hash"
    weight, *traffic, _ = row[-len(FURTHER) :]
    if not maybe(_WEIGHT)(weight):
        return "a weight that is too large"
    return "" if all(map(number(0, 2.0**63), traffic)) else "traffic that is negative, too large or not known"


def _wrong_divergence(body: Mapping[str, Any], terms: Terms) -> str:
    return "" if body["since"] <= body["round"] else f"since = {body['since']}, after its round {body['round']},"


def _wrong_contradictions(sites: Mapping[str, Any], terms: Terms) -> str:
    """Only a neighbour knows what a site has sent it; what it has signed, everybody."""
    for site, found in sites.items():
        if not found["both"] and not NEIGHBOUR(site, terms):
            return f"messages of {site}, which is not its neighbour,"
        if found["since"] >= found["round"] or found["signed"] == found["other"]:
            return f"no contradiction of {site}"
    return ""


def _wrong_cells(body: Mapping[str, Any], terms: Terms) -> str:
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
        meaning: (body, terms) -> which fields contradict each other, as `wrong` does. Default: none.
        at_most: How many bytes an announcement may have. Default: 16 KiB.
        per_second: How many of one site a neighbour may pass on, on average. What exceeds this is dropped, whatever the
            site says of other kinds. Default: 0.5.
        at_once: How many after a pause. Default: 20.
        told: (a `Node`) -> the values of the fields, and maybe others. They are announced every few seconds, and
            `fairmesh status` shows them for every site. Default: None, the code of a run's step announces it.
    """

    tells: str
    fields: Mapping[str, Field]
    meaning: Callable[[Mapping[str, Any], Terms], str] = lambda body, terms: ""
    at_most: int = 1 << 14
    per_second: float = 0.5
    at_once: float = 20.0
    told: Callable[[Any], Mapping[str, Any]] | None = None

    @property
    def about(self) -> str:
        """Returns about whom a site may say this, besides itself, in words; "" if about nobody else."""
        return _whom(self.fields.values())


KINDS = {
    "facts": Announced(
        "number of samples, shape and type of inputs and targets, number of outputs, name of its group, and whether "
        "it has test and validation data",
        fields={
            "samples": count(1, SAMPLES_AT_MOST),
            "inputs": _SAMPLE_FORM,
            "targets": _SAMPLE_FORM,
            "outputs": NUMBER_OF_OUTPUTS,
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
        fields={"sums": _TABLE, "fitted_by": set_of(SITE)},
        at_most=TABLE_AT_MOST,
        per_second=0.05,
    ),
    "ready": Announced(
        "a digest of what all sites said about their data",
        fields={"facts": text()},
    ),
    "status": Announced(
        "round, activity, latest metric on its own data, weight, sites it waits for, of how many rounds it has sent "
        "its messages, and bytes sent, every few seconds",
        fields={
            "round": ROUND,
            "rounds_sent": ROUND,
            "activity": text(),
            "metric": maybe(number()),
            "metric_round": maybe(ROUND),
            "weight": maybe(_WEIGHT),
            "waiting_for": table_of(_MOMENT, keys=NEIGHBOUR),
            "bytes_out": count(),
            "time": _MOMENT,
        },
        at_most=1 << 13,
        per_second=2.0,
        told=lambda node: node.oversight.seen,
    ),
    "measured": Announced(
        "every few rounds (measure_every): the metrics of its own model on its own held-out data, its weight, its "
        "traffic and a running hash of the messages that it has sent, by which its neighbours see whether it sends all "
        "the same; at the end, of which of these rounds it keeps its model",
        fields={
            "generation": _GENERATION,
            "columns": list_of(text(), 999),
            "rows": list_of(_ROW),
            "complete": count(),
            "kept": maybe(list_of(ROUND)),
        },
        meaning=_wrong_rows,
        at_most=1 << 16,
        per_second=1.0,
    ),
    "refusing": Announced(
        "whose messages it refuses, why, and the SHA-256 of the refused one",
        fields={
            "sites": table_of(
                record(reason=text(), since=_MOMENT, step=maybe(count()), digest=maybe(DIGEST)), keys=NEIGHBOUR
            )
        },
    ),
    "answers": Announced(
        "which of its messages that others refuse it has sent as they say, and which not",
        fields={"refused": table_of(record(digest=DIGEST, sent=one_of(True, False)), keys=NEIGHBOUR)},
    ),
    "contradicted": Announced(
        "which neighbours have sent it other messages than they have signed, or which sites have signed two hashes of "
        "them, and in which rounds",
        fields={"generation": _GENERATION, "sites": _UNLIKE},
        meaning=lambda body, terms: _wrong_contradictions(body["sites"], terms),
    ),
    "diverged": Announced(
        "if its numbers are no longer finite, or explode: since which round, and how large they are",
        fields={"generation": _GENERATION, "since": ROUND, "round": ROUND, "what": text()},
        meaning=_wrong_divergence,
    ),
    "result": Announced(
        "at the end: its metrics of the common models on its own data, the digests of its result and of all sites' "
        "metrics, and which neighbours have sent it other messages than they have signed",
        fields={
            "generation": _GENERATION,
            "digest": text(),
            "metrics": table_of(maybe(number())),
            "measured": table_of(text(), keys=SITE),
            "contradicted": _UNLIKE,
        },
        meaning=lambda body, terms: _wrong_contradictions(body["contradicted"], terms),
    ),
    "versus_local": Announced(
        "at the end: how many of its test rows both the common model and one that it trained alone, only one of them, "
        "or neither answers right, counts below 5 not told; of models that predict numbers, only whether the common "
        "one is better, worse, or not clearly different; nothing of fewer than 20 rows",
        fields={
            "generation": _GENERATION,
            "cells": table_of(either(one_of(FEW), count(FEWEST, SAMPLES_AT_MOST)), len(CELLS), one_of(*CELLS)),
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
        per_second=0.1,
    ),
}


TOLD = {kind: announced.told for kind, announced in KINDS.items() if announced.told is not None}
SHOWN = [field for kind in TOLD if kind != "status" for field in KINDS[kind].fields]  # columns of `status`


# Bytes per second that a member can make each of its neighbours pass on.
BYTES_PER_SECOND = sum(announced.at_most * announced.per_second for announced in KINDS.values())


def wrong(kind: str, body: Mapping[str, Any], terms: Terms) -> str:
    """Returns what is wrong with the body of an announcement, as words for "news with ... in it", or "" if nothing is.

    Args:
        kind: A kind of `KINDS`.
        body: The body.
        terms: What the sites have agreed on, and who says this.
    """
    form = KINDS[kind].fields
    found = _wrong_fields(form, body, terms) or next((name[:_SHORT] for name in body if name not in form), "")
    return found or KINDS[kind].meaning(body, terms)


def _wrong_fields(form: Mapping[str, Field], body: Mapping[str, Any], terms: Terms) -> str:
    """Returns the first field that is missing or holds something else than it may, with its value."""
    for name, of in form.items():
        if name not in body:
            return f"no {name}"
        if not of.holds(body[name], terms):
            return f"{name} = {shortened(repr(body[name]), _SHOWN)}"
    return ""


def too_deep(value: Any, deep: int = _DEEP) -> bool:
    """Returns whether tables are nested deeper than in any announcement."""
    return deep < 0 or any(too_deep(inner, deep - 1) for inner in _within(value) if isinstance(inner, dict | list))


def _within(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def shortened(words: str, at_most: int = _SHORT) -> str:
    """Returns a text of others as it may be shown to people: printable, and of bounded length."""
    return "".join(c if c.isprintable() else "?" for c in words[:at_most])
