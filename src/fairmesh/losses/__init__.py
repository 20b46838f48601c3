"""[loss] What training lowers: the mean over a site's samples of a number per sample. `fm.losses`.

No loss here divides by anything that depends on the other samples of a batch. So the loss of a site is the mean over
its samples, whatever the batches are.
"""

from fairmesh.losses.base import ModelLoss, NamedLoss
from fairmesh.losses.builtin import (
    AbsoluteError,
    BinaryCrossEntropy,
    CrossEntropy,
    Dice,
    Focal,
    Huber,
    SquaredError,
)

__all__ = [
    "AbsoluteError",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Dice",
    "Focal",
    "Huber",
    "ModelLoss",
    "NamedLoss",
    "SquaredError",
]
