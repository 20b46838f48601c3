"""Bodies of announcements, drawn from their declaration: sound ones, and such as no honest site makes, which are sound
ones with something changed, and random JSON."""

import copy
import random
from collections.abc import Iterator, Mapping
from typing import Any

from fairmesh.mesh.announcements import KINDS, wrong
from fairmesh.mesh.fields import Terms

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 50, 1.5, -0.0, 5e-324, -5e-324, 1e-31, 1e-30, 1e15, 1e16, 1e300, -1e300, 1.7e308,
    1.79e308, 2**53, 2**53 + 1, -(2**53), 10**12, 10**400, float("nan"), float("inf"), "", "a", "c", "nobody", "<5",
    "x" * 201, "²", "--5", "\x1b[2J", "\ud800", "\N{RIGHT-TO-LEFT OVERRIDE}", [], {}, [[]], [None], [0] * 300,
    ["c", "c"], {"a": 1}, {"": {"": []}}, {"c": {"reason": "r", "since": 0}}, {"c": 5e-324}, [[0, 0, 0, 0]],
)  # fmt: skip
_TRIES = 100_000  # of which one is sound, at the latest


def sound(kind: str, terms: Terms, draws: random.Random) -> dict[str, Any]:
    """Returns a body of a kind that passes the wall: its fields are drawn until they mean something together."""
    for _ in range(_TRIES):
        body = {name: field.draw(draws, terms) for name, field in KINDS[kind].fields.items()}
        wrong_field = wrong(kind, body, terms)
        if not wrong_field:
            return copy.deepcopy(body)
    raise AssertionError(f"no body that is drawn for {kind} is sound, as of {wrong_field}")


def bodies(
    terms: Terms, count: int, seed: int = 0, given: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every kind with bodies: `count` sound ones; of one of them, for every entry, those in which it is lacking,
    null or, if it is a number, next to nothing or of 400 digits (of some entries, if `count` is small); `count` with
    other changes; and `count // 4` of random JSON. Every second sound one has the `given` fields of its kind, which
    drawn ones would hardly have."""
    draws = random.Random(seed)
    for kind in KINDS:
        drawn = [sound(kind, terms, draws) | dict((given or {}).get(kind, {}) if k % 2 else {}) for k in range(count)]
        yield from ((kind, body) for body in drawn)
        richest = max(drawn, key=lambda body: len(str(body)))
        entries = list(_entries(richest))
        for path, entry in draws.sample(entries, min(len(entries), 2 * count)):
            values = (None, 5e-324, 10**400) if type(entry) in (int, float) else (None,)
            for value in (_LACKING, *values) if isinstance(path[-1], str) else values:
                yield kind, _replaced(copy.deepcopy(richest), path, value)
        for body in drawn:
            changed = copy.deepcopy(body)
            for _ in range(draws.choice((1, 1, 1, 2, 3))):
                _change(changed, draws)
            yield kind, changed
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
