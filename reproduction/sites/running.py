"""Runs the missing splits of every method on every problem, here or in several processes.

A split is written as soon as it is known, so an interrupted command resumes where it stopped. The arena
(`reproduction.arena`) runs its own problems and methods with this code."""

import dataclasses
import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fairmesh.algorithms import Algorithm
from fairmesh.comparisons.reference_models import add_references
from fairmesh.config.tables import to_table
from fairmesh.data.site import Site
from fairmesh.data.units import divided, numbered
from fairmesh.errors import BadInput, FairmeshError
from fairmesh.problems.objective import Objective
from fairmesh.problems.problem import Problem
from fairmesh.storage.strict_json import as_json
from fairmesh.training.options import Options
from fairmesh.training.result import Result
from fairmesh.training.train import train
from reproduction.lines import Line, describes, lines_of, machine, write_lines
from reproduction.sites.methods import Method
from reproduction.sites.site_problem import SiteProblem
from reproduction.workers import workers

HELD_OUT = 0.25  # share of each site's training rows by which candidates are judged


@dataclass(frozen=True)
class Scale:
    """Which splits and how many seeds a row has, and the most rounds of a run."""

    splits: int = 5
    seeds: int = 5
    rounds: int | None = None
    first_split: int | None = None  # None for the first that the table shows
    worst_needs_rows: int = 0  # held-out rows of a site that can be the worst one when candidates are compared

    def splits_of(self, problem: SiteProblem) -> range:
        """Returns the numbers of the splits."""
        first = problem.splits.start if self.first_split is None else self.first_split
        return range(first, first + self.splits)

    def rounds_of(self, problem: SiteProblem, method: Method) -> int:
        """Returns the rounds of a method: fewer where a round has several steps."""
        rounds = problem.rounds if self.rounds is None else min(self.rounds, problem.rounds)
        return max(1, rounds // method.steps_per_round)


FULL, QUICK = Scale(), Scale(splits=1, seeds=1, rounds=20)
SITES = "sites"  # the name of this bench


class Bench(NamedTuple):
    """Problems and the methods that are tried on them, by their names."""

    problems: Mapping[str, SiteProblem]
    methods: Mapping[str, Method]

    @staticmethod
    def named(name: str) -> "Bench":
        """Returns the bench of a package of `reproduction`, such as "sites"."""
        problems, methods = (importlib.import_module(f"reproduction.{name}.{part}") for part in ("problems", "methods"))
        return Bench(problems.PROBLEMS, methods.METHODS)

    @property
    def order(self) -> list[tuple[str, str]]:
        """The order of rows in files and tables: method, tuning."""
        return [(method.name, tuning) for method in self.methods.values() for tuning in method.tunings]


class Task(NamedTuple):
    """One split of one row; by names, so that another process can run it."""

    problem: str
    method: str
    tuning: str
    split: int
    scale: Scale
    device: str = "cpu"
    bench: str = SITES

    @property
    def label(self) -> str:
        return f"{self.problem}: {self.method}, {self.tuning}, split {self.split}"


def settings_of(problem: SiteProblem, method: Method, tuning: str, scale: Scale) -> Line:
    """Returns what determines the numbers of a row, as a table."""
    return {
        "problem": problem.described(),
        "algorithm": None if method.algorithm is None else to_table(method.algorithm),
        "candidates": _candidates(method) if tuning == "tuned" or method.sees_test else [],
        "topology": None if method.topology is None else to_table(method.topology),
        "objective": to_table(method.objective),
        "personalization": None if method.personalization is None else to_table(method.personalization),
        "rounds": scale.rounds_of(problem, method),
        "seeds": scale.seeds,
    }


def _candidates(method: Method) -> list[Line]:
    return [method.differences(one) for one in method.candidates]


def was_run_as(row: Line, problem: SiteProblem, method: Method, scale: Scale) -> bool:
    """Returns whether a row was run with the present settings. Fields that were added to a class since then count as
    having their defaults, as in `reproduction.lines.describes`."""
    recorded, now = row["settings"], json.loads(as_json(settings_of(problem, method, row["tuning"], scale)))
    described = {name: getattr(method, name) for name in ("algorithm", "topology", "objective", "personalization")}
    return all(
        describes(recorded.get(key), described[key]) if described.get(key) is not None else recorded.get(key) == value
        for key, value in now.items()
    )


def rows_of(results: Path, problem: str) -> list[Line]:
    """Returns the recorded rows of a problem; none if it was not run."""
    return lines_of(results, problem, ("problem", "method", "tuning", "settings", "splits"))


def run(
    problems: Sequence[str],
    methods: Sequence[str],
    results: Path,
    scale: Scale = FULL,
    device: str = "cpu",
    *,
    jobs: int = 1,
    tunings: Sequence[str] = ("untuned", "tuned"),
    bench: str = SITES,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, str]:
    """Runs the missing splits. One that fails does not stop the others.

    Args:
        problems: names of problems.
        methods: names of methods.
        results: folder of the result files, one per problem.
        scale: how many splits, seeds and rounds.
        device: "cpu" or "cuda".
        jobs: number of processes.
        tunings: "untuned" methods, "tuned" ones, or both.
        bench: the package of the problems and methods.
        say: called with messages on progress.

    Returns:
        The problems left out because their data is missing, each with the reason.

    Raises:
        FairmeshError: the first error of a split, after the others are done."""
    of = Bench.named(bench)
    book = {name: _Rows(results, of.problems[name], scale, of) for name in problems}
    left_out: dict[str, str] = {}
    tasks: list[Task] = []
    for name, rows in book.items():
        missing = [
            Task(name, method, tuning, split, scale, device, bench)
            for method in methods
            for tuning in of.methods[method].tunings
            for split in scale.splits_of(of.problems[name])
            if tuning in tunings and split not in rows.done(method, tuning)
        ]
        reason = _absence(of.problems[name]) if missing else None
        if reason is not None:
            left_out[name] = reason
        else:
            tasks += missing
    failed: list[FairmeshError] = []
    started = time.perf_counter()
    with workers(outcome_of, jobs, _share_the_cores, jobs) as carried_out:
        for k, (task, outcome) in enumerate(carried_out(tasks), 1):
            if isinstance(outcome, FairmeshError):
                say(f"{task.label}: {outcome}")
                failed.append(outcome)
                continue
            book[task.problem].record(task, outcome)
            minutes = (time.perf_counter() - started) / 60
            say(
                f"[{k}/{len(tasks)}] {task.label} ({outcome['seconds']:.0f} s); {minutes:.1f} min so far, "
                f"about {minutes * (len(tasks) - k) / k:.0f} min left"
            )
    if failed:
        raise failed[0]
    return left_out


class _Rows:
    """The rows of one problem, written after every split. Rows that were run with other settings start again."""

    def __init__(self, results: Path, problem: SiteProblem, scale: Scale, bench: Bench):
        self._results, self._problem, self._scale, self._bench = results, problem, scale, bench
        self._rows = {(row["method"], row["tuning"]): row for row in rows_of(results, problem.name)}
        for key, row in list(self._rows.items()):
            method = bench.methods.get(row["method"])
            if method is not None and not was_run_as(row, problem, method, scale):
                del self._rows[key]

    def done(self, method: str, tuning: str) -> set[int]:
        return set(map(int, self._rows.get((method, tuning), {"splits": {}})["splits"]))

    def record(self, task: Task, outcome: Line) -> None:
        settings = settings_of(self._problem, self._bench.methods[task.method], task.tuning, self._scale)
        names = {"problem": task.problem, "method": task.method, "tuning": task.tuning}
        row = self._rows.setdefault((task.method, task.tuning), names | {"settings": settings, "splits": {}})
        about = outcome.pop("about")
        if all(task.split <= int(split) for split in row["splits"]):  # by unit, counts differ a little between splits
            row |= about
        splits = row["splits"] | {str(task.split): outcome}
        row["splits"] = {split: splits[split] for split in sorted(splits, key=int)}
        order = self._bench.order
        keys = sorted(self._rows, key=lambda key: order.index(key) if key in order else len(order))
        write_lines(self._results, self._problem.name, [self._rows[key] for key in keys])


def _absence(problem: SiteProblem) -> str | None:
    """Returns why a problem's data is missing, or None. Downloads official files before several processes need them."""
    try:
        problem.sites(0)
    except BadInput as error:
        return str(error)
    return None


def _share_the_cores(jobs: int) -> None:
    if jobs > 1:
        torch.set_num_threads(1)


def outcome_of(task: Task) -> Line:
    """Trains a method on one split and returns its accuracies by seed and site, its final weights and its bytes."""
    started = time.perf_counter()
    bench = Bench.named(task.bench)
    problem, method = bench.problems[task.problem], bench.methods[task.method]
    sites = problem.sites(task.split)
    made = _made(task, problem, method, sites)
    return {
        "about": about(sites),
        **made,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": machine(task.device),
    }


def about(sites: Sequence[Site]) -> Line:
    """Returns the names of sites, their numbers of rows, and their training units and groups where there are any."""
    line: Line = {
        "sites": [site.name for site in sites],
        "rows": [len(site.train[1]) for site in sites],
        "test_rows": [len(site.test[1]) for site in sites],
    }
    if any(site.group is not None for site in sites):
        line["groups"] = [site.group for site in sites]
    if any(site.units is not None for site in sites):
        line["units"] = [len(set(site.units["train"])) for site in sites]
    return line


def _made(task: Task, problem: SiteProblem, method: Method, sites: list[Site]) -> Line:
    if method.algorithm is None:
        return {problem.recorded_as: [[round(_constant(site, problem.metric), 4) for site in sites]]}
    seeds = range(task.scale.seeds)
    if method.sees_test:
        seen = [dataclasses.replace(site, validation=site.test) for site in sites]
        trained = _trained(task, problem, method, seen, method.candidates, seeds)
        return {
            "variants": [one.line(problem) | {"chosen": chosen} for one, chosen in zip(trained, _candidates(method))]
        }
    if task.tuning == "untuned":
        return _trained(task, problem, method, sites, [method.algorithm], seeds)[0].line(problem)
    judged = _held_out(sites, task.split)
    tried = _trained(task, problem, method, judged, method.candidates, range(1))
    counted = [len(site.test[1]) >= task.scale.worst_needs_rows for site in judged]
    chosen = chosen_among(tried, method.own_models, counted)
    kept = sorted(set(chosen))
    trained = _trained(task, problem, method, sites, [method.candidates[c] for c in kept], seeds)
    line = _by_site(trained, [kept.index(c) for c in chosen]).line(problem)
    return line | {
        "chosen": chosen if method.own_models else chosen[0],
        "tried": [round(one.worst(counted), 4) for one in tried],
    }


def _constant(site: Site, metric: str) -> float:
    """Returns what the most frequent class, or the mean, of a site's training rows reaches on its test rows."""
    answers, truth = site.train[1], site.test[1]
    if metric == "accuracy":
        return float((truth == answers.mode().values).double().mean())
    error = float((truth - answers.mean()).square().mean())
    return error**0.5 if metric == "rmse" else 1 - error / float(truth.var(correction=0))


class Trained(NamedTuple):
    """An algorithm's outcome on one split."""

    accuracy: np.ndarray  # the problem's metric (seeds, sites)
    weights: np.ndarray | None  # lambda at the end (seeds, sites)
    bytes: int  # that the busiest node sends in the run
    diverged: int  # seeds
    models: Mapping[str, np.ndarray] = {}  # the metric of further models of the same training, as `accuracy`
    lower_is_better: bool = False
    halves: Mapping[str, np.ndarray] = {}  # the metric of these models on each half of the test rows (2, sites)

    @property
    def scores(self) -> np.ndarray:
        """The metric, turned so that more is better (seeds, sites)."""
        return np.nan_to_num(-self.accuracy if self.lower_is_better else self.accuracy, nan=-np.inf)

    def worst(self, counted: Sequence[bool] | None = None) -> float:
        """Returns the score of the worst site, of those that are counted; the mean of all if none is."""
        if counted is not None and not any(counted):
            return float(self.scores.mean())
        return float(self.scores[:, slice(None) if counted is None else np.array(counted)].min(axis=1).mean())

    def line(self, problem: SiteProblem) -> Line:
        line: Line = {problem.recorded_as: self.accuracy.round(4).tolist(), "bytes": self.bytes}
        if self.models:
            line["models"] = {name: values.round(4).tolist() for name, values in self.models.items()}
        if self.halves:
            line["halves"] = {name: values.round(4).tolist() for name, values in self.halves.items()}
        if self.weights is not None:
            line["lambda"] = self.weights.mean(axis=0).round(4).tolist()
        return line | ({"diverged": self.diverged} if self.diverged else {})


def chosen_among(tried: Sequence[Trained], by_site: bool, counted: Sequence[bool] | None = None) -> list[int]:
    """Returns the number of the candidate that each site uses: the same for all sites, by the worst site and then by
    the mean; or, with `by_site`, by the site's own accuracy and then by the mean. Diverged candidates come last.
    `counted` says which sites can be the worst one: all for None."""
    sites = tried[0].accuracy.shape[1]

    def best(score: Callable[[Trained], float]) -> int:
        return max(
            range(len(tried)), key=lambda c: (-tried[c].diverged, score(tried[c]), float(tried[c].scores.mean()))
        )

    if by_site:
        return [best(lambda one, i=i: float(one.scores[:, i].mean())) for i in range(sites)]
    return [best(lambda one: one.worst(counted))] * sites


def _by_site(trained: Sequence[Trained], chosen: Sequence[int]) -> Trained:
    """Returns one outcome whose site i is that of candidate chosen[i]."""
    accuracy = np.stack([trained[c].accuracy[:, i] for i, c in enumerate(chosen)], axis=1)
    used = [trained[c] for c in sorted(set(chosen))]
    return Trained(accuracy, used[0].weights, max(one.bytes for one in used), max(one.diverged for one in used))


def _held_out(sites: Sequence[Site], split: int) -> list[Site]:
    """Returns the sites judged by a part of their training rows, which is drawn at random, by unit if there are any."""
    made = []
    for i, site in enumerate(sites):
        inputs, labels = site.train
        generator, units = np.random.default_rng((split, i)), None
        if site.units is None:
            order = torch.from_numpy(generator.permutation(len(labels)))
            judging, rest = order.tensor_split([max(1, round(HELD_OUT * len(labels)))])
        else:
            names = np.asarray(site.units["train"])
            rest, judging = divided(len(labels), HELD_OUT, generator, numbered(names, len(names), str(site.name)), None)
            units = {"train": names[rest.numpy()], "test": names[judging.numpy()]}
        train, test = (inputs[rest], labels[rest]), (inputs[judging], labels[judging])
        made.append(dataclasses.replace(site, train=train, test=test, rows=None, units=units))
    return made


def _trained(
    task: Task,
    problem: SiteProblem,
    method: Method,
    sites: Sequence[Site],
    algorithms: Sequence[Algorithm],
    seeds: Sequence[int],
) -> list[Trained]:
    """Trains algorithms that differ only in numbers as one batch. Each seed has its own placement of the sites."""
    shape = sites[0].train[0].shape[1:]
    outputs = outputs_of(problem, sites)
    metric, rounds = problem.metric, task.scale.rounds_of(problem, method)
    metrics = () if metric == "accuracy" else (metric,)
    objective = Objective() if method.as_by_default else method.objective
    given = Problem(lambda: problem.model.build(shape, outputs), sites, objective=objective, metrics=metrics)
    result = train(
        given,
        method.topology,
        None if method.as_by_default else list(algorithms),
        1 if method.regularised else rounds,
        seeds=seeds,
        placements="by-seed",
        measure_every=rounds,
        own_models=method.own_models and not method.regularised,
        on_divergence="mark",
        device=task.device,
        personalization=method.personalization,
    )
    if method.regularised:
        return [_alone(dataclasses.replace(result, rounds=rounds), problem, task)]
    personal = {one.replica: one for one in result.personal}
    made = []
    for a in range(len(algorithms)):
        replicas = range(a * len(seeds), (a + 1) * len(seeds))
        records = [result.final[r] for r in replicas]
        measured = [(one["own_models"] if method.own_models else one)[metric]["sites"] for one in records]
        models: dict[str, np.ndarray] = {}
        if method.records and all(r in personal for r in replicas):
            models = {kind: np.array([personal[r].values(kind, metric) for r in replicas]) for kind in method.records}
        elif not method.records:  # a diverged replica has no models of its sites
            measured = [
                personal[r].values("personal", metric) if r in personal else found
                for r, found in zip(replicas, measured)
            ]
        weights = [one["lambda"] for one in records if "lambda" in one]
        made.append(
            Trained(
                np.array(measured, dtype=float),
                np.array(weights) if weights else None,
                max(one["bytes_busiest_node"] for one in records),
                len(set(replicas) & set(result.diverged)),
                models,
                problem.lower_is_better,
                _in_halves(result, problem, sites) if models and problem.halves else {},
            )
        )
    return made


def _in_halves(result: Result, problem: SiteProblem, sites: Sequence[Site]) -> dict[str, np.ndarray]:
    """Returns the metric of a run's models on each half of the sites' test rows (2, sites), by "personal", "common" and
    "local"; NaN where a half has no rows, or a site no such model."""
    outcomes = {kind: result.site_outcomes(kind) for kind in ("personal", "local")} | {"common": result.outcomes()}
    found = {kind: np.full((2, len(sites)), np.nan) for kind in outcomes}
    for i, site in enumerate(sites):
        halves = problem.halves(np.asarray(site.rows)) if problem.halves else np.zeros(0)
        for kind, outcome in outcomes.items():
            if outcome.of_sites[0][i] < 0:
                continue
            answers = outcome.answers[outcome.of_sites[0][i]]
            values = (answers.losses if answers.right is None else answers.right == 1).double().mean(dim=0).numpy()
            for half in np.unique(halves):
                mean = values[halves == half].mean()
                found[kind][half, i] = mean**0.5 if problem.metric == "rmse" else mean
    return found


def _alone(result: Result, problem: SiteProblem, task: Task) -> Trained:
    """Returns what sites reach alone with a validated penalty, as `fm.compare_with_references` trains them for a run of
    this many rounds."""
    found = add_references(result, Options(device=task.device), ["local"])
    if found.failed:
        raise BadInput(f"sites alone: {found.failed['local']}")
    local = found.references["local"]
    values = np.array([record[problem.metric]["sites"] for record in local.final], dtype=float)
    return Trained(values, None, 0, len(local.diverged), lower_is_better=problem.lower_is_better)


def outputs_of(problem: SiteProblem, sites: Sequence[Site]) -> int:
    """Returns how many numbers a model answers with: one, or one per class."""
    if problem.metric != "accuracy":
        return 1
    return 1 + max(int(labels.max()) for site in sites for _, labels in (site.train, site.test))


def known_methods(names: Sequence[str] | None, bench: str = SITES) -> list[str]:
    """Returns the names of methods, all of them for None. Refuses unknown ones."""
    return _known(names, Bench.named(bench).methods, "--methods")


def known_problems(names: Sequence[str] | None, half: str | None, bench: str = SITES) -> list[str]:
    """Returns the names of problems, all of them for None, of one half if it is given. Refuses unknown ones."""
    problems = Bench.named(bench).problems
    halves = list(dict.fromkeys(problem.half for problem in problems.values()))
    if half is not None and half not in halves:
        raise BadInput(f"--half is {', '.join(halves[:-1])} or {halves[-1]}, got {half!r}")
    found = [name for name in _known(names, problems, "--only") if half in (None, problems[name].half)]
    if not found:
        raise BadInput(f"--half {half} has none of the problems that --only names: {', '.join(names or ())}")
    return found


def _known(names: Sequence[str] | None, table: Mapping[str, Any], option: str) -> list[str]:
    for name in names or ():
        if name not in table:
            raise BadInput(f"{option}: there is no {name!r}; choose from {'; '.join(table)}")
    return [name for name in table if not names or name in names]
