"""The plan of a run: its defaults are decided, and most settings that do not fit refused, before it allocates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fairmesh.algorithms.base import Algorithm, unmeasured
from fairmesh.algorithms.fitting import check_fits
from fairmesh.algorithms.schedules import with_run_length
from fairmesh.config.tables import from_table
from fairmesh.data.reserve import reserve
from fairmesh.errors import BadInput
from fairmesh.networks.base import Network
from fairmesh.networks.memory import SingleProcess
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.personalization.base import Personalization
from fairmesh.personalization.personalize import mixes_models, refuse_structure, usual_choice
from fairmesh.problems.checks import refuse_autocast
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_run import PrivateRun
from fairmesh.problems.problem import Problem, prepare
from fairmesh.topology.graphs import Topology
from fairmesh.topology.mixing import Mixing, with_liars
from fairmesh.training.defaults import ROUNDS, default_for
from fairmesh.training.graph_choice import default_topology
from fairmesh.training.loop import Training
from fairmesh.training.options import Options, device_of
from fairmesh.training.private import refuse_with_privacy
from fairmesh.training.replicas import Placements, Replica, replicas_of, sites_at, stacked


@dataclass(frozen=True, eq=False)
class Plan:
    """A run whose settings are checked and complete. `Plan.of` makes it."""

    problem: Prepared  # with the data of the nodes hosted here
    topology: Topology
    cycle: Sequence[Mixing]  # the graphs of the rounds
    replicas: list[Replica]
    rounds: int
    options: Options
    process_group: ProcessGroup
    personalization: Personalization | None
    private: PrivateRun | None = None  # rates, noise and secrets, if the problem has privacy
    measured: tuple[str, ...] = ()  # fields of the algorithm whose numbers were measured before round 0

    @staticmethod
    def of(
        problem: Problem | Prepared | Sequence[Problem | Prepared],
        topology: Topology | None = None,
        algorithm: Algorithm | Sequence[Algorithm] | None = None,
        rounds: int = ROUNDS,
        *,
        seeds: Sequence[int] = (0,),
        placements: Placements = None,
        personalization: Personalization | None = None,
        process_group: ProcessGroup | None = None,
        cycle: Sequence[Mixing] = (),
        options: Options | Mapping[str, Any] = Options(),  # noqa: B008
    ) -> "Plan":
        """Returns the plan of a run, with the data of the nodes hosted here.

        Args:
            problem: As in `fm.train`, like all that follow up to `process_group`.
            topology: Who talks to whom; None for `default_topology`.
            algorithm: The algorithm, several, or None for the default one.
            rounds: Rounds to train.
            seeds: Seeds of the replicas.
            placements: Which site each node holds.
            personalization: How sites get models of their own.
            process_group: The processes that train together. Default: only this one.
            cycle: The graphs of the rounds, where sites may have left; those of the topology by default.
            options: How the run is measured and carried out. Default: Options().

        Raises:
            BadInput: The run cannot be carried out.
        """
        refuse_autocast()
        problem = prepare(problem)
        if problem.privacy is None:
            _refuse_sealed(problem)
        process_group = process_group or SingleProcess()
        chosen: Options = from_table(Options, options, "options")
        asked = bool(chosen.choose_weights)
        if algorithm is None:
            problem, algorithm, chosen = _with_defaults(problem, chosen)
        if not isinstance(rounds, int) or rounds < 1:
            raise BadInput(f"rounds must be a whole number >= 1, got {rounds!r}")
        algorithms = _fitted(algorithm, rounds)
        chosen = replace(chosen, choose_weights=_chooses(problem, algorithms, chosen, asked))
        topology = default_topology(problem.n, rounds, algorithms[0]) if topology is None else topology
        if not isinstance(topology, Topology):
            raise BadInput(f"topology must be a Topology such as fm.Ring(), got {topology!r}")
        replicas = replicas_of(algorithms, seeds, placements, problem.n, len(problem.every_split))
        _refuse(problem, algorithms, chosen)
        if problem.privacy is not None:
            refuse_with_privacy(problem, algorithms, chosen, personalization)
        if personalization is not None:
            method: Personalization = from_table(Personalization, personalization, "personalization")
            problem, personalization = _with_reserve(problem, method.share), method
        elif chosen.choose_weights and problem.n > 1 and mixes_models(problem):
            personalization = usual_choice(problem, rounds)
        private = None
        if problem.privacy is not None:
            with_losses = any(algorithm.uses_losses() for algorithm in algorithms)
            private = PrivateRun.of(problem, algorithms[0].oracle_calls(), rounds, with_losses)
        if process_group.world_size > 1:
            problem = problem.keeping(sites_at(process_group.nodes(problem.n), replicas))
        cycle = cycle or with_liars(topology.build(problem.n), chosen.lying_neighbours)
        device_of(chosen.device)  # refuses one that this machine does not have
        return Plan(problem, topology, cycle, replicas, rounds, chosen, process_group, personalization, private)

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Returns the fields of the algorithms whose numbers are to be measured before round 0."""
        return tuple(dict.fromkeys(name for replica in self.replicas for name in unmeasured(replica.algorithm)))

    def training(self, network: Network) -> Training:
        """Returns the rounds of the plan over a network, with all that they need allocated."""
        private = self.private and self.private.with_secrets(self.replicas[0].seed)
        return Training(self.problem, self.topology, self.replicas, self.options, network, private)


def _refuse_sealed(problem: Prepared) -> None:
    """Raises BadInput for rows that were sealed for a private run."""
    for samples in problem.train_sets:
        samples.refuse_sealed()


def with_fixed_weights(plan: Plan) -> Plan:
    """Returns the plan of the same run with the weights of the prior."""
    fixed = {id(replica.algorithm): replica.algorithm.with_fixed_weights() for replica in plan.replicas}
    replicas: Any = [replace(replica, algorithm=fixed[id(replica.algorithm)]) for replica in plan.replicas]
    return replace(plan, replicas=replicas)


def _with_defaults(problem: Prepared, options: Options) -> tuple[Prepared, Algorithm, Options]:
    """Returns what a run has that names no algorithm: its objective, its algorithm, and `compare_weights`."""
    private = problem.privacy is not None
    default = default_for(problem.objective, bool(problem.trainer), problem.weight_decay, private)
    if default.objective is not problem.objective:
        problem = problem.each(lambda split: split.changed(objective=default.objective))
    return problem, default.algorithm, default.completed(options)


def _chooses(problem: Prepared, algorithms: Sequence[Algorithm], options: Options, asked: bool) -> bool:
    """Returns whether a run decides which weights its model has. It does not by default where it cannot."""
    several, streamed = len(algorithms) > 1, any(site.train.stream for site in problem.sites)
    if asked and several:
        raise BadInput("choose_weights decides for one algorithm, and this is a sweep of several; leave it out")
    if asked and streamed:
        raise BadInput("choose_weights needs samples in memory, since models are trained without folds of them")
    return bool(options.choose_weights) and not several and not streamed


def _fitted(algorithm: Algorithm | Sequence[Algorithm], rounds: int) -> list[Algorithm]:
    """Returns the algorithms with their settings checked, and their schedules fitted to the run's length."""
    algorithms = list(algorithm) if isinstance(algorithm, Sequence) else [algorithm]
    for given in algorithms:
        if not isinstance(given, Algorithm):
            raise BadInput(f"algorithm must be an Algorithm such as fm.ADGDA(), or a list of them, got {given!r}")
    return [with_run_length(from_table(Algorithm, given, "algorithm"), rounds) for given in algorithms]


def _refuse(problem: Prepared, algorithms: Sequence[Algorithm], options: Options) -> None:
    """Refuses what does not go together."""
    if options.keep_best and not problem.held_out("validation")[1]:
        raise BadInput("keep_best needs validation sets; give each Site, or the Problem, one")
    for name in ("compare_weights", "choose_weights"):
        if getattr(options, name) and not all(a.with_fixed_weights() for a in algorithms):
            raise BadInput(f"{name} needs an algorithm with weights of its own, such as tracked-ad-gda")
    if options.own_models and any(a.needs_server for a in algorithms):
        raise BadInput("own_models: nodes of an algorithm with a server have no models of their own")
    for algorithm in algorithms:
        check_fits(algorithm, problem)
    stacked(algorithms, torch.float64, torch.device("cpu"))  # refuses what cannot run in one batch


def _with_reserve(problem: Prepared, share: float) -> Prepared:
    """Returns the problem in which every site has reserved rows for the choice of its own model."""
    refuse_structure(problem)
    problem.refuse_own_parts("personalization")
    return problem.each(lambda split: split.changed(sites=reserve(split.sites, share)))
