"""An experiment as one object or one TOML file: data, model, graph, algorithm, and how long."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fairmesh.algorithms import Algorithm
from fairmesh.config.overrides import assignment, files_beside, flat_table, put, read_toml
from fairmesh.config.tables import checked, from_table, to_table
from fairmesh.data.datasets import Data
from fairmesh.data.samples import Samples
from fairmesh.data.site import Site
from fairmesh.errors import BadInput
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.problems.models import Logistic, Model
from fairmesh.problems.problem import Problem, Sampling
from fairmesh.topology.graphs import Topology
from fairmesh.training.observers import Observer
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of, sites_at
from fairmesh.training.result import Result
from fairmesh.training.train import train


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error, outputs of one number per sample taken as such."""
    return nn.functional.mse_loss(outputs.reshape(targets.shape), targets)


_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": nn.functional.cross_entropy,
    "squared-error": squared_error,
}


@checked
@dataclass(frozen=True)
class Experiment:
    """Everything that determines a run; the same names stand in experiment files."""

    data: Data
    topology: Topology
    algorithm: Algorithm
    rounds: int
    model: Model = field(default_factory=Logistic)
    loss: Literal["cross-entropy", "squared-error"] | Callable[[Tensor, Tensor], Tensor] = "cross-entropy"
    sampling: Sampling = field(default_factory=Sampling)
    seeds: tuple[int, ...] = (0,)
    placements: int | tuple[tuple[int, ...], ...] | Literal["by-seed"] | None = None
    sweep: Mapping[str, tuple[float, ...]] = field(
        default_factory=dict
    )  # 'consensus_step' or 'regularizer.strength' -> values
    prior: tuple[float, ...] | None = None
    weight_decay: float = 0.0
    clip_norm: float | None = None
    augment: Callable[[Tensor, Callable[..., Tensor]], Tensor] | None = None
    metrics: Mapping[str, Callable[[Tensor, Tensor], Any]] = field(default_factory=dict)
    observers: tuple[Observer, ...] = ()
    options: Options = field(default_factory=Options)

    def __post_init__(self):
        if self.rounds < 1:
            raise BadInput(f"rounds must be >= 1, got {self.rounds}")
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if not self.seeds:
            raise BadInput("seeds must name at least one seed")
        self.algorithms()

    def algorithms(self) -> list[Algorithm]:
        """The algorithm with every combination of the sweep's values."""
        tables = []
        for values in itertools.product(*self.sweep.values()):
            table = to_table(self.algorithm)
            for path, value in zip(self.sweep, values):
                put(table, path.removeprefix("algorithm."), value, "sweep")
            tables.append(table)
        return [from_table(Algorithm, table, "algorithm") for table in tables]

    def problem(self, sites: Sequence[Site] | None = None, outputs: int | None = None) -> Problem:
        """Loads the data, where no sites are given, and checks it with the model and the loss. A model has as many
        outputs as the labels that are here need, unless their number is given."""
        sites = self.data.sites() if sites is None else sites
        shape, needed = shape_of(sites)
        outputs = outputs or needed
        return Problem(
            model=partial(self.model.build, shape, outputs),
            sites=sites,
            loss=_LOSSES[self.loss] if isinstance(self.loss, str) else self.loss,
            sampling=self.sampling,
            prior=self.prior,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            augment=self.augment,
            metrics=self.metrics,
        )


def shape_of(sites: Sequence[Site]) -> tuple[torch.Size, int]:
    """The shape of one input, and how many outputs a model needs: classes, or numbers to predict."""
    if not sites:
        raise BadInput("data: no site")
    every = [Samples.of(site.train, f"site {i} ({site.name or 'unnamed'})") for i, site in enumerate(sites)]
    shape, targets = every[0].inputs.shape[1:], every[0].targets
    if targets.is_floating_point():
        return shape, max(1, targets.shape[1:].numel())
    return shape, 1 + max(int(samples.targets.max()) for samples in every if samples.here)


def run(
    experiment: Experiment,
    *,
    out: str | os.PathLike | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    announce: Callable[[str], None] | None = None,
    handle_signals: bool = False,
    process_group: ProcessGroup | None = None,
) -> Result:
    """Trains an experiment; with `out`, writes and can resume the run's folder; with `process_group`, as one of several
    processes."""
    return train(
        _problem_at(process_group, experiment) if process_group else experiment.problem(),
        experiment.topology,
        experiment.algorithms(),
        experiment.rounds,
        seeds=experiment.seeds,
        placements=experiment.placements,
        out=out,
        resume=resume,
        settings=to_table(experiment),
        observers=[*experiment.observers, *observers],
        announce=announce,
        handle_signals=handle_signals,
        process_group=process_group,
        **to_table(experiment.options),
    )


def _problem_at(process_group: ProcessGroup, experiment: Experiment) -> Problem:
    """With the data of the nodes hosted here; that of others is read and let go."""
    with process_group.fail_together():
        problem = experiment.problem()
        replicas = replicas_of(experiment.algorithms(), experiment.seeds, experiment.placements, problem.n)
        return problem.keeping(sites_at(process_group.nodes(problem.n), replicas))


def load_experiment(path: str | os.PathLike, assignments: Sequence[str] = (), **fields: Any) -> Experiment:
    """The experiment in a TOML file, with 'dotted.key=value' assignments and whole fields put in its place."""
    path = Path(path)
    table = read_toml(path)
    for key, value in map(assignment, assignments):
        put(table, key, value, f"--set {key}")
    table = files_beside(table, path.parent.resolve())
    if isinstance(table.get("sweep"), dict):
        table["sweep"] = flat_table(table["sweep"])  # regularizer.strength = [...] may stand without quotes
    return replace(from_table(Experiment, table), **fields)


def topology_from(name: str, assignments: Sequence[str]) -> Topology:
    """The topology of this name with 'key=value' settings."""
    table: dict[str, Any] = {"name": name}
    for key, value in map(assignment, assignments):
        put(table, key, value, f"--set {key}")
    return from_table(Topology, table, "topology")
