"""fairmesh as a job of NVFlare, in NVFlare's simulator: a process for each site, whose calls the server relays."""

import subprocess
import sys
from pathlib import Path

from benchmarks.engines import NODES
from benchmarks.engines.runners.results import of_nodes
from fairmesh.nvflare.job import job_from, write_job
from fairmesh.nvflare.site_file import FILE, allow_here

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
names = [f"site-{k + 1}" for k in range(NODES)]
write_job(*job_from(folder / "experiment.toml", names, "engines"), folder / "job")
allow_here(folder / "workspace")
states = folder / "states"
(folder / "workspace" / "local" / FILE).write_text(f'state = "{states}"\ndata = "experiment"\nallow_revealing = true\n')
nvflare = Path(sys.executable).with_name("nvflare")
command = [nvflare, "simulator", folder / "job", "-w", folder / "workspace", "-n", NODES, "-t", NODES]
subprocess.run(list(map(str, command)), check=True)
of_nodes(folder, [states / "engines" / name / "state" for name in names], rounds)
