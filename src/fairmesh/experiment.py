"""An experiment as one object or one TOML file: data, model, topology, algorithm and number of rounds."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

import fairmesh.trackers  # noqa: F401  registers them, so that files can name them
from fairmesh.algorithms import Algorithm
from fairmesh.config.overrides import flat_table, overridden, read_toml, resolved_files
from fairmesh.config.ranges import Count
from fairmesh.config.tables import checked, from_table, to_table
from fairmesh.data.contract import Contract
from fairmesh.data.datasets import Data, Table
from fairmesh.data.reserve import reserve
from fairmesh.data.site import Site
from fairmesh.data.site_tables import aligned
from fairmesh.data.units import announced
from fairmesh.errors import BadInput
from fairmesh.losses import ModelLoss, NamedLoss
from fairmesh.metrics import Metric, NamedMetric, chosen_metrics
from fairmesh.networks.memory import SingleProcess
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.personalization import Personalization
from fairmesh.problems.batches import Sampling
from fairmesh.problems.learning import Learning
from fairmesh.problems.model_for_sites import fitted
from fairmesh.problems.models import Logistic, Model
from fairmesh.problems.prepared import Prepared, with_splits
from fairmesh.problems.private_data import refuse_left_to_rows
from fairmesh.problems.problem import Problem, prepare
from fairmesh.topology.graphs import Topology
from fairmesh.training.defaults import DEFAULT_ALGORITHM, ROUNDS, default_for
from fairmesh.training.graph_choice import default_topology, topology_to_resume
from fairmesh.training.observers import Observer, as_observers
from fairmesh.training.options import Options
from fairmesh.training.plan import Plan
from fairmesh.training.replicas import swept
from fairmesh.training.result import Result
from fairmesh.training.train import train_plan


@checked
@dataclass(frozen=True)
class Experiment(Learning):
    """Everything that determines a run. Experiment files use the same names.

    Args:
        data: Where the sites come from, such as `fm.data.Digits()`. None if every site has its own data, between
            organisations; it then takes a contract. Default: None.
        topology: Who talks to whom; None for the graph of `fm.train`, which the run's settings name. Default: None.
        algorithm: The training algorithm, such as `fm.TrackedADGDA()`. Left out, it is what `fm.train` uses without
            one, with its objective and `compare_weights`. Default: TrackedADGDA().
        rounds: Rounds to train, >= 1. Every node sends at most one message per neighbour and round. Default: 600.
        model: The model, made for the data's shape and number of classes. Default: Logistic().
        loss: The name of a loss, such as "focal"; one of `fm.losses`, in a file a table such as { name =
            "cross-entropy", class_weights = "balanced" }; or a function (outputs, targets) -> mean over the samples, in
            a file "file.py:name"; or `fm.losses.ModelLoss`, which calls the model itself, in a file { function =
            "file.py:name" }. If targets are numbers, cross-entropy stands for the squared error. Default:
            "cross-entropy".
        sampling: Which samples a node uses for a gradient. Default: Sampling().
        seeds: Seeds of the replicas, which train as one batch; each gives its result alone. Default: (0,).
        splits: How many times the rows of each site are split into those for training and those for testing, >= 1.
            Every split is a replica, all train as one batch, and intervals include what depends on the split. The data
            must draw its split by a `seed`; split k has `seed + k`. Default: 1.
        placements: Which site each node holds, for the replicas: None for site i at node i; a number of random
            placements; a list of permutations; or "by-seed" for one random placement per seed. Default: None.
        sweep: Values of the algorithm's numbers to train together, by dotted name: {"regularizer.strength": (0.01,
            0.1)}. All combinations become replicas. Default: {}.
        prior: p, one number > 0 per site; None for each site's share of all training samples. Default: None.
        settings: Those of `Learning`, by name.
        personalization: How sites get models of their own after the last round, such as
            `fm.personalization.Mixture()`; None for `Choice()`, or nothing if an algorithm is named. Default: None.
        contract: What every site's data must look like, as in `fm.data.Contract`; None for no check. Default: None.
        observers: What else happens around the rounds, such as `fm.observers.EarlyStopping()`. Default: ().
        options: How the run is measured and carried out. Default: Options().

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(
        ...     data=fm.data.Digits(nodes=4, odd=1),
        ...     rounds=10,
        ...     sweep={"regularizer.strength": (0.05, 0.5)},
        ... )
        >>> [algorithm.regularizer.strength for algorithm in experiment.algorithms()]
        [0.05, 0.5]
        >>> experiment.problem().n
        4
    """

    data: Data | None = None
    topology: Topology | None = None
    algorithm: Algorithm = DEFAULT_ALGORITHM
    rounds: Count = ROUNDS
    model: Model = field(default_factory=Logistic)
    loss: Literal["cross-entropy", "squared-error"] | NamedLoss | ModelLoss | Callable[[Any, Any], Tensor] = (
        "cross-entropy"
    )
    sampling: Sampling = field(default_factory=Sampling)
    seeds: tuple[int, ...] = (0,)
    splits: Count = 1
    placements: int | tuple[tuple[int, ...], ...] | Literal["by-seed"] | None = None
    sweep: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    prior: tuple[float, ...] | None = None
    _: KW_ONLY
    metrics: tuple[NamedMetric, ...] | Mapping[str, NamedMetric | Metric | Callable[[Tensor, Tensor], Any]] = field(
        default_factory=dict
    )
    personalization: Personalization | None = None
    contract: Contract | None = None
    observers: tuple[Observer, ...] = ()
    options: Options = field(default_factory=Options)

    def completed(self) -> dict[str, Any]:
        """Returns the fields that follow from others: what a run uses that names no algorithm."""
        if self.algorithm is not DEFAULT_ALGORITHM:  # this object: it was left out
            return {}
        algorithm, objective, _ = default = default_for(
            self.objective, bool(self.trainer), self.weight_decay, self.privacy is not None
        )
        return {"algorithm": algorithm, "objective": objective, "options": default.completed(self.options)}

    def __post_init__(self):
        super().__post_init__()
        if not self.data and not self.contract:
            raise BadInput(
                "data: missing; name the data of all sites in [data]; or, if every site has its own, write a "
                "[contract] that they must fulfil: fairmesh data contract TABLE --target COLUMN drafts it"
            )
        chosen_metrics(self.metrics)  # refuses a name that is listed twice
        if not self.seeds:
            raise BadInput("seeds must name at least one seed")
        if self.splits > 1:
            self.known_data().resplit(1)  # refuses data that does not draw its split
        self.algorithms()

    def algorithms(self) -> list[Algorithm]:
        """Returns the algorithm with every combination of the sweep's values."""
        return swept(self.algorithm, self.sweep, [setting.name for setting in fields(self)])

    def known_data(self) -> Data:
        """Returns the data of all sites. Refuses an experiment whose sites have data of their own."""
        if not self.data:
            raise BadInput(
                "data: missing; this experiment has a [contract] only, since every site names its own data in its "
                "site.toml. To train or look at it in one place, add [data]"
            )
        return self.data

    def sites(self, data: Data) -> list[Site]:
        """Returns the sites of a source, checked by the contract if there is one."""
        return self.contract.sites(data) if self.contract else data.sites()

    def problem(self, sites: Sequence[Site] | None = None, outputs: int | None = None) -> Prepared:
        """Returns the learning problem, with data, model and loss checked together. With a personalization, sites that
        are loaded from `data` have reserved their share of rows.

        Args:
            sites: The sites; None to load them from `data`. Default: None.
            outputs: The number of outputs of the model; None for as many as the labels need. Default: None.
        """
        names = self.contract.classes if self.contract else ()
        if sites is not None:
            return self._of_sites(sites, names, outputs, 0 if self.privacy is not None else None)
        data = self.known_data()
        if self.privacy is not None:
            refuse_left_to_rows(data, self.contract)
        splits = [data] if self.splits == 1 else [data.resplit(k) for k in range(self.splits)]
        loaded = aligned([self.sites(split) for split in splits])
        if isinstance(data.innermost, Table):
            _refuse_single_class(loaded[0], data.innermost.where)
        if self.personalization:
            loaded = [reserve(sites, self.personalization.share) for sites in loaded]
        settled = data.settled_classes() if self.privacy is not None else None
        names = names or (data.class_names() if settled != 0 else ())  # which may be those that its rows have
        first = self._of_sites(loaded[0], names, outputs, settled)
        others = [self._of_sites(sites, names, outputs, settled, like=first) for sites in loaded[1:]]
        return with_splits([first, *others])

    def _of_sites(
        self,
        sites: Sequence[Site],
        names: Sequence[str],
        outputs: int | None,
        settled: int | None,
        like: Prepared | None = None,
    ) -> Prepared:
        """Returns the problem of a split, with the model of another (`like`) unless its samples need another one."""
        model, loss, names = fitted(sites, self.model, self.loss, names, outputs, settled)
        if like and isinstance(like.initial.model, partial) and like.initial.model.args == model.args:
            return like.changed(sites=sites)
        learning = {setting.name: getattr(self, setting.name) for setting in fields(Learning)}
        problem = prepare(Problem(model, sites, loss, self.sampling, self.prior, class_names=names, **learning))
        if self.personalization:
            problem.refuse_own_parts("personalization")
        return problem


def _refuse_single_class(sites: Sequence[Site], where: str) -> None:
    """Refuses a table whose target is the same label in all rows of all sites."""
    target = next((site.table.preprocessing.target for site in sites if site.table), None)
    if target and target.type == "label" and len(target.classes) == 1:
        raise BadInput(
            f"{where}: the target {target.name!r} has one class only, {target.classes[0]!r}, so there is nothing to "
            "learn; is it the right column? If sites that are not here have others, list them all as classes"
        )


def topology_of(experiment: Experiment, n: int) -> Topology:
    """Returns the topology of an experiment: its own, or the default one for n sites."""
    return experiment.topology or default_topology(n, experiment.rounds, experiment.algorithm)


def run(
    experiment: Experiment,
    *,
    out: str | os.PathLike | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    announce: Callable[[str], None] | None = None,
    handle_signals: bool = False,
    process_group: ProcessGroup | None = None,
    check: Callable[[Prepared], None] | None = None,
) -> Result:
    """Trains an experiment.

    Args:
        experiment: What to train.
        out: The folder to write: metrics, summary, models and checkpoint. None to write nothing. Default: None.
        resume: Whether to continue from the checkpoint in `out`. Default: False.
        observers: What else happens around the rounds, after the experiment's own observers. Default: ().
        announce: Called with sentences about the run, as in `fm.train`. Default: None.
        handle_signals: Whether Ctrl-C and SIGTERM stop the run after a whole round, with a checkpoint. Default: False.
        process_group: The processes that train together, if this is one of several, as in `fm.train`. Default: None.
        check: Called with the problem before anything is trained; it may raise BadInput. Default: None.

    Returns:
        The measurements and models of all replicas.

    Raises:
        BadInput: A setting or a site's data cannot be used.
        Diverged: The models are not finite or have exploded.
        Interrupted: Ctrl-C or SIGTERM arrived and `handle_signals` is True; the checkpoint is kept.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=20)
        >>> result = fm.run(experiment)
        >>> result.rounds, 0.0 <= result.worst <= 1.0
        (20, True)
    """
    process_group = process_group or SingleProcess()
    with process_group.fail_together():
        watching = as_observers([*experiment.observers, *observers])  # which refuse at once what cannot work
        with announced(announce):
            problem = experiment.problem()
        if check:
            check(problem)
        topology = experiment.topology or topology_to_resume(out, resume)
        plan = Plan.of(
            problem, topology, experiment.algorithms(), experiment.rounds, seeds=experiment.seeds,
            placements=experiment.placements, personalization=experiment.personalization, process_group=process_group,
            options=experiment.options,
        )  # fmt: skip
    if experiment.loss == "cross-entropy" and problem.loss is not nn.functional.cross_entropy:  # targets are numbers
        experiment = replace(experiment, loss="squared-error")
        if announce:
            announce('the targets are numbers, so the loss is the squared error; write loss = "..." to choose another')
    settings = to_table(replace(experiment, topology=plan.topology))  # as it is, if it was left out
    return train_plan(
        plan, out=out, resume=resume, settings=settings, observers=watching, announce=announce,
        handle_signals=handle_signals,
    )  # fmt: skip


def load_experiment(path: str | os.PathLike, assignments: Sequence[str] = (), **fields: Any) -> Experiment:
    """Reads an experiment from a TOML file.

    Args:
        path: The path of the file. Relative paths of Python files inside it start at its folder, those of data at the
            working folder.
        assignments: Settings that replace those of the file, as "dotted.key=value" with a TOML value. Default: ().
        **fields: Whole fields of `Experiment` that replace those of the file.

    Returns:
        The experiment.

    Raises:
        BadInput: The file has an unknown key or a value that cannot be used; the message names it.

    Example:
        >>> import pathlib, tempfile
        >>> import fairmesh as fm
        >>> text = '''
        ... rounds = 100
        ... data = { name = "digits", nodes = 4 }
        ... '''
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "experiment.toml")
        ...     _ = path.write_text(text)
        ...     experiment = fm.load_experiment(path, ["data.odd=1"], rounds=10)
        >>> experiment.data.odd, experiment.rounds
        (1, 10)
    """
    table = overridden(read_toml(Path(path)), assignments)
    return replace(experiment_from(table, Path(path).parent.resolve()), **fields)


def experiment_from(table: dict[str, Any], folder: Path) -> Experiment:
    """Returns the experiment that the table of an experiment file in this folder describes."""
    table = resolved_files(table, folder)
    if isinstance(table.get("sweep"), dict):
        table["sweep"] = flat_table(table["sweep"])  # regularizer.strength = [...] may stand without quotes
    if isinstance(table.get("data"), Mapping) and "contract" in table:
        table["data"] = from_table(Contract, table["contract"], "contract").settled(table["data"])
    return from_table(Experiment, table)
