"""A frozen prefix: where a model is cut, what the rest reads, and what cannot be kept."""

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.problems.problem import Problem
from tests.refusals import refused

LABELS = torch.arange(12) % 2


def sites(inputs=lambda k: torch.randn(12, 6, generator=torch.Generator().manual_seed(k))):
    return [fm.Site((inputs(k), LABELS)) for k in range(2)]


def problem(model, given=None, backbone="encoder", **fields) -> Problem:
    return fm.Problem(model, sites() if given is None else given, backbone=backbone, **fields)


class Model(nn.Module):
    """An encoder with a head, in which tests change one thing."""

    def __init__(self, encoder=None, numbers=4):
        super().__init__()
        self.encoder = encoder or nn.Sequential(nn.Linear(6, numbers), nn.Tanh())
        self.head = nn.Linear(numbers, 2)

    def forward(self, inputs):
        return self.head(self.encoder(inputs))


class Several(nn.Module):
    """An encoder of two inputs that returns several things, and a rest that reads some of them."""

    def __init__(self):
        super().__init__()
        self.encoder = _TwoInputs()
        self.head = nn.Linear(4, 2)

    def forward(self, ids, mask, unused):
        found = self.encoder(ids + 1, mask)
        assert found["nothing"] is None
        assert found["kind"] == "states"
        states, weights = found["states"], mask.unsqueeze(-1) * found["bytes"].unsqueeze(-1)
        return self.head((states * weights).sum(1) / weights.sum(1))


class _TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, ids, mask):
        states = self.embedding(ids) * mask.unsqueeze(-1)
        return {
            "large": states.repeat(1, 1, 50),
            "states": states,
            "nothing": None,
            "kind": "states",
            "bytes": (1 + ids % 2).to(torch.uint8),
        }


def test_prefix_is_frozen_and_in_evaluation_mode_and_the_given_module_is_left_alone():
    model = Model(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))).train()
    made = problem(model, batch_norm="local")
    assert made.flat_model.dim == 10
    assert made.flat_model.own_dim == 0  # its BatchNorm layer is not the site's
    inside = made.initial_model(0)
    assert not inside.encoder.training
    assert inside.head.training
    assert model.encoder.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_only_outputs_and_inputs_that_the_rest_reads_are_kept():
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 8, (12, 5)), (torch.arange(5) < torch.randint(2, 6, (12, 1))).long()
    data = [fm.Site({"ids": ids, "mask": mask, "unused": torch.randn(12, 3), "label": LABELS})] * 2
    cut = problem(Several(), data).cut
    assert [one.name for one in cut.kept_outputs] == ["output 'states'", "output 'bytes'"]
    assert sorted(cut.constants.values(), key=str) == [None, "states"]
    assert cut.kept == (1,)  # the mask
    assert [dtype for _, dtype in cut.stored_as(torch.bfloat16)] == [torch.bfloat16, torch.int16, torch.int64]


def test_inputs_on_which_a_decision_in_python_depends_are_kept():
    class Deciding(Model):
        def forward(self, inputs):
            outputs = self.head(self.encoder(inputs))
            return outputs if bool(inputs.sum() > 1e9) else -outputs

    assert problem(Deciding()).cut.kept == (0,)


def test_settings_of_the_prefix_can_be_read_by_the_rest():
    class Reading(Model):
        def __init__(self):
            super().__init__()
            self.encoder.width = 4

        def forward(self, inputs):
            return self.head(self.encoder(inputs)) / self.encoder.width

    assert problem(Reading()).cut.kept == ()


class _Twice(Model):
    def forward(self, inputs):
        return self.head(self.encoder(inputs) + self.encoder(-inputs))


class _ByLayer(Model):
    def forward(self, inputs):
        return self.head(self.encoder[0](inputs))


class _AlsoByLayer(Model):
    def forward(self, inputs):
        return self.head(self.encoder(inputs) + self.encoder[0](inputs))


class _TrainedBefore(Model):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)

    def forward(self, inputs):
        return self.head(self.encoder(self.stem(inputs)))


class _Tied(Model):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(6, 6)), 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.encoder[0].weight

    def forward(self, inputs):
        return self.head(self.again(self.encoder(inputs)))


class _NotRead(Model):
    def forward(self, inputs):
        self.encoder(inputs)
        return self.head(inputs[:, :4])


def _encoder(function):
    """Returns an encoder with a function after its linear layer."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, inputs):
            return function(self.linear(inputs))

    return Encoder()


def _half_frozen():
    model = Model()
    model.encoder[0].bias.requires_grad_(False)
    return model


class _KeyCache:
    pass


class _First(Model):
    def forward(self, inputs):
        return self.head(self.encoder(inputs)[0])


class _Transposed(Model):
    def forward(self, inputs):
        return self.head(self.encoder(inputs).T)


REFUSED = {
    "not there": (lambda: Model(), {"backbone": "encode"}, ["'encode'", "'encoder'"]),
    "calls it twice": (_Twice, {}, ["encoder", "2 times"]),
    "never calls it": (_ByLayer, {}, ["encoder", "does not call"]),
    "uses its layers": (_AlsoByLayer, {}, ["encoder", "layers"]),
    "trained before": (_TrainedBefore, {}, ["stem.weight", "parts.frozen"]),
    "tied weights": (_Tied, {}, ["again.weight", "encoder"]),
    "is not read": (_NotRead, {}, ["encoder", "do not depend"]),
    "half of it trained": (_half_frozen, {}, ["encoder.0.weight", "requires_grad_"]),
    "local part": (Model, {"parts": fm.Parts(local=("encoder.*",))}, ["parts.local", "encoder.0"]),
    "random": (lambda: Model(_encoder(lambda x: x + torch.randn_like(x))), {}, ["random", "parts.frozen"]),
    "mixes rows": (lambda: Model(_encoder(lambda x: x - x.mean(0))), {}, ["the output", "batch"]),
    "rows on another axis": (lambda: _Transposed(_encoder(lambda x: x.T)), {}, ["(4, 3)", "3 rows"]),
    "no rows": (lambda: _First(_encoder(lambda x: (x, x.mean()))), {}, ["output 1", "()"]),
    "returns an object": (lambda: _First(_encoder(lambda x: (x, _KeyCache()))), {}, ["_KeyCache", "use_cache"]),
    "NaN": (lambda: Model(_encoder(lambda x: x / 0.0)), {}, ["the output", "finite"]),
    "augmentation": (Model, {"augment": lambda inputs, draw: inputs}, ["augment", "once", '["encoder.*"]']),
    "a trainer": (Model, {"trainer": lambda module, data, ctx: None}, ["trainer", "encoder"]),
    "a loss that calls the model": (
        Model,
        {"loss": fm.losses.ModelLoss(lambda model, batch: model(batch[0]).square().mean(1))},
        ["ModelLoss", "encoder"],
    ),
    "converted norms": (
        lambda: Model(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))),
        {"batch_norm": "convert"},
        ['"convert"', "encoder"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.quick_cases(len(REFUSED))
def test_what_cannot_be_kept_is_refused(case):
    model, fields, names = REFUSED[case]
    with refused("backbone" if "parts" not in fields else "parts", *names):
        problem(model(), **fields)


def test_random_transforms_of_a_dataset_are_refused():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, k):
            return torch.full((6,), float(k)) + torch.rand(6), k % 2

    with refused("random transforms", "encoder", "parts.frozen"):
        problem(Model(), [fm.Site(fm.data.Streamed(Noisy()))] * 2)


def test_parts_may_freeze_what_the_backbone_freezes_and_more():
    class Deeper(Model):
        def __init__(self):
            super().__init__()
            self.middle = nn.Linear(4, 4)

        def forward(self, inputs):
            return self.head(self.middle(self.encoder(inputs)))

    assert problem(Deeper(), parts=fm.Parts(frozen=("encoder.0.bias", "middle.*"))).flat_model.dim == 10


def test_settings_are_checked():
    with refused("batch", 0):
        fm.models.Backbone("encoder", batch=0)
    with refused("dtype", "float16"):
        fm.models.Backbone("encoder", dtype="float16")
    script = torch.jit.script(nn.Sequential(nn.Sequential(nn.Linear(6, 4)), nn.Linear(4, 2)))
    with refused("torch.jit", "'0'"):
        problem(lambda: script, backbone="0")
