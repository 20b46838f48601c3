"""The demo: ten sites, of which six are small and have another scanner. It shows what training together brings, what
robust weights add, and which model each site should use."""

import gc
import importlib
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch

from fairmesh.algorithms import ADGDA, Algorithm, ChocoSGD, Local, TrackedADGDA
from fairmesh.algorithms.schedules import Geometric
from fairmesh.algorithms.weighting import PriorWeights
from fairmesh.cli.terminal import without_garbage_collection
from fairmesh.compression.compressors import Quantize
from fairmesh.data.datasets import Digits
from fairmesh.errors import MissingPackage
from fairmesh.evidence import LEVEL, Comparison, Outcomes, evidence_table, versus
from fairmesh.experiment import Experiment
from fairmesh.experiment import run as run_experiment
from fairmesh.problems.batches import Sampling
from fairmesh.problems.evaluator import Evaluator
from fairmesh.regularizers.builtin import ChiSquare
from fairmesh.report.first_sentences import headline_of
from fairmesh.report.plots import dots, scaled_series
from fairmesh.report.runs import Run
from fairmesh.report.style import loaded_matplotlib, save_figure
from fairmesh.report.writing import write_report
from fairmesh.training.defaults import DEFAULT_ALGORITHM
from fairmesh.training.options import Options
from fairmesh.training.result import Result
from fairmesh.training.summary import metric_tables

ROUNDS = 400
SPLITS = 6
_SIZES = (270, 240, 210, 170, 25, 25, 25, 25, 25, 25)
_ODD = 6
_WORTH_PROCESSES = 2000  # rounds of all splits; fewer take less time than starting processes


@dataclass(frozen=True)
class Contender:
    """One row of the demo's table.

    Args:
        label: Its name in tables.
        algorithm: The algorithm.
        steps: The step sizes that it is tuned with; none for an algorithm that is used as it is.
    """

    label: str
    algorithm: Algorithm
    steps: tuple[float, ...] = ()

    @property
    def alone(self) -> bool:
        return isinstance(self.algorithm, Local)


def contenders() -> dict[str, Contender]:
    """Returns the rows of the table. All that are tuned choose from three step sizes."""
    compressor, consensus_step, ratio = Quantize(bits=4), 0.5, 0.998
    scaled, plain = (0.7, 2.0, 5.6), (1.0, 3.0, 9.0)
    return {
        "alone": Contender("Alone", Local(), scaled),
        "choco-sgd": Contender(
            "CHOCO-SGD",
            ChocoSGD(primal_step=Geometric(1.0, ratio), consensus_step=consensus_step, compressor=compressor),
            plain,
        ),
        "ad-gda": Contender(
            "AD-GDA",
            ADGDA(
                primal_step=Geometric(1.0, ratio),
                dual_step=0.05,
                consensus_step=consensus_step,
                compressor=compressor,
                regularizer=ChiSquare(0.001),
            ),
            plain,  # a node multiplies its step by lambda_i, which is about 1/10
        ),
        "fixed-weights": Contender("Fixed weights", TrackedADGDA(weighting=PriorWeights()), scaled),
        "default": Contender("fairmesh's default", DEFAULT_ALGORITHM),  # this object, as if none was named
    }


def experiment(contender: Contender, seed: int, rounds: int, splits: int) -> Experiment:
    """Returns the experiment of a row. A split decides who gets which digits; all splits train as one batch."""
    first = splits * seed
    return Experiment(
        data=Digits(nodes=len(_SIZES), odd=_ODD, instrument="shifted", sizes=_SIZES, validation_share=0.1, seed=first),
        algorithm=contender.algorithm,
        rounds=rounds,
        sampling=Sampling(batch=32),
        seeds=(seed,),
        splits=splits,
        sweep={"primal_step.start": contender.steps} if contender.steps else {},
        options=Options(
            measure_every=max(1, rounds // 10),
            checkpoint_every=rounds,
            on_divergence="mark",
        ),
    )


@dataclass(frozen=True)
class Outcome:
    """What the demo trained and wrote."""

    runs: dict[str, Run]  # by the contender's name; one replica per split, and intervals against training alone
    together: Comparison  # fixed weights, compared with training alone
    robust: Comparison  # fairmesh's default, compared with fixed weights
    joining: Comparison  # fairmesh's default, compared with training alone
    report: Path | None = None  # the page, if one was written
    without_picture: str = ""  # why there is no picture next to the page

    @property
    def sentence(self) -> str:
        """Returns what joining and the weights brought."""
        return (
            f"At the worst site, training together: {self.together.worst.sentence('training alone')}; robust weights: "
            f"{self.robust.worst.sentence('fixed ones')}. On average over the sites, robust weights: "
            f"{self.robust.mean.sentence('fixed ones')}."
        )

    def headline(self) -> list[str]:
        """Returns the first sentences of a run with fairmesh's default, as `fairmesh run` begins with them."""
        return headline_of(self.runs["default"].summary)

    def sentences(self) -> list[str]:
        """Returns what each site gains by joining with fairmesh's default, in words."""
        return self.joining.sentences("alone")

    def as_json(self) -> dict[str, Any]:
        """Returns the accuracies as fractions: by contender, and the gains of the sentence."""
        default = self.runs["default"]
        return {
            "contenders": {name: _table(run) for name, run in self.runs.items()},
            "gains": {
                "training together, worst": self.together.worst.table(),
                "robust weights, worst": self.robust.worst.table(),
                "robust weights, mean": self.robust.mean.table(),
            },
            "level": LEVEL,
            "covers": default.evidence["covers"],
            "rounds": default.summary["rounds"],
            "splits": len(default.summary["final"]),
            "sentence": self.sentence,
            "headline": self.headline(),
            "sentences": self.sentences(),
        }


def _table(run: Run) -> dict[str, Any]:
    worst, mean, sites = (run.evidence[key] for key in ("worst", "mean", "sites"))
    return {
        "worst": worst["value"],
        "worst_site": worst["site"],
        "worst_interval": worst["interval"],
        "mean": mean["value"],
        "mean_interval": mean["interval"],
        "best": max(site["value"] for site in sites),
        "sites": {
            site["name"]: {key: site[key] for key in ("value", "n", "interval")}
            | {"versus_local": site["versus"].get("local")}
            for site in sites
        },
        **{key: run.summary[key] for key in ("bytes_busiest_node", "nominal_bits_busiest", "steps")},
    }


def demo(seed: int, out: Path | None, watch: Callable[[str, int], Callable[[int, str], None]] | None = None) -> Outcome:
    """Trains all contenders on all splits. Writes their folders, report.html and, with matplotlib, methods.png
    to `out`.

    Args:
        seed: Which splits.
        out: The folder to write; None to write nothing.
        watch: Makes a watcher from the name of a contender and the number of its rounds.
    """
    trained = {}
    for name, run, answers in _carried_out([(name, seed, ROUNDS, SPLITS, out) for name in _ORDER]):
        trained[name] = run, answers
        if watch:
            watch(run.label, ROUNDS)(ROUNDS, run.unit().progress(run.summary["final"]))
    of_alone, alone = trained["alone"]
    references = {"local": {"diverged": False, "sites": of_alone.by_site()}}
    runs = {}
    for name in contenders():
        run, answers = trained[name]
        evidence = evidence_table(answers, against={} if name == "alone" else {"local": alone})
        more = {"evidence": evidence, "references": {} if name == "alone" else references}
        runs[name] = replace(run, summary=run.summary | more)
    fixed, default = trained["fixed-weights"][1], trained["default"][1]
    outcome = Outcome(runs, versus(fixed, alone), versus(default, fixed), joining=versus(default, alone))
    if not out:
        return outcome
    written = write_report(list(runs.values()), out, TITLE, outcome.sentence, NOTE)
    try:
        _draw_methods(list(runs.values()), out / "methods.png")
    except MissingPackage as missing:
        outcome = replace(outcome, without_picture=str(missing))
    return replace(outcome, report=written.report)


_Task = tuple[str, int, int, int, Path | None]  # contender, seed, rounds, splits, folder
_ORDER = ("default", "fixed-weights", "alone", "choco-sgd", "ad-gda")  # the longest first


def _carried_out(tasks: Sequence[_Task]) -> Iterator[tuple[str, Run, Outcomes]]:
    """Trains in as many processes as there are cores, since the operations are too small to be split among cores.
    Meanwhile this process loads matplotlib."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, len(tasks))
    if workers == 1 or sum(rounds * splits for _, _, rounds, splits, _ in tasks) < _WORTH_PROCESSES:
        yield from map(_trained, tasks)
        return
    with ProcessPoolExecutor(workers, _context(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        with warnings.catch_warnings():  # Python 3.12 warns of every fork next to threads, also those of libraries
            warnings.simplefilter("ignore", DeprecationWarning)
            found = pool.map(_trained, tasks)
        with suppress(MissingPackage):  # of which the last line will tell
            loaded_matplotlib()
        yield from found


def _context() -> BaseContext:
    """Returns how processes are started: by a fork where that is safe, so that libraries are imported once. Of a fork,
    torch may use one thread only, and no GPU; and no other thread may hold a lock meanwhile."""
    if not sys.platform.startswith("linux") or threading.active_count() > 1 or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    with without_garbage_collection():
        importlib.import_module("torch._dynamo")  # which torch needs for the first gradient
    gc.freeze()  # so that the processes share these objects, and look for garbage among their own only
    return multiprocessing.get_context("fork")


def _trained(task: _Task) -> tuple[str, Run, Outcomes]:
    """Trains one contender on all splits. Returns its run with the step of each split that is best at the worst site's
    validation digits."""
    name, seed, rounds, splits, out = task
    contender = contenders()[name]
    folder = out and out / name
    # What candidates say that are not chosen would only confuse; the page has the notes of the chosen ones.
    result = run_experiment(experiment(contender, seed, rounds, splits), out=folder, announce=lambda said: None)
    worst = _worst_on_validation(result, contender.alone)
    chosen = [
        max(
            (r for r, replica in enumerate(result.replicas) if replica.split == split),
            key=lambda r: -1.0 if r in result.diverged else worst[r],
        )
        for split in range(splits)
    ]
    models = result.state.algorithm.models if contender.alone else None
    outcomes = result.judged(chosen, "last", models).without_outputs()
    return name, _chosen_run(result, contender, chosen), outcomes


def _worst_on_validation(result: Result, alone: bool) -> list[float]:
    """Returns the accuracy at the worst site's validation digits, one number per replica."""
    if not alone:
        return [record["validation"]["accuracy"]["worst"] for record in result.final]
    models = result.state.algorithm.models
    placements = torch.tensor([replica.placement for replica in result.replicas])
    splits = [replica.split for replica in result.replicas]
    judge = Evaluator(result.problem, "validation", models.device, models.dtype, splits=splits)
    judged = judge.of_own_models(models, placements)
    return judged["accuracy"].amin(dim=-1).tolist()


def _chosen_run(result: Result, contender: Contender, chosen: Sequence[int]) -> Run:
    """Returns the run of the chosen replicas, one per split."""
    run = Run.from_result(result, contender.label)
    steps = [result.replicas[r].algorithm.primal_step.start for r in chosen] if contender.steps else []  # type: ignore[attr-defined]
    variant = run.summary["variants"][0] | {"changes": {}, "replicas": list(chosen)}
    run = run.of_replicas(chosen, {"variants": [variant], "steps": steps})
    final = run.summary["final"]
    sent = {what: max(r[what] for r in final) for what in ("bytes_busiest_node", "nominal_bits_busiest", "bytes_total")}
    return replace(run, summary=run.summary | sent | {"metrics": metric_tables(result, final)})


def _draw_methods(runs: Sequence[Run], path: Path) -> None:
    series = {
        said: scaled_series([run.evidence[what] for run in runs], 100)
        for what, said in (("worst", "worst site"), ("mean", "mean over sites"))
    }
    save_figure(dots([run.label for run in runs], series, "accuracy, %"), path)


TITLE = "Ten sites, six of them small and with another scanner"
NOTE = (
    f"In brackets: 95 % intervals over test digits and {SPLITS} splits of the digits. Alone, CHOCO-SGD, AD-GDA and "
    "Fixed weights use the best of three step sizes, by the accuracy at the worst site on digits that are used for "
    "nothing else; fairmesh's default is not tuned. Alone is judged by each site's own model. In the documentation, "
    '"When robust weights help" shows cases in which they do not, and "How sure a result is" says what the intervals '
    "cover."
)
