"""Parameters of tests of which the quick run takes a cover and the slow run takes every combination.

Two parameters that each have twelve values give 144 combinations. A cover of strength 1 has twelve of them and every
value in one; with three parameters or more, a cover of strength 2 has every pair of values in one. `make test` runs the
cover, `make test-all` the rest too.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[int, ...]


def cover(sizes: Sequence[int], strength: int = 2) -> list[Row]:
    """Returns rows of indices, `row[k] < sizes[k]`, such that any `strength` of the columns hold together every
    combination of their indices. The same sizes always give the same rows."""
    strength = min(strength, len(sizes))
    missing = dict.fromkeys(  # a dictionary, for its order
        (columns, values)
        for columns in combinations(range(len(sizes)), strength)
        for values in product(*(range(sizes[column]) for column in columns))
    )
    used: Counter[tuple[int, int]] = Counter()
    rows = []
    while missing:
        columns, values = next(iter(missing))
        row = dict(zip(columns, values))
        for column in sorted(set(range(len(sizes))) - row.keys(), key=lambda k: -sizes[k]):
            row[column] = max(
                range(sizes[column]),
                key=lambda value: (_covered(missing, {**row, column: value}, strength), -used[column, value], -value),
            )
        rows.append(tuple(row[column] for column in range(len(sizes))))
        used.update(enumerate(rows[-1]))
        for found in combinations(range(len(sizes)), strength):
            missing.pop((found, tuple(row[column] for column in found)), None)
    return rows


def _covered(missing: Collection[tuple[Row, Row]], row: dict[int, int], strength: int) -> int:
    """How many missing combinations a row holds that is not complete yet."""
    columns = sorted(row)
    return sum(
        (some, tuple(row[column] for column in some)) in missing
        for size in [min(strength, len(columns))]
        for some in combinations(columns, size)
    )


def covering(strength: int = 2, **parameters: Mapping[str, Any] | Iterable[str]) -> pytest.MarkDecorator:
    """Parametrizes a test with every combination of named values (or of names); those outside of the cover are slow."""
    tables = [named(values) for values in parameters.values()]
    quick = set(cover([len(table) for table in tables], strength))
    cases = []
    for row in product(*(range(len(table)) for table in tables)):
        chosen = [list(table.items())[index] for table, index in zip(tables, row)]
        name = "-".join(name for name, _ in chosen)
        cases.append(case(*(value for _, value in chosen), id=name, quick=row in quick))
    return pytest.mark.parametrize(tuple(parameters), cases)


def some_quick(parameter: str, values: Mapping[str, Any] | Iterable[str], *quick: str) -> pytest.MarkDecorator:
    """Parametrizes a test with named values (or with names), of which all but the quick ones are slow."""
    table = named(values)
    if unknown := set(quick) - table.keys():
        raise ValueError(f"{parameter}: no value is called {', '.join(sorted(unknown))}")
    return pytest.mark.parametrize(
        parameter, [case(value, id=name, quick=name in quick) for name, value in table.items()]
    )


def case(*values: Any, id: str | None = None, quick: bool = True) -> Any:
    """One set of parameters, marked as slow unless it is quick."""
    return pytest.param(*values, id=id, marks=() if quick else pytest.mark.slow)


def named(values: Mapping[str, Any] | Iterable[str]) -> dict[str, Any]:
    return dict(values) if isinstance(values, Mapping) else {name: name for name in values}
