"""Which samples a node uses for one gradient."""

from dataclasses import dataclass
from typing import Literal

from fairmesh.config.tables import checked
from fairmesh.errors import BadInput


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
