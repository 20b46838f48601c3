"""How many models are evaluated at once changes time and memory, not numbers; what vmap cannot take runs one by one."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fairmesh as fm
from fairmesh.problems import convolutions, notes
from fairmesh.problems.stacking import slower_stacked
from fairmesh.training import train as train_module
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.problems.test_problem_data import problem_refused
from tests.refusals import missing_from, refused
from tests.toys import CLASSES, FEATURES

CPU = torch.device("cpu")


def with_dropout() -> nn.Module:
    def forward(self, inputs):
        return self.head(F.dropout(self.layer(self.first(inputs).tanh()), 0.2, self.training))

    layers = {"first": nn.Linear(FEATURES, 8), "layer": nn.Dropout(0.3), "head": nn.Linear(8, CLASSES)}
    return toys.module(forward, **layers)


def problems(**fields: Any) -> list[fm.Problem]:
    """The same problem, with all models at once, one by one, and in portions that do not divide them."""
    return [toys.problem(4, models_at_once=k, **fields) for k in ("all", 1, 3)]


@pytest.mark.parametrize("sampling", [fm.Sampling(5, batches_per_step=2), fm.Sampling(order="full")], ids=str)
@pytest.mark.quick_cases(2)
def test_losses_errors_and_gradients_agree_however_many_models_are_evaluated_at_once(sampling):
    found = []
    for problem in problems(model=with_dropout, sampling=sampling, augment=lambda batch, draw: batch + draw(1)):
        _, oracle = toys.on_stack(problem, fm.Ring(), seeds=(0, 7), trace=False)
        models = oracle.initial_models() + 0.1 * torch.arange(4).reshape(1, 4, 1)
        now = torch.tensor(3)
        losses, gradients = oracle.losses_and_gradients(models, now, 0)
        found.append([losses, gradients, oracle.losses(models, now, 0), oracle.errors(models, now, 0)])
    for others in found[1:]:
        for one, other in zip(found[0], others):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("objective", [fm.Objective(judged_on="held-out"), fm.Objective(subgroups="within")], ids=str)
@pytest.mark.quick_cases(1)
def test_runs_agree_however_many_models_are_evaluated_at_once(objective):
    sites = [
        fm.Site((*site.train, [f"scanner {k % 2}" for k in range(len(site.train[0]))]), test=site.test)
        for site in toys.sites(4)
    ]
    settings = {"seeds": (0, 5), "placements": 2, "dtype": "float64", "measure_every": 4, "own_models": True}
    first, *others = (
        fm.train(problem, fm.Ring(), fm.TrackedADGDA(0.05), 8, trace="no", **settings)
        for problem in problems(model=with_dropout, sites=sites, objective=objective)
    )
    for run in others:
        torch.testing.assert_close(run.row(), first.row(), rtol=1e-10, atol=1e-12)
        for a, b in zip(run.records, first.records):
            assert a["loss"]["sites"] == pytest.approx(b["loss"]["sites"], rel=1e-10)
            assert a["bytes_total"] == b["bytes_total"]


def recurrent(kind: type[nn.RNNBase] = nn.LSTM) -> nn.Module:
    """Reads the features as a sequence of numbers."""

    def forward(self, inputs):
        return self.head(self.cell(inputs.unsqueeze(-1))[0][:, -1])

    return toys.module(forward, cell=kind(1, 6, batch_first=True), head=nn.Linear(6, CLASSES))


def branching() -> nn.Module:
    """Decides by the values of its inputs what to do."""

    def forward(self, inputs):
        return self.head(inputs) if inputs.mean() > 0 else self.other(inputs)

    return toys.module(forward, head=nn.Linear(FEATURES, CLASSES), other=nn.Linear(FEATURES, CLASSES))


class Checkpointed(nn.Module):
    """Computes its first layers again while gradients are computed."""

    def __init__(self, drop: Any = None, reentrant: bool = False):
        super().__init__()
        self.body, self.drop = nn.Linear(FEATURES, 8), drop or nn.Identity()
        self.head, self.saves, self.reentrant = nn.Linear(8, CLASSES), True, reentrant

    def forward(self, inputs):
        def body(inputs, unused=None):
            return self.drop(self.body(inputs).tanh()).tanh()

        saved = self.saves and torch.is_grad_enabled()
        asks = torch.ones((), requires_grad=True)  # the old form computes gradients only if an argument asks for them
        return self.head(checkpoint(body, inputs, asks, use_reentrant=self.reentrant) if saved else body(inputs))


@pytest.mark.parametrize(
    "model",
    [recurrent, lambda: recurrent(nn.GRU), branching, lambda: Checkpointed(nn.Dropout(0.3))],
    ids=["LSTM", "GRU", "branch on data", "checkpointing"],
)
def test_model_that_vmap_cannot_take_trains_one_by_one_and_says_so(model):
    problem, said = toys.problem(3, model=model), []
    assert problem.at_once(CPU) == 1
    result = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.2), 4, measure_every=1, announce=said.append)
    assert missing_from(said[0], "one after another", "vmap") == []
    assert result.records[-1]["loss"] != result.records[0]["loss"]
    torch.manual_seed(5)
    again = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.2), 4, measure_every=1)
    assert torch.equal(again.row(), result.row())
    for asked in ("all", 2):
        with refused("models_at_once", asked, "vmap"):
            toys.problem(3, model=model, models_at_once=asked)


def test_what_is_special_is_logged_once_if_nobody_listens(caplog):
    train_module._log_once.cache_clear()
    problem = toys.problem(3, model=nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4)), batch_norm="convert")
    for _ in range(2):
        fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.2), 1, trace="no")
    fm.train(toys.problem(3), fm.Ring(), fm.algorithms.DSGD(0.2), 1, trace="no")
    (record,) = caplog.records
    assert (record.name, missing_from(record.message, "convert", "GroupNorm")) == ("fairmesh", [])


def gradients_of(module: nn.Module, **fields: Any) -> torch.Tensor:
    problem = toys.problem(2, model=module, sampling=fm.Sampling(order="full"), **fields)
    _, oracle = toys.on_stack(problem, fm.Ring(), trace=False)
    return oracle.losses_and_gradients(oracle.initial_models() * 1.5, torch.tensor(0), 0)[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_are_those_of_the_same_model_without_checkpointing(reentrant):
    module = Checkpointed(nn.Dropout(0.3), reentrant)
    found = gradients_of(module)
    module.saves = False
    torch.testing.assert_close(found, gradients_of(module), rtol=1e-10, atol=1e-12)


def test_checkpointing_with_draws_that_cannot_be_repeated_is_refused():
    twice = toys.module(lambda self, inputs: self.layer(self.layer(inputs)), layer=nn.Dropout(0.3))
    for drop in (lambda inputs: F.dropout(inputs, 0.3), twice):
        problem_refused("checkpointing", model=Checkpointed(drop), sites=toys.sites(2))


@pytest.mark.parametrize("in_place", [True, False])
def test_model_that_changes_a_buffer_is_refused_by_its_name(in_place):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, inputs):
            if in_place:
                self.seen += 1
            else:
                self.seen = self.seen + 1
            return self.head(inputs)

    problem_refused("buffer", "seen", "training mode", ".eval()", model=Counting(), sites=toys.sites(2))
    problem_refused("buffer", "seen", "evaluation mode", "forward()", model=Counting().eval(), sites=toys.sites(2))


def test_run_one_by_one_is_resumed_bit_for_bit_and_by_another_number_at_once_to_rounding(tmp_path):
    def run(rounds: int, out: str, resume: bool = False, **fields: Any) -> fm.Result:
        problem = toys.problem(3, model=with_dropout, **{"models_at_once": 1} | fields)
        return fm.train(problem, fm.Ring(), fm.ADGDA(0.3), rounds, out=tmp_path / out, resume=resume, trace="no")

    whole = run(6, "whole")
    for out in ("stopped", "changed"):
        run(3, out)
    assert torch.equal(run(6, "stopped", resume=True).row(), whole.row())
    torch.testing.assert_close(run(6, "changed", resume=True, models_at_once="all").row(), whole.row())


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "some", True])
def test_problem_refuses_other_numbers_at_once(wrong):
    problem_refused("models_at_once", wrong, sites=toys.sites(2), models_at_once=wrong)


def norm_net(width: int) -> nn.Module:
    def block() -> list[nn.Module]:
        return [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]

    return nn.Sequential(nn.Conv2d(3, width, 3), *(layer for _ in range(4) for layer in block()))


def test_rule_for_one_by_one_depends_on_the_layers_that_are_trained():
    assert missing_from(slower_stacked(norm_net(256), "cpu"), 4, 256) == []
    frozen = nn.Sequential(norm_net(256).requires_grad_(False), nn.Flatten(), nn.Linear(256 * 4, 2000))
    assert slower_stacked(frozen, "cpu") == ""
    transformer = nn.TransformerEncoder(nn.TransformerEncoderLayer(192, 4, batch_first=True), 4)
    for kind in ("cpu", "cuda"):
        assert slower_stacked(norm_net(64), kind) == slower_stacked(nn.Linear(2000, 2000), kind) == ""
        assert missing_from(slower_stacked(transformer, kind), 8) == []  # norms
    for name in ("Logistic", "PaperCNN"):
        assert slower_stacked(getattr(fm.models, name)().build(torch.Size([3, 32, 32]), 10), "cuda") == ""


@pytest.mark.parametrize(
    ("size", "batch", "frozen", "alone"), [(32, 50, 0, True), (12, 4, 0, False), (32, 50, 4, False)]
)
def test_rule_for_one_by_one_counts_the_products_of_convolutions_on_a_cpu(size, batch, frozen, alone):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(6, 3, size, size, generator=generator)
    sites = [fm.Site((images, torch.arange(6) % 3)) for _ in range(2)]
    model = fm.models.PaperCNN().build(images.shape[1:], 3)
    model[:frozen].requires_grad_(False)
    problem = fm.Problem(model, sites, sampling=fm.Sampling(batch)).prepared
    assert (problem.at_once(CPU) == 1) is alone
    assert problem.at_once(torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("kernel", "padding", "stride", "groups"), [(3, 1, 1, 1), (3, 1, 2, 2), (5, 2, 1, 1), (3, 2, 1, 1)]
)
def test_convolution_of_one_pixel_cut_to_what_meets_it_is_the_same(kernel, padding, stride, groups):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, kernel, stride, padding, groups=groups).double()
    image = torch.randn(2, 4, 1, 1, dtype=torch.float64)

    def gradient(convolve) -> tuple[torch.Tensor, ...]:
        found = convolve(image, layer.weight, layer.bias, stride, padding, groups=groups)
        return torch.autograd.grad(found.square().sum(), list(layer.parameters()))

    plain, cut = gradient(F.conv2d), gradient(functools.partial(convolutions.of_one_pixel, None, F.conv2d))
    for one, other in zip(plain, cut):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_that_an_algorithm_keeps_are_not_overwritten_in_the_next_round():
    problem = toys.problem(3, models_at_once=1)
    replicas = replicas_of([fm.algorithms.DSGD(0.1)], [0], None, 3)
    training = Training(problem, fm.Ring(), replicas, Options())
    models, kept, places = training.initial().algorithm.models, [], []
    for t in range(4):
        _, gradients = training.oracle.losses_and_gradients(models, torch.tensor(t), 0)
        places.append(gradients.data_ptr())
        if t < 2:
            kept.append((gradients[:, :1], gradients[:, :1].clone()))
        del gradients
    assert all(torch.equal(view, copy) for view, copy in kept)
    assert places[2] == places[3]  # nobody holds it
    assert len(set(places[:3])) == 3


def test_module_in_evaluation_mode_trains_without_dropout_and_says_how_to_change_it():
    module, said = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.4), nn.Linear(8, CLASSES)).eval(), []
    problem = toys.problem(2, model=module)
    fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.2), 1, announce=said.append)
    assert missing_from(said[0], "Dropout", "evaluation mode", "model.train()") == []
    with pytest.warns(UserWarning, match="evaluation mode"):
        fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.2), 1)
    assert notes.on_evaluation_mode(toys.problem(2, model=module.train())) is None
    assert notes.on_evaluation_mode(toys.problem(2, model=nn.Linear(FEATURES, CLASSES).eval())) is None
