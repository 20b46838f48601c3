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

    return [
        fm.Site(some(i), test=some(i), validation=some(i), name=["north", "south", "west", "east"][i])
        for i in range(count)
    ]


def problem(batch: int = 4, order: str = "cyclic", **settings) -> fm.Problem:
    torch.manual_seed(0)
    model = settings.pop("model", None) or Small()
    data = settings.pop("sites", None) or sites()
    return fm.Problem(model, data, sampling=fm.Sampling(batch=batch, order=order), **settings).prepared


def test_parts_split_the_parameters_of_a_model():
    made = problem(parts=fm.Parts(local=["head.*"], frozen=("stem.*",)), batch_norm="frozen").flat_model
    assert (made.dim, made.local_dim, made.own_dim) == (16, 15, 15)


@pytest.mark.parametrize(
    ("policy", "shared", "local", "own"),
    [("frozen", 67, 0, 0), ("local", 51, 16, 32), ("shared", 67, 0, 16), ("convert", 67, 0, 0)],
)
def test_batch_norm_policy_decides_what_stays_at_a_site(policy: str, shared: int, local: int, own: int):
    made = problem(batch_norm=policy).flat_model
    assert (made.dim, made.local_dim, made.own_dim) == (shared, local, own)


def test_batch_norm_is_refused_with_the_four_policies_by_name():
    with refused("layer norm (BatchNorm2d)", "frozen", "local", "shared", "convert"):
        problem()
    with refused("batch_norm", "lokal", "local"):
        problem(batch_norm="lokal")


def test_batch_norm_in_evaluation_mode_needs_no_policy_and_is_said_to_be_frozen():
    assert "frozen" in (notes.on_parts(problem(model=Small().eval())) or "")


def test_frozen_parts_keep_the_statistics_of_their_batch_norm_layers():
    made = problem(parts=fm.Parts(frozen=("norm.*",)), batch_norm="shared").flat_model
    assert (made.dim, made.own_dim) == (59, 8)  # those of `last` move


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


UNEVEN = [*sites(2), fm.Site((torch.randn(5, 1, 4, 4), torch.arange(5) % CLASSES))]
REFUSED = {
    "no local name": (("parts.local", "haed.*", "head.*"), {"parts": fm.Parts(local=("haed.*",))}),
    "no frozen name": (("parts.frozen", "body"), {"parts": fm.Parts(frozen=("body",))}),
    "local and frozen": (
        ("head.weight", "local", "frozen"),
        {"parts": fm.Parts(local=("head.*",), frozen=("head.weight",))},
    ),
    "nothing shared": (
        ("fm.algorithms.Local()",),
        {"batch_norm": "local", "parts": fm.Parts(local=("stem.*", "head.*"))},
    ),
    "batch of one, local": (("sampling.batch", "2", "local"), {"batch": 1, "batch_norm": "local"}),
    "batch of one, shared": (("sampling.batch", "2", "shared"), {"batch": 1, "batch_norm": "shared"}),
    "padded batches": (
        ("sampling.order", "full", "cyclic"),
        {"sites": UNEVEN, "order": "full", "batch_norm": "local"},
    ),
}


@pytest.mark.parametrize(("words", "settings"), REFUSED.values(), ids=REFUSED)
def test_parts_and_batches_that_do_not_fit_the_model_are_refused(words, settings):
    with refused(*words):
        problem(**{"batch_norm": "frozen"} | settings)
    problem(batch=1, batch_norm="convert")


@pytest.mark.parametrize(("field", "value"), [("step", 0.0), ("beta1", 1.0), ("beta2", -0.1)])
def test_parts_refuse_numbers_out_of_range(field: str, value: float):
    with refused(f"parts.{field}", value):
        fm.Parts(**{field: value})


def test_layers_that_cannot_follow_a_policy_are_refused():
    for layer, words in (
        (nn.BatchNorm2d(4, track_running_stats=False), ("track_running_stats", "convert")),
        (nn.BatchNorm2d(4, momentum=None), ("momentum",)),
    ):
        module = Small()
        module.norm = layer
        with refused("norm", *words):
            problem(model=module, batch_norm="local")


def test_digest_knows_parts_and_policy():
    digests = {
        problem(batch_norm="local").digest(),
        problem(batch_norm="shared").digest(),
        problem(batch_norm="shared", parts=fm.Parts(local=("head.*",))).digest(),
        problem(batch_norm="shared", parts=fm.Parts(local=("head.*",), step=0.1)).digest(),
    }
    assert len(digests) == 4


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
    ends = [fm.train(one, rounds=2, seeds=[3]).state_dict() for one in (by_function, by_module)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
