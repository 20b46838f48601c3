"""One of ten sites attacks from within: what it does to the worst honest site, with and without clipped gossip.

`python -m reproduction.clipping --write reproduction/results/clipping.json` takes some minutes on one core. The digits
data, ten sites on a circulant graph (each has four neighbours); every attack is a batch of replicas. The attacker's
public copies are what it wants, uncompressed; it takes part in everything else honestly.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fairmesh as fm
from fairmesh.algorithms.base import Algorithm
from fairmesh.compression.codes import Dense
from fairmesh.networks.base import Delivery, Part
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.problems.evaluator import Evaluator
from fairmesh.problems.prepared import Prepared
from fairmesh.topology.mixing import Mixing, with_liars
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of

SITES, ATTACKER, RARE = 10, 4, 9  # the rare site has another instrument than all others
FOLLOWED = ("model", "tracker")  # the parts of a message that an attack changes

Wanted = Callable[
    [Tensor], Tensor
]  # all sites' public copies, if all were honest (replicas, sites, dim) -> the attacker's


def scaled(copies: Tensor) -> Tensor:
    return 1000.0 * copies[:, ATTACKER]


def flipped(copies: Tensor) -> Tensor:
    return -copies[:, ATTACKER]


def a_little(copies: Tensor) -> Tensor:
    """Baruch, Baruch, Goldberg: A Little Is Enough, NeurIPS 2019: 1.5 standard deviations from the honest mean."""
    honest = torch.cat([copies[:, :ATTACKER], copies[:, ATTACKER + 1 :]], dim=1)
    return honest.mean(dim=1) - 1.5 * honest.std(dim=1)


ATTACKS: dict[str, Wanted | None] = {
    "nobody lies": None,
    "scaling by 1,000": scaled,
    "flipping signs": flipped,
    "a little is enough": a_little,
    "lying about its loss": None,
}


class AttackedNetwork(MemoryNetwork):
    """A network in which one node's public copies are what an attack wants. It keeps a copy per node, also where gossip
    is not clipped, so that others' view of the attacker differs from its own."""

    wanted: Wanted | None = None
    changed: tuple[str, ...] = FOLLOWED

    def __init__(self, cycle: list[Mixing], **form: Any):
        super().__init__([cycle[0], cycle[0]], **form)  # two graphs: a copy per node is kept
        self._own: dict[str, Tensor] = {}  # the attacker's public copies, were it honest

    def exchange(self, parts: Any, round_index: Tensor) -> Delivery:
        if self.wanted is not None:
            parts = {name: self._attacked(name, part) if name in self.changed else part for name, part in parts.items()}
        return super().exchange(parts, round_index)

    def _attacked(self, name: str, part: Part) -> Part:
        if self.wanted is None or part.kept is None:
            return part
        self._own[name] = self._own.get(name, part.kept[:, ATTACKER]) + part.rows[:, ATTACKER]
        rows, copies = part.rows.clone(), part.kept + part.rows
        copies[:, ATTACKER] = self._own[name]
        rows[:, ATTACKER] = self.wanted(copies) - part.kept[:, ATTACKER]
        return Part(Dense(rows), part.nominal_bits, True, part.kept)


def problem_of() -> Prepared:
    return fm.Experiment(fm.data.Digits(nodes=SITES, odd=1), fm.Ring(), fm.ADGDA(), rounds=1).problem()


def algorithms(rounds: int) -> dict[str, Algorithm]:
    from fairmesh.algorithms.schedules import with_run_length

    found = {
        "ad-gda": fm.ADGDA(2.0, 0.05, 0.4, fm.compressors.Quantize(bits=4)),
        "tracked-ad-gda": fm.TrackedADGDA(),
        "tracked-ad-gda without tracking": fm.TrackedADGDA(tracking=False),
    }
    return {name: with_run_length(algorithm, rounds) for name, algorithm in found.items()}


def accuracies(problem: Prepared, algorithm: Algorithm, attack: str, clip: bool, rounds: int, seeds: int) -> Tensor:
    """Returns every site's test accuracy (seeds, sites): that of the mean of the honest models."""
    topology = fm.topologies.Circulant((1, 2))
    options = Options(count_bytes=False, trace="no", lying_neighbours=int(clip))
    network = AttackedNetwork(with_liars(topology.build(SITES), options.lying_neighbours), count_bytes=False)
    network.wanted = ATTACKS[attack]
    replicas = replicas_of([algorithm], list(range(seeds)), None, SITES)
    training = Training(problem, topology, replicas, options, network=network)
    if attack == "lying about its loss":
        honest = training.oracle.losses_and_gradients

        def lying(*given: Any, **more: Any) -> tuple[Tensor, Tensor]:
            losses, gradients = honest(*given, **more)
            losses = losses.clone()
            losses[:, ATTACKER] *= 100.0
            return losses, gradients

        training.oracle.losses_and_gradients = lying  # type: ignore[method-assign]
    state = training.initial()
    for t in range(rounds):
        state = training.advance(state, t)
    models = training.view.models(state.algorithm)
    honest_mean = models[:, [i for i in range(SITES) if i != ATTACKER]].mean(dim=1)
    return Evaluator(problem, "test", torch.device("cpu"), torch.float32).of_sites(honest_mean.nan_to_num())["accuracy"]


def measured(rounds: int, seeds: int) -> list[dict[str, Any]]:
    problem, rows = problem_of(), []
    for name, algorithm in algorithms(rounds).items():
        for attack in ATTACKS:
            for clip in (False, True):
                found = accuracies(problem, algorithm, attack, clip, rounds, seeds)
                honest = found[:, [i for i in range(SITES) if i != ATTACKER]]
                row = {
                    "algorithm": name,
                    "attack": attack,
                    "clipped": clip,
                    "worst_honest": round(float(honest.amin(dim=1).mean()), 4),
                    "mean_honest": round(float(honest.mean()), 4),
                    "rare": round(float(found[:, RARE].mean()), 4),
                }
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


def page_table(rows: list[dict[str, Any]]) -> str:
    """Returns the table of clipping.md."""
    lines = [
        "| algorithm | attack | worst honest site | clipped | mean of honest sites | clipped |",
        "|---|---|---|---|---|---|",
    ]
    cells = {(row["algorithm"], row["attack"], row["clipped"]): row for row in rows}
    for algorithm, attack in dict.fromkeys((row["algorithm"], row["attack"]) for row in rows):
        plain, clipped = cells[algorithm, attack, False], cells[algorithm, attack, True]
        numbers = [one[what] for what in ("worst_honest", "mean_honest") for one in (plain, clipped)]
        lines.append(f"| {algorithm} | {attack} | " + " | ".join(f"{100 * one:.1f} %" for one in numbers) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=FOLLOWED, default=FOLLOWED, help="What attacks change.")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    AttackedNetwork.changed = tuple(given.parts)
    torch.set_num_threads(1)
    rows = measured(given.rounds, given.seeds)
    print(page_table(rows))
    if given.write:
        table = {"sites": SITES, "rounds": given.rounds, "seeds": given.seeds, "rows": rows}
        given.write.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
