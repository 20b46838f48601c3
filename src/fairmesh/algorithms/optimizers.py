"""Local optimizers: what each node makes of its gradients, for any algorithm. Public as `fm.optimizers`.

An optimizer turns the gradient of a batch into a direction, before the algorithm sees it. All that follows, such as
weights of the nodes, step sizes, gossip and tracking, stays as it is. Its memory is kept per node, never sent, and part
of a run's state.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.settings import EXACT
from fairmesh.config.ranges import Memory, NotNegative, Positive
from fairmesh.config.tables import register
from fairmesh.errors import BadInput, nearest
from fairmesh.networks.roles import PerNode
from fairmesh.numerics.layout import Layout

__all__ = ["SGD", "AdamW", "Momentum", "Optimizer"]


class Optimizer(ABC):
    """Turns each node's gradients into directions. An algorithm steps along these instead of the gradients.

    An algorithm takes one as `optimizer`. A direction is found before the algorithm weighs it: AD-GDA multiplies it by
    lambda_i, DSGD by n p_i. The other order would lose the weights with `AdamW`, which divides gradients by their own
    size. `clip_norm` and `weight_decay` of a problem act on the gradient before the optimizer sees it, as with
    `torch.optim`; so does the mean over `batches_per_step`.

    A node keeps its optimizer's memory from round to round. Where clients take several local steps in a round, each of
    them advances it; a client that sits a round out keeps it. If an algorithm asks for the same batch twice, both
    answers come from the same memory.

    A subclass is a frozen dataclass with `init` and `direction`.

    Attributes:
        copies_at_peak: How many copies of all models a round holds in addition, for the memory estimate. Default: 4.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.ADGDA(primal_step=0.04, optimizer=fm.optimizers.AdamW(decay=0.01, decay_vectors=False))
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), algorithm, rounds=10)
        >>> fm.run(experiment).rounds
        10
    """

    copies_at_peak: ClassVar[int] = 4

    @abstractmethod
    def init(self, models: Tensor) -> Any:
        """Returns the memory before the first gradient, a NamedTuple of tensors (..., nodes, any), or None.

        Args:
            models: The nodes' initial models (..., nodes, dim).
        """

    @abstractmethod
    def direction(self, state: Any, gradients: Tensor, models: Tensor, layout: Layout) -> tuple[Tensor, Any]:
        """Returns the directions to descend along, (..., nodes, dim), and the memory after them. Changes nothing that
        it was given, and the directions share no memory with the state.

        Args:
            state: The memory before.
            gradients: The gradients (..., nodes, dim).
            models: Where they were taken (..., nodes, dim).
            layout: Names, shapes and places of the parameters in a row.
        """

    def check(self, layout: Layout) -> None:  # noqa: B027
        """Raises BadInput for settings that do not fit models of this layout."""


class _Decaying(Optimizer):
    """An optimizer whose directions hold a share of the model. Its fields are those of the classes below."""

    decay: float
    no_decay: tuple[str, ...]
    decay_vectors: bool

    def check(self, layout: Layout) -> None:
        _spared(layout, self.no_decay, self.decay_vectors)

    def _decayed(self, directions: Tensor, models: Tensor, layout: Layout) -> Tensor:
        """Returns directions with their share of the model, where parameters decay."""
        if isinstance(self.decay, float) and not self.decay:
            return directions
        spared = _spared(layout, self.no_decay, self.decay_vectors)
        if not spared:
            return (models * self.decay).add_(directions)
        return (models * (self.decay * _decaying(layout, spared, models.dtype, models.device))).add_(directions)


class Momenta(NamedTuple):
    momenta: PerNode  # (..., nodes, dim)


class Moments(NamedTuple):
    momenta: PerNode  # means of the gradients (..., nodes, dim)
    squares: PerNode  # means of their squares (..., nodes, dim)
    steps: PerNode  # how many gradients were seen (..., nodes, 1)


@dataclass(frozen=True)
class SGD(_Decaying):
    """Plain SGD: the direction is the gradient. It is for decay by parameter; without decay, leave `optimizer` out.

    Args:
        decay: Multiple of the model that is added to the gradient, >= 0, as in `torch.optim.SGD`. Default: 0.0.
        no_decay: Patterns of parameter names without decay, such as ("*.bias", "norm*"), where * stands for any text.
            Default: ().
        decay_vectors: Whether parameters with less than two dimensions decay. These are biases and the scales of
            normalization layers, whatever they are called. Default: True.

    Example:
        >>> import fairmesh as fm
        >>> fm.algorithms.DSGD(0.1, optimizer=fm.optimizers.SGD(decay=0.01, no_decay=("*bias",))).optimizer.decay
        0.01
    """

    decay: NotNegative = 0.0
    no_decay: tuple[str, ...] = ()
    decay_vectors: bool = True

    copies_at_peak: ClassVar[int] = 2

    def init(self, models: Tensor) -> None:
        return None

    def direction(self, state: None, gradients: Tensor, models: Tensor, layout: Layout) -> tuple[Tensor, None]:
        return self._decayed(gradients, models, layout), None


@dataclass(frozen=True)
class Momentum(_Decaying):
    """SGD with momentum, as `torch.optim.SGD` has it.

        m_i <- mu m_i + g_i
        direction: m_i, or g_i + mu m_i with `nesterov`

    In the long run a direction is 1 / (1 - mu) times as long as the gradient, so steps must be that much smaller than
    those of SGD.

    Args:
        momentum: mu in [0, 1). Default: 0.9.
        nesterov: Whether to look ahead, as Nesterov's momentum does. Default: False.
        decay: Multiple of the model that is added to the gradient, >= 0, as in `torch.optim.SGD`. Default: 0.0.
        no_decay: Patterns of parameter names without decay, such as ("*.bias", "norm*"), where * stands for any text.
            Default: ().
        decay_vectors: Whether parameters with less than two dimensions decay. These are biases and the scales of
            normalization layers, whatever they are called. Default: True.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.ChocoSGD(0.05, optimizer=fm.optimizers.Momentum(nesterov=True))
        >>> fm.run(fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), algorithm, rounds=5)).rounds
        5
    """

    momentum: Memory = field(default=0.9, metadata=EXACT)
    nesterov: bool = False
    decay: NotNegative = 0.0
    no_decay: tuple[str, ...] = ()
    decay_vectors: bool = True

    copies_at_peak: ClassVar[int] = 4

    def init(self, models: Tensor) -> Momenta:
        return Momenta(torch.zeros_like(models))

    def direction(self, state: Momenta, gradients: Tensor, models: Tensor, layout: Layout) -> tuple[Tensor, Momenta]:
        gradients = self._decayed(gradients, models, layout)
        mu = _share(self.momentum, gradients)
        momenta = state.momenta * mu + gradients
        return momenta * mu + gradients if self.nesterov else momenta.clone(), Momenta(momenta)


@dataclass(frozen=True)
class AdamW(_Decaying):
    """AdamW, as `torch.optim.AdamW` has it: Adam with decay that is not divided by the gradients' size.

        m_i <- beta1 m_i + (1 - beta1) g_i
        v_i <- beta2 v_i + (1 - beta2) g_i^2
        direction: m_i / (1 - beta1^t) / (sqrt(v_i / (1 - beta2^t)) + epsilon) + decay * x_i

    **Sites that differ.** Every node divides by the size of its own gradients. The nodes then agree on a point where
    the weighted *directions* cancel, which is not where the weighted gradients do (Chen et al.). Algorithms with
    weights multiply the direction: a site with twice the weight pulls twice as hard, but one with small gradients pulls
    as hard as one with large gradients. `TrackedADGDA` divides by the size of the *tracked* gradient instead, which is
    nearly the same at all nodes, so it has no such bias; it needs no optimizer for that.
    docs/concepts/algorithms.md has measurements.

    **Step sizes.** Directions have entries of about one, so `primal_step` is a learning rate of Adam's size, such as
    0.001. AD-GDA multiplies it by lambda_i, which is about 1 / n: it needs n times as much.

    Args:
        beta1: Memory of the momentum, in [0, 1). Default: 0.9.
        beta2: Memory of the mean squares, in [0, 1). Default: 0.999.
        epsilon: What is added to the root of the mean squares, > 0. Default: 1e-08.
        decay: Multiple of the model that is added to the direction, >= 0. It is multiplied by the step, and by a node's
            weight, as the direction is. Default: 0.0.
        no_decay: Patterns of parameter names without decay, such as ("*.bias", "norm*"), where * stands for any text.
            Default: ().
        decay_vectors: Whether parameters with less than two dimensions decay. These are biases and the scales of
            normalization layers, whatever they are called. Default: True.

    Example:
        >>> import fairmesh as fm
        >>> algorithm = fm.algorithms.DSGD(0.01, optimizer=fm.optimizers.AdamW(decay=0.01, no_decay=("*bias",)))
        >>> fm.run(fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), algorithm, rounds=5)).rounds
        5

    References:
        Loshchilov, Hutter: Decoupled Weight Decay Regularization, ICLR 2019. Nazari, Tarzanagh, Michailidis: DADAM,
        2019. Chen, Karimi, Zhao, Li: On the Convergence of Decentralized Adaptive Gradient Methods, ACML 2022.
    """

    beta1: Memory = field(default=0.9, metadata=EXACT)
    beta2: Memory = field(default=0.999, metadata=EXACT)
    epsilon: Positive = 1e-8
    decay: NotNegative = 0.0
    no_decay: tuple[str, ...] = ()
    decay_vectors: bool = True

    copies_at_peak: ClassVar[int] = 7

    def init(self, models: Tensor) -> Moments:
        return Moments(torch.zeros_like(models), torch.zeros_like(models), torch.zeros_like(models[..., :1]))

    def direction(self, state: Moments, gradients: Tensor, models: Tensor, layout: Layout) -> tuple[Tensor, Moments]:
        steps = state.steps + 1.0
        beta1, beta2 = _share(self.beta1, gradients), _share(self.beta2, gradients)
        momenta = state.momenta * beta1 + gradients * _fresh(self.beta1, gradients)
        squares = state.squares * beta2 + gradients.square().mul_(_fresh(self.beta2, gradients))
        sizes = (squares / _seen(self.beta2, steps)).sqrt_().add_(self.epsilon)
        direction = (momenta / _seen(self.beta1, steps)).div_(sizes)
        return self._decayed(direction, models, layout), Moments(momenta, squares, steps)


register(Optimizer, {"sgd": SGD, "momentum": Momentum, "adamw": AdamW})


# Decay and memory -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _spared(layout: Layout, patterns: tuple[str, ...], vectors: bool) -> frozenset[str]:
    """Returns the names of the parameters without decay. Refuses a pattern that names none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layout.names):
            hint = nearest(pattern, layout.names)
            raise BadInput(f"optimizer.no_decay: {pattern!r} matches no trained and shared parameter{hint}")
    found = {name for name in layout.names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not vectors:
        found |= {name for name, shape in zip(layout.names, layout.shapes) if len(shape) < 2}
    return frozenset(found)


@functools.lru_cache(maxsize=64)
def _decaying(layout: Layout, spared: frozenset[str], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns 1 at the coordinates that decay and 0 at the others: (dim,)."""
    row = torch.ones(layout.dim, dtype=dtype, device=device)
    for name, _, place in layout:
        if name in spared:
            row[place] = 0.0
    return row


def _share(beta: float | Tensor, like: Tensor) -> float | Tensor:
    return beta.to(like.dtype) if isinstance(beta, Tensor) else beta


def _fresh(beta: float | Tensor, like: Tensor) -> float | Tensor:
    """Returns 1 - beta, found in float64."""
    return (1.0 - beta).to(like.dtype) if isinstance(beta, Tensor) else 1.0 - beta


def _seen(beta: float | Tensor, steps: Tensor) -> Tensor:
    """Returns 1 - beta^t, how much of a mean the gradients seen so far make up."""
    return (1.0 - beta ** steps.double()).to(steps.dtype)
