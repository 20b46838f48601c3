"""[loss] What training lowers: the mean over a site's samples of a number per sample. `fm.losses`.

No loss here divides by anything that depends on the other samples of a batch. So the loss of a site is the mean over
its samples, whatever the batches are.
"""

from fairmesh.losses import builtin
from fairmesh.losses.base import ModelLoss, NamedLoss
from fairmesh.losses.builtin import *  # noqa: F403  so that a new member is one file

__all__ = ["ModelLoss", "NamedLoss"]
__all__ += builtin.__all__
