"""Losses by name: equal to torch's where it has them, and means over samples for every batch."""

import pytest
import torch
from torch.nn import functional as F

import fairmesh as fm
from fairmesh.config.tables import from_table, to_table
from fairmesh.losses.builtin import squared_error
from fairmesh.problems.row_loss import per_sample
from tests.refusals import missing_from, refused

LABELS = torch.arange(12) % 3
OUTPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
MASKS = (torch.arange(24) % 4).reshape(4, 2, 3) - 1  # -1 does not count
DENSE = torch.randn(4, 3, 2, 3, generator=torch.Generator().manual_seed(1))
DIGITS = {"data": {"name": "digits", "nodes": 3}, "rounds": 2, "algorithm": "choco-sgd"}


def test_cross_entropy_and_its_smoothing_are_torchs():
    assert torch.allclose(fm.losses.CrossEntropy()(OUTPUTS, LABELS), F.cross_entropy(OUTPUTS, LABELS))
    smooth = fm.losses.CrossEntropy(label_smoothing=0.1)(OUTPUTS, LABELS)
    assert torch.allclose(smooth, F.cross_entropy(OUTPUTS, LABELS, label_smoothing=0.1))


def test_class_weights_are_constants_of_the_problem():
    weights = (1.0, 2.0, 5.0)
    each = torch.tensor(weights)[LABELS] * F.cross_entropy(OUTPUTS, LABELS, reduction="none")
    assert torch.allclose(fm.losses.CrossEntropy(weights)(OUTPUTS, LABELS), each.mean())
    focal = (1 - OUTPUTS.softmax(1)[range(12), LABELS]) ** 2 * each
    assert torch.allclose(fm.losses.Focal(2.0, weights)(OUTPUTS, LABELS), focal.mean())


def test_focal_without_gamma_is_cross_entropy():
    assert torch.allclose(fm.losses.Focal(gamma=0.0)(OUTPUTS, LABELS), F.cross_entropy(OUTPUTS, LABELS))


def test_binary_cross_entropy_reads_whole_numbers_and_one_output():
    logits, labels = OUTPUTS[:, :1], LABELS % 2
    expected = F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.float())
    for loss in (fm.losses.BinaryCrossEntropy(), fm.losses.CrossEntropy()):
        assert torch.allclose(loss(logits, labels), expected)
    several = (OUTPUTS > 0.3).long()
    expected = F.binary_cross_entropy_with_logits(OUTPUTS, several.float())
    assert torch.allclose(fm.losses.BinaryCrossEntropy()(OUTPUTS, several), expected)


def test_errors_are_torchs():
    numbers = OUTPUTS[:, 0]
    assert torch.allclose(fm.losses.SquaredError()(OUTPUTS[:, 1:2], numbers), F.mse_loss(OUTPUTS[:, 1], numbers))
    assert torch.allclose(fm.losses.AbsoluteError()(OUTPUTS[:, 1:2], numbers), F.l1_loss(OUTPUTS[:, 1], numbers))
    assert torch.allclose(fm.losses.Huber(0.5)(OUTPUTS[:, 1], numbers), F.huber_loss(OUTPUTS[:, 1], numbers, delta=0.5))


def test_ignored_entries_leave_the_mean_of_the_others_of_their_sample():
    found = fm.losses.CrossEntropy(ignore_index=-1).each(DENSE, MASKS)
    expected = [F.cross_entropy(o[None], t[None], ignore_index=-1) for o, t in zip(DENSE, MASKS)]
    assert torch.allclose(found, torch.stack(expected))
    void = torch.full_like(MASKS, -1)
    for loss in (fm.losses.CrossEntropy(ignore_index=-1), fm.losses.Focal(ignore_index=-1)):
        assert loss(DENSE, void) == 0.0


def test_dice_is_zero_for_a_perfect_mask_and_near_one_for_a_wrong_one():
    masks = torch.randint(0, 3, (4, 50), generator=torch.Generator().manual_seed(2))
    perfect = 50.0 * F.one_hot(masks, 3).movedim(-1, 1).float()
    assert float(fm.losses.Dice()(perfect, masks)) == pytest.approx(0.0, abs=1e-5)
    assert float(fm.losses.Dice()(perfect.roll(1, dims=1), masks)) > 0.9


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (fm.losses.CrossEntropy((1.0, 2.0, 5.0), 0.1), OUTPUTS, LABELS),
        (fm.losses.CrossEntropy(ignore_index=-1), DENSE, MASKS),
        (fm.losses.Focal(0.5, (1.0, 2.0, 5.0)), OUTPUTS, LABELS),
        (fm.losses.BinaryCrossEntropy((1.0, 4.0)), OUTPUTS[:, :1], LABELS % 2),
        (fm.losses.Dice(ignore_index=-1), DENSE, MASKS),
        (fm.losses.Huber(), OUTPUTS, OUTPUTS.roll(1)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, fm.losses.NamedLoss) else "",
)
def test_losses_are_means_of_single_samples_and_have_finite_gradients(loss, outputs, targets):
    single = per_sample(loss, outputs, targets)
    assert torch.allclose(single.mean(), loss(outputs, targets), rtol=1e-5)
    gradient = torch.func.grad(lambda o: loss(o, targets))(100 * outputs)
    assert bool(torch.isfinite(gradient).all())


def test_files_name_losses_by_name_or_table():
    assert from_table(fm.Experiment, DIGITS | {"loss": "focal"}).loss == fm.losses.Focal()
    table = {"name": "cross-entropy", "class_weights": "balanced"}
    weighted = from_table(fm.Experiment, DIGITS | {"loss": table})
    assert weighted.loss == fm.losses.CrossEntropy("balanced")
    assert from_table(fm.Experiment, to_table(weighted)).loss == weighted.loss
    plain = from_table(fm.Experiment, DIGITS)
    assert to_table(plain)["loss"] == "cross-entropy"  # as before there were others: identities of runs must not change
    assert plain.problem().loss is F.cross_entropy
    with refused("loss", "focl", "focal"):
        from_table(fm.Experiment, DIGITS | {"loss": "focl"})
    with refused("gamma", -1):
        from_table(fm.Experiment, DIGITS | {"loss": {"name": "focal", "gamma": -1}})


def sites_of(labels: list[list[int]], **fields) -> list[fm.Site]:
    generator = torch.Generator().manual_seed(0)
    made = [(torch.randn(len(one), 2, generator=generator), torch.tensor(one)) for one in labels]
    return [fm.Site(one, test=one) for one in made]


def test_balanced_weights_come_from_the_labels_of_all_sites():
    given = sites_of([[0, 0, 0, 0], [0, 0, 1, 1]])
    made = fm.Problem(torch.nn.Linear(2, 2), given, loss=fm.losses.CrossEntropy("balanced")).prepared
    assert made.loss.class_weights == pytest.approx((8 / (2 * 6), 8 / (2 * 2)))
    kept = made.keeping([0])  # a process that holds one site has the same loss
    assert kept.loss == made.loss
    assert kept.digest(made.digests_here()) == made.digest()
    plain = fm.Problem(torch.nn.Linear(2, 2), given, loss=fm.losses.CrossEntropy((1.0, 2.0))).prepared
    assert plain.digest() != made.digest()
    alone = [given[0], fm.Site(fm.data.Samples.elsewhere(4, made.sites[0].train))]
    with refused("balanced", "list"):
        fm.Problem(torch.nn.Linear(2, 2), alone, loss=fm.losses.Focal(class_weights="balanced"))
    with refused("class_weights", 3, 2):
        fm.Problem(torch.nn.Linear(2, 2), given, loss=fm.losses.CrossEntropy((1.0, 2.0, 3.0)))
    with refused("class_weights", "> 0"):
        fm.losses.CrossEntropy((1.0, 0.0))


@pytest.mark.parametrize("loss", [fm.losses.Focal(class_weights="balanced"), fm.losses.BinaryCrossEntropy("balanced")])
def test_weighted_losses_train(loss):
    given = sites_of([[0, 1] * 10, [0, 0, 0, 1] * 5, [1, 0] * 10])
    model = torch.nn.Linear(2, 1 if isinstance(loss, fm.losses.BinaryCrossEntropy) else 2)
    made = fm.Problem(model, given, loss=loss, metrics=["auroc"])
    records = fm.train(made, fm.Ring(), fm.ADGDA(primal_step=0.5, consensus_step=0.5), 20, measure_every=20).records
    assert records[-1]["loss"]["mean"] < records[0]["loss"]["mean"]
    assert {"accuracy", "auroc"} <= records[-1].keys()


@pytest.mark.parametrize("loss", ["binary-cross-entropy", {"name": "binary-cross-entropy", "class_weights": [1, 2]}])
def test_file_with_binary_cross_entropy_gets_a_model_with_one_output(tmp_path, loss):
    (tmp_path / "t.csv").write_text("site,x,y\n" + "".join(f"{i % 3},{i % 7 - i % 2},{i % 2}\n" for i in range(90)))
    data = {"name": "table", "file": str(tmp_path / "t.csv"), "target": "y", "site": "site"}
    experiment = from_table(fm.Experiment, DIGITS | {"data": data, "loss": loss, "metrics": ["auroc", "f1"]})
    problem = experiment.problem()
    assert (problem.task, problem.classes) == ("binary", 2)
    assert fm.run(experiment).final[0]["accuracy"]["worst"] > 0.0


def test_numbers_without_a_loss_are_fitted_by_squares_and_a_bad_fit_is_told(tmp_path):
    rows = "".join(f"{i % 3},{i % 7},{100 + i % 5}\n" for i in range(90))
    (tmp_path / "t.csv").write_text(f"site,x,y\n{rows}")
    data = {"name": "table", "file": str(tmp_path / "t.csv"), "target": "y", "site": "site", "predict": "numbers"}
    data |= {"scale_target": False}
    said: list[str] = []
    experiment = from_table(fm.Experiment, DIGITS | {"data": data, "metrics": ["r2"]})
    result = fm.run(experiment, announce=said.append, out=tmp_path / "run")
    assert any(not missing_from(text, "numbers", "squared error") for text in said)
    assert 'loss = "squared-error"' in (tmp_path / "run" / "experiment.toml").read_text()
    assert result.final[0]["r2"]["worst"] < 0
    assert any(
        not missing_from(text, "constant answer", "train longer", result.problem.sites[0].name) for text in result.notes
    )
    plain = fm.Problem(torch.nn.Linear(2, 1), [(torch.randn(4, 2), torch.randn(4)) for _ in range(2)]).prepared
    assert plain.loss is squared_error
    assert result.notes[-1] in said


@pytest.mark.parametrize("name", ["huber", "squared-error", "absolute-error"])
def test_loss_of_numbers_refuses_classes(name):
    loss = from_table(fm.losses.NamedLoss, name)
    with refused(name, "class", "cross-entropy", "predict"):
        fm.Problem(torch.nn.Linear(2, 3), [(torch.randn(6, 2), torch.arange(6) % 3)], loss=loss)
