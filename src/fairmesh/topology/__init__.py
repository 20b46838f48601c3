"""[topology] Who talks to whom: graphs and their mixing matrices. Public as `fm.topologies`."""

from fairmesh.topology.graphs import (
    Changing,
    Circulant,
    Complete,
    Edges,
    ErdosRenyi,
    Exponential,
    Hypercube,
    Matrix,
    RandomRegular,
    Ring,
    Star,
    Topology,
    Torus,
)
from fairmesh.topology.mixing import Mixing

__all__ = [
    "Changing",
    "Circulant",
    "Complete",
    "Edges",
    "ErdosRenyi",
    "Exponential",
    "Hypercube",
    "Matrix",
    "Mixing",
    "RandomRegular",
    "Ring",
    "Star",
    "Topology",
    "Torus",
]
