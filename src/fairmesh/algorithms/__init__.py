"""[algorithm] Training algorithms, each written once over a stack of nodes. Public as `fm.algorithms`.

The ways to weigh nodes are in `fm.weighting`, the step size schedules in `fm.schedules`. What authors of algorithms
need is here too (docs/howto/extending.md): `plain`, `Part`, `prior_weights`, `prior_rows`, the steps of CHOCO gossip,
the base of algorithms with a server, marks of settings, and the ranges of their numbers.
"""

from fairmesh.algorithms.ad_gda import ADGDA
from fairmesh.algorithms.afl import AFL
from fairmesh.algorithms.base import Algorithm, Round
from fairmesh.algorithms.base import GossipSettings as GossipSettings
from fairmesh.algorithms.base import Sent as Sent
from fairmesh.algorithms.base import fresh_share as fresh_share
from fairmesh.algorithms.base import plain as plain
from fairmesh.algorithms.base import prior_rows as prior_rows
from fairmesh.algorithms.base import prior_weights as prior_weights
from fairmesh.algorithms.choco_sgd import ChocoSGD
from fairmesh.algorithms.dr_dsgd import DRDSGD
from fairmesh.algorithms.drfa import DRFA
from fairmesh.algorithms.dsgd import DSGD
from fairmesh.algorithms.fed_avg import FedAvg
from fairmesh.algorithms.fed_prox import FedProx
from fairmesh.algorithms.gossip import PublicCopies as PublicCopies
from fairmesh.algorithms.gossip import compressed_difference as compressed_difference
from fairmesh.algorithms.gossip import gossip_step as gossip_step
from fairmesh.algorithms.gossip import updated_copies as updated_copies
from fairmesh.algorithms.gossip import warm_copies as warm_copies
from fairmesh.algorithms.gossip import zero_copies as zero_copies
from fairmesh.algorithms.local import Local
from fairmesh.algorithms.pooled import Pooled
from fairmesh.algorithms.q_ffl import QFFL
from fairmesh.algorithms.schedules import Limited as Limited
from fairmesh.algorithms.server import LocalSteps as LocalSteps
from fairmesh.algorithms.server import ServerState as ServerState
from fairmesh.algorithms.server import by_position as by_position
from fairmesh.algorithms.settings import EXACT as EXACT
from fairmesh.algorithms.settings import STRUCTURAL as STRUCTURAL
from fairmesh.algorithms.term import TERM
from fairmesh.algorithms.tracked_ad_gda import TrackedADGDA
from fairmesh.config.ranges import Count as Count
from fairmesh.config.ranges import Memory as Memory
from fairmesh.config.ranges import Positive as Positive
from fairmesh.config.ranges import Share as Share
from fairmesh.config.tables import register
from fairmesh.networks.base import Delivery as Delivery
from fairmesh.networks.base import Part as Part

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
