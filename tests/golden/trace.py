"""Short float64 loss traces of every algorithm: what they hold, how they are made, written and read."""

import json
from functools import cache
from pathlib import Path

import fairmesh as fm
from fairmesh.config.tables import from_table, to_table
from tests import toys

FOLDER = Path(__file__).parent / "traces"
ROUNDS = 20

Trace = list[tuple[int, float, float]]  # round, worst and mean training loss over the sites


@cache
def problem() -> fm.Problem:
    """The toy sites without their test sets, so that training losses are measured."""
    return toys.problem(sites=[fm.Site(site.train, group=site.group) for site in toys.sites()])


def traced(algorithm: fm.algorithms.Algorithm) -> Trace:
    result = fm.train(
        problem(), fm.topologies.Circulant((1, 2)), algorithm, ROUNDS, dtype="float64", measure_every=1, seeds=[7]
    )
    return [(record["round"], record["loss"]["worst"], record["loss"]["mean"]) for record in result.records]


def file_of(name: str) -> Path:
    return FOLDER / f"{name.replace(',', '').replace(' ', '-')}.txt"


def heading(name: str) -> str:
    """The algorithm's table, so that a new field with a default does not change what a trace is of; of a setting, its
    name."""
    return f"# {name}: {json.dumps(to_table(toys.ALGORITHMS[name]))}" if name in toys.ALGORITHMS else f"# {name}"


def algorithm_on_file(name: str) -> fm.algorithms.Algorithm:
    """The algorithm that the heading of a trace describes."""
    first = file_of(name).read_text().splitlines()[0]
    return from_table(fm.algorithms.Algorithm, json.loads(first.removeprefix(f"# {name}: ")))


def written(name: str, trace: Trace) -> str:
    head = f"{heading(name)}\n# round, worst and mean training loss, before round 0 and after each\n"
    return head + "".join(f"{t:2d} {worst:.15f} {mean:.15f}\n" for t, worst, mean in trace)


def read(name: str) -> Trace:
    lines = [line.split() for line in file_of(name).read_text().splitlines() if not line.startswith("#")]
    return [(int(t), float(worst), float(mean)) for t, worst, mean in lines]
