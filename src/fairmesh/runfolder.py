"""A run's folder: experiment.toml, metrics.jsonl, summary.json, model files and the checkpoint."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fairmesh.errors import BadInput
from fairmesh.files import write_atomically
from fairmesh.metrics import Record

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
EXPERIMENT = "experiment.toml"


def portion_name(first: object, last: object) -> str:
    """The folder, inside a run's, of replicas that ran at once because not all could."""
    return f"replicas-{first}-{last}"


def _portions_in(path: Path) -> list[tuple[int, int]]:
    """First and last replica of every portion in a run's folder."""
    found = [re.fullmatch(portion_name(r"(\d+)", r"(\d+)"), inside.name) for inside in path.iterdir()]
    return sorted((int(match[1]), int(match[2])) for match in found if match)


def as_json(value: Any, **style: Any) -> str:
    """Strict JSON: numbers that are not finite, which a diverged replica has, become null."""

    def strict(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: strict(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [strict(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(strict(value), allow_nan=False, **style)


def _with_nan(value: Any) -> Any:
    """What `as_json` wrote, with null as the number that was not finite."""
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return math.nan if value is None else value


class RunFolder:
    """Opens a folder for a run: a new or empty one, or with `resume` the one that holds its checkpoint."""

    def __init__(self, path: str | os.PathLike, *, resume: bool):
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            occupied = any(path.name != EXPERIMENT for path in self.path.iterdir())  # alone it holds no work
        except OSError as error:
            raise BadInput(f"cannot use {self.path} as a run folder: {error.strerror or error}") from error
        if not os.access(self.path, os.W_OK):
            raise BadInput(f"cannot write to the run folder {self.path}: permission denied")
        self.checkpoint = self.path / CHECKPOINT
        if occupied and not resume:
            begun = self.checkpoint.exists() or bool(_portions_in(self.path))
            hint = "resume it (--resume)" if begun else "choose another"
            raise BadInput(f"the run folder {self.path} is not empty; {hint} or remove it")
        self._portions = _portions_in(self.path)
        if occupied and not self.checkpoint.exists() and not self._portions:
            raise BadInput(f"the run folder {self.path} holds no {CHECKPOINT} to resume from; choose another folder")
        self.resuming = occupied

    def replicas_at_once(self, replicas: int) -> int:
        """As many as the run that is resumed had at once, so that its checkpoints fit."""
        if not self._portions:
            return replicas
        first, last = self._portions[0]
        size = last - first + 1
        if self._portions[-1][1] >= replicas or any(one[0] % size for one in self._portions):
            raise BadInput(
                f"the run folder {self.path} holds replicas 0 to {self._portions[-1][1]} in portions of {size}, but "
                f"{replicas} are asked for now; ask for the same, or choose another folder"
            )
        return size

    def write_settings(self, table: Mapping[str, Any]) -> None:
        import tomli_w

        partial = "" if "data" in table else "# Data and model were given in Python; this is the rest.\n"
        write_atomically(self.path / EXPERIMENT, (partial + tomli_w.dumps(dict(table))).encode())

    def records(self) -> list[Record]:
        """What was recorded so far; a last line cut short is passed over."""
        return read_records(self.path, ragged=True)

    def replace_records(self, records: Sequence[Record]) -> None:
        content = "".join(as_json(record) + "\n" for record in records)
        write_atomically(self.path / METRICS, content.encode())

    def append(self, records: Sequence[Record]) -> None:
        try:
            with open(self.path / METRICS, "a", encoding="utf-8") as file:
                file.write("".join(as_json(record) + "\n" for record in records))
        except OSError as error:
            raise BadInput(f"cannot write {self.path / METRICS}: {error.strerror or error}") from error

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self.path / SUMMARY, (as_json(summary, indent=2) + "\n").encode())

    def write_model(self, name: str, state_dict: Mapping[str, Tensor]) -> None:
        tensors = {key: tensor.contiguous().clone() for key, tensor in state_dict.items()}
        write_atomically(self.path / f"{name}.safetensors", save(tensors))


def read_records(folder: str | os.PathLike, *, ragged: bool = False) -> list[Record]:
    """The records of metrics.jsonl; with `ragged`, a last line that was cut short is passed over."""
    path = Path(folder) / METRICS
    if not path.exists():
        if ragged:
            return []
        raise BadInput(f"{folder} is not a run's folder: it has no {METRICS}")
    records = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            records.append(_with_nan(json.loads(line)))
        except json.JSONDecodeError as error:
            if ragged and number == len(lines):
                break
            raise BadInput(f"{path}, line {number}: {error}") from error
    return records


def read_summary(folder: str | os.PathLike) -> dict[str, Any]:
    path = Path(folder) / SUMMARY
    try:
        summary = _with_nan(json.loads(path.read_text(encoding="utf-8")))
        if "variants" not in summary:
            raise BadInput(f"{path} was not written by this version of fairmesh")
        return summary
    except FileNotFoundError:
        raise BadInput(f"{folder} holds no finished run: it has no {SUMMARY}") from None
    except (OSError, json.JSONDecodeError) as error:
        raise BadInput(f"{path}: {error}") from error
