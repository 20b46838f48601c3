"""What the nodes of a run of fairmesh have written."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines.task import tell


def of_nodes(folder: Path, states: Sequence[Path], rounds: int) -> None:
    """Writes the outcome of a run whose nodes have these state folders."""
    last = (states[0] / "result" / "metrics.jsonl").read_text().splitlines()[-1]
    edges = [edge for state in states for edge in json.loads((state / "status.json").read_text())["edges"].values()]
    tell(
        folder,
        json.loads(last)["accuracy"]["sites"],
        sum(edge["bytes_out"] for edge in edges) / len(states) / rounds,
    )
