"""Random changes of training batches by a function of the user's own: flips, crops, noise, mixup."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fairmesh.errors import BadInput, refusing
from fairmesh.numerics import random_streams, trees
from fairmesh.numerics.random_streams import GeneratorStates, seed_generators
from fairmesh.numerics.trees import Tree
from fairmesh.problems.torch_draws import TorchDraws

Augmentation = Callable[..., Any]  # the user's function; `Augmenter.of` says what it may take
_TARGETS = ("targets", "target", "labels", "label")  # names of a second parameter that is no `draw`
_FORMS = (
    "augment takes one sample's inputs (sample), or a batch: (inputs, draw), (inputs, targets) or (inputs, targets, "
    "draw)"
)


@dataclass(frozen=True)
class Augmenter:
    """A function of the user's own, and what it takes.

    With `draw`, it is a function of tensors, which is evaluated with the model: for many models at once, on any device.
    Without, it may be any Python that draws from torch's, Python's and numpy's generators: it runs on the CPU, under
    generators that are seeded for each sample, or for each batch if it takes targets."""

    function: Augmentation
    takes: Literal["sample", "inputs, targets", "inputs, draw", "inputs, targets, draw"]
    label_axes: int | None = None  # of the targets of a batch as the data has them, if these are labels

    @staticmethod
    def of(function: Augmentation) -> "Augmenter":
        """Finds out by its signature what a function takes. Parameters with a default count if they are called `draw`
        or `targets`.

        Raises:
            BadInput: It takes more than inputs, targets and draw, or nothing.
        """
        try:
            parameters = list(inspect.signature(getattr(function, "forward", function)).parameters.values())
        except (TypeError, ValueError):  # some functions of C have no signature
            return Augmenter(function, "sample")
        by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        given = [p.name for p in by_place if p.default is p.empty or p is by_place[0] or p.name in ("draw", "targets")]
        if not given and any(p.kind == p.VAR_POSITIONAL for p in parameters):
            return Augmenter(function, "sample")
        needed = [p for p in parameters if (p.kind, p.default) == (p.KEYWORD_ONLY, p.empty)]
        if needed or not 1 <= len(given) <= 3:
            raise BadInput(f"augment has the parameters {', '.join(p.name for p in parameters) or 'none'}; {_FORMS}")
        if len(given) == 2:
            return Augmenter(function, "inputs, targets" if given[1] in _TARGETS else "inputs, draw")
        return Augmenter(function, "inputs, targets, draw" if len(given) == 3 else "sample")

    @property
    def with_model(self) -> bool:
        """Whether it is evaluated with the model, as operations on tensors."""
        return self.takes.endswith("draw")

    @property
    def changes_targets(self) -> bool:
        """Whether it returns targets too."""
        return "targets" in self.takes

    def probabilities(self, targets: Tree) -> Tensor | None:
        """Returns the share of each class (samples, classes, ...) in targets that an augmentation mixed from labels;
        None for other targets. Yes-or-no labels, mixed without an axis of classes, have the shares of no and yes."""
        if self.label_axes is None or not isinstance(targets, Tensor) or not targets.is_floating_point():
            return None
        return torch.stack([1 - targets, targets], dim=1) if targets.ndim == self.label_axes else targets

    def drawn(self, inputs: Tree, targets: Tree, key: Tensor) -> tuple[Tree, Tree]:
        """Returns the batch of one model, with draws from a key. A function without `draw` has changed it before."""
        if not self.with_model:
            return inputs, targets
        floats = (part.dtype for part in trees.leaves(inputs) if part.is_floating_point())
        dtype = next(floats, torch.get_default_dtype())
        one, calls = torch.zeros(1, dtype=torch.int64, device=key.device), itertools.count()

        def draw(*shape: int) -> Tensor:
            stream = random_streams.keys(key, "augmentation", next(calls), one).squeeze(-1)  # each call draws others
            return random_streams.uniform(stream, torch.Size(shape).numel(), dtype).reshape(shape)

        other = random_streams.keys(key, "augmentation by torch", 0, one).squeeze(-1)  # than what the model draws
        with TorchDraws(other):
            if not self.changes_targets:
                return self.function(inputs, draw), targets
            return _pair(self.function(inputs, targets, draw))

    def beforehand(self, inputs: Tree, targets: Tree, keys: Tensor) -> tuple[Tree, Tree]:
        """Returns the batches of several models, changed by a function without `draw`. One with it changes them later.

        Args:
            inputs: Inputs (models, samples, ...).
            targets: Their targets (models, samples, ...).
            keys: The key of each model's batch (models,). The generators of a sample depend on it and on the sample's
                place in the batch.
        """
        if self.with_model:
            return inputs, targets
        device = trees.leaves(inputs)[0].device
        inputs, targets = (trees.mapped(lambda part: part.cpu(), tree) for tree in (inputs, targets))
        models, samples = trees.leaves(inputs)[0].shape[:2]
        places = torch.arange(1 if self.changes_targets else samples)
        seeds = random_streams.keys(keys.cpu(), "augmentation", 0, places).tolist()
        before = GeneratorStates.now()
        try:
            if self.changes_targets:
                batches = [(trees.at(inputs, k), trees.at(targets, k)) for k in range(models)]
                changed = [_pair(self._called(seeds[k][0], *batch)) for k, batch in enumerate(batches)]
                inputs, targets = (_stacked(list(parts)) for parts in zip(*changed))
            else:
                of_models = [
                    _stacked([self._called(seeds[k][i], trees.at(inputs, (k, i))) for i in range(samples)])
                    for k in range(models)
                ]
                inputs = _stacked(of_models)
        finally:
            before.restore()
        inputs, targets = (trees.mapped(lambda part: part.to(device), tree) for tree in (inputs, targets))
        return inputs, targets

    def _called(self, seed: int, *given: Tree) -> Any:
        seed_generators(seed)
        return self.function(*(trees.mapped(torch.clone, tree) for tree in given))  # which it may change in place

    def check(self, inputs: Tree, targets: Tree) -> tuple[Tree, Tree]:
        """Returns a batch as the function changes it before a model is evaluated.

        Raises:
            BadInput: It fails, gives something else than samples, or does not give the same twice.
        """
        if self.with_model:
            return inputs, targets
        batch, key = trees.mapped(lambda part: part.unsqueeze(0), (inputs, targets)), torch.zeros(1, dtype=torch.int64)
        what = trees.form_in_words(inputs)
        given = f"a batch with inputs {what}" if self.changes_targets else f"the inputs {what} of one sample"
        with refusing(f"augment fails for {given}", advice=_FORMS):
            once, again = (self.beforehand(batch[0], batch[1], key) for _ in range(2))
        for part, other in zip(trees.leaves(once), trees.leaves(again)):
            if part.shape != other.shape or not torch.equal(part, other):
                raise BadInput(
                    "augment does not give the same result twice under the same seeds, so runs could not be repeated: "
                    "does it keep a generator or a count of its own? Draw from torch, random or np.random, which are "
                    "seeded for each call"
                )
        made = trees.mapped(lambda part: part[0], once)
        if not self.changes_targets and _axes(made[0]) != _axes(inputs):
            raise BadInput(
                f"augment makes {trees.form_in_words(made[0])} of one sample's inputs {trees.form_in_words(inputs)}; a "
                f"function of the inputs alone gets one sample, without the axis of the batch. {_FORMS}"
            )
        return made[0], made[1]


def _axes(tree: Tree) -> dict[str, int]:
    return {name: tensor.ndim for name, tensor in trees.named(tree, "")}


def _pair(found: Any) -> tuple[Tree, Tree]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise BadInput(
            f"augment takes inputs and targets, so it must return both, as (inputs, targets); it returned a "
            f"{type(found).__name__}"
        )
    return found


def _stacked(parts: list[Tree]) -> Tree:
    """Returns trees one after another along a new first axis."""
    with refusing("augment must return tensors of the same shape for every sample, as its inputs are"):
        return trees.mapped(lambda *tensors: torch.stack(tensors), *parts)
