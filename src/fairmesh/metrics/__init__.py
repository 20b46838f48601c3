"""[metrics] How good a model is at one site, and over all sites. `fm.metrics`.

A metric that is not defined, such as an AUROC where all samples have the same class, is NaN in memory, null in JSON and
"not defined" in tables. Other sites keep their numbers.
"""

from fairmesh.metrics.base import Metric, NamedMetric, chosen_metrics, resampled
from fairmesh.metrics.builtin import (
    AUROC,
    F1,
    R2,
    RMSE,
    Accuracy,
    AveragePrecision,
    BalancedAccuracy,
    Brier,
    CalibrationError,
    Dice,
    MeanAbsoluteError,
    Sensitivity,
    Specificity,
)
from fairmesh.metrics.over_sites import over_sites, share_better

__all__ = [
    "AUROC",
    "F1",
    "R2",
    "RMSE",
    "Accuracy",
    "AveragePrecision",
    "BalancedAccuracy",
    "Brier",
    "CalibrationError",
    "Dice",
    "MeanAbsoluteError",
    "Metric",
    "NamedMetric",
    "Sensitivity",
    "Specificity",
    "chosen_metrics",
    "over_sites",
    "resampled",
    "share_better",
]
