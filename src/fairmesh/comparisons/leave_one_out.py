"""Leave one site out: how a model does at a site that had no part in its training."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fairmesh.algorithms.base import Algorithm
from fairmesh.config.tables import to_table
from fairmesh.errors import BadInput
from fairmesh.problems.evaluator import Evaluator
from fairmesh.problems.prepared import Prepared, with_splits
from fairmesh.problems.problem import Problem, prepare
from fairmesh.storage.files import write_atomically
from fairmesh.storage.strict_json import as_json, with_nan
from fairmesh.topology.graphs import Topology
from fairmesh.training.defaults import ROUNDS
from fairmesh.training.options import Options
from fairmesh.training.result import Result
from fairmesh.training.run_status import telling_after
from fairmesh.training.train import train

LEFT_OUT = "leave_one_out.json"  # in a run's folder


@dataclass(frozen=True, eq=False)
class LeftOut:
    """How models do at sites that they were not trained on.

    Args:
        problem: The problem with all sites.
        result: The runs. Split k n + i has all sites of split k but site i, in their order.
        judged_on: What the sites are judged by: "test", or "train" for a site's whole training set if there are no
            test sets, which is as good here, since the site was left out.
        values: For every metric one row per split and seed with a number per site, each by the model that was trained
            without the site. NaN where it is not defined.

    Example:
        >>> import fairmesh as fm
        >>> problem = fm.Experiment(fm.data.Digits(nodes=4, odd=1)).problem()
        >>> left_out = fm.leave_one_site_out(problem, algorithm=fm.TrackedADGDA(), rounds=20)
        >>> left_out.mean("accuracy").keys() == {site.name for site in problem.sites}
        True
    """

    problem: Prepared
    result: Result
    judged_on: str
    values: dict[str, list[list[float]]]

    def mean(self, metric: str | None = None) -> dict[str, float]:
        """Returns a metric by site, averaged over splits and seeds.

        Args:
            metric: The metric; None for the primary one. Default: None.
        """
        rows = self.values[metric or self.problem.primary]
        return {str(site.name): sum(row) / len(row) for site, row in zip(self.problem.sites, zip(*rows))}

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers as a table."""
        return {
            "judged_on": self.judged_on,
            "metric": self.problem.primary,
            "sites": [site.name for site in self.problem.sites],
            "values": self.values,
        }


def leave_one_site_out(
    problem: Problem | Prepared,
    topology: Topology | None = None,
    algorithm: Algorithm | None = None,
    rounds: int = ROUNDS,
    *,
    seeds: Sequence[int] = (0,),
    **options: Any,
) -> LeftOut:
    """Trains once without each site, and judges each model at the site that was left out.

    It answers what a hospital that does not take part, or has not joined yet, can expect of the model. All runs are
    replicas of one batch.

    Args:
        problem: The problem with all sites, at least three.
        topology: Who talks to whom, for one node less than there are sites; None for the
            graph of `fm.train`. Default: None.
        algorithm: The algorithm; None for that of `fm.train`. Default: None.
        rounds: Rounds to train, >= 1. Default: 600.
        seeds: Seeds of training. Default: (0,).
        **options: The fields of `fm.Options`.

    Returns:
        The metrics by site.

    Raises:
        BadInput: There are fewer than three sites, or the topology does not exist with one node less.

    Example:
        >>> import fairmesh as fm
        >>> problem = fm.Experiment(fm.data.Digits(nodes=4, odd=1)).problem()
        >>> left_out = fm.leave_one_site_out(problem, algorithm=fm.TrackedADGDA(), rounds=20, seeds=(0, 1))
        >>> len(left_out.values["accuracy"]), left_out.judged_on
        (2, 'test')
    """
    problem = prepare(problem)
    problem.refuse_privacy("training once more without each site")
    check_enough_sites(problem)
    if topology is not None:
        try:
            topology.build(problem.n - 1)
        except BadInput as error:
            raise BadInput(
                f"without one site there are {problem.n - 1} nodes, and the topology does not exist with that number "
                f"({error}); give one that does, such as fm.Ring(), or none"
            ) from error
    every = [problem.of_split(k) for k in range(len(problem.every_split))]
    without = [_without(split, i) for split in every for i in range(problem.n)]
    options = {
        "compare_weights": False,
        "choose_weights": False,
        "measure_every": rounds,
    } | options  # only the last models are looked at
    result = train(with_splits(without, same_sites=False), topology, algorithm, rounds, seeds=seeds, **options)
    judged_on = "test" if problem.held_out("test")[1] else "train"
    rows = torch.stack([result.whole_row(r) for r in range(len(result.replicas))]).cpu().float()
    at = {(replica.split, replica.seed): r for r, replica in enumerate(result.replicas)}
    values: dict[str, list[list[float]]] = {}
    for k, split in enumerate(every):
        for name, found in Evaluator(split, judged_on, "cpu", torch.float32).of_sites(rows).items():
            of_seeds = [[float(found[at[k * problem.n + i, seed], i]) for i in range(problem.n)] for seed in seeds]
            values.setdefault(name, []).extend(of_seeds)
    return LeftOut(problem, result, judged_on, values)


def add_left_out(
    result: Result,
    problem: Prepared,
    topology: Topology | None,
    options: Options,
    out: str | os.PathLike,
    resume: bool = False,
    announce: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Returns how a model does at each site that was trained without it, and writes it into the folder of a finished
    run, of which `problem` has the data of all sites. With `resume`, what is finished there is not repeated."""
    path = Path(out) / LEFT_OUT
    if resume and path.exists():
        return with_nan(json.loads(path.read_text(encoding="utf-8")))
    announce = announce or (lambda text: None)
    try:
        if topology is not None:
            topology.build(problem.n - 1)
    except BadInput:
        topology = None
        announce("without one site the topology does not exist, so models without a site have the default graph")
    what = f"training once more without each of {problem.n} sites"
    announce(what)
    options = replace(options, compare_weights=False, choose_weights=False, measure_every=result.rounds)
    seeds = list(dict.fromkeys(replica.seed for replica in result.replicas))
    algorithm = result.replicas[0].algorithm
    with telling_after(out, result, what):
        left_out = leave_one_site_out(problem, topology, algorithm, result.rounds, seeds=seeds, **to_table(options))
        write_atomically(path, (as_json(left_out.as_json(), indent=2) + "\n").encode())
    return left_out.as_json()


def check_enough_sites(problem: Prepared) -> None:
    """Raises BadInput if no site can be left out."""
    if problem.n < 3:
        raise BadInput(f"to leave one site out, at least 3 sites are needed, but there are {problem.n}")


def _without(problem: Prepared, k: int) -> Prepared:
    """Returns the problem without site k."""
    prior = None if problem.prior is None else [p for i, p in enumerate(problem.prior) if i != k]
    return problem.changed(sites=[site for i, site in enumerate(problem.sites) if i != k], prior=prior)
