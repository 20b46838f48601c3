"""The same run on a GPU. Needs one: `python -m pytest tests/training/test_cuda.py` on such a machine."""

import pytest
import torch

import fairmesh as fm
from fairmesh import randomness
from tests import toys

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_gpu_draws_the_same_integers_as_a_cpu():
    drawn = []
    for device in ("cpu", "cuda"):
        seeds, identities = torch.tensor([0, 1, 2**40], device=device), torch.arange(100, device=device)
        key = randomness.keys(seeds, "anything", torch.tensor(12345), identities)
        below = torch.arange(1, 101, device=device)[:, None] * 1000
        drawn.append([key, randomness.bits(key, 500), randomness.integers(key, 500, below)])
        drawn[-1].append(randomness.uniform(key, 500, torch.float32))
    for here, there in zip(*drawn):
        assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("name", toys.ALGORITHMS)
def test_a_gpu_trains_to_the_same_models_as_a_cpu(name):
    problem, algorithm = toys.problem(), toys.ALGORITHMS[name]
    rows = [
        fm.train(problem, fm.Ring(), algorithm, 30, seeds=(0, 1), dtype="float64", device=device).row().cpu()
        for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(*rows, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("compressor", toys.COMPRESSORS)
@pytest.mark.parametrize("topology", ["star", "changing"])
def test_every_compressor_does_the_same_on_a_gpu(compressor, topology):
    algorithm = fm.ADGDA(1.0, 0.05, rate=0.2, compressor=toys.COMPRESSORS[compressor])
    rows = [
        fm.train(toys.problem(), toys.TOPOLOGIES[topology], algorithm, 20, dtype="float64", device=device).row().cpu()
        for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(*rows, rtol=1e-9, atol=1e-10)


def test_data_left_on_the_host_gives_the_same_bits():
    options = {"rounds": 20, "device": "cuda", "seeds": (0, 1)}
    rows = [
        fm.train(toys.problem(), fm.Ring(), toys.ALGORITHMS["ad-gda"], data_on=home, **options).row()
        for home in ("device", "host")
    ]
    assert torch.equal(*rows)


def test_a_rerun_on_a_gpu_is_bit_identical():
    runs = [
        fm.train(toys.problem(), fm.Ring(), toys.ALGORITHMS["ad-gda"], 50, device="cuda", seeds=range(4)).row()
        for _ in range(2)
    ]
    assert torch.equal(*runs)
