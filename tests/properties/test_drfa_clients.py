"""How DRFA's server draws clients by their weights."""

import itertools

import torch

from fairmesh.algorithms.drfa import _drawn_once_by

WEIGHTS = (0.6, 0.3, 0.1)


def test_drfa_clients_drawn_once_come_as_if_drawn_one_after_another():
    """The chance of a pair is that of either order of its two draws, the second among those left."""
    uniforms = torch.rand(200_000, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = _drawn_once_by(torch.tensor(WEIGHTS, dtype=torch.float64).expand_as(uniforms), uniforms, 2)
    assert (drawn.sum(dim=-1) == 2).all()
    for a, b in itertools.combinations(range(3), 2):
        both = float((drawn[..., a] * drawn[..., b]).mean())
        chance = sum(WEIGHTS[x] * WEIGHTS[y] / (1 - WEIGHTS[x]) for x, y in ((a, b), (b, a)))
        assert abs(both - chance) < 0.005


def test_drfa_client_without_weight_is_drawn_only_where_too_few_others_are_left():
    uniforms = torch.rand(1000, 1, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64).expand_as(uniforms)
    assert (_drawn_once_by(weights, uniforms, 2) == torch.tensor([1.0, 0.0, 1.0])).all()
    assert (_drawn_once_by(weights, uniforms, 3) == 1).all()
