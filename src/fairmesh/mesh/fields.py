"""What fields of announcements may hold: how a value is checked, how tests draw one, and how people read of it."""

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

LARGEST_COUNT = 1 << 53
FINITE = 1.7e308
_SHORT = 200  # characters of a string that is shown to people
_SHOWN = 60  # characters of a value that is refused
_DEEP = 24  # tables within tables, of any body
_ENTRIES = 1 << 14  # of a list or table; the bytes of an announcement are bounded too
_ROUNDING = 1e-6
OUTPUTS = 10_000  # of a model, unless the experiment lists more classes
VALIDATION, OF_BEST = "validation ", "best "  # before a metric: on validation data; of the best round's model
EPSILON = "epsilon"  # among metrics: what a private site has spent
# What a run may measure that names no metric.
BUILT_IN_METRICS = {"accuracy": (0.0, 1.0), "loss": (-math.inf, math.inf), "rmse": (0.0, math.inf)}


@dataclass(frozen=True)
class Terms:
    """What all sites of a mesh have agreed on before anything is announced. It is the same at every site and does not
    change, so that what one site accepts, those to which it passes it on accept too.

    Args:
        neighbours: Of every site that the mesh ever had, those of the mesh file.
        rounds: Of the run.
        outputs: How many outputs of the model a site may declare.
        metrics: The lowest and the highest possible value of everything that may be measured.
        site: Who speaks.
    """

    neighbours: Mapping[str, Collection[str]] = field(default_factory=dict)
    rounds: int = LARGEST_COUNT
    outputs: int = OUTPUTS
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=lambda: BUILT_IN_METRICS)
    site: str = ""

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.neighbours)

    def measures(self, name: str, value: float | None) -> bool:
        """Returns whether a metric can have this value, up to rounding; null if it is not defined."""
        plain = name if name in self.metrics else name.removeprefix(VALIDATION).removeprefix(OF_BEST)
        low, high = self.metrics[plain]
        return value is None or low - _ROUNDING <= value <= high + _ROUNDING

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
        words: What it may hold, in words.
        about: Whom a value names, in words; "" if nobody but the site that says it.
    """

    holds: Callable[[Any, Terms], bool]
    draw: Callable[[Random, Terms], Any]
    words: str
    about: str = ""

    def __call__(self, value: Any, terms: Terms = _NO_TERMS) -> bool:
        return self.holds(value, terms)


def _between(draws: Random, low: float, high: float) -> float:
    """Returns a number of a range: an end of it, one near 0, or any."""
    near = draws.uniform(max(low, -10.0), min(high, 10.0)) if low <= 10 and high >= -10 else low
    return draws.choice([low, high, near, near, near, draws.uniform(low / 2, high / 2)])


def count(low: int = 0, high: int = LARGEST_COUNT) -> Field:
    """A whole number; true and false are none."""
    ends = "" if high == LARGEST_COUNT else f" to {high:,}"
    return _count(lambda terms: range(low, high + 1), f"a whole number from {low:,}{ends}")


def _count(allowed: Callable[[Terms], range], words: str) -> Field:
    def draw(draws: Random, terms: Terms) -> int:
        numbers = allowed(terms)
        return draws.choice([numbers[0], numbers[-1], numbers[draws.randrange(min(len(numbers), 50))]])

    return Field(lambda value, terms: type(value) is int and value in allowed(terms), draw, words)


ROUND = _count(lambda terms: range(terms.rounds + 1), "a round of the run")
NUMBER_OF_OUTPUTS = _count(lambda terms: range(terms.outputs + 1), "a number of outputs that the experiment allows")


def number(low: float = -FINITE, high: float = FINITE, smallest: float = 0.0) -> Field:
    """A finite number of either sign, unless a range is given. One that is closer to 0 than `smallest` must be 0."""

    def holds(value: Any, terms: Terms = _NO_TERMS) -> bool:
        if type(value) not in (int, float) or not low <= value <= high:
            return False
        return (type(value) is float or abs(value) <= LARGEST_COUNT) and (value == 0 or abs(value) >= smallest)

    def draw(draws: Random, terms: Terms) -> float:
        value = _between(draws, low, high)
        return value if holds(value) else 0.0 if low <= 0 <= high else high

    return Field(holds, draw, f"a number from {low:g} to {high:g}" if high < FINITE else "a number")


def text(at_most: int = _SHORT, printable: bool = True) -> Field:
    """A string of bounded length that may be shown to people; if it need not be, ASCII, so that it has bytes: half of
    a surrogate pair has none."""
    return Field(
        lambda value, terms: (
            isinstance(value, str) and len(value) <= at_most and (value.isprintable() if printable else value.isascii())
        ),
        lambda draws, terms: draws.choice(
            ["", "a", "loss", "<b>", "\N{SNOWMAN}" if printable else "\n", "x" * at_most]
        ),
        f"a text of at most {at_most:,} characters",
    )


_NAME = text()
DIGEST = Field(
    lambda value, terms: isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef"),
    lambda draws, terms: f"{draws.getrandbits(256):064x}",
    "a SHA-256 as 64 hex digits",
)


def one_of(*values: Any) -> Field:
    """One of some values."""
    return Field(
        lambda value, terms: any(type(value) is type(allowed) and value == allowed for allowed in values),
        lambda draws, terms: draws.choice(values),
        " or ".join(map(json.dumps, values)),
    )


def _named(allowed: Callable[[Terms], Collection[str]], words: str, about: str = "") -> Field:
    return Field(
        lambda value, terms: isinstance(value, str) and value in allowed(terms),
        lambda draws, terms: draws.choice([*allowed(terms)]),
        words,
        about,
    )


SITE = _named(lambda terms: terms.neighbours, "a site of the mesh", "sites of the mesh")
NEIGHBOUR = _named(lambda terms: terms.neighbours.get(terms.site, ()), "a neighbour", "its neighbours")
METRIC = _named(
    lambda terms: [prefix + name for prefix in ("", VALIDATION, OF_BEST) for name in terms.metrics],
    "a metric of the experiment",
)


def maybe(of: Field) -> Field:
    """Something, or null."""
    return either(one_of(None), of)


def either(*fields: Field) -> Field:
    """A value of one of some fields."""
    return Field(
        lambda value, terms: any(one.holds(value, terms) for one in fields),
        lambda draws, terms: draws.choice(fields).draw(draws, terms),
        " or ".join(one.words for one in fields),
        whom(fields),
    )


def whom(fields: Iterable[Field]) -> str:
    """Returns whom some fields name, in words."""
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
        f"a list, each {of.words}",
        of.about,
    )


def set_of(of: Field, at_most: int = _ENTRIES) -> Field:
    """A list of which no two entries are the same."""
    several = list_of(of, at_most)
    return Field(
        lambda value, terms: several.holds(value, terms) and len(set(value)) == len(value),
        lambda draws, terms: list(dict.fromkeys(several.draw(draws, terms))),
        f"{several.words}, none twice",
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
        f"a table, from {keys.words} to {of.words}",
        whom((keys, of)),
    )


def record(**fields: Field) -> Field:
    """A table with exactly these fields."""
    return Field(
        lambda value, terms: (
            isinstance(value, dict) and value.keys() == fields.keys() and not wrong_field(fields, value, terms)
        ),
        lambda draws, terms: {name: one.draw(draws, terms) for name, one in fields.items()},
        ("a table of " + ", ".join(f"{name} ({one.words})" for name, one in fields.items())) if fields else "nothing",
        whom(fields.values()),
    )


def in_order(of: Field) -> Field:
    """A list in ascending order, without two equal entries; of rows, by their rounds."""

    def place(entry: Any) -> Any:
        return entry[0] if isinstance(entry, list) else entry

    several = list_of(of)

    def holds(value: Any, terms: Terms) -> bool:
        places = [place(entry) for entry in value] if several.holds(value, terms) else [1, 0]
        return all(before < after for before, after in itertools.pairwise(places))

    def draw(draws: Random, terms: Terms) -> list[Any]:
        return sorted({place(entry): entry for entry in several.draw(draws, terms)}.values(), key=place)

    return Field(holds, draw, f"{several.words}, in ascending order", of.about)


def wrong_field(form: Mapping[str, Field], body: Mapping[str, Any], terms: Terms) -> str:
    """Returns the first field that is missing or holds something else than it may, with its value."""
    for name, of in form.items():
        if name not in body:
            return f"no {name}"
        if not of.holds(body[name], terms):
            return f"{name} = {shortened(repr(body[name]), _SHOWN)}, which is not {of.words},"
    return ""


def too_deep(value: Any, deep: int = _DEEP) -> bool:
    """Returns whether tables are nested deeper than in any announcement."""
    return deep < 0 or any(too_deep(inner, deep - 1) for inner in within(value) if isinstance(inner, dict | list))


def within(value: Any) -> Iterable[Any]:
    """Returns the entries of a table or list; none of anything else."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def shortened(words: str, at_most: int = _SHORT) -> str:
    """Returns a text of others as it may be shown to people: printable, and of bounded length."""
    return "".join(c if c.isprintable() else "?" for c in words[:at_most])
