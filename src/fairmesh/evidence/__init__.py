"""How sure results are: intervals, what models answered on the test rows, and verdicts on two models."""

from fairmesh.evidence.intervals import LEVEL, Number, PairedShare, Share, Worst
from fairmesh.evidence.outcomes import Outcomes
from fairmesh.evidence.scores import bootstrapped, mean, paired, paired_counts, share
from fairmesh.evidence.verdicts import Comparison, Difference, evidence_table, versus, versus_counts

__all__ = [
    "LEVEL",
    "Comparison",
    "Difference",
    "Number",
    "Outcomes",
    "PairedShare",
    "Share",
    "Worst",
    "bootstrapped",
    "evidence_table",
    "mean",
    "paired",
    "paired_counts",
    "share",
    "versus",
    "versus_counts",
]
