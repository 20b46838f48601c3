"""[metrics] How good a model is at one site, and over all sites. `fm.metrics`.

A metric that is not defined, such as an AUROC where all samples have the same class, is NaN in memory, null in JSON and
"not defined" in tables. Other sites keep their numbers.
"""

from fairmesh.metrics import builtin
from fairmesh.metrics.base import Metric, NamedMetric, chosen_metrics, resampled
from fairmesh.metrics.builtin import *  # noqa: F403  so that a new member is one file
from fairmesh.metrics.over_sites import over_sites, share_better

__all__ = ["Metric", "NamedMetric", "chosen_metrics", "over_sites", "resampled", "share_better"]
__all__ += builtin.__all__
