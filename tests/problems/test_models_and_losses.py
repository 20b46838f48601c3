"""Models and losses that cannot be trained node by node are refused when the problem is made, with the reason."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fairmesh as fm
from tests import toys
from tests.problems.test_problem_data import GOOD, INPUTS, LABELS, problem_refused
from tests.toys import CLASSES, FEATURES

SITES = [fm.Site(GOOD), fm.Site(GOOD)]
IMAGES = [fm.Site((torch.linspace(-1, 1, 12 * 2 * 16).reshape(12, 2, 4, 4), LABELS))]


def image_model_with(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), layer, nn.Flatten(), nn.Linear(16, CLASSES))


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


def drawing(draw) -> nn.Module:
    """A linear model that draws random numbers of its own."""
    return toys.module(lambda self, inputs: self.layer(draw(inputs)), layer=nn.Linear(FEATURES, CLASSES))


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
        {"model": drawing(lambda x: x + torch.poisson(torch.ones_like(x)))},
    ),
    "random": (("generator", "Python", "torch.rand"), {"model": drawing(lambda x: x * random.random())}),
    "numpy": (("generator", "numpy", "torch.rand"), {"model": drawing(lambda x: x * np.random.rand())}),  # noqa: NPY002
    "own generator": (
        ("torch.rand", "generator="),
        {"model": lambda: drawing(lambda x: x + torch.rand(FEATURES, generator=GENERATOR))},
    ),
    "augment by Python's generator": (("augment", "draw(*shape)"), {"augment": lambda x, draw: x + random.random()}),
}


@pytest.mark.parametrize(("words", "fields"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:Using a target size")  # a user sees a warning at most
def test_unfit_model_or_loss_is_refused_with_what_to_use(words, fields):
    problem_refused(*words, **{"sites": SITES} | fields)


@pytest.mark.parametrize("labels", [torch.arange(9).reshape(3, 3) // 3, torch.arange(9).repeat(3, 1) % 3])
@pytest.mark.parametrize("initial", [nn.init.normal_, nn.init.zeros_])
@pytest.mark.quick_cases("all")
def test_loss_with_class_weights_is_refused_whatever_labels_a_site_holds_and_outputs_start_at(labels, initial):
    model, weights = nn.Linear(FEATURES, CLASSES), torch.tensor([1.0, 5.0, 9.0])
    list(map(initial, model.parameters()))
    sites = [fm.Site((torch.randn(len(one), FEATURES), one)) for one in labels]
    problem_refused("loss", "reduction='mean'", model=model, sites=sites, loss=nn.CrossEntropyLoss(weight=weights))


def batch_dice(outputs, targets):
    chances = outputs.sigmoid()
    return 1 - 2 * (chances * targets).sum() / (chances.sum() + targets.sum())


def tokens_model() -> nn.Module:
    """A language model whose outputs start about equal, as usual initialisations make them."""
    embed = nn.Embedding(20, 8)
    nn.init.normal_(embed.weight, std=0.02)
    return toys.module(lambda self, x: self.head(self.embed(x)).transpose(1, 2), embed=embed, head=nn.Linear(8, 20))


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
    problem_refused("mean", "padding", model=tokens_model(), sites=texts, loss=nn.CrossEntropyLoss(ignore_index=-100))
