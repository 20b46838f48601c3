"""A [contract] section that some data fulfils, to be edited by a person."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairmesh.config.tables import to_table
from fairmesh.data.check import check_column, identifiers_in, repeats
from fairmesh.data.columns import MEAN, Column
from fairmesh.data.contract import Arrays, refuse
from fairmesh.data.datasets.base import Data
from fairmesh.data.datasets.table import Table
from fairmesh.data.samples import Samples
from fairmesh.data.site_files import Columns
from fairmesh.data.tables import NAME_AT_MOST, Kind, category_text, in_order, missing_in
from fairmesh.errors import BadInput, nearest

_SHOWN = 5  # categories in a comment
_RARE = 5  # rows; a category of fewer may say who it is
_WIDER = 0.25  # of the range that was seen, on either side
_OF_TABLE = """\
# Unit and range of every column, in words and numbers: correct them. Ranges are wider than those seen.
# The model sees (value - center) / scale. Columns are matched by name at every site."""
_IN_ORDER = "in the order of their numbers"
_STANDARDIZE = """\
# The model learns the target, and sees columns without center and scale, in multiples of their standard deviation over
# all sites, which tell each other sums for it.
standardize = true"""
_IDENTIFIER = "# This looks like an identifier: a different whole number in every row. If it is one, remove it."


def drafted(data: Data, without: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Returns the [contract] section that some data fulfils, to be edited: ranges are a little wider than seen. Also
    returns the columns in it that are numbers but look like identifiers.

    Args:
        data: The data.
        without: Columns of a table that are not inputs. Default: ().
    """
    if isinstance(data, Table):
        return _of_table(data, without)
    if without:
        raise BadInput(f"--without {without[0]}: only a table has columns, and this data is not one")
    return _of_arrays(data), []


def _of_table(table: Table, without: Sequence[str]) -> tuple[str, list[str]]:
    columns = table.read()
    for name in without:
        if name == table.target or name not in columns:
            why = "is the column to predict" if name == table.target else f"is no column{nearest(name, columns)}"
            raise BadInput(f"--without {name}: {name!r} {why} in {table.where}")
    names = [name for name in table.input_names(columns) if name not in without]
    if not names:
        raise BadInput(f"{table.where} has no column to predict from; leave out fewer with --without")
    findings = {name: list(check_column(table, name, columns)) for name in names}
    refuse([said for name in names for said in _unusable(table, name, columns, findings[name])])
    identifiers = [name for name in names if any(finding.what == "identifier" for finding in findings[name])]
    sections = [*_of_all(table), _OF_TABLE]
    for name in names:
        column, comments = _column(table, name, columns)
        sections += [_IDENTIFIER] if name in identifiers else []
        sections.append(_section("[[contract.columns]]", column, comments) + "\n")
    sections.append(_section("[contract.target]", *_target(table, columns)))
    return "\n".join(sections), identifiers


def repeated_identifiers(data: Data) -> list[str]:
    """Returns the inputs of a table that look like identifiers of units with several rows; nothing if it names one."""
    if not isinstance(data, Table) or data.unit:
        return []
    columns = data.read()
    one_site = np.zeros(len(columns[data.target]), np.int64)
    names = data.input_names(columns)
    return [name for name in names if repeats(name, identifiers_in(columns[name]), one_site, excluded=False)]


def _of_all(table: Table) -> list[str]:
    """Returns the lines of a contract about the whole table: how rows are divided at every site, and whether numbers to
    predict are scaled; none if there is nothing to say."""
    said = {"unit": "rows of one unit are not divided", "time": "every site's latest rows are its test rows"}
    lines = [f"{key} = {json.dumps(name)}  # {why}" for key, why in said.items() if (name := getattr(table, key))]
    lines += [_STANDARDIZE] if table.predict == "numbers" and table.scale_target else []
    return ["[contract]", *lines, ""] if lines else []


def _section(heading: str, described: Column | Arrays, comments: Mapping[str, str]) -> str:
    """Returns lines for a person to edit. Numbers get an empty unit. The comment "" stands by itself."""
    decided = to_table(described, defaults=False)
    asked = ("type", "unit") if "min" in decided else ()
    lines = [heading]
    for key, value in to_table(described).items():
        if key in decided or key in asked:
            text = f"{value:.10g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
            lines.append(f"{key} = {text}" + (f"  # {comments[key]}" if key in comments else ""))
    return "\n".join([*lines, *(f"# {comment}" for key, comment in comments.items() if not key)])


def _unusable(table: Table, name: str, columns: Columns, findings: Sequence[Any]) -> Iterator[str]:
    """Yields why a column cannot be an input, and what to do."""
    leave_out = f"--without {shlex.quote(name)}"
    for finding in findings:
        if finding.severity == "error" or finding.what == "empty column":
            said = finding.sentence.replace(f'exclude = ["{name}"]', leave_out)
            for key in ("types", "missing_values"):
                said = said.replace(f"say {key}", f"draft from an experiment file whose [data] has {key}")
            yield said
            return
    if table.kind_of_column(columns, name) != "category":
        return
    values = columns[name]
    texts = [category_text(value) for value in values[~missing_in(values)].tolist()]
    if len(set(texts)) == len(texts) > 1:
        yield f"{table.where}: column {name!r} has another text in every row: an identifier? Leave it out: {leave_out}"
    elif len(longest := max(texts, key=len)) > NAME_AT_MOST:
        yield (
            f"{table.where}: column {name!r} has a text of {len(longest):,} characters, as a remark has, and "
            f"categories have at most {NAME_AT_MOST}; leave it out: {leave_out}"
        )


def _column(table: Table, name: str, columns: Columns) -> tuple[Column, dict[str, str]]:
    """Returns what the contract says about an input column, and comments on its settings."""
    kind, missing = table.kind_of_column(columns, name), missing_in(columns[name])
    known = table.encoded(columns, name, kind)[~missing]
    column, comments = _described(table, name, kind, known, bool(missing.any()))
    return replace(column, missing_values=table.markers(name)), comments


def _described(table: Table, name: str, kind: Kind, known: np.ndarray, gaps: bool) -> tuple[Column, dict[str, str]]:
    if kind == "number":
        column = _numbers(name, known)
        if len(np.unique(known)) > 2:
            column = replace(column, center=_rounded(known.mean(), 2), scale=_rounded(known.std(), 2))
        column = replace(column, fill=_rounded(np.median(known), 3) if gaps else None)
        return column, {"fill": "stands for a missing value; else none may be missing"}
    column, comments = Column(name, kind, fill=MEAN if gaps else None), {}
    if kind == "category":
        counts, listed = Counter(known.tolist()), table.categories.get(name, ())
        column = replace(column, classes=(*listed, *sorted(counts.keys() - set(listed))))
        comments = {
            "classes": "one input each; add those of other sites",
            "fill": "missing values get an input of their own; else none may be missing",
        }
        rare = sorted(text for text, count in counts.items() if count < _RARE)
        if rare:
            shown = json.dumps(rare[:_SHOWN], ensure_ascii=False) + (" and others" if len(rare) > _SHOWN else "")
            comments[""] = f"In fewer than {_RARE} rows of this table, and all sites will see them: {shown}"
        return column, comments
    if kind == "date":
        column = replace(column, center=_rounded(known.mean(), 4), scale=_rounded(known.std(), 2) or 1.0)
        comments["center"] = "days since 1970-01-01, which the model sees"
    return column, comments | {"fill": "of all sites, for a missing value; else none may be missing"}


def _target(table: Table, columns: Columns) -> tuple[Column, dict[str, str]]:
    if table.predict == "labels":
        classes = table.classes or in_order(set(columns[table.target].tolist()))
        return Column(table.target, "label", classes=classes), {"classes": _IN_ORDER}
    try:
        numbers = table.encoded(columns, table.target, "number")
    except BadInput as error:
        raise BadInput(f"{error}; leave out --numbers if the target is a label") from error
    if np.isnan(numbers).all():
        raise BadInput(f"{table.where}: column {table.target!r} has no values; predict another one")
    return _numbers(table.target, numbers[~np.isnan(numbers)]), {}


def _numbers(name: str, numbers: np.ndarray) -> Column:
    whole = bool((numbers == np.round(numbers)).all())
    low, high = _wider(numbers, whole)
    return Column(name, "whole" if whole else "number", min=low, max=high)


def _rounded(number: float, digits: int) -> float:
    return float(f"{number:.{digits}g}")


def _wider(numbers: np.ndarray, whole: bool) -> tuple[float, float]:
    """Returns a range that is a little wider than that of the numbers, and rounded. Only those of one sign keep it."""
    low, high = float(numbers.min()), float(numbers.max())
    if whole and high - low <= 1:
        return low, high
    span = high - low or abs(high) or 1.0
    step = 10.0 ** (math.floor(math.log10(span)) - 1)
    step = max(step, 1.0) if whole else step
    down, up = (math.floor((low - _WIDER * span) / step) * step, math.ceil((high + _WIDER * span) / step) * step)
    return (max(0.0, down) if low >= 0 else down), (min(0.0, up) if high <= 0 else up)


def _of_arrays(data: Data) -> str:
    every = [Samples.of(site.train, f"site {i}") for i, site in enumerate(data.sites())]
    samples, targets = [one.some() for one in every], [one.known_targets() for one in every]
    inputs = samples[0].inputs
    if not (isinstance(inputs, Tensor) and isinstance(targets[0], Tensor)):
        raise BadInput("data: samples have several inputs or targets, which a contract cannot describe")
    ends = np.array([float(end) for one in samples for end in (one.inputs.min(), one.inputs.max())])
    low, high = (0.0, 255.0) if inputs.dtype == torch.uint8 else _wider(ends, not inputs.is_floating_point())
    form = Arrays(tuple(inputs.shape[1:]), str(inputs.dtype).removeprefix("torch."), low, high)
    sections = ["# The range is wider than that seen: correct it, and say in unit what the numbers are."]
    sections.append(_section("[contract.inputs]", form, {}))
    if not targets[0].is_floating_point() and targets[0].ndim == 1:
        named = data.class_names() or [str(k) for k in range(1 + max(int(some.max()) for some in targets))]
        labels = Column("class", "label", classes=tuple(named))
        sections += ["", _section("[contract.target]", labels, {"classes": _IN_ORDER})]
    return "\n".join(sections)
