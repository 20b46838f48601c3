"""What decides the last bits of a node's results: its machine, in words, and settings that keep them the same."""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic

from fairmesh.errors import BadInput
from fairmesh.storage.files import read_record, write_record
from fairmesh.training.options import Options, device_of, with_threads

_MACHINES = "machines.json"  # in the state folder: those that this node has trained on, each with its first round

_SETTINGS: list[tuple[Any, str, bool]] = [
    (torch.backends.cudnn, "benchmark", False),
    (torch.backends.cudnn, "deterministic", True),
    (torch.backends.cudnn, "allow_tf32", False),
    (torch.backends.cuda.matmul, "allow_tf32", False),
    (torch.utils.deterministic, "fill_uninitialized_memory", False),  # it costs time, and nothing reads such memory
]


def machine(options: Options) -> dict[str, str]:
    """Returns what the last bits of results depend on, by name. Call it with the threads of the options set."""
    device = device_of(options.device)
    found = {
        "torch": torch.__version__,
        "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "device": device.type,
    }
    if device.type == "cuda":
        found["device"] = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return found


def in_words(machine: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


@contextmanager
def pinned(options: Options) -> Iterator[None]:
    """Sets the threads of the options, and everything that could make two computations of the same round differ on one
    machine: reproducible algorithms, float32 products in float32. A model that has an operation without a reproducible
    form still runs, with a warning of torch."""
    before = [(of, name, getattr(of, name)) for of, name, _ in _SETTINGS]
    mode = torch.get_deterministic_debug_mode()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for of, name, value in _SETTINGS:
        setattr(of, name, value)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with with_threads(options):
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        for of, name, value in before:
            setattr(of, name, value)


class Machines:
    """The machines on which a node has trained, in its state folder, each with the generation and the step from which
    on. One that began before a checkpoint may have computed messages after it, which neighbours have."""

    def __init__(self, state: Path, now: Mapping[str, str]):
        self._path, self._now = state / _MACHINES, dict(now)
        try:
            known = read_record(self._path, "any machine may have computed the messages so far").get("machines", [])
        except BadInput as error:  # then messages that were sent stay as they are, as on another machine
            known = [(0, 0, {"known": str(error)})]
        self._known: list[tuple[int, int, dict[str, str]]] = [(begun, step, facts) for begun, step, facts in known]

    def begin(self, generation: int, step: int) -> None:
        """Records that this machine computes from a step on."""
        if not self._known or self._known[-1][2] != self._now:
            self._known.append((generation, step, self._now))
            write_record(self._path, {"machines": self._known})

    def difference(self, generation: int, step: int) -> str | None:
        """Returns how this machine differs from one that may have computed this step or a later one before, in words,
        or None."""
        places = [(generation, step) for generation, step, _ in self._known]
        since = max((place for place in places if place < (generation, step)), default=(0, 0))
        others = [one for *place, one in self._known if tuple(place) >= since and one != self._now]
        if not others:
            return None
        names = dict.fromkeys([*others[-1], *self._now])
        unlike = [name for name in names if others[-1].get(name) != self._now.get(name)]
        return "; ".join(f"{name} {others[-1].get(name)} before, {self._now.get(name)} now" for name in unlike)
