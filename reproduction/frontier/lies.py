"""One site of twenty with random labels: AD-GDA plain, with a cap on weights, with clipped losses, and with both.

The two caps are chosen on held-out training data. Test data is used once, at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fairmesh.algorithms import ADGDA, Algorithm, ChocoSGD
from fairmesh.algorithms.schedules import Geometric
from fairmesh.config.tables import to_table
from fairmesh.data.datasets import (
    MNIST,
    Corrupted,
    Data,
    FashionMNIST,
    Fewer,
    HeldOut,
)
from fairmesh.data.partitions import Shards
from fairmesh.experiment import Experiment
from fairmesh.problems.models import FullyConnected
from fairmesh.regularizers.builtin import Capped, ChiSquare
from fairmesh.storage.run_folder import Record
from fairmesh.topology.graphs import Circulant
from fairmesh.training.options import Options
from fairmesh.training.train import train
from reproduction.lines import Line

NODES, LIAR = 20, 7  # the site with random labels; each placement puts it on another node
SEEDS = (0, 1, 2)
ROUNDS, SEARCHED = 1000, 500
LEVELS = (0.25, 0.5, 0.75)  # of the cap on weights; a site of twenty gets at most 1/5, 1/10, 1/15
LOSS_CAPS = (0.5, 1.0, 2.0)  # an uninformed model has log 10 = 2.3
DATA: dict[str, Data] = {"MNIST": MNIST(Shards(NODES, 4)), "Fashion-MNIST": FashionMNIST(Shards(NODES, 4))}
STEP, DUAL_STEP, RATIO = 2.0, 0.02, 0.998
PLAIN = ADGDA(Geometric(STEP, RATIO), DUAL_STEP, 1.0, regularizer=ChiSquare(0.001))


@dataclass(frozen=True)
class _Bench:
    """The data, rounds and seeds with which algorithms are compared."""

    data: Data
    rounds: int
    seeds: tuple[int, ...]
    say: Callable[[str], None]

    def ends(self, data: Data, algorithms: Sequence[Algorithm], rounds: int, seeds: Sequence[int]) -> list[Record]:
        """Returns the last records of algorithms that differ only in numbers, seed after seed."""
        options = Options(measure_every=rounds, count_bytes=False)
        topology = Circulant((1, 2))
        experiment = Experiment(data, topology, algorithms[0], rounds, FullyConnected(), options=options)
        kept = to_table(options)
        return train(
            experiment.problem(), topology, algorithms, rounds, seeds=seeds, placements="by-seed", **kept
        ).final

    def chosen(self, what: str, algorithms: dict[float, Algorithm]) -> tuple[float, dict[str, float]]:
        """Returns the value with the best worst honest site on held-out training samples, and all accuracies."""
        data, rounds = Corrupted(HeldOut(self.data), (LIAR,)), min(SEARCHED, self.rounds)
        ends = self.ends(data, list(algorithms.values()), rounds, self.seeds[:1])
        tried = {value: worst_honest(end) for value, end in zip(algorithms, ends)}
        self.say(f"  {what} on held-out training data: {tried}")
        return max(tried, key=lambda value: tried[value]), {str(value): worst for value, worst in tried.items()}

    def line(self, row: str, data: Data, algorithm: Algorithm, more: dict[str, Any]) -> Line:
        ends = self.ends(data, [algorithm], self.rounds, self.seeds)
        line = {
            "row": row,
            "worst_honest": [worst_honest(end) for end in ends],
            "mean_honest": [round(100 * sum(_honest(end)) / (NODES - 1), 3) for end in ends],
            "weight_of_corrupted": [round(end["lambda"][LIAR], 4) if "lambda" in end else None for end in ends],
            "settings": {
                "data": to_table(data),
                "algorithm": to_table(algorithm),
                "model": to_table(FullyConnected()),
                "topology": to_table(Circulant((1, 2))),
                "rounds": self.rounds,
                "seeds": list(self.seeds),
                **more,
            },
        }
        self.say(f"  {row}: worst honest {line['worst_honest']}, weight {line['weight_of_corrupted']}")
        return line


def _honest(record: Record) -> list[float]:
    return [value for i, value in enumerate(record["accuracy"]["sites"]) if i != LIAR]


def worst_honest(record: Record) -> float:
    """Returns the lowest accuracy, in percent, over all sites but the one with (possibly) random labels."""
    return round(100 * min(_honest(record)), 3)


def lines(say: Callable[[str], None] = lambda text: None, miniature: bool = False) -> list[Line]:
    """Returns a line per dataset and algorithm. A miniature has few samples and rounds."""
    made = []
    for name, data in DATA.items():
        say(f"{name}, {NODES} nodes")
        if miniature:
            data = Fewer(data, 20, 10)
        bench = _Bench(data, *((4, SEEDS[:1]) if miniature else (ROUNDS, SEEDS)), say)
        lying = Corrupted(data, (LIAR,))
        levels: dict[float, Algorithm] = {
            level: replace(PLAIN, regularizer=Capped(level, PLAIN.regularizer)) for level in LEVELS
        }
        clips: dict[float, Algorithm] = {cap: replace(PLAIN, loss_cap=cap) for cap in LOSS_CAPS}
        level, levels_tried = bench.chosen("level", levels)
        clip, clips_tried = bench.chosen("loss_cap", clips)
        both = replace(PLAIN, regularizer=Capped(level, PLAIN.regularizer), loss_cap=clip)
        choco = ChocoSGD(Geometric(STEP / NODES, RATIO), 1.0)
        search = {"held_out_level": levels_tried}, {"held_out_loss_cap": clips_tried}
        made += [
            bench.line(f"{name}, nobody lies: AD-GDA", data, PLAIN, {}),
            bench.line(f"{name}, one lies: AD-GDA", lying, PLAIN, {}),
            bench.line(f"{name}, one lies: AD-GDA, capped weights", lying, levels[level], search[0]),
            bench.line(f"{name}, one lies: AD-GDA, clipped losses", lying, clips[clip], search[1]),
            bench.line(f"{name}, one lies: AD-GDA, both", lying, both, search[0] | search[1]),
            bench.line(f"{name}, nobody lies: AD-GDA, both", data, both, search[0] | search[1]),
            bench.line(f"{name}, one lies: CHOCO-SGD", lying, choco, {}),
            bench.line(f"{name}, nobody lies: CHOCO-SGD", data, choco, {}),
        ]
    return made
