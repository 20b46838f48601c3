"""What every registered algorithm promises, whatever it computes."""

import pytest
import torch

import fairmesh as fm
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.testing.messages import NoGradients
from fairmesh.testing.stacks import stack
from tests import toys
from tests.contracts.battery import after, same_bits, state_bits
from tests.pairwise import covering, some_quick

MIXED_UP = [3, 0, 7, 5, 1, 6, 2, 4]
GRAPHS = {"ring": fm.Ring(), "changing": toys.TOPOLOGIES["changing"]}

every_algorithm = pytest.mark.parametrize("algorithm", toys.ALGORITHMS.values(), ids=toys.ALGORITHMS)
over_both_graphs = pytest.mark.parametrize("topology", GRAPHS.values(), ids=GRAPHS)


@pytest.fixture(scope="module")
def problem() -> fm.Problem:
    return toys.problem()


@pytest.fixture(scope="module")
def made_again() -> fm.Problem:
    return toys.problem()


def test_local_steps_look_at_a_batch_of_their_own_each(problem, monkeypatch):
    kinds = {type(one) for one in toys.ALGORITHMS.values() if hasattr(one, "local_steps")}
    assert {fm.ADGDA, fm.ChocoSGD, fm.TrackedADGDA, fm.algorithms.DRFA, fm.algorithms.FedAvg} <= kinds
    for kind in kinds:
        algorithm = kind(local_steps=3)
        network, oracle = stack(problem, fm.Ring().build(8), algorithm)
        calls, evaluated = [], oracle.losses_and_gradients

        def note(models, index, call, calls=calls, evaluated=evaluated, **own):
            calls.append(call)
            return evaluated(models, index, call, **own)

        monkeypatch.setattr(oracle, "losses_and_gradients", note)
        after(algorithm, network, oracle, 1)
        probed = [0] if kind is fm.TrackedADGDA else []  # the first batch again, to see how far the gradient drifted
        assert calls == [0, 1, 2, *probed], kind


# Gossip --------------------------------------------------------------------------------------------------------------


def _unequal(seed: int = 0, nodes: int = 8, dim: int = 23) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, nodes, dim, generator=generator, dtype=torch.float64)


def _check_average_kept(algorithm: fm.algorithms.Algorithm, topology: fm.topologies.Topology, rounds: int = 6) -> None:
    network = MemoryNetwork(topology.build(8), dtype=torch.float64)
    oracle = NoGradients(_unequal())
    state = algorithm.init(oracle, network)
    average, first = state.models.mean(dim=-2), state.models
    for t in range(rounds):
        state, _, _ = after(algorithm, network, oracle, 1, state, t)
        assert float((state.models.mean(dim=-2) - average).abs().max()) < 1e-13
    if not algorithm.needs_server and algorithm.sends:
        assert float((state.models - first).abs().max()) > 1e-2, "there was no gossip"


@covering(strength=1, compressor=toys.COMPRESSORS, topology=toys.TOPOLOGIES)
def test_gossip_keeps_the_average_model_for_every_compressor_and_topology(compressor, topology):
    _check_average_kept(fm.ChocoSGD(primal_step=0.0, consensus_step=0.4, compressor=compressor), topology, rounds=4)


@pytest.mark.parametrize("topology", toys.TOPOLOGIES.values(), ids=toys.TOPOLOGIES)
def test_ad_gda_keeps_the_average_dual_over_every_topology(topology):
    network = MemoryNetwork(topology.build(8), dtype=torch.float64)
    oracle, algorithm = NoGradients(_unequal()), fm.ADGDA(0.0, dual_step=0.0)
    duals = fm.regularizers.project_onto_simplex(_unequal(seed=1, dim=8))
    start = algorithm.init(oracle, network)._replace(duals=duals)
    state, _, _ = after(algorithm, network, oracle, 4, start)
    assert float((state.duals.mean(dim=-2) - duals.mean(dim=-2)).abs().max()) < 1e-14
    assert float((state.duals - duals).abs().max()) > 1e-2


# Repetition ----------------------------------------------------------------------------------------------------------


@every_algorithm
@pytest.mark.quick_cases(6)
def test_algorithm_gives_the_same_bits_for_the_same_seed(problem, made_again, algorithm):
    runs = [fm.train(made, fm.Ring(), algorithm, 8, seeds=[5], measure_every=4) for made in (problem, made_again)]
    assert same_bits(state_bits(runs[0].state), state_bits(runs[1].state))
    assert runs[0].records == runs[1].records
    other = fm.train(problem, fm.Ring(), algorithm, 8, seeds=[6], measure_every=4)
    assert not same_bits(state_bits(runs[0].state), state_bits(other.state))


@pytest.fixture(scope="module")
def wide() -> fm.Problem:
    """Rows long enough for torch to split its loops between threads."""

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 100), torch.nn.Tanh(), torch.nn.Linear(100, 100), torch.nn.Tanh())

    return toys.problem(model=model)


@some_quick("algorithm", toys.ALGORITHMS, "ad-gda", "dr-dsgd", "tracked", "drfa")
@pytest.mark.quick_cases(1)
def test_algorithm_on_two_threads_agrees_with_one_to_rounding(wide, algorithm):
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
