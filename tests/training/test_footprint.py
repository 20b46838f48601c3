"""Memory: estimated from above before a run, and refused with the number of replicas that fit."""

from itertools import product

import pytest
import torch

import fairmesh as fm
from fairmesh.numerics import malloc
from fairmesh.storage.state_tree import flatten_state
from fairmesh.training.loop import Training
from fairmesh.training.memory_estimate import (
    Footprint,
    footprint,
    free_bytes,
    measured_copies,
    memory_sentence,
)
from fairmesh.training.observers import Watch
from fairmesh.training.options import Options
from fairmesh.training.plan import Plan
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.contracts.test_memory import peak_bytes
from tests.pairwise import case
from tests.refusals import missing_from, refused

GIB = 2.0**30


def _problems() -> dict[str, fm.Problem]:
    generator = torch.Generator().manual_seed(0)

    def sites(nodes: int, *shape: int) -> list[fm.Site]:
        return [fm.Site((torch.rand(6, *shape, generator=generator), torch.arange(6) % 3)) for _ in range(nodes)]

    return {
        "wide": fm.Problem(
            fm.models.FullyConnected(1500).build(torch.Size([50]), 3), sites(8, 50), sampling=fm.Sampling(5)
        ).prepared,
        "large batches": fm.Problem(
            fm.models.Logistic().build(torch.Size([300]), 3), sites(8, 300), sampling=fm.Sampling(4000)
        ).prepared,
        "images": fm.Problem(
            fm.models.PaperCNN().build(torch.Size([1, 12, 12]), 3), sites(6, 1, 12, 12), sampling=fm.Sampling(400)
        ).prepared,
        "many nodes": fm.Problem(
            fm.models.Logistic().build(torch.Size([4]), 3), sites(1500, 4), sampling=fm.Sampling(2)
        ).prepared,
    }


QUICK = {("wide", 1), ("large batches", 3)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "replicas"),
    [case(*pair, quick=pair in QUICK) for pair in product(["wide", "large batches", "images", "many nodes"], [1, 3])],
)
def test_round_needs_no_more_than_estimated_and_not_far_less(name, replicas):
    problem = _problems()[name]
    algorithm = fm.ADGDA(0.1, 1e-4, consensus_step=0.2, compressor=fm.compressors.Quantize(4))
    every = replicas_of([algorithm], range(replicas), None, problem.n)

    def two_rounds():
        training = Training(problem, fm.Ring(), every, Options())
        state = training.advance(training.initial(), 0)
        return training.advance(state, 1)

    peak, _ = peak_bytes(two_rounds)
    need = footprint(problem, algorithm).of(replicas)
    assert need / 8 < peak <= need, f"{peak / need:.2f} of the estimate"


def _private(name: str) -> fm.Problem:
    """Models whose rounds are mostly gradients of single units, by vmap or by layers, with or without chunks."""
    shape, rows, batch, model = {
        "units of three rows": ((50,), 120, 10, fm.models.FullyConnected(300)),
        "images": ((1, 12, 12), 60, 20, fm.models.PaperCNN()),
        "units of one row": ((50,), 60, 20, fm.models.FullyConnected(1500)),
        "in chunks": ((2000,), 40, 10, fm.models.FullyConnected(400)),
    }[name]
    generator = torch.Generator().manual_seed(0)
    per_unit = 1 if name in ("images", "units of one row") else 3
    units = None if per_unit == 1 else {"train": torch.arange(rows) // per_unit, "test": torch.arange(6) + rows}

    def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(count, *shape, generator=generator), torch.arange(count) % 3

    sites = [fm.Site(samples(rows), test=samples(6), units=units) for _ in range(4)]
    built = model.build(torch.Size(shape), 3)
    return fm.Problem(built, sites, sampling=fm.Sampling(batch), privacy=fm.Privacy(4, 1e-3))


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        case(*pair, quick=pair == ("units of three rows", 3))
        for pair in product(["units of three rows", "images", "units of one row", "in chunks"], [1, 3])
    ],
)
def test_private_round_needs_no_more_than_estimated_and_not_far_less(name, replicas):
    pytest.importorskip("dp_accounting")
    algorithm = fm.ADGDA(0.1, 1e-4, consensus_step=0.2, compressor=fm.compressors.Quantize(4))
    plan = Plan.of(_private(name), fm.Ring(), algorithm, 2, seeds=range(replicas))

    def two_rounds():
        private = plan.private and plan.private.with_secrets(0)
        training = Training(plan.problem, plan.topology, plan.replicas, plan.options, None, private)
        state = training.advance(training.initial(), 0)
        return training.advance(state, 1)

    peak, _ = peak_bytes(two_rounds)
    need = footprint(plan.problem, algorithm).of(replicas)
    assert need / 8 < peak <= need, f"{peak / need:.2f} of the estimate"


def test_gradients_of_single_units_are_in_the_estimate_of_a_private_run():
    pytest.importorskip("dp_accounting")
    private = _private("units of three rows")
    algorithm = fm.ADGDA()
    need = footprint(private.prepared, algorithm)
    assert "single units" in need.description
    per_unit = 4 * 4 * private.flat_model.dim  # bytes at four nodes
    without = footprint(private.prepared.changed(privacy=None), algorithm)
    assert need.per_replica - without.per_replica > 20 * per_unit


def test_run_that_cannot_fit_is_refused_with_the_numbers_before_anything_is_allocated():
    with refused("GiB", "cpu", "8 nodes", "53 parameters", "memory_gib = 0.001"):
        fm.train(toys.problem(), fm.Ring(), fm.ADGDA(), 5, memory_gib=1e-3)
    huge = Footprint(0, 1 << 60, "a very large model")
    with refused("1073741824.00 GiB", "cpu", huge.description):
        memory_sentence(huge, 1, None, torch.device("cpu"))
    with refused("memory_gib", "> 0"):
        fm.train(toys.problem(), fm.Ring(), fm.ADGDA(), 5, memory_gib=0.0)


def test_replicas_beyond_memory_are_refused_with_the_number_that_fits():
    need = Footprint(fixed=100, per_replica=50, description="")
    for room, fit in ((151, 1), (249, 2), (250, 3), (449, 6)):
        with refused(f"only {fit} of 7 replicas", "seeds", "sweep"):
            memory_sentence(need, 7, room / GIB, torch.device("cpu"))
    memory_sentence(need, 7, 450 / GIB, torch.device("cpu"))
    free = free_bytes(torch.device("cpu"))
    assert free is None or 1 << 20 < free < 1 << 50


def test_sweep_beyond_memory_is_refused_before_the_first_round_and_writes_nothing(tmp_path):
    problem, algorithm, seen = toys.problem(), toys.ALGORITHMS["ad-gda"], []
    need = footprint(problem, algorithm, Options(dtype="float64"))
    settings = {"memory_gib": (need.of(3) - 1) / GIB, "dtype": "float64", "out": tmp_path / "run"}
    with refused("only 2 of 5 replicas", "memory_gib"):
        fm.train(
            problem, fm.Ring(), algorithm, 4, seeds=range(5),
            observers=[Watch(lambda done, records: seen.append(done))], **settings,
        )  # fmt: skip
    assert not seen
    assert not (tmp_path / "run").exists()
    fm.train(problem, fm.Ring(), algorithm, 4, seeds=range(2), **settings)


def test_run_that_fits_only_without_keeping_freed_memory_is_not_refused():
    problem, algorithm = toys.problem(), toys.ALGORITHMS["ad-gda"]
    room = footprint(problem, algorithm).of(1)
    with malloc.reused():
        if not malloc.libraries:
            pytest.skip("this system has no glibc")
        assert footprint(problem, algorithm).of(1) > room
        fm.train(problem, fm.Ring(), algorithm, 2, memory_gib=room / GIB)
        assert not malloc.libraries
        with refused("one replica needs"):
            fm.train(problem, fm.Ring(), algorithm, 2, memory_gib=(room - 1) / GIB)


def test_single_replica_that_does_not_fit_is_refused_for_itself_and_not_for_its_results():
    need = Footprint(fixed=0, per_replica=50 << 30, description="many parameters", copies=22.0)
    with refused("50.00 GiB", "22 copies", "parts.frozen", "fm.models.LoRA", "DSGD") as caught:
        memory_sentence(need, 1, 20.0, torch.device("cpu"))
    assert missing_from(caught.value, "results") == ["results"]
    with refused("fixed weights", "compare_weights = False"):
        fm.train(toys.problem(), fm.Ring(), fm.TrackedADGDA(), 5, compare_weights=True, memory_gib=1e-3)


def test_run_with_fixed_weights_waits_without_what_only_further_rounds_need():
    problem, weighted = toys.problem(4), fm.TrackedADGDA()
    fixed = fm.train(problem, fm.Ring(), weighted, 3, compare_weights=True).fixed
    alone = fm.train(problem, fm.Ring(), weighted.with_fixed_weights(), 3)
    rows, held = (
        {name: tensor.numel() for name, tensor in flatten_state(one.state.algorithm).items() if tensor.shape[-1] > 4}
        for one in (fixed, alone)
    )
    assert list(rows) == ["state.models"]
    assert len(held) == 8
    for which in ("last", "time-average"):
        assert torch.equal(fixed.row(which), alone.row(which))
    assert fixed.records == alone.records


def _linear(width: int) -> fm.Problem:
    sites = [fm.Site((torch.zeros(8, width), torch.arange(8))) for _ in range(4)]
    return fm.Problem(torch.nn.Linear(width, 1200, bias=False), sites, sampling=fm.Sampling(batch=4))


@pytest.mark.slow
@pytest.mark.recorded
@pytest.mark.parametrize("algorithm", [None, fm.algorithms.DSGD(0.1)], ids=["default", "DSGD"])
def test_whole_run_needs_no_more_than_announced(algorithm):
    said: list[str] = []

    def run():
        fm.train(_linear(1200), fm.Ring(), algorithm, 2, announce=said.append, compare_weights=algorithm is None)

    run()  # which measures a toy, by the profiler that measures the run below
    peak, _ = peak_bytes(run)
    announced = [float(line.split()[2]) for line in said if line.startswith("memory: about ")]
    assert 0.4 * announced[-1] < peak / GIB <= announced[-1]


def test_divergence_names_the_replica():
    runs = [fm.ChocoSGD(step) for step in (0.1, 0.1001, 0.1002, 0.1003, 1e30)]
    with refused("replica 4", "seed 0", error=fm.errors.Diverged):
        fm.train(toys.problem(), fm.Ring(), runs, 30, dtype="float64")


class Hoarder(fm.algorithms.DSGD):
    """Holds many copies of all models for a moment, which its class does not declare."""

    def step(self, state, ctx):
        many = [state.models + k for k in range(30)]
        return fm.algorithms.DSGD.step(self, state._replace(models=many[0]), ctx)


def test_copies_of_an_algorithm_that_does_not_declare_them_are_measured():
    assert measured_copies(Hoarder(0.1), 4) > 30
    assert 4 < measured_copies(fm.algorithms.DSGD(0.1), 4) < 12
    assert measured_copies(None, 4) == 0  # type: ignore[arg-type]
