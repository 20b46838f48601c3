"""The round loop. It yields states; observers measure and record them."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm, Carried, Round, TrainerMemory, carried_at_start
from fairmesh.algorithms.own_parts import OwnState
from fairmesh.algorithms.schedules import as_schedule, with_run_length
from fairmesh.algorithms.subgroups import SubgroupState
from fairmesh.config.overrides import portable
from fairmesh.config.tables import to_table
from fairmesh.errors import BadInput
from fairmesh.networks.base import Network, Traffic
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.networks.roles import HELD_BY_ALL, PerProcess, Role, StateView, roles_of
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.problems.objective import Objective
from fairmesh.problems.oracle import Oracle
from fairmesh.problems.prepared import Prepared
from fairmesh.topology.graphs import Topology
from fairmesh.topology.mixing import with_liars
from fairmesh.training.cuda_graph import CapturedRounds, captured_rounds
from fairmesh.training.options import DTYPES, Options, device_of, home_of_data
from fairmesh.training.replicas import Replica, stacked

_EXPLODED = 1e6  # a model whose norm is this many times its initial norm (or 1) has diverged
_FUSED_FROM = 3000  # rounds; compiling takes 8 to 35 s, which fewer rounds do not save


def check_fits(algorithm: Algorithm, problem: Prepared) -> None:
    """Raises BadInput if the algorithm cannot train on the problem."""
    algorithm.check(problem.prior_of_sites, problem.flat_model.dim)
    optimizer = algorithm.local_optimizer()
    if optimizer is not None:
        optimizer.check(problem.flat_model.layout)
    check_objective(algorithm, problem.objective)
    if problem.trainer is not None:
        check_updates(algorithm, problem.objective)


def trains_alone(algorithm: Algorithm) -> bool:
    """Returns whether every node trains alone, so that each site is judged by its own node's model."""
    return not algorithm.sends and not algorithm.needs_server


def check_updates(algorithm: Algorithm, objective: Objective) -> None:
    """Raises BadInput if the algorithm cannot work with the updates of a training function."""
    name, steps = type(algorithm).__name__, getattr(algorithm, "local_steps", 1)
    if steps > 1 and algorithm.oracle_calls() <= steps:
        raise BadInput(
            f"local_steps = {steps}: with a trainer, {name} takes one update per round; set local_steps = 1 and let "
            "the training function take as many steps as it likes"
        )
    if algorithm.oracle_calls() > 1 or (algorithm.needs_server and not algorithm.sends):
        raise BadInput(
            f"{name} does not work with the updates of a trainer; use tracked-ad-gda, ad-gda, choco-sgd, dsgd, or with "
            "a server fedavg (local_steps = 1) or afl"
        )
    if algorithm.local_optimizer() is not None:
        raise BadInput(
            f"algorithm.optimizer is for gradients, but {name} gets the updates of a trainer; leave it out, and use "
            "any optimizer inside the training function"
        )
    if objective.needs_local_models:
        raise BadInput(
            "objective: sites are compared with models of their own, for which the trainer would have to train every "
            "site alone first; give objective.local_losses as a table, or leave out discount_noise and against"
        )


def on_updates(algorithm: Algorithm, problem: Prepared, rounds: int) -> str | None:
    """Returns that an algorithm has its default step, which is for gradients, if a training function gives updates."""
    if problem.trainer is None or not dataclasses.is_dataclass(algorithm):
        return None
    step = algorithm.steps().get("primal_step")
    default = {field.name: field.default_factory for field in dataclasses.fields(algorithm)}.get("primal_step")
    if not callable(default) or step != with_run_length(default(), rounds):
        return None
    return (
        f"{type(algorithm).__name__} has its default primal_step = {step}, which is for gradients, but a trainer gives "
        'updates. "Your own training code as a node", in the documentation, says which steps apply them whole; without '
        "an algorithm, fairmesh takes such steps"
    )


def check_objective(algorithm: Algorithm, objective: Objective) -> None:
    """Raises BadInput if the algorithm's weights cannot follow the objective."""
    name = type(algorithm).__name__
    if objective.discount_noise and not algorithm.discounts_noise():
        raise BadInput(
            "objective.discount_noise = true needs an algorithm whose nodes know the mean loss, such as tracked-ad-gda "
            f"with its default weighting; {name} as it is set does not. An experiment without an algorithm has this "
            f"objective: for {name}, name the algorithm, as in fm.Experiment(data, algorithm={name}()).problem(), or "
            "give the experiment or the problem objective=fm.Objective()"
        )
    if objective.subgroups and algorithm.needs_server:
        raise BadInput(f"objective.subgroups needs an algorithm without a server, such as tracked-ad-gda; got {name}")
    if objective.subgroups == "across" and not algorithm.keeps_prior_weights():
        raise BadInput(
            'objective.subgroups = "across" weighs subgroups instead of sites, so it needs an algorithm in which sites '
            f'keep the weights of their prior: tracked-ad-gda with the weighting "prior-weights"; got {name}'
        )


class Best(NamedTuple):
    """The network-average model of the measured round that is best on validation data."""

    score: Tensor  # (replicas,)
    round: Tensor  # (replicas,)
    model: Tensor  # (replicas, dim)
    own: Tensor | None = None  # the sites' own parts in that round (replicas, n, own_dim)


class TrainingState(NamedTuple):
    """The complete state of a run after some rounds. Averages are over the nodes hosted here."""

    algorithm: Any
    average_model: PerProcess  # theta_o, the mean over time of the network averages (replicas, dim)
    average_dual: Annotated[PerProcess | None, Role(over_nodes=True, on_simplex=True)]  # lambda_o (replicas, n)
    sent: Traffic
    best: Annotated[Best | None, HELD_BY_ALL]
    subgroups: SubgroupState | None = None  # of the hosted nodes, if they have weights
    own: OwnState | None = None  # what stays at each of the hosted nodes, if the model has such parts
    optimizer: Annotated[Any, Role(held_by="node")] = None  # the memory of each hosted node's optimizer, if it has any
    trainer: TrainerMemory | None = None  # what sites' own training functions keep, as bytes (replicas, nodes, length)


class Training:
    """A batched run: replicas over one graph and one problem, advanced round by round."""

    def __init__(
        self,
        problem: Prepared,
        topology: Topology,
        replicas: Sequence[Replica],
        options: Options,
        network: Network | None = None,  # of the nodes hosted here, if not all are
    ):
        self.problem, self.topology, self.replicas, self.options = problem, topology, list(replicas), options
        self.device, self.dtype = device_of(options.device), DTYPES[options.dtype]
        self.network = network or MemoryNetwork(
            with_liars(topology.build(problem.n), options.lying_neighbours),
            device=self.device,
            dtype=self.dtype,
            count_bytes=options.count_bytes,
        )
        for replica in self.replicas:
            check_fits(replica.algorithm, problem)
            if options.lying_neighbours and replica.algorithm.gossip_settings() is None:
                raise BadInput(
                    f"lying_neighbours = {options.lying_neighbours}: {type(replica.algorithm).__name__} has no gossip "
                    "that could be clipped; use ad-gda, tracked-ad-gda or choco-sgd"
                )
        self._round_cache = RoundCache()
        self.algorithm = stacked([replica.algorithm for replica in self.replicas], self.dtype, self.device)
        self.placements = torch.tensor([replica.placement for replica in self.replicas])
        self.data_home = home_of_data(problem, self.device)
        self.oracle = Oracle(
            problem,
            self.network.hosted,
            self.network.streams,
            seeds=[replica.seed for replica in self.replicas],
            placements=self.placements,
            splits=[replica.split for replica in self.replicas],
            calls_per_round=self.algorithm.oracle_calls(),
            dtype=self.dtype,
            data_device=self.data_home,
            round_cache=self._round_cache,
            trace=options.trace == "auto",
            precision=options.precision,
        )
        if self.oracle.worker is not None:
            self.oracle.worker.together = functools.partial(
                self.network.process_group.long_work, seen=lambda every: None
            )

    def identity(self) -> dict[str, Any]:
        """Returns the settings that determine the trajectory, by name. Rounds and measurements are not among them."""
        digests = self.network.process_group.all_gather_json(list(self.problem.digests_here().items()))
        return {
            "topology": portable(to_table(self.topology)),
            "algorithms": [portable(to_table(replica.algorithm)) for replica in self.replicas],
            "seeds": [replica.seed for replica in self.replicas],
            "placements": [list(replica.placement) for replica in self.replicas],
            "splits": [replica.split for replica in self.replicas],
            "problem": self.problem.identity({site: text for held in digests for site, text in held}),
            "options": self.options.identity(),
        }

    def roles(self, state: TrainingState) -> dict[str, Role]:
        """Returns the role of every tensor of a state, by its path, with `held_by` filled in: "node" by default, or
        "all" if a server has the algorithm's state."""
        at_server = self.algorithm.needs_server
        return {
            path: dataclasses.replace(
                role, held_by="all" if at_server and role.held_by != "node" else role.held_by or "node"
            )
            for path, role in roles_of(state).items()
        }

    @functools.cached_property
    def view(self) -> StateView:
        """What observers read of the algorithm's state."""
        return StateView(self.algorithm.init(self.oracle, self.network))

    def initial(self) -> TrainingState:
        """Returns the state before round 0."""
        state = self.algorithm.init(self.oracle, self.network)
        self.__dict__["view"] = StateView(state)  # known now, so it need not be found by another init
        count, dim = len(self.replicas), self.view.models(state).shape[-1]
        duals = self.view.duals(state)
        rows = torch.zeros(count, dim, dtype=self.dtype, device=self.device)
        of_nodes = torch.zeros(count, len(self.network.hosted), dtype=torch.float64, device=self.device)
        of_server = torch.zeros(count, dtype=torch.float64, device=self.device)
        sent = Traffic(of_nodes, of_server, of_nodes.clone(), of_server.clone())
        carried = carried_at_start(self.algorithm, self.oracle)
        own = carried.own
        best = Best(
            torch.full((count,), -torch.inf, dtype=torch.float64),
            torch.zeros(count, dtype=torch.int64),
            rows,
            None if own is None else own.rows[:, :1].expand(-1, self.problem.n, -1).clone(),
        )
        return TrainingState(
            algorithm=state,
            average_model=rows,
            average_dual=None if duals is None else torch.zeros_like(duals[:, 0]),
            sent=sent,
            best=best if self.options.keep_best else None,
            **carried._asdict(),
        )

    def advance(self, state: TrainingState, done: int) -> TrainingState:
        """Returns the state after round number `done`."""
        self.oracle.round_number = done
        return self.after_round(state, torch.tensor(done, device=self.device))

    def after_round(self, state: TrainingState, index: Tensor) -> TrainingState:
        """Returns the state after the round whose number is in a scalar tensor. Uses operations on tensors only."""
        carried = Carried(state.subgroups, state.own, state.optimizer, state.trainer)
        ctx = Round(index, self.oracle, self.network, self._round_cache, carried, self.algorithm.local_optimizer())
        current = self.view.models(state.algorithm).mean(dim=-2)  # theta-bar^t, before the step: t = 0 .. T - 1
        duals, average_dual = self.view.duals(state.algorithm), state.average_dual
        share = self._round_cache.at("share", self._shares, index)
        stepped = self.algorithm.step(state.algorithm, ctx)
        return TrainingState(
            algorithm=stepped,
            average_model=torch.lerp(state.average_model, current, share),
            average_dual=average_dual
            if duals is None or average_dual is None
            else torch.lerp(average_dual, duals.mean(dim=-2), share),
            sent=state.sent.plus(ctx.sent),
            best=state.best,
            **ctx.carried_after()._asdict(),
        )

    def whole_models(self, state: TrainingState) -> Tensor:
        """Returns the models of the hosted nodes with their own parts: (replicas, nodes, dim + own_dim)."""
        models = self.view.models(state.algorithm)
        if state.own is None:
            return models
        return torch.cat([models.expand(-1, state.own.rows.shape[1], -1), state.own.rows], dim=-1)

    def _shares(self, rounds: Tensor) -> Tensor:
        """Returns the share of round t in the mean over time: 1 / (t + 1)."""
        return (1.0 / (rounds + 1).double()).to(self.dtype)

    def states(self, state: TrainingState, done: int, rounds: int) -> Iterator[tuple[int, TrainingState]]:
        """Yields the number of rounds done and the state then, from `done` to `rounds`. On a GPU all states share one
        set of buffers, which the next round changes."""
        yield done, state
        captured = self._captured(state, done, rounds)
        for t in range(done, rounds):
            if captured is None:
                state = self.advance(state, t)
            else:
                self.oracle.feed(t)
                captured.advance()
                state = captured.state
            yield t + 1, state

    def _captured(self, state: TrainingState, done: int, rounds: int) -> CapturedRounds | None:
        """Returns the rounds as a CUDA graph, if the data is on a GPU or streamed to it, augmentation runs there too,
        and there is more than one round to do."""
        on_gpu = self.device.type == "cuda" and (self.data_home.type == "cuda" or self.oracle.streamed)
        augmenter = self.problem.augmenter
        by_host = augmenter is not None and not augmenter.with_model  # a graph would replay what it drew once
        by_host = by_host or self.problem.trainer is not None
        if not on_gpu or by_host or not isinstance(self.network, MemoryNetwork) or rounds - done < 2:
            return None
        fuse = self.options.fuse == "yes" or (self.options.fuse == "auto" and rounds >= _FUSED_FROM)
        self.oracle.round_number = done
        self.oracle.feed_captured(self.oracle.streamed)
        captured = captured_rounds(self.after_round, state._replace(best=None), done, self.device, fuse)
        if captured is None:
            self.oracle.feed_captured(False)
        return captured

    def unsound(self, state: TrainingState) -> Tensor:
        """Returns where a node's model or dual is not finite or has exploded: (replicas, nodes)."""
        models, duals = self.view.models(state.algorithm), self.view.duals(state.algorithm)
        start = torch.linalg.vector_norm(self.oracle.initial_rows, dim=-1, keepdim=True).clamp(min=1.0)
        bad = ~(torch.linalg.vector_norm(models, dim=-1) <= _EXPLODED * start)
        if state.own is not None:
            exploded = ~(torch.linalg.vector_norm(state.own.rows, dim=-1) < torch.inf)
            bad = bad | (exploded.any(dim=-1, keepdim=True) if bad.shape != exploded.shape else exploded)
        return bad if duals is None else bad | ~torch.isfinite(duals).all(dim=-1)

    def unsound_quantity(self, state: TrainingState, replica: int, row: int) -> str:
        """Returns what the node in a row that is unsound has, in words."""
        norm = float(torch.linalg.vector_norm(self.view.models(state.algorithm)[replica, row]))
        duals = self.view.duals(state.algorithm)
        finite_duals = duals is None or bool(torch.isfinite(duals[replica, row]).all())
        own = None if state.own is None or state.own.rows.shape[1] <= row else state.own.rows[replica, row]
        if own is not None and not bool(torch.isfinite(own).all()):
            return "non-finite local parts; lower parts.step"
        model = "a non-finite model" if norm != norm else "an exploded model"
        return f"{model if finite_duals else 'non-finite dual weights'} (norm {norm:.3g})"

    def divergence_message(self, state: TrainingState, done: int, sound: int) -> str:
        """Returns a sentence about which node diverged between two rounds, in which quantity, and what to lower."""
        replica, row = (int(i) for i in self.unsound(state).nonzero()[0])
        what, node = self.unsound_quantity(state, replica, row), int(self.network.hosted[row])
        algorithm, found = self.replicas[replica].algorithm, self.view.consensus_steps(state.algorithm)
        step = None if found is None else float(found.flatten()[0])
        advice = what_to_lower(algorithm, self.problem.flat_model.dim, step)
        site = self.problem.sites[self.replicas[replica].placement[node]].name
        who = "the server" if algorithm.needs_server else f"node {node} ({site})"
        which = f"replica {replica} (seed {self.replicas[replica].seed}), " if len(self.replicas) > 1 else ""
        return f"diverged between rounds {sound} and {done}: {which}{who} has {what}; {advice}"


def what_to_lower(algorithm: Algorithm, dim: int, consensus_step: float | None = None) -> str:
    """Returns which settings of an algorithm to lower if it diverges.

    Args:
        algorithm: The algorithm.
        dim: The number of parameters of the model.
        consensus_step: The one that the algorithm has chosen, if it chooses by itself. Default: None.
    """
    now = torch.zeros((), dtype=torch.int64)
    steps = [f"{name} (starts at {float(as_schedule(s).at(now)):g})" for name, s in algorithm.steps().items()]
    advice = f"lower {' or '.join(steps)}"
    gossip = algorithm.gossip_settings()
    delta = gossip.compressor.delta(dim) if gossip is not None else 1.0
    if gossip is None or delta == 1.0:  # delta = 1: compression loses nothing
        return advice
    known = f"guarantees delta = {delta:.3g}" if delta else "guarantees no delta"
    step = gossip.consensus_step if gossip.consensus_step is not None else consensus_step
    return advice + f", or consensus_step{'' if step is None else f' ({step:g})'}: the compressor {known}"
