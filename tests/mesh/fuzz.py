"""Bodies of announcements as no honest site makes them: sound ones with something changed, and random JSON."""

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

from fairmesh.mesh.announcements import CELLS, KINDS

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 50, 1.5, -0.0, 5e-324, -5e-324, 1e-31, 1e-30, 1e15, 1e16, 1e300, -1e300, 1.7e308,
    1.79e308, 2**53, 2**53 + 1, -(2**53), 10**12, 10**400, float("nan"), float("inf"), "", "a", "c", "nobody", "<5",
    "x" * 201, "²", "--5", "\x1b[2J", "\ud800", "\N{RIGHT-TO-LEFT OVERRIDE}", [], {}, [[]], [None], [0] * 300,
    ["c", "c"], {"a": 1}, {"": {"": []}}, {"c": {"reason": "r", "since": 0}}, {"c": 5e-324}, [[0, 0, 0, 0]],
)  # fmt: skip
_SUMS = {
    "plan": {
        "columns": [
            {"name": "age", "fill": "mean", "standardize": True, "indicator": True},
            {"name": "ward", "type": "category", "fill": "mean", "indicator": True},
        ],
        "target": {"name": "ill", "type": "label"},
    },
    "columns": {"age": [60, 0, 50.0, 900.0, []], "ward": [0, 0, 0.0, 0.0, ["north", "south"]]},
    "target": [0, 0, 0.0, 0.0, ["0", "1"]],
}
_PROPOSAL = {"generation": 1, "sites": ["c"], "round": None, "restored": []}
_CLAIM = {"begun": [[1, 0, 0, 12]], "outputs": 10}
_CERTIFICATE = _PROPOSAL | {
    "votes": {"a": 1, "b": 2},
    "commits": {name: _CLAIM | {"number": 3, "signature": "ab" * 64} for name in "ab"},
}


FACTS = {"samples": 100, "inputs": ["torch.float32", [8, 8]], "targets": ["torch.int64", []], "outputs": 10}
FACTS |= {"test": True, "validation": False, "group": "north"}
COLUMNS = ("accuracy", "loss", "weight", "bits", "bytes", "sent")


def sound(facts: dict[str, Any] = FACTS, columns: Sequence[str] = COLUMNS, pem: str = "") -> dict[str, dict[str, Any]]:
    """A sound body of every kind, from a site whose data has these facts."""
    row, hashed = [0.5] * (len(columns) - 4), "0a" * 32
    unlike = {"b": {"since": 0, "round": 10, "signed": hashed, "other": "0b" * 32, "both": False}}
    return {
        "certificate": {"pem": pem},
        "facts": facts,
        "statistics": {"mean": [1.0, 60.0], "spread": [1.0, 9.0], "shares": [0.5, 0.5], "relation": [0.5, -0.1]},
        "table": {"sums": _SUMS, "fitted_by": []},
        "status": {"round": 3, "activity": "training", "metric": 0.5, "metric_round": 2, "weight": 0.9}
        | {"waiting_for": {"b": 1.5}, "rounds_sent": 4, "bytes_out": 0, "time": 2.5},
        "measured": {"generation": 1, "columns": [*columns], "complete": 1, "kept": [10]}
        | {"rows": [[done, *row, 0.3, 8.0 * done, done, hashed] for done in (0, 10, 20)]},
        "refusing": {
            "sites": {"b": {"since": 1.0, "reason": "its model has the norm 3e38", "step": 4, "digest": hashed}}
        },
        "answers": {"refused": {"b": {"digest": hashed, "sent": True}}},
        "result": {"generation": 1, "digest": "0" * 64, "metrics": {"accuracy": 0.7, "loss": None}}
        | {"measured": {"a": "12ab"}, "contradicted": unlike},
        "contradicted": {"generation": 1, "sites": unlike},
        "ready": {"facts": "0" * 64},
        "versus_local": {"generation": 1, "cells": dict(zip(CELLS, (60, 10, 5, 25))), "verdict": "", "why_not": ""},
        "diverged": {"generation": 1, "since": 3, "round": 4, "what": "an exploded model"},
        "vote": _PROPOSAL,
        "commit": _PROPOSAL | {"votes": {"a": 1, "b": 2}} | _CLAIM,
        "follow": {"certificates": [_CERTIFICATE]},
    }  # fmt: skip


def bodies(bases: dict[str, dict[str, Any]], count: int, seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every kind with bodies: the sound one; for every entry those in which it is lacking, null or, if it is a
    number, next to nothing or of 400 digits; `count` with other changes; and `count // 4` of random JSON."""
    draws = random.Random(seed)
    missing = KINDS.keys() - bases.keys()
    assert not missing, f"add a sound body of {missing} to tests/mesh/fuzz.py, so that it is tried too"
    for kind in KINDS:
        yield kind, copy.deepcopy(bases[kind])
        for path, entry in _entries(bases[kind]):
            values = (None, 5e-324, 10**400) if type(entry) in (int, float) else (None,)
            for value in (_LACKING, *values) if isinstance(path[-1], str) else values:
                yield kind, _replaced(copy.deepcopy(bases[kind]), path, value)
        for _ in range(count):
            body = copy.deepcopy(bases[kind])
            for _ in range(draws.choice((1, 1, 1, 2, 3))):
                _change(body, draws)
            yield kind, body
        for _ in range(count // 4):
            names = [*KINDS[kind].fields, "more"]
            yield kind, {name: _anything(draws, 3) for name in draws.sample(names, len(names) - 1)}


_LACKING = object()


def _entries(inside: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields every entry of a body, with its path."""
    for key in inside if isinstance(inside, dict) else range(len(inside)):
        yield (key,), inside[key]
        if isinstance(inside[key], dict | list):
            yield from (((key, *rest), entry) for rest, entry in _entries(inside[key]))


def _replaced(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    *outer, last = path
    inside: Any = body
    for key in outer:
        inside = inside[key]
    if value is _LACKING:
        del inside[last]
    else:
        inside[last] = value
    return body


def _change(body: dict[str, Any], draws: random.Random) -> None:
    """Changes something, anywhere in a body."""
    inside: Any = body
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        if not keys:
            inside.append(draws.choice(NASTY)) if isinstance(inside, list) else inside.update(more=draws.choice(NASTY))
            return
        key = draws.choice(keys)
        if isinstance(inside[key], dict | list) and draws.random() < 0.8:
            inside = inside[key]
            continue
        how = draws.random()
        if how < 0.75:
            inside[key] = copy.deepcopy(draws.choice(NASTY))
        elif how < 0.85:
            del inside[key]
        elif isinstance(inside, dict):
            inside[draws.choice(("more", "both", "outputs", "c", ""))] = copy.deepcopy(draws.choice(NASTY))
        else:
            inside.insert(draws.randrange(len(inside) + 1), copy.deepcopy(inside[key]))
        return


def _anything(draws: random.Random, depth: int) -> Any:
    """Returns random JSON."""
    how = draws.random()
    if depth and how < 0.25:
        return [_anything(draws, depth - 1) for _ in range(draws.randrange(5))]
    if depth and how < 0.5:
        return {draws.choice(("a", "b", "both", "outputs", "reason")): _anything(draws, depth - 1) for _ in range(3)}
    return copy.deepcopy(draws.choice(NASTY))
