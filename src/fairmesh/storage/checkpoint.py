"""A state, or part of one, as a file: written atomically, checked on reading, refused if it is of another run."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fairmesh.errors import CheckpointError
from fairmesh.storage.files import write_atomically
from fairmesh.storage.state_tree import checked_like, flatten_state, unflatten_state

_DEFAULT = "the default"  # of a setting that an identity leaves out
FORMAT = 5


class OtherExperiment(CheckpointError):
    """A checkpoint is intact, but was begun with other settings, data or code."""


class OtherFormat(CheckpointError):
    """A checkpoint is intact, but was written by a version of fairmesh with another format."""


def _fingerprint(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    hasher = hashlib.sha256(
        json.dumps([item for item in sorted(metadata.items()) if item[0] != "fingerprint"]).encode()
    )
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        hasher.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        hasher.update(tensor.flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class Stored(NamedTuple):
    """The content of one file."""

    tensors: dict[str, Tensor]
    round: int
    more: dict[str, Any]  # further values from its writer
    fingerprint: str


def write_stored(
    path: Path, tensors: Mapping[str, Tensor], round_index: int, identity: Mapping[str, Any], **more: Any
) -> str:
    """Writes tensors of a state.

    Args:
        path: The file.
        tensors: By name.
        round_index: How many rounds are done.
        identity: The settings that determine the trajectory, by name.
        **more: Further values to store.

    Returns:
        The file's fingerprint.
    """
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    metadata = {"format": str(FORMAT), "round": str(round_index), "identity": json.dumps(identity, sort_keys=True)}
    metadata |= {name: json.dumps(value) for name, value in more.items()}
    metadata["fingerprint"] = _fingerprint(copies, metadata)
    write_atomically(path, save(copies, metadata))
    return metadata["fingerprint"]


def round_of(path: Path) -> int:
    """Returns the round of a checkpoint. Refuses a damaged one."""
    return int(_read(path)[0]["round"])


def read_stored(path: Path, identity: Mapping[str, Any]) -> Stored:
    """Returns the content of a file. Refuses a damaged file, another format, and another experiment."""
    metadata, tensors = _read(path)
    stored = json.loads(metadata["identity"])
    wanted = json.loads(json.dumps(identity))
    differing = _differences(stored, wanted, "")
    if differing:
        raise OtherExperiment(f"{path} belongs to another experiment: {'; '.join(differing[:4])}", "use another folder")
    known = ("format", "round", "identity", "fingerprint")
    more = {name: json.loads(text) for name, text in metadata.items() if name not in known}
    return Stored(tensors, int(metadata["round"]), more, metadata["fingerprint"])


def save_checkpoint(path: Path, state: Any, round_index: int, identity: Mapping[str, Any]) -> None:
    """Writes a whole state as one file."""
    write_stored(path, flatten_state(state), round_index, identity)


def load_checkpoint(path: Path, like: Any, identity: Mapping[str, Any]) -> tuple[Any, int]:
    """Returns the whole state in a file, and its round."""
    stored = read_stored(path, identity)
    return unflatten_state(like, checked_like(like, stored.tensors)), stored.round


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copied, since kernels round differently on memory that is not aligned as in the run that was saved.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        what = f"{path} is damaged or not a checkpoint ({error})"
        raise CheckpointError(what, "delete the folder to start again") from error
    intact = metadata.get("fingerprint") == _fingerprint(tensors, metadata)
    if metadata.get("format") != str(FORMAT):
        raise (OtherFormat if intact else CheckpointError)(
            f"{path} has checkpoint format {metadata.get('format')}, but this version of fairmesh reads {FORMAT}",
            "finish the run with the version that began it, or run the experiment again in another folder",
        )
    if not intact:
        raise CheckpointError(
            f"{path} is damaged: its content does not match its fingerprint", "delete the folder to start again"
        )
    return metadata, tensors


def _differences(stored: Any, wanted: Any, where: str) -> list[str]:
    stored = {} if stored is _DEFAULT and isinstance(wanted, dict) else stored
    wanted = {} if wanted is _DEFAULT and isinstance(stored, dict) else wanted
    if isinstance(stored, dict) and isinstance(wanted, dict):
        names = sorted(stored.keys() | wanted.keys())
        pairs = [(stored.get(k, _DEFAULT), wanted.get(k, _DEFAULT), f"{where}.{k}" if where else k) for k in names]
        return [d for pair in pairs for d in _differences(*pair)]
    tables = isinstance(stored, list) and isinstance(wanted, list) and stored and isinstance(stored[0], dict)
    if tables and len(stored) == len(wanted):
        return [d for k, pair in enumerate(zip(stored, wanted)) for d in _differences(*pair, f"{where}[{k}]")]
    return [] if stored == wanted else [f"{where} is {_shown(wanted)} here but {_shown(stored)} there"]


def _shown(value: Any) -> str:
    return value if value is _DEFAULT else repr(value)
