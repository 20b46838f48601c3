"""Writes the traces again, or those that are named: `python -m tests.golden.regenerate [NAME ...]`, in the repository's
root. To be done only when the mathematics was meant to change; say in the commit why."""

import sys
import tempfile
from pathlib import Path

import torch

from tests import toys
from tests.golden.settings import HOSTS, MESH, SETTINGS, mesh_of_three, on_two_hosts, trace_of
from tests.golden.trace import FOLDER, file_of, traced, written


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    makers = {name: lambda algorithm=algorithm: traced(algorithm) for name, algorithm in toys.ALGORITHMS.items()}
    makers |= {name: lambda train=train: trace_of(train()) for name, train in SETTINGS.items()}
    makers |= {HOSTS: on_two_hosts, MESH: lambda: mesh_of_three(Path(tempfile.mkdtemp()))}
    for name in wanted or makers:
        file_of(name).write_text(written(name, makers[name]()))
        print(file_of(name).name)


if __name__ == "__main__":
    main(sys.argv[1:])
