"""Memory: estimated from above before a run, refused with the number, and replicas in portions where not all fit."""

import json
from itertools import product

import pytest
import torch

import fairmesh as fm
from fairmesh.storage.state_tree import flatten_state
from fairmesh.training.loop import Training
from fairmesh.training.memory_estimate import (
    Footprint,
    footprint,
    free_bytes,
    measured_copies,
    replicas_that_fit,
)
from fairmesh.training.observers import Watch
from fairmesh.training.options import Options
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
        ),
        "large batches": fm.Problem(
            fm.models.Logistic().build(torch.Size([300]), 3), sites(8, 300), sampling=fm.Sampling(4000)
        ),
        "images": fm.Problem(
            fm.models.PaperCNN().build(torch.Size([1, 12, 12]), 3), sites(6, 1, 12, 12), sampling=fm.Sampling(400)
        ),
        "many nodes": fm.Problem(
            fm.models.Logistic().build(torch.Size([4]), 3), sites(1500, 4), sampling=fm.Sampling(2)
        ),
    }


QUICK = {("wide", 1), ("large batches", 3)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "replicas"),
    [case(*pair, quick=pair in QUICK) for pair in product(["wide", "large batches", "images", "many nodes"], [1, 3])],
)
def test_round_needs_no_more_than_estimated_and_not_far_less(name, replicas):
    problem = _problems()[name]
    algorithm = fm.ADGDA(0.1, 1e-4, consensus_step=0.2, compressor=fm.Quantize(4))
    every = replicas_of([algorithm], range(replicas), None, problem.n)

    def two_rounds():
        training = Training(problem, fm.Ring(), every, Options())
        state = training.advance(training.initial(), 0)
        return training.advance(state, 1)

    peak, _ = peak_bytes(two_rounds)
    need = footprint(problem, algorithm, torch.float32, data_counts=True).of(replicas)
    assert need / 8 < peak <= need, f"{peak / need:.2f} of the estimate"


def test_run_that_cannot_fit_is_refused_with_the_numbers_before_anything_is_allocated():
    with refused("GiB", "cpu", "8 nodes", "53 parameters", "memory_gib = 0.001"):
        fm.train(toys.problem(), fm.Ring(), fm.ADGDA(), 5, memory_gib=1e-3)
    huge = Footprint(0, 1 << 60, "a very large model")
    with refused("1073741824.00 GiB", "cpu", huge.description):
        replicas_that_fit(huge, 1, None, torch.device("cpu"))
    with refused("memory_gib", "> 0"):
        fm.train(toys.problem(), fm.Ring(), fm.ADGDA(), 5, memory_gib=0.0)


def test_replicas_run_together_as_far_as_they_fit():
    need = Footprint(fixed=100, per_replica=50, description="")
    for room, fit in ((151, 1), (249, 2), (250, 3), (10_000, 7)):
        assert replicas_that_fit(need, 7, room / GIB, torch.device("cpu"))[0] == fit
    free = free_bytes(torch.device("cpu"))
    assert free is None or 1 << 20 < free < 1 << 50


def test_single_replica_that_does_not_fit_is_refused_for_itself_and_not_for_its_results():
    need = Footprint(fixed=0, per_replica=50 << 30, description="many parameters", kept=40 << 30, copies=22.0)
    with refused("50.00 GiB", "22 copies", "parts.frozen", "fm.models.LoRA", "fm.DSGD") as caught:
        replicas_that_fit(need, 1, 20.0, torch.device("cpu"))
    assert missing_from(caught.value, "results", "40.00") == ["results", "40.00"]
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
@pytest.mark.parametrize("algorithm", [None, fm.DSGD(0.1)], ids=["default", "DSGD"])
def test_whole_run_needs_no_more_than_announced(algorithm):
    said: list[str] = []

    def run():
        fm.train(_linear(1200), fm.Ring(), algorithm, 2, announce=said.append, compare_weights=algorithm is None)

    run()  # which measures a toy, by the profiler that measures the run below
    peak, _ = peak_bytes(run)
    announced = [float(line.split()[2]) for line in said if line.startswith("memory: about ")]
    assert 0.4 * announced[-1] < peak / GIB <= announced[-1]


@pytest.fixture
def two_at_once() -> float:
    need = footprint(toys.problem(), toys.ALGORITHMS["ad-gda"], torch.float64, data_counts=True)
    return (need.of(3) + 5 * need.kept - 1) / GIB


@pytest.mark.slow
def test_replicas_in_portions_give_what_they_give_at_once(two_at_once, tmp_path):
    problem, algorithm = toys.problem(), toys.ALGORITHMS["ad-gda"]
    settings = {"seeds": range(5), "measure_every": 4, "keep_iterate": True, "dtype": "float64"}
    whole = fm.train(problem, fm.Ring(), algorithm, 12, out=tmp_path / "whole", **settings)
    said, seen = [], []
    split = fm.train(
        problem, fm.Ring(), algorithm, 12, out=tmp_path / "split", memory_gib=two_at_once, announce=said.append,
        observers=[Watch(lambda done, records: seen.append(done))], **settings,
    )  # fmt: skip
    assert any(missing_from(one, "5 replicas", 2) == [] for one in said)
    assert seen == sorted(seen)
    assert seen[-1] == 12
    for which in ("last", "time-average", "iterate"):
        torch.testing.assert_close(split.row(which), whole.row(which), rtol=1e-12, atol=1e-13)
    assert len(split.records) == len(whole.records) == 5 * 4
    for a, b in zip(split.records, whole.records):
        assert (a["round"], a["replica"], a["seed"]) == (b["round"], b["replica"], b["seed"])
        assert a["bytes_total"] == b["bytes_total"]
        assert a["loss"]["mean"] == pytest.approx(b["loss"]["mean"], rel=1e-12)
    summaries = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("split", "whole")]
    assert summaries[0]["worst"] == pytest.approx(summaries[1]["worst"])
    assert (tmp_path / "split" / "model-4.safetensors").exists()


@pytest.mark.slow
def test_split_run_is_resumed_in_the_portions_it_was_begun_in(two_at_once, tmp_path):
    problem, algorithm = toys.problem(), toys.ALGORITHMS["ad-gda"]
    settings = {"seeds": range(5), "measure_every": 4, "dtype": "float64"}
    fm.train(problem, fm.Ring(), algorithm, 8, out=tmp_path / "run", memory_gib=two_at_once, **settings)
    with refused(tmp_path / "run", "resume"):
        fm.train(problem, fm.Ring(), algorithm, 12, out=tmp_path / "run", **settings)
    longer = fm.train(problem, fm.Ring(), algorithm, 12, out=tmp_path / "run", resume=True, **settings)
    whole = fm.train(problem, fm.Ring(), algorithm, 12, **settings)
    torch.testing.assert_close(longer.row(), whole.row(), rtol=1e-12, atol=1e-13)
    assert [r["round"] for r in longer.records if r["replica"] == 4] == [0, 4, 8, 12]


def test_refusals_do_not_depend_on_how_many_replicas_fit_at_once(two_at_once):
    problem, seen = toys.problem(), []
    wrong = [toys.ALGORITHMS["ad-gda"], fm.ADGDA(0.1, dual_step=1e6)]
    mixed = [fm.ADGDA(0.1, 0.01, 0.3), fm.ADGDA(0.1, 0.01, consensus_step=0.3, compressor=fm.TopK(0.5))]
    for algorithms, names in ((wrong, ["dual_step", "1e+06"]), (mixed, ["compressor"])):
        for room in (None, two_at_once):
            with refused(*names):
                fm.train(
                    problem, fm.Ring(), algorithms, 4, seeds=range(3), memory_gib=room,
                    observers=[Watch(lambda done, records: seen.append(done))],
                )  # fmt: skip
    assert not seen


def test_numbers_of_replicas_are_the_whole_runs(two_at_once):
    problem, seen = toys.problem(), []
    algorithm = toys.ALGORITHMS["ad-gda"]
    settings = {"memory_gib": two_at_once, "dtype": "float64", "seeds": range(5)}
    fm.train(
        problem, fm.Ring(), algorithm, 2, observers=[Watch(lambda done, records: seen.extend(records))], **settings
    )
    assert {record["replica"] for record in seen} == set(range(5))
    runs = [fm.ChocoSGD(step) for step in (0.1, 0.1001, 0.1002, 0.1003, 1e30)]
    with refused("replica 4", "seed 0", error=fm.Diverged):
        fm.train(problem, fm.Ring(), runs, 30, memory_gib=two_at_once, dtype="float64")


@pytest.mark.slow
def test_split_folder_refuses_another_number_of_replicas_and_passes_over_other_folders(two_at_once, tmp_path):
    problem, algorithm = toys.problem(), toys.ALGORITHMS["ad-gda"]
    settings = {"out": tmp_path / "run", "dtype": "float64"}
    fm.train(problem, fm.Ring(), algorithm, 2, seeds=range(5), memory_gib=two_at_once, **settings)
    (tmp_path / "run" / "replicas-old-x").mkdir()
    with refused("replicas", "0 to 4", 2, 3):
        fm.train(problem, fm.Ring(), algorithm, 4, seeds=range(3), resume=True, **settings)
    fm.train(problem, fm.Ring(), algorithm, 4, seeds=range(5), resume=True, **settings)


class Hoarder(fm.DSGD):
    """Holds many copies of all models for a moment, which its class does not declare."""

    def step(self, state, ctx):
        many = [state.models + k for k in range(30)]
        return fm.DSGD.step(self, state._replace(models=many[0]), ctx)


def test_copies_of_an_algorithm_that_does_not_declare_them_are_measured():
    assert measured_copies(Hoarder(0.1), 4) > 30
    assert 4 < measured_copies(fm.DSGD(0.1), 4) < 12
    assert measured_copies(None, 4) == 0  # type: ignore[arg-type]
