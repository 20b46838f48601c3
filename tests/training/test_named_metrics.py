"""Runs with metrics by name, and with metrics that are not defined at some sites."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

import fairmesh as fm
from fairmesh.config.tables import from_table, to_table
from fairmesh.evidence import versus
from fairmesh.networks.remote import RemoteNetwork
from fairmesh.storage.strict_json import as_json
from fairmesh.testing.hosts import InProcess, Post, Threads
from fairmesh.testing.hosts import _results as results_of
from fairmesh.training.summary import summary_of
from tests.refusals import missing_from, refused
from tests.toys import problem, sites

ALGORITHM = fm.ADGDA(primal_step=0.5, dual_step=0.1, consensus_step=0.4)
DIGITS = {"data": {"name": "digits", "nodes": 3}, "rounds": 2, "algorithm": "choco-sgd"}


def train(made: fm.Problem, rounds: int = 1, **options):
    return fm.train(made, fm.Ring(), ALGORITHM, rounds, **options)


def test_files_name_metrics_in_a_list_or_in_a_table():
    listed = from_table(fm.Experiment, DIGITS | {"metrics": ["auroc", {"name": "sensitivity", "threshold": 0.3}]})
    assert listed.metrics == (fm.metrics.AUROC(), fm.metrics.Sensitivity(threshold=0.3))
    assert from_table(fm.Experiment, to_table(listed)).metrics == listed.metrics
    table = {"area": "auroc", "late": {"name": "sensitivity", "threshold": 0.9}, "own": "torch:equal"}
    named = from_table(fm.Experiment, DIGITS | {"metrics": table})
    assert named.metrics == {"area": fm.metrics.AUROC(), "late": fm.metrics.Sensitivity(0.9), "own": torch.equal}
    result = fm.run(listed)
    assert {"auroc", "sensitivity", "accuracy", "loss"} <= result.final[0].keys()
    assert len(result.final[0]["auroc"]["sites"]) == 3


def test_metric_that_is_unknown_or_does_not_fit_is_refused_before_the_first_round():
    for metrics, place in ((["aurok"], "metrics[0]"), ({"x": "aurok"}, "metrics.x")):
        with refused(place, "aurok", "auroc"):
            from_table(fm.Experiment, DIGITS | {"metrics": metrics})
    for metrics, words in (
        (["aurok"], ("metrics", "aurok", "auroc")),
        (["auroc", fm.metrics.AUROC()], ("metrics", "auroc", "twice")),
        ("auroc", ("metrics", '["auroc"]')),
        (["r2"], ("r2", "auroc")),
        ([fm.metrics.Sensitivity(positive=7)], ("sensitivity", "positive = 7", "0..2")),
    ):
        with refused(*words):
            problem(3, metrics=metrics)
    numbers = [fm.Site((torch.randn(8, 2), torch.randn(8))) for _ in range(3)]
    with refused("auroc", "numbers", "mae, r2, rmse"):
        fm.Problem(torch.nn.Linear(2, 1), numbers, loss=squared, metrics=["auroc"])


def squared(outputs, targets):
    return F.mse_loss(outputs.squeeze(-1), targets)


@pytest.mark.filterwarnings("ignore:clearly worse than")  # targets are noise
def test_worst_site_of_an_error_has_the_largest_value():
    numbers = [fm.Site((torch.randn(8, 2), k + torch.randn(8))) for k in range(3)]
    made = fm.Problem(torch.nn.Linear(2, 1), numbers, loss=squared, metrics=["mae", "r2"])
    record = train(made).final[0]
    assert record["mae"]["worst"] == max(record["mae"]["sites"])
    assert record["r2"]["worst"] == min(record["r2"]["sites"])


def one_class_at(n: int, site: int) -> list[fm.Site]:
    """Sites of two classes, of which one is tested on a single class."""
    found = []
    for k in range(n):
        labels = torch.arange(20) % 2
        inputs = torch.randn(20, 2, generator=torch.Generator().manual_seed(k)) + labels[:, None]
        test = (inputs, labels) if k != site else (inputs[labels == 1], labels[labels == 1])
        found.append(fm.Site((inputs, labels), test=test, name=f"s{k}"))
    return found


def test_metric_of_a_test_set_of_one_class_is_not_defined_there():
    made = fm.Problem(torch.nn.Linear(2, 2), one_class_at(3, 1), metrics=["auroc", "accuracy"])
    result = train(made)
    entry = result.final[0]["auroc"]
    assert [math.isnan(v) for v in entry["sites"]] == [False, True, False]
    assert entry["worst"] == min(v for v in entry["sites"] if v == v)
    summary = json.loads(as_json(summary_of(result)))
    assert summary["final"][0]["auroc"]["sites"][1] is None
    assert summary["metrics"]["auroc"]["undefined"] == 1
    assert summary["support"] == [{"n": 20, "classes": [10, 10]}, {"n": 10, "classes": [0, 10]},
                                  {"n": 20, "classes": [10, 10]}]  # fmt: skip
    assert summary["metrics"]["accuracy"]["cvar"] == pytest.approx(result.worst)


def test_test_set_of_one_sample_is_measured():
    given = one_class_at(3, 1)
    given[0] = fm.Site(given[0].train, test=(torch.zeros(1, 2), torch.tensor([1])))
    record = train(fm.Problem(torch.nn.Linear(2, 2), given, metrics=["auroc", "f1", "balanced-accuracy"])).final[0]
    assert record["accuracy"]["sites"][0] in (0.0, 1.0)
    assert math.isnan(record["auroc"]["sites"][0])
    assert math.isnan(record["balanced-accuracy"]["sites"][0])


@pytest.mark.parametrize("test", [None, (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))])
def test_site_without_test_data_is_trained_and_not_measured(test):
    given = one_class_at(4, -1)
    given[2] = fm.Site(given[2].train, test=test, name="s2")
    result = train(fm.Problem(torch.nn.Linear(2, 2), given), own_models=True)
    record = result.final[0]
    assert result.judged_on == "test"
    assert [math.isnan(v) for v in record["accuracy"]["sites"]] == [False, False, True, False]
    assert not math.isnan(record["accuracy"]["worst"])
    assert not math.isnan(record["accuracy"]["mean"])
    assert math.isnan(record["own_models"]["loss"]["sites"][2])
    assert record["lambda"][2] > 0
    assert len(record["lambda"]) == 4
    assert result.support[2] is None


class TwoNodesEach(Threads):
    """Threads that train as the ranks of a cluster do."""

    def nodes(self, n):
        return range(2 * self.rank, 2 * self.rank + 2)

    def network(self, cycle, *, device, dtype, count_bytes):
        transport = InProcess(self.post, self.rank)
        transport.process_group = self
        return RemoteNetwork(cycle, self.nodes(4), transport, device=device, dtype=dtype)


def test_hosts_agree_on_a_site_without_test_data_and_on_a_metric_that_fails_at_one():
    def own(outputs, targets):
        if len(targets) == 10:
            raise ZeroDivisionError("no negatives")
        return 0.7

    given = one_class_at(4, 0)
    given[2] = fm.Site(given[2].train, name="s2")
    given[3] = fm.Site(given[3].train, name="s3")  # so the second host has no test data at all
    made = fm.Problem(torch.nn.Linear(2, 2), given, metrics={"own": own, "auroc": "auroc"})
    post = Post(2)

    def hosted(rank):
        with post.arrived:  # one computes at a time
            return train(made, 2, process_group=TwoNodesEach(post, rank), announce=lambda text: None)

    alone = train(made, 2, announce=lambda text: None)
    for result in results_of(hosted, 2):
        assert result.judged_on == "test"
        assert result.support == alone.support
        assert result.notes == alone.notes
        for metric in ("accuracy", "own", "auroc"):
            assert result.final[0][metric]["sites"] == pytest.approx(alone.final[0][metric]["sites"], nan_ok=True)


def test_keep_best_leaves_out_a_site_without_validation_data():
    given = [fm.Site(s.train, s.test, s.test if k else None) for k, s in enumerate(one_class_at(3, -1))]
    result = train(fm.Problem(torch.nn.Linear(2, 2), given), 3, keep_best=True)
    assert result.state.best is not None
    assert bool(torch.isfinite(result.state.best.score).all())


def void(outputs, targets):
    """The mean squared error over the entries of each sample that are not void, which are -1."""
    valid = targets >= 0
    each = ((outputs - targets).square() * valid).sum(1) / valid.sum(1)
    return each.mean()


@pytest.mark.filterwarnings("ignore:clearly worse than")  # targets are noise
def test_sample_without_a_loss_is_named_once_and_other_sites_keep_theirs():
    given = []
    for k in range(3):
        targets = torch.rand(6, 2)
        test = targets.clone()
        test[4] = -1.0 if k == 1 else test[4]
        given.append(fm.Site((torch.randn(6, 2), targets), test=(torch.randn(6, 2), test), name=f"s{k}"))
    with pytest.warns(UserWarning, match="sample 4") as said:
        result = train(fm.Problem(torch.nn.Linear(2, 2), given, loss=void), 3, measure_every=1)
    texts = [str(one.message) for one in said if "loss" in str(one.message)]
    assert len(texts) == 1
    assert not missing_from(texts[0], "s1", "sample 4")
    entry = result.final[0]["loss"]
    assert [math.isnan(v) for v in entry["sites"]] == [False, True, False]
    assert entry["worst"] == max(entry["sites"][0], entry["sites"][2])
    assert [one for one in result.notes if "loss" in one] == texts
    assert summary_of(result)["notes"] == result.notes


class Fragile(torch.nn.Module):
    """Predicts NaN for large inputs."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, inputs):
        return self.linear(inputs) + (100 - inputs[:, :1]).sqrt()


def test_nan_predictions_are_named_and_define_no_metric():
    given = one_class_at(3, -1)
    inputs, labels = given[1].test
    given[1] = fm.Site(
        given[1].train, test=(inputs.clone().index_fill_(0, torch.tensor([3]), 200.0), labels), name="s1"
    )
    said = []
    made = fm.Problem(Fragile(), given, metrics=["auroc"])
    result = train(made, 2, announce=said.append)
    named = [text for text in said if not missing_from(text, "s1", "NaN", "sample 3")]
    assert len(named) == 1
    for metric in ("accuracy", "loss", "auroc"):
        assert [math.isnan(v) for v in result.final[0][metric]["sites"]] == [False, True, False]
        evidence = result.evidence(metric)
        assert [math.isnan(site["value"]) for site in evidence["sites"]] == [False, True, False]
        assert evidence["mean"]["value"] == pytest.approx(result.final[0][metric]["mean"], rel=1e-5)
        against = versus(result.outcomes(), result.outcomes(), metric)
        assert [math.isnan(one.difference) for one in against.at_sites] == [False, True, False]
        assert against.mean.difference == 0


def test_metric_that_raises_at_one_site_leaves_the_others_their_numbers():
    def own(outputs, targets):
        if len(targets) == 10:
            raise ZeroDivisionError("no negatives")
        return 0.7

    with pytest.warns(UserWarning, match="no negatives"):
        result = train(fm.Problem(torch.nn.Linear(2, 2), one_class_at(3, 1), metrics={"own": own}))
    entry = result.final[0]["own"]
    assert entry["sites"][0] == entry["worst"] == 0.7
    assert math.isnan(entry["sites"][1])
    assert not missing_from(result.notes[0], "own", "s1", "ZeroDivisionError")


def test_metric_that_raises_everywhere_is_refused():
    def own(outputs, targets):
        raise KeyError("typo")

    with refused("own", "KeyError", "typo"):
        train(problem(3, metrics={"own": own}))


def test_one_output_tells_two_classes_apart():
    def loss(outputs, targets):
        return F.binary_cross_entropy_with_logits(outputs.squeeze(-1), targets.float())

    made = fm.Problem(torch.nn.Linear(2, 1), one_class_at(3, -1), loss=loss, metrics=["auroc", "brier"]).prepared
    assert (made.task, made.classes, made.primary) == ("binary", 2, "accuracy")
    result = train(made, 30)
    record, row = result.final[0], result.row()[0]
    inputs, labels = made.sites[0].test.inputs, made.sites[0].test.targets
    said = made.flat_model(row, inputs).squeeze(-1) > 0
    assert record["accuracy"]["sites"][0] == float((said == labels).double().mean())
    assert record["auroc"]["mean"] > 0.5
    with refused("site 0", "0 to 2", "one output"):
        fm.Problem(torch.nn.Linear(6, 1), sites(2), loss=loss)
