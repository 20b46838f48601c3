"""Folders of runs as they are while they are written."""

import json
import time
from pathlib import Path
from typing import Any

from fairmesh.storage.run_status import FORMAT, RUNNING, machine

NAMES = ["north", "east", "south"]


def record(done: int, values: list[float | None], replica: int = 0, **more: Any) -> str:
    """A line of metrics.jsonl."""
    known = [value for value in values if value is not None]
    table = {"worst": min(known), "mean": sum(known) / len(known), "best": max(known), "gap": 0.0, "sites": values}
    line = {"round": done, "replica": replica, "accuracy": table, "bytes_busiest_node": 100 * done}
    return json.dumps(line | {"bytes_total": 300 * done, "lambda": [0.5, 0.3, 0.2], "seed": 0} | more) + "\n"


def records(*rounds: int) -> str:
    return "".join(record(done, [0.5 + done / 1000, 0.8, 0.9]) for done in rounds)


def status(**changes: Any) -> dict[str, Any]:
    """What a run of three sites writes about itself."""
    return {
        "run": FORMAT,
        "version": "1",
        "locked": True,
        "machine": machine(),
        "began": time.time() - 100,
        "algorithm": "ad-gda",
        "rounds": 400,
        "metric": "accuracy",
        "share": True,
        "unit": "",
        "higher_is_better": True,
        "judged_on": "test",
        "sites": NAMES,
        "rows": [100, 200, 300],
        "prior": [0.2, 0.3, 0.5],
        "server": False,
        "edges": [[0, 1], [1, 2]],
        "replicas": 1,
        "variants": [{"changes": {}, "replicas": [0]}],
        "privacy": None,
        "time": time.time(),
        "state": RUNNING,
        "reason": "",
        "round": 150,
        "rounds_per_s": 0.5,
        "phase": None,
        "measured": {"round": 150, "sites": [[0.65, 0.55, 0.75], [0.8, 0.7, 0.9], [0.9, 0.85, 0.95]]},
        "log": [{"time": "2030-01-01T00:00:00Z", "text": "training data is in memory"}],
    } | changes


def run_folder(folder: Path, *rounds: int, **changes: Any) -> Path:
    """Writes the folder of a run in progress that has measured some rounds."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps(status(**changes)))
    (folder / "metrics.jsonl").write_text(records(*(rounds or (0, 50, 100, 150))))
    return folder
