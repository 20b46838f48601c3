"""How sites learn: the settings that a problem and an experiment share."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from fairmesh.errors import BadInput, nearest
from fairmesh.metrics.base import NamedMetric
from fairmesh.problems.augmentation import Augmentation
from fairmesh.problems.batch_norm import BatchNormPolicy
from fairmesh.problems.objective import Objective
from fairmesh.problems.parts import Parts
from fairmesh.trainers.local_trainer import LocalTrainer, TrainingFunction


@dataclass(frozen=True, eq=False, kw_only=True)
class Learning:
    """The settings that `Problem` and `Experiment` share, which explain them. A new setting of a problem is a field
    here: experiment files know it, an experiment hands it to its problem, and it is part of a run's identity."""

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
    trainer: LocalTrainer | TrainingFunction | None = None

    def __post_init__(self):
        if not math.isfinite(self.weight_decay) or self.weight_decay < 0:
            raise BadInput(f"weight_decay must be a finite number >= 0, got {self.weight_decay}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadInput(f"clip_norm must be > 0, got {self.clip_norm}")
        if self.batch_norm not in get_args(BatchNormPolicy):
            raise BadInput(f"batch_norm: {self.batch_norm!r}{nearest(self.batch_norm, get_args(BatchNormPolicy))}")
        number = type(self.models_at_once) is int and self.models_at_once >= 1
        if not number and self.models_at_once not in ("auto", "all"):
            raise BadInput(f"models_at_once must be 'auto', 'all' or a whole number >= 1, got {self.models_at_once!r}")
