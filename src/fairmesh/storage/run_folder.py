"""A run's folder: experiment.toml, metrics.jsonl, summary.json, model files and the checkpoint."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fairmesh.data.preprocessing import Preprocessing
from fairmesh.errors import BadInput, in_a_line, refusing
from fairmesh.networks.memory import SingleProcess
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.storage.executed import remember_executed
from fairmesh.storage.files import write_atomically
from fairmesh.storage.occupied import (
    CHECKPOINT,
    DIVERGED,
    EXPERIMENT,
    JOB,
    METRICS,
    NO_RESULTS,
    SUMMARY,
    has_diverged,
    is_occupied,
    set_aside,
)
from fairmesh.storage.strict_json import as_json, with_nan

Record = dict[str, Any]  # one replica's measurements after some round

OUTCOMES = "outcomes.safetensors"  # what the models answered on the test rows
PREPROCESSING = "preprocessing.json"  # how rows of a table become inputs of the model
TRAFFIC = "traffic.json"  # in the state folder of a node: what went over its site's connections
ABOUT = "fairmesh"  # the key of a model file's metadata
TRACKERS = "trackers"  # a folder for what trackers write
WORK = "work"  # the folder of finished local work of training functions, since the checkpoint


class RunFolder:
    """Opens a folder for a run: a new or empty one, or with `resume` the one that has its checkpoint. A run that has
    diverged makes room for another. Only the leading process writes to it, except for checkpoints."""

    def __init__(self, path: str | os.PathLike, *, resume: bool, process_group: ProcessGroup | None = None):
        self.path, self._process_group = Path(path), process_group or SingleProcess()
        self.checkpoint, self.work = self.path / CHECKPOINT, self.path / WORK
        self.resuming = False
        self.set_aside: Path | None = None  # where a diverged run that was here is now
        with self._process_group.fail_together():
            if self._process_group.is_leader:
                self._open(resume)
        self.resuming = self._process_group.all_gather_json(self.resuming)[0]
        with self._process_group.fail_together():
            if not self.path.is_dir():
                raise BadInput(
                    f"process {self._process_group.rank} does not see the run folder {self.path}: "
                    "all processes of a run need it on a shared file system"
                )

    def _open(self, resume: bool) -> None:
        own = NO_RESULTS
        with refusing(f"cannot use {self.path} as a run folder", OSError):
            if not resume and has_diverged(self.path):
                self.set_aside = set_aside(self.path, "diverged")
            self.path.mkdir(parents=True, exist_ok=True)
            if self._begun_by_this_job():  # this run, started again by its launcher
                resume = self.checkpoint.exists()
                if not resume:
                    (self.path / METRICS).unlink(missing_ok=True)
                    own |= {TRACKERS}
        if not os.access(self.path, os.W_OK):
            raise BadInput(f"cannot write to the run folder {self.path}: permission denied")
        self.resuming = is_occupied(self.path, resume=resume, own=own)
        (self.path / DIVERGED).unlink(missing_ok=True)
        if self._process_group.job:
            self._write(JOB, self._process_group.job.encode())

    def _begun_by_this_job(self) -> bool:
        mark = self.path / JOB
        return mark.exists() and mark.read_text() == self._process_group.job

    def close(self) -> None:
        """Marks the run as ended, so that a later start of the same job in this folder is another run."""
        if self._process_group.is_leader:
            (self.path / JOB).unlink(missing_ok=True)

    def mark_diverged(self, why: str) -> None:
        """Notes why the run has ended, so that the next one may have its folder."""
        self._write(DIVERGED, f"{why}\n".encode())

    def _write(self, name: str, content: bytes, from_all: bool = False) -> None:
        if from_all or self._process_group.is_leader:
            write_atomically(self.path / name, content)

    def write_settings(self, table: Mapping[str, Any]) -> None:
        self._write(EXPERIMENT, toml_of(table))
        remember_executed(table, self.path)

    def records(self) -> list[Record]:
        """Returns what was recorded so far. Skips a last line that was cut short."""
        mine = read_records(self.path, ragged=True) if self._process_group.is_leader else []
        return self._process_group.all_gather_json(mine)[0]

    def replace_records(self, records: Sequence[Record]) -> None:
        content = "".join(as_json(record) + "\n" for record in records)
        self._write(METRICS, content.encode())

    def append(self, records: Sequence[Record]) -> None:
        if not self._process_group.is_leader:
            return
        path = self.path / METRICS
        with refusing(f"cannot write {path}", OSError), open(path, "a", encoding="utf-8") as file:
            file.write("".join(as_json(record) + "\n" for record in records))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._write(SUMMARY, (as_json(summary, indent=2) + "\n").encode())

    def write_preprocessing(self, splits: Sequence[Preprocessing | None]) -> None:
        """Writes how rows of a table become inputs of the models, for each split of the data."""
        for k, one in enumerate(splits):
            if one:
                self._write(preprocessing_file(k), one.to_json().encode())

    def write_outcomes(self, content: bytes) -> None:
        self._write(OUTCOMES, content)

    def write_model(
        self, name: str, state_dict: Mapping[str, Tensor], about: Mapping[str, Any], from_all: bool = False
    ) -> None:
        """Writes a model, and what it is `about` into the file's metadata. With `from_all`, every process that calls
        this writes: it is the model of a site whose data only that process has."""
        self._write(f"{name}.safetensors", model_file(state_dict, about), from_all)


def preprocessing_file(split: int) -> str:
    """Returns the name of the file that says how rows of a table become inputs, in a split of the data."""
    return PREPROCESSING if split == 0 else PREPROCESSING.replace(".json", f"-split-{split}.json")


def model_file(state_dict: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """Returns the content of a model's file. What it is about has one key, since safetensors writes keys in no fixed
    order, and equal models must be equal files."""
    tensors = {key: tensor.contiguous().clone() for key, tensor in state_dict.items()}
    return save(tensors, {ABOUT: json.dumps(about, sort_keys=True, ensure_ascii=False)})


def read_model(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of a model's file, and what it says about itself."""
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise BadInput(f"{path} cannot be read as a model: {in_a_line(error)}") from error


def extend_summary(folder: str | os.PathLike, more: Mapping[str, Any]) -> None:
    """Adds entries to the summary of a finished run."""
    write_atomically(Path(folder) / SUMMARY, (as_json(read_summary(folder) | dict(more), indent=2) + "\n").encode())


def toml_of(settings: Mapping[str, Any]) -> bytes:
    """Returns the content of a run's experiment.toml."""
    import tomli_w

    partial = "" if "data" in settings else "# Data and model were given in Python; this is the rest.\n"
    return (partial + tomli_w.dumps(dict(settings))).encode()


def read_records(folder: str | os.PathLike, *, ragged: bool = False) -> list[Record]:
    """Returns the records of metrics.jsonl. With `ragged`, skips a last line that was cut short."""
    path = Path(folder) / METRICS
    if not path.exists():
        if ragged:
            return []
        raise BadInput(f"{folder} is not a run's folder: it has no {METRICS}")
    records = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            records.append(with_nan(json.loads(line)))
        except (ValueError, RecursionError) as error:
            if ragged and number == len(lines):
                break
            raise BadInput(f"{path}, line {number}: {error}") from error
    return records


def read_summary(folder: str | os.PathLike) -> dict[str, Any]:
    path = Path(folder) / SUMMARY
    try:
        summary = with_nan(json.loads(path.read_text(encoding="utf-8")))
        if not isinstance(summary, dict) or "variants" not in summary:
            raise BadInput(f"{path} was not written by this version of fairmesh; run the experiment again")
        return summary
    except FileNotFoundError:
        raise BadInput(f"{folder} has no finished run: there is no {SUMMARY}") from None
    except BadInput:
        raise
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is damaged ({error}); run the experiment again") from error
