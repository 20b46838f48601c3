"""A run next to each site alone, the average model, all data in one place, the fine-tuned model and a constant."""

import json
from dataclasses import replace

import pytest
import torch

import fairmesh as fm
from fairmesh.comparisons import reference_models
from fairmesh.comparisons.constants import best_constant, constant_values
from fairmesh.personalization.cross_fit import CrossFit
from fairmesh.personalization.outcome import PersonalModel
from tests.refusals import missing_from, refused

NAMES = ["local", "average", "pooled", "fine-tuned", "constant"]


def _site(sign: float, rows: int, seed: int) -> fm.Site:
    x = torch.randn(rows + 80, 2, generator=torch.Generator().manual_seed(seed))
    y = (sign * x[:, 0] + 0.3 > 0).long()
    return fm.Site((x[:rows], y[:rows]), test=(x[rows:], y[rows:]), name=f"site {seed}")


def _problem(first: int = 0) -> fm.Problem:
    """Three sites agree, one of them with six rows; the last one has the opposite labels."""
    signs, sizes = (1, 1, 1, -1), (60, 60, 6, 60)
    return fm.Problem(
        lambda: torch.nn.Linear(2, 2), [_site(*one, first + k) for k, one in enumerate(zip(signs, sizes))]
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("references") / "run"
    options = {"algorithm": fm.TrackedADGDA(), "rounds": 40, "seeds": (0, 3), "measure_every": 40, "out": out}
    return (
        fm.compare_with_references([_problem(), replace(_problem(), sampling=fm.Sampling())], **options),
        out,
        options,
    )


@pytest.mark.quick_cases(1)
def test_references_show_which_site_is_better_off_alone(compared):
    found, _, _ = compared
    assert list(found.references) == NAMES
    assert not found.failed
    assert found.values("local")[3] > 0.9 > 0.5 > found.values("pooled")[3]  # opposite labels
    assert found.values("pooled")[0] > 0.8
    assert found.values("fine-tuned")[3] > found.values()[3]
    few = found.result.problem.sites[2].train  # six rows are too few to hold any out: trained to the end
    row = found.references["local"].state.algorithm.models[0, 2]
    assert bool((found.result.problem.flat_model(row, few.inputs).argmax(-1) == few.targets).all())
    for name in ("local", "fine-tuned", "pooled", "constant"):
        assert len(found.references[name].final) == 4  # two splits, two seeds
        assert found.references[name].final[0]["bytes_total"] == 0
    verdicts = found.versus("local")
    assert verdicts.at_sites[3].verdict == "worse"
    assert verdicts.paired
    assert found.as_json()["local"]["better_off"] == verdicts.count("better") / 4
    assert len(found.sentences()) == 5
    text = str(found)
    assert all(title in text for title in reference_models.TITLES.values())


def test_references_are_written_as_runs_are_and_read_instead_of_trained_again(compared, monkeypatch):
    found, out, options = compared
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["references"]) == NAMES
    for name, table in summary["references"].items():
        inside = json.loads((out / table["folder"] / "summary.json").read_text())
        assert inside["rounds"] == 40
        assert table["sites"] == pytest.approx(found.values(name))
    model = PersonalModel.load(out / "references/local/personal-3.safetensors", torch.nn.Linear(2, 2))
    test = found.result.problem.sites[3].test
    right = float((model(test.inputs).argmax(-1) == test.targets).double().mean())
    assert right == pytest.approx(found.references["local"].final[0]["accuracy"]["sites"][3])

    def trained(*_, **__):
        raise AssertionError("a finished reference was trained again")

    monkeypatch.setattr(CrossFit, "_walk", trained)
    problems = [_problem(), replace(_problem(), sampling=fm.Sampling())]
    again = fm.compare_with_references(problems, **options, resume=True)
    assert not again.failed
    assert [again.values(name) for name in NAMES] == [found.values(name) for name in NAMES]


def test_reference_that_diverges_or_fails_is_marked_and_the_others_are_kept(monkeypatch):
    monkeypatch.setattr(reference_models._Work, "_local", lambda self: torch.full((1, 4, 6), torch.nan))

    def fails(self):
        raise fm.BadInput("no luck")

    monkeypatch.setattr(reference_models._Work, "_fine_tuned", fails)
    wanted = ["local", "fine-tuned", "constant"]
    found = fm.compare_with_references(_problem(), algorithm=fm.algorithms.DSGD(), rounds=3, references=wanted)
    table = found.as_json()
    assert table["local"]["diverged"]
    assert "versus" not in table["local"]
    assert found.sentences() == []
    assert table["fine-tuned"]["failed"] == "no luck"
    assert max(found.values("constant")) < 1
    assert "diverged" in str(found)
    assert "failed" in str(found)


def test_average_model_is_the_same_run_with_fixed_weights_or_fedavg():
    only = {"rounds": 5, "references": ["average"], "measure_every": 5}
    weighed = fm.compare_with_references(_problem(), algorithm=fm.algorithms.AFL(), **only).references["average"]
    assert torch.equal(weighed.row(), fm.train(_problem(), fm.Ring(), fm.algorithms.AFL(dual_step=0.0), 5).row())
    plain = fm.compare_with_references(_problem(), algorithm=fm.algorithms.DSGD(), **only).references["average"]
    assert isinstance(plain.replicas[0].algorithm, fm.algorithms.FedAvg)


@pytest.mark.slow
def test_average_model_of_a_run_that_was_compared_with_fixed_weights_is_that_one():
    default = fm.compare_with_references(_problem(), rounds=5, references=["average"], choose_weights=False)
    assert default.references["average"] is default.result.fixed


def test_constant_is_the_most_frequent_class_or_the_mean():
    labels = torch.tensor([2] * 7 + [0] * 5 + [1] * 3)
    problem = fm.Problem(torch.nn.Linear(2, 3), [fm.Site((torch.randn(15, 2), labels))]).prepared
    assert int(best_constant(problem, 0).argmax()) == 2
    numbers = torch.arange(200.0).view(-1, 1) / 10
    problem = fm.Problem(
        torch.nn.Linear(2, 1), [(torch.randn(200, 2), numbers)], loss=torch.nn.functional.mse_loss
    ).prepared
    assert float(best_constant(problem, 0)) == pytest.approx(float(numbers.mean()), rel=0.01)


@pytest.mark.parametrize("loss", ["squared-error", "huber"])
def test_constant_of_a_few_large_numbers_is_near_their_mean(loss):
    prices = 250_000 + 60_000 * torch.linspace(-1, 1, 20).view(-1, 1)
    named = fm.losses.SquaredError() if loss == "squared-error" else fm.losses.Huber()
    problem = fm.Problem(torch.nn.Linear(2, 1), [(torch.randn(20, 2), prices)], loss=named).prepared
    assert float(best_constant(problem, 0)) == pytest.approx(250_000, rel=0.01)


def test_references_of_a_yes_or_no_model_with_one_output():
    def _floats(tensor):
        return tensor.float() if tensor.ndim > 1 else tensor.float().view(-1, 1)

    sites = [_site(1, 40, k) for k in range(3)]
    sites = [replace(s, train=tuple(map(_floats, s.train)), test=tuple(map(_floats, s.test))) for s in sites]
    problem = fm.Problem(torch.nn.Linear(2, 1), sites, loss=torch.nn.functional.binary_cross_entropy_with_logits)
    found = fm.compare_with_references(
        problem, algorithm=fm.algorithms.DSGD(), rounds=20, references=["local", "constant"]
    )
    assert problem.prepared.primary == "accuracy"
    assert min(found.values("local")) > 0.8 > max(found.values("constant"))


def _head() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


@pytest.mark.slow
def test_references_of_a_model_with_local_and_frozen_parts_train_whole_models_at_sites_alone(tmp_path):
    parts = fm.Parts(local=("2.*",), frozen=("0.bias",))
    problem = replace(_problem(), model=_head, parts=parts)
    options = {"algorithm": fm.algorithms.DSGD(0.1), "rounds": 12, "measure_every": 12, "out": tmp_path / "run"}
    found = fm.compare_with_references(problem, **options)
    assert list(found.references) == NAMES
    assert not found.failed
    alone = found.references["local"]
    assert not alone.problem.flat_model.own_dim
    row, start = alone.state.algorithm.models[0, 0], alone.problem.initial_row(0)
    trained, first = alone.problem.flat_model.state_dict(row), alone.problem.flat_model.state_dict(start.float())
    moved = {name for name, tensor in trained.items() if not torch.equal(tensor, first[name].to(tensor))}
    assert moved == {"0.weight", "2.weight", "2.bias"}
    average = found.references["average"].problem.flat_model
    assert average.own_dim == found.result.problem.flat_model.own_dim > 0
    again = fm.compare_with_references(problem, resume=True, **options)
    assert again.values("fine-tuned") == pytest.approx(found.values("fine-tuned"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["local", "shared"])
def test_references_with_batch_norm_have_statistics_of_each_site_and_no_fine_tuning(policy):
    def model():
        return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), *_head()[2:])

    problem = replace(_problem(), model=model, batch_norm=policy)
    found = fm.compare_with_references(problem, algorithm=fm.algorithms.DSGD(0.1), rounds=10, measure_every=10)
    assert [name for name in NAMES if name not in found.references] == ["fine-tuned"]
    assert missing_from(found.failed["fine-tuned"], "BatchNorm", "frozen") == []
    models = found.references["local"].state.algorithm.models[0]
    own = models[:, found.result.problem.flat_model.dim :]
    assert not torch.equal(own[0], own[1])


def test_references_refuse_what_they_cannot_do():
    with refused("'locl'", "local"):
        fm.compare_with_references(_problem(), rounds=1, references=["locl"])
    swept = fm.train(_problem(), fm.Ring(), [fm.algorithms.DSGD(0.1), fm.algorithms.DSGD(0.2)], 1)
    with refused("sweep", "2"):
        reference_models.add_references(swept, fm.Options())


def test_table_says_not_measured_and_a_sentence_where_a_constant_answer_is_as_good():
    labels = torch.tensor([0] * 18 + [1] * 2)
    sites = [fm.Site((torch.randn(20, 2), labels), test=(torch.randn(20, 2), labels), name=name) for name in "ab"]
    sites.append(fm.Site((torch.randn(20, 2), labels), name="c"))
    problem = fm.Problem(torch.nn.Linear(2, 2), sites)
    compared = fm.compare_with_references(problem, algorithm=fm.algorithms.DSGD(0.0), rounds=1, references=["constant"])
    assert [row.split("  ")[0] for row in str(compared).splitlines() if "not measured" in row] == ["c"]
    assert missing_from(compared.constant_sentence(), "a, b", "90.0 %") == []
    assert compared.constant_sentence() == reference_models.constant_sentence(compared.result)


def test_constant_answer_is_the_share_of_the_most_frequent_class_of_a_sites_training_rows():
    train, test = torch.tensor([0] * 6 + [1] * 4), torch.tensor([0] * 3 + [1] * 5)
    rows = [(torch.randn(len(labels), 3), labels) for labels in (train, test)]
    sites = [fm.Site(rows[0], test=rows[1]), fm.Site(rows[0]), fm.Site(rows[1], test=rows[0])]
    first, unmeasured, last = constant_values(fm.Problem(torch.nn.Linear(3, 2), sites).prepared, "test")
    assert (first, last) == pytest.approx((3 / 8, 4 / 10))
    assert unmeasured != unmeasured


def _of_numbers(rows: int, noise: float, odd: int = 0, sites: int = 30) -> fm.Problem:
    """Sites with rows of which a fifth is for testing; at the first `odd` ones the targets fall where others rise."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(sites):
        inputs = torch.randn(rows, 3, generator=generator)
        targets = inputs.sum(dim=1) * (-1 if i < odd else 1) + noise * torch.randn(rows, generator=generator)
        cut = rows // 5
        made.append(fm.Site((inputs[cut:], targets[cut:]), test=(inputs[:cut], targets[:cut]), name=f"s{i}"))
    model = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(model.bias, 3.0)
    return fm.Problem(model, made, metrics=["r2"])


def test_run_that_has_converged_is_not_called_worse_where_sites_have_few_test_rows():
    result = fm.train(
        _of_numbers(30, noise=4.0), fm.topologies.Complete(), fm.algorithms.DSGD(0.1), rounds=60, measure_every=60
    )
    assert sum(value < 0 for value in result.final[0]["r2"]["sites"]) > 5  # by the mean of six test rows
    assert not result.notes


def test_sites_that_the_common_model_does_not_fit_are_named():
    problem = _of_numbers(200, noise=0.3, odd=4)
    with pytest.warns(UserWarning, match="clearly worse"):
        result = fm.train(problem, fm.topologies.Complete(), fm.algorithms.DSGD(0.1), rounds=60, measure_every=60)
    (said,) = result.notes
    assert [word for word in ("s0, s1, s2 and 1 more", "[personalization]") if word not in said] == []
    assert "train longer" not in said


def test_model_that_is_worse_than_one_constant_is_to_be_trained_longer():
    with pytest.warns(UserWarning, match="one constant answer for all sites"):
        result = fm.train(_of_numbers(200, noise=0.3), fm.topologies.Complete(), fm.algorithms.DSGD(1e-4), rounds=1)
    assert "train longer" in result.notes[0]


def test_constant_answer_is_judged_at_a_worst_site_with_enough_rows():
    x, y = torch.randn(40, 2), torch.tensor([0, 1, 1, 1] * 10)
    whole, tiny = fm.Site((x[:20], y[:20]), (x[20:], y[20:])), fm.Site((x[:20], y[:20]), (x[:1], y[:1]))
    result = fm.train(
        fm.Problem(torch.nn.Linear(2, 2), [whole, whole, tiny]), fm.Ring(), fm.algorithms.DSGD(0.1), rounds=1
    )
    assert "75.0 % at the worst site and 50.0 % on average" in reference_models.constant_sentence(result)
