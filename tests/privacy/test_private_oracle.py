"""The mechanism by its definition: what one unit can change, how units are drawn, and noise that is not used twice."""

import copy
import functools
import itertools
import math
from collections import deque
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import fairmesh as fm
from fairmesh.problems.gradient_path import Link
from fairmesh.problems.unit_gradients import ByLayers, EveryUnit
from tests.privacy.private import NOISELESS, SECRET, oracle_of, private_run, problem, released
from tests.refusals import refused

CLIP, LOSS_CLIP = 0.5, 2.0
SQUARED = fm.losses.SquaredError()
PRIVACY = fm.Privacy(1.0, 1e-3, clip=CLIP, loss_clip=LOSS_CLIP, rows_per_unit=32)


class Overflowing(nn.Module):
    """A model whose outputs overflow for some rows, and are no numbers for others."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * x[:, :1].exp() + (100 - x[:, 1:2]).log()


def _dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _convolved() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))


MODELS = {"dense": _dense, "convolved": _convolved}
LOSSES = {
    "cross-entropy": nn.functional.cross_entropy,
    "smoothed and weighted": fm.losses.CrossEntropy(class_weights=(1.0, 7.0), label_smoothing=0.1),
    "focal": fm.losses.Focal(),
}


def _rows(count: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, 3, generator=generator), torch.randint(0, 2, (count,), generator=generator)


def _site(lengths: list[int], seed: int = 0) -> fm.Site:
    """Returns a site of units with so many rows, in a mixed order. Some units have small gradients, some large ones."""
    x, y = _rows(sum(lengths), seed)
    units = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    x = x * torch.logspace(-2, 1, len(lengths))[units].unsqueeze(-1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return fm.Site((x[order], y[order]), units=None if max(lengths) == 1 else units[order].numpy())


def _by_definition(model: nn.Module, loss, site: fm.Site, row: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums of clipped gradients and of clipped losses minus their centre, unit by unit."""
    model = model.double()
    nn.utils.vector_to_parameters(row.double(), model.parameters())
    loss = loss.on(torch.device("cpu"), torch.float64) if isinstance(loss, fm.losses.NamedLoss) else loss
    x, y = site.train
    units = torch.arange(len(x)) if site.units is None else torch.from_numpy(np.asarray(site.units))
    gradients, losses = torch.zeros_like(row, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for unit in units.unique():
        of_rows = [loss(model(a[None].double()), b[None]) for a, b in zip(x[units == unit], y[units == unit])]
        value = torch.stack(of_rows).mean()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])
        gradients += gradient * min(1.0, CLIP / float(gradient.norm()))
        losses += value.detach().clamp(0, LOSS_CLIP) - LOSS_CLIP / 2
    return gradients, losses


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("lengths", [[1] * 9, [1, 3, 12, 2, 7]], ids=["rows", "units"])
@pytest.mark.parametrize("kind", MODELS)
def test_private_oracle_sums_clipped_gradients_and_losses_of_units(kind, lengths, name):
    sites, loss = [_site(lengths, seed) for seed in (0, 1)], LOSSES[name]
    of = problem(MODELS[kind](), sites, privacy=PRIVACY, loss=loss)
    oracle = oracle_of(of, private_run(of, NOISELESS))
    assert type(oracle._gradients) is (ByLayers if kind == "dense" and max(lengths) == 1 else EveryUnit)
    losses, gradients = released(oracle)
    for k, site in enumerate(sites):
        of_gradients, of_losses = _by_definition(MODELS[kind](), loss, site, oracle.initial_rows[0])
        slack = 2 * CLIP * 2.0**-8 * len(lengths)
        assert torch.allclose(len(lengths) * gradients[k].double(), of_gradients, atol=slack, rtol=0)
        assert float(len(lengths) * (losses[k] - LOSS_CLIP / 2)) == pytest.approx(float(of_losses), abs=slack)


def _of_images() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 2, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2, bias=False), nn.GELU()),
        *(nn.Flatten(), nn.Linear(2, 4), nn.Sigmoid(), nn.Linear(4, 3, bias=False)),
    )


@pytest.mark.parametrize("name", ["cross-entropy", "smoothed", "focal"])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e3, 1e19])
def test_gradients_layer_by_layer_are_those_of_every_unit(scale, name):
    torch.manual_seed(0)
    losses = LOSSES | {"smoothed": fm.losses.CrossEntropy(class_weights=(1.0, 7.0, 2.0), label_smoothing=0.1)}
    x, y = torch.randn(70, 1, 4, 4), torch.randint(0, 3, (70,))
    x[40:] *= scale
    site = fm.Site((x, y))
    of = problem(_of_images(), [site, site], privacy=PRIVACY, loss=losses[name])
    oracle = oracle_of(of, private_run(of, NOISELESS))
    assert type(oracle._gradients) is ByLayers
    by_layers = released(oracle)
    oracle._gradients = EveryUnit(of, oracle.model)
    for some, others in zip(by_layers, released(oracle)):
        assert torch.allclose(some, others, atol=2e-4 * CLIP)
        assert some.isfinite().all()


@pytest.mark.parametrize("kind", ["dense", "convolved"])
def test_layers_that_write_over_what_they_read_have_the_gradients_of_those_that_do_not(kind):
    def model(inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        first = nn.Linear(16, 5) if kind == "dense" else nn.Sequential(nn.Conv2d(1, 3, 2), nn.ELU(inplace=inplace))
        between = () if kind == "dense" else (nn.Flatten(), nn.Linear(27, 5))
        return nn.Sequential(first, *between, nn.ReLU(inplace=inplace), nn.Linear(5, 3))

    torch.manual_seed(1)
    x, y = torch.randn(40, *((16,) if kind == "dense" else (1, 4, 4))), torch.randint(0, 3, (40,))
    found = []
    for inplace in (False, True):
        of = problem(model(inplace), [fm.Site((x, y))] * 2, privacy=PRIVACY)
        oracle = oracle_of(of, private_run(of, NOISELESS))
        assert type(oracle._gradients) is ByLayers
        found.append(released(oracle))
    assert all(torch.equal(some, others) for some, others in zip(*found))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["dense", "convolved", "overflowing"])
@pytest.mark.parametrize("rows", [1, 20])
def test_one_unit_changes_the_sums_by_at_most_the_clips_whatever_its_rows_are(kind, rows, dtype):
    """Without noise, sums with a unit and without it are compared. All units are drawn, so the draws are the same."""
    others, found = _site([1] * 70 if rows == 1 else [2, 1, 3, 5, 1, 1] * 6), []
    model, options = MODELS.get(kind, Overflowing)(), fm.Options(dtype=dtype)
    x, y = others.train
    numbers = np.arange(70) if others.units is None else np.asarray(others.units)

    def sums(site: fm.Site) -> tuple[Tensor, Tensor]:
        of = problem(model, [site, site], privacy=PRIVACY, loss=nn.functional.cross_entropy)
        losses, gradients = released(oracle_of(of, private_run(of, NOISELESS), options=options))
        count = len(of.sites[0].train)
        return count * gradients[0].double(), count * (losses[0].double() - LOSS_CLIP / 2)

    without = sums(replace(others, units=numbers))
    for scale, label in itertools.product((1e-30, 1e-3, 1.0, 50.0, 1e4, 1e19, 3e38), (0, 1)):
        a, _ = _rows(rows, seed=3)
        a = (a.double() * scale).clamp(-3e38, 3e38).float()
        site = fm.Site(
            (torch.cat([x, a]), torch.cat([y, torch.full((rows,), label)])), units=[*numbers, *([99] * rows)]
        )
        with_it = sums(site)
        assert with_it[0].isfinite().all()
        # The differences of what is released are those of sums on the grid, which are exact up to the models' dtype.
        assert float((with_it[0] - without[0]).norm()) <= CLIP + 1e-5
        assert float((with_it[1] - without[1]).abs()) <= LOSS_CLIP / 2 + 1e-5
        found.append(float((with_it[0] - without[0]).norm()))
    assert kind == "overflowing" or max(found) > 0.9 * CLIP


@pytest.mark.parametrize("lengths", [[1] * 8, [40] * 3], ids=["rows", "units of more rows than are looked at"])
def test_rows_of_one_unit_never_change_what_another_one_contributes(lengths):
    """One unit's gradient is no number. The sum is that of the others."""
    x, y = torch.full((sum(lengths), 3), -1.0), torch.ones(sum(lengths), dtype=torch.int64)
    units = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).numpy()
    bad = x.clone()
    bad[units == 1] = 3e38
    sums = []
    for inputs in (x, bad):
        site = fm.Site((inputs, y), units=units)
        of = problem(_dense(), [site, site], privacy=PRIVACY, loss=nn.functional.cross_entropy)
        sums.append(len(lengths) * released(oracle_of(of, private_run(of, NOISELESS)))[1][0].double())
    assert sums[1].isfinite().all()
    assert float((sums[0] - sums[1]).norm()) <= 2 * CLIP
    assert float((sums[1] - (len(lengths) - 1) / len(lengths) * sums[0]).norm()) <= CLIP * 1.001


def _shares(weight: float, bias: float) -> tuple[nn.Module, Tensor]:
    """Returns a model that guesses one half, and parameters at which it does not. Its loss raises beyond 0 and 1."""
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, 0.5)
    return model, torch.tensor([weight, 0.0, 0.0, bias]).expand(1, 2, -1)


def _cross_entropy_of_shares(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy(outputs.squeeze(-1), targets)


@pytest.mark.filterwarnings("ignore:the model or the loss raises RuntimeError")
@pytest.mark.parametrize("rows", [1, 2])
def test_units_on_which_the_users_code_raises_contribute_nothing_and_end_no_run(rows):
    """It did not raise at the initial model. Had a single unit ended the run, its end would tell of the unit."""
    model, models = _shares(1.0, 0.5)
    x, y = torch.linspace(-0.4, 0.4, 12 * rows).unsqueeze(1).repeat(1, 3), torch.ones(12 * rows)
    units, bad = np.arange(12 * rows) // rows, x.clone()
    bad[2 * rows], bad[7 * rows] = 9.0, -9.0
    kept = np.isin(units, (2, 7), invert=True)

    def sums(x: Tensor, y: Tensor, units: np.ndarray) -> Tensor:
        sites = [fm.Site((x, y), units=units)] * 2
        of = problem(model, sites, privacy=PRIVACY, loss=_cross_entropy_of_shares)
        return len(np.unique(units)) * released(oracle_of(of, private_run(of, NOISELESS)), models)[1][0].double()

    assert torch.allclose(sums(bad, y, units), sums(x[kept], y[kept], units[kept]), atol=1e-4)


def test_code_that_raises_on_units_is_told_at_the_site_without_a_word_on_their_rows():
    model, models = _shares(0.0, 2.0)
    sites = [fm.Site((torch.zeros(8, 3), torch.ones(8)))] * 2
    of = problem(model, sites, privacy=PRIVACY, loss=_cross_entropy_of_shares)
    with pytest.warns(UserWarning, match="raises RuntimeError on units of this site, which contribute nothing"):
        losses, gradients = released(oracle_of(of, private_run(of, NOISELESS)), models)
    assert not gradients.any()
    assert losses.tolist() == pytest.approx([LOSS_CLIP] * 2, rel=0.01)


@pytest.mark.parametrize("draws", [False, True], ids=["augmentation", "dropout"])
def test_how_many_rows_one_unit_has_changes_no_other_units_gradient(draws):
    """Rows are repeated up to a fixed number, which augmentation sees, and public draws have the shape of."""

    def centred(inputs, draw):
        return inputs - inputs.mean(0)

    sums, x, y = [], *_rows(60)
    model = nn.Sequential(nn.Dropout(), nn.Linear(3, 2)) if draws else nn.Linear(3, 2)
    for rows in (3, 2):  # of unit 0
        units = [0] * rows + [1 + k // 2 for k in range(40)]
        site = fm.Site((torch.cat([x[:rows], x[10:50]]), torch.cat([y[:rows], y[10:50]])), units=units)
        privacy = replace(PRIVACY, rows_per_unit=8)
        of = problem(copy.deepcopy(model), [site, site], privacy=privacy, augment=None if draws else centred)
        oracle = oracle_of(of, private_run(of, NOISELESS))
        if rows == 3:
            (others,) = torch.where(oracle._units._lengths[:21] == 2)
        models = oracle.initial_models().flatten(0, 1)
        sums.append(oracle._clipped(models, others.expand(2, -1), torch.ones(2, 20, dtype=torch.bool), torch.arange(2)))
    assert float(sums[0].gradients.norm()) > 0
    assert all(torch.equal(before, after) for before, after in zip(*sums))


def test_unit_of_many_rows_contributes_the_mean_over_some_of_them_by_chance():
    """Of 40 rows, 8 in a row are looked at, from a random place. Over many draws every row is."""
    x = torch.cat([torch.eye(40), torch.zeros(40, 40)])  # the second unit has no gradient
    site = fm.Site((x, torch.ones(80)), units=[0] * 40 + [1] * 40)
    privacy = replace(PRIVACY, rows_per_unit=8, clip=100.0)
    of = problem(nn.Linear(40, 1, bias=False), [site, site], privacy=privacy, loss=fm.losses.SquaredError())
    oracle = oracle_of(of, private_run(of, NOISELESS / 100), replicas=100)
    gradients = 2 * released(oracle, torch.zeros(100, 2, 40))[1]
    looked_at = (gradients.abs() > 0.1).long()
    assert looked_at.sum(1).tolist() == [8] * 200
    assert torch.allclose(gradients[looked_at.bool()], torch.tensor(-2 / 8), atol=0.02)
    assert looked_at.sum(0).min() > 15  # of 200 draws; 40 are expected of each row


# Draws of units


def _shown(rate: float, most: int, units: int = 6, replicas: int = 4000) -> Tensor:
    """Returns which units were drawn (draws, units): each one's gradient is a coordinate of its own."""
    site = fm.Site((torch.eye(units), torch.ones(units)))
    of = problem(nn.Linear(units, 1, bias=False), [site, site], privacy=PRIVACY, loss=fm.losses.SquaredError())
    oracle = oracle_of(of, private_run(of, NOISELESS, rate, most), replicas=replicas)
    _, gradients = released(oracle, torch.zeros(replicas, 2, units))
    return (gradients.abs() > 1e-3).long()


def test_every_unit_is_drawn_by_itself_with_the_rate():
    drawn, units, rate = _shown(0.3, 6), 6, 0.3
    assert len(drawn) == 8000
    counts = torch.bincount(drawn.sum(1), minlength=units + 1)
    assert stats.chisquare(counts, 8000 * stats.binom.pmf(np.arange(units + 1), units, rate)).pvalue > 1e-4
    for unit in range(units):
        assert stats.binomtest(int(drawn[:, unit].sum()), 8000, rate).pvalue > 1e-4
    together = [int((drawn[:, a] * drawn[:, b]).sum()) for a, b in itertools.combinations(range(units), 2)]
    assert min(stats.binomtest(count, 8000, rate**2).pvalue for count in together) > 1e-4


def test_draw_that_is_too_large_is_cut_to_a_uniformly_random_subset():
    drawn, units, rate, most = _shown(0.6, 2), 6, 0.6, 2
    sizes = torch.bincount(drawn.sum(1), minlength=most + 1)
    chances = stats.binom.pmf(np.arange(most), units, rate)
    assert stats.chisquare(sizes, 8000 * np.append(chances, 1 - chances.sum())).pvalue > 1e-4
    full = drawn[drawn.sum(1) == most]
    pairs = [int((full[:, a] * full[:, b]).sum()) for a, b in itertools.combinations(range(units), 2)]
    assert stats.chisquare(pairs).pvalue > 1e-4


def test_sites_of_several_sizes_draw_only_units_of_their_own():
    sites = [fm.Site((torch.eye(9)[a:b], torch.ones(b - a))) for a, b in ((0, 2), (2, 9))]
    of = problem(nn.Linear(9, 1, bias=False), sites, privacy=PRIVACY, loss=fm.losses.SquaredError())
    oracle = oracle_of(of, private_run(of, NOISELESS, 0.5), replicas=500)
    _, gradients = released(oracle, torch.zeros(500, 2, 9))
    drawn = (gradients.abs() > 1e-3).view(500, 2, 9).float()
    assert drawn[:, 0, 2:].sum() == drawn[:, 1, :2].sum() == 0
    assert drawn[:, 0, :2].mean() == pytest.approx(0.5, abs=0.1)
    assert drawn[:, 1, 2:].mean() == pytest.approx(0.5, abs=0.05)


def test_draws_are_cut_at_each_site_by_what_was_accounted_for_there():
    site = fm.Site((torch.eye(6), torch.ones(6)))
    of = problem(nn.Linear(6, 1, bias=False), [site, site], privacy=PRIVACY, loss=SQUARED)
    run = private_run(of, NOISELESS)
    run = replace(run, releases=(run.releases[0]._replace(most=2), run.releases[1]._replace(most=5)))
    _, gradients = released(oracle_of(of, run, replicas=10), torch.zeros(10, 2, 6))
    assert (gradients.abs() > 1e-3).sum(1).tolist() == [2, 5] * 10


# Noise


def _tall(
    noise: float = 1.0,
    replicas: int = 1,
    value: float = 1.0,
    seed: int = 0,
    loss=SQUARED,
    augment=None,
    model=None,
    **decisions,
):
    site = fm.Site((torch.full((4, 50), value), torch.ones(4)))
    torch.manual_seed(0)
    model = model or nn.Linear(50, 1, bias=False)
    of = problem(model, [site, site], privacy=PRIVACY, loss=loss, augment=augment)
    return oracle_of(of, private_run(of, noise, **decisions), replicas=replicas, seed=seed)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_noise_of_gradient_and_loss_has_the_deviation_that_was_accounted_for(share):
    noise, replicas = 0.05, 2000  # so little that no loss falls below zero, where it would be released as zero
    quiet, loud = (_tall(one, replicas, loss_share=share) for one in (NOISELESS, noise))
    models = torch.zeros(replicas, 2, 50)
    (losses, gradients), (noised_losses, noised) = released(quiet, models), released(loud, models)
    of_gradients = 4 * (noised - gradients) / (CLIP * noise / math.sqrt(1 - share))
    of_losses = 4 * (noised_losses - losses) / (LOSS_CLIP / 2 * noise / math.sqrt(share))
    for noises, off in ((of_gradients.flatten(), 0.01), (of_losses, 0.05)):
        assert stats.kstest(noises.numpy(), "norm").pvalue > 1e-4
        assert float(noises.std()) == pytest.approx(1, abs=off)
    assert abs(float(torch.corrcoef(torch.stack([of_gradients[:, 0], of_losses]))[0, 1])) < 0.06


def test_losses_cost_no_noise_where_the_algorithm_does_not_use_them():
    losses, gradients = released(_tall(2.0, 100, loss_share=0.0))
    assert losses.unique().tolist() == [LOSS_CLIP / 2]  # the centre, which tells nothing
    assert float((4 * gradients / CLIP).std()) == pytest.approx(2.0, rel=0.02)


def test_noise_lies_on_the_grid_of_the_sums():
    """Last bits of a sum of floats would show which numbers were added."""
    oracle = _tall(1.0)
    losses, gradients = released(oracle)
    grid, loss_grid = oracle._mechanism._grid, oracle._mechanism._loss_grid
    assert math.log2(grid).is_integer()
    assert grid * math.sqrt(50) <= CLIP * 2.0**-10
    for values, step in ((4 * gradients.double() / grid, 1e-3), (4 * losses.double() / loss_grid, 1e-3)):
        assert float((values - values.round()).abs().max()) < step


def test_same_round_call_and_model_repeat_the_bits():
    first, second = (released(_tall(), torch.zeros(1, 2, 50), round=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def _mirrored(inputs, draw):
    return inputs.flip(-1)


def _fresh(name: str) -> Tensor:
    """Returns the noise of a release that differs in one thing from the first: the gradients are all the same."""
    models = torch.zeros(1, 2, 50)
    if name == "another round":
        return released(_tall(), models, round=1)[1]
    if name == "another call":  # of two that no setting tells apart
        first, second = (released(_tall(calls=2), models, call=call)[1] for call in (0, 1))
        return torch.stack([first[0], second[0]])
    if name == "another model":
        models[..., 0] = 1e-30
        return released(_tall(), models)[1]
    if name == "another secret":
        return released(_tall(secrets=(bytes(32),)), models)[1]
    if name == "another generation":
        return released(_tall(generation=1), models)[1]
    if name == "other rows":
        return released(_tall(value=2.0), models)[1]
    if name == "other noise":
        return released(_tall(1.0 + 1e-6), models)[1]
    if name == "another loss share":
        return released(_tall(loss_share=0.4), models)[1]
    if name == "another seed":
        return released(_tall(seed=1), models)[1]
    if name == "another loss":
        return released(_tall(loss=fm.losses.Huber(delta=100.0)), models)[1]
    if name == "augmented rows":
        return released(_tall(augment=_mirrored), models)[1]
    if name == "two calls":
        return released(_tall(calls=2), models)[1]
    return released(_tall(replicas=2), models.expand(2, -1, -1).clone())[1][2:]  # another replica


@pytest.mark.parametrize(
    "name",
    [
        *("another round", "another call", "another model", "another secret", "another generation", "other rows"),
        *("other noise", "another loss share", "two calls", "another replica"),
        *("another seed", "another loss", "augmented rows"),
    ],
)
@pytest.mark.quick_cases("all")
def test_noise_is_fresh_for(name):
    """Two releases with the same noise would differ by no noise at all."""
    noise = [
        (gradients - gradients.mean()) for gradients in (released(_tall(), torch.zeros(1, 2, 50))[1], _fresh(name))
    ]
    every = torch.cat(noise)  # two sites of each
    correlations = torch.corrcoef(every) - torch.eye(4)
    assert float(correlations.abs().max()) < 0.6  # of 50 numbers: four standard deviations


class Scaled:
    """A loss with a number that its code does not show."""

    def __init__(self, weight: float):
        self._weight = {"all": [weight]}

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._weight["all"][0] * nn.functional.mse_loss(outputs.squeeze(-1), targets)


class Shifted(nn.Module):
    """A model with such a number."""

    def __init__(self, shift: float):
        super().__init__()
        self.layer, self._shift = nn.Linear(50, 1, bias=False), shift
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self._shift


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number: float):
        self.number = number


class Holding:
    """A loss that holds something."""

    constant = 0.0

    def __init__(self, held, constant: float = 0.0):
        self.held = held
        type(self).constant = constant

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs.squeeze(-1), targets)


def _with_global(number: float):
    globals()["_WEIGHT"] = number
    return _weighed


def _weighed(outputs: Tensor, targets: Tensor) -> Tensor:
    return _WEIGHT * nn.functional.mse_loss(outputs.squeeze(-1), targets)


_WEIGHT = 1.0


def _with_function(number: float):
    globals()["_called"] = _once if number == 1.0 else _more
    return _calling


class _Calling:
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.scaled(outputs).squeeze(-1) * self.factor, targets)


class _Inheriting(_Calling):
    """A loss that inherits what calls a static method and a property."""

    def __init__(self, number: float, of_property: bool = False):
        plain = number == 1.0
        _Calling.scaled = staticmethod(_once if plain or of_property else _more)
        _Calling.factor = property(_one if plain or not of_property else _more_than_one)


def _one(loss: object) -> float:
    return 1.0


def _more_than_one(loss: object) -> float:
    return 1.0 + 1e-6


def _once(outputs: Tensor) -> Tensor:
    return outputs


def _more(outputs: Tensor) -> Tensor:
    return (1.0 + 1e-6) * outputs


def _calling(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(_called(outputs).squeeze(-1), targets)


_called = None


def _hooked(number: float, own=()) -> nn.Module:
    model = nn.Linear(50, 1, bias=False)
    nn.init.zeros_(model.weight)
    model.register_forward_hook(functools.partial(_times_output, by=number))
    model.hooks = own
    return model


def _times_output(module, inputs, output, by):
    return by * output


HOLDS = {
    "a loss": lambda number: {"loss": Scaled(number)},
    "a method": lambda number: {"loss": Scaled(number).__call__},
    "a model": lambda number: {"model": Shifted(number)},
    "an array": lambda number: {"loss": Holding(np.float64(number))},
    "settings": lambda number: {"loss": Holding(SimpleNamespace(weight=deque([number])))},
    "a slot": lambda number: {"loss": Holding(Slotted(number))},
    "a class": lambda number: {"loss": Holding(None, number)},
    "a global": lambda number: {"loss": _with_global(number)},
    "a function that it calls": lambda number: {"loss": _with_function(number)},
    "a method of a class": lambda number: {"loss": _Inheriting(number)},
    "a property": lambda number: {"loss": _Inheriting(number, of_property=True)},
    "a list called hooks": lambda number: {"model": _hooked(1.0, [number])},
    "a hook": lambda number: {"model": _hooked(number)},
    "an augmentation": lambda number: {"augment": functools.partial(_times, by=torch.tensor(number))},
}


def _times(inputs, draw, by):
    return inputs * by


@pytest.mark.parametrize("name", HOLDS)
@pytest.mark.quick_cases("all")
def test_noise_follows_numbers_that_objects_hold(name):
    """A run that is resumed with another number inside its loss would else have the same noise at another gradient."""
    first, again, other = (released(_tall(**HOLDS[name](number)))[1] for number in (1.0, 1.0, 1.0 + 1e-6))
    assert torch.equal(first, again)
    noise = torch.cat([part - part.mean() for part in (first, other)])
    assert float((torch.corrcoef(noise) - torch.eye(4)).abs().max()) < 0.6


def test_noise_of_a_site_of_its_own_secret_is_not_that_of_a_simulation():
    own = released(_tall(secrets=(SECRET, bytes(32))), torch.zeros(1, 2, 50))[1]
    simulated = released(_tall(), torch.zeros(1, 2, 50))[1]
    assert float((torch.corrcoef(torch.cat([own, simulated])) - torch.eye(4)).abs().max()) < 0.6


# What is refused


def test_second_evaluation_of_a_call_in_a_round_is_refused():
    oracle, models = _tall(), torch.zeros(1, 2, 50)
    released(oracle, models)
    for again in (oracle.losses_and_gradients, oracle.losses):
        with refused("batch 0", "twice"):
            again(models, torch.tensor(0), 0)
    oracle.begin_round()
    oracle.losses(models, torch.tensor(1), 0)
    with refused("batch 0", "twice"):
        oracle.losses_and_gradients(models, torch.tensor(1), 0)


def test_evaluation_that_is_not_counted_is_refused():
    """Rounds times calls are accounted for: none before round 0, and no more than an algorithm has said."""
    oracle, models = _tall(calls=2), torch.zeros(1, 2, 50)
    for evaluate in (oracle.losses_and_gradients, oracle.losses):
        with refused("before round 0"):
            evaluate(models, torch.tensor(0), 0)
    oracle.begin_round()
    for call in (-1, 2):
        with refused(f"batch {call}", "oracle_calls"):
            oracle.losses(models, torch.tensor(0), call)
    oracle.losses(models, torch.tensor(0), 1)


def test_node_that_may_not_release_sends_nothing_of_its_rows():
    asked = []

    def charge(round_index: int, call: int, nonces: Tensor) -> list[bool]:
        asked.append((round_index, call, nonces.shape))
        return [False, True]

    losses, gradients = released(_tall(charge=charge), torch.zeros(1, 2, 50), round=7)
    assert asked == [(7, 0, (2, 3))]
    assert gradients[0].unique().tolist() == [0]
    assert losses[0] == LOSS_CLIP / 2
    assert gradients[1].abs().min() > 0


@pytest.mark.parametrize("name", ["errors", "sample_losses", "sample_gradients", "by_subgroup", "trained"])
def test_other_readings_of_rows_are_refused(name):
    oracle = _tall()
    with refused("private"):
        getattr(oracle, name)(torch.zeros(1, 2, 50), torch.tensor(0), 0)


def test_gradient_path_has_no_gradients_of_single_samples():
    oracle = _tall()
    oracle._path = (_Asking(),)
    with refused("gradients of single samples"):
        released(oracle)


@dataclass(frozen=True)
class _Asking(Link):
    def apply(self, gradients, asked):
        asked.of_samples()


def test_sealed_rows_show_their_number_and_form_and_no_value():
    x, y = _rows(7, seed=1)
    site = fm.Site((x, y, ["a"] * 7), units=[0, 0, 1, 1, 2, 2, 2])
    train = problem(_dense(), [site, site], loss=nn.functional.cross_entropy).sites[0].train
    assert len(train) == 3  # units
    assert (train.inputs.shape, train.targets.shape) == ((3, 3), (3,))
    assert train.units is train.subgroups is train.labels is train.class_counts(2) is None
    assert train.subgroup_names == ()
    for reading in (
        train.known_targets,
        train.some,
        lambda: train.take(torch.arange(2)),
        lambda: train.read(torch.arange(2)),
    ):
        with refused("sealed"):
            reading()
    for part in (train.inputs, train.targets):
        assert part.device.type == "meta"
        for read in (Tensor.tolist, lambda t: float(t.flatten()[0]), lambda t: t.cpu(), lambda t: t.numpy()):
            with pytest.raises((NotImplementedError, RuntimeError, TypeError)):
                read(part)
    assert train.seen.inputs.abs().sum() == train.seen.targets.abs().sum() == 0


# Floating point


def _largest_change(x: Tensor, y: Tensor, clip: float, model: nn.Module, loss) -> float:
    """Returns what the last row changes, in multiples of the clip."""
    sums = []
    for count in (len(x) - 1, len(x)):
        site = fm.Site((x[:count], y[:count]))
        of = problem(model, [site, site], privacy=replace(PRIVACY, clip=clip), loss=loss)
        oracle = oracle_of(of, private_run(of, NOISELESS))
        sums.append(count * released(oracle, torch.zeros(1, 2, oracle.model.dim))[1][0].double())
    return float((sums[1] - sums[0]).norm()) / clip


@pytest.mark.parametrize(
    ("large", "small", "clip"),
    [(9e14, 2e-24, 1e-12), (3e38, 1e-30, 1.5e-6), (1.5e19, 1e-23, 1e-6), (1e-30, 1e8, 1e-30), (3e38, 1e30, 1.0)],
)
@pytest.mark.quick_cases("all")
def test_row_whose_squares_leave_the_range_of_floats_is_clipped(large, small, clip):
    """The gradient is a product of a very large and a very small number, whose squares vanish and overflow."""
    x, y = torch.zeros(70, 1), torch.zeros(70)  # the first rows are tried before round 0
    x[-1], y[-1] = large, small
    assert _largest_change(x, y, clip, nn.Linear(1, 1, bias=False), fm.losses.SquaredError()) <= 1 + 1e-4


class Spread(nn.Module):
    """A model of many parameters, whose gradients are all alike."""

    def __init__(self):
        super().__init__()
        self.all = nn.Parameter(torch.zeros(5_000_000))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.all * 0.875).sum()


def test_gradient_of_millions_of_numbers_is_clipped_by_its_norm():
    """A sum of squares in floats is off by up to 2 % there."""
    change = _largest_change(torch.ones(2, 1), torch.tensor([0.0, 1024.0]), 1.0, Spread(), fm.losses.SquaredError())
    assert 1 - 2.0**-7 <= change <= 1


@pytest.mark.parametrize("dim", [1, 30])
def test_rounding_of_sums_over_many_units_stays_within_the_slack(dim):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, dim, generator=generator) * 0.1 + 1
    change = _largest_change(x, torch.full((4000,), 1e3), 1.0, nn.Linear(dim, 1, bias=False), fm.losses.SquaredError())
    assert 1 - 2.0**-7 <= change <= 1 - 2.0**-9
