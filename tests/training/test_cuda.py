"""The same run on a GPU. Needs one: `python -m pytest tests/training/test_cuda.py` on such a machine."""

from functools import partial
from typing import NamedTuple

import pytest
import torch

import fairmesh as fm
from fairmesh import compression
from fairmesh.compression import entropy, formats
from fairmesh.numerics import random_streams
from fairmesh.storage.state_tree import flatten_state
from fairmesh.training.cuda_graph import CapturedRounds
from fairmesh.training.defaults import default_objective
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.problems.test_parts import problem as parts_problem
from tests.trainers import test_local_trainer as local_trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_gpu_draws_the_same_integers_as_a_cpu():
    drawn = []
    for device in ("cpu", "cuda"):
        seeds, identities = torch.tensor([0, 1, 2**40], device=device), torch.arange(100, device=device)
        key = random_streams.keys(seeds, "anything", torch.tensor(12345, device=device), identities)
        below = torch.arange(1, 101, device=device)[:, None] * 1000
        drawn.append([key, random_streams.bits(key, 500), random_streams.integers(key, 500, below)])
        drawn[-1].append(random_streams.uniform(key, 500, torch.float32))
    for here, there in zip(*drawn):
        assert torch.equal(here, there.cpu())


def _rounds(algorithm, topology=None, rounds=8, captured=True, fuse=False, **options):
    """A state after some rounds on a GPU: replayed from a capture, or one operation at a time."""
    problem = toys.problem()
    replicas = replicas_of([algorithm], [0, 1], None, problem.n)
    training = Training(problem, topology or fm.Ring(), replicas, Options(device="cuda", **options))
    if not captured:
        state = training.initial()
        for t in range(rounds):
            state = training.advance(state, t)
        return flatten_state(state)
    replay = CapturedRounds(training.after_round, training.initial(), 0, torch.device("cuda"), fuse)
    for _ in range(rounds):
        replay.advance()
    return flatten_state(replay.state)


@pytest.mark.parametrize("name", toys.ALGORITHMS)
def test_captured_round_gives_the_same_bits_as_one_operation_at_a_time(name):
    eager, captured = (_rounds(toys.ALGORITHMS[name], captured=c) for c in (False, True))
    for part in eager:
        assert torch.equal(eager[part], captured[part]), part


def test_captured_round_follows_a_schedule_of_graphs():
    algorithm, changing = (
        toys.ALGORITHMS["ad-gda"],
        fm.topologies.Changing((fm.Ring(), fm.topologies.Star(), fm.topologies.Complete())),
    )
    eager, captured = (_rounds(algorithm, changing, captured=c) for c in (False, True))
    for part in eager:
        assert torch.equal(eager[part], captured[part]), part


@pytest.mark.parametrize("name", ["ad-gda", "drfa"])
def test_fused_round_is_the_round_as_written_to_rounding(name):
    algorithm = toys.ALGORITHMS[name]
    eager, fused = (_rounds(algorithm, captured=c, fuse=True, dtype="float64") for c in (False, True))
    for part in eager:
        torch.testing.assert_close(fused[part], eager[part], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.3])
def test_kernels_count_what_torchs_operations_count(share):
    generator = torch.Generator().manual_seed(0)
    for dim in (1, 7, 2048, 2049, 40_001):
        kept = torch.rand(7, dim, generator=generator) < share
        levels = (3 * torch.randn(7, dim, generator=generator)).round().clamp(-18, 18) * kept
        levels[0] = 0
        here, there = (entropy.level_histograms(rows, 18) for rows in (levels, levels.cuda()))
        assert torch.equal(here, there.cpu())
        here, there = (formats.gaps(rows) for rows in (levels, levels.cuda()))
        assert torch.equal(here.size(), there.size().cpu())
        assert torch.equal(here.entries, there.entries.cpu())


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e30])
def test_diverged_nodes_levels_leave_the_others_counts_alone(odd):
    """A symbol that lies outside a row's histogram would be counted in a neighbour's, or past the end."""
    levels = (3 * torch.randn(5, 5000, generator=torch.Generator().manual_seed(0))).round().clamp(-18, 18).cuda()
    sound = entropy.level_histograms(levels, 18)
    for row in (0, 2, 4):
        levels[row, ::3] = odd
    counts = entropy.level_histograms(levels, 18)
    assert torch.equal(counts[1::2], sound[1::2])
    assert (counts[::2].sum(dim=-1) <= 5000).all()


class _Pair(NamedTuple):
    now: torch.Tensor
    before: torch.Tensor


@pytest.mark.parametrize("fuse", [False, True])
def test_captured_round_may_hand_on_the_tensors_it_was_given(fuse):
    def step(state, t):
        return _Pair(state.now + 1, state.now)

    begun = _Pair(torch.zeros(3, device="cuda"), torch.full((3,), -1.0, device="cuda"))
    replay = CapturedRounds(step, begun, 0, torch.device("cuda"), fuse)
    for _ in range(5):
        replay.advance()
    assert replay.state.now.tolist() == [5.0] * 3
    assert replay.state.before.tolist() == [4.0] * 3


def test_run_resumed_on_a_gpu_is_the_uninterrupted_one(tmp_path):
    pytest.importorskip("tomli_w")
    problem, algorithm = toys.problem(), toys.ALGORITHMS["ad-gda"]
    for rounds in (12, 20):
        resumed = fm.train(problem, fm.Ring(), algorithm, rounds, out=tmp_path, resume=rounds > 12, device="cuda")
    assert torch.equal(resumed.row(), fm.train(problem, fm.Ring(), algorithm, 20, device="cuda").row())


@pytest.mark.parametrize("name", toys.ALGORITHMS)
def test_gpu_trains_to_the_same_models_as_a_cpu(name):
    problem, algorithm = toys.problem(), toys.ALGORITHMS[name]
    rows = [
        fm.train(problem, fm.Ring(), algorithm, 30, seeds=(0, 1), dtype="float64", device=device).row().cpu()
        for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(*rows, rtol=1e-9, atol=1e-10)


OBJECTIVES = {
    "default": default_objective(),
    "regret": fm.Objective("held-out", rejoin=0.5, against="local"),
    "subgroups within": fm.Objective(subgroups="within"),
    "subgroups within, held-out": fm.Objective("held-out", rejoin=0.5, subgroups="within"),
    "subgroups across": fm.Objective(subgroups="across"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gpu_follows_every_objective_as_a_cpu_does(name):
    sites = [fm.Site((*site.train, ["a", "b", "b", "b"] * 10), site.test) for site in toys.sites(sizes=(40,) * 8)]
    problem = toys.problem(sites=sites, objective=OBJECTIVES[name])
    fixed = fm.TrackedADGDA(weighting=fm.weighting.PriorWeights())
    algorithm = fixed if problem.objective.subgroups == "across" else fm.TrackedADGDA()
    rows = [
        fm.train(problem, fm.Ring(), algorithm, 30, seeds=(0, 1), dtype="float64", device=device).row().cpu()
        for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(*rows, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("compressor", toys.COMPRESSORS)
@pytest.mark.parametrize("topology", ["star", "changing"])
def test_compressors_do_the_same_on_a_gpu(compressor, topology):
    algorithm = fm.ADGDA(1.0, 0.05, consensus_step=0.2, compressor=toys.COMPRESSORS[compressor])
    rows = [
        fm.train(toys.problem(), toys.TOPOLOGIES[topology], algorithm, 20, dtype="float64", device=device).row().cpu()
        for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(*rows, rtol=1e-9, atol=1e-10)


def test_data_left_on_the_host_gives_the_same_bits(monkeypatch):
    options = {"rounds": 20, "device": "cuda", "seeds": (0, 1)}
    there = fm.train(toys.problem(), fm.Ring(), toys.ALGORITHMS["ad-gda"], **options).row()
    monkeypatch.setattr("fairmesh.training.loop.home_of_data", lambda problem, device: torch.device("cpu"))
    assert torch.equal(there, fm.train(toys.problem(), fm.Ring(), toys.ALGORITHMS["ad-gda"], **options).row())


def test_rerun_on_a_gpu_is_bit_identical():
    runs = [
        fm.train(toys.problem(), fm.Ring(), toys.ALGORITHMS["ad-gda"], 50, device="cuda", seeds=range(4)).row()
        for _ in range(2)
    ]
    assert torch.equal(*runs)


@pytest.mark.parametrize("name", toys.COMPRESSORS)
def test_gpu_counts_the_same_bytes_as_a_cpu(name):
    rows = torch.randn(2, 5, 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[0, 1] = 0.0
    rows[1, 2] *= torch.rand(3000, generator=torch.Generator().manual_seed(1)).pow(30)
    draws = torch.rand(2, 5, 3000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    here, there = (
        compression.part_sizes(toys.COMPRESSORS[name].compress(rows.to(d), toys.Given(draws.to(d))))
        for d in ("cpu", "cuda")
    )
    assert torch.equal(torch.as_tensor(here), torch.as_tensor(there).cpu())


def test_rerun_of_a_cnn_on_a_gpu_is_bit_identical_metrics_included():
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(60, 3, 16, 16, generator=generator), torch.randint(0, 4, (60,), generator=generator)
    sites = [fm.Site((images[i::6], labels[i::6]), test=(images, labels)) for i in range(6)]
    problem = fm.Problem(
        partial(fm.models.PaperCNN().build, images.shape[1:], 4), sites, sampling=fm.Sampling(batch=8)
    ).prepared
    runs = [fm.train(problem, fm.Ring(), fm.ADGDA(0.5, 0.01), 40, device="cuda", seeds=range(3)) for _ in range(2)]
    assert torch.equal(runs[0].row(), runs[1].row())
    assert runs[0].records == runs[1].records


def _trained(captured: bool = True, fuse: bool = False, **settings):
    """Models after eight rounds on a GPU."""
    of_problem = {name: settings.pop(name) for name in ("models_at_once", "model") if name in settings}
    problem, options = toys.problem(**of_problem), Options(device="cuda", **settings)
    replicas = replicas_of([toys.ALGORITHMS["ad-gda"]], [0, 1], None, problem.n)
    training = Training(problem, fm.Ring(), replicas, options)
    state = training.initial()
    if captured:
        replay = CapturedRounds(training.after_round, state, 0, torch.device("cuda"), fuse)
        for _ in range(8):
            replay.advance()
        return training.view.models(replay.state.algorithm)
    for t in range(8):
        state = training.advance(state, t)
    return training.view.models(state.algorithm)


@pytest.mark.parametrize("fuse", [False, True])
def test_models_one_by_one_on_several_streams_give_the_same_as_a_stack(fuse):
    stacked = _trained(models_at_once="all", dtype="float64")
    one_by_one = _trained(models_at_once=1, dtype="float64", fuse=fuse)
    assert float((stacked - one_by_one).abs().max()) < 1e-10


def test_models_one_by_one_are_captured_with_the_same_bits_as_one_operation_at_a_time():
    assert torch.equal(_trained(models_at_once=1), _trained(models_at_once=1, captured=False))


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("at_once", ["all", 1])
def test_precision_changes_gradients_a_little_and_leaves_torchs_settings(precision, at_once):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.manual_seed(0)
    wide = torch.nn.Sequential(
        torch.nn.Linear(6, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 3)
    )  # torch multiplies tiny matrices in full
    exact, short = (_trained(models_at_once=at_once, model=wide, precision=p) for p in ("float32", precision))
    apart = float((exact - short).norm() / exact.norm())
    assert 0 < apart < 5e-2
    assert short.dtype == torch.float32
    assert torch.backends.cuda.matmul.fp32_precision == before


class Scans(torch.utils.data.Dataset):
    def __init__(self, k: int):
        self._k = k

    def __len__(self):
        return 200

    def __getitem__(self, i):
        inputs = torch.randn(6, generator=torch.Generator().manual_seed(1000 * self._k + i))
        return inputs + torch.rand(6), (i + self._k) % 2


@pytest.mark.parametrize("fuse", ["no", "yes"])
@pytest.mark.parametrize("batch", [1, 8])
def test_streamed_rounds_are_captured_and_give_the_numbers_of_a_cpu(fuse, batch):
    torch.manual_seed(0)
    sites = [fm.Site(fm.data.Streamed(Scans(k), workers=2)) for k in range(1 if batch == 1 else 3)]
    problem = fm.Problem(torch.nn.Linear(6, 2), sites, sampling=fm.Sampling(batch), test=sites[0].train).prepared
    topology = fm.Ring() if len(sites) > 1 else None
    runs = [
        fm.train(problem, topology, fm.algorithms.DSGD(0.1), 6, device=device, fuse=fuse) for device in ("cpu", "cuda")
    ]
    assert torch.allclose(runs[0].row(), runs[1].row().cpu(), atol=1e-5)


OWN_PARTS = {  # a policy for BatchNorm layers, and further local parts
    "FedBN": ("local", fm.Parts()),
    "local head": ("local", fm.Parts(local=("head.*",))),
    "pooled statistics": ("shared", fm.Parts()),
    "frozen norm": ("frozen", fm.Parts(local=("head.*",))),
}


@pytest.mark.parametrize("at_once", ["all", 1])
@pytest.mark.parametrize("name", OWN_PARTS)
@pytest.mark.parametrize(("algorithm", "apart"), [(fm.algorithms.DSGD(0.1), 1e-9), (fm.TrackedADGDA(0.1), 1e-6)])
def test_gpu_trains_parts_that_stay_at_a_site_as_a_cpu_does(name, at_once, algorithm, apart):
    policy, parts = OWN_PARTS[name]
    made = parts_problem(batch_norm=policy, parts=parts, models_at_once=at_once)
    runs = [fm.train(made, fm.Ring(), algorithm, 20, dtype="float64", device=device) for device in ("cpu", "cuda")]
    for site in (None, *(site.name for site in made.sites)):
        here, there = (run.state_dict(site=site) for run in runs)
        for part in here:
            torch.testing.assert_close(here[part].double(), there[part].double().cpu(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*(run.row().cpu() for run in runs), rtol=apart, atol=apart / 10)
    assert runs[0].final[0]["accuracy"]["sites"] == pytest.approx(runs[1].final[0]["accuracy"]["sites"])


@pytest.mark.parametrize("at_once", ["all", 1])
@pytest.mark.parametrize("algorithm", ["ad-gda", "dsgd"])
def test_captured_round_with_own_parts_gives_the_same_bits_as_one_operation_at_a_time(algorithm, at_once):
    made = parts_problem(batch_norm="local", parts=fm.Parts(local=("head.*",)), models_at_once=at_once)
    replicas = replicas_of([toys.ALGORITHMS[algorithm]], [0, 1], None, made.n)
    training = Training(made, fm.Ring(), replicas, Options(device="cuda"))
    eager = training.initial()
    replay = CapturedRounds(training.after_round, training.initial(), 0, torch.device("cuda"), fuse=False)
    for t in range(8):
        eager = training.advance(eager, t)
        replay.advance()
    begun, captured = flatten_state(training.initial()), flatten_state(replay.state)
    for part, value in flatten_state(eager).items():
        assert torch.equal(value, captured[part]), part
    moved = [part for part in captured if ".own." in part and not torch.equal(begun[part], captured[part])]
    assert len(moved) == 4  # rows, momenta, squares and steps


def test_run_with_own_parts_resumed_on_a_gpu_is_the_uninterrupted_one(tmp_path):
    pytest.importorskip("tomli_w")
    made = parts_problem(batch_norm="local", parts=fm.Parts(local=("head.*",)))
    for rounds in (6, 10):
        resumed = fm.train(
            made, fm.Ring(), fm.algorithms.DSGD(0.1), rounds, out=tmp_path, resume=rounds > 6, device="cuda"
        )
    whole = fm.train(made, fm.Ring(), fm.algorithms.DSGD(0.1), 10, device="cuda")
    for site in made.sites:
        one, other = resumed.state_dict(site=site.name), whole.state_dict(site=site.name)
        assert all(torch.equal(one[part], other[part]) for part in one)


@pytest.mark.parametrize("fuse", ["no", "yes"])
@pytest.mark.parametrize(("algorithm", "apart"), [(fm.algorithms.DSGD(0.3), 1e-9), (fm.TrackedADGDA(0.1), 1e-5)])
def test_gpu_trains_adapters_as_a_cpu_does(algorithm, apart, fuse):
    pytest.importorskip("peft")
    from tests.problems.test_lora import problem

    given = {"dtype": "float64", "fuse": fuse}
    runs = [fm.train(problem(), fm.Ring(), algorithm, 20, device=device, **given) for device in ("cpu", "cuda")]
    torch.testing.assert_close(*(run.row().cpu() for run in runs), rtol=apart, atol=apart)
    assert runs[0].final[0]["bytes_total"] == pytest.approx(runs[1].final[0]["bytes_total"], rel=1e-3)


def test_training_function_on_a_gpu_takes_the_steps_of_a_cpu_and_of_the_batched_oracle(tmp_path):
    def adamw(module, data, ctx):  # its state is in the checkpoint
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
        optimizer.load_state_dict(ctx.state.get("optimizer", optimizer.state_dict()))
        for inputs, targets in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(inputs.to(ctx.device)), targets.to(ctx.device)).backward()
            optimizer.step()
        ctx.state["optimizer"] = optimizer.state_dict()

    def row(trainer, device, step=1.0, rounds=10, **options):
        made = local_trainer.problem_of(trainer)
        given = {"device": device, "dtype": "float64"} | options
        return fm.train(made, fm.Ring(), fm.ChocoSGD(step), rounds, **given).row().cpu()

    step = local_trainer.sgd_step(0.3)
    there = row(step, "cuda")
    for other in (row(step, "cpu"), row(None, "cuda", 0.3)):
        torch.testing.assert_close(there, other, rtol=1e-9, atol=1e-10)
    whole = row(adamw, "cuda")
    row(adamw, "cuda", rounds=5, out=tmp_path / "run")
    assert torch.equal(row(adamw, "cuda", out=tmp_path / "run", resume=True), whole)
