"""Parts of a model, and BatchNorm by policy: what is shared, what stays at a site, and what is refused."""

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.problems import notes
from fairmesh.problems.batch_norm import under_policy
from tests.refusals import refused

CLASSES = 3


class Small(nn.Module):
    """A small network with both kinds of BatchNorm layers, one of them used twice in a pass."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.norm(self.stem(inputs)).relu()).relu()
        return self.head(self.last(hidden.mean(dim=(2, 3))))


def sites(count: int = 3, rows: int = 12) -> list[fm.Site]:
    generator = torch.Generator().manual_seed(1)

    def some(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(rows) % CLASSES
        return (1 + i) * torch.randn(rows, 1, 4, 4, generator=generator) + labels[:, None, None, None] + i, labels

    names = ["north", "south", "west", "east"][:count]  # tests/training/test_own_parts.py asks for them
    return [fm.Site(some(i), test=some(i), validation=some(i), name=name) for i, name in enumerate(names)]


def problem(batch: int = 4, order: str = "cyclic", **settings) -> fm.Problem:
    torch.manual_seed(0)
    model = settings.pop("model", None) or Small()
    data = settings.pop("sites", None) or sites()
    return fm.Problem(model, data, sampling=fm.Sampling(batch=batch, order=order), **settings).prepared


@pytest.mark.parametrize(
    ("policy", "parts", "dims"),
    [
        ("frozen", {}, (67, 0, 0)),
        ("local", {}, (51, 16, 32)),
        ("shared", {}, (67, 0, 16)),
        ("convert", {}, (67, 0, 0)),
        ("frozen", {"local": ["head.*"], "frozen": ("stem.*",)}, (16, 15, 15)),
        ("shared", {"frozen": ("norm.*",)}, (59, 0, 8)),  # the statistics of `last` move
    ],
)
def test_parts_and_batch_norm_policy_decide_what_stays_at_a_site(policy, parts, dims):
    made = problem(batch_norm=policy, parts=fm.Parts(**parts)).flat_model
    assert (made.dim, made.local_dim, made.own_dim) == dims


def test_batch_norm_is_refused_with_the_four_policies_by_name_and_without_blaming_the_inputs():
    with refused("layer norm (BatchNorm2d)", "frozen", "local", "shared", "convert", "GroupNorm", ".eval()") as caught:
        problem()
    assert "inputs" not in str(caught.value)
    with refused("batch_norm", "lokal", "local"):
        problem(batch_norm="lokal")


def test_batch_norm_in_evaluation_mode_needs_no_policy_and_is_said_to_be_frozen():
    assert "frozen" in (notes.on_parts(problem(model=Small().eval())) or "")


def test_model_of_the_user_is_not_changed_by_a_policy():
    module = Small()
    problem(model=module, batch_norm="convert", parts=fm.Parts(frozen=("stem.*",)))
    assert isinstance(module.norm, nn.BatchNorm2d)
    assert module.stem.weight.requires_grad


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (24, 12), (10, 5), (7, 1), (512, 32), (1, 1)])
def test_convert_takes_groups_that_divide_the_channels_and_keeps_weights(channels: int, groups: int):
    layer = nn.BatchNorm2d(channels)
    nn.init.normal_(layer.weight)
    made = under_policy(nn.Sequential(layer), "convert")[0]
    assert isinstance(made, nn.GroupNorm)
    assert made.num_groups == groups
    assert torch.equal(made.weight, layer.weight)


def with_norm(**settings) -> nn.Module:
    module = Small()
    module.norm = nn.BatchNorm2d(4, **settings)
    return module


UNEVEN = [*sites(2), fm.Site((torch.randn(5, 1, 4, 4), torch.arange(5) % CLASSES))]
TWICE = {"local": ("head.*",), "frozen": ("head.weight",)}
REFUSED = {  # words of the refusal, parts and other settings
    "no local name": (("parts.local", "haed.*", "head.*"), {"local": ("haed.*",)}, {}),
    "no frozen name": (("parts.frozen", "body"), {"frozen": ("body",)}, {}),
    "local and frozen": (("head.weight", "local", "frozen"), TWICE, {}),
    "nothing shared": (("fm.algorithms.Local()",), {"local": ("stem.*", "head.*")}, {"batch_norm": "local"}),
    "batch of one, local": (("sampling.batch", "2", "local"), {}, {"batch": 1, "batch_norm": "local"}),
    "batch of one, shared": (("sampling.batch", "2", "shared"), {}, {"batch": 1, "batch_norm": "shared"}),
    "padded": (("order", "full", "cyclic"), {}, {"sites": UNEVEN, "order": "full", "batch_norm": "local"}),
    "step": (("step", 0.0), {"step": 0.0}, {}),
    "beta1": (("beta1", 1.0), {"beta1": 1.0}, {}),
    "beta2": (("beta2", -0.1), {"beta2": -0.1}, {}),
    "no statistics": (
        ("norm", "track_running_stats", "convert"),
        {},
        {"model": with_norm(track_running_stats=False), "batch_norm": "local"},
    ),
    "no momentum": (("norm", "momentum"), {}, {"model": with_norm(momentum=None), "batch_norm": "local"}),
}


@pytest.mark.parametrize(("words", "parts", "settings"), REFUSED.values(), ids=REFUSED)
def test_parts_layers_and_batches_that_do_not_fit_are_refused(words, parts, settings):
    with refused(*words):
        problem(**{"batch_norm": "frozen"} | settings, parts=fm.Parts(**parts))


def test_batch_of_one_is_enough_where_nothing_is_normed_over_it():
    problem(batch=1, batch_norm="convert")


def test_digest_knows_parts_and_policy():
    settings = [("local", {}), ("shared", {}), ("shared", {"local": ("head.*",)})]
    settings.append(("shared", {"local": ("head.*",), "step": 0.1}))
    assert len({problem(batch_norm=policy, parts=fm.Parts(**parts)).digest() for policy, parts in settings}) == 4


@pytest.mark.parametrize("parts", [fm.Parts(frozen=("stem.*",)), fm.Parts()])
def test_frozen_values_of_a_model_function_are_the_same_for_every_seed(parts: fm.Parts):
    class Scaled(Small):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs * (1 + self.scale))

    by_function = problem(model=Scaled, parts=parts, batch_norm="frozen")
    first, other = (by_function.initial_model(seed) for seed in (0, 3))
    assert torch.equal(first.scale, other.scale)
    assert torch.equal(first.stem.weight, other.stem.weight) == bool(parts.frozen)
    assert not torch.equal(first.head.weight, other.head.weight)
    by_module = problem(model=other, parts=parts, batch_norm="frozen")  # as nodes of a mesh are given it
    ends = [
        fm.train(one, None, fm.TrackedADGDA(), rounds=2, seeds=[3]).state_dict() for one in (by_function, by_module)
    ]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
