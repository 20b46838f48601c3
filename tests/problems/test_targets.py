"""Problems whose targets are masks, several labels, or numbers train and are measured by metrics of their own."""

import torch

import fairmesh as fm

ALGORITHM = fm.ADGDA(primal_step=0.3, dual_step=0.05, consensus_step=0.5)


def drawn(k: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(k))


def trained(made: fm.Problem) -> list[dict]:
    return fm.train(made, fm.Ring(), ALGORITHM, 30, measure_every=30).records


def test_masks_train_by_dice_and_by_cross_entropy_with_void_pixels():
    given = []
    for k in range(3):
        inputs = drawn(k, 8, 1, 4, 4)
        masks = (inputs[:, 0] > 0).long()
        masks[0] = 255  # a sample without any valid pixel
        masks[:, 0, 0] = 255
        given.append(fm.Site((inputs, masks), test=(inputs, masks)))
    for loss in (fm.losses.Dice(ignore_index=255), fm.losses.CrossEntropy("balanced", ignore_index=255)):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(1, 2, 1)
        made = fm.Problem(model, given, loss=loss, metrics=["dice", "accuracy"])
        assert (made.task, made.primary) == ("masks", "accuracy")
        first, last = trained(made)
        assert last["loss"]["worst"] < first["loss"]["worst"]
        assert 0.0 <= last["dice"]["worst"] <= 1.0
        assert last["accuracy"]["worst"] > 0.5


def test_several_labels_per_sample_train_by_binary_cross_entropy():
    given = []
    for k in range(3):
        inputs = drawn(k, 20, 3)
        given.append(fm.Site((inputs, (inputs > 0).long()), test=(inputs, (inputs > 0).long())))
    made = fm.Problem(
        torch.nn.Linear(3, 3), given, loss=fm.losses.BinaryCrossEntropy("balanced"), metrics=["accuracy", "auroc", "f1"]
    )
    assert (made.task, made.classes) == ("multi-label", None)
    result = fm.train(made, fm.Ring(), ALGORITHM, 60, measure_every=60)
    assert result.final[0]["accuracy"]["worst"] > 0.7
    assert result.final[0]["auroc"]["worst"] > 0.8
    assert result.support[0] == {"n": 20, "classes": (made.sites[0].test.targets > 0).sum(0).tolist()}


def test_several_numbers_per_sample_are_measured_by_r2():
    given = [fm.Site((x := drawn(k, 20, 2), x @ torch.eye(2)), test=(x, x)) for k in range(3)]
    made = fm.Problem(torch.nn.Linear(2, 2), given, loss=fm.losses.Huber(), metrics=["r2", "mae", "rmse"])
    first, last = trained(made)
    assert last["r2"]["worst"] > first["r2"]["worst"]
    assert last["mae"]["worst"] == max(last["mae"]["sites"])
