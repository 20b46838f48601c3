"""Training data too large to be copied stays where it is, and gives the same batches."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.data import rows
from fairmesh.data.rows import Rows

CPU = torch.device("cpu")


def drawn(k: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(k))


def sets() -> list:
    return [{"a": drawn(k, 5 + k, 2), "b": (torch.arange(5 + k) + 10 * k,)} for k in range(3)]


@pytest.mark.parametrize("order", [None, torch.randperm(18, generator=torch.Generator().manual_seed(0))])
def test_rows_apart_are_those_that_a_copy_has(order, monkeypatch):
    chosen = torch.tensor([17, 0, 4, 5, 5, 11, 10, 0])
    whole = Rows(sets(), CPU, order)
    monkeypatch.setattr(rows, "COPIED_UP_TO", 0)
    apart = Rows(sets(), CPU, order)
    assert torch.equal(whole.take(chosen)["a"], apart.take(chosen)["a"])
    assert torch.equal(whole.take(chosen)["b"][0], apart.take(chosen)["b"][0])
    for start, stop in ((0, 18), (2, 4), (4, 12), (5, 11), (17, 18)):
        assert torch.equal(whole.between(start, stop)["a"], apart.between(start, stop)["a"])


@pytest.mark.parametrize("order", ["random", "cyclic", "full"])
@pytest.mark.parametrize("judged_on", ["training", "held-out", "validation"])
@pytest.mark.quick_cases(3)
def test_runs_with_data_apart_are_bit_for_bit_those_with_a_copy(order, judged_on, monkeypatch):
    labels = torch.arange(12) % 2
    sites = [
        fm.Site(((drawn(k, 12, 3) * 40 + 100).byte(), labels), validation=((drawn(9, 4, 3) * 40).byte(), labels[:4]))
        for k in range(3)
    ]
    problem = fm.Problem(
        torch.nn.Linear(3, 2), sites, sampling=fm.Sampling(4, order), objective=fm.Objective(judged_on=judged_on)
    )
    found, said = [], []
    for limit in (1 << 28, 0):
        monkeypatch.setattr(rows, "COPIED_UP_TO", limit)
        found.append(fm.train(problem, fm.Ring(), fm.ADGDA(primal_step=0.1), 4, announce=said.append))
    assert torch.equal(*(result.row() for result in found))
    assert found[0].final[0]["loss"] == found[1].final[0]["loss"]
    assert sum("stays where it is" in text for text in said) == 1


def test_an_array_that_is_mapped_read_only_stays_as_it_is_if_the_model_changes_its_inputs(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "COPIED_UP_TO", 0)
    np.save(tmp_path / "inputs.npy", drawn(0, 12, 3).numpy())
    inputs = np.load(tmp_path / "inputs.npy", mmap_mode="r")
    model = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(3, 2))
    problem = fm.Problem(model, [(inputs, torch.arange(12) % 2)] * 3, sampling=fm.Sampling(4), models_at_once=1)
    fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 2)
    assert np.array_equal(inputs, drawn(0, 12, 3).numpy())


@pytest.mark.slow
def test_a_mapped_file_larger_than_the_memory_limit_trains(tmp_path):
    script = """
        import resource, sys, warnings
        import numpy as np, torch
        import fairmesh as fm

        warnings.simplefilter("ignore")
        images = np.memmap(sys.argv[1], np.float32, "w+", shape=(1_500_000, 250))
        labels = torch.arange(500_000) % 2
        sites = [fm.Site((images[k * 500_000 : (k + 1) * 500_000], labels)) for k in range(3)]
        used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + (600 << 20),) * 2)  # a shared mapping does not count
        problem = fm.Problem(torch.nn.Linear(250, 2), sites, sampling=fm.Sampling(16))
        result = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 3, announce=print)
        print("rounds", result.rounds)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "images")], capture_output=True, text=True
    )
    assert "rounds 3" in done.stdout, done.stderr
    assert "training data (1.4" in done.stdout
