"""A learning problem over sites: the model, the loss and each site's data, checked before anything runs."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.samples import Targets
from fairmesh.data.site import Site
from fairmesh.data.units import warn_of_spanning
from fairmesh.errors import BadInput
from fairmesh.metrics.base import NamedMetric, Task, chosen_metrics
from fairmesh.problems.batches import Sampling
from fairmesh.problems.bound_model import BoundModel, bind
from fairmesh.problems.checks import refuse_autocast
from fairmesh.problems.flat_model import FlatModel
from fairmesh.problems.learning import Learning
from fairmesh.problems.outputs import Read
from fairmesh.problems.prepared import Prepared, with_splits
from fairmesh.problems.private_data import check_private_data
from fairmesh.problems.private_run import seal
from fairmesh.problems.row_loss import Loss
from fairmesh.problems.site_samples import SiteSamples, check_forms, read_sites
from fairmesh.trainers.local_trainer import LocalTrainer

_RESERVED = {
    "round", "replica", "seed", "loss", "lambda", "epsilon", "validation", "own_models", "consensus_models",
    "consensus_duals", "nominal_bits_busiest", "nominal_bits_total", "bytes_busiest_node", "bytes_total",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Problem(Learning):
    """A model to train on the data of several sites, one site per node.

    Site i contributes the loss f_i(theta), the mean over its samples. Data, model and loss are checked together when
    the problem is made: they are run once on a few samples, as training will run them.

    Args:
        model: A module, whose weights every run starts from, or a function without arguments that makes one, called
            for each seed; frozen parameters and buffers are those of seed 0. Dropout and torch's other random
            functions draw from fairmesh's random streams while the model runs.
        sites: One `Site` per node, or just its training samples.
        loss: One of `fm.losses`, or a function (outputs, targets) -> scalar tensor, the mean over the samples. If
            targets are numbers, cross-entropy stands for the squared error. Losses of fairmesh and torch get the tensor
            that predicts (`read`), and a function of your own gets all that the model returns. Or
            `fm.losses.ModelLoss(function)`, a function (model, batch) that calls the model itself. Default:
            torch.nn.functional.cross_entropy.
        sampling: Which samples a node uses for a gradient. Default: Sampling().
        prior: p, one number > 0 per site, scaled to sum to one; None for each site's share of all training samples.
            Default: None.
        test: Test samples of the sites without their own. Default: None.
        validation: Validation samples of the sites without their own. Default: None.
        settings: Those of `Learning`, by name.
        class_names: The names of the classes, in the order of their numbers; empty if they have none. Default: ().
        splits: The same problem with other splits of the data into training and test rows. Every replica is trained on
            every split, all in one batch. `fm.train` makes it from a list of problems. Default: ().
        targets: Which part of a sample is its target, and the others are inputs: the name in a dictionary, or several
            names; the place in a tuple. None for the one that is called "labels", "label", "targets" or "target", and
            for the second of a tuple. Default: None.
        read: What the model returns -> the tensor that predicts, (samples, classes, ...) or numbers. None for the
            output itself, or its `logits`; the classes of tokens or pixels may also be on its last axis. Default: None.

    Raises:
        BadInput: The sites' data do not fit each other, the model or the loss.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> labels = torch.arange(20) % 2
        >>> sites = [fm.Site((torch.randn(20, 3) + labels[:, None], labels)) for _ in range(4)]
        >>> problem = fm.Problem(torch.nn.Linear(3, 2), sites, test=sites[0].train)
        >>> problem.n, problem.classes, problem.flat_model.dim
        (4, 2, 8)
    """

    model: nn.Module | Callable[[], nn.Module]
    sites: Sequence[Site]
    loss: Loss = field(default_factory=lambda: nn.functional.cross_entropy)  # help() leaves out torch's text so
    sampling: Sampling = field(default_factory=Sampling)
    prior: Sequence[float] | None = None
    test: Any = None
    validation: Any = None
    _: KW_ONLY
    class_names: Sequence[str] = ()
    splits: Sequence["Problem"] = ()
    targets: Targets = None
    read: Read | None = None

    def __post_init__(self):
        super().__post_init__()
        prepare(self)  # refuses bad input now, and copies the module, which may be trained later

    @property
    def prepared(self) -> Prepared:
        """The problem with its samples read and its model bound, as training uses it."""
        return prepare(self)

    @property
    def n(self) -> int:
        """The number of nodes."""
        return len(self.sites)

    @property
    def classes(self) -> int | None:
        """The number of classes that the model distinguishes, or None if targets are not labels."""
        return self.prepared.classes

    @property
    def task(self) -> Task:
        """What the problem predicts: "classes", "binary" (two classes by one output), "multi-label", "masks" or
        "numbers"."""
        return self.prepared.task

    @property
    def flat_model(self) -> FlatModel:
        """The model as one row of its trainable parameters."""
        return self.prepared.flat_model

    @property
    def prior_of_sites(self) -> Tensor:
        """The prior p (n,), float64; sums to one."""
        return self.prepared.prior_of_sites

    @property
    def shares_of_samples(self) -> Tensor:
        """The share of each site in all training samples (n,), float64."""
        return self.prepared.shares_of_samples

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How rows of a table became inputs, or None if the sites' data is not from a table."""
        return self.prepared.preprocessing


_PREPARED: dict[int, Prepared] = {}  # by id, while the problem lives: a user's subclass may have no hash


def prepare(problem: Problem | Prepared | Sequence[Problem | Prepared]) -> Prepared:
    """Returns a problem that is ready to train, or several that differ in their splits as one. A problem is prepared
    once, when it is made.

    Raises:
        BadInput: The sites' data do not fit each other, the model or the loss.
    """
    if isinstance(problem, Prepared):
        return problem
    if isinstance(problem, Problem):
        if id(problem) not in _PREPARED:
            _PREPARED[id(problem)] = _prepared(problem)
            weakref.finalize(problem, _PREPARED.pop, id(problem)).atexit = False
        return _PREPARED[id(problem)]
    every = list(problem) if isinstance(problem, Sequence) else []
    if not every or not all(isinstance(split, Problem | Prepared) for split in every):
        raise BadInput("give a Problem, or a list of problems that differ only in which rows are for training")
    return with_splits([prepare(split) for split in every])


def _prepared(problem: Problem) -> Prepared:
    """Reads the samples, binds the model to their form, and checks both together."""
    refuse_autocast()
    if problem.privacy is not None and getattr(problem.loss, "is_balanced", False):
        raise BadInput(
            'privacy: loss.class_weights = "balanced" counts the labels of all training rows; name the weights, one '
            "number per class"
        )
    if not problem.sites:
        raise BadInput("a problem needs at least one site")
    given = {setting.name: getattr(problem, setting.name) for setting in fields(problem)}
    shared = {"test": problem.test, "validation": problem.validation}
    samples = SiteSamples(sites=read_sites(problem.sites, shared, problem.targets), prior=problem.prior)
    warn_of_spanning(samples.sites)
    check_forms(samples)
    bound = bind(problem, samples)
    settings = given | vars(samples) | vars(bound)
    names = {setting.name for setting in fields(Prepared)}
    taken = names & {setting.name for setting in fields(Problem)} | {"model", "test", "validation"}
    further = {name: value for name, value in given.items() if name not in taken}
    settings |= {"splits": (), "kind": type(problem), "further": further}
    settings["primary"], settings["metrics"] = _with_primary(problem.primary, _metrics(problem), bound)
    if problem.trainer is not None and not isinstance(problem.trainer, LocalTrainer):
        settings["trainer"] = LocalTrainer(problem.trainer)
    made = Prepared(**{name: settings[name] for name in settings.keys() & names})
    made.check()
    if problem.privacy is not None:
        check_private_data(made)
        made = seal(made)  # from here on, nothing but the mechanism sees the rows
    return with_splits([made, *map(prepare, problem.splits)], same_sites=False)


def _metrics(problem: Problem) -> dict[str, Any]:
    metrics = chosen_metrics(problem.metrics)
    for name, metric in metrics.items():
        if name in _RESERVED:
            raise BadInput(f"a metric cannot be called {name!r}, which records use for something else")
        if isinstance(metric, NamedMetric):
            metrics[name] = metric.of_classes(name, problem.class_names)
    return metrics


def _with_primary(primary: str | None, metrics: dict[str, Any], bound: BoundModel) -> tuple[str, dict[str, Any]]:
    """Returns the metric that sites are compared by, and the metrics with it."""
    if primary is None:
        labelled = bound.classes or "accuracy" in metrics
        primary = "accuracy" if labelled else "rmse" if "rmse" in metrics or bound.predicts_a_number else "loss"
    measured = primary in metrics or primary == "loss" or (primary == "accuracy" and bound.classes)
    return primary, metrics if measured else metrics | chosen_metrics([primary])
