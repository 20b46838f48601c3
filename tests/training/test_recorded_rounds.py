"""A round recorded as operations on tensors, as a GPU replays it, is the round as written."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.numerics.round_cache import RoundCache
from fairmesh.numerics.tracing import Traced
from fairmesh.problems import convolutions
from fairmesh.storage.state_tree import flatten_state
from fairmesh.training import cuda_graph
from fairmesh.training.cuda_graph import recorded_round
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.pairwise import some_quick

pytestmark = pytest.mark.recorded

CPU = torch.device("cpu")


def _training(
    algorithm: fm.algorithms.Algorithm, topology: fm.topologies.Topology, problem: fm.Problem | None = None
) -> Training:
    problem = problem or toys.problem()
    replicas = replicas_of([algorithm], [3, 4], None, problem.n)
    return Training(problem, topology, replicas, Options(dtype="float64"))


def _apart(training: Training, recorded_at: int, start: int, rounds: int) -> float:
    """How far replays of a recording made at one round are from the rounds as written, from another round on."""
    state = training.initial()
    for t in range(start):
        state = training.advance(state, t)
    replay, buffers = recorded_round(training.after_round, state, recorded_at, CPU)
    buffers[-1].fill_(start)
    for t in range(start, start + rounds):
        state = training.advance(state, t)
        replay(*buffers)
    assert int(buffers[-1]) == start + rounds
    found = flatten_state(state)
    assert len(found) == len(buffers) - 1
    for name in ("state.sent.node_bytes", "state.sent.node_bits", "state.sent.server_bytes"):
        assert torch.equal(found[name], buffers[list(found).index(name)])
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(found.values(), buffers))


@some_quick("name", toys.ALGORITHMS.keys(), "tracked")
def test_algorithms_are_replayed_as_written(name):
    assert _apart(_training(toys.ALGORITHMS[name], fm.Ring()), recorded_at=0, start=2, rounds=6) < 1e-12


@some_quick("name", toys.COMPRESSORS.keys(), "top-k-quantize")
def test_compressors_are_replayed_as_written_with_the_same_byte_counts(name):
    algorithm = fm.ADGDA(0.5, 0.05, consensus_step=0.2, compressor=toys.COMPRESSORS[name])
    assert _apart(_training(algorithm, fm.topologies.Star()), recorded_at=0, start=1, rounds=5) < 1e-12


@some_quick(
    "sampling",
    {
        "random": fm.Sampling(),
        "cyclic": fm.Sampling(order="cyclic", batch=3),
        "full": fm.Sampling(order="full"),
        "two batches": fm.Sampling(2, batches_per_step=2),
    },
    "cyclic",
)
@pytest.mark.slow
def test_schedules_of_steps_and_of_graphs_follow_the_tensor_that_holds_the_rounds_number(sampling):
    algorithm = fm.ADGDA(
        fm.schedules.Staircase(0.5, 0.5, 3),
        fm.schedules.Geometric(0.05, 0.9),
        consensus_step=0.2,
        compressor=fm.compressors.Quantize(4),
    )
    changing = fm.topologies.Changing((fm.Ring(), fm.topologies.Star(), fm.topologies.Complete()))
    problem = toys.problem(sampling=sampling)
    assert _apart(_training(algorithm, changing, problem), recorded_at=1, start=4, rounds=5) < 1e-12


def test_recording_with_dropout_and_augmentation_draws_anew_in_every_round():
    generator = torch.Generator().manual_seed(0)
    sites = [fm.Site((torch.randn(9, 6, generator=generator), torch.arange(9) % 3)) for _ in range(4)]
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
    problem = fm.Problem(
        model, sites, augment=lambda batch, draw: batch + draw(*batch.shape), sampling=fm.Sampling(5)
    ).prepared
    training = _training(
        fm.ADGDA(0.5, 0.05, consensus_step=0.3, compressor=fm.compressors.TopK(0.3)), fm.Ring(), problem
    )
    assert _apart(training, recorded_at=0, start=0, rounds=5) < 1e-12


def test_recorded_function_gives_the_same_and_is_recorded_anew_for_other_shapes():
    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = torch.bmm(a, b.mT)
        return (product.relu() + torch.bmm(a, b.mT) * 1, (product + product).sum(dim=-1))

    recorded = Traced(function)
    for nodes, rows, columns, inner in ((3, 7, 2, 40), (3, 2, 7, 40), (5, 9, 9, 4), (3, 7, 2, 40)):
        a, b = torch.randn(nodes, rows, inner).double(), torch.randn(nodes, columns, inner).double()
        for got, wanted in zip(recorded(a, b), function(a, b)):
            torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)
            assert got.stride() == wanted.stride()
    assert len(recorded._replays) == 3


def test_recording_that_changes_something_in_place_starts_afresh_every_time():
    def function(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = torch.zeros_like(a), torch.zeros_like(a)
        return (first.add_(a), second.sub_(a), torch.ones_like(a).mean() + a)

    recorded, a = Traced(function), torch.randn(3, 4)
    for _ in range(3):
        for got, wanted in zip(recorded(a), function(a)):
            assert torch.equal(got, wanted)


def test_block_of_rounds_is_worked_out_as_each_round_alone():
    calls = []

    def function(rounds: torch.Tensor) -> torch.Tensor:
        calls.append(len(rounds))
        return rounds[:, None] * torch.arange(3)

    ahead = RoundCache()
    for t in [*range(600), 17, 18, 4000]:
        assert ahead.at("it", function, torch.tensor(t)).tolist() == [0, t, 2 * t]
    assert len(calls) == 6  # one alone for its size, three blocks, and again wherever time jumps
    for _ in range(2):
        assert ahead.at("large", lambda r: torch.zeros(len(r), 1 << 20), torch.tensor(0)).shape == (1 << 20,)


@pytest.mark.parametrize("models", [2, 500])
@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 5, 3), nn.Conv2d(1, 4, (2, 3), padding=(1, 2)), nn.Conv2d(2, 3, 1, bias=False)]
)
def test_convolution_of_many_models_is_the_same_however_it_is_done(models, layer):
    layer = layer.double()
    images = torch.randn(4, 6, layer.in_channels, 9, 8, dtype=torch.float64)
    weights = torch.randn(4, *layer.weight.shape, dtype=torch.float64)

    def loss(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (inputs,)).square().mean()

    other = convolutions.of_many(loss, models)
    for got, wanted in zip(*(torch.func.vmap(torch.func.grad_and_value(f))(weights, images) for f in (other, loss))):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_convolutions_are_rewritten_only_if_plain_with_few_channels(monkeypatch):
    done = []
    monkeypatch.setattr(convolutions, "by_product", lambda *a: done.append(a) or nn.functional.conv2d(*a))
    for layer in (
        nn.Conv2d(8, 2, 3),
        nn.Conv2d(2, 2, 3, stride=2),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, groups=2),
    ):
        convolutions.of_many(lambda x, layer=layer: layer(x), 500)(torch.randn(1, layer.in_channels, 9, 9))
        assert not done
    convolutions.of_many(nn.Conv2d(2, 2, 3), 500)(torch.randn(1, 2, 9, 9))
    assert len(done) == 1


def test_rounds_that_cannot_be_fused_are_captured_or_run_as_written(monkeypatch):
    tried = []

    def failing(step, state, done, device, fuse):
        tried.append(fuse)
        raise RuntimeError(f"no {'compiler' if fuse else 'capture'} today\nand more")

    monkeypatch.setattr(cuda_graph, "CapturedRounds", failing)
    with pytest.warns(RuntimeWarning) as told:
        assert cuda_graph.captured_rounds(lambda *_: None, None, 0, CPU, fuse=True) is None
    assert tried == [True, False]
    first, second = (str(warning.message) for warning in told)
    assert first.endswith("RuntimeError: no compiler today")
    assert second.endswith("RuntimeError: no capture today")

    def refusing(*_):
        raise fm.BadInput("the user's mistake")

    monkeypatch.setattr(cuda_graph, "CapturedRounds", refusing)
    with pytest.raises(fm.BadInput, match="the user's mistake"):
        cuda_graph.captured_rounds(lambda *_: None, None, 0, CPU, fuse=False)


class _State(NamedTuple):
    models: torch.Tensor
    previous: torch.Tensor


def test_state_that_hands_on_an_old_tensor_is_replayed_rightly():
    def step(state: _State, now: torch.Tensor) -> _State:
        return _State(state.models + 1, state.models)

    replay, (models, previous, now) = recorded_round(step, _State(torch.zeros(2), torch.zeros(2)), 0, CPU)
    for t in range(3):
        replay(models, previous, now)
        assert models.tolist() == [t + 1.0] * 2
        assert previous.tolist() == [float(t)] * 2


class _Counting(nn.Module):
    """Keeps a number in Python between its calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(inputs) * (1.0 + self.calls)


class _Branching(nn.Module):
    """Decides by the value of a buffer, which vmap allows."""

    switch: torch.Tensor

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("switch", torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) if self.switch > 0 else self.layer(-inputs)


@pytest.mark.parametrize(("module", "reason"), [(_Counting, "twice"), (_Branching, "RuntimeError")])
def test_model_that_cannot_be_recorded_runs_as_it_is_with_a_warning(module, reason):
    generator = torch.Generator().manual_seed(0)
    sites = [fm.Site((torch.randn(9, 6, generator=generator), torch.arange(9) % 3)) for _ in range(4)]
    problem = fm.Problem(module(), sites, sampling=fm.Sampling(5))
    with pytest.warns(RuntimeWarning, match=reason) as told:
        fm.train(problem, fm.Ring(), fm.ADGDA(0.5, 0.05), 4)
    assert len(told) == 1


@pytest.mark.filterwarnings("error")
def test_product_of_a_turned_product_is_recorded():
    function = Traced(lambda first, second, third: (first.bmm(second).bmm(third),))
    tall, narrow, third = torch.randn(3, 4, 9), torch.randn(3, 9, 2), torch.randn(3, 2, 3)
    assert torch.allclose(function(tall, narrow, third)[0], tall @ narrow @ third, atol=1e-5)


def test_constants_keep_the_strides_of_what_they_are_like():
    def function(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.zeros_like(a.mT).mT.reshape(-1) + a.reshape(-1),)

    a = torch.randn(3, 4)
    recorded = Traced(function)
    assert torch.equal(recorded(a)[0], function(a)[0])
    assert recorded._replays[next(iter(recorded._replays))] is not None


@pytest.mark.parametrize(("classes", "written_out"), [(2, True), (10, True), (40, False)])
def test_log_softmax_of_few_classes_is_written_out_and_gives_the_same(classes, written_out):
    def function(rows: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def loss(row: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(x @ row.reshape(4, classes), y)

        return torch.func.vmap(torch.func.grad_and_value(loss))(rows, inputs, labels)

    generator = torch.Generator().manual_seed(0)
    rows, inputs = (30 * torch.randn(3, *shape, generator=generator).double() for shape in ((4 * classes,), (7, 4)))
    labels = torch.randint(classes, (3, 7), generator=generator)
    traced = Traced(function)
    for found, wanted in zip(traced(rows, inputs, labels), function(rows, inputs, labels), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    (replay,) = traced._replays.values()
    assert ("_log_softmax" in str(replay.graph)) != written_out


@pytest.mark.parametrize("schedule", [fm.schedules.Geometric(0.5, 0.998), fm.schedules.Staircase(0.5, 0.9, 3)], ids=str)
def test_step_size_is_the_same_bits_wherever_a_run_is_taken_up(schedule):
    def steps(rounds: torch.Tensor) -> torch.Tensor:
        return schedule.at(rounds[:, None, None, None])

    through = RoundCache()
    for t in range(300):
        wanted = through.at("step", steps, torch.tensor(t))
        assert torch.equal(RoundCache().at("step", steps, torch.tensor(t)), wanted)
