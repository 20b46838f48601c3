"""What sites announce: every kind with what it tells, its fields with their types and ranges, about whom it may speak,
what the fields must mean together, and how often it may be said. A new kind is one entry of `KINDS`.

Other sites' numbers are hostile input. This is the one wall that they pass, when they arrive and when they are read
from disk again: nothing is computed from a body, and nothing of it is written, before `wrong` finds nothing wrong."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.mesh.fields import (
    DIGEST,
    FINITE,
    LARGEST_COUNT,
    METRIC,
    NEIGHBOUR,
    NUMBER_OF_OUTPUTS,
    ROUND,
    SITE,
    Field,
    Terms,
    count,
    either,
    in_order,
    list_of,
    maybe,
    number,
    one_of,
    record,
    set_of,
    shortened,
    table_of,
    text,
    whom,
    within,
    wrong_field,
)

SAMPLES_AT_MOST = 10**12  # so that its product with the size of an input stays exact, and intervals are quick
FOLLOW_AT_MOST = TABLE_AT_MOST = 1 << 18  # bytes; `follow` has all sites' signatures

CELLS = ("both", "only_common", "only_local", "neither")  # which of the two models answer a test row right
FEWEST, FEW = 5, "<5"  # the smallest count that is told, and what is told of a smaller one
ROWS_AT_LEAST = 20  # of a test set; with fewer, counts would say much about single rows
VERDICTS = ("better", "worse", "unclear")  # of a comparison of which no number is told
FURTHER = ("weight", "bits", "bytes", "sent")  # what a measured row has after its metrics; the last is a hash
STATISTICS = (1e-30, 1e15)  # the smallest and the largest number in a site's statistics, unless it is 0
INPUTS_AT_MOST, CLASSES_AT_MOST = 64, 100  # of a site's statistics
QUIET_AT_MOST_S = 3600.0  # that a site may be silent without having said so


def _is_sample_form(value: Any, depth: int = 0) -> bool:
    """Returns whether this is a dtype and the shape of one sample, or a list or table of such, of which samples have
    several."""
    parts, deep = 64, 4
    if isinstance(value, list) and value and isinstance(value[0], str):
        return len(value) == 2 and text()(value[0]) and list_of(count(high=1 << 32), 8)(value[1])
    if not isinstance(value, dict | list) or not 1 <= len(value) <= parts or depth >= deep:
        return False
    names = value if isinstance(value, dict) else ()
    return all(map(text(), names)) and all(_is_sample_form(part, depth + 1) for part in within(value))


_SAMPLE_FORM = Field(
    lambda value, terms: _is_sample_form(value),
    lambda draws, terms: draws.choice(
        [["torch.float32", [8, 8]], ["table", []], {"a": [["torch.int64", []]]}, ["torch.float32", [1 << 32] * 8]]
    ),
    "type and shape of a sample, or of each of its parts",
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
    ages = draws.choice((ages, [0, 0, 0.0, 0.0, []]))  # a site may withhold its numbers
    wards = [f"ward {i}" for i in range(draws.choice((0, 1, 30)))]
    return {
        "plan": {
            "columns": [
                {"name": "age", "fill": "mean", "standardize": True, "indicator": True},
                {"name": "ward", "type": "category", "fill": "mean", "indicator": True},
            ],
            "target": {"name": "ill", "type": "label"},
        },
        "columns": {"age": ages, "ward": [0, draws.choice((0, 9)), 0.0, 0.0, wards]},
        "target": [0, 0, 0.0, 0.0, ["0", "1", "2"][: draws.choice((0, 2, 2, 3))]],
    }


_TABLE = Field(_is_table, _drawn_table, "the plan of a table and sums over its columns")


# An entry of lambda is a share, in [0, 1]. What a site can tell is its estimate of it: gossip of compressed rows can
# make it negative, by less than 1; and weights by a shadow price sum to one only when the price has settled, so that
# all of them may be large before. Readers divide by the sum.
WEIGHT = number(-1.0, 1e9)
_TRAFFIC = number(0, 2.0**63)
_NUMBERS = list_of(maybe(number()), 1000, 1)
_MEASURED = set_of(METRIC, 999 - len(FURTHER))
_COLUMNS = Field(  # the names of what a row has after its round
    lambda value, terms: (
        isinstance(value, list)
        and tuple(value[-len(FURTHER) :]) == FURTHER
        and _MEASURED(value[: -len(FURTHER)], terms)
    ),
    lambda draws, terms: [*terms.metrics, *FURTHER],
    f"metrics of the experiment, then {', '.join(FURTHER)}",
)
_ROW = Field(  # a round, the numbers that were measured after it, and the running hash of the messages sent so far
    lambda value, terms: (
        isinstance(value, list) and _NUMBERS(value[:-1]) and ROUND(value[0], terms) and maybe(DIGEST)(value[-1])
    ),
    lambda draws, terms: [
        ROUND.draw(draws, terms),
        *(number(*_finite(limits)).draw(draws, terms) for limits in terms.metrics.values()),
        *(field.draw(draws, terms) for field in (maybe(WEIGHT), _TRAFFIC, _TRAFFIC, maybe(DIGEST))),
    ],
    "a round of the run with a number of each column but the last, which is a SHA-256 or null",
)


def _finite(limits: tuple[float, float]) -> tuple[float, float]:
    return max(limits[0], -FINITE), min(limits[1], FINITE)


_GENERATION = replace(count(), draw=lambda draws, terms: draws.choice((1, 1, 1, 2, LARGEST_COUNT)))
_ROWS = count(FEWEST, SAMPLES_AT_MOST)
_PROPOSAL: dict[str, Field] = {
    "generation": _GENERATION,
    "sites": set_of(SITE),
    "round": maybe(ROUND),
    "restored": set_of(SITE),
}
_CLAIM: dict[str, Field] = {"begun": list_of(list_of(count(), 4, 4), 256), "outputs": NUMBER_OF_OUTPUTS}
_VOTES = table_of(count(), keys=SITE)
_COMMIT = record(**_CLAIM, number=count(), signature=text())
_MOMENT = replace(number(-LARGEST_COUNT, LARGEST_COUNT), words="seconds since 1970")
_REFUSED = record(reason=text(), since=_MOMENT, step=maybe(count()), digest=maybe(DIGEST))
_CONTRADICTED = table_of(
    record(since=ROUND, round=ROUND, signed=DIGEST, other=DIGEST, both=one_of(True, False)), keys=SITE
)
_STATISTICS = number(-STATISTICS[1], STATISTICS[1], STATISTICS[0])

# What the fields of a body must mean together, which the docstrings say. Each returns what is wrong, as `wrong` does.


def _wrong_statistics(body: Mapping[str, Any], terms: Terms) -> str:
    """mean, spread and, if it is told, relation are of as many inputs"""
    inputs = len(body["mean"])
    if len(body["spread"]) != inputs:
        return f"spread of {len(body['spread'])} inputs and mean of {inputs}"
    return "" if len(body["relation"]) in (0, inputs) else f"relation of {len(body['relation'])} of {inputs} inputs"


def _wrong_rows(body: Mapping[str, Any], terms: Terms) -> str:
    """every row has a number per column: a metric within its limits, the weight from -1 to 1e9, traffic not negative"""
    wrong = {row[0]: wrong_row(body["columns"], row, terms) for row in body["rows"]}
    return next((f"rows of which that of round {done} has {what}" for done, what in wrong.items() if what), "")


def wrong_row(columns: Sequence[str], row: Any, terms: Terms) -> str:
    """Returns what is wrong with a measured row, of a site or on disk, "" if nothing is: it has a round of the run and
    a number per column but the last, and each number is one that this column can have."""
    if not _ROW(row, terms) or len(row) != 1 + len(columns):
        return f"another form than a round, {len(columns) - 1} numbers and a hash"
    *metrics, weight, bits, sent, _ = row[1:]
    impossible = [name for name, value in zip(columns, metrics) if not terms.measures(name, value)]
    if impossible:
        return f"an impossible {impossible[0]}"
    if not maybe(WEIGHT)(weight):
        return f"the weight {weight}"
    return "" if _TRAFFIC(bits) and _TRAFFIC(sent) else "traffic that is negative, too large or not known"


def _wrong_result(body: Mapping[str, Any], terms: Terms) -> str:
    """every metric is within its limits; contradicted as in `contradicted`"""
    wrong = [name for name, value in body["metrics"].items() if not terms.measures(name, value)]
    if wrong:
        return f"metrics of which {wrong[0]} = {body['metrics'][wrong[0]]} is impossible"
    return _wrong_contradictions({"sites": body["contradicted"]}, terms)


def _wrong_contradictions(body: Mapping[str, Any], terms: Terms) -> str:
    """since is before round, the hashes differ, and only neighbours are named, unless they have signed both hashes"""
    for site, hashes in body["sites"].items():
        if not hashes["both"] and not NEIGHBOUR(site, terms):
            return f"messages of {site}, which is not its neighbour,"
        if hashes["since"] >= hashes["round"] or hashes["signed"] == hashes["other"]:
            return f"no contradiction of {site}"
    return ""


def _wrong_divergence(body: Mapping[str, Any], terms: Terms) -> str:
    """since is not after round"""
    return "" if body["since"] <= body["round"] else f"since = {body['since']}, after its round {body['round']},"


def _wrong_cells(body: Mapping[str, Any], terms: Terms) -> str:
    """at most one of cells, verdict and why_not is told, and cells of at least 20 rows"""
    cells, verdict, why_not = body["cells"], body["verdict"], body["why_not"]
    if bool(cells) + bool(verdict) + bool(why_not) > 1:
        return "cells, verdict and why_not, of which it can have one only,"
    return f"cells of fewer than {ROWS_AT_LEAST} rows" if cells and most_rows(cells) < ROWS_AT_LEAST else ""


def least_rows(cells: Mapping[str, int | str]) -> int:
    """Returns of how many rows counts are at least, of which small ones are not told."""
    return sum(0 if isinstance(count, str) else count for count in cells.values())


def most_rows(cells: Mapping[str, int | str]) -> int:
    """Returns of how many rows counts can be at most, of which small ones are not told."""
    return sum(FEWEST - 1 if isinstance(count, str) else count for count in cells.values())


@dataclass(frozen=True)
class Announced:
    """A kind of announcement, declared once: how it is checked, what operators read about it, and how it is filled.

    Args:
        tells: What it tells about a site, in words, for those who decide whether to take part (`fairmesh mesh show`).
        fields: The fields that its body must have, with the type and the range of each.
        meaning: (body, terms) -> which fields contradict each other, as `wrong` does; its docstring says what they must
            mean. Default: nothing.
        at_most: How many bytes an announcement may have. Default: 16 KiB.
        per_second: How many of one site a neighbour may pass on, on average. What exceeds this is dropped, whatever the
            site says of other kinds. Default: 0.1, for what is said a few times in a run.
        at_once: How many after a pause. Default: 20.
        told: (a `Node`) -> the values of the fields, and maybe others. They are announced every few seconds, and
            `fairmesh status` shows them for every site. Default: None, the code of a run's step announces it. They go
            with the next message, or half a second later; other kinds at once.
    """

    tells: str
    fields: Mapping[str, Field]
    meaning: Callable[[Mapping[str, Any], Terms], str] = lambda body, terms: ""
    at_most: int = 1 << 14
    per_second: float = 0.1
    at_once: float = 20.0
    told: Callable[[Any], Mapping[str, Any]] | None = None

    @property
    def about(self) -> str:
        """Returns about whom a site may say this, in words."""
        return whom(self.fields.values()) or "itself"


KINDS = {
    "facts": Announced(
        "number of training, reserved, test and validation samples, shape and type of inputs and targets, number of "
        "outputs, name of its group, and what a unit of several rows is called",
        fields={
            "samples": count(1, SAMPLES_AT_MOST),
            "reserved": count(0, SAMPLES_AT_MOST),
            "inputs": _SAMPLE_FORM,
            "targets": _SAMPLE_FORM,
            "outputs": NUMBER_OF_OUTPUTS,
            "test": count(0, SAMPLES_AT_MOST),
            "validation": count(0, SAMPLES_AT_MOST),
            "group": text(),
            "unit": text(),
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
        "its messages, bytes sent, and after how many seconds it tells this again at the latest: every second to every "
        "few minutes, as it changes",
        fields={
            "round": ROUND,
            "rounds_sent": ROUND,
            "activity": text(),
            "metric": maybe(number()),
            "metric_round": maybe(ROUND),
            "weight": maybe(WEIGHT),
            "waiting_for": table_of(_MOMENT, keys=NEIGHBOUR),
            "bytes_out": count(),
            "wire_out": count(),
            "time": _MOMENT,
            "again_s": number(0, QUIET_AT_MOST_S),
        },
        at_most=1 << 13,
        per_second=2.0,
        told=lambda node: node.oversight.told,
    ),
    "measured": Announced(
        "every few rounds (measure_every): the metrics of its own model on its own held-out data, its weight, its "
        "traffic and a running hash of the messages that it has sent, by which its neighbours see whether it sends all "
        "the same; at the end, of which of these rounds it keeps its model",
        fields={
            "generation": _GENERATION,
            "columns": _COLUMNS,
            "rows": in_order(_ROW),
            "complete": count(),
            "kept": maybe(in_order(ROUND)),
        },
        meaning=_wrong_rows,
        at_most=1 << 16,
        per_second=1.0,
    ),
    "refusing": Announced(
        "whose messages it refuses, why, and the SHA-256 of the refused one",
        fields={"sites": table_of(_REFUSED, keys=NEIGHBOUR)},
        per_second=0.5,
    ),
    "answers": Announced(
        "which of its messages that others refuse it has sent as they say, and which not",
        fields={"refused": table_of(record(digest=DIGEST, sent=one_of(True, False)), keys=NEIGHBOUR)},
        per_second=0.5,
    ),
    "contradicted": Announced(
        "which neighbours have sent it other messages than they have signed, or which sites have signed two different "
        "things about them or about their kept models, and in which rounds",
        fields={"generation": _GENERATION, "sites": _CONTRADICTED},
        meaning=_wrong_contradictions,
        per_second=0.5,
    ),
    "diverged": Announced(
        "if its numbers are no longer finite, or explode: since which round, and how large they are",
        fields={"generation": _GENERATION, "since": ROUND, "round": ROUND, "what": text()},
        meaning=_wrong_divergence,
    ),
    "heard": Announced(
        "at the end: digests of the metrics and kept models that each site has told it, which all sites compare",
        fields={"generation": _GENERATION, "sites": table_of(text(), keys=SITE)},
    ),
    "result": Announced(
        "at the end: its metrics of the common models on its own data, the digests of its result and of all sites' "
        "metrics, and which neighbours have sent it other messages than they have signed",
        fields={
            "generation": _GENERATION,
            "digest": text(),
            "metrics": table_of(maybe(number()), keys=METRIC),
            "measured": table_of(text(), keys=SITE),
            "contradicted": _CONTRADICTED,
        },
        meaning=_wrong_result,
    ),
    "versus_local": Announced(
        "at the end: how many of its test rows both the common model and one that it trained alone, only one of them, "
        "or neither answers right, counts below 5 not told; where another metric than accuracy decides, and of rows "
        "that belong to units, only whether the common one is better, worse, or not clearly different; nothing of "
        "fewer than 20 rows",
        fields={
            "generation": _GENERATION,
            "cells": either(record(), record(**dict.fromkeys(CELLS, either(one_of(FEW), _ROWS)))),
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
        per_second=0.5,
    ),
    "commit": Announced(
        "that it is bound to such votes, and its round",
        fields=_PROPOSAL | {"votes": _VOTES, **_CLAIM},
        per_second=0.5,
    ),
    "follow": Announced(
        "what was decided so",
        fields={"certificates": list_of(record(**_PROPOSAL, votes=_VOTES, commits=table_of(_COMMIT, keys=SITE)))},
        at_most=FOLLOW_AT_MOST,
        per_second=0.05,
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
    found = wrong_field(form, body, terms) or next((shortened(name) for name in body if name not in form), "")
    return found or KINDS[kind].meaning(body, terms)
