"""The consensus step that gossip chooses by itself."""

import pytest
import torch

import fairmesh as fm
from fairmesh.algorithms.gossip import steady_contraction


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sites_with_a_model_of_two_numbers_agree(seed):
    """Two coordinates of equal size are compressed well. The step that this allowed drove the sites' models apart
    exponentially where coordinates are unequal: after 300 rounds by 50 to 350,000."""
    generator = torch.Generator().manual_seed(seed)
    sites = []
    for _ in range(18):
        x = torch.randn(6, 1, generator=generator)
        slope, constant = torch.randn(2, generator=generator)
        sites.append(fm.Site((x, (1 + 0.5 * slope) * x + constant)))
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    averaging = fm.TrackedADGDA(weighting=fm.weighting.PriorWeights())
    result = fm.train(fm.Problem(model, sites), None, averaging, 300, measure_every=300, announce=lambda text: None)
    models = result.state.algorithm.models[0]
    assert float((models - models.mean(dim=0)).norm()) < 0.1


def test_few_coordinates_are_rehearsed_with_unequal_sizes_too():
    sign = fm.compressors.Sign(block=64)
    assert steady_contraction(sign, 1) == 1.0
    assert all(steady_contraction(sign, dim) < 0.6 for dim in (2, 3, 4, 6))
