"""What to use for a problem: algorithm, compressor, consensus step, rounds; with reasons, and what a run will take."""

import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from fairmesh.comparisons.reference_losses import with_any_references
from fairmesh.config.tables import to_table
from fairmesh.data.sealed import unit_of
from fairmesh.data.units import announced, units_of
from fairmesh.errors import BadInput
from fairmesh.experiment import Experiment, topology_of
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.personalization.personalize import mixes_models, personalize, usual_choice
from fairmesh.privacy.price import Price, Terms, price_of
from fairmesh.problems.prepared import Prepared
from fairmesh.rehearsal import LENGTHS, rehearsed
from fairmesh.topology.graphs import Ring, Topology
from fairmesh.training.agreement import TOO_FEW, in_a_file, on_too_few_rounds, rounded_up
from fairmesh.training.defaults import DEFAULT_ALGORITHM, ROUNDS, default_for, only_subgroups
from fairmesh.training.graph_choice import ENOUGH, Mixed, sparsest
from fairmesh.training.loop import TrainingState
from fairmesh.training.memory_estimate import footprint
from fairmesh.training.observers import Observer
from fairmesh.training.options import DTYPES, device_of
from fairmesh.training.pace import Echo, Pace, RoundCost, duration, pace_of, round_cost
from fairmesh.training.plan import Plan
from fairmesh.training.replicas import replicas_of
from fairmesh.training.result import Result
from fairmesh.training.train import train

__all__ = ["Advice", "Predicted", "Recommended", "advise"]

_MIXED = 10.0  # rounds, in units of 1 / (gamma rho): the fewest in which local steps are as good as single ones
_SLOW = 0.5  # of the rounds that suffice; where the usual rounds are less than that, the graph is the problem
_PASSES = 5  # over the largest site's rows, where nothing could be rehearsed
_MOST = LENGTHS[-1]  # rounds
_LOCAL_STEPS, _FEWER = 5, 0.5  # as good in half of the rounds where news spreads in those (docs/results/local-steps.md)
_WORTH = 0.8  # of the rounds or of the time; if local steps need more, they are not recommended
_LOCAL_STEPS_MAY_COST = (
    f"{_LOCAL_STEPS} local steps in half of the rounds ended up to one point below single steps at the worst site of "
    "examples/small-sites.toml, and five points below on CIFAR-10 (none with max_drift = 0, for sites that have all "
    "classes); compare both in a simulation before you deploy. Larger batches in fewer rounds did not help"
)
_FEW = 50  # held-out rows, which may not show that a site's loss can be lowered
_MEASURED_ROUNDS = 40
_ENOUGH = 16  # rounds, after which the time counts
_MEASURED_S, _PATIENCE_S = 3.0, 20.0  # seconds to spend if there are enough rounds, and if there are not
_RUNS_THAT_CHOOSE = 6  # that the rounds of a run take, with the models of folds and with fixed weights
_MEASURED_STEPS = 4  # of each kind of model, of those that sites choose among
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


class OverNetwork(NamedTuple):
    """What the rounds take between sites that are apart."""

    rtt_s: float
    pace: Pace
    rounds: int
    single: "OverNetwork | None" = None  # with single steps, if local steps are recommended

    @property
    def seconds(self) -> float:
        """Returns what all rounds take."""
        return self.rounds * self.pace.seconds

    def in_words(self) -> str:
        """Returns the rounds per second and the time of the rounds, for people."""
        waiting = f"{1000 * self.pace.waiting_s:.3g} of {1000 * self.pace.seconds:.3g} ms per round are waiting"
        instead = f"; single steps take about {duration(self.single.seconds)}" if self.single else ""
        return f"{self.pace.in_words(self.rounds)} ({waiting}){instead}"

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers as a JSON object."""
        return {
            "rtt_ms": 1000 * self.rtt_s,
            "rounds_per_second": 1 / self.pace.seconds,
            "seconds": self.seconds,
            "computing_seconds_per_round": self.pace.computing_s,
            "waiting_seconds_per_round": self.pace.waiting_s,
            "seconds_with_single_steps": (self.single or self).seconds,
        }


@dataclass(frozen=True)
class Advice:
    """What is recommended for a problem.

    Attributes:
        experiment: The experiment with the recommended settings, to give to `fm.run`.
        facts: What was found about the problem: sites, rows, parameters, graph.
        recommended: The settings with their reasons.
        hints: What else is worth knowing, as sentences.
        predicted: Time, memory and traffic of such a run.
        network: What its rounds take between sites that are apart, if a round trip was given.
        privacy: What each epsilon means for these sites, if the experiment has privacy.
    """

    experiment: Experiment
    facts: dict[str, Any]
    recommended: tuple[Recommended, ...]
    hints: tuple[str, ...]
    predicted: Predicted
    network: OverNetwork | None = None
    privacy: Price | None = None

    def settings(self) -> dict[str, Any]:
        """Returns what the experiment file should say. A file without `[algorithm]` uses Tracked AD-GDA with its
        defaults and an objective to match."""
        chosen = self.experiment
        settings: dict[str, Any] = {"rounds": chosen.rounds}
        if any(recommended.setting == "topology" for recommended in self.recommended) and chosen.topology:
            settings["topology"] = to_table(chosen.topology, defaults=False)
        if any(recommended.setting == "sampling.batch" for recommended in self.recommended):
            settings["sampling"] = to_table(chosen.sampling, defaults=False)
        if chosen.algorithm != default_for(chosen.objective, bool(chosen.trainer)).algorithm:
            settings |= {name: to_table(getattr(chosen, name)) for name in ("algorithm", "objective")}
        return settings

    def next_step(self, path: str | os.PathLike, line: str = "") -> str:
        """Returns a sentence on how to use the advice for this file, which was given with the options `line`."""
        if len(self.settings()) == 1:
            return (
                f"leave [algorithm] and [objective] out of {path} and write rounds = {self.experiment.rounds}; or let "
                "--write FILE do it"
            )
        return f"fairmesh advise {path}{line} --write FILE writes a file with these settings"

    def facts_in_words(self) -> list[tuple[str, str]]:
        """Returns the facts as names and texts."""
        return [
            (name, f"{value:.3g}" if isinstance(value, float) else f"{value:,}") for name, value in self.facts.items()
        ]

    def predicted_in_words(self) -> list[tuple[str, str]]:
        """Returns the predictions as names and texts."""
        p = self.predicted
        options = self.experiment.options
        twice = ", once more with fixed weights" if options.compare_weights else ""
        twice = (
            ", with models without folds of the rows, with fixed weights, and for each site"
            if options.choose_weights
            else twice
        )
        between_sites = [("time between sites", self.network.in_words())] if self.network else []
        return [
            ("time", f"{duration(p.seconds)} ({1000 * p.seconds_per_round:.3g} ms per round{twice})"),
            *between_sites,
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
            **({"network": self.network.as_json()} if self.network else {}),
            **({"privacy": self.privacy.as_json()} if self.privacy else {}),
        }


def advise(
    experiment: Experiment,
    announce: Callable[[str], None] | None = None,
    *,
    rtt_ms: float | None = None,
    bandwidth_mbits: float = math.inf,
) -> Advice:
    """Looks at an experiment's data, model and graph, and recommends how to train.

    Rehearses: trains short runs of growing length on three quarters of the rows, for 20 seconds at most, and judges
    them by the others, to see where more rounds stop helping. Nothing is written.

    Args:
        experiment: The experiment. Its algorithm has no influence on the advice; its rounds have with privacy only.
        announce: Called with sentences about the work. Default: None.
        rtt_ms: The round trip between the sites that are furthest apart, in ms, >= 0. Then the advice says how long
            the run takes between them, and recommends local steps where they mostly wait. Default: None.
        bandwidth_mbits: The bandwidth of the slowest site's line, in Mbit/s, > 0. Default: inf.

    Returns:
        The advice.

    Raises:
        BadInput: The experiment cannot be run, or there is nothing to advise.

    Example:
        >>> import fairmesh as fm
        >>> advice = fm.advise(fm.Experiment(fm.data.Digits(nodes=4, odd=1)))
        >>> advice.experiment.algorithm == fm.TrackedADGDA(), 75 <= advice.experiment.rounds <= 4800
        (True, True)
    """
    if (rtt_ms is not None and not 0 <= rtt_ms < math.inf) or not bandwidth_mbits > 0:
        raise BadInput(f"rtt_ms must be >= 0 and bandwidth_mbits > 0, got {rtt_ms} and {bandwidth_mbits}")
    plain = replace(
        experiment,
        algorithm=DEFAULT_ALGORITHM,
        sweep={},
        objective=only_subgroups(experiment.objective),
        options=replace(experiment.options, compare_weights=None, choose_weights=None),
    )
    with announced(announce):
        problem = plain.problem()
    if problem.n < 2:
        raise BadInput("the data has one site, so there is nobody to train with; fm.algorithms.Local() trains it")
    plain, problem, batches = _fitting_batches(plain, problem)
    graph = _graph(experiment, plain, problem)
    rounds, why = _rounds(plain, problem, graph, announce)
    topology = experiment.topology and graph  # left out, it follows from the rounds
    chosen = replace(plain, topology=topology, rounds=rounds)
    if topology != experiment.topology and on_too_few_rounds(
        graph.build(problem.n), rounds, plain.algorithm, problem.flat_model.dim
    ):  # the run would object to what is written here
        rounds = min(_MOST, rounded_up(_mixed(chosen, problem).rounds_for(TOO_FEW)))
        chosen = replace(chosen, rounds=rounds)
        why = Recommended("rounds", f"{rounds:,}", "fewer would do for the loss, but not for the sites to agree")
    mixed = _mixed(chosen, problem)
    recommended = (
        _algorithm(experiment, chosen),
        _compressor(chosen, problem.flat_model.dim),
        Recommended(
            "consensus_step",
            f"{mixed.consensus_step:g}, chosen by itself",
            f"what this compressor bears on a graph with {mixed.neighbours} neighbours at most",
        ),
        *_topology(experiment, chosen, problem),
        *batches,
        why,
    )
    facts = _facts(problem, mixed)
    settled = _Settled(chosen, recommended, tuple(_hints(facts, problem, len(plain.seeds) * plain.splits)))
    if rtt_ms is not None:
        settled = _between_sites(settled, problem, mixed, rtt_ms / 1000, bandwidth_mbits * 1e6 / 8)
    chosen, recommended, hints, network = settled
    predicted = _predicted(chosen, problem, announce)
    return Advice(chosen, facts, recommended, hints, predicted, network, _price(chosen, problem))


def _fitting_batches(plain: Experiment, problem: Prepared) -> tuple[Experiment, Prepared, list[Recommended]]:
    """Returns the experiment with batches that every site can draw, where privacy needs that, and its problem."""
    smallest, sampling = min(units_of(site.train) for site in problem.sites), plain.sampling
    if problem.privacy is None or smallest >= sampling.batch:
        return plain, problem, []
    fitting = replace(sampling, batch=smallest)
    reason = f"with privacy a batch is a random part of the units, and the smallest site has {smallest:,}"
    changed = problem.each(lambda split: split.changed(sampling=fitting))
    recommended = Recommended("sampling.batch", f"{smallest:,}", reason)
    return replace(plain, sampling=fitting), changed, [recommended]


def _price(chosen: Experiment, problem: Prepared) -> Price | None:
    """Returns what each epsilon means for the sites; None without privacy."""
    privacy, algorithm = problem.privacy, chosen.algorithm
    if privacy is None:
        return None
    releases, share = chosen.rounds * algorithm.oracle_calls(), privacy.loss_share if algorithm.uses_losses() else 0.0
    terms = Terms(
        privacy.delta, chosen.sampling.batch, releases, problem.flat_model.dim, loss_share=share, clip=privacy.clip
    )
    units = [units_of(site.train) for site in problem.sites]
    named = [unit for unit in (unit_of(site.train) for site in problem.sites) if unit != "row"]
    prior = None if chosen.prior is None else problem.prior_of_sites.tolist()
    return price_of(terms, privacy.epsilon, units, prior, named[0] if named else "row")


def _mixed(experiment: Experiment, problem: Prepared) -> Mixed:
    """Returns how news spreads over the experiment's graph."""
    cycle = topology_of(experiment, problem.n).build(problem.n)
    return Mixed.over(cycle, experiment.algorithm, problem.flat_model.dim)


def _graph(given: Experiment, plain: Experiment, problem: Prepared) -> Topology:
    """Returns the graph to rehearse over: the experiment's own, unless the usual rounds are too few for it."""
    own = topology_of(replace(plain, rounds=ROUNDS), problem.n)
    mixed = Mixed.over(own.build(problem.n), plain.algorithm, problem.flat_model.dim)
    suffices = given.topology is None or mixed.times(ROUNDS) >= _SLOW * ENOUGH
    return own if suffices or plain.trainer else sparsest(problem.n, ROUNDS, plain.algorithm)


def _topology(given: Experiment, chosen: Experiment, problem: Prepared) -> list[Recommended]:
    """Returns what is said about the graph: that another one is needed, or which one a run chooses."""
    graph, mixed = topology_of(chosen, problem.n), _mixed(chosen, problem)
    if given.topology is None and graph == Ring():
        return []
    if given.topology == chosen.topology and given.topology is not None:
        return []
    if given.topology is None:
        reason = (
            f"chosen by itself: the sparsest graph for which the rounds suffice, {mixed.neighbours} neighbours each"
        )
    else:
        own = _mixed(replace(chosen, topology=given.topology), problem)
        reason = (
            f"the graph is the problem: news needs about {rounded_up(own.rounds_for()):,} rounds to spread "
            f"over it (spectral gap {own.gap:.2g}); {mixed.neighbours} neighbours instead of {own.neighbours} send "
            f"{mixed.neighbours / own.neighbours:.2g} times the bytes per round"
        )
    return [Recommended("topology", in_a_file(graph), reason)]


class _Settled(NamedTuple):
    """What is decided before a run is tried."""

    experiment: Experiment
    recommended: tuple[Recommended, ...]
    hints: tuple[str, ...]
    network: OverNetwork | None = None


def _between_sites(settled: _Settled, problem: Prepared, mixed: Mixed, rtt_s: float, bytes_per_s: float) -> _Settled:
    """Returns what is decided for sites that are apart: with local steps in fewer rounds, where that saves time."""
    chosen, share = settled.experiment, bytes_per_s / mixed.neighbours  # of a site's line, for each neighbour
    algorithm: Any = chosen.algorithm  # the default one
    if problem.privacy is not None:
        pace = pace_of(_cost(chosen, problem), rtt_s, share)
        why = "local steps are not looked at: each is a release of its own, so that more of them need more noise"
        return settled._replace(hints=(*settled.hints, why), network=OverNetwork(rtt_s, pace, chosen.rounds))
    if chosen.trainer:
        said = (
            f"over the network a round takes {500 * rtt_s:g} ms more than the training function, which decides itself "
        )
        return settled._replace(hints=(*settled.hints, said + "how much it does between two exchanges"))
    single = OverNetwork(rtt_s, pace_of(_cost(chosen, problem), rtt_s, share), chosen.rounds)
    if not single.pace.mostly_waits:
        return settled._replace(network=single)
    waits = f"sites wait for {100 * single.pace.waiting_s / single.pace.seconds:.0f} % of a round of single steps"
    rounds = rounded_up(max(_FEWER * chosen.rounds, mixed.rounds_for(_MIXED)))
    local = replace(chosen, algorithm=replace(algorithm, local_steps=_LOCAL_STEPS), rounds=rounds)
    network = OverNetwork(rtt_s, pace_of(_cost(local, problem), rtt_s, share), rounds, single)
    if rounds > _WORTH * chosen.rounds:
        why = f"{waits}, and local steps do not help: news needs about {rounds:,} rounds to spread over this graph"
        return settled._replace(hints=(*settled.hints, why), network=single)
    if network.seconds > _WORTH * single.seconds:
        why = f"{waits}, but {_LOCAL_STEPS} local steps in {rounds:,} rounds would compute longer than they save"
        return settled._replace(hints=(*settled.hints, why), network=single)
    fewer = f"half of {chosen.rounds:,}" if rounds <= _FEWER * chosen.rounds else f"instead of {chosen.rounds:,}"
    recommended = (
        *settled.recommended[:-1],
        Recommended("local_steps", str(_LOCAL_STEPS), f"{waits}; a round costs the same bytes with more steps in it"),
        Recommended("rounds", f"{rounds:,}", f"{fewer}, since each has {_LOCAL_STEPS} steps"),
    )
    return _Settled(local, recommended, (*settled.hints, _LOCAL_STEPS_MAY_COST), network)


def _cost(chosen: Experiment, problem: Prepared) -> RoundCost:
    """Returns what a round costs the first site's node, by some rounds without anybody to wait for."""
    echo, options = Echo(), chosen.options
    alone = with_any_references(problem.of_split(0), chosen.rounds, [str(site.name) for site in problem.sites])
    plan = Plan.of(alone, topology_of(chosen, problem.n), chosen.algorithm, chosen.rounds, options=options)
    form: dict[str, Any] = {"device": device_of(options.device), "dtype": DTYPES[options.dtype], "each_copy": True}
    return round_cost(plan.training(RemoteNetwork(plan.cycle, [0], echo, **form)), echo)


def _facts(problem: Prepared, mixed: Mixed) -> dict[str, Any]:
    """Returns what is known before any training."""
    private = problem.privacy is not None
    rows = [units_of(site.train) if private else len(site.train) for site in problem.sites]
    return {
        "sites": problem.n,
        "units" if private else "rows": sum(rows),
        "smallest_site": min(rows),
        "largest_site": max(rows),
        "parameters": problem.flat_model.dim,
        "neighbours": mixed.neighbours,
        "spectral_gap": mixed.gap,
        "untested_sites": sum(not site.test for site in problem.sites),
    }


def _rounds(
    experiment: Experiment, problem: Prepared, graph: Topology, announce: Callable[[str], None] | None
) -> tuple[int, Recommended]:
    """Returns the number of rounds and its reason."""
    if experiment.trainer:
        return 20, Recommended("rounds", "20", "a training function does an epoch or more in each")
    if problem.privacy is not None:
        reason = (
            "those of the file, since a rehearsal would read training rows without noise; fewer need less noise, and "
            "train less"
        )
        return experiment.rounds, Recommended("rounds", f"{experiment.rounds:,}", reason)
    rehearsal = rehearsed(problem, graph, experiment.algorithm, experiment.options, announce)
    if rehearsal:
        return rehearsal.rounds, Recommended("rounds", f"{rehearsal.rounds:,}", rehearsal.in_words())
    largest = max(len(site.train) for site in problem.sites)
    passes = _PASSES * largest / max(1, experiment.sampling.batch)
    mixing = Mixed.over(graph.build(problem.n), experiment.algorithm, problem.flat_model.dim).rounds_for()
    reasons = {
        ROUNDS: "fairmesh's default; a rehearsal would take too long here",
        mixing: f"news needs about {mixing:,.0f} rounds to spread over this graph",
        passes: f"about {_PASSES} passes over the largest site's {largest:,} rows",
    }
    wanted = max(reasons)
    rounds = min(_MOST, rounded_up(wanted))
    reason = reasons[wanted] + (f"; at most {_MOST:,} are recommended" if wanted > _MOST else "")
    return rounds, Recommended("rounds", f"{rounds:,}", reason)


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


def _compressor(chosen: Experiment, dim: int) -> Recommended:
    compressor = chosen.algorithm.compressor  # type: ignore[attr-defined]  # the default one has it
    table, bits = to_table(compressor), compressor.nominal_bits(dim) / dim
    reason = "the setting for training functions, whose updates are long" if chosen.trainer else "more bits gain little"
    value = ", ".join(f"{value}" if name == "name" else f"{name} = {value}" for name, value in table.items())
    return Recommended("compressor", value, f"messages {32 / bits:.0f} times smaller than the model; {reason}")


def _hints(facts: dict[str, Any], problem: Prepared, models: int) -> list[str]:
    found = []
    if problem.privacy is not None:
        found.append(
            "with [privacy] nothing was rehearsed. Time and traffic are those of some private rounds on this machine, "
            "a simulation; their models and their measurements were thrown away and are not shown"
        )
        if models > 1:
            found.append(
                f"seeds and splits make {models} models of the same rows, and the price is that of one; who publishes "
                "several, or the best of them, spends that of all together"
            )
    if facts["untested_sites"]:
        found.append(f"{facts['untested_sites']} of {facts['sites']} sites have no test rows and will not be measured")
    if facts["smallest_site"] * 20 < facts["largest_site"]:
        rows = "units" if "units" in facts else "rows"
        found.append(
            f"the smallest site has {facts['smallest_site']:,} {rows} and the largest {facts['largest_site']:,}; "
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
    """Notes when rounds end, and stops when enough of them are seen.

    Args:
        most: How many rounds are seen at most.
    """

    def __init__(self, most: int):
        self.ends: list[float] = []
        self._most = most

    def after_round(self, round: int, state: TrainingState) -> None:
        self.ends.append(time.perf_counter())
        long = len(self.ends) > 1 and self.ends[-1] - self.ends[0] > (
            _MEASURED_S if len(self.ends) >= _ENOUGH else _PATIENCE_S
        )
        if long or len(self.ends) >= self._most:
            self.run.stop("seen enough")

    def seconds_per_round(self, begun: float) -> float:
        """Returns the mean of the later rounds, since the first ones prepare what all use."""
        ends = [begun, *self.ends]
        first = len(ends) // 2 if len(ends) > 2 else 0
        return (ends[-1] - ends[first]) / (len(ends) - 1 - first)


class _SeenEnough(Exception):
    """Ends a measurement."""


def _seconds_of_choosing(chosen: Experiment, result: Result) -> float:
    """Returns how long the choice of the sites' models takes for one replica, from a few of its steps."""
    if not chosen.options.choose_weights or chosen.personalization or not mixes_models(result.problem):
        return 0.0
    usual, begun = usual_choice(result.problem, chosen.rounds), time.perf_counter()
    if usual is None:
        return 0.0
    ends, in_all = [begun], 0

    def watch(done: int, steps: int) -> None:
        nonlocal in_all
        in_all = steps
        ends.append(time.perf_counter())
        if ends[-1] - begun > _PATIENCE_S:
            raise _SeenEnough

    few = replace(usual, steps=_MEASURED_STEPS, local_steps=_MEASURED_STEPS)
    with suppress(_SeenEnough):
        personalize(result, few, device=chosen.options.device, progress=watch)
    if len(ends) < 2:  # no site has rows to choose by
        return 0.0
    of_few = time.perf_counter() - begun
    usual_steps = (usual.local_steps + 2 * usual.steps) / 3  # of own models, tuned ones and those near the common one
    steps = in_all * usual_steps / _MEASURED_STEPS - (len(ends) - 1)
    return of_few + steps * statistics.median(later - end for end, later in pairwise(ends))


def _predicted(chosen: Experiment, problem: Prepared, announce: Callable[[str], None] | None) -> Predicted:
    """Returns what a run takes, from some of its rounds."""
    some = min(chosen.rounds, 2 if chosen.trainer else _MEASURED_ROUNDS)
    clock, private = _Clock(some), problem.privacy is not None
    if announce:
        announce(f"training up to {some} rounds to see how long they take")
    options = replace(chosen.options, measure_every=some, compare_weights=False, choose_weights=False, keep_best=False)
    begun = time.perf_counter()
    result = train(
        problem,
        topology_of(chosen, problem.n),
        chosen.algorithm,
        chosen.rounds if private else some,  # so that their noise is that of the run
        seeds=chosen.seeds,
        placements=chosen.placements,
        observers=[clock],
        announce=lambda text: None,  # that so few rounds do not suffice
        **to_table(options),
    )
    per_round = clock.seconds_per_round(begun)
    replicas = replicas_of(chosen.algorithms(), chosen.seeds, chosen.placements, problem.n, chosen.splits)
    memory = footprint(problem, replicas[0].algorithm, chosen.options).of(len(replicas))
    sent = max(record.get("bytes_busiest_node", math.nan) for record in result.final) / result.rounds
    runs = _RUNS_THAT_CHOOSE if chosen.options.choose_weights else 2 if chosen.options.compare_weights else 1
    return Predicted(
        runs * chosen.rounds * per_round + len(replicas) * _seconds_of_choosing(chosen, result),
        per_round,
        memory,
        sent,
        sent * chosen.rounds,
    )
