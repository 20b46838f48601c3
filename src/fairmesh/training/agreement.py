"""What is said about a run whose sites' models do not agree: before it, by its graph; after it, by their distance."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fairmesh.algorithms.base import Algorithm
from fairmesh.config.tables import to_table
from fairmesh.topology.graphs import Topology
from fairmesh.topology.mixing import Mixing
from fairmesh.training.graph_choice import ENOUGH, FINER, USUAL_LENGTH, Mixed, gossips, sparsest
from fairmesh.training.result import Result, variants_of

_A_TRIAL = 10  # rounds; a shorter run only tries whether all works
TOO_FEW = 8.0  # rounds in units of 1 / (gamma rho), in which sites that differ cannot agree
_APART = 0.05  # of the way that the average has moved; runs that have converged end below 0.005
_FAR_APART = 0.3  # the same over graphs that suffice, where it is the last steps that differ, if they are not small
_WORTH = 1.5  # times the spreading of news, for which a denser graph is worth its bytes
_MOST = 8  # times the rounds


def on_too_few_rounds(
    cycle: Sequence[Mixing], rounds: int, algorithm: Algorithm, dim: int = USUAL_LENGTH
) -> str | None:
    """Returns a sentence, before a run, if models of `dim` parameters cannot agree over its graphs in its rounds."""
    if _says_nothing(cycle, rounds, algorithm):
        return None
    mixed = Mixed.over(cycle, algorithm, dim)
    if mixed.times(rounds) >= TOO_FEW:
        return None
    return (
        f"{rounds:,} rounds are too few for the models of {cycle[0].n} sites to agree over this graph (spectral gap "
        f"{mixed.gap:.2g}); what helps: {_remedies(cycle, rounds, algorithm, dim)}"
    )


def on_disagreement(result: Result, cycle: Sequence[Mixing]) -> str | None:
    """Returns a sentence, after a run over these graphs, if the sites' models are not close to their average. Their
    distance is compared with how far the average has moved from the start."""
    variant = variants_of(result.replicas)[result.chosen_variant]["replicas"]  # of a sweep, the one that is shown
    algorithm, dim = result.replicas[variant[0]].algorithm, result.problem.flat_model.dim
    if _says_nothing(cycle, result.rounds, algorithm):
        return None
    share = max((_apart(result, r, result.final[r]) for r in variant if r not in result.diverged), default=0.0)
    suffices = Mixed.over(cycle, algorithm, dim).times(result.rounds) >= ENOUGH
    if share <= (_FAR_APART if suffices else _APART):
        return None
    remedies = _remedies(cycle, result.rounds, algorithm, dim)
    return (
        f"the sites' models have not agreed: they differ from their average by {100 * share:.0f} % of the way that it "
        f"has moved, so the average is not what more rounds would give; what helps: {remedies}"
    )


def _says_nothing(cycle: Sequence[Mixing], rounds: int, algorithm: Algorithm) -> bool:
    """Returns whether models are not meant to agree: a single site, a trial, or an algorithm without gossip."""
    return cycle[0].n == 1 or rounds < _A_TRIAL or not gossips(algorithm)


def _apart(result: Result, replica: int, record: dict[str, Any]) -> float:
    """Returns the distance of a replica's models from their average, as a share of the average's from the start."""
    row, of = result.row()[replica].cpu().double(), result.replicas[replica]
    start = result.problem.of_split(of.split).initial_whole_row(of.seed)[: len(row)].double()
    moved = float((row - start).square().sum())
    apart = max(0.0, record["consensus_models"])  # between organisations it is a sum of what sites tell
    return math.sqrt(apart / moved) if moved > 0 and math.isfinite(apart) else 0.0


def _remedies(cycle: Sequence[Mixing], rounds: int, algorithm: Algorithm, dim: int) -> str:
    """Returns what would make the models agree, the cheapest changes of the experiment first."""
    n, mixed, settings = cycle[0].n, Mixed.over(cycle, algorithm, dim), algorithm.gossip_settings()
    denser = sparsest(n, rounds, algorithm)
    over_denser = Mixed.over(denser.build(n), algorithm, dim)
    remedies = []
    if settings and settings.consensus_step is not None:
        chosen = Mixed.over(cycle, replace(algorithm, consensus_step=None), dim)  # type: ignore[type-var]
        if chosen.times(rounds) > _WORTH * mixed.times(rounds):
            remedies.append("no consensus_step in [algorithm], since the one that is chosen by itself is larger")
            mixed = chosen
    if over_denser.times(rounds) > _WORTH * mixed.times(rounds):
        enough = over_denser.times(rounds) >= ENOUGH
        more = "" if enough else f" and about {rounded_up(over_denser.rounds_for()):,} rounds"
        remedies.append(
            f"topology = {in_a_file(denser)}{more} ({over_denser.neighbours} neighbours instead of {mixed.neighbours}, "
            f"and {over_denser.neighbours / max(1, mixed.neighbours):.2g} times the bytes per round)"
        )
    if rounds < mixed.rounds_for() <= _MOST * rounds:
        remedies.append(f"about {rounded_up(mixed.rounds_for()):,} rounds over this graph")
    if settings and settings.consensus_step is None:
        finer = Mixed.over(cycle, replace(algorithm, compressor=FINER), dim)  # type: ignore[type-var]
        if finer.times(rounds) >= ENOUGH > mixed.times(rounds):
            remedies.append(f"algorithm.compressor = {in_a_file(FINER)}, by which news spreads faster")
    return ", or ".join(remedies) or "steps that fall to 0 at the end of the run, or more rounds"


def in_a_file(thing: Topology | Any) -> str:
    """Returns settings as a table on one line of an experiment file."""
    entries = to_table(thing, defaults=False).items()
    quoted = {name: f'"{value}"' if isinstance(value, str) else str(value) for name, value in entries}
    return "{ " + ", ".join(f"{name} = {value}" for name, value in quoted.items()) + " }"


def rounded_up(value: float) -> int:
    """Returns the value rounded up to two digits."""
    unit = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit
