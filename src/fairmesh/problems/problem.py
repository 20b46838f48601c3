"""A learning problem over sites: the model, the loss and each site's data, checked before anything runs."""

import copy
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from fairmesh.config.registry import registered_name
from fairmesh.config.tables import checked
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.rows import stays_apart
from fairmesh.data.samples import Samples, Targets
from fairmesh.data.site import Site
from fairmesh.errors import BadInput, in_a_line, nearest
from fairmesh.losses import NamedLoss
from fairmesh.losses.members import squared_error
from fairmesh.metrics.base import TASKS, Metric, NamedMetric, Task, chosen_metrics, predicted_labels, task_of
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.batch_norm import BatchNormPolicy, layers_of, under_policy
from fairmesh.problems.checks import check_gradient, check_mean, why_not_stacked
from fairmesh.problems.flat_model import FlatModel
from fairmesh.problems.losses import Augmentation, Loss, as_floats, reads_logits
from fairmesh.problems.objective import Objective
from fairmesh.problems.outputs import (
    PackedLoss,
    Packing,
    Read,
    classes_last,
    classes_second,
    is_built_in,
    logits_of,
    read_packed,
)
from fairmesh.problems.parts import Parts
from fairmesh.problems.stacking import AtOnce, slower_stacked
from fairmesh.problems.subgroups import numbered, own_names

BUILT_IN_METRICS = {"accuracy": True, "loss": False}  # name -> whether higher is better
_TARGETS_CHECKED = 32  # of each site, by which the loss is checked
_RESERVED = {
    "round", "replica", "seed", "loss", "lambda", "phi", "validation", "own_models", "consensus_models",
    "consensus_duals", "nominal_bits_busiest", "nominal_bits_total", "bytes_busiest_node", "bytes_total",
}  # fmt: skip


@checked
@dataclass(frozen=True)
class Sampling:
    """Which samples a node uses for one gradient.

    Args:
        batch: Samples per batch, >= 1; not used by `order = "full"`. Default: 50.
        order: "random" draws with replacement. "shuffled" takes every sample once per epoch, in a random order that
            differs from epoch to epoch; a batch that reaches over the end of an epoch continues in the next. "cyclic"
            takes the samples in their order, "full" takes all samples of the node. Default: "random".
        batches_per_step: Batches per gradient, >= 1, whose gradients are averaged (the AD-GDA paper's oracle
            averaging). Default: 1.

    Example:
        >>> import fairmesh as fm
        >>> fm.Sampling(batch=32, order="cyclic")
        Sampling(batch=32, order='cyclic', batches_per_step=1)
    """

    batch: int = 50
    order: Literal["random", "shuffled", "cyclic", "full"] = "random"
    batches_per_step: int = 1

    def __post_init__(self):
        if self.batch < 1:
            raise BadInput(f"batch must be >= 1, got {self.batch}")
        if self.batches_per_step < 1:
            raise BadInput(f"batches_per_step must be >= 1, got {self.batches_per_step}")


@dataclass(frozen=True, eq=False)
class Problem:
    """A model to train on the data of several sites, one site per node.

    Site i contributes the loss f_i(theta), the mean over its samples. Data, model and loss are checked together when
    the problem is made: they are run once on a few samples, as training will run them.

    Args:
        model: A module, whose weights every run starts from, or a function without arguments that makes one, called
            for each seed. Dropout and torch's other random functions draw from fairmesh's random streams while the
            model runs.
        sites: One `Site` per node, or just its training samples.
        loss: One of `fm.losses`, or a function (outputs, targets) -> scalar tensor, the mean over the samples. If
            targets are numbers, cross-entropy stands for the squared error. Losses of fairmesh and torch get the tensor
            that predicts (`read`), and a function of your own gets all that the model returns. Default:
            torch.nn.functional.cross_entropy.
        sampling: Which samples a node uses for a gradient. Default: Sampling().
        prior: p, one number > 0 per site, scaled to sum to one; None for each site's share of all training samples.
            Default: None.
        test: Test samples of the sites without their own. Default: None.
        validation: Validation samples of the sites without their own. Default: None.
        weight_decay: Multiple of the model that is added to each gradient, >= 0. Default: 0.0.
        clip_norm: Largest Euclidean norm of each node's gradient, > 0; None for no clipping. Default: None.
        augment: (batch of inputs, draw) -> batch of inputs, where draw(*shape) returns uniforms in [0, 1). Default:
            None.
        metrics: Further metrics: a list of built-in ones, such as ["auroc", fm.metrics.Sensitivity(threshold=0.3)]; or
            a table of names, to built-in ones, `fm.Metric`, or functions (outputs, targets) of a whole test set ->
            number, higher is better. Accuracy, if targets are labels, and loss are always measured. Default: {}.
        objective: Which losses the robust weights follow. Default: Objective(), the training losses.
        models_at_once: How many models (nodes times replicas) are evaluated at once: "all" by vmap, a number k >= 1 to
            bound the memory, 1 for one after another, which takes any module. "auto" is "all" or 1, by the kind of
            model: 1 if vmap cannot evaluate it (LSTMs, checkpointing, branches on data) or if its layers are slower
            stacked (docs/performance.md). Results agree to rounding. Default: "auto".
        parts: Which parameters stay at their site and which are not trained. Default: Parts(), all are shared.
        batch_norm: What BatchNorm layers do: "frozen" (statistics as given, for pretrained networks), "local"
            (statistics and affine parameters stay at the site: FedBN), "shared" (affine parameters are shared,
            statistics are averaged for the common model), "convert" (nn.GroupNorm instead), or "refuse", which accepts
            layers in evaluation mode only, as "frozen" does (docs/models-and-parts.md). Default: "refuse".
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
    loss: Loss = nn.functional.cross_entropy
    sampling: Sampling = field(default_factory=Sampling)
    prior: Sequence[float] | None = None
    test: Any = None
    validation: Any = None
    weight_decay: float = 0.0
    clip_norm: float | None = None
    augment: Augmentation | None = None
    metrics: Mapping[str, str | Callable[[Tensor, Tensor], Any]] | Sequence[str | NamedMetric] = field(
        default_factory=dict
    )
    objective: Objective = field(default_factory=Objective)
    models_at_once: int | Literal["auto", "all"] = "auto"
    parts: Parts = field(default_factory=Parts)
    batch_norm: BatchNormPolicy = "refuse"
    class_names: Sequence[str] = ()
    splits: Sequence["Problem"] = ()
    targets: Targets = None
    read: Read | None = None

    def __post_init__(self):
        if not self.sites:
            raise BadInput("a problem needs at least one site")
        if not math.isfinite(self.weight_decay) or self.weight_decay < 0:
            raise BadInput(f"weight_decay must be a finite number >= 0, got {self.weight_decay}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadInput(f"clip_norm must be > 0, got {self.clip_norm}")
        if self.batch_norm not in get_args(BatchNormPolicy):
            raise BadInput(f"batch_norm: {self.batch_norm!r}{nearest(self.batch_norm, get_args(BatchNormPolicy))}")
        number = type(self.models_at_once) is int and self.models_at_once >= 1
        if not number and self.models_at_once not in ("auto", "all"):
            raise BadInput(f"models_at_once must be 'auto', 'all' or a whole number >= 1, got {self.models_at_once!r}")
        given = [site if isinstance(site, Site) else Site(site) for site in self.sites]
        sites = [self._read(i, site) for i, site in enumerate(given)]
        object.__setattr__(self, "sites", sites)
        if isinstance(self.model, nn.Module):  # a copy: training the module later must not change where runs start
            object.__setattr__(self, "model", copy.deepcopy(self.model).cpu())
        metrics = chosen_metrics(self.metrics)
        for name, metric in metrics.items():
            if isinstance(metric, NamedMetric):
                metrics[name] = metric.of_classes(name, self.class_names)
        object.__setattr__(self, "metrics", metrics)
        for name in self.metrics_by_name:
            if name in _RESERVED:
                raise BadInput(f"a metric cannot be called {name!r}, which records use for something else")
        if not self.here:
            raise BadInput("none of the sites' data is here; a host needs that of one site at least")
        first = sites[0].train
        for i, site in enumerate(sites):
            for what in ("inputs", "targets"):
                here, there = getattr(site.train, what), getattr(first, what)
                if trees.form(here) != trees.form(there):
                    raise BadInput(
                        f"site {i} ({site.name}): {what} are {trees.form_in_words(here)}, but site 0 has "
                        f"{trees.form_in_words(there)}; all sites need the same"
                    )
        if self.objective.subgroups:
            for i in self.here:
                self.subgroup_numbers(i)
        self._settle_loss()
        self._probe()
        for k, other in enumerate(self.splits, start=1):
            self._check_split(other, k)

    def _settle_loss(self) -> None:
        """Chooses the loss of numbers if none was given, and finds balanced class weights."""
        targets = self.sites[0].train.targets
        if not isinstance(targets, Tensor):
            if is_built_in(self.loss):
                raise BadInput(
                    f"targets are several tensors ({trees.form_in_words(targets)}), but the loss takes one; give "
                    "loss=function(outputs, targets) of your own, or one target with Problem(targets=...)"
                )
            self._pack_outputs()
            return
        if self.loss is nn.functional.cross_entropy and targets.is_floating_point() and targets[0].numel() == 1:
            object.__setattr__(self, "loss", squared_error)
        self._pack_outputs()
        if isinstance(self.loss, NamedLoss) and self.loss.is_balanced:
            if len(self.here) < self.n:
                raise BadInput(
                    'loss: class_weights = "balanced" needs the labels of all sites, which are not here; give the '
                    "weights as a list, one number per class"
                )
            labels = torch.cat([site.train.targets.flatten() for site in self.sites]).long()
            labels = labels[(labels >= 0) & (labels != self._ignored)]
            counts = torch.bincount(labels, minlength=self._outputs_per_target()).tolist()
            object.__setattr__(self, "loss", self.loss.fitted(counts))
        if isinstance(self.loss, NamedLoss):
            self.loss.check(self._outputs_per_target())

    def _pack_outputs(self) -> None:
        """Lets a loss of the user's own see all that the model returns."""
        given = self.loss.function if isinstance(self.loss, PackedLoss) else self.loss
        packing = self._readings[2]
        object.__setattr__(self, "loss", given if packing is None else PackedLoss(given, packing))

    def _outputs_per_target(self) -> int:
        """Returns how many classes the outputs of the model can tell apart; one logit tells two."""
        outputs, targets = self._outputs_of_probe(), self.sites[self.here[0]].train.targets[:2]
        return 2 if outputs.numel() == targets.numel() else outputs.shape[1]

    def _check_split(self, other: "Problem", k: int) -> None:
        """Raises BadInput if another split differs in more than its rows."""
        for what, mine, theirs in (
            ("number of sites", self.n, other.n),
            ("form of inputs", trees.form(self.sites[0].train.inputs), trees.form(other.sites[0].train.inputs)),
            ("number of parameters", self.flat_model.dim, other.flat_model.dim),
            ("metrics", list(self.metrics_by_name), list(other.metrics_by_name)),
            ("sampling", self.sampling, other.sampling),
            ("models_at_once", self.models_at_once, other.models_at_once),
            ("parts", self.parts, other.parts),
            ("batch_norm", self.batch_norm, other.batch_norm),
        ):
            if mine != theirs:
                raise BadInput(
                    f"split {k} differs from split 0 in its {what} ({theirs} and {mine}); only rows may differ"
                )
        if other.splits:
            raise BadInput(f"split {k} has splits of its own; give all of them in one list")
        if self.objective.subgroups:
            raise BadInput("objective.subgroups: subgroups of several splits differ; train one split at a time")

    @property
    def every_split(self) -> list["Problem"]:
        """This problem, which is split 0, and its other splits."""
        return [self, *self.splits]

    def of_split(self, k: int) -> "Problem":
        """Returns the problem of split k, without the others."""
        return self.splits[k - 1] if k else self._without_splits

    @cached_property
    def _without_splits(self) -> "Problem":
        return dataclasses.replace(self, splits=()) if self.splits else self

    def each(self, change: Callable[["Problem"], "Problem"]) -> "Problem":
        """Returns the problem with every split changed by a function."""
        if not self.splits:
            return change(self)
        first, *others = (change(self.of_split(k)) for k in range(len(self.every_split)))
        return dataclasses.replace(first, splits=others)

    def _read(self, i: int, site: Site) -> Site:
        """Returns the site with a name, a group, and every set as Samples; a set that sites share is read once."""
        name = site.name or f"node {i}"
        sets: dict[str, Samples | None] = {
            "train": Samples.of(site.train, f"site {i} ({site.name or 'unnamed'})", self.targets)
        }
        if site.reserved is not None:
            sets["reserved"] = Samples.of(site.reserved, f"reserved rows of site {i} ({name})", self.targets)
        for split, shared in (("test", self.test), ("validation", self.validation)):
            source = getattr(site, split)
            source = shared if source is None else source
            if source is not None and _is_empty(source):  # a site without test data is trained and not measured
                sets[split] = None
            elif source is not None:
                known = self._sets.get(id(source))
                read = known[1] if known else Samples.of(source, f"{split} set of site {i} ({name})", self.targets)
                sets[split] = read
                self._sets[id(source)] = source, read  # keeps the source alive, so that its id is not reused
        return dataclasses.replace(site, name=name, group=name if site.group is None else site.group, **sets)

    @cached_property
    def _sets(self) -> dict[int, tuple[Any, Samples]]:
        return {}

    @property
    def n(self) -> int:
        """The number of nodes."""
        return len(self.sites)

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How rows of a table became inputs, or None if the sites' data is not from a table."""
        return next((site.table.preprocessing for site in self.sites if site.table is not None), None)

    @cached_property
    def here(self) -> list[int]:
        """The sites whose data this process holds: all of them in a simulation."""
        return [i for i, site in enumerate(self.sites) if site.train.here]

    def keeping(self, sites: Collection[int]) -> "Problem":
        """Returns the same problem at a process that holds only these sites' data.

        Of the other sites it knows the number of samples."""

        def kept(i: int, site: Site, split: str) -> Samples | None:
            samples = getattr(site, split)
            if samples is None:
                return None
            if i in sites:
                return alone(samples)
            away = Samples.elsewhere(len(samples), samples)
            return dataclasses.replace(away, subgroup_names=samples.subgroup_names)

        @functools.cache
        def alone(samples: Samples) -> Samples:  # a set that sites share stays one
            return samples.alone()

        splits = ("train", "test", "validation", "reserved")
        held = [
            dataclasses.replace(
                s, **{w: kept(i, s, w) for w in splits}, table=None if s.table is None else s.table.without_rows()
            )
            for i, s in enumerate(self.sites)
        ]
        others = [other.keeping(sites) for other in self.splits]
        return dataclasses.replace(self, sites=held, test=None, validation=None, splits=others)

    def subgroups_of(self, i: int) -> tuple[str, ...]:
        """Returns the names of the subgroups that have weights at site i, in the order of their numbers."""
        if self.objective.subgroups == "within":
            return own_names(self.sites[i].train)
        if self.objective.subgroups is None or self.objective.subgroup_names:
            return self.objective.subgroup_names
        unknown = [site.name for site in self.sites if not site.train.subgroup_names and not site.train.here]
        if unknown:
            raise BadInput(
                f"objective.subgroup_names must list all subgroups, since those of {unknown[0]} are not known here"
            )
        return tuple(sorted({name for site in self.sites for name in site.train.subgroup_names}))

    def subgroup_numbers(self, i: int) -> Tensor:
        """Returns the subgroup of each training row of site i, as a number among `subgroups_of(i)`."""
        return numbered(self.sites[i].train, self.subgroups_of(i), f"site {i} ({self.sites[i].name})")

    @cached_property
    def subgroup_count(self) -> int:
        """The number of subgroups that a node distinguishes, the same at every node of a process."""
        if self.objective.subgroups == "within":  # those of a site that are too small share one
            return 1 + max(len(site.train.subgroup_names) for site in self.sites)
        return len(self.subgroups_of(0))

    @cached_property
    def prior_of_sites(self) -> Tensor:
        """The prior p (n,), float64; sums to one."""
        sizes = [len(site.train) for site in self.sites]
        try:
            given = torch.as_tensor(sizes if self.prior is None else self.prior, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise BadInput(f"prior must be a list of {self.n} numbers, got {self.prior!r}") from error
        if given.shape != (self.n,):
            raise BadInput(f"prior has {given.numel()} entries for {self.n} sites; give one number for each")
        unfit = ~(torch.isfinite(given) & (given > 0))
        if bool(unfit.any()):
            bad = int(unfit.nonzero()[0])
            raise BadInput(f"prior of site {bad} is {float(given[bad])}; every site needs a finite prior > 0")
        return given / given.sum()

    @cached_property
    def flat_model(self) -> FlatModel:
        """The model as one row of its trainable parameters."""
        return self._whole_model.reading(self._readings[0])

    @cached_property
    def _whole_model(self) -> FlatModel:
        module = self._module(0)
        local, shared = self.batch_norm == "local", self.batch_norm == "shared"
        return FlatModel(module, self.parts.local_names(module), local_affine=local, pool_statistics=shared)

    def prepared(self, module: nn.Module) -> nn.Module:
        """Returns a module of the user's as it is trained: frozen by name, and with its BatchNorm layers under the
        policy. It changes the module."""
        self.parts.freeze(module)
        return under_policy(module, self.batch_norm, self.parts.frozen)

    @cached_property
    def _prepared(self) -> nn.Module:
        module, as_given = cast(nn.Module, self.model), (self.parts, self.batch_norm) == (Parts(), "refuse")
        return self.prepared(module if as_given else copy.deepcopy(module))

    @cached_property
    def _readings(self) -> tuple[Read | None, Read | None, Packing | None]:
        """How outputs of the module become the tensor that losses get; how that becomes the one that predicts; and how
        a structure is packed for a loss of the user's own."""
        whole, samples = self._whole_outputs_of_probe(), self.sites[self.here[0]].train
        read = self.read or logits_of
        try:
            predicting = read(whole)
        except BadInput:
            raise
        except Exception as error:  # the user's function may raise anything
            raise BadInput(f"read fails for what the model returns: {in_a_line(error)}") from error
        if not isinstance(predicting, Tensor):
            raise BadInput(f"read must return one tensor, got a {type(predicting).__name__}")
        count = min(2, len(samples))
        if predicting.ndim == 0 or len(predicting) != count:
            raise BadInput(
                f"the model gives {tuple(predicting.shape)} for {count} samples; it must give one row per sample"
            )
        plain = isinstance(whole, Tensor)
        loss = self.loss.function if isinstance(self.loss, PackedLoss) else self.loss
        if self.read is None and classes_last(
            predicting, trees.at(samples.targets, slice(2)), not plain, is_built_in(loss)
        ):
            read = functools.partial(classes_second, logits_of)
        unchanged = self.read is None and plain and read is logits_of
        if is_built_in(loss) or unchanged:
            return None if unchanged else read, None, None
        if plain:
            return None, read, None
        packing = Packing(whole, count)
        return packing.pack, functools.partial(read_packed, read, packing), packing

    def predictions(self, outputs: Tensor) -> Tensor:
        """Returns the tensor that predicts, which metrics read, of the outputs of one model (samples, ...)."""
        read = self._readings[1]
        return outputs if read is None else read(outputs)

    @property
    def structured(self) -> str | None:
        """What model and samples have several of, or read in a special way; None if inputs, targets and outputs are one
        tensor each, as the model takes and gives it."""
        train = self.sites[0].train
        found = [what for what in ("inputs", "targets") if not isinstance(getattr(train, what), Tensor)]
        outputs = [] if self._readings == (None, None, None) else ["outputs"]
        return " and ".join(found + outputs) or None

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns for each sample whether its class is predicted (samples,). One without a label, which the loss
        ignores, counts as right."""
        labels = predicted_labels(self.predictions(outputs))
        truths, ignored = targets.reshape(labels.shape), self._ignored
        return labels == truths if ignored is None else (labels == truths) | (truths == ignored)

    @property
    def _ignored(self) -> int | None:
        """The label of samples that the loss ignores."""
        return getattr(self.loss, "ignore_index", None) if isinstance(self.loss, NamedLoss) else None

    def _module(self, seed: int) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return self._prepared
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = self.model()
        if not isinstance(made, nn.Module):
            raise BadInput(f"the model function returned a {type(made).__name__}, not an nn.Module")
        return self.prepared(made.cpu())

    def initial_model(self, seed: int) -> nn.Module:
        """Returns the module that every node of a replica starts from. It must not be changed."""
        return self._module(seed)

    def initial_row(self, seed: int) -> Tensor:
        """Returns the shared parameters that every node of a replica starts from, as a row (dim,) in float64."""
        return self.initial_whole_row(seed)[: self.flat_model.dim]

    def initial_whole_row(self, seed: int) -> Tensor:
        """Returns the model that every node of a replica starts from, its own part included, as a row in float64."""
        return self.flat_model.row_of(self._module(seed)).double()

    @property
    def shares_of_samples(self) -> Tensor:
        """The share of each site in all training samples (n,), float64."""
        sizes = torch.tensor([len(site.train) for site in self.sites], dtype=torch.float64)
        return sizes / sizes.sum()

    @property
    def metrics_by_name(self) -> dict[str, Callable[[Tensor, Tensor], Any]]:
        """The further metrics, as objects that can be called."""
        return cast(dict[str, Callable[[Tensor, Tensor], Any]], self.metrics)

    @cached_property
    def task(self) -> Task:
        """What the problem predicts: "classes", "binary" (two classes by one output), "multi-label", "masks" or
        "numbers"."""
        outputs, samples = self.predictions(self._outputs_of_probe()), self.sites[self.here[0]].train
        if not isinstance(samples.targets, Tensor):
            return "several"
        logits = reads_logits(self.loss) and all(
            bool(((t == 0) | (t == 1)).all()) for t in (self.sites[i].train.targets for i in self.here)
        )
        return task_of(outputs, samples.targets[: len(outputs)], logits)

    @cached_property
    def classes(self) -> int | None:
        """The number of classes that the model distinguishes, or None if targets are not labels."""
        if self.task == "binary":
            return 2
        return self.predictions(self._outputs_of_probe()).shape[-1] if self.task == "classes" else None

    def _outputs_of_probe(self) -> Tensor:
        read = self._readings[0]
        whole = self._whole_outputs_of_probe()
        return whole if read is None else read(whole)

    def _whole_outputs_of_probe(self) -> Any:
        """Returns all that the model returns for two samples."""
        train = self.sites[self.here[0]].train
        inputs = trees.at(train.inputs, torch.arange(min(2, len(train))))  # a copy: a model may change its inputs
        model = self._whole_model.to(torch.device("cpu"), torch.float32)
        try:
            with torch.no_grad():
                return model(self._whole_model.row_of(self._module(0)).float(), as_floats(inputs, torch.float32))
        except BadInput:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            handed = (
                ""
                if isinstance(inputs, Tensor)
                else ("; a dictionary of inputs is handed to forward as keywords, a tuple as positional arguments")
            )
            shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else trees.form_in_words(inputs)
            raise BadInput(f"the model does not accept inputs of shape {shape}: {error}{handed}") from error

    @property
    def primary(self) -> str:
        """The metric that sites are compared by: "accuracy" if targets are labels, else "loss"."""
        return "accuracy" if self.classes or "accuracy" in self.metrics_by_name else "loss"

    def higher_is_better(self, metric: str) -> bool:
        """Returns whether a larger value of a metric is better."""
        chosen = self.metrics_by_name.get(metric)
        known = isinstance(chosen, Metric | NamedMetric)
        return chosen.higher_is_better if known else BUILT_IN_METRICS.get(metric, True)

    def is_share(self, metric: str) -> bool:
        """Returns whether a metric is a share, which tables show in per cent."""
        chosen = self.metrics_by_name.get(metric)
        return chosen.is_share if isinstance(chosen, NamedMetric) else metric == "accuracy"

    def held_out(self, split: Literal["test", "validation", "train"]) -> tuple[list[Samples], list[int]]:
        """Returns the distinct sets of a split that are here, and the index of the one that judges each site.

        The index is -1 if another process holds the set, or if the site has none. There are no indices if no site has
        one."""
        found: dict[int, int] = {}
        sets: list[Samples] = []
        of_site = []
        for i, site in enumerate(self.sites):
            samples = getattr(site, split)
            if samples is None or not samples.here:
                of_site.append(-1)
                continue
            if id(samples) not in found:
                found[id(samples)] = len(sets)
                sets.append(self._checked(samples, f"{split} set of site {i} ({site.name})", split != "train"))
            of_site.append(found[id(samples)])
        return sets, of_site if any(self.has(i, split) for i in range(self.n)) else []

    def has(self, i: int, split: Literal["test", "validation", "train"]) -> bool:
        """Returns whether site i has a set of a split, here or in another process."""
        return getattr(self.sites[i], split) is not None

    def _checked(self, samples: Samples, what: str, judges: bool = True) -> Samples:
        first = self.sites[0].train
        for part in ("inputs", "targets"):
            here, there = getattr(samples, part), getattr(first, part)
            if trees.form(here) != trees.form(there):
                raise BadInput(
                    f"{what}: {part} are {trees.form_in_words(here)}, but training {part} are "
                    f"{trees.form_in_words(there)}"
                )
        if self.classes is not None and samples.here:
            labels = samples.targets
            if self._ignored is not None:
                labels = labels[labels != self._ignored]
                if not len(labels) or (judges and len(labels) < len(samples)):
                    raise BadInput(
                        f"{what}: {len(samples) - len(labels)} of {len(samples)} samples have no label (target "
                        f"{self._ignored}, which the loss ignores)"
                        + ("; leave them out, since they cannot judge a model" if judges else "; label some")
                    )
            lowest, highest = int(labels.min()), int(labels.max())
            if lowest < 0 or highest >= self.classes:
                shown = "one output" if self.task == "binary" else f"{self.classes} classes"
                raise BadInput(
                    f"{what}: labels run from {lowest} to {highest}, but the model has {shown}: "
                    f"labels must lie in 0..{self.classes - 1}"
                    + ("; to predict numbers, give targets as floats" if self.task == "binary" else "")
                    + (
                        f"; samples without a label: loss = fm.losses.CrossEntropy(ignore_index={lowest})"
                        if lowest < 0 and self._ignored is None
                        else ""
                    )
                )
        return samples

    def _probe(self) -> None:
        """Runs model and loss once as training will, so that an unsuitable problem is refused now."""
        self.prior_of_sites.sum()  # refuses an invalid prior
        model = self.flat_model.to(
            torch.device("cpu"), torch.float32
        )  # refuses a model that cannot be a row of parameters
        for i, site in enumerate(self.sites):
            self._checked(site.train, f"site {i} ({site.name})", judges=False)
            if site.reserved is not None:
                self._checked(site.reserved, f"reserved rows of site {i} ({site.name})", judges=False)
        for split in ("test", "validation"):
            self.held_out(split)
        inputs, targets, more = self._few_samples()
        if isinstance(self.loss, NamedLoss) and self.loss.of_numbers and self.task in ("classes", "masks"):
            raise BadInput(
                f"the loss {registered_name(self.loss)!r} needs numbers to predict, but the problem predicts "
                f'{TASKS[self.task]}; write loss = "cross-entropy", or, in the [data] of a table, predict = "numbers"'
            )
        row = self.initial_whole_row(0).float()
        self._check_batches()
        check_gradient(model, row, self.loss, self.augment, (inputs, targets))
        with torch.no_grad():
            check_mean(self.loss, model(row, inputs), trees.joined([targets, more]))
        self.at_once(torch.device("cpu"))  # refuses a model that cannot be evaluated in the way that is asked for
        for name, metric in self.metrics_by_name.items():
            if isinstance(metric, NamedMetric):
                metric.check(name, self.task, self.classes)

    def _check_batches(self) -> None:
        """Raises BadInput if BatchNorm layers cannot compute the statistics of a batch."""
        if not len(self.flat_model.momenta):
            return
        sizes, full = [len(site.train) for site in self.sites], self.sampling.order == "full"
        if full and len(set(sizes)) > 1:
            raise BadInput(
                f'batch_norm = "{self.batch_norm}" with sampling.order = "full": batches of sites of different size '
                'are padded, which would change their statistics; use order = "random" or "cyclic", or batch_norm = '
                '"convert"'
            )
        if (sizes[0] if full else self.sampling.batch) == 1:
            raise BadInput(
                f'batch_norm = "{self.batch_norm}" needs batches of 2 samples or more, since one has no statistics, '
                'but sampling.batch is 1; use a larger batch, or batch_norm = "frozen" or "convert"'
            )

    def _few_samples(self) -> tuple[Tree, Tree, Tree]:
        """Returns inputs and targets of two samples of each of several sites, since one site may hold a single class;
        and targets of more samples, spread over these sites."""
        some = [self.sites[i].train for i in self.here[:8]]
        two = torch.arange(2)
        inputs, targets = (
            trees.joined([trees.at(getattr(samples, what), two % len(samples)) for samples in some])
            for what in ("inputs", "targets")
        )
        spread = [torch.linspace(0, len(samples) - 1, min(len(samples), _TARGETS_CHECKED)).long() for samples in some]
        more = trees.joined([trees.at(samples.targets, rows) for samples, rows in zip(some, spread)])
        return as_floats(inputs, torch.float32), as_floats(targets, torch.float32), as_floats(more, torch.float32)

    def at_once(self, device: torch.device) -> AtOnce:
        """Returns how many models are evaluated at once on a device; None for all."""
        if isinstance(self.models_at_once, int):
            if self.models_at_once > 1 and self._why_not_stacked is not None:
                raise self._not_stackable()
            return self.models_at_once
        if self.models_at_once == "auto" and self._slower_stacked[device.type] is not None:
            return 1
        if self._why_not_stacked is None:
            return None
        if self.models_at_once == "all":
            raise self._not_stackable()
        return 1

    def _not_stackable(self) -> BadInput:
        return BadInput(
            f"models_at_once = {self.models_at_once!r}: torch.vmap cannot evaluate several of these models at once "
            f"({self._why_not_stacked}); use 1 or 'auto'"
        )

    @cached_property
    def _slower_stacked(self) -> dict[str, str | None]:
        """Why models are faster one at a time, by the kind of device."""
        module = self._module(0)
        return {kind: slower_stacked(module, kind) for kind in ("cpu", "cuda")}

    @cached_property
    def _why_not_stacked(self) -> str | None:
        inputs, targets, _ = self._few_samples()
        model = self.flat_model.to(torch.device("cpu"), torch.float32)
        return why_not_stacked(model, self.initial_whole_row(0).float(), self.loss, self.augment, (inputs, targets))

    def note_on_stacking(self, device: torch.device) -> str | None:
        """Returns why models are evaluated one after another on a device, unless that was asked for or they are not."""
        if self.models_at_once != "auto" or self.at_once(device) is None:
            return None
        cause = self._slower_stacked[device.type]
        cause = cause or f"torch.vmap cannot evaluate several at once ({self._why_not_stacked})"
        return f"models are evaluated one after another: {cause}"

    def note_on_data(self, device: torch.device) -> str | None:
        """Returns that training data is too large to be copied on a device, or None."""
        sets = [split.sites[i].train.inputs for split in self.every_split for i in self.here]
        size = sum(map(trees.nbytes, sets)) / 2.0**30
        return (
            f"training data ({size:.2f} GiB) stays where it is, and batches are gathered from it"
            if stays_apart(sets, device)
            else None
        )

    def note_on_evaluation_mode(self) -> str | None:
        """Returns which layers a module in evaluation mode trains without, or None."""
        layers = self.flat_model.switched_off()
        return layers and (
            f"the model is in evaluation mode, as from_pretrained returns it, so {layers} will not drop anything; call "
            "model.train() before fm.Problem(model, ...) to train with dropout"
        )

    def refuse_own_parts(self, what: str) -> None:
        """Raises BadInput if parts of the model stay at their sites, for what does not know such parts."""
        if self.flat_model.own_dim:
            raise BadInput(
                f"{what} does not go with parts of a model that stay at their sites, which are personal already; leave "
                'out parts.local, and use batch_norm = "frozen" or "convert"'
            )

    def note_on_parts(self) -> str | None:
        """Returns which parts of the model stay at their site or are not trained, and what BatchNorm layers do, or None
        if there is nothing to say."""
        flat, module, said = self.flat_model, self._module(0), []
        layers = layers_of(module)
        if self.batch_norm == "convert":
            said.append('batch_norm = "convert": nn.GroupNorm stands for BatchNorm')
        elif layers:
            policy = "frozen" if self.batch_norm == "refuse" else self.batch_norm
            does = {
                "frozen": "keep their statistics",
                "local": "keep statistics and affine parameters at their site",
                "shared": "share affine parameters, and average their statistics for the common model",
            }[policy]
            said.append(f'batch_norm = "{policy}": BatchNorm layers ({len(layers)}) {does}')
        if flat.local_dim or self.parts.frozen:
            every = sum(p.numel() for p in module.parameters())
            still = every - flat.dim - flat.local_dim
            said.append(f"parameters: {flat.dim:,} shared, {flat.local_dim:,} local and never sent, {still:,} frozen")
        return "; ".join(said) or None

    def digests_here(self) -> dict[int, str]:
        """Returns a fingerprint of the training data of every site that is here, in all splits."""
        return dict(self._digests)

    @cached_property
    def _digests(self) -> dict[int, str]:
        found = {i: [_fingerprint(split.sites[i].train) for split in self.every_split] for i in self.here}
        return {i: " ".join(every) for i, every in found.items()}

    def digest(self, of_sites: Mapping[int, str] | None = None) -> str:
        """Returns a fingerprint of data and model, so that a checkpoint is not continued with others.

        It covers the sites that are here, or those whose fingerprints are given."""
        hasher = hashlib.sha256()
        hasher.update(repr(sorted((self.digests_here() if of_sites is None else of_sites).items())).encode())
        hasher.update(self.prior_of_sites.numpy().tobytes())
        hasher.update(self.initial_whole_row(0).numpy().tobytes())
        for tensor in self.flat_model.fixed():
            hasher.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
        described = (self._module(0), self.sampling, self.weight_decay, self.clip_norm)
        hasher.update(f"{described} {_named(self.loss)} {_named(self.augment)}".encode())
        own = {type(layer) for layer in self._module(0).modules() if not type(layer).__module__.startswith("torch.")}
        for name in sorted(_named(kind.forward) for kind in own):  # two modules may look alike and compute other things
            hasher.update(name.encode())
        if self.models_at_once != "auto":  # "auto" depends on the model alone
            hasher.update(f"{self.models_at_once} at once".encode())
        if self.read is not None:
            hasher.update(f"read by {_named(self.read)}".encode())
        if (self.parts, self.batch_norm) != (Parts(), "refuse"):
            hasher.update(f"{self.parts} {self.batch_norm}".encode())
        if self.objective.identity() is not None:
            hasher.update(f"{self.objective.identity()}".encode())
        return hasher.hexdigest()[:16]


def _is_empty(source: Any) -> bool:
    """Returns whether a set of samples has none."""
    try:
        first = source[0] if isinstance(source, tuple | list) else source
        while isinstance(first, Mapping | tuple) and first:
            first = next(iter(first.values() if isinstance(first, Mapping) else first))
        return len(first) == 0
    except (TypeError, IndexError):  # then reading it says what is wrong
        return False


def _fingerprint(samples: Samples) -> str:
    hasher = hashlib.sha256()
    if samples.subgroups is not None:
        hasher.update(repr(samples.subgroup_names).encode())
    for name, tensor in samples.named_tensors():
        hasher.update(name.encode())
        hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _named(function: Any) -> str:
    """Returns a function's name, or the text of a module: the same in every process."""
    if isinstance(function, functools.partial):
        args = tuple(_named(one) if callable(one) else one for one in function.args)
        return f"{_named(function.func)} {args} {function.keywords}"
    if isinstance(function, PackedLoss):
        return f"{_named(function.function)} of all outputs"
    if isinstance(function, nn.Module | NamedLoss):
        return repr(function)
    code = getattr(function, "__code__", None)
    body = (code.co_code.hex(), [str(c) for c in code.co_consts if not hasattr(c, "co_code")]) if code else ""
    return f"{getattr(function, '__qualname__', type(function))} {body}"


def with_splits(problems: Sequence[Problem], same_sites: bool = True) -> Problem:
    """Returns several problems as one whose replicas are trained on each of them.

    Args:
        problems: The problems.
        same_sites: Whether their sites must have the same names. Default: True.
    """
    if not problems or not all(isinstance(one, Problem) for one in problems):
        raise BadInput("give a Problem, or a list of problems that differ only in which rows are for training")
    first, *others = problems
    names = [site.name for site in first.sites]
    for k, other in enumerate(others, start=1):
        theirs = [site.name for site in other.sites]
        if same_sites and theirs != names:
            raise BadInput(f"split {k} has the sites {theirs}, but split 0 has {names}; only their rows may differ")
    if isinstance(first.loss, NamedLoss):  # balanced class weights are those of the first split
        others = [dataclasses.replace(other, loss=first.loss) for other in others]
    return dataclasses.replace(first, splits=others) if others else first
