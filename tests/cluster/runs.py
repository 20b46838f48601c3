"""Whole runs at one rank, started by tests: `python -m tests.cluster.runs STEP FOLDER CASE,... RANK RANKS`."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fairmesh as fm
from fairmesh.networks.cluster import Ranks
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.training.memory_estimate import footprint
from fairmesh.training.options import Options
from tests import toys
from tests.cluster.rank import ONE_OF_EACH_KIND, run_cases
from tests.examples import THOROUGH
from tests.recordings import shared_recordings

ROOT = Path(__file__).parents[2]
ROUNDS, PART, FEW_ROUNDS = 30, 12, 8
TOY = """
rounds = 100000
[data]
name = "import"
path = "tests.toys:sites"
arguments = { n = 5 }
[topology]
name = "ring"
[sampling]
batch = 8
[algorithm]
name = "ad-gda"
primal_step = 1.0
consensus_step = 0.3
compressor = { name = "quantize", bits = 4 }
[options]
measure_every = 10
checkpoint_every = 25
"""
DAMAGED = ("cut short", "missing", "of another round")
EVERYTHING: dict[str, Any] = {"keep_best": True, "own_models": True}
CASES: dict[str, tuple[fm.topologies.Topology, fm.algorithms.Algorithm, dict[str, Any]]] = {
    "ad-gda": (fm.Ring(), toys.ALGORITHMS["ad-gda"], EVERYTHING | {"placements": 2}),  # a site at several ranks
    "changing": (toys.TOPOLOGIES["changing"], toys.ALGORITHMS["ad-gda compressed duals"], {}),
    "drfa": (fm.Ring(), toys.ALGORITHMS["drfa"], {"keep_best": True}),
    "own parts": (fm.Ring(), toys.ALGORITHMS["ad-gda"], {"keep_best": True}),
}


def largest(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float(outputs.max())


def fails(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    raise ZeroDivisionError("no value at any site")


@functools.cache
def problem_of(case: str) -> fm.Problem:
    if case != "own parts":
        return problem()
    n = torch.nn
    model = n.Sequential(n.Linear(toys.FEATURES, 5), n.BatchNorm1d(5), n.ReLU(), n.Linear(5, toys.CLASSES))
    for k, parameter in enumerate(model.parameters()):
        n.init.normal_(parameter, generator=torch.Generator().manual_seed(k))
    return problem(model=model, batch_norm="local", parts=fm.Parts(local=("3.bias",)), sampling=fm.Sampling(4))


def problem(**fields: Any) -> fm.Problem:
    sites = [fm.Site(site.train, site.test, validation=site.test, group=site.group) for site in toys.sites()]
    return toys.problem(sites=sites, **{"metrics": {"largest": largest}} | fields)


def trained(case: str, folder: Path | None, process_group: ProcessGroup | None = None, **more: Any) -> fm.Result:
    topology, algorithm, options = CASES[case]
    usual = {"seeds": (0, 4), "measure_every": 6, "checkpoint_every": 6, "dtype": "float64"}
    given = {"problem": problem_of(case), "topology": topology, "algorithm": algorithm, "rounds": ROUNDS}
    return fm.train(**given | usual | options | more, out=folder, process_group=process_group)


def ends(result: fm.Result) -> dict[str, Any]:
    kept = ["last", "time-average"]
    kept += ["best"] if result.state.best is not None else []
    rows = {which: result.row(which) for which in kept}  # type: ignore[arg-type]
    return rows | {"weights": result.weights(), "weights over time": result.weights("time-average")}


def refusal(case: str, folder: Path | None, process_group: ProcessGroup, **more: Any) -> tuple[str, str, bool]:
    try:
        trained(case, folder, process_group, **more)
    except fm.errors.FairmeshError as error:
        return type(error).__name__, str(error), error.reported_elsewhere
    return "", "", False


def first(folder: Path, process_group: ProcessGroup, cases: list[str]) -> dict[str, Any]:
    """The cases from start to end, in two pieces, and from where a simulation stopped; and what must be refused."""
    found: dict[str, Any] = {}
    for case in cases:
        found[case] = ends(trained(case, folder / f"{case} on ranks", process_group))
        trained(case, folder / f"{case} begun", process_group, rounds=PART)
        trained(case, folder / f"{case} simulated", process_group, resume=True)
    if process_group.is_leader:
        shutil.copytree(folder / "ad-gda begun", folder / "ad-gda continued")
    dist.barrier()
    trained("ad-gda", folder / "ad-gda continued", process_group, resume=True)
    run_cases(folder, process_group.rank, process_group.world_size, FEW_ROUNDS, ONE_OF_EACH_KIND)
    nodes = process_group.nodes(8)
    need = footprint(problem().keeping(set(nodes)), CASES["drfa"][1], Options(dtype="float64"), len(nodes))
    room = need.fixed + 1.2 * need.per_replica
    found["refusals"] = {
        "diverged": refusal("ad-gda", folder / "diverged", process_group, algorithm=fm.ADGDA(primal_step=1e9)),
        "metric": refusal("drfa", None, process_group, problem=problem(metrics={"mine": fails})),
        "memory": refusal("drfa", None, process_group, seeds=range(4), memory_gib=room / 2**30),
        "folder": refusal("ad-gda", folder / "ad-gda on ranks", process_group),
        "option": refusal("drfa", None, process_group, own_models=True),
    }
    return found


def second(folder: Path, process_group: ProcessGroup, cases: list[str]) -> dict[str, Any]:
    """On other ranks than they began with; what is launched elsewhere, undisturbed; and damaged checkpoints."""
    for case in cases:
        trained(case, folder / f"{case} begun", process_group, resume=True)
    loaded = fm.load_experiment(folder / "toy.toml", [f"rounds={(folder / 'rounds').read_text()}"])
    fm.run(loaded, out=folder / "undisturbed", process_group=process_group)
    return {what: refusal("ad-gda", folder / what, process_group, resume=True) for what in DAMAGED}


def start_ranks(module: str, ranks: int, *arguments: object, seconds: float = 200) -> None:
    """Starts a module here at so many ranks, as `python -m MODULE ARGUMENTS RANK RANKS`."""
    command = [sys.executable, "-m", f"tests.cluster.{module}", *map(str, arguments)]
    running = [subprocess.Popen([*command, str(rank), str(ranks)], cwd=ROOT) for rank in range(ranks)]
    try:
        assert [process.wait(timeout=seconds) for process in running] == [0] * ranks
    finally:
        for process in running:
            process.kill()


def on_ranks(step: str, folder: Path, ranks: int, cases: Iterable[str]) -> None:
    """Runs the step at so many ranks."""
    start_ranks("runs", ranks, step, folder, ",".join(cases))


def main(step: str, folder: Path, rank: int, ranks: int, cases: list[str]) -> None:
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    meeting = f"file://{folder / f'meeting-{step}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    with contextlib.nullcontext() if THOROUGH else shared_recordings():
        found = {"first": first, "second": second}[step](folder, Ranks(), cases)
    torch.save(found, folder / f"{step}-{rank}.pt")
    dist.barrier()  # a rank that leaves while another still works can take gloo's threads down
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[3].split(","))
