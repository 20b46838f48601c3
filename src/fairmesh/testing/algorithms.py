"""The contract that every algorithm must keep."""

import copy
import dataclasses
import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairmesh.algorithms.base import Algorithm, Round
from fairmesh.algorithms.optimizers import AdamW, Optimizer
from fairmesh.algorithms.schedules import with_run_length
from fairmesh.compression.compressors import Compressor
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.networks.roles import Role, StateView, roles_of
from fairmesh.problems.oracle import Oracle
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.problem import Problem, prepare
from fairmesh.storage.state_tree import flatten_state, unflatten_state
from fairmesh.testing.hosts import on_hosts
from fairmesh.testing.messages import NoGradients, check_message
from fairmesh.testing.problems import small_problem, wide_problem
from fairmesh.testing.stacks import End, after, mixed_up, relabelled, stack, tensors_of
from fairmesh.testing.violations import bits_of, checked_settings, require, require_close, require_equal_bits, running
from fairmesh.topology.graphs import Changing, Ring, Star, Topology
from fairmesh.training.cuda_graph import recorded_round
from fairmesh.training.loop import Training
from fairmesh.training.memory_estimate import peak_bytes
from fairmesh.training.options import Options
from fairmesh.training.replicas import random_placement, replicas_of
from fairmesh.training.train import train

_REPLICAS = 2  # over which memory is measured
_SEEDS = (0, 3)
_FADING = 150  # rounds in which a memory fades that is not kept for ever
_PERSISTS = 0.25  # of its largest effect: what is left of one that is
_SLOWLY = 1e-3  # the least share of a fading memory that is gone after half of these rounds


def check_algorithm(
    algorithm: Algorithm,
    *,
    problem: Problem | Prepared | None = None,
    topologies: Sequence[Topology] | None = None,
    rounds: int = 6,
    keeps_average: bool = True,
    may_leave: bool = True,
    tolerance: float = 1e-10,
) -> None:
    """Checks that an algorithm keeps the contract by which it runs unchanged everywhere. Takes a few seconds.

    1. It is a frozen dataclass that survives being written to TOML and read again.
    2. `init` gives the same state each time, a NamedTuple of tensors with `models` among them.
    3. `step` changes nothing but what it returns, and keeps every dtype and shape, in float32 and in float64. Tensors
       are what their roles say (`fm.roles`): on the simplex, or with rows that sum to zero.
    4. `oracle_calls()` is how many different batches a round asks for.
    5. New names for the nodes rename the result, and change nothing else.
    6. Gossip leaves the average model unchanged where there are no gradients.
    7. On several hosts, which exchange encoded messages, it reaches the same state as in memory, and the bytes that the
       simulation counts are the bytes that were sent.
    8. A run that was saved and resumed is bit-identical to an uninterrupted one.
    9. Replicas that differ in seed, placement and every number of the algorithm give the same in a batch as alone.
    10. A round can be traced as operations on tensors and replayed, as on a GPU.
    11. A round holds at most `copies_at_peak` copies of all models at once, with those of its optimizer.
    12. Parts of a model that stay at their site (`fm.Parts`) and, if the class has a field `optimizer`, the memory of
        one are carried along: on several hosts and with other names for the nodes too.
    13. A site may leave. What one node has in a field of the state stays at that node, or fades at the others, however
        slowly, or the field has a role that says what becomes of it. A tracker is the usual violation: its average is
        that of the gradients of *all* nodes, so without one of them it is biased for ever. Keep what gossip adds to a
        node's own gradient instead, with the role `fm.roles.SumsToZero` (examples/research/beer.py).

    14. `message()`, which operators of sites read, names what is sent, if it names anything.

    Args:
        algorithm: The object to check, with settings under which it does not diverge on a small problem.
        problem: What to train on; None for `small_problem()`. Default: None.
        topologies: The graphs to train over; None for a ring, and a graph that changes between a ring and a star.
            Default: None.
        rounds: How many rounds each run has. Default: 6.
        keeps_average: False for an algorithm whose average model moves even without gradients. Default: True.
        may_leave: False for an algorithm that is not meant for meshes that a site may leave. Default: True.
        tolerance: How much two float64 runs may differ if only the order of additions differs. Default: 1e-10.

    Raises:
        ContractViolation: An AssertionError that says what was violated, with numbers.

    Example:
        >>> import fairmesh as fm
        >>> fm.testing.check_algorithm(fm.algorithms.DSGD(0.1), topologies=[fm.Ring()], rounds=2)
    """
    algorithm = with_run_length(checked_settings(algorithm, Algorithm), 2 * rounds)
    problem = prepare(problem or small_problem())
    topologies = (Ring(), Changing((Ring(), Star()))) if topologies is None else topologies
    algorithm.check(problem.prior_of_sites, problem.flat_model.dim)
    with running("a run in float32"):
        _check_state(
            algorithm, problem, *stack(problem, topologies[0].build(problem.n), algorithm, dtype=torch.float32)
        )
    for topology in topologies:
        with running(f"a run over {topology}"):
            network = _check_rounds(algorithm, problem, topology, rounds, tolerance)
            if keeps_average:
                _check_average(algorithm, network, rounds)
    if may_leave and not algorithm.needs_server:
        with running("a run without gradients"):
            _check_leaving(algorithm, problem.n)
    topology = topologies[0]
    with running("a run"):
        _check_resuming(algorithm, problem, topology, rounds)
    with running("a batch of replicas", "numbers that differ between replicas are tensors (replicas, 1, 1) in `step`"):
        check_replicas(algorithm, problem, topology, rounds, tolerance)
    advice = "do not read values of tensors in `step`, by float(), int(), .item() or `if`"
    with running("a round traced as operations on tensors, as on a GPU,", advice):
        _check_replay(algorithm, problem, topology, tolerance)
    _check_memory(algorithm)
    with running("the first round without data", "let message() return None if it needs data"):
        check_message(algorithm)
    with running("a run with parts that stay at their site" + (" and AdamW" if _takes_optimizer(algorithm) else "")):
        with_memory = _with_optimizer(algorithm, AdamW(decay=0.01, no_decay=("*.bias",)))
        _check_rounds(with_memory, prepare(small_problem(local=("2.*",))), topology, 3, tolerance)


def _check_rounds(
    algorithm: Algorithm, problem: Prepared, topology: Topology, rounds: int, tolerance: float
) -> MemoryNetwork:
    """Checks some rounds in memory, with other names for the nodes, and on several hosts. Returns the network."""
    cycle, order = topology.build(problem.n), mixed_up(problem.n)
    network, oracle = stack(problem, cycle, algorithm, seeds=_SEEDS)
    _check_state(algorithm, problem, network, oracle)
    _check_purity(algorithm, network, oracle)
    ended = after(algorithm, network, oracle, rounds)
    moved = problem.changed(sites=[problem.sites[i] for i in order])
    moved_stack = stack(moved, relabelled(cycle, order), algorithm, seeds=_SEEDS, identities=order)
    _check_naming(ended, after(algorithm, *moved_stack, rounds), order, _roles(algorithm, ended), tolerance)
    with running(f"a run on several hosts over {topology}"):
        _check_hosts(ended, algorithm, problem, topology, rounds, tolerance)
    return network


# The state ------------------------------------------------------------------------------------------------------------


def _check_state(algorithm: Algorithm, problem: Prepared, network: MemoryNetwork, oracle: Oracle) -> None:
    start = algorithm.init(oracle, network)
    _check_form(start, "the state")
    fresh = bits_of(start)
    for tensor in flatten_state(start).values():
        tensor.fill_(7)  # each run has a state of its own
    again = algorithm.init(oracle, network)
    require_equal_bits(fresh, bits_of(again), "init gives different states")
    replicas, rows = len(oracle.seeds), 1 if algorithm.needs_server else problem.n
    view = StateView(again)
    wanted, found = (replicas, rows, problem.flat_model.dim), tuple(view.models(again).shape)
    require(found == wanted, f"models are {found}, but (replicas, nodes, parameters) are {wanted}")
    state = after(algorithm, network, oracle, 3, again).state
    require(type(state) is type(again), f"step turns a {type(again).__name__} into a {type(state).__name__}")
    before, now = flatten_state(again), flatten_state(state)
    require(before.keys() == now.keys(), f"step turns the fields {sorted(before)} into {sorted(now)}")
    for name, tensor in before.items():
        forms = [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in (tensor, now[name])]
        require(forms[0] == forms[1], f"step turns {name} from {forms[0]} into {forms[1]}")
        if tensor.is_floating_point():
            require(tensor.dtype == oracle.dtype, f"{name} is {forms[0][0]} in a run in {str(oracle.dtype)[6:]}")
            finite = now[name].isfinite().all()
            require(finite, f"after 3 rounds {name} has entries that are not finite; check with smaller steps")
    for name, role in _held(algorithm, roles_of(state)).items():
        _check_role(name, now[name], role, problem.n)
    for what, tensor, last in (("duals", view.duals(state), problem.n), ("own weights", view.own_weights(state), 1)):
        if tensor is not None:
            wanted, found = (replicas, rows, last), tuple(tensor.shape)
            require(found == wanted, f"{what} are {found}, but {wanted} are expected")


def _held(algorithm: Algorithm, roles: Mapping[str, Role]) -> dict[str, Role]:
    """The roles of tensors, with who holds each decided."""
    default = "all" if algorithm.needs_server else "node"
    return {name: role.within(Role(held_by=default)) for name, role in roles.items()}


def _roles(algorithm: Algorithm, end: End) -> dict[str, Role]:
    """The roles of all tensors at the end of some rounds."""
    return _held(algorithm, roles_of(end.state)) | _held(algorithm, roles_of(end.carried, "carried"))


def _tensors(state: Any, carried: Any) -> dict[str, Tensor]:
    """All tensors at the end of some rounds."""
    return flatten_state(state) | flatten_state(carried, "carried")


def _check_role(name: str, tensor: Tensor, role: Role, n: int) -> None:
    if role.over_nodes:
        require(tensor.shape[-1] == n, f"{name} is {tuple(tensor.shape)}, but has the role of a number for each node")
    if role.on_simplex:
        low, off = float(tensor.min()), float((tensor.sum(dim=-1) - 1).abs().max())
        require(low >= -1e-6 and off < 1e-5, f"{name} leaves the simplex: least {low:.3g}, sums off by {off:.3g}")
    if role.sums_to_zero and role.held_by == "node":
        off, size = float(tensor.sum(dim=1).abs().max()), 1.0 + float(tensor.abs().max())
        require(off < 1e-4 * size, f"{name} has the role of rows that sum to zero, but their sum is {off:.3g}")


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _check_form(state: Any, where: str) -> None:
    require(_is_named_tuple(state), f"{where} is a {type(state).__name__}, no NamedTuple")
    for name, value in zip(state._fields, state):
        if isinstance(value, Tensor) or value is None:
            continue
        what = f"{where}.{name} is a {type(value).__name__}; a state holds tensors, None and NamedTuples of these"
        require(_is_named_tuple(value), what)
        _check_form(value, f"{where}.{name}")


class _Counted:
    """An oracle that notes which of a round's batches were asked for."""

    def __init__(self, oracle: Any):
        self._oracle, self.calls = oracle, set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._oracle, name)
        if name not in ("losses_and_gradients", "losses", "errors", "sample_losses", "sample_gradients"):
            return found

        def counted(models: Tensor, round_index: Tensor, call: int, **own: Tensor) -> Any:
            self.calls.add(call)
            return found(models, round_index, call, **own)

        return counted


def _check_purity(algorithm: Algorithm, network: MemoryNetwork, oracle: Oracle) -> None:
    state, _, carried = after(algorithm, network, oracle, 3)
    # The oracle has the problem.
    things = {"state": state, "carried": carried, "oracle": oracle, "network": network, "algorithm": algorithm}
    before, settings = tensors_of(things), copy.deepcopy(algorithm)
    counted = _Counted(oracle)
    kept: dict[str, Any] = {"carried": carried, "optimizer": algorithm.local_optimizer()}
    first = algorithm.step(state, Round(torch.tensor(3), counted, network, **kept))  # type: ignore[arg-type]
    require_equal_bits(before, tensors_of(things), "step changes what it was given")
    require(algorithm == settings, f"step changes the algorithm from {settings} to {algorithm}")
    again = algorithm.step(state, Round(torch.tensor(3), oracle, network, **kept))
    require_equal_bits(bits_of(first), bits_of(again), "step gives different states from the same state and round")
    calls, said = sorted(counted.calls), algorithm.oracle_calls()
    require(calls == list(range(said)), f"a round asks for batches {calls}, but oracle_calls() says {said}")


# Nodes, their names and their places ----------------------------------------------------------------------------------


def _moved(tensor: Tensor, order: Sequence[int], role: Role) -> Tensor:
    """A tensor of a state with its nodes, (replicas, nodes, ...), in another order; and so its last axis, where that
    has an entry for each node."""
    tensor = tensor[:, list(order)] if role.held_by == "node" else tensor
    return tensor[..., list(order)] if role.over_nodes else tensor


def _check_naming(named: End, renamed: End, order: Sequence[int], roles: Mapping[str, Role], tolerance: float) -> None:
    """Node order[k] was called k: its data, its edges and its random streams went along."""
    (state, sent, carried), (other, moved, other_carried) = named, renamed
    there = _tensors(other, other_carried)
    for name, tensor in _tensors(state, carried).items():
        undeclared = tensor.shape[-1] == len(order) and not roles[name].over_nodes
        hint = " (annotate it with fm.roles.OVER_NODES if its last axis has an entry for each node)"
        what = f"{name} with other names for the nodes{hint if undeclared else ''}"
        require_close(there[name], _moved(tensor, order, roles[name]), tolerance, what)
    require_close(moved.node_bits, sent.node_bits[:, list(order)], 0.0, "bits sent with other names for the nodes")
    require_close(moved.server_bits, sent.server_bits, 0.0, "bits the server sent with other names for the nodes")


def _check_average(algorithm: Algorithm, network: MemoryNetwork, rounds: int) -> None:
    generator = torch.Generator().manual_seed(0)
    oracle = NoGradients(torch.randn(2, network.n, 23, generator=generator, dtype=torch.float64))
    state, carried = algorithm.init(oracle, network), None  # type: ignore[arg-type]
    models = StateView(state).models
    start = models(state).mean(dim=-2)
    for t in range(rounds):
        state, _, carried = after(algorithm, network, oracle, 1, state, t, carried)
        what = f"without gradients the average model moves in round {t} (if it should, give keeps_average=False)"
        require_close(models(state).mean(dim=-2), start, 1e-12, what)


def _check_hosts(
    ended: End, algorithm: Algorithm, problem: Prepared, topology: Topology, rounds: int, tolerance: float
) -> None:
    alone, counted, carried = ended
    order = mixed_up(problem.n)
    blocks = [order[: problem.n // 3 or 1], order[problem.n // 3 or 1 :]]
    run = on_hosts(problem, topology, algorithm, rounds, blocks, seeds=_SEEDS)
    roles = _roles(algorithm, ended)
    for state, kept, block in zip(run.states, run.carried, blocks):
        there = _tensors(state, kept)
        for name, tensor in _tensors(alone, carried).items():
            if roles[name].held_by == "process" or (roles[name].per_neighbour and there[name].ndim != tensor.ndim):
                continue  # a mean over its nodes; copies of each neighbour, of which one process keeps one for all
            here = tensor[:, block] if roles[name].held_by == "node" else tensor
            require_close(there[name], here, tolerance, f"{name} of nodes {block} on several hosts")
    for name, there, here in zip(counted._fields, run.sent, counted):
        totals = f"{float(there.sum()):.0f} in all where the simulation counts {float(here.sum()):.0f}"
        require_close(there, here, 0.0, f"{name} on several hosts, {totals}")


# What a run carries along, and sites that leave -----------------------------------------------------------------------


def _takes_optimizer(algorithm: Algorithm) -> bool:
    return "optimizer" in {field.name for field in dataclasses.fields(algorithm)}  # type: ignore[arg-type]


def _with_optimizer(algorithm: Algorithm, optimizer: Optimizer | None) -> Algorithm:
    """The same algorithm with another optimizer, if it takes one."""
    return dataclasses.replace(algorithm, optimizer=optimizer) if _takes_optimizer(algorithm) else algorithm  # type: ignore[type-var]


def _check_leaving(algorithm: Algorithm, n: int) -> None:
    """Changes what one node has in a field, without gradients, and looks whether that ever fades."""
    algorithm = with_run_length(_with_optimizer(algorithm, None), 100 * _FADING)
    network = MemoryNetwork(Ring().build(n), dtype=torch.float64, count_bytes=False)
    generator = torch.Generator().manual_seed(0)
    oracle = NoGradients(torch.randn(1, 1, 23, generator=generator, dtype=torch.float64).expand(1, n, 23))
    start, _, carried = after(algorithm, network, oracle, 3)
    roles, tensors, models = _held(algorithm, roles_of(start)), flatten_state(start), StateView(start).models

    def run(state: Any, pinned: Sequence[Tensor] | None = None) -> list[Any]:
        """The states after each round; with the models of another run, if these are given."""
        states, kept = [], carried
        for t in range(3, 3 + _FADING):
            state, _, kept = after(algorithm, network, oracle, 1, state, t, kept)
            if pinned is not None:
                same = {path: pinned[t - 3] for path, tensor in flatten_state(state).items() if tensor is models(state)}
                state = unflatten_state(state, flatten_state(state) | same)
            states.append(state)
        return states

    undisturbed = run(start)
    for path, role in roles.items():
        of_copies = path.endswith(".own") and path.removesuffix("own") + "of_neighbours" in roles
        declared = role != Role(held_by="node") or tensors[path] is models(start)
        if declared or of_copies or not (tensors[path].is_floating_point() and tensors[path].numel()):
            continue
        changed = tensors[path].clone()
        changed[:, 0] += torch.randn(changed[:, 0].shape, generator=generator, dtype=torch.float64)
        begin = unflatten_state(start, tensors | {path: changed})
        drift = _steps([models(s) - models(u) for s, u in zip(run(begin), undisturbed)])
        pinned = run(begin, [models(u) for u in undisturbed])
        at_others = _lasting(roles, pinned, undisturbed, models)
        stays = at_others.get(path, 0.0) > _PERSISTS
        here = flatten_state(pinned[-1])[path][:, 0] - flatten_state(undisturbed[-1])[path][:, 0]
        is_private = not at_others and float(here.abs().max()) > 1e-3  # it leaves with its node
        moves = not is_private and drift[-1] > max(1e-6, _PERSISTS * max(drift))
        require(
            not (stays or moves),
            f"what one node has in {path} reaches the others and does not fade, so after a site has left the others "
            "would be biased for ever; keep what sums to zero over the nodes, as fm.roles.SumsToZero, and add a node's "
            "own share to it in each round (as research/beer.py of the documentation's examples does), or declare "
            "another role of fm.roles; may_leave=False if sites never leave",
        )


def _lasting(
    roles: Mapping[str, Role], changed: Sequence[Any], undisturbed: Sequence[Any], models: Any
) -> dict[str, float]:
    """The fields in which other nodes than the first have come to differ, and whose sum over the nodes does not fade,
    with that sum. A memory that fades slowly is not among them."""

    def difference(k: int, path: str) -> Tensor:
        return flatten_state(changed[k])[path] - flatten_state(undisturbed[k])[path]

    lasting = {}
    for path, tensor in flatten_state(changed[-1]).items():
        of_nodes = roles[path].held_by == "node" and tensor.is_floating_point() and tensor.numel()
        if of_nodes and tensor is not models(changed[-1]):
            end, half = difference(-1, path), difference(len(changed) // 2, path)
            left, before = (float(change.sum(dim=1).abs().max()) for change in (end, half))
            if float(end[:, 1:].abs().max()) > 1e-3 and left >= (1 - _SLOWLY) * before > 1e-6:
                lasting[path] = left
    return lasting


def _steps(changes: Sequence[Tensor]) -> list[float]:
    """How far the sum over the nodes moves in each round."""
    sums = [change.sum(dim=1) for change in changes]
    return [float((b - a).abs().max()) for a, b in itertools.pairwise(sums)]


# Runs -----------------------------------------------------------------------------------------------------------------


def _check_resuming(algorithm: Algorithm, problem: Prepared, topology: Topology, rounds: int) -> None:
    options: dict[str, Any] = {"seeds": (0, 1), "measure_every": rounds, "checkpoint_every": rounds, "trace": "no"}
    with tempfile.TemporaryDirectory() as folder:
        whole = train(problem, topology, algorithm, 2 * rounds, out=Path(folder) / "whole", **options)
        train(problem, topology, algorithm, rounds, out=Path(folder) / "half", **options)
        resumed = train(problem, topology, algorithm, 2 * rounds, out=Path(folder) / "half", resume=True, **options)
    require_equal_bits(bits_of(resumed.state), bits_of(whole.state), "a resumed run and an uninterrupted one")
    require(resumed.records == whole.records, "the records of a resumed run are not those of an uninterrupted one")


def varied(thing: Any) -> Any:
    """Returns the same settings with every number a tenth smaller that may differ between replicas of one run."""
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if not field.init or field.metadata.get("structural") or isinstance(value, Compressor | type):
            continue
        if isinstance(value, float) and math.isfinite(value):
            new: Any = 0.9 * value
        elif dataclasses.is_dataclass(value):
            new = varied(value)
        else:
            continue
        try:
            thing = dataclasses.replace(thing, **{field.name: new}) if new != value else thing
        except ValueError:  # a setting that cannot be a tenth smaller
            continue
    return thing


def check_replicas(
    algorithm: Algorithm, problem: Problem | Prepared, topology: Topology, rounds: int, tolerance: float
) -> None:
    """Checks that replicas that differ in seed, placement and numbers give together what each gives alone."""
    other = varied(algorithm)
    algorithms = [algorithm, other] if other != algorithm else [algorithm]
    placements = [tuple(range(problem.n)), random_placement(1, problem.n)]
    options: dict[str, Any] = {"dtype": "float64", "measure_every": rounds, "trace": "no"}
    batch = train(problem, topology, algorithms, rounds, seeds=(3, 8), placements=placements, **options)
    together = bits_of(batch.state)
    for r in sorted({len(batch.replicas) // 2 - 1, len(batch.replicas) - 1}):
        replica = batch.replicas[r]
        one = {"seeds": [replica.seed], "placements": [replica.placement]}
        alone = train(problem, topology, replica.algorithm, rounds, **one, **options)
        for name, tensor in flatten_state(alone.state).items():
            what = f"{name} of replica {r} ({replica.algorithm}) in a batch and alone"
            require_close(together[name][r], tensor[0], tolerance, what)


def _training(problem: Prepared, topology: Topology, algorithm: Algorithm, **options: Any) -> Training:
    replicas = replicas_of([algorithm], range(_REPLICAS), None, problem.n)
    return Training(problem, topology, replicas, Options(trace="no", **options))


def _check_replay(algorithm: Algorithm, problem: Prepared, topology: Topology, tolerance: float) -> None:
    training = _training(problem, topology, algorithm, dtype="float64", count_bytes=False)
    state = training.advance(training.initial(), 0)
    apart = unflatten_state(state, bits_of(state))  # a replay changes its tensors, which the other run may hold on to
    replay, buffers = recorded_round(training.after_round, apart, 0, torch.device("cpu"))
    buffers[-1].fill_(1)
    for t in range(1, 5):
        state = training.advance(state, t)
        replay(*buffers)
    for (name, tensor), buffer in zip(flatten_state(state).items(), buffers):
        require_close(buffer, tensor, tolerance, f"{name} as replayed from a trace of round 0 and as computed")


def _check_memory(algorithm: Algorithm) -> None:
    problem = prepare(wide_problem())
    training = _training(problem, Ring(), algorithm)
    state = training.advance(training.initial(), 0)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in flatten_state(state).values()}
    peak, _ = peak_bytes(lambda: training.advance(state, 1))
    copies = (sum(held.values()) + peak) / (_REPLICAS * problem.n * problem.flat_model.dim * 4)
    optimizer = algorithm.local_optimizer()
    allowed = algorithm.copies_at_peak + (0 if optimizer is None else optimizer.copies_at_peak)
    require(
        copies <= allowed,
        f"a round holds {copies:.1f} copies of all models at its peak, but copies_at_peak is "
        f"{allowed}; write `copies_at_peak: ClassVar[int] = {math.ceil(copies)}` in the class, since "
        "the memory of a run is planned by it",
    )
