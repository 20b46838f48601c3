"""Which graph the given rounds suffice for: the default of a run without a topology."""

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fairmesh.algorithms.base import Algorithm
from fairmesh.algorithms.gossip import steady_consensus_step
from fairmesh.compression.compressors import Quantize
from fairmesh.config.registry import FAMILIES
from fairmesh.config.tables import from_table
from fairmesh.errors import BadInput
from fairmesh.storage.run_folder import EXPERIMENT
from fairmesh.topology.graphs import Circulant, Exponential, Ring, Topology
from fairmesh.topology.mixing import Mixing, union_of

RING_UP_TO = 12  # sites
ENOUGH = 50.0  # rounds in units of 1 / (gamma rho), in which a denser graph gains little (reproduction/rounds.py)
_AS_FAST = 0.8  # of the fastest spreading of news
FINER = Quantize(bits=4, block=256)  # for graphs over which news spreads slowly by one bit per parameter
USUAL_LENGTH = 1 << 12  # parameters; the choice does not depend on the model, so that sites without data agree on it


class Mixed(NamedTuple):
    """How news spreads over a graph."""

    consensus_step: float  # gamma
    gap: float  # rho
    neighbours: int  # of the busiest node

    @staticmethod
    def over(cycle: Sequence[Mixing], algorithm: Algorithm, dim: int = USUAL_LENGTH) -> "Mixed":
        """Returns how news spreads by an algorithm over the graphs of its rounds, for a model of `dim` parameters."""
        settings, beta = algorithm.gossip_settings(), max(mixing.beta for mixing in cycle)
        step = 1.0
        if settings is not None:
            step = settings.consensus_step or steady_consensus_step(settings.compressor, dim, beta)
        gap, neighbours = union_of(cycle).gap, max(int(mixing.degrees.max()) for mixing in cycle)
        return Mixed(step, round(gap, 6), neighbours)  # rounded, so that machines agree

    def times(self, rounds: float) -> float:
        """Returns how many times news spreads over the network in so many rounds, in units of 1 / (gamma rho)."""
        return rounds * self.consensus_step * self.gap

    def rounds_for(self, times: float = ENOUGH) -> float:
        """Returns how many rounds that takes."""
        return times / max(1e-9, self.consensus_step * self.gap)


def gossips(algorithm: Algorithm) -> bool:
    """Returns whether models agree by what nodes send to their neighbours."""
    return algorithm.sends and not algorithm.needs_server


def default_topology(n: int, rounds: int, algorithm: Algorithm) -> Topology:
    """Returns who talks to whom in a run that does not say it: a ring of up to 12 nodes; above that, the sparsest graph
    for whose spectral gap the rounds suffice, by the algorithm's compressor.

    Args:
        n: The number of nodes.
        rounds: Rounds of the run.
        algorithm: The algorithm, whose compressor decides how fast news spreads.
    """
    return Ring() if n <= RING_UP_TO or not gossips(algorithm) else sparsest(n, rounds, algorithm)


def sparsest(n: int, rounds: int, algorithm: Algorithm) -> Topology:
    """Returns the sparsest graph for which the rounds suffice. Its nodes have 2, 4, 6, ... neighbours, at distances
    that grow by the same factor up to about n; at last it is the exponential graph. If the rounds are too few for all
    of these, it is the sparsest over which news spreads about as fast as over the best of them."""
    times: dict[Topology, float] = {}
    for distances in range(1, (n - 1).bit_length()):
        offsets = {max(1, min(n // 2, round(n ** (k / distances)))) for k in range(distances)}
        topology = Ring() if distances == 1 else Circulant(tuple(sorted(offsets)))
        times[topology] = Mixed.over(topology.build(n), algorithm).times(rounds)
        if times[topology] >= ENOUGH:
            return topology
    times[Exponential()] = Mixed.over(Exponential().build(n), algorithm).times(rounds)
    enough = min(ENOUGH, _AS_FAST * max(times.values()))
    return next(topology for topology, spread in times.items() if spread >= enough)


def topology_to_resume(out: str | os.PathLike | None, resume: bool) -> Topology | None:
    """Returns the graph that the run in a folder has, if it is resumed and its settings can be read: with more rounds,
    the default would be another one."""
    path = Path(out or "") / EXPERIMENT
    if not (resume and out and path.is_file()):
        return None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("topology", {})
        return from_table(Topology, table, "topology") if table.get("name") in FAMILIES[Topology] else None
    except (ValueError, BadInput):  # the checkpoint says what is wrong
        return None
