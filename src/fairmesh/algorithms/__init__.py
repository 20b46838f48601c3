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
from fairmesh.algorithms.fed_avg import FedAvg
from fairmesh.algorithms.fed_prox import FedProx
from fairmesh.algorithms.local import Local
from fairmesh.algorithms.pooled import Pooled
from fairmesh.algorithms.q_ffl import QFFL
from fairmesh.algorithms.term import TERM
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
        "fedavg": FedAvg,
        "fedprox": FedProx,
        "q-ffl": QFFL,
        "term": TERM,
        "local": Local,
        "pooled": Pooled,
    },
)

__all__ = [
    "ADGDA",
    "AFL",
    "DRDSGD",
    "DRFA",
    "DSGD",
    "QFFL",
    "TERM",
    "Algorithm",
    "ChocoSGD",
    "FedAvg",
    "FedProx",
    "Local",
    "Pooled",
    "Round",
    "TrackedADGDA",
]
