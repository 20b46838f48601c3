"""The same run on a GPU. Needs one: `python -m pytest tests/training/test_cuda.py` on such a machine."""

from functools import partial

import pytest
import torch

import fairmesh as fm
from fairmesh import codec, randomness
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


@pytest.mark.parametrize("name", toys.COMPRESSORS)
def test_a_gpu_counts_the_same_bytes_as_a_cpu(name):
    rows = torch.randn(2, 5, 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[0, 1] = 0.0
    rows[1, 2] *= torch.rand(3000, generator=torch.Generator().manual_seed(1)).pow(30)
    draws = torch.rand(2, 5, 3000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    here, there = (
        codec.part_sizes(toys.COMPRESSORS[name].compress(rows.to(d), toys.Given(draws.to(d)))) for d in ("cpu", "cuda")
    )
    assert torch.equal(here, there.cpu())


def test_a_rerun_of_a_cnn_on_a_gpu_is_bit_identical_metrics_included():
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(60, 3, 16, 16, generator=generator), torch.randint(0, 4, (60,), generator=generator)
    sites = [fm.Site((images[i::6], labels[i::6]), test=(images, labels)) for i in range(6)]
    problem = fm.Problem(partial(fm.PaperCNN().build, images.shape[1:], 4), sites, sampling=fm.Sampling(batch=8))
    runs = [fm.train(problem, fm.Ring(), fm.ADGDA(0.5, 0.01), 40, device="cuda", seeds=range(3)) for _ in range(2)]
    assert torch.equal(runs[0].row(), runs[1].row())
    assert runs[0].records == runs[1].records
