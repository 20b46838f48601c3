"""The demo: ten sites, two of them with another scanner, trained with and without robustness."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fairmesh.algorithms import ADGDA, Algorithm, ChocoSGD
from fairmesh.algorithms.schedules import Geometric
from fairmesh.compression.compressors import Quantize
from fairmesh.data.datasets import Digits
from fairmesh.errors import MissingPackage
from fairmesh.experiment import Experiment, run
from fairmesh.problems.problem import Sampling
from fairmesh.regularizers.members import ChiSquare
from fairmesh.report.html import page
from fairmesh.report.plots import bars, curves
from fairmesh.report.runs import Run
from fairmesh.report.style import save_figure
from fairmesh.topology.graphs import Ring
from fairmesh.training.observers import Watch, Watching
from fairmesh.training.options import Options

ROUNDS = 600
_NODES = 10


def algorithms() -> dict[str, Algorithm]:
    """Returns the two algorithms. Both send 4-bit messages and take effective steps of 0.5 r^t: AD-GDA's step is
    multiplied by lambda_i, which is about 1/10."""
    compressor, consensus_step, ratio = Quantize(bits=4), 0.5, 0.998
    return {
        "choco-sgd": ChocoSGD(primal_step=Geometric(0.5, ratio), consensus_step=consensus_step, compressor=compressor),
        "ad-gda": ADGDA(
            primal_step=Geometric(0.5 * _NODES, ratio),
            dual_step=0.05,
            consensus_step=consensus_step,
            compressor=compressor,
            regularizer=ChiSquare(0.001),
        ),
    }


def experiments(seed: int) -> dict[str, Experiment]:
    """Returns the two experiments. The seed decides which site gets which digits, and which batches are drawn."""
    return {
        name: Experiment(
            data=Digits(nodes=_NODES, odd=2, seed=seed),
            topology=Ring(),
            algorithm=algorithm,
            rounds=ROUNDS,
            sampling=Sampling(batch=32),
            seeds=(seed,),
            options=Options(measure_every=20),
        )
        for name, algorithm in algorithms().items()
    }


@dataclass(frozen=True)
class Outcome:
    """What the demo trained and wrote."""

    runs: list[Run]
    sentence: str
    report: Path | None = None  # the page, if one was written
    without_plots: str = ""  # why there is no page although a folder was given

    def as_json(self) -> dict[str, Any]:
        """Returns the accuracies by algorithm, as fractions."""
        names = ("worst", "mean", "best", "gap", "nominal_bits_busiest", "rounds")
        return {
            "algorithms": {
                run.label: {
                    **{name: run.summary[name] for name in names},
                    "sites": dict(zip(map(str, run.summary["sites"]), run.by_site())),
                    "groups": run.summary["final"][0]["accuracy"]["groups"],
                }
                for run in self.runs
            },
            "sentence": self.sentence,
        }


def demo(seed: int, out: Path | None, watch: Callable[[str], Watching | None] | None = None) -> Outcome:
    """Trains both algorithms. Writes their folders and, if matplotlib is installed, plots and report.html to `out`."""
    runs = []
    for name, experiment in experiments(seed).items():
        watching = watch(name) if watch else None
        observers = [Watch(watching)] if watching else []
        result = run(experiment, out=None if out is None else out / name, observers=observers)
        runs.append(Run.from_result(result, name))
    outcome = Outcome(runs, _in_one_sentence(*runs))
    if out is None:
        return outcome
    try:
        return replace(outcome, report=_write_report(outcome, out))
    except MissingPackage as missing:
        return replace(outcome, without_plots=str(missing))


def _write_report(outcome: Outcome, out: Path) -> Path:
    save_figure(curves(outcome.runs), out / "curves.png")
    save_figure(bars(outcome.runs), out / "sites.png")
    path = out / "report.html"
    title = "Ten sites, two scanners: who is left behind?"
    path.write_text(page(outcome.runs, title, outcome.sentence), encoding="utf-8")
    return path


def _in_one_sentence(plain: Run, robust: Run) -> str:
    a, b = plain.summary, robust.summary
    change = 100 * (b["mean"] - a["mean"])
    return (
        f"Trained for the average, the model reads {100 * a['worst']:.0f} % of the digits at its worst site and "
        f"{100 * a['best']:.0f} % at its best; trained for the worst mixture of sites, {100 * b['worst']:.0f} % and "
        f"{100 * b['best']:.0f} %: the gap goes from {100 * a['gap']:.0f} to {100 * b['gap']:.0f} points, while the "
        f"mean over sites changes by {change:+.1f} points."
    )
