"""How long the reference models of a run take, next to the run itself."""

import time
from dataclasses import dataclass

from fairmesh.cli.demo import contenders, experiment
from fairmesh.comparisons.reference_models import add_references
from fairmesh.experiment import run


@dataclass(frozen=True)
class Cost:
    """Seconds of processor time."""

    main: float
    references: float

    @property
    def ratio(self) -> float:
        return self.references / self.main


def cost_of_references(rounds: int = 400, splits: int = 4) -> Cost:
    """Trains fairmesh's default on the demo's sites, and all references."""
    chosen = experiment(contenders()["default"], 0, rounds, splits)
    started = time.process_time()
    result = run(chosen)
    trained = time.process_time()
    add_references(result, chosen.options)
    return Cost(trained - started, time.process_time() - trained)
