"""Models and losses that cannot be trained node by node are refused when the problem is made, with the reason."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fairmesh as fm
from tests.problems.test_problem_data import GOOD, INPUTS, LABELS, problem_refused
from tests.refusals import refused
from tests.toys import CLASSES, FEATURES

SITES = [fm.Site(GOOD), fm.Site(GOOD)]
IMAGES = [fm.Site((torch.linspace(-1, 1, 12 * 2 * 16).reshape(12, 2, 4, 4), LABELS))]


def model_with(layer: nn.Module, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, width), layer, nn.Linear(width, CLASSES))


def image_model_with(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), layer, nn.Flatten(), nn.Linear(16, CLASSES))


def test_batch_norm_is_refused_without_blaming_the_inputs():
    with refused("layer 1 (BatchNorm1d)", "GroupNorm", ".eval()") as caught:
        fm.Problem(model=model_with(nn.BatchNorm1d(4)), sites=SITES)
    assert "inputs" not in str(caught.value)


def test_frozen_batch_norm_in_eval_mode_is_allowed():
    layer = nn.BatchNorm1d(4).eval().requires_grad_(False)
    assert fm.Problem(model=model_with(layer), sites=SITES).flat_model.dim == 6 * 4 + 4 + 4 * 3 + 3


@pytest.mark.parametrize("layer", [nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4), nn.LayerNorm((4, 2, 2))])
def test_norm_layers_of_single_samples_are_allowed_and_train(layer):
    made = fm.Problem(model=image_model_with(layer), sites=IMAGES).prepared
    before = made.initial_row(0)
    after = fm.train(made, fm.Ring(), fm.algorithms.DSGD(primal_step=0.1), 2).row()[0]
    norm = made.flat_model.parameters_of(after - before)["1.weight"]
    assert norm.abs().max() > 0


@pytest.mark.parametrize("kind", [KeyError, RuntimeError, AssertionError, ZeroDivisionError])
def test_loss_that_raises_is_refused_with_what_it_said(kind):
    def loss(outputs, targets):
        raise kind("no such instrument")

    problem_refused(kind.__name__, "no such instrument", sites=SITES, loss=loss)


class Drawing(nn.Module):
    """A linear model that draws random numbers of its own."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(FEATURES, CLASSES), draw

    def forward(self, inputs):
        return self.layer(self.draw(inputs))


GENERATOR = torch.Generator()
PER_SAMPLE, SUM = nn.CrossEntropyLoss(reduction="none"), nn.CrossEntropyLoss(reduction="sum")
NUMBERS = [fm.Site((INPUTS, torch.linspace(-1, 1, 12)))]
REFUSED = {
    "InstanceNorm with statistics": (
        ("layer 1 (InstanceNorm2d)",),
        {"model": image_model_with(nn.InstanceNorm2d(4, track_running_stats=True)), "sites": IMAGES},
    ),
    "lazy module": (("0.weight",), {"model": nn.Sequential(nn.LazyLinear(3))}),
    "nothing to train": (("requires_grad",), {"model": nn.Linear(6, 3).requires_grad_(False)}),
    "other inputs": (("(6,)",), {"model": nn.Linear(5, 3)}),
    "loss per sample": (("scalar", "(4,)", "reduction='mean'"), {"loss": PER_SAMPLE}),
    "sum of 1": (("reduction='mean'",), {"sites": [fm.Site((INPUTS[:1], LABELS[:1]))], "loss": SUM}),
    "sum of 12": (("reduction='mean'",), {"sites": [fm.Site((INPUTS, LABELS))], "loss": SUM}),
    "targets that broadcast": (
        ("torch.Size([2])", "torch.Size([2, 1])"),
        {"sites": NUMBERS, "model": nn.Linear(6, 1), "loss": F.mse_loss},
    ),
    "loss without a tensor": (("loss", "float"), {"loss": lambda outputs, targets: 1.0}),
    "infinite loss": (("loss", "inf"), {"loss": lambda outputs, targets: -(outputs * 0).sum().log()}),
    "torch.poisson": (
        ("generator", "torch", "torch.rand"),
        {"model": Drawing(lambda inputs: inputs + torch.poisson(torch.ones_like(inputs)))},
    ),
    "random": (("generator", "Python", "torch.rand"), {"model": Drawing(lambda inputs: inputs * random.random())}),
    "numpy": (
        ("generator", "numpy", "torch.rand"),
        {"model": Drawing(lambda inputs: inputs * np.random.rand())},  # noqa: NPY002
    ),
    "own generator": (
        ("torch.rand", "generator="),
        {"model": lambda: Drawing(lambda inputs: inputs + torch.rand(FEATURES, generator=GENERATOR))},
    ),
    "augment by Python's generator": (
        ("augment", "draw(*shape)"),
        {"augment": lambda batch, draw: batch + random.random()},
    ),
}


@pytest.mark.parametrize(("words", "fields"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:Using a target size")  # a user sees a warning at most
def test_unfit_model_or_loss_is_refused_with_what_to_use(words, fields):
    problem_refused(*words, **{"sites": SITES} | fields)


def test_loss_with_class_weights_is_refused_also_where_site_0_holds_one_class():
    sites = [fm.Site((torch.randn(5, FEATURES), torch.full((5,), c))) for c in range(CLASSES)]
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 9.0]))
    with refused("loss", "reduction='mean'"):
        fm.Problem(nn.Linear(FEATURES, CLASSES), sites, loss=weighted)


def test_loss_with_class_weights_is_refused_though_the_last_layer_starts_at_zero():
    model = nn.Linear(FEATURES, CLASSES)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    sites = [fm.Site((torch.randn(9, FEATURES), torch.arange(9) % CLASSES)) for _ in range(2)]
    with refused("loss", "reduction='mean'"):
        fm.Problem(model, sites, loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 9.0])))


def batch_dice(outputs, targets):
    chances = outputs.sigmoid()
    return 1 - 2 * (chances * targets).sum() / (chances.sum() + targets.sum())


class Tokens(nn.Module):
    """A language model whose outputs start about equal, as usual initialisations make them."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, inputs):
        return self.head(self.embed(inputs)).transpose(1, 2)


def padded_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Token sequences, the longest first."""
    inputs, targets = torch.randint(0, 20, (12, 10)), torch.randint(0, 20, (12, 10))
    lengths = torch.randint(3, 11, (12, 1)).sort(dim=0, descending=True).values
    return inputs, targets.masked_fill(torch.arange(10) >= lengths, -100)


@pytest.mark.parametrize("seed", range(20))
def test_loss_that_is_no_mean_over_samples_is_refused_whatever_the_initial_outputs(seed):
    torch.manual_seed(seed)
    masks = [(torch.randn(6, 1, 8, 8), (torch.rand(6, 1, 8, 8) < torch.rand(6, 1, 1, 1)).float()) for _ in range(3)]
    problem_refused("mean", model=nn.Conv2d(1, 1, 3, padding=1), sites=masks, loss=batch_dice)
    texts = [padded_tokens() for _ in range(3)]
    problem_refused("mean", "padding", model=Tokens(), sites=texts, loss=nn.CrossEntropyLoss(ignore_index=-100))
