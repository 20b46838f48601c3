"""fairmesh's simulator."""

import sys
from pathlib import Path

import fairmesh as fm
from benchmarks.engines.task import tell
from fairmesh.experiment import load_experiment

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
experiment = load_experiment(folder / "experiment.toml")
result = fm.run(experiment)
record = result.final[0]
values = record["accuracy"]["sites"]
tell(folder, values, record["bytes_total"] / len(values) / rounds)
