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


def test_batch_norm_in_training_mode_is_refused_by_layer_with_what_to_use():
    problem_refused(
        "layer 1 (BatchNorm1d)",
        "GroupNorm",
        ".eval()",
        model=model_with(nn.BatchNorm1d(4)),
        sites=SITES,
    )


def test_batch_norm_is_refused_without_blaming_the_inputs():
    with refused("layer 1") as caught:
        fm.Problem(model=model_with(nn.BatchNorm1d(4)), sites=SITES)
    assert "inputs" not in str(caught.value)


def test_batch_norm_without_running_statistics_is_refused_even_in_eval_mode():
    layer = nn.BatchNorm1d(4, track_running_stats=False).eval()
    problem_refused("BatchNorm1d", model=model_with(layer), sites=SITES)


def test_frozen_batch_norm_in_eval_mode_is_allowed():
    layer = nn.BatchNorm1d(4).eval().requires_grad_(False)
    assert fm.Problem(model=model_with(layer), sites=SITES).flat_model.dim == 6 * 4 + 4 + 4 * 3 + 3


def test_instance_norm_with_running_statistics_is_refused():
    layer = nn.InstanceNorm2d(4, track_running_stats=True)
    problem_refused("layer 1 (InstanceNorm2d)", model=image_model_with(layer), sites=IMAGES)


@pytest.mark.parametrize("layer", [nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4), nn.LayerNorm((4, 2, 2))])
def test_norm_layers_of_single_samples_are_allowed_and_train(layer):
    made = fm.Problem(model=image_model_with(layer), sites=IMAGES).prepared
    before = made.initial_row(0)
    after = fm.train(made, fm.Ring(), fm.algorithms.DSGD(primal_step=0.1), 2).row()[0]
    norm = made.flat_model.parameters_of(after - before)["1.weight"]
    assert norm.abs().max() > 0


def test_lazy_module_is_refused_by_parameter():
    problem_refused("0.weight", model=nn.Sequential(nn.LazyLinear(3)), sites=SITES)


def test_model_without_a_trainable_parameter_is_refused():
    problem_refused("requires_grad", model=nn.Linear(6, 3).requires_grad_(False), sites=SITES)


def test_model_that_does_not_accept_the_inputs_is_refused_with_their_shape():
    problem_refused("(6,)", model=nn.Linear(5, 3), sites=SITES)


def test_loss_per_sample_is_refused_with_its_shape():
    problem_refused(
        "scalar",
        "(4,)",
        "reduction='mean'",
        sites=SITES,
        loss=nn.CrossEntropyLoss(reduction="none"),
    )


@pytest.mark.parametrize("count", [1, 12])
def test_loss_that_sums_is_refused_whatever_the_size_of_the_first_site(count):
    train = [fm.Site((INPUTS[:count], LABELS[:count]))]
    problem_refused("reduction='mean'", sites=train, loss=nn.CrossEntropyLoss(reduction="sum"))


@pytest.mark.filterwarnings("ignore:Using a target size")  # a user sees a warning at most
def test_targets_that_broadcast_against_the_outputs_are_refused_with_both_shapes():
    train = [fm.Site((INPUTS, torch.linspace(-1, 1, 12)))]
    problem_refused(
        "torch.Size([2])",
        "torch.Size([2, 1])",
        sites=train,
        model=nn.Linear(6, 1),
        loss=F.mse_loss,
    )


@pytest.mark.parametrize("kind", [KeyError, RuntimeError, AssertionError, ZeroDivisionError])
def test_loss_that_raises_is_refused_with_what_it_said(kind):
    def loss(outputs, targets):
        raise kind("no such instrument")

    problem_refused(kind.__name__, "no such instrument", sites=SITES, loss=loss)


def test_loss_that_returns_no_tensor_is_refused():
    problem_refused("loss", "float", sites=SITES, loss=lambda outputs, targets: 1.0)


def test_loss_that_is_not_finite_before_training_is_refused():
    problem_refused("loss", "inf", sites=SITES, loss=lambda outputs, targets: -(outputs * 0).sum().log())


class Drawing(nn.Module):
    """A linear model that draws random numbers of its own."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(FEATURES, CLASSES), draw

    def forward(self, inputs):
        return self.layer(self.draw(inputs))


@pytest.mark.parametrize(
    ("draw", "whose"),
    [
        (lambda inputs: inputs + torch.poisson(torch.ones_like(inputs)), "torch"),
        (lambda inputs: inputs * random.random(), "Python"),
        (lambda inputs: inputs * np.random.rand(), "numpy"),  # noqa: NPY002
    ],
    ids=["torch.poisson", "random", "numpy"],
)
def test_model_that_draws_what_no_stream_replaces_is_refused(draw, whose):
    problem_refused("generator", whose, "torch.rand", model=Drawing(draw), sites=SITES)


def test_model_with_a_generator_of_its_own_is_refused():
    generator = torch.Generator()
    model = Drawing(lambda inputs: inputs + torch.rand(FEATURES, generator=generator))
    problem_refused("torch.rand", "generator=", model=model, sites=SITES)


def test_augmentation_that_draws_from_pythons_generator_is_refused():
    problem_refused(
        "augment",
        "draw(*shape)",
        sites=SITES,
        augment=lambda batch, draw: batch + random.random(),
    )


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


def test_digest_tells_modules_apart_that_look_alike_and_compute_other_things():
    def network(forward) -> nn.Module:
        return type("Net", (nn.Linear,), {"forward": forward})(FEATURES, CLASSES)

    digests = []
    for forward in (lambda self, x: F.linear(x, self.weight), lambda self, x: F.linear(x, self.weight, self.bias)):
        torch.manual_seed(0)
        digests.append(fm.Problem(network(forward), SITES).prepared.digest())
    assert len(set(digests)) == 2
