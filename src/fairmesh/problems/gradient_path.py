"""What happens to gradients between the model and the algorithm: settings of a problem, and what each of them does.

To add a setting, write a `Link` and a field of `GradientSettings` that names it. Experiment files, the command line,
the help and a run's identity know it then.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fairmesh.errors import BadInput
from fairmesh.numerics.layout import Layout
from fairmesh.numerics.random_streams import Draw

if TYPE_CHECKING:
    from fairmesh.problems.hosted_nodes import HostedNodes


class AskedGradients(NamedTuple):
    """What a link may read besides the gradients that it changes."""

    models: Tensor  # where the gradients were taken (replicas, nodes, dim)
    draws: Callable[[str], Draw]  # purpose -> random numbers of each hosted node, of this round and batch
    of_samples: Callable[[], Tensor]  # -> the gradient of every sample's loss (replicas, nodes, samples, dim)


class Link(ABC):
    """One change of the hosted nodes' gradients. A subclass is a frozen dataclass of one field, the setting, which it
    checks on construction.

    Attributes:
        of_updates: Whether it also applies to the updates of a user's own training function. Default: False.
    """

    of_updates: ClassVar[bool] = False

    @abstractmethod
    def apply(self, gradients: Tensor, asked: AskedGradients) -> None:
        """Changes gradients (replicas, nodes, dim) in place. The statistics of BatchNorm layers are not among them."""


@dataclass(frozen=True)
class ClipNorm(Link):
    """Scales down each node's gradient whose Euclidean norm is larger than `norm`."""

    norm: float
    of_updates = True

    def __post_init__(self):
        if not self.norm > 0:
            raise BadInput(f"clip_norm must be > 0, got {self.norm}")

    def apply(self, gradients: Tensor, asked: AskedGradients) -> None:
        norms = torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)
        gradients.mul_((self.norm / norms.clamp(min=1e-30)).clamp_(max=1.0))


@dataclass(frozen=True)
class WeightDecay(Link):
    """Adds a multiple of the model."""

    factor: float

    def __post_init__(self):
        if not math.isfinite(self.factor) or self.factor < 0:
            raise BadInput(f"weight_decay must be a finite number >= 0, got {self.factor}")

    def apply(self, gradients: Tensor, asked: AskedGradients) -> None:
        gradients.add_(asked.models, alpha=self.factor)


@dataclass(frozen=True, eq=False)
class SiteDecay(Link):
    """Adds a multiple of the model that each node has found, without biases."""

    factors: Tensor  # (replicas, nodes, 1)
    decayed: Tensor  # 1 for what decays, else 0 (dim,)

    def apply(self, gradients: Tensor, asked: AskedGradients) -> None:
        dim = len(self.decayed)  # local parts follow, which a site has for itself
        gradients[..., :dim].addcmul_(asked.models[..., :dim], self.factors * self.decayed)


def _setting(default: Any, link: type[Link]) -> Any:
    return field(default=default, metadata={"link": link})


@dataclass(frozen=True, eq=False, kw_only=True)
class GradientSettings:
    """Settings of a problem that change gradients, in the order in which they act. One with its default does nothing.

    Args:
        clip_norm: Largest Euclidean norm of each node's gradient, > 0, as in `torch.nn.utils.clip_grad_norm_`; None for
            no clipping. Default: None.
        weight_decay: Multiple of the model that is added to each gradient after clipping, >= 0. Optimizers have decay
            of their own, by parameter. Default: 0.0.
    """

    clip_norm: float | None = _setting(None, ClipNorm)
    weight_decay: float = _setting(0.0, WeightDecay)


def gradient_path(settings: GradientSettings) -> dict[str, Link]:
    """Returns what is done with gradients, by the names of the settings.

    Raises:
        BadInput: A setting has an impossible value.
    """
    return {
        setting.name: setting.metadata["link"](getattr(settings, setting.name))
        for setting in dataclasses.fields(settings)
        if "link" in setting.metadata and getattr(settings, setting.name) != setting.default
    }


def validated_decay(nodes: "HostedNodes", all_sizes: Tensor, layout: Layout, dtype: torch.dtype) -> list[Link]:
    """Returns what keeps models small, if the objective asks for it and some site has found that it helps.

    Args:
        nodes: The hosted nodes, with the problem.
        all_sizes: How many training rows every node has (replicas, 1, n).
        layout: Which parameters are biases.
        dtype: Of the models.
    """
    if not nodes.problem.objective.validated_decay:
        return []
    every = nodes.problem.every_split
    penalties = [split.objective.penalties_of([str(s.name) for s in split.sites], split.here) for split in every]
    factors = nodes.of_sites(torch.cat(penalties)) / all_sizes.sum(dim=-1, keepdim=True)
    if not bool(factors.any()):
        return []
    return [SiteDecay(factors.to(dtype), layout.without_biases().to(factors.device, dtype))]


def refuse_for_updates(settings: GradientSettings) -> None:
    """Raises BadInput for settings that are about gradients alone, if a training function makes updates."""
    for name, link in gradient_path(settings).items():
        if not link.of_updates:
            raise BadInput(
                f"{name} = {getattr(settings, name)!r} changes gradients, but the trainer makes updates; leave it out, "
                "and give it to the optimizer in your training function"
            )
