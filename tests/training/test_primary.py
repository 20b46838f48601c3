"""The metric that decides, `primary`: which it is, what follows it, and sites where it is not defined."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import fairmesh as fm
from fairmesh.comparisons.constants import constant_values
from fairmesh.report.runs import Run
from fairmesh.training.summary import summary_of
from tests.refusals import missing_from, refused

SITES = ["a", "b", "c", "d"]


def rare_sites(rows: int = 600, without: tuple[str, ...] = ()) -> list[fm.Site]:
    """Sites with 6 % positives. At d the inputs tell nothing about the label, and positives are rarer: the constant
    answer has its best accuracy there. Sites in `without` are tested on negatives only."""
    made = []
    for k, name in enumerate(SITES):
        rng = torch.Generator().manual_seed(k)
        inputs = torch.randn(rows, 3, generator=rng)
        score = 2 * inputs[:, 0] + torch.randn(rows, generator=rng)
        score = torch.randn(rows, generator=rng) if name == "d" else score
        labels = (score > score.quantile(0.97 if name == "d" else 0.94)).long()
        half = rows // 2
        test = (inputs[half:], labels[half:] * (name not in without))
        made.append(fm.Site((inputs[:half], labels[:half]), test=test, name=name))
    return made


def linear() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def rare(**settings) -> fm.Problem:
    return fm.Problem(linear, rare_sites(), **settings)


def trained(problem: fm.Problem, **options) -> fm.Result:
    return fm.train(problem, fm.Ring(), fm.algorithms.DSGD(primal_step=0.5), 60, announce=lambda text: None, **options)


def test_rare_events_are_judged_by_auroc_and_not_by_the_constant_answer():
    by_accuracy, by_auroc = trained(rare()), trained(rare(primary="auroc"))
    assert torch.equal(by_accuracy.row(), by_auroc.row()), "a measurement changes no model"
    found, plain = by_auroc.evidence(), by_accuracy.evidence()
    assert (found["metric"], found["worst"]["site"]) == ("auroc", "d")
    assert (plain["metric"], plain["worst"]["site"] != "d") == ("accuracy", True)
    assert by_auroc.worst == by_auroc.final[0]["auroc"]["worst"] < 0.7
    assert by_accuracy.worst > 0.9
    assert "worst site's auroc" in by_auroc.problem.unit().progress(by_auroc.final)
    # The constant answer is about as good as the model by accuracy, and useless by AUROC.
    assert constant_values(by_auroc.problem, "test") == [0.5] * 4
    assert min(constant_values(by_accuracy.problem, "test")) > 0.9


def test_verdicts_go_by_the_primary_metric():
    compared = {
        metric: fm.compare_with_references(
            rare(primary=metric), fm.Ring(), fm.algorithms.DSGD(primal_step=0.5), 60, references=["constant"]
        )
        for metric in ("accuracy", "auroc")
    }
    verdicts = {metric: one.versus("constant") for metric, one in compared.items()}
    assert [one.verdict for one in verdicts["auroc"].at_sites] == ["better", "better", "better", "unclear"]
    assert verdicts["accuracy"].count("better") < 3
    assert verdicts["auroc"].mean.verdict == "better"
    assert missing_from(compared["auroc"].constant_sentence(), "0.5") == []
    assert compared["auroc"].table()[0][0] == "site (auroc)"
    assert "in auroc" in verdicts["auroc"].sentences("a constant")[0]


def test_built_in_metric_with_settings_is_named_in_metrics_first():
    metrics = {"sens": fm.metrics.Sensitivity(threshold=0.3)}
    made = rare(metrics=metrics, primary="sens").prepared
    assert (made.primary, made.higher_is_better("sens"), made.unit().share) == ("sens", True, True)
    own = {"error": fm.metrics.Metric(lambda outputs, targets: 1.0, higher_is_better=False)}
    made = rare(metrics=own, primary="error").prepared
    assert (made.primary, made.higher_is_better("error"), list(made.metrics)) == ("error", False, ["error"])
    assert rare(primary="loss").prepared.metrics == {}


def test_experiment_files_name_the_primary_metric(tmp_path):
    (tmp_path / "it.toml").write_text('primary = "auroc"\nrounds = 3\ndata = { name = "digits", nodes = 4 }\n')
    experiment = fm.load_experiment(tmp_path / "it.toml")
    assert experiment.problem().primary == "auroc"
    assert fm.load_experiment(tmp_path / "it.toml", ['primary="f1"']).problem().primary == "f1"
    with refused("primary", "aurco", "auroc"):
        fm.load_experiment(tmp_path / "it.toml", ['primary="aurco"'])


def test_primary_that_does_not_exist_or_fit_is_refused():
    with refused("'auroc'", "aurok"):
        rare(primary="aurok")
    with refused("rmse", "numbers"):
        rare(primary="rmse")
    with refused("name", "metrics"):
        rare(primary=fm.metrics.AUROC())
    with refused("auroc", "numbers", "rmse"):
        numbers(primary="auroc")


def test_sites_that_do_not_define_it_are_named_once_and_left_out():
    said, problem = [], fm.Problem(linear, rare_sites(without=("b", "d")), primary="auroc")
    result = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(primal_step=0.5), 20, announce=said.append)
    told = [text for text in said if "auroc is not defined" in text]
    assert len(told) == 1
    assert missing_from(told[0], "b, d", "class") == []
    assert told[0] in result.notes
    found = result.evidence()
    a, _, c, _ = result.final[0]["auroc"]["sites"]
    assert [math.isnan(site["value"]) for site in found["sites"]] == [False, True, False, True]
    assert found["worst"]["value"] == result.worst == min(a, c)
    assert found["mean"]["value"] == pytest.approx((a + c) / 2)
    compared = fm.evidence.versus(result.outcomes(), result.outcomes())
    assert missing_from(compared.sentence("itself"), "2 not compared", "2 without a clear difference") == []
    card = json.loads(json.dumps(summary_of(result)["metrics"]["auroc"]))
    assert card["undefined"] == 2


@pytest.mark.parametrize("split", ["test", "validation"])
def test_primary_that_no_site_defines_is_refused_before_training(split):
    sites = rare_sites(without=SITES if split == "test" else ())
    if split == "validation":
        negative = [(inputs, torch.zeros_like(labels)) for inputs, labels in (site.train for site in sites)]
        sites = [fm.Site(s.train, test=s.test, validation=v, name=s.name) for s, v in zip(sites, negative)]
    problem = fm.Problem(linear, sites, primary="auroc")
    with refused("auroc", "any site", split, "primary"):
        trained(problem, keep_best=split == "validation")


def test_site_with_one_class_in_training_is_named():
    sites, said = rare_sites(), []
    sites[1] = fm.Site((sites[1].train[0], torch.zeros_like(sites[1].train[1])), test=sites[1].test, name="b")
    fm.train(fm.Problem(linear, sites), rounds=1, algorithm=fm.algorithms.DSGD(), announce=said.append)
    assert [missing_from(text, "of b ") for text in said if "one class" in text] == [[]]


# Numbers --------------------------------------------------------------------------------------------------------------


def numbers(model=None, loss=F.cross_entropy, **settings) -> fm.Problem:
    rng = torch.Generator().manual_seed(0)
    sites = []
    for k in range(3):
        inputs = torch.randn(60, 2, generator=rng)
        targets = 100 + 20 * inputs.sum(dim=1) + (1 + 5 * (k == 2)) * torch.randn(60, generator=rng)
        sites.append(fm.Site((inputs, targets), test=(inputs, targets), name=SITES[k]))
    return fm.Problem(model or torch.nn.Linear(2, 1), sites, loss, **settings)


def flat() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))


def quantile(outputs, targets):
    return torch.maximum(0.9 * (targets - outputs), 0.1 * (outputs - targets)).mean()


@pytest.mark.parametrize(
    ("loss", "primary"),
    [
        (F.mse_loss, "rmse"), (fm.losses.Huber(), "rmse"), (torch.nn.L1Loss(), "rmse"),
        (lambda outputs, targets: (outputs - targets).abs().mean(), "rmse"), (F.poisson_nll_loss, "loss"),
        (quantile, "loss"), (fm.losses.ModelLoss(lambda model, batch: (model(batch[0]) - batch[1]) ** 2), "loss"),
    ],
)  # fmt: skip
@pytest.mark.quick_cases("all")
def test_numbers_are_judged_by_rmse_where_outputs_are_predictions(loss, primary):
    assert numbers(flat(), loss).prepared.primary == primary


def test_numbers_are_judged_in_their_own_units_by_default():
    result = fm.train(numbers(), fm.Ring(), fm.algorithms.DSGD(0.1), 80, measure_every=80)
    last = result.final[0]
    assert result.problem.primary == "rmse"
    assert last["rmse"]["sites"] == pytest.approx([math.sqrt(value) for value in last["loss"]["sites"]], rel=1e-4)
    assert result.evidence()["worst"]["site"] == "c"
    assert numbers(primary="loss").prepared.primary == "loss"
    assert numbers(primary="mae").prepared.primary == "mae"


def table_of_pressures(folder) -> fm.Experiment:
    lines = ["site,x,pressure"]
    rng = torch.Generator().manual_seed(0)
    for k, (x, noise) in enumerate(torch.randn(240, 2, generator=rng).tolist()):
        lines.append(f"{SITES[k % 3]},{x:.4f},{120 + 15 * x + 4 * noise:.3f}")
    (folder / "pressures.csv").write_text("\n".join(lines) + "\n")
    target = fm.data.Column("pressure", unit="mmHg")
    data = fm.data.Table(str(folder / "pressures.csv"), target="pressure", site="site", predict="numbers")
    contract = fm.data.Contract((fm.data.Column("x"),), target)
    return fm.Experiment(data, algorithm=fm.algorithms.DSGD(0.1), rounds=60, contract=contract)


def test_unit_of_the_contracts_target_is_shown_with_an_error(tmp_path):
    result = fm.run(table_of_pressures(tmp_path), announce=lambda text: None)
    assert 3 < result.worst < 6, "in mmHg, although the model learns multiples of a spread"
    assert result.problem.unit().shown(4.0) == "4 mmHg"
    run = Run.from_result(result)
    assert (run.unit().label, run.unit("loss").label) == ("rmse, mmHg", "loss")
    compared = fm.evidence.versus(result.outcomes(), result.outcomes())
    assert "mmHg" in compared.sentences("itself")[0]
    assert str(result).startswith("rmse, mmHg")


# Resumed runs ---------------------------------------------------------------------------------------------------------


def test_finished_run_is_resumed_with_another_primary(tmp_path):
    first = trained(rare(), out=tmp_path / "run")
    again = trained(rare(primary="auroc"), out=tmp_path / "run", resume=True)
    assert torch.equal(first.row(), again.row())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["metric"] == "auroc"
    assert Run.from_folder(tmp_path / "run").curve("worst", "rounds")[0] == [60.0]
    back = trained(rare(), out=tmp_path / "run", resume=True)
    assert back.problem.primary == "accuracy"


def test_best_round_by_another_metric_is_another_run(tmp_path):
    sites = [fm.Site(site.train, test=site.test, validation=site.test, name=site.name) for site in rare_sites()]
    problems = {p: fm.Problem(linear, sites, primary=p) for p in ("accuracy", "auroc")}
    trained(problems["accuracy"], out=tmp_path / "run", keep_best=True)
    with refused("best by", "auroc", error=fm.errors.FairmeshError):
        trained(problems["auroc"], out=tmp_path / "run", keep_best=True, resume=True)
