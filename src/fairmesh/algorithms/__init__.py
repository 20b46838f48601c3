"""[algorithm] Training algorithms, each written once over a stack of nodes. Public as `fm.algorithms`.

The ways to weigh nodes are in `fm.weighting`, the step size schedules in `fm.schedules`.
"""

from fairmesh.algorithms.ad_gda import ADGDA
from fairmesh.algorithms.afl import AFL
from fairmesh.algorithms.base import Algorithm, Round
from fairmesh.algorithms.choco_sgd import ChocoSGD
from fairmesh.algorithms.dr_dsgd import DRDSGD
from fairmesh.algorithms.drfa import DRFA
from fairmesh.algorithms.dsgd import DSGD
from fairmesh.algorithms.local import Local
from fairmesh.algorithms.tracked_ad_gda import TrackedADGDA
from fairmesh.config.tables import register

register(
    Algorithm,
    {
        "ad-gda": ADGDA,
        "tracked-ad-gda": TrackedADGDA,
        "choco-sgd": ChocoSGD,
        "dsgd": DSGD,
        "dr-dsgd": DRDSGD,
        "drfa": DRFA,
        "afl": AFL,
        "local": Local,
    },
)

__all__ = [
    "ADGDA",
    "AFL",
    "DRDSGD",
    "DRFA",
    "DSGD",
    "Algorithm",
    "ChocoSGD",
    "Local",
    "Round",
    "TrackedADGDA",
]
