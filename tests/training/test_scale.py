"""A thousand nodes run on a CPU."""

import pytest
import torch

import fairmesh as fm


@pytest.mark.slow
def test_thousand_nodes_of_the_fc_model_run_on_a_ring_with_four_bits():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(1000, 5, 784, generator=generator)
    labels = torch.randint(0, 10, (1000, 5), generator=generator)
    shared = (torch.rand(50, 784, generator=generator), torch.randint(0, 10, (50,), generator=generator))
    made = fm.Problem(
        model=lambda: fm.models.FullyConnected(hidden=25).build(torch.Size([784]), 10),
        sites=[fm.Site((x, y)) for x, y in zip(inputs, labels)],
        sampling=fm.Sampling(batch=5),
        test=shared,
    )
    algorithm = fm.ADGDA(
        primal_step=100.0, dual_step=1e-3, consensus_step=0.3, compressor=fm.compressors.Quantize(bits=4)
    )
    result = fm.train(made, fm.Ring(), algorithm, 2, measure_every=2)
    models = result.state.algorithm.models
    assert models.shape == (1, 1000, 784 * 25 + 25 + 25 * 10 + 10)
    assert result.final[0]["nominal_bits_busiest"] == 2 * 2 * (4 * models.shape[-1] + 32 * 1000)
    assert result.final[0]["loss"]["mean"] != result.records[0]["loss"]["mean"]
    assert torch.isfinite(models).all()
