"""The round loop. It yields states; observers measure and record them."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, cast

import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm, Round, could_be_measured
from fairmesh.algorithms.companions import NOTHING, CompanionInputs, carried_at_start
from fairmesh.algorithms.companions.own_parts import OwnParts, OwnState
from fairmesh.algorithms.fitting import check_fits
from fairmesh.algorithms.schedules import as_schedule
from fairmesh.config.overrides import portable
from fairmesh.config.tables import to_table
from fairmesh.errors import BadInput
from fairmesh.networks.base import Network, Traffic
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.networks.roles import HELD_BY_ALL, PerProcess, Role, StateView, roles_of
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.problems.oracle import Oracle
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_oracle import PrivateOracle
from fairmesh.problems.private_run import PrivateRun
from fairmesh.topology.graphs import Topology
from fairmesh.topology.mixing import with_liars
from fairmesh.training.cuda_graph import CapturedRounds, captured_rounds
from fairmesh.training.options import DTYPES, Options, device_of, home_of_data
from fairmesh.training.replicas import Replica, stacked

_EXPLODED = 1e6  # a model whose norm is this many times its initial norm (or 1) has diverged
_FUSED_FROM = 3000  # rounds; compiling takes 8 to 35 s, which fewer rounds do not save


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
    companions: Any = NOTHING  # a NamedTuple of what rides along, by the names in fairmesh/algorithms/companions

    @property
    def own(self) -> OwnState | None:
        """What stays at each of the hosted nodes, if the model has such parts."""
        return getattr(self.companions, OwnParts.name, None)


class Training:
    """A batched run: replicas over one graph and one problem, advanced round by round."""

    def __init__(
        self,
        problem: Prepared,
        topology: Topology,
        replicas: Sequence[Replica],
        options: Options,
        network: Network | None = None,  # of the nodes hosted here, if not all are
        private: PrivateRun | None = None,  # noise and secrets, if the problem has privacy
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
        self.private = private
        self.oracle = self._oracle()
        self._around = CompanionInputs(self.oracle, self.algorithm.local_optimizer())
        if self.oracle.worker is not None:
            self.oracle.worker.together = functools.partial(
                self.network.process_group.long_work, seen=lambda every: None
            )

    def _oracle(self) -> Oracle:
        shared: dict[str, Any] = {
            "seeds": [replica.seed for replica in self.replicas],
            "placements": self.placements,
            "splits": [replica.split for replica in self.replicas],
            "dtype": self.dtype,
            "data_device": self.data_home,
            "round_cache": self._round_cache,
        }
        if self.private is not None:
            made = PrivateOracle(
                self.problem, self.network.hosted, self.network.streams, private=self.private, **shared
            )
            return cast(Oracle, made)  # all that algorithms ask for
        return Oracle(
            self.problem,
            self.network.hosted,
            self.network.streams,
            calls_per_round=self.algorithm.oracle_calls(),
            trace=self.options.trace == "auto",
            precision=self.options.precision,
            **shared,
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
            **({"best by": self.problem.primary} if self.options.keep_best else {}),
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
        start = TrainingState(
            algorithm=state,
            average_model=rows,
            average_dual=None if duals is None else torch.zeros_like(duals[:, 0]),
            sent=sent,
            best=None,
            companions=carried_at_start(self._around),
        )
        best = Best(
            torch.full((count,), -torch.inf, dtype=torch.float64),
            torch.zeros(count, dtype=torch.int64),
            rows,
            None if start.own is None else start.own.rows[:, :1].expand(-1, self.problem.n, -1).clone(),
        )
        return start._replace(best=best) if self.options.keep_best else start

    def advance(self, state: TrainingState, done: int) -> TrainingState:
        """Returns the state after round number `done`."""
        self.oracle.source.round_number = done
        return self.after_round(state, torch.tensor(done, device=self.device))

    def after_round(self, state: TrainingState, index: Tensor) -> TrainingState:
        """Returns the state after the round whose number is in a scalar tensor. Uses operations on tensors only."""
        self.oracle.begin_round()
        ctx = Round(index, self.oracle, self.network, self._round_cache, state.companions, self._around.optimizer)
        current = self.view.models(state.algorithm).mean(dim=-2)  # theta-bar^t, before the step: t = 0 .. T - 1
        duals, average_dual = self.view.duals(state.algorithm), cast(Tensor, state.average_dual)  # both or none
        share = self._round_cache.at("share", self._shares, index)
        stepped = self.algorithm.step(state.algorithm, ctx)
        return TrainingState(
            algorithm=stepped,
            average_model=torch.lerp(state.average_model, current, share),
            average_dual=None if duals is None else torch.lerp(average_dual, duals.mean(dim=-2), share),
            sent=state.sent.plus(ctx.sent),
            best=state.best,
            companions=ctx.carried_after(),
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
                self.oracle.source.feed(t)
                captured.advance()
                state = captured.state
            yield t + 1, state

    def _captured(self, state: TrainingState, done: int, rounds: int) -> CapturedRounds | None:
        """Returns the rounds as a CUDA graph, if the data is on a GPU or streamed to it, augmentation runs there too,
        and there is more than one round to do."""
        on_gpu = self.device.type == "cuda" and (self.data_home.type == "cuda" or self.oracle.source.streamed)
        augmenter = self.problem.augmenter
        by_host = augmenter is not None and not augmenter.with_model  # a graph would replay what it drew once
        by_host = by_host or self.problem.trainer is not None
        if not on_gpu or by_host or not isinstance(self.network, MemoryNetwork) or rounds - done < 2:
            return None
        fuse = self.options.fuse == "yes" or (self.options.fuse == "auto" and rounds >= _FUSED_FROM)
        self.oracle.source.round_number = done
        self.oracle.source.capture(self.oracle.source.streamed)
        captured = captured_rounds(self.after_round, state._replace(best=None), done, self.device, fuse)
        if captured is None:
            self.oracle.source.capture(False)
        return captured

    def _faults(self, state: TrainingState) -> dict[str, Tensor]:
        """Returns where models, duals and own parts are not finite or have exploded, (replicas, nodes), in words."""
        models, duals = self.view.models(state.algorithm), self.view.duals(state.algorithm)
        start = torch.linalg.vector_norm(self.oracle.initial_rows, dim=-1, keepdim=True).clamp(min=1.0)
        norms = torch.linalg.vector_norm(models, dim=-1)
        faults = {}
        if state.own is not None:
            broken = ~(torch.linalg.vector_norm(state.own.rows, dim=-1) < torch.inf)
            at_server = norms.shape != broken.shape
            faults["non-finite local parts; lower parts.step"] = broken.any(-1, keepdim=True) if at_server else broken
        if duals is not None:
            faults["non-finite dual weights"] = ~torch.isfinite(duals).all(dim=-1)
        return faults | {"an exploded model": ~(norms <= _EXPLODED * start)}

    def unsound(self, state: TrainingState) -> Tensor:
        """Returns where a node's model or dual is not finite or has exploded: (replicas, nodes)."""
        return functools.reduce(torch.logical_or, self._faults(state).values())

    def unsound_quantity(self, state: TrainingState, replica: int, row: int) -> str:
        """Returns what the node in a row that is unsound has, in words."""
        norm = float(torch.linalg.vector_norm(self.view.models(state.algorithm)[replica, row]))
        fault = next(words for words, where in self._faults(state).items() if bool(where[replica, row]))
        return f"{'a non-finite model' if norm != norm else fault} (norm {norm:.3g})"

    def divergence_message(self, state: TrainingState, done: int, sound: int) -> str:
        """Returns a sentence about which node diverged between two rounds, in which quantity, and what to lower."""
        replica, row = (int(i) for i in self.unsound(state).nonzero()[0])
        what, node = self.unsound_quantity(state, replica, row), int(self.network.hosted[row])
        algorithm, steps = self.replicas[replica].algorithm, self.view.consensus_steps(state.algorithm)
        step = 0.0 if steps is None else float(steps.flatten()[0])
        advice = what_to_lower(algorithm, self.problem.flat_model.dim, step)
        site = self.problem.sites[self.replicas[replica].placement[node]].name
        who = "the server" if algorithm.needs_server else f"node {node} ({site})"
        which = f"replica {replica} (seed {self.replicas[replica].seed}), " if len(self.replicas) > 1 else ""
        return f"diverged between rounds {sound} and {done}: {which}{who} has {what}; {advice}"


def what_to_lower(algorithm: Algorithm, dim: int, consensus_step: float = 0.0) -> str:
    """Returns which settings of an algorithm to lower if it diverges.

    Args:
        algorithm: The algorithm.
        dim: The number of parameters of the model.
        consensus_step: The one that the algorithm has chosen, if it chooses by itself; 0 if it has not. Default: 0.0.
    """
    now = torch.zeros((), dtype=torch.int64)
    steps = [f"{name} (starts at {float(as_schedule(s).at(now)):g})" for name, s in algorithm.steps().items()]
    advice = f"lower {' or '.join(steps)}"
    if left_out := could_be_measured(algorithm):
        advice += f", or leave {' and '.join(left_out)} out, so that the run measures it"
    gossip = algorithm.gossip_settings()
    if gossip is None or gossip.compressor.delta(dim) == 1.0:  # then compression loses nothing
        return advice
    delta, step = gossip.compressor.delta(dim), gossip.consensus_step or consensus_step
    guaranteed = f"guarantees delta = {delta:.3g}" if delta else "guarantees no delta"
    return advice + f", or consensus_step{f' ({step:g})' if step else ''}: the compressor {guaranteed}"
