"""The contract of a topology."""

import numpy as np

from fairmesh.errors import BadInput
from fairmesh.testing.violations import ContractViolation, checked_settings, require, running
from fairmesh.topology.graphs import Topology
from fairmesh.topology.mixing import Mixing


def check_topology(topology: Topology, nodes: int = 8) -> None:
    """Checks that a topology gives mixing matrices over which nodes can agree.

    1. It is a frozen dataclass that survives being written to TOML and read again.
    2. It gives the same matrices each time, each over as many nodes as asked for.
    3. Each is symmetric, doubly stochastic and without negative weights.
    4. The graph that all of them together form is connected, and its matrix has a spectral gap above zero, which it has
       if and only if the graph is connected and no weights swap two halves forever.

    Args:
        topology: The object to check.
        nodes: Over how many nodes. Default: 8.

    Raises:
        ContractViolation: An AssertionError that says what was violated, with numbers.

    Example:
        >>> import fairmesh as fm
        >>> fm.testing.check_topology(fm.Ring())
    """
    topology = checked_settings(topology, Topology)
    with running(f"graphs({nodes})"):
        cycle, again = topology.graphs(nodes), topology.graphs(nodes)
    require(len(cycle) > 0, f"graphs({nodes}) gives no graph")
    require(len(cycle) == len(again), f"graphs({nodes}) gives {len(cycle)} graphs, then {len(again)}")
    for k, (mixing, twin) in enumerate(zip(cycle, again)):
        what = f"graph {k} of {nodes} nodes"
        require(isinstance(mixing, Mixing), f"{what} is a {type(mixing).__name__}, not a fairmesh.topologies.Mixing")
        require(mixing.n == nodes, f"{what} has {mixing.n}")
        weights = mixing.matrix.toarray()
        apart = float(np.abs(weights - twin.matrix.toarray()).max())
        require(apart == 0, f"{what} differs by up to {apart:.3g} when it is asked for again; draw from a seed")
        skew = float(np.abs(weights - weights.T).max())
        require(skew < 1e-12, f"{what} is not symmetric: W[i, j] and W[j, i] differ by up to {skew:.3g}")
        off = float(np.abs(weights.sum(axis=0) - 1).max())
        require(off < 1e-12, f"{what} is not doubly stochastic: a column's sum is off by {off:.3g}")
    try:
        topology.build(nodes)
    except BadInput as error:
        raise ContractViolation(f"build({nodes}) refuses its graphs: {error}") from error
