"""What to use for a problem: algorithm, compressor, consensus step, rounds; with reasons, and what a run will take."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fairmesh.algorithms.gossip import steady_consensus_step
from fairmesh.algorithms.tracked_ad_gda import TrackedADGDA
from fairmesh.compression.compressors import Quantize
from fairmesh.config.tables import to_table
from fairmesh.errors import BadInput
from fairmesh.experiment import Experiment
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.problems.prepared import Prepared
from fairmesh.training.defaults import DEFAULT_ALGORITHM, ROUNDS, default_for, only_subgroups
from fairmesh.training.loop import TrainingState
from fairmesh.training.memory_estimate import footprint
from fairmesh.training.observers import Observer
from fairmesh.training.replicas import replicas_of
from fairmesh.training.train import train

__all__ = ["Advice", "Predicted", "Recommended", "advise"]

_SLOW = 0.03  # gamma rho with one bit per parameter; below that, more bits pay (reproduction/defaults.py)
_FINER = Quantize(bits=4, block=256)
_MIXED = 10.0  # rounds, in units of 1 / (gamma rho): what gossip needs to spread news over the network
_PASSES = 5  # over the largest site's rows
_MOST = 20_000  # rounds
_FEW = 50  # held-out rows, which may not show that a site's loss can be lowered
_MEASURED_ROUNDS = 40
_ENOUGH = 16  # rounds, after which the time counts
_MEASURED_S, _PATIENCE_S = 3.0, 20.0  # seconds to spend if there are enough rounds, and if there are not
_MIB = 2.0**20


class Recommended(NamedTuple):
    """One setting that is recommended."""

    setting: str
    value: str
    reason: str


class Predicted(NamedTuple):
    """What a run with the recommended settings takes on this machine."""

    seconds: float
    seconds_per_round: float
    memory_bytes: int
    bytes_per_round: float  # sent by the busiest node
    bytes_in_all: float


@dataclass(frozen=True)
class Advice:
    """What is recommended for a problem.

    Attributes:
        experiment: The experiment with the recommended settings, to give to `fm.run`.
        facts: What was found about the problem: sites, rows, parameters, graph.
        recommended: The settings with their reasons.
        hints: What else is worth knowing, as sentences.
        predicted: Time, memory and traffic of such a run.
    """

    experiment: Experiment
    facts: dict[str, Any]
    recommended: tuple[Recommended, ...]
    hints: tuple[str, ...]
    predicted: Predicted

    def settings(self) -> dict[str, Any]:
        """Returns what the experiment file should say. A file without `[algorithm]` uses Tracked AD-GDA with its
        defaults and an objective to match."""
        chosen = self.experiment
        if chosen.algorithm == default_for(chosen.objective, bool(chosen.trainer)).algorithm:
            return {"rounds": chosen.rounds}
        names = ("algorithm", "objective")
        return {"rounds": chosen.rounds} | {name: to_table(getattr(chosen, name)) for name in names}

    def next_step(self, path: str | os.PathLike) -> str:
        """Returns a sentence on how to use the advice for this file."""
        if len(self.settings()) == 1:
            return (
                f"leave [algorithm] and [objective] out of {path} and write rounds = {self.experiment.rounds}; or let "
                "--write FILE do it"
            )
        return f"fairmesh advise {path} --write FILE writes a file with these settings"

    def facts_in_words(self) -> list[tuple[str, str]]:
        """Returns the facts as names and texts."""
        return [
            (name, f"{value:.3g}" if isinstance(value, float) else f"{value:,}") for name, value in self.facts.items()
        ]

    def predicted_in_words(self) -> list[tuple[str, str]]:
        """Returns the predictions as names and texts."""
        p = self.predicted
        twice = ", once more with fixed weights" if self.experiment.options.compare_weights else ""
        minutes = f"{p.seconds:.0f} s" if p.seconds < 120 else f"{p.seconds / 60:.0f} min"
        return [
            ("time", f"{minutes} ({1000 * p.seconds_per_round:.3g} ms per round{twice})"),
            ("memory", f"{p.memory_bytes / _MIB:,.0f} MiB at most"),
            (
                "traffic",
                f"{p.bytes_in_all / 1e6:.3g} MB from the busiest site ({p.bytes_per_round:,.0f} bytes per round)",
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        """Returns everything as a JSON object."""
        return {
            "facts": self.facts,
            "recommended": [one._asdict() for one in self.recommended],
            "hints": list(self.hints),
            "predicted": self.predicted._asdict(),
            "settings": self.settings(),
        }


def advise(experiment: Experiment, announce: Callable[[str], None] | None = None) -> Advice:
    """Looks at an experiment's data, model and graph, and recommends how to train.

    Trains a few rounds to see how long they take; nothing is written.

    Args:
        experiment: The experiment. Its algorithm and rounds have no influence on the advice.
        announce: Called with sentences about the work. Default: None.

    Returns:
        The advice.

    Raises:
        BadInput: The experiment cannot be run, or there is nothing to advise.

    Example:
        >>> import fairmesh as fm
        >>> advice = fm.advise(fm.Experiment(fm.data.Digits(nodes=4, odd=1)))
        >>> advice.experiment.algorithm == fm.TrackedADGDA(), advice.experiment.rounds
        (True, 600)
    """
    plain = replace(
        experiment,
        algorithm=DEFAULT_ALGORITHM,
        sweep={},
        objective=only_subgroups(experiment.objective),
        options=replace(experiment.options, compare_weights=None),
    )
    problem = plain.problem()
    if problem.n < 2:
        raise BadInput("the data has one site, so there is nobody to train with; fm.algorithms.Local() trains it")
    algorithm: Any = plain.algorithm  # the default one
    network = MemoryNetwork(plain.topology.build(problem.n))
    facts = _facts(problem, network)
    step = steady_consensus_step(algorithm.compressor, facts["parameters"], network)
    if not plain.trainer and step * facts["spectral_gap"] < _SLOW:
        algorithm = replace(algorithm, compressor=_FINER)
        step = steady_consensus_step(_FINER, facts["parameters"], network)
    rounds, why = _rounds(facts, step, plain)
    chosen = replace(plain, algorithm=algorithm, rounds=rounds)
    bears = f"what this compressor bears on a graph with {facts['neighbours']} neighbours at most"
    recommended = (
        _algorithm(experiment, chosen),
        _compressor(algorithm, bool(chosen.trainer), facts),
        Recommended("consensus_step", f"{step:g}, chosen by itself", bears),
        why,
    )
    return Advice(chosen, facts, recommended, tuple(_hints(facts, problem)), _predicted(chosen, problem, announce))


def _facts(problem: Prepared, network: MemoryNetwork) -> dict[str, Any]:
    """Returns what is known before any training."""
    rows = [len(site.train) for site in problem.sites]
    return {
        "sites": problem.n,
        "rows": sum(rows),
        "smallest_site": min(rows),
        "largest_site": max(rows),
        "parameters": problem.flat_model.dim,
        "neighbours": max(int(mixing.degrees.max()) for mixing in network.cycle),
        "spectral_gap": network.gap(),
        "untested_sites": sum(not site.test for site in problem.sites),
    }


def _rounds(facts: dict[str, Any], step: float, experiment: Experiment) -> tuple[int, Recommended]:
    """Returns the number of rounds and its reason."""
    if experiment.trainer:
        return 20, Recommended("rounds", "20", "a training function does an epoch or more in each")
    mixing = _MIXED / max(1e-6, step * facts["spectral_gap"])
    passes = _PASSES * facts["largest_site"] / max(1, experiment.sampling.batch)
    reasons = {
        ROUNDS: "fairmesh's default, which is enough here",
        mixing: f"news needs about {mixing:,.0f} rounds to spread over this graph",
        passes: f"about {_PASSES} passes over the largest site's {facts['largest_site']:,} rows",
    }
    wanted = max(reasons)
    rounds = min(_MOST, _rounded_up(wanted))
    reason = reasons[wanted] + (f"; at most {_MOST:,} are recommended" if wanted > _MOST else "")
    return rounds, Recommended("rounds", f"{rounds:,}", reason)


def _rounded_up(value: float) -> int:
    """Returns the value rounded up to two digits."""
    unit = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit


def _algorithm(given: Experiment, chosen: Experiment) -> Recommended:
    own = "with the settings for training functions" if chosen.trainer else "with its default steps"
    reason = (
        'the best worst site without tuning on the problems that fairmesh was tried on (in the documentation: "How to '
        'choose")'
    )
    left_out = default_for(given.objective, bool(given.trainer)).algorithm  # what a file without [algorithm] has
    if given.algorithm not in (chosen.algorithm, left_out):
        named = to_table(given.algorithm).get("name", type(given.algorithm).__name__)
        reason += f"; the experiment names {named}" + (" with other settings" if named == "tracked-ad-gda" else "")
    return Recommended("algorithm", f"tracked-ad-gda {own}", reason)


def _compressor(algorithm: TrackedADGDA, own_code: bool, facts: dict[str, Any]) -> Recommended:
    compressor = algorithm.compressor
    table, bits = to_table(compressor), compressor.nominal_bits(facts["parameters"]) / facts["parameters"]
    reason = "more bits gain little where news spreads fast"
    if own_code:
        reason = "the setting for training functions, whose updates are long"
    elif compressor == _FINER:
        reason = "news spreads slowly over this graph, and faster with more than one bit"
    value = ", ".join(f"{value}" if name == "name" else f"{name} = {value}" for name, value in table.items())
    return Recommended("compressor", value, f"messages {32 / bits:.0f} times smaller than the model; {reason}")


def _hints(facts: dict[str, Any], problem: Prepared) -> list[str]:
    found = []
    if facts["spectral_gap"] < _SLOW:
        found.append(
            f"the graph mixes slowly (spectral gap {facts['spectral_gap']:.3g}); more links per site, such as "
            'topology = { name = "circulant", offsets = [1, 2, 4] }, need fewer rounds'
        )
    if facts["untested_sites"]:
        found.append(f"{facts['untested_sites']} of {facts['sites']} sites have no test rows and will not be measured")
    if facts["smallest_site"] * 20 < facts["largest_site"]:
        found.append(
            f"the smallest site has {facts['smallest_site']:,} rows and the largest {facts['largest_site']:,}; "
            "intervals at small sites are wide, so look at them before you rank sites"
        )
    objective = problem.objective
    judging = objective.held_out_of(facts["smallest_site"])
    if objective.discount_noise and judging < _FEW:
        found.append(
            f"at the smallest site {judging} held-out rows judge the model; if they do not show that its loss can be "
            "lowered, its weight stays small. If it stays the worst, compare with [objective] judged_on = "
            f'"held-out", share = {objective.share:g}, which does not discount noise'
        )
    share = float(problem.prior_of_sites.max())
    if share > 0.5:
        found.append(f"one site has {100 * share:.0f} % of the prior weight; prior = [...] changes this")
    return found


class _Clock(Observer):
    """Notes when rounds end, and stops when enough of them are seen."""

    def __init__(self):
        self.ends: list[float] = []

    def after_round(self, round: int, state: TrainingState) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) > 1 and self.ends[-1] - self.ends[0] > (
            _MEASURED_S if len(self.ends) >= _ENOUGH else _PATIENCE_S
        ):
            self.run.stop("seen enough")

    def seconds_per_round(self, begun: float) -> float:
        """Returns the mean of the later rounds, since the first ones prepare what all use."""
        ends = [begun, *self.ends]
        first = len(ends) // 2 if len(ends) > 2 else 0
        return (ends[-1] - ends[first]) / (len(ends) - 1 - first)


def _predicted(chosen: Experiment, problem: Prepared, announce: Callable[[str], None] | None) -> Predicted:
    """Returns what a run takes, from some of its rounds."""
    clock, some = _Clock(), min(chosen.rounds, 2 if chosen.trainer else _MEASURED_ROUNDS)
    if announce:
        announce(f"training up to {some} rounds to see how long they take")
    options = replace(chosen.options, measure_every=some, compare_weights=False, keep_best=False)
    begun = time.perf_counter()
    result = train(
        problem,
        chosen.topology,
        chosen.algorithm,
        some,
        seeds=chosen.seeds,
        placements=chosen.placements,
        observers=[clock],
        **to_table(options),
    )
    per_round = clock.seconds_per_round(begun)
    replicas = replicas_of(chosen.algorithms(), chosen.seeds, chosen.placements, problem.n, chosen.splits)
    memory = footprint(problem, replicas[0].algorithm, chosen.options).of(len(replicas))
    sent = max(record.get("bytes_busiest_node", math.nan) for record in result.final) / result.rounds
    runs = 2 if chosen.options.compare_weights else 1
    return Predicted(
        runs * chosen.rounds * per_round,
        per_round,
        memory,
        sent,
        sent * chosen.rounds,
    )
