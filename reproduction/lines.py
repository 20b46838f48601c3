"""The lines of result files: one for each row of a recipe, and one for each session of runs."""

import dataclasses
import functools
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fairmesh.config.registry import role_of
from fairmesh.config.tables import from_table, to_table
from fairmesh.errors import BadInput
from fairmesh.storage.files import write_atomically
from fairmesh.storage.run_folder import Record
from fairmesh.storage.strict_json import as_json
from fairmesh.training.options import Options
from reproduction.recipes import Row, Search, rows_of

Line = dict[str, Any]
MINIATURE = "MINIATURE"  # a file that marks a folder of results in miniature
_WITHOUT_ROWS = ("theory", "frontier_duals", "frontier_lies")  # files whose lines belong to no row of a recipe


def lines_of(results: Path, recipe: str, fields: Sequence[str] = ("recipe", "row", "protocol")) -> list[Line]:
    """Returns the lines recorded for a recipe; none if it was not run. Refuses lines that lack some of the fields."""
    path = results / f"{recipe}.jsonl"
    fields = () if recipe in _WITHOUT_ROWS else fields
    lines = []
    for k, text in enumerate(path.read_bytes().splitlines() if path.is_file() else (), 1):
        try:
            lines.append(json.loads(text))
            if not lines[-1].keys() >= set(fields):
                raise ValueError(f"it has no {', '.join(fields[:-1])} or {fields[-1]}")
        except (ValueError, AttributeError) as error:
            raise BadInput(f"{path}, line {k}: {error}; remove the line to run its row again") from error
    return lines


def described(row: Row) -> dict[str, Any]:
    """Returns the settings that determine a row's numbers, before any search."""
    table = json.loads(as_json(to_table(row.experiment)))
    table["options"] = {"measure_every": row.experiment.options.measure_every}
    search = {name: list(values) for name, values in row.search.items()}
    return table | {
        "search": search,
        "search_rounds": row.search_rounds,
        "search_seeds": row.search_seeds,
        "as_row": row.as_row,
    }


@dataclasses.dataclass(frozen=True)
class _Searched:
    """The part of a row's settings that is not its experiment, as lines name it."""

    search: Search = dataclasses.field(default_factory=dict)
    search_rounds: int | None = None
    search_seeds: int = 1
    as_row: str | None = None


def describes(table: Any, thing: Any) -> bool:
    """Returns whether a recorded table describes a configured object of today.

    The comparison uses the fields that the table has, at every level. A field that the table lacks counts as having its
    class's default, so a field added later leaves old records valid as long as the object keeps that default. A field
    that the object's class does not know makes the record stale."""
    kind = role_of(type(thing)) or type(thing)
    try:
        recorded = from_table(kind, table)
    except BadInput:  # an unknown or missing field, an unknown name, a value of another type
        return False
    return to_table(recorded) == to_table(from_table(kind, thing))  # of an unregistered class, as a file has its fields


def was_run_as(line: Line, row: Row) -> bool:
    """Returns whether a line was run with a row's present settings; `describes` says how they are compared."""
    settings = dict(line["settings"])
    searched = {name: settings.pop(name) for name in _Searched.__annotations__ if name in settings}
    options = Options(measure_every=row.experiment.options.measure_every)  # no other option shows in a line
    return (
        describes(searched, _Searched(row.search, row.search_rounds, row.search_seeds, row.as_row))
        and describes(settings.pop("options", {}), options)
        and describes(settings, dataclasses.replace(row.experiment, options=Options()))
    )


def is_as_its_recipe(line: Line) -> bool:
    """Returns whether a line was run with the settings that its recipe has now."""
    row, settings = _rows_by_name(line["recipe"]).get((line["protocol"], line["row"]), (None, None))
    return row is not None and (line["settings"] == settings or was_run_as(line, row))


@functools.cache
def _rows_by_name(recipe: str) -> dict[tuple[str, str], tuple[Row, dict[str, Any]]]:
    return {(row.protocol, row.name): (row, described(row)) for row in rows_of(recipe)}


def final_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Returns the accuracies of the last round for each seed, in percent."""

    def percent(value: float) -> float:
        return round(100 * value, 3)

    accuracies = [record["accuracy"] for record in records]
    numbers = {name: [percent(a[name]) for a in accuracies] for name in ("worst", "worst_group", "mean", "best")}
    numbers["mean_of_groups"] = [percent(a["over_groups"]["mean"]) for a in accuracies]
    groups = {name: [percent(a["groups"][name]) for a in accuracies] for name in accuracies[0]["groups"]}
    return numbers | {"groups": groups}


def curve_of(records: Sequence[Record]) -> dict[str, Any]:
    """Returns every measured round averaged over seeds: accuracies in percent, the worst node's loss, traffic."""
    rounds = sorted({record["round"] for record in records})
    at = {t: [record for record in records if record["round"] == t] for t in rounds}

    def mean(number: Callable[[Record], float], digits: int | None) -> list[float]:
        return [round(sum(map(number, at[t])) / len(at[t]), digits) for t in rounds]

    curve: dict[str, Any] = {"round": rounds}
    for name in ("worst", "worst_group", "mean"):
        curve[name] = mean(lambda record: 100 * record["accuracy"][name], 3)  # noqa: B023
    curve["worst_loss"] = mean(lambda record: record["loss"]["worst"], 5)
    groups = records[0]["accuracy"]["groups"]
    if len(groups) <= 3:  # instruments and contrasts get curves, classes do not
        curve["groups"] = {g: mean(lambda record: 100 * record["accuracy"]["groups"][g], 3) for g in groups}  # noqa: B023
    for name in ("nominal_bits_busiest", "bytes_busiest_node"):
        curve[name] = mean(lambda record: record[name], None)  # noqa: B023
    return curve


def record(results: Path, line: Line) -> None:
    """Writes a line to its recipe's file, in the order of the recipe, replacing the row's previous line."""
    lines = {_name(one): one for one in [*lines_of(results, line["recipe"]), line]}
    order = [] if line["recipe"] == "sittings" else [(row.protocol, row.name) for row in rows_of(line["recipe"])]
    names = sorted(lines, key=lambda name: order.index(name) if name in order else len(order))
    write_lines(results, line["recipe"], [lines[name] for name in names])


def write_lines(results: Path, recipe: str, lines: Sequence[Line]) -> None:
    """Replaces a recipe's file as a whole, atomically."""
    results.mkdir(parents=True, exist_ok=True)
    write_atomically(results / f"{recipe}.jsonl", "".join(as_json(line) + "\n" for line in lines).encode())


def _name(line: Line) -> tuple[str, str]:
    return line["protocol"], line["row"]


def machine(device: str) -> str:
    """Returns the name of the processor."""
    chosen = torch.device(device)
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else f"CPU, {platform.machine()}"
