"""The lines that results are made of: one for each row of a recipe, one for each sitting."""

import functools
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fairmesh.config.tables import to_table
from fairmesh.errors import BadInput
from fairmesh.storage.files import write_atomically
from fairmesh.storage.run_folder import Record
from fairmesh.storage.strict_json import as_json
from reproduction.recipes import Row, rows_of

Line = dict[str, Any]
MINIATURE = "MINIATURE"  # a file beside results that mean nothing


def lines_of(results: Path, recipe: str) -> list[Line]:
    """The lines recorded for a recipe; none where it was not run."""
    path = results / f"{recipe}.jsonl"
    if not path.is_file():
        return []
    lines = []
    for k, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            lines.append(json.loads(text))
            if not (recipe == "theory" or {"recipe", "row", "protocol"} <= lines[-1].keys()):
                raise ValueError("it is not of a row")
        except (ValueError, AttributeError) as error:
            raise BadInput(f"{path}, line {k}: {error}; remove the line, and its row is run again") from error
    return lines


def described(row: Row) -> dict[str, Any]:
    """What determines a row's numbers, before anything is searched."""
    table = json.loads(as_json(to_table(row.experiment)))
    table["options"] = {"measure_every": row.experiment.options.measure_every}
    search = {name: list(values) for name, values in row.search.items()}
    return table | {
        "search": search,
        "search_rounds": row.search_rounds,
        "search_seeds": row.search_seeds,
        "as_row": row.as_row,
    }


def is_as_its_recipe(line: Line) -> bool:
    """Whether a line was run with the settings that its recipe has now."""
    return line["settings"] == _settings_of(line["recipe"]).get((line["protocol"], line["row"]))


@functools.cache
def _settings_of(recipe: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row.protocol, row.name): described(row) for row in rows_of(recipe)}


def final_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """The numbers of the last round by seed, in percent."""

    def percent(value: float) -> float:
        return round(100 * value, 3)

    accuracies = [record["accuracy"] for record in records]
    numbers = {name: [percent(a[name]) for a in accuracies] for name in ("worst", "worst_group", "mean", "best")}
    numbers["mean_of_groups"] = [percent(a["over_groups"]["mean"]) for a in accuracies]
    groups = {name: [percent(a["groups"][name]) for a in accuracies] for name in accuracies[0]["groups"]}
    return numbers | {"groups": groups}


def curve_of(records: Sequence[Record]) -> dict[str, Any]:
    """Every measured round, averaged over seeds: accuracies in percent, the worst node's loss, what was sent."""
    rounds = sorted({record["round"] for record in records})
    at = {t: [record for record in records if record["round"] == t] for t in rounds}

    def mean(number: Callable[[Record], float], digits: int | None) -> list[float]:
        return [round(sum(map(number, at[t])) / len(at[t]), digits) for t in rounds]

    curve: dict[str, Any] = {"round": rounds}
    for name in ("worst", "worst_group", "mean"):
        curve[name] = mean(lambda record: 100 * record["accuracy"][name], 3)  # noqa: B023
    curve["worst_loss"] = mean(lambda record: record["loss"]["worst"], 5)
    groups = records[0]["accuracy"]["groups"]
    if len(groups) <= 3:  # instruments and contrasts have curves of their own, classes do not
        curve["groups"] = {g: mean(lambda record: 100 * record["accuracy"]["groups"][g], 3) for g in groups}  # noqa: B023
    for name in ("nominal_bits_busiest", "bytes_busiest_node"):
        curve[name] = mean(lambda record: record[name], None)  # noqa: B023
    return curve


def record(results: Path, line: Line) -> None:
    """Puts a line in its recipe's file, in place of the one it had, in the order of the recipe."""
    lines = {_name(one): one for one in [*lines_of(results, line["recipe"]), line]}
    order = [] if line["recipe"] == "sittings" else [(row.protocol, row.name) for row in rows_of(line["recipe"])]
    names = sorted(lines, key=lambda name: order.index(name) if name in order else len(order))
    write_lines(results, line["recipe"], [lines[name] for name in names])


def write_lines(results: Path, recipe: str, lines: Sequence[Line]) -> None:
    """A recipe's file as a whole; the one that was there stays until this one is."""
    results.mkdir(parents=True, exist_ok=True)
    write_atomically(results / f"{recipe}.jsonl", "".join(as_json(line) + "\n" for line in lines).encode())


def _name(line: Line) -> tuple[str, str]:
    return line["protocol"], line["row"]


def machine(device: str) -> str:
    """The processor in a few words."""
    chosen = torch.device(device)
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else f"CPU, {platform.machine()}"
