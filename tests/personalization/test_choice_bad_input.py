"""What a run without an algorithm answers where little or nothing can be known: a sentence, and the common model."""

import math

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.report.first_sentences import headline_of
from fairmesh.report.runs import Run, personal_table
from fairmesh.training.aside import trained_aside
from tests.refusals import refused


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(
        "fairmesh.personalization.personalize.Choice", lambda: fm.personalization.Choice(steps=8, local_steps=8)
    )


def site(rows: int, name: str, *, test: int = 20, flip: float = 1.0, scale: float = 1.0, units: int = 0) -> fm.Site:
    """Rows whose class is the sign of the first column; of so many units, if there are some."""
    generator = torch.Generator().manual_seed(rows + sum(map(ord, name)))
    x = torch.randn(rows + test, 3, generator=generator)
    y = (flip * x[:, 0] > 0).long()
    train = fm.data.Samples(scale * x[:rows], y[:rows], units=torch.arange(rows) % units if units else None)
    return fm.Site(train, test=(scale * x[rows:], y[rows:]) if test else None, name=name)


def trained(sites, rounds=10, **options) -> tuple[fm.Result, list[str]]:
    """A run without an algorithm, and its first sentences. All that users look at can be shown."""
    result = fm.train(fm.Problem(lambda: nn.Linear(3, 2), sites), rounds=rounds, **options)
    run = Run.from_result(result)
    assert str(result)
    assert str(result.weights_verdict())
    assert len(personal_table(run)) in (0, len(sites) + 1)
    for one in sites:
        with torch.no_grad():
            assert bool(result.model_for(one.name)(torch.ones(2, 3)).isfinite().all())
    return result, headline_of(run.summary)


def answers_as_the_common_model(result: fm.Result, name: str) -> bool:
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    common = result.problem.flat_model.module(result.row()[0])
    with torch.no_grad():
        return torch.equal(result.model_for(name)(inputs), common(inputs))


def test_one_site_has_the_common_model_and_no_choice():
    result, said = trained([site(40, "alone")])
    assert not result.personal
    assert answers_as_the_common_model(result, "alone")
    assert len(said) == 1
    assert "one site" in said[0]


def test_two_sites_are_compared_and_choose():
    result, said = trained([site(40, "north"), site(40, "south")])
    assert len(result.personal[0].sites) == 2
    assert len(said) == 3
    assert "of 2 sites" in said[0]


def test_sites_of_a_single_row_keep_the_common_model_and_say_why():
    result, said = trained([site(1, f"s{i}") for i in range(5)])
    assert all(one.weights == {"common": 1.0} and "too few" in one.note for one in result.personal[0].sites)
    assert answers_as_the_common_model(result, "s0")
    assert "not compared" in said[0]
    assert "no site has enough rows" in said[2]


def test_tiny_sites_without_test_rows_make_no_claim():
    _, said = trained([site(1 + i % 3, f"s{i}", test=0) for i in range(6)])
    assert "on held-out rows better than alone at none of" in said[0]
    assert "that could be compared" in said[0]  # a single row compares nothing


def test_units_too_few_to_hold_any_out_keep_the_common_model():
    result, said = trained([site(20, f"s{i}", units=1) for i in range(4)])
    assert all(one.weights == {"common": 1.0} and "unit" in one.note for one in result.personal[0].sites)
    assert "no site has enough rows" in said[2]


def test_site_without_rows_of_a_class_and_one_with_huge_inputs_are_answered():
    lacking = site(30, "lacking")
    one_class = fm.Site((lacking.train.inputs, torch.ones(30, dtype=torch.int64)), test=lacking.test, name="lacking")
    result, _ = trained([site(40, "a"), site(40, "b"), one_class, site(40, "huge", scale=1e15)])
    assert all(math.isfinite(sum(one.weights.values())) for one in result.personal[0].sites)


def test_sites_that_all_contradict_each_other_are_told_to_use_their_own():
    sites = [site(60, f"s{i}", flip=1.0 if i % 2 else -1.0, test=60) for i in range(4)]
    result, said = trained(sites, rounds=40)
    assert {one.uses for one in result.personal[0].sites} <= {"own", "adapted"}
    assert "better than the common model at 4 of 4 sites, worse at none" in said[2]
    assert all(row[1].split("\n")[1].startswith("▲") for row in personal_table(Run.from_result(result))[1:])


class Exponential(nn.Module):
    """Its outputs overflow after one long step."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, inputs):
        return self.linear(inputs).exp()


def test_site_whose_own_models_diverge_keeps_the_common_one():
    def numbers(seed: int) -> fm.Site:
        x = torch.randn(60, 3, generator=torch.Generator().manual_seed(seed))
        y = (0.3 * x[:, :1]).exp()
        return fm.Site((x[:40], y[:40]), test=(x[40:], y[40:]), name=f"site {seed}")

    problem = fm.Problem(Exponential, [numbers(seed) for seed in range(3)])
    common = fm.train(problem, None, fm.algorithms.DSGD(1e-6), rounds=2)
    found = fm.personalize(common, fm.personalization.Choice(steps=10, step=500.0, local_steps=10, local_step=500.0))
    for one in found.sites:
        assert not {"own, free", "own", "own, held", "near, free", "near", "near, held"} & set(one.weights)
        assert math.isfinite(one.test["personal"]["loss"])
        assert one.held_out_versus["common"]["difference"] <= 0.01


def test_loss_that_is_not_finite_is_refused_or_diverges_with_a_sentence():
    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets) / (1.0 - (targets == 1).any())

    with refused("loss"):
        fm.train(fm.Problem(lambda: nn.Linear(3, 2), [site(20, "a"), site(20, "b")], loss=loss), rounds=5)


def test_folds_that_diverge_with_robust_weights_hand_out_fixed_ones(monkeypatch):
    def diverging(ready, around, name, what):
        if name == "robust":
            raise fm.errors.Diverged("of this test")
        return trained_aside(ready, around, name, what)

    monkeypatch.setattr("fairmesh.training.selection.trained_aside", diverging)
    result, said = trained([site(40, "north"), site(40, "south")])
    assert result.handed_out.weights == "fixed"
    assert "diverged" in said[1]
