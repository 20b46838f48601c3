"""The metrics that files can name equal scikit-learn's, for whole sets and for weighted resamples, or are NaN."""

import time

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.config.registry import registered
from fairmesh.metrics import NamedMetric, resampled
from fairmesh.problems.problem import prepare
from tests.late import late
from tests.refusals import refused

sk = late("sklearn.metrics")
NAMES = sorted(registered(NamedMetric))


def drawn(samples: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are right more often than not, rounded so that scores tie, and labels of every class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % classes
    outputs = torch.randn(samples, classes, generator=generator) + torch.nn.functional.one_hot(labels, classes)
    return (2 * outputs).round() / 2, labels


def counts_like(labels: torch.Tensor, resamples: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 4, (resamples, len(labels)), generator=torch.Generator().manual_seed(seed))


def by_sklearn(name: str, outputs: torch.Tensor, labels: torch.Tensor, weights: np.ndarray) -> float:
    """Returns scikit-learn's value, for two or more classes."""
    classes = outputs.shape[1]
    scores, predicted, truth = outputs.double().softmax(1).numpy(), outputs.argmax(1).numpy(), labels.numpy()
    one_hot, two, each = np.eye(classes)[truth], classes == 2, {"sample_weight": weights}

    def mean(score) -> float:
        return np.mean([score(one_hot[:, c], scores[:, c], **each) for c in ([1] if two else range(classes))])

    return {
        "accuracy": lambda: sk.accuracy_score(truth, predicted, **each),
        "balanced-accuracy": lambda: sk.balanced_accuracy_score(truth, predicted, **each),
        "auroc": lambda: mean(sk.roc_auc_score),
        "average-precision": lambda: mean(sk.average_precision_score),
        "sensitivity": lambda: sk.recall_score(truth == 1, scores[:, 1] >= 0.5, **each),
        "specificity": lambda: sk.recall_score(truth != 1, scores[:, 1] < 0.5, **each),
        "f1": lambda: sk.f1_score(truth, predicted, average="binary" if two else "macro", **each),
        "brier": lambda: np.average(((scores - one_hot) ** 2).sum(1) / (2 if two else 1), weights=weights),
    }[name]()


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize(
    "name", ["accuracy", "auroc", "average-precision", "balanced-accuracy", "brier", "f1", "sensitivity", "specificity"]
)
def test_metrics_of_classes_equal_those_of_scikit_learn(name, classes):
    outputs, labels = drawn(60, classes)
    metric = registered(NamedMetric)[name]()
    assert metric(outputs, labels) == pytest.approx(by_sklearn(name, outputs, labels, np.ones(60)), abs=1e-12)
    counts = counts_like(labels)
    expected = [by_sklearn(name, outputs, labels, row.numpy()) for row in counts]
    assert metric.resampled(outputs, labels, counts).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["accuracy", "auroc", "average-precision", "brier", "calibration-error", "f1"])
def test_one_logit_gives_what_two_give(name):
    outputs, labels = drawn(40, 2, seed=3)
    single = outputs[:, 1] - outputs[:, 0]
    keep = single != 0  # on a tie, two outputs mean class 0 and so does a single one
    metric = registered(NamedMetric)[name]()
    both = metric(outputs[keep], labels[keep])
    assert metric(single[keep], labels[keep]) == pytest.approx(both, abs=1e-12)
    assert metric(single[keep, None], labels[keep].float()) == pytest.approx(both, abs=1e-12)


def test_calibration_error_is_the_weighted_distance_in_each_bin():
    sure = torch.tensor([0.55, 0.58, 0.81, 0.97, 0.98])
    labels = torch.tensor([1, 0, 1, 1, 1])
    expected = (2 * abs(0.5 - 0.565) + abs(1 - 0.81) + 2 * abs(1 - 0.975)) / 5
    assert fm.metrics.CalibrationError(bins=10)(sure.logit(), labels) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("numbers", [1, 3])
def test_metrics_of_numbers_equal_those_of_scikit_learn(numbers):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(30, numbers, generator=generator, dtype=torch.float64) + 100
    outputs = targets + 0.5 * torch.randn(30, numbers, generator=generator, dtype=torch.float64)
    given = targets.squeeze(1) if numbers == 1 else targets
    for row in [torch.ones(30), *counts_like(targets[:, 0])]:
        weights = {"sample_weight": row.numpy()}
        expected = {
            "mae": sk.mean_absolute_error(targets, outputs, **weights),
            "rmse": sk.mean_squared_error(targets, outputs, **weights) ** 0.5,
            "r2": sk.r2_score(targets, outputs, **weights),
        }
        for name, value in expected.items():
            found = registered(NamedMetric)[name]().resampled(outputs, given, row[None])
            assert found.tolist() == pytest.approx([value], abs=1e-10)


def test_several_labels_per_sample_are_averaged():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(40, 3, generator=generator)
    targets = (torch.rand(40, 3, generator=generator) < 0.5).float()
    scores, predicted = outputs.sigmoid().numpy(), (outputs > 0).numpy()
    assert fm.metrics.AUROC()(outputs, targets) == pytest.approx(sk.roc_auc_score(targets, scores))
    assert fm.metrics.F1()(outputs, targets) == pytest.approx(sk.f1_score(targets, predicted, average="macro"))
    assert fm.metrics.Accuracy()(outputs, targets) == pytest.approx((predicted == targets.numpy()).mean())


def test_dice_is_the_overlap_of_masks_without_background_and_void_entries():
    truth = torch.tensor([[0, 1, 1, 2], [0, 0, 255, 1], [255, 255, 255, 255]])
    said = torch.tensor([[0, 1, 2, 2], [1, 0, 1, 1], [1, 1, 1, 1]])
    outputs = torch.nn.functional.one_hot(said, 3).movedim(-1, 1).float()
    first = (2 * 1 / 3 + 2 * 1 / 3) / 2
    second = 2 * 1 / 3  # class 2 is in neither mask, and the third pixel is void
    assert fm.metrics.Dice()(outputs, truth) == pytest.approx((first + second) / 2)
    assert fm.metrics.Accuracy()(outputs, truth) == pytest.approx((3 / 4 + 2 / 3) / 2)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_not_defined_where_a_class_is_missing(name):
    """Never 0 and never 0.5. A share of right samples is defined for one class too."""
    metric = registered(NamedMetric)[name]()
    outputs = torch.tensor([0.3, -0.2, 0.9])
    if "numbers" in metric.tasks:
        found = metric(outputs, torch.ones(3))
        assert np.isnan(found) == (name == "r2")
    elif "binary" in metric.tasks:
        absent = metric(outputs, torch.zeros(3, dtype=torch.int64))
        missing = ("auroc", "average-precision", "balanced-accuracy", "f1", "sensitivity")
        assert np.isnan(absent) == (name in missing)
        assert np.isnan(metric(outputs, torch.ones(3, dtype=torch.int64))) == (
            name in ("auroc", "average-precision", "balanced-accuracy", "specificity")
        )
    else:
        assert np.isnan(metric(torch.zeros(2, 3, 4), torch.full((2, 4), 255)))


def test_one_sample_has_an_accuracy_and_neither_auroc_nor_r2():
    outputs, labels = torch.tensor([[0.0, 1.0]]), torch.tensor([1])
    assert fm.metrics.Accuracy()(outputs, labels) == 1.0
    assert np.isnan([fm.metrics.AUROC()(outputs, labels), fm.metrics.R2()(torch.ones(1), torch.ones(1))]).all()


def test_resamples_of_a_function_are_the_function_of_repeated_samples():
    outputs, labels = drawn(20, 3)
    counts = counts_like(labels)

    def own(outputs, labels):
        return (outputs.argmax(1) == labels).double().mean()

    expected = fm.metrics.Accuracy().resampled(outputs, labels, counts)
    assert resampled(own, outputs, labels, counts).tolist() == pytest.approx(expected.tolist())
    assert resampled(fm.metrics.Accuracy(), outputs, labels, counts).tolist() == pytest.approx(expected.tolist())


def test_two_thousand_resamples_of_fifty_sites_take_less_than_a_second():
    sites = [drawn(100, 2, seed=k) for k in range(50)]
    counts = torch.randint(0, 3, (2000, 100)).float()
    fm.metrics.Accuracy().resampled(*sites[0], counts)
    begun = time.process_time()
    for outputs, labels in sites:
        fm.metrics.Accuracy().resampled(outputs, labels, counts)
    assert time.process_time() - begun < 1.0


def test_sensitivity_at_a_threshold_of_a_class_of_several():
    outputs, labels = drawn(60, 3, seed=5)
    scores = outputs.double().softmax(1)[:, 2].numpy()
    found = fm.metrics.Sensitivity(threshold=0.3, positive=2)(outputs, labels)
    assert found == pytest.approx(sk.recall_score(labels == 2, scores >= 0.3))


SICK, ILL = fm.metrics.Sensitivity(positive="sick"), fm.metrics.Sensitivity(positive="ill")
SITES = [fm.Site(train=(torch.eye(2).repeat(4, 1), torch.arange(8) % 2))] * 2


def with_metrics(metrics: list, **fields) -> fm.Problem:
    return fm.Problem(torch.nn.Linear(2, 2), SITES, metrics=metrics, **fields)


REFUSED = {
    "threshold": (lambda: fm.metrics.Sensitivity(threshold=1.5), ("threshold", "(0, 1)", 1.5)),
    "positive": (lambda: fm.metrics.Specificity(positive=-1), ("positive", -1)),
    "bins": (lambda: fm.metrics.CalibrationError(bins=0), ("bins", 0)),
    "no such class": (lambda: with_metrics([SICK], class_names=["ill", "well"]), ("sensitivity", "sick", "well")),
    "no names": (lambda: with_metrics([ILL]), ("sensitivity", "ill", "number")),
    "no problem": (lambda: ILL(torch.zeros(2, 2), torch.zeros(2).long()), ("ill", "number")),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_settings_that_do_not_fit_are_refused(call, words):
    with refused(*words):
        call()


def test_sensitivity_takes_the_positive_class_by_its_name():
    made = with_metrics([ILL, {"name": "specificity", "positive": 1}], class_names=["ill", "well"])
    by_number = {"sensitivity": fm.metrics.Sensitivity(positive=0), "specificity": fm.metrics.Specificity(positive=1)}
    assert prepare(made).metrics == by_number
