"""How sites learn: the settings that a problem and an experiment share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from fairmesh.errors import BadInput, nearest
from fairmesh.metrics.base import NamedMetric, check_primary
from fairmesh.privacy.settings import Privacy
from fairmesh.problems.augmentation import Augmentation
from fairmesh.problems.batch_norm import BatchNormPolicy
from fairmesh.problems.gradient_path import GradientSettings, gradient_path
from fairmesh.problems.objective import Objective
from fairmesh.problems.parts import ALL_SHARED, Parts
from fairmesh.trainers.local_trainer import LocalTrainer, TrainingFunction


@dataclass(frozen=True, eq=False, kw_only=True)
class Learning(GradientSettings):
    """The settings that `Problem` and `Experiment` share.

    A new setting of a problem is a field here, or in `GradientSettings` if it changes gradients, with its check and its
    explanation: experiment files know it, an experiment hands it to its problem, it is part of a run's identity, and
    the help of both classes shows it, in the place of the line that names this class.

    Args:
        augment: How training batches are changed at random, told by its parameters. (inputs, draw) -> inputs, of a
            batch, where `draw(*shape)` returns uniforms in [0, 1); (inputs, targets, draw) -> (inputs, targets), such
            as mixup; both run with the model, for many nodes at once. (sample) -> sample, of the inputs of one sample,
            such as a torchvision v2 transform; or (inputs, targets) -> (inputs, targets), of a batch: these may draw
            from torch's, Python's and numpy's generators, which are seeded for every sample (or batch) from seed,
            round, node and place in the batch, and run on the CPU (docs/howto/own-models.md). Default: None.
        metrics: Further metrics: a list of built-in ones, such as ["auroc", fm.metrics.Sensitivity(threshold=0.3)]; or
            a table of names, to built-in ones, `fm.metrics.Metric` (in a file a table with `function` and
            `higher_is_better`), or functions (outputs, targets) of a whole test set -> number, higher is better (in a
            file "file.py:name"). Accuracy, if targets are labels, and loss are always measured. Default: {}.
        primary: The metric by which sites and models are compared: one of `metrics`, "loss", or a built-in one such as
            "auroc". None for "accuracy" of labels, "rmse" of one number per sample, else "loss". Default: None.
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
        privacy: Differential privacy per unit: `fm.Privacy(epsilon=4, delta=1e-5)`. None for no noise. Default: None.
    """

    augment: Augmentation | None = None
    metrics: Mapping[str, str | Callable[[Tensor, Tensor], Any]] | Sequence[str | NamedMetric] = field(
        default_factory=dict
    )
    primary: str | None = None
    objective: Objective = field(default_factory=Objective)
    models_at_once: int | Literal["auto", "all"] = "auto"
    parts: Parts = ALL_SHARED
    batch_norm: BatchNormPolicy = "refuse"
    trainer: LocalTrainer | TrainingFunction | None = None
    privacy: Privacy | None = None

    def __init_subclass__(cls):
        """Puts the settings into the help of a class that has them."""
        cls.__doc__ = (cls.__doc__ or "").replace(_HERE, _ARGUMENTS)

    def __post_init__(self):
        gradient_path(self)  # which checks its settings
        check_primary(self.primary, self.metrics)
        if self.batch_norm not in get_args(BatchNormPolicy):
            raise BadInput(f"batch_norm: {self.batch_norm!r}{nearest(self.batch_norm, get_args(BatchNormPolicy))}")
        number = type(self.models_at_once) is int and self.models_at_once >= 1
        if not number and self.models_at_once not in ("auto", "all"):
            raise BadInput(f"models_at_once must be 'auto', 'all' or a whole number >= 1, got {self.models_at_once!r}")


_HERE = "        settings: Those of `Learning`, by name.\n"  # in the Args of a class that has these settings
_ARGUMENTS = "".join(
    (kind.__doc__ or "").partition("    Args:\n")[2].rstrip(" ") for kind in reversed(Learning.__mro__)
)
