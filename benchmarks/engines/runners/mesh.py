"""fairmesh's mesh: a process for each site, over mutual TLS."""

import sys
from pathlib import Path

from benchmarks.engines import NODES
from benchmarks.engines.runners.results import of_nodes
from tests.mesh import fleet

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
names = [f"site-{k + 1}" for k in range(NODES)]
fleet.provisioned(folder / "fleet", folder / "experiment.toml", names)
nodes = [fleet.start(folder / "fleet", name, patience_s=120) for name in names]
for name, process in zip(names, nodes):
    if fleet.ended(process, 600) != 0:
        sys.exit((folder / "fleet" / f"{name}.log").read_text()[-2000:])
of_nodes(folder, [folder / "fleet" / name / "state" for name in names], rounds)
