"""A learning problem over sites: the model, the loss and each site's data, checked before anything runs."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fairmesh.config.registry import registered_name
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.samples import Samples, Targets
from fairmesh.data.site import Site
from fairmesh.errors import BadInput
from fairmesh.losses import ModelLoss, NamedLoss
from fairmesh.losses.builtin import squared_error
from fairmesh.metrics.base import TASKS, Metric, NamedMetric, Task, chosen_metrics, predicted_labels, task_of
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree
from fairmesh.problems.augmentation import Augmenter
from fairmesh.problems.batch_norm import under_policy
from fairmesh.problems.checks import (
    check_gradient,
    check_mean,
    refuse_autocast,
    refuse_no_shares,
    refuse_unwrapped,
    why_not_stacked,
)
from fairmesh.problems.convolutions import products_in
from fairmesh.problems.data_checks import (
    check_batches,
    check_form,
    check_samples,
    check_splits,
    few_samples,
    read_sites,
    refuse_one_hot,
    scaled_prior,
)
from fairmesh.problems.flat_model import FlatModel, own_copy
from fairmesh.problems.identity import digest_of, fingerprint, identity_of
from fairmesh.problems.learning import Learning
from fairmesh.problems.local_work import check_trainer
from fairmesh.problems.lora import check_adapters
from fairmesh.problems.objective import Objective
from fairmesh.problems.outputs import PackedLoss, Packing, Read, is_built_in, readings
from fairmesh.problems.parts import Parts
from fairmesh.problems.row_loss import BoundModelLoss, Loss, as_floats, bound, reads_logits
from fairmesh.problems.sampling import Sampling
from fairmesh.problems.stacking import AtOnce, slower_stacked
from fairmesh.problems.subgroups import numbered, own_names
from fairmesh.trainers.local_trainer import LocalTrainer

_RESERVED = {
    "round", "replica", "seed", "loss", "lambda", "validation", "own_models", "consensus_models",
    "consensus_duals", "nominal_bits_busiest", "nominal_bits_total", "bytes_busiest_node", "bytes_total",
}  # fmt: skip
_OF_MODEL = {  # what is known of model and loss, for samples of one form
    "_first_made", "_whole_model", "flat_model", "_readings", "augmenter", "why_not_stacked",
}  # fmt: skip


_FOR_USERS = ("n", "classes", "task", "primary", "flat_model", "prior_of_sites", "shares_of_samples", "preprocessing")


class _ShortHelp(type):
    """The type of `Problem`, whose help shows what users need. Its other names are for fairmesh's own modules."""

    def __dir__(cls) -> list[str]:
        return [*_FOR_USERS, "__init__", "__doc__"]


@dataclass(frozen=True, eq=False)
class Problem(Learning, metaclass=_ShortHelp):
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
        weight_decay: Multiple of the model that is added to each gradient after clipping, >= 0. Optimizers have decay
            of their own, by parameter. Default: 0.0.
        clip_norm: Largest Euclidean norm of each node's gradient, > 0, as in `torch.nn.utils.clip_grad_norm_`; None for
            no clipping. Default: None.
        augment: How training batches are changed at random, told by its parameters. (inputs, draw) -> inputs, of a
            batch, where `draw(*shape)` returns uniforms in [0, 1); (inputs, targets, draw) -> (inputs, targets), such
            as mixup; both run with the model, for many nodes at once. (sample) -> sample, of the inputs of one sample,
            such as a torchvision v2 transform; or (inputs, targets) -> (inputs, targets), of a batch: these may draw
            from torch's, Python's and numpy's generators, which are seeded for every sample (or batch) from seed,
            round, node and place in the batch, and run on the CPU (docs/howto/own-models.md). Default: None.
        metrics: Further metrics: a list of built-in ones, such as ["auroc", fm.metrics.Sensitivity(threshold=0.3)]; or
            a table of names, to built-in ones, `fm.metrics.Metric`, or functions (outputs, targets) of a whole test set
            -> number, higher is better. Accuracy, if targets are labels, and loss are always measured. Default: {}.
        objective: Which losses the robust weights follow. Default: Objective(), the training losses.
        models_at_once: How many models (nodes times replicas) are evaluated at once: "all" by vmap, a number k >= 1 to
            bound the memory, 1 for one after another, which takes any module. "auto" is "all" or 1, by the kind of
            model: 1 if vmap cannot evaluate it (LSTMs, checkpointing, branches on data) or if its layers are slower
            stacked (docs/results/performance.md). Results agree to rounding. Default: "auto".
        parts: Which parameters stay at their site and which are not trained. Default: Parts(), all are shared.
        batch_norm: What BatchNorm layers do: "frozen" (statistics as given, for pretrained networks), "local"
            (statistics and affine parameters stay at the site: FedBN), "shared" (affine parameters are shared,
            statistics are averaged for the common model), "convert" (nn.GroupNorm instead), or "refuse", which accepts
            layers in evaluation mode only, as "frozen" does (docs/howto/models-and-parts.md). Default: "refuse".
        trainer: Your own training code for the local work of every round: `fm.trainers.LocalTrainer(function)`, or the
            function (module, data, ctx) itself. Algorithms then work with its updates instead of gradients
            (docs/howto/own-training-code.md). None for fairmesh's own gradients. Default: None.
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
    loss: Loss = field(default_factory=lambda: nn.functional.cross_entropy)  # whose docstring is not part of this class
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
        refuse_autocast()
        if not self.sites:
            raise BadInput("a problem needs at least one site")
        super().__post_init__()
        if self.trainer is not None:
            if not isinstance(self.trainer, LocalTrainer):
                object.__setattr__(self, "trainer", LocalTrainer(self.trainer))
            check_trainer(self)
        shared = {"test": self.test, "validation": self.validation}
        object.__setattr__(self, "sites", read_sites(self.sites, shared, self.targets))
        if isinstance(self.model, nn.Module):  # a copy: training the module later must not change where runs start
            object.__setattr__(self, "model", own_copy(self.model))
        metrics = chosen_metrics(self.metrics)
        for name, metric in metrics.items():
            if name in _RESERVED:
                raise BadInput(f"a metric cannot be called {name!r}, which records use for something else")
            if isinstance(metric, NamedMetric):
                metrics[name] = metric.of_classes(name, self.class_names)
        object.__setattr__(self, "metrics", metrics)
        self._check_forms()
        self._settle_loss()
        self._check_data()
        self._check_model()
        check_splits(self)

    def _check_forms(self) -> None:
        if not self.here:
            raise BadInput("none of the sites' data is here; a host needs that of one site at least")
        for i, site in enumerate(self.sites):
            check_form(site.train, self.sites[0].train, f"site {i} ({site.name})")
        if self.objective.subgroups:
            for i in self.here:
                self.subgroup_numbers(i)

    def _settle_loss(self) -> None:
        """Chooses the loss of numbers if none was given, and finds balanced class weights."""
        targets = self.sites[0].train.targets
        if isinstance(self.loss, ModelLoss):
            object.__setattr__(self, "loss", bound(self.loss, *self._to_check(), few_samples(self)[:2]))
            return
        refuse_unwrapped(self.loss)
        if not isinstance(targets, Tensor) and is_built_in(self.loss):
            raise BadInput(
                f"targets are several tensors ({trees.form_in_words(targets)}), but the loss takes one; give "
                "loss=function(outputs, targets) of your own, or one target with Problem(targets=...)"
            )
        if self.loss is nn.functional.cross_entropy and targets.is_floating_point() and targets[0].numel() == 1:
            object.__setattr__(self, "loss", squared_error)
        refuse_no_shares(self.loss, self.sites[self.here[0]].train.seen.targets)
        packing = self._readings[2]  # with it, a loss of the user's own sees all that the model returns
        function = self.loss.function if isinstance(self.loss, PackedLoss) else self.loss
        object.__setattr__(self, "loss", function if packing is None else PackedLoss(function, packing))
        if not isinstance(self.loss, NamedLoss):
            return
        if self.loss.of_labels and targets.is_floating_point():
            raise BadInput(
                f"the loss {registered_name(self.loss)!r} needs labels of classes, but targets are floats; give labels "
                "as whole numbers (targets.long()); for shares of classes, (samples, classes), use "
                "loss=torch.nn.functional.cross_entropy"
            )
        if self.loss.is_balanced:
            trained = [(site.name, site.train) for site in self.sites]
            unknown = [name for name, rows in trained if not rows.here or (rows.stream and rows.labels is None)]
            if unknown:
                raise BadInput(
                    f'loss: class_weights = "balanced" needs all labels, but those of {unknown[0]} are not known here; '
                    "give the weights as a list, one number per class, or the labels of a Dataset as "
                    "fm.data.Streamed(dataset, labels=...)"
                )
            labels = torch.cat([rows.known_targets().flatten() for _, rows in trained]).long()
            labels = labels[(labels >= 0) & (labels != self.ignored)]
            counts = torch.bincount(labels, minlength=self._outputs_per_target()).tolist()
            object.__setattr__(self, "loss", self.loss.fitted(counts))
        self.loss.check(self._outputs_per_target())

    def _to_check(self) -> tuple[FlatModel, Tensor]:
        """Returns the model on the CPU and its initial row, both in float32."""
        return self.flat_model.to(torch.device("cpu"), torch.float32), self.initial_whole_row(0).float()

    @property
    def output_loss(self) -> Loss:
        """The loss as a function of outputs and targets.

        Raises:
            BadInput: It calls the model itself.
        """
        if isinstance(self.loss, ModelLoss):
            raise BadInput(
                "constant answers, personalization and references that are chosen by held-out rows need a loss of "
                "outputs and targets, but this one calls the model (fm.losses.ModelLoss)"
            )
        return self.loss

    @cached_property
    def augmenter(self) -> Augmenter | None:
        """How training batches are changed."""
        if self.augment is None:
            return None
        targets = self.sites[0].train.targets
        labels = isinstance(targets, Tensor) and not targets.is_floating_point()
        return dataclasses.replace(Augmenter.of(self.augment), label_axes=targets.ndim if labels else None)

    def _outputs_per_target(self) -> int:
        """Returns how many classes the outputs of the model can tell apart; one logit tells two."""
        outputs, targets = self._outputs_of_probe(), self.sites[self.here[0]].train.seen.targets[:2]
        return 2 if outputs.numel() == targets.numel() else outputs.shape[1]

    @property
    def every_split(self) -> list["Problem"]:
        """This problem, which is split 0, and its other splits."""
        return [self, *self.splits]

    def of_split(self, k: int) -> "Problem":
        """Returns the problem of split k, without the others."""
        return self.splits[k - 1] if k else self._without_splits

    @cached_property
    def _without_splits(self) -> "Problem":
        return self._changed(splits=()) if self.splits else self

    def with_splits(self, others: Sequence["Problem"]) -> "Problem":
        """Returns this problem, which has no splits yet, with others as its further splits."""
        if not others:
            return self
        made = self._changed(splits=tuple(others), _without_splits=self)
        check_splits(made)
        return made

    def _changed(self, **attributes: Any) -> "Problem":
        """Returns a copy with other attributes, which checks nothing again."""
        made = copy.copy(self)
        vars(made).update(attributes)
        return made

    def with_other(self, *, sites: Sequence[Site] | None = None, objective: Objective | None = None) -> "Problem":
        """Returns the same problem, without its splits, with other samples or with another objective.

        It checks the samples. Model and loss have been checked on samples of this form, so they are not run again."""
        changes: dict[str, Any] = {"splits": ()}
        if objective is not None:
            changes["objective"] = objective
        if sites is not None:
            changes |= {"sites": read_sites(sites, {}, self.targets), "test": None, "validation": None}
            if _form_of(changes["sites"]) != _form_of(self.sites):
                return dataclasses.replace(self, **changes)
        remembered = _OF_MODEL | {field.name for field in dataclasses.fields(self)}
        remembered |= {"slower_stacked"} if self.sampling.order != "full" else set()
        made = self._changed(**changes)
        for name in vars(self).keys() - remembered:
            del vars(made)[name]  # what depends on the samples is found again
        made._check_forms()
        made._check_data()
        return made

    def each(self, change: Callable[["Problem"], "Problem"]) -> "Problem":
        """Returns the problem with every split changed by a function."""
        if not self.splits:
            return change(self)
        first, *others = (change(self.of_split(k)) for k in range(len(self.every_split)))
        return first.with_splits(others)

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

        @functools.cache
        def held(samples: Samples | None, here: bool) -> Samples | None:  # a set that sites share stays one
            if samples is None or here:
                return samples if samples is None else samples.alone()
            away = Samples.elsewhere(len(samples), samples)
            return dataclasses.replace(away, subgroup_names=samples.subgroup_names)

        made = []
        for i, site in enumerate(self.sites):
            names = ("train", "test", "validation", "reserved")
            sets: dict[str, Any] = {name: held(getattr(site, name), i in sites) for name in names}
            table = site.table and site.table.without_rows()
            made.append(dataclasses.replace(site, table=table, **sets))
        others = [other.keeping(sites) for other in self.splits]
        return dataclasses.replace(self, sites=made, test=None, validation=None, splits=others)

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
        return scaled_prior(self.prior, [len(site.train) for site in self.sites])

    @cached_property
    def flat_model(self) -> FlatModel:
        """The model as one row of its trainable parameters."""
        return self._whole_model.reading(self._readings[0])

    @cached_property
    def _whole_model(self) -> FlatModel:
        module = self.initial_model(0)
        local, shared = self.batch_norm == "local", self.batch_norm == "shared"
        names = self.parts.local_names(module)
        check_adapters(module, names)
        return FlatModel(module, names, local, shared)

    @cached_property
    def _readings(self) -> tuple[Read | None, Read | None, Packing | None]:
        """How outputs of the module become the tensor that losses get; how that becomes the one that predicts; and how
        a structure is packed for a loss of the user's own."""
        train = self.sites[self.here[0]].train
        return readings(
            self._outputs_of_probe(whole=True), trees.at(train.seen.targets, slice(2)), self.loss, self.read
        )

    def predictions(self, outputs: Tensor) -> Tensor:
        """Returns the tensor that predicts, which metrics read, of the outputs of one model (samples, ...)."""
        read = self._readings[1]
        return outputs if read is None else read(outputs)

    @property
    def structured(self) -> str | None:
        """What model and samples have several of, or read in a special way; None if inputs, targets and outputs are one
        tensor each, as the model takes and gives it."""
        parts = {"inputs": self.sites[0].train.inputs, "targets": self.sites[0].train.targets}
        found = [what for what, tree in parts.items() if not isinstance(tree, Tensor)]
        outputs = [] if self._readings == (None, None, None) else ["outputs"]
        return " and ".join(found + outputs) or None

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns for each sample whether its class is predicted (samples,). One without a label, which the loss
        ignores, counts as right."""
        labels = predicted_labels(self.predictions(outputs))
        truths, ignored = targets.reshape(labels.shape), self.ignored
        return labels == truths if ignored is None else (labels == truths) | (truths == ignored)

    @property
    def ignored(self) -> int | None:
        """The label of samples that the loss ignores."""
        return getattr(self.loss, "ignore_index", None) if isinstance(self.loss, NamedLoss) else None

    def initial_model(self, seed: int) -> nn.Module:
        """Returns the module that every node of a replica starts from. It must not be changed."""
        if not seed or isinstance(self.model, nn.Module):
            return self._first_made
        made = self._made(seed)
        self.flat_model.copy_fixed(made)  # held once for all seeds
        return made

    @cached_property
    def _first_made(self) -> nn.Module:
        return self._made(0)  # once: a model may take long to load

    def _made(self, seed: int) -> nn.Module:
        """Returns a module as it is trained: frozen by name, and with its BatchNorm layers under the policy."""
        if isinstance(self.model, nn.Module):
            as_given = (self.parts, self.batch_norm) == (Parts(), "refuse")
            made = self.model if as_given else copy.deepcopy(self.model)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                made = self.model()
            if not isinstance(made, nn.Module):
                raise BadInput(f"the model function returned a {type(made).__name__}, not an nn.Module")
            made = made.cpu()
        self.parts.freeze(made)
        return under_policy(made, self.batch_norm, self.parts.frozen)

    def initial_row(self, seed: int) -> Tensor:
        """Returns the shared parameters that every node of a replica starts from, as a row (dim,) in float64."""
        return self.initial_whole_row(seed)[: self.flat_model.dim]

    def initial_whole_row(self, seed: int) -> Tensor:
        """Returns the model that every node of a replica starts from, its own part included, as a row in float64."""
        return self.flat_model.row_of(self.initial_model(seed)).double()

    @property
    def shares_of_samples(self) -> Tensor:
        """The share of each site in all training samples (n,), float64."""
        return scaled_prior(None, [len(site.train) for site in self.sites])

    @property
    def metrics_by_name(self) -> dict[str, Callable[[Tensor, Tensor], Any]]:
        """The further metrics, as objects that can be called."""
        return cast(dict[str, Callable[[Tensor, Tensor], Any]], self.metrics)

    @cached_property
    def task(self) -> Task:
        """What the problem predicts: "classes", "binary" (two classes by one output), "multi-label", "masks" or
        "numbers"."""
        outputs, samples = self.predictions(self._outputs_of_probe()), self.sites[self.here[0]].train.seen
        if not isinstance(samples.targets, Tensor):
            return "several"
        logits = reads_logits(self.loss) and all(
            bool(((t == 0) | (t == 1)).all()) for t in (self.sites[i].train.seen.targets for i in self.here)
        )
        return task_of(outputs, samples.targets[: len(outputs)], logits)

    @cached_property
    def classes(self) -> int | None:
        """The number of classes that the model distinguishes, or None if targets are not labels."""
        if self.task == "binary":
            return 2
        return self.predictions(self._outputs_of_probe()).shape[-1] if self.task == "classes" else None

    @cached_property
    def label_range(self) -> tuple[int, int | None] | None:
        """The number of classes that targets may have, and the target that the loss ignores; None if targets are not
        labels, or are masks of which only a loss of the user's own knows the labels."""
        if self.classes is not None:
            return self.classes, self.ignored
        by_torch = self.loss is nn.functional.cross_entropy
        if self.task != "masks" or not (by_torch or isinstance(self.loss, NamedLoss)):
            return None
        ignored = -100 if by_torch else self.ignored  # what torch ignores unless it is told otherwise
        return self._outputs_per_target(), ignored

    def _outputs_of_probe(self, whole: bool = False) -> Any:
        """Returns what losses get for two samples, or all that the model returns."""
        train = self.sites[self.here[0]].train
        inputs = trees.at(train.seen.inputs, torch.arange(min(2, len(train))))  # a copy: a model may change its inputs
        model = self._whole_model if whole else self.flat_model
        row = self._whole_model.row_of(self.initial_model(0)).float()
        try:
            with torch.no_grad():
                return model.to(torch.device("cpu"), torch.float32)(row, as_floats(inputs, torch.float32))
        except BadInput:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise BadInput(
                f"the model does not accept inputs of shape {trees.form_in_words(inputs)}: {error}; a dictionary is "
                "handed to forward as keywords, a tuple as positional arguments"
            ) from error

    @property
    def primary(self) -> str:
        """The metric that sites are compared by: "accuracy" if targets are labels, else "loss"."""
        return "accuracy" if self.classes or "accuracy" in self.metrics_by_name else "loss"

    def higher_is_better(self, metric: str) -> bool:
        """Returns whether a larger value of a metric is better."""
        chosen = self.metrics_by_name.get(metric)
        return chosen.higher_is_better if isinstance(chosen, Metric | NamedMetric) else metric != "loss"

    def is_share(self, metric: str) -> bool:
        """Returns whether a metric is a share, which tables show in per cent."""
        chosen = self.metrics_by_name.get(metric)
        return chosen.is_share if isinstance(chosen, NamedMetric) else metric == "accuracy"

    def held_out(self, split: Literal["test", "validation", "train"]) -> tuple[list[Samples], list[int]]:
        """Returns the distinct sets of a split that are here, and the index of the one that judges each site.

        The index is -1 if another process holds the set, or if the site has none. There are no indices if no site has
        one."""
        every = [getattr(site, split) for site in self.sites]
        here = dict.fromkeys(samples for samples in every if samples is not None and samples.here)
        places = {samples: k for k, samples in enumerate(here)}
        any_site = any(samples is not None for samples in every)
        return list(places), [places.get(samples, -1) for samples in every] if any_site else []

    def _check_data(self) -> None:
        """Raises BadInput if samples do not fit each other, the model's classes or the way that they are drawn."""
        self.prior_of_sites.sum()  # refuses an invalid prior
        for split, words in (("train", ""), ("reserved", "reserved rows of "), ("test", None), ("validation", None)):
            checked: set[Samples | None] = {None}
            for i, site in enumerate(self.sites):
                samples = getattr(site, split)
                if samples not in checked:
                    what = f"{split} set of " if words is None else words
                    check_samples(self, samples, f"{what}site {i} ({site.name})", judges=words is None)
                    checked.add(samples)
        check_batches(self)

    def _check_model(self) -> None:
        """Runs model and loss once as training will, so that an unsuitable problem is refused now."""
        model, row = self._to_check()
        inputs, targets, more = few_samples(self)
        if isinstance(self.loss, NamedLoss) and self.loss.of_numbers and self.task in ("classes", "masks"):
            raise BadInput(
                f"the loss {registered_name(self.loss)!r} needs numbers to predict, but the problem predicts "
                f'{TASKS[self.task]}; write loss = "cross-entropy", or, in the [data] of a table, predict = "numbers"'
            )
        if isinstance(self.loss, NamedLoss) and self.loss.of_labels and self.task == "multi-label":
            refuse_one_hot(self)
        check_gradient(model, row, self.loss, self.augmenter, self._augmented(inputs, targets))
        if not isinstance(self.loss, BoundModelLoss):
            with torch.no_grad():
                check_mean(self.loss, model(row, inputs), trees.joined([targets, more]))
        elif self.why_not_stacked is not None:
            object.__setattr__(self, "loss", dataclasses.replace(self.loss, by_vmap=False))
        self.at_once(torch.device("cpu"))  # refuses a model that cannot be evaluated in the way that is asked for
        for name, metric in self.metrics_by_name.items():
            if isinstance(metric, NamedMetric):
                metric.check(name, self.task, self.classes)

    def at_once(self, device: torch.device) -> AtOnce:
        """Returns how many models are evaluated at once on a device; None for all."""
        wanted = self.models_at_once
        if wanted == 1 or (wanted == "auto" and (self.slower_stacked[device.type] or self.why_not_stacked)):
            return 1
        if self.why_not_stacked is not None:
            raise BadInput(
                f"models_at_once = {wanted!r}: torch.vmap cannot evaluate several of these models at once "
                f"({self.why_not_stacked}); use 1 or 'auto'"
            )
        return wanted if isinstance(wanted, int) else None

    @cached_property
    def slower_stacked(self) -> dict[str, str | None]:
        """Why models are faster one at a time, by the kind of device."""
        module = self.flat_model.evaluated
        inputs = few_samples(self)[0]
        samples = self.sampling.batch
        if self.sampling.order == "full":
            samples = max(len(self.sites[i].train) for i in self.here)
        convolved = products_in(*self._to_check(), inputs) * samples // trees.length(inputs)
        return {kind: slower_stacked(module, kind, convolved) for kind in ("cpu", "cuda")}

    @cached_property
    def why_not_stacked(self) -> str | None:
        batch = self._augmented(*few_samples(self)[:2])
        return why_not_stacked(*self._to_check(), self.loss, self.augmenter, batch)

    def _augmented(self, inputs: Tree, targets: Tree) -> tuple[Tree, Tree]:
        """Returns a batch as an augmentation without `draw` changes it."""
        return (inputs, targets) if self.augmenter is None else self.augmenter.check(inputs, targets)

    def refuse_own_parts(self, what: str) -> None:
        """Raises BadInput if parts of the model stay at their sites, for what does not know such parts."""
        if self.flat_model.own_dim:
            raise BadInput(
                f"{what} does not go with parts of a model that stay at their sites, which are personal already; leave "
                'out parts.local, and use batch_norm = "frozen" or "convert"'
            )

    def refuse_trainer(self, what: str) -> None:
        """Raises BadInput if sites train with code of their own, for what trains in another way."""
        if self.trainer is not None:
            raise BadInput(f"{what} trains by fairmesh's own gradients, so it does not go with a trainer; leave it out")

    def digests_here(self) -> dict[int, str]:
        """Returns a fingerprint of the training data of every site that is here, in all splits."""
        return {i: " ".join(split._digests[i] for split in self.every_split) for i in self.here}

    @cached_property
    def _digests(self) -> dict[int, str]:
        names = ("train", "validation") if self.objective.judged_on == "validation" else ("train",)
        sets = {i: [getattr(self.sites[i], name) for name in names] for i in self.here}
        return {i: " ".join(fingerprint(rows) for rows in of_site if rows is not None) for i, of_site in sets.items()}

    def identity(self, of_sites: Mapping[int, str] | None = None) -> dict[str, Any]:
        """Returns data, model and settings by name, so that a checkpoint is not continued with others.

        It covers the sites that are here, or those whose fingerprints are given."""
        return identity_of(self, self.digests_here() if of_sites is None else of_sites)

    def digest(self, of_sites: Mapping[int, str] | None = None) -> str:
        """Returns a fingerprint of the identity."""
        return digest_of(self.identity(of_sites))


def _form_of(sites: Sequence[Site]) -> list[Any]:
    """Returns the form of the first site's inputs and targets."""
    return [trees.form(sites[0].train.inputs), trees.form(sites[0].train.targets)]


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
        others = [one if one.loss is first.loss else dataclasses.replace(one, loss=first.loss) for one in others]
    return first.with_splits(others)
