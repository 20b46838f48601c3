"""What every registered algorithm promises, whatever it computes."""

import copy
import dataclasses

import pytest
import torch

import fairmesh as fm
from fairmesh.algorithms.base import Round
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.storage.state_tree import flatten_state
from tests import toys
from tests.contracts.battery import after, relabelled, same_bits, stack, state_bits, tensors_of, with_steps
from tests.equivalence.stack import NoData

MIXED_UP = [3, 0, 7, 5, 1, 6, 2, 4]
GRAPHS = {"ring": fm.Ring(), "changing": toys.TOPOLOGIES["changing"]}

every_algorithm = pytest.mark.parametrize("algorithm", toys.ALGORITHMS.values(), ids=toys.ALGORITHMS)
over_both_graphs = pytest.mark.parametrize("topology", GRAPHS.values(), ids=GRAPHS)


@pytest.fixture(scope="module")
def problem() -> fm.Problem:
    return toys.problem()


def test_no_registered_algorithm_is_left_out():
    assert toys.covers(fm.algorithms.Algorithm, toys.ALGORITHMS)


@every_algorithm
@over_both_graphs
def test_a_step_changes_nothing_but_what_it_returns(problem, algorithm, topology):
    network, oracle = stack(problem, topology.build(8), algorithm)
    state, _, _ = after(algorithm, network, oracle, 3)
    round = Round(torch.tensor(3), oracle, network)
    things = {"state": state, "problem": problem, "oracle": oracle, "network": network, "algorithm": algorithm}
    before, configured = tensors_of(things), copy.deepcopy(algorithm)
    assert {"state", "problem", "oracle", "network"} <= {name.split(".")[1] for name in before}
    assert any("sites" in name and "inputs" in name for name in before)
    first = algorithm.step(state, round)
    assert same_bits(before, tensors_of(things))
    assert algorithm == configured
    assert not same_bits(state_bits(first), state_bits(state))
    again = algorithm.step(state, Round(torch.tensor(3), oracle, network))
    assert same_bits(state_bits(first), state_bits(again))


@every_algorithm
def test_init_gives_the_same_fresh_state_each_time(problem, algorithm):
    network, oracle = stack(problem, fm.Ring().build(8), algorithm)
    state = algorithm.init(oracle, network)
    fresh = state_bits(state)
    for tensor in flatten_state(state).values():
        tensor.fill_(7.0)  # a state of one's own: no other run feels it
    assert same_bits(fresh, state_bits(algorithm.init(oracle, network)))


@every_algorithm
@over_both_graphs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_keeps_every_dtype_and_shape(problem, algorithm, topology, dtype):
    network, oracle = stack(problem, topology.build(8), algorithm, seeds=(0, 1), dtype=dtype)
    start = algorithm.init(oracle, network)
    state, nodes, server = after(algorithm, network, oracle, 3)
    assert type(state) is type(start)
    for name, tensor in flatten_state(start).items():
        assert tensor.dtype == dtype
        assert flatten_state(state)[name].dtype == dtype
        assert flatten_state(state)[name].shape == tensor.shape
        assert flatten_state(state)[name].isfinite().all()
    rows = 1 if algorithm.needs_server else 8
    assert state.models.shape == (2, rows, problem.flat_model.dim)
    if getattr(state, "duals", None) is not None:
        assert state.duals.shape == (2, rows, 8)
        assert (state.duals >= 0).all()
        assert torch.allclose(state.duals.sum(dim=-1), torch.ones(2, rows, dtype=dtype), atol=1e-6)
    assert (nodes.shape, server.shape) == ((2, 8), (2,))


@every_algorithm
@over_both_graphs
def test_the_order_of_the_stack_orders_the_result_and_does_no_more(problem, algorithm, topology):
    straight, bits, server_bits = after(algorithm, *stack(problem, topology.build(8), algorithm), 6)
    shuffled, moved_bits, moved_server = after(
        algorithm, *stack(problem, topology.build(8), algorithm, order=MIXED_UP), 6
    )
    for name, tensor in flatten_state(straight).items():
        rows = tensor if algorithm.needs_server else tensor[:, MIXED_UP]
        assert float((flatten_state(shuffled)[name] - rows).abs().max()) < 1e-12, name
    assert torch.equal(moved_bits, bits[:, MIXED_UP])
    assert torch.equal(moved_server, server_bits)
    if not algorithm.needs_server:
        assert not torch.allclose(shuffled.models, straight.models)


def _check_relabelling(
    problem: fm.Problem, algorithm: fm.algorithms.Algorithm, topology: fm.topologies.Topology, rounds: int
) -> None:
    """Node MIXED_UP[k] is called k: its data, its edges and its random streams go along."""
    moved = dataclasses.replace(problem, sites=[problem.sites[i] for i in MIXED_UP])
    cycle = topology.build(8)
    named, bits, server_bits = after(algorithm, *stack(problem, cycle, algorithm), rounds)
    renamed, moved_bits, moved_server = after(
        algorithm, *stack(moved, relabelled(cycle, MIXED_UP), algorithm, identities=MIXED_UP), rounds
    )
    for name, tensor in flatten_state(named).items():
        rows = tensor if algorithm.needs_server else tensor[:, MIXED_UP]
        rows = rows[..., MIXED_UP] if "dual" in name else rows  # (..., nodes, n)
        assert float((flatten_state(renamed)[name] - rows).abs().max()) < 1e-12, name
    assert torch.equal(moved_bits, bits[:, MIXED_UP])
    assert torch.equal(moved_server, server_bits)


@every_algorithm
@over_both_graphs
def test_new_names_for_the_nodes_rename_the_result(problem, algorithm, topology):
    _check_relabelling(problem, algorithm, topology, 6)


@pytest.mark.parametrize("topology", toys.TOPOLOGIES.values(), ids=toys.TOPOLOGIES)
def test_new_names_for_the_nodes_rename_the_result_over_every_topology(problem, topology):
    _check_relabelling(problem, toys.ALGORITHMS["ad-gda"], topology, 4)


@pytest.mark.parametrize("compressor", toys.COMPRESSORS.values(), ids=toys.COMPRESSORS)
@pytest.mark.parametrize("regularizer", [fm.regularizers.OwnCoordinate(0.5)])
def test_new_names_for_the_nodes_rename_the_result_for_every_compressor(problem, compressor, regularizer):
    algorithm = fm.ADGDA(2.0, dual_step=0.1, consensus_step=0.3, compressor=compressor, regularizer=regularizer)
    _check_relabelling(problem, algorithm, fm.topologies.Star(), 4)


def test_other_identities_alone_are_another_run(problem):
    """So that the relabelling above moves something."""
    algorithm = toys.ALGORITHMS["ad-gda"]
    one, _, _ = after(algorithm, *stack(problem, fm.Ring().build(8), algorithm), 3)
    other, _, _ = after(algorithm, *stack(problem, fm.Ring().build(8), algorithm, identities=MIXED_UP), 3)
    assert not torch.allclose(one.models, other.models)


# Gossip --------------------------------------------------------------------------------------------------------------


def _unequal(seed: int = 0, nodes: int = 8, dim: int = 23) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, nodes, dim, generator=generator, dtype=torch.float64)


def _check_average_kept(algorithm: fm.algorithms.Algorithm, topology: fm.topologies.Topology, rounds: int = 6) -> None:
    network = MemoryNetwork(topology.build(8), dtype=torch.float64)
    oracle = NoData(_unequal())
    state = algorithm.init(oracle, network)
    average, first = state.models.mean(dim=-2), state.models
    for t in range(rounds):
        state, _, _ = after(algorithm, network, oracle, 1, state, t)
        assert float((state.models.mean(dim=-2) - average).abs().max()) < 1e-13
    if not algorithm.needs_server:
        assert float((state.models - first).abs().max()) > 1e-2, "there was no gossip"


@every_algorithm
@over_both_graphs
def test_without_a_primal_step_the_average_model_stays(algorithm, topology):
    _check_average_kept(with_steps(algorithm, primal_step=0.0, warm_start=False), topology)  # they begin unequal


@pytest.mark.parametrize("topology", toys.TOPOLOGIES.values(), ids=toys.TOPOLOGIES)
@pytest.mark.parametrize("compressor", toys.COMPRESSORS.values(), ids=toys.COMPRESSORS)
def test_gossip_leaves_the_average_model_for_every_compressor_and_topology(compressor, topology):
    _check_average_kept(fm.ChocoSGD(primal_step=0.0, consensus_step=0.4, compressor=compressor), topology, rounds=4)


@pytest.mark.parametrize("topology", toys.TOPOLOGIES.values(), ids=toys.TOPOLOGIES)
def test_mixing_leaves_the_average_dual_over_every_topology(topology):
    network = MemoryNetwork(topology.build(8), dtype=torch.float64)
    oracle, algorithm = NoData(_unequal()), fm.ADGDA(0.0, dual_step=0.0)
    duals = fm.regularizers.project_onto_simplex(_unequal(seed=1, dim=8))
    start = algorithm.init(oracle, network)._replace(duals=duals)
    state, _, _ = after(algorithm, network, oracle, 4, start)
    assert float((state.duals.mean(dim=-2) - duals.mean(dim=-2)).abs().max()) < 1e-14
    assert float((state.duals - duals).abs().max()) > 1e-2


# Repetition ----------------------------------------------------------------------------------------------------------


@every_algorithm
def test_the_same_seed_gives_the_same_bits(algorithm):
    runs = [fm.train(toys.problem(), fm.Ring(), algorithm, 8, seeds=[5], measure_every=4) for _ in range(2)]
    assert same_bits(state_bits(runs[0].state), state_bits(runs[1].state))
    assert runs[0].records == runs[1].records
    other = fm.train(toys.problem(), fm.Ring(), algorithm, 8, seeds=[6], measure_every=4)
    assert not same_bits(state_bits(runs[0].state), state_bits(other.state))


@pytest.fixture(scope="module")
def wide() -> fm.Problem:
    """Rows long enough for torch to split its loops between threads."""

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 100), torch.nn.Tanh(), torch.nn.Linear(100, 100), torch.nn.Tanh())

    return toys.problem(model=model)


@every_algorithm
def test_one_thread_and_two_agree_to_rounding(wide, algorithm):
    assert 8 * wide.flat_model.dim > 2 * 32768  # twice the grain below which torch keeps to one thread
    states = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.get_num_threads() == threads
            states.append(fm.train(wide, fm.Ring(), algorithm, 2, dtype="float64", measure_every=2).state)
    finally:
        torch.set_num_threads(1)
    one, two = (state_bits(state) for state in states)
    for name, tensor in one.items():
        assert float((two[name] - tensor).abs().max()) < 1e-12, name
