"""The user's own module as a row: frozen layers, tied weights, dropout and augmentation from our streams, export."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fairmesh as fm
from tests.toys import CLASSES, FEATURES, on_stack, problem, sites

ALGORITHM = fm.ADGDA(primal_step=2.0, dual_step=0.05, consensus_step=0.5, compressor=fm.compressors.Quantize(bits=4))


def at(t: int) -> torch.Tensor:
    return torch.tensor(t)


def pretrained() -> nn.Sequential:
    """A head on a body that was trained elsewhere: frozen, its BatchNorm in eval mode with statistics of its own."""
    torch.manual_seed(3)
    body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
    body.train()
    with torch.no_grad():
        for _ in range(20):
            body(torch.randn(64, FEATURES) * 2 + 1)
    return nn.Sequential(body.eval().requires_grad_(False), nn.Linear(8, CLASSES))


def test_head_on_a_frozen_body_trains_and_the_body_stays_out_of_the_row_with_its_dropout_off():
    model = pretrained()
    made = problem(4, model=model)
    assert made.flat_model.dim == 8 * CLASSES + CLASSES
    row, inputs = made.initial_row(0).float(), torch.ones(3, FEATURES)
    assert torch.equal(made.flat_model(row, inputs, at(7)), made.flat_model(row, inputs))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = fm.train(made, fm.Ring(), fm.algorithms.DSGD(primal_step=0.5), 40, measure_every=40)
    exported = result.state_dict()
    assert result.final[0]["accuracy"]["mean"] > result.records[0]["accuracy"]["mean"] + 0.1
    assert list(exported) == list(before)
    for name, tensor in exported.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name]) == name.startswith("0.")


def test_exported_state_dict_loads_strictly_and_gives_the_measured_accuracy():
    made = problem(4, model=pretrained())
    result = fm.train(made, fm.Ring(), ALGORITHM, 30, measure_every=30)
    fresh = pretrained()
    with torch.no_grad():
        fresh[1].weight.zero_()
    fresh.load_state_dict(result.state_dict(), strict=True)
    fresh.eval().requires_grad_(False)
    for i, site in enumerate(made.sites):
        outputs = fresh(site.test.inputs.float())
        accuracy = float((outputs.argmax(dim=1) == site.test.targets).double().mean())
        loss = float(F.cross_entropy(outputs, site.test.targets))
        assert result.final[0]["accuracy"]["sites"][i] == accuracy
        assert result.final[0]["loss"]["sites"][i] == pytest.approx(loss, rel=1e-5)


class Tied(nn.Module):
    """Two layers that share one weight, and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


def test_tied_weights_are_one_piece_of_the_row_with_the_gradient_of_both_uses():
    made = problem(2, sites=sites(2, sizes=(9, 9)), model=Tied, sampling=fm.Sampling(order="full"))
    assert made.flat_model.dim == FEATURES * FEATURES + 2 * FEATURES + FEATURES * CLASSES + CLASSES
    _, oracle = on_stack(made, fm.Ring())
    row = oracle.initial_models()[0, 0]
    _, gradients = oracle.losses_and_gradients(oracle.initial_models(), at(0), 0)
    module = Tied().double()
    names = made.flat_model.parameters_of(row)
    module.load_state_dict(names | {"second.weight": names["first.weight"]})
    F.cross_entropy(module(made.sites[1].train.inputs), made.sites[1].train.targets).backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    assert torch.allclose(gradients[0, 1], expected, rtol=0, atol=1e-13)


def test_tied_weights_are_exported_under_both_names():
    result = fm.train(problem(3, model=Tied), fm.Ring(), ALGORITHM, 5, measure_every=5)
    exported = result.state_dict()
    assert torch.equal(exported["first.weight"], exported["second.weight"])
    module = Tied()
    module.load_state_dict(exported, strict=True)
    site = result.problem.sites[2]
    accuracy = float((module(site.test.inputs.float()).argmax(dim=1) == site.test.targets).double().mean())
    assert result.final[0]["accuracy"]["sites"][2] == accuracy


def with_dropout(p: float = 0.4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(p), nn.Linear(16, CLASSES))


def test_run_with_dropout_is_repeated_bit_for_bit_whatever_torchs_generator():
    runs = []
    for seed in (0, 123):
        torch.manual_seed(seed)
        runs.append(fm.train(problem(3, model=with_dropout), fm.Ring(), ALGORITHM, 5, measure_every=1))
    assert torch.equal(runs[0].row(), runs[1].row())
    assert runs[0].records == runs[1].records
    without = fm.train(problem(3, model=lambda: with_dropout(0.0)), fm.Ring(), ALGORITHM, 5, measure_every=1)
    assert not torch.equal(without.row(), runs[0].row())
    assert without.records[0]["loss"] == runs[0].records[0]["loss"]  # off in evaluation


class Masks(nn.Module):
    """Passes on what a dropout layer makes of ones; a parameter for form's sake."""

    def __init__(self, dropout: nn.Module, uses: int = 1):
        super().__init__()
        self.dropout, self.uses, self.weight = dropout, uses, nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return torch.cat([self.dropout(torch.ones_like(inputs)) for _ in range(self.uses)], dim=1) * self.weight


def masks(dropout: nn.Module, shape: tuple[int, ...], keys: list[int], uses: int = 1) -> torch.Tensor:
    made = fm.Problem(
        Masks(dropout, uses),
        [(torch.ones(2, *shape[1:]), torch.zeros(2))],
        loss=lambda outputs, targets: outputs.mean() + 0 * targets.mean(),
    ).prepared
    call = torch.func.vmap(made.flat_model, in_dims=(None, None, 0))
    return call(made.initial_row(0).float(), torch.ones(shape), torch.tensor(keys)).detach()


def test_dropout_keeps_the_mean_and_drops_the_stated_share():
    kept = masks(nn.Dropout(0.3), (100, 200), [11])[0]
    assert set(kept.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.7)}
    assert float((kept == 0).float().mean()) == pytest.approx(0.3, abs=0.015)
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.02)
    assert torch.count_nonzero(masks(nn.Dropout(1.0), (4, 5), [1])) == 0
    for axis in (0, 1):  # no row or column is favoured: 6 standard deviations of a share
        assert float(((kept == 0).float().mean(dim=axis) - 0.3).abs().max()) < 6 * (0.21 / kept.shape[axis]) ** 0.5


def test_dropout_differs_between_streams_layers_and_uses_of_one_layer():
    a, b = masks(nn.Dropout(0.5), (20, 50), [1, 2])
    assert float((a == b).float().mean()) == pytest.approx(0.5, abs=0.1)
    first, again = masks(nn.Dropout(0.5), (20, 50), [1], uses=2)[0].split(50, dim=1)
    assert float((first == again).float().mean()) == pytest.approx(0.5, abs=0.1)
    layer = nn.Dropout(0.5)
    for layers in (nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), nn.Sequential(layer, layer)):
        twice = masks(layers, (20, 50), [1])[0]
        assert float((twice > 0).float().mean()) == pytest.approx(0.25, abs=0.06)
        assert torch.equal(twice, masks(layers, (20, 50), [1])[0])


def test_dropout_differs_between_nodes_and_rounds_and_is_the_same_for_the_same_round():
    made = problem(3, sites=[sites(1)[0]] * 3, model=with_dropout, sampling=fm.Sampling(order="full"))
    _, oracle = on_stack(made, fm.Ring())
    models = oracle.initial_models()
    first, again, later = (oracle.losses_and_gradients(models, at(t), 0)[0].flatten() for t in (0, 0, 1))
    assert torch.equal(first, again)
    assert len(set(first.tolist())) == 3
    assert not bool((first == later).any())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Dropout1d(0.5), (8, 16, 5)), (nn.Dropout2d(0.5), (8, 16, 5, 4)), (nn.Dropout3d(0.5), (8, 16, 2, 3, 4))],
)
def test_channel_dropout_drops_whole_channels_of_single_samples(layer, shape):
    kept = masks(layer, shape, [5])[0].flatten(2)
    assert torch.equal(kept, kept[..., :1].expand_as(kept))
    assert float((kept[..., 0] == 0).float().mean()) == pytest.approx(0.5, abs=0.15)
    assert not torch.equal(kept[0], kept[1])


def shifted(batch, draw):
    """Adds the same drawn number to all features of a sample."""
    return batch + 0.1 * draw(len(batch), 1)


@pytest.mark.slow
def test_augmentation_draws_from_our_streams_so_that_runs_repeat():
    runs = []
    for seed in (0, 9):
        torch.manual_seed(seed)
        runs.append(fm.train(problem(3, augment=shifted), fm.Ring(), ALGORITHM, 4, measure_every=2))
    plain = fm.train(problem(3), fm.Ring(), ALGORITHM, 4, measure_every=2)
    assert torch.equal(runs[0].row(), runs[1].row())
    assert not torch.equal(runs[0].row(), plain.row())
    assert runs[0].records[0]["loss"] == plain.records[0]["loss"]  # held-out data is not augmented


def drawn_by(augment, nodes: int = 2, rounds: int = 2) -> torch.Tensor:
    """What an augmentation makes of zeros, by way of a loss that returns its mean: (rounds, nodes)."""
    model = nn.Linear(FEATURES, 1, bias=False)
    nn.init.constant_(model.weight, 1.0 / FEATURES)
    made = fm.Problem(
        model,
        [(torch.zeros(50, FEATURES), torch.zeros(50))] * nodes,
        loss=lambda outputs, targets: outputs.mean() + 0 * targets.mean(),
        sampling=fm.Sampling(order="full"),
        augment=augment,
    )
    _, oracle = on_stack(made, fm.Ring())
    models = oracle.initial_models()
    return torch.stack([oracle.losses(models, at(t), 0).flatten() for t in range(rounds)])


def test_augmentation_draws_independent_uniforms_that_differ_between_nodes_and_rounds():
    means = drawn_by(lambda batch, draw: draw(*batch.shape), nodes=3, rounds=3)
    assert len(set(means.flatten().tolist())) == 9
    assert float((means - 0.5).abs().max()) < 6 * (1 / 12 / 300) ** 0.5
    products = drawn_by(lambda batch, draw: (draw(*batch.shape) - 0.5) * (draw(*batch.shape) - 0.5), 3, 3)
    assert float(products.abs().max()) < 6 * (1 / 144 / 300) ** 0.5  # with the same draws twice it would be 1 / 12


def test_row_and_its_parameters_are_two_views_of_the_same_numbers():
    made = problem(2)
    row = torch.arange(made.flat_model.dim).double()
    pieces = made.flat_model.parameters_of(row)
    assert torch.equal(torch.cat([piece.flatten() for piece in pieces.values()]), row)
    module = made.initial.model()
    module.load_state_dict(made.flat_model.state_dict(row))
    assert torch.equal(made.flat_model.row_of(module), row.float())
