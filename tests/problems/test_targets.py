"""Problems whose targets are masks, several labels, or numbers train and are measured by metrics of their own."""

import math

import pytest
import torch

import fairmesh as fm
from tests.refusals import missing_from, refused

ALGORITHM = fm.ADGDA(primal_step=0.3, dual_step=0.05, consensus_step=0.5)


def drawn(k: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(k))


def trained(made: fm.Problem) -> list[dict]:
    return fm.train(made, fm.Ring(), ALGORITHM, 30, measure_every=30).records


@pytest.mark.parametrize(
    "loss", [fm.losses.Dice(ignore_index=255), fm.losses.CrossEntropy("balanced", ignore_index=255)]
)
def test_masks_train_by_dice_and_by_cross_entropy_with_void_pixels(loss):
    given = []
    for k in range(3):
        inputs = drawn(k, 8, 1, 4, 4)
        masks = (inputs[:, 0] > 0).long()
        masks[0] = 255  # a sample without any valid pixel
        masks[:, 0, 0] = 255
        given.append(fm.Site((inputs, masks), test=(inputs, masks)))
    torch.manual_seed(0)
    made = fm.Problem(torch.nn.Conv2d(1, 2, 1), given, loss=loss, metrics=["dice", "accuracy"])
    assert (made.task, made.prepared.primary) == ("masks", "accuracy")
    first, last = trained(made)
    assert last["loss"]["worst"] < first["loss"]["worst"]
    assert 0.0 <= last["dice"]["worst"] <= 1.0
    assert last["accuracy"]["worst"] > 0.5


def masks_of(k: int, *, void: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = drawn(k, 6, 1, 4, 4)
    masks = (inputs[:, 0] > 0).long()
    masks[:, 0] = 255
    return inputs, masks.fill_(255) if void else masks


@pytest.mark.parametrize("metrics", [[], ["dice"]])
def test_site_whose_test_masks_are_all_void_is_named_and_has_no_metric(metrics):
    given = [fm.Site(masks_of(k), test=masks_of(9 + k, void=k == 1), name=f"s{k}") for k in range(3)]
    made = fm.Problem(torch.nn.Conv2d(1, 2, 1), given, loss=fm.losses.Dice(ignore_index=255), metrics=metrics)
    with pytest.warns(UserWarning, match="255") as said:
        result = fm.train(made, fm.Ring(), ALGORITHM, 2, own_models=True)
    (text,) = {str(one.message) for one in said}
    assert not missing_from(text, "s1", "test", "255", "6")
    for name in ("loss", *metrics):
        entry = result.final[0][name]
        assert [math.isnan(value) for value in entry["sites"]] == [False, True, False]
        assert entry["best"] > 0.0


def test_mask_with_a_label_that_the_model_does_not_have_is_refused_also_when_it_is_streamed():
    inputs, masks = (part.repeat(4, *[1] * (part.ndim - 1)) for part in masks_of(1))
    masks[13, 3, 3] = 7
    model, loss = torch.nn.Conv2d(1, 2, 1), fm.losses.Dice(ignore_index=255)
    with refused("north", "7", "0..1"):
        fm.Problem(model, [fm.Site(masks_of(0)), fm.Site((inputs, masks), name="north")], loss=loss)
    streamed = fm.data.Streamed(torch.utils.data.TensorDataset(inputs, masks))
    given = [fm.Site(masks_of(0), test=masks_of(3)), fm.Site(streamed, test=masks_of(2), name="north")]
    made = fm.Problem(model, given, loss=loss)  # looks at 8 items, and item 13 is none of them
    with refused("north", "item 13", "7"):
        fm.train(made, fm.Ring(), ALGORITHM, 40)


@pytest.mark.parametrize(
    ("loss", "void", "words"),
    [
        *[
            (loss, False, ("site 0", "255", "0..1", "ignore_index=255"))
            for loss in (fm.losses.Dice(), fm.losses.CrossEntropy(), torch.nn.functional.cross_entropy)
        ],
        (fm.losses.CrossEntropy(ignore_index=255), True, ("north", "255")),
    ],
)
def test_training_masks_are_refused_with_a_void_label_that_the_loss_reads_and_with_nothing_else(loss, void, words):
    given = [fm.Site(masks_of(0)), fm.Site(masks_of(1, void=void), name="north")]
    with refused(*words):
        fm.Problem(torch.nn.Conv2d(1, 2, 1), given, loss=loss)


def test_several_labels_per_sample_train_by_binary_cross_entropy():
    torch.manual_seed(0)  # of the model, whatever ran before
    given = []
    for k in range(3):
        inputs = drawn(k, 20, 3)
        given.append(fm.Site((inputs, (inputs > 0).long()), test=(inputs, (inputs > 0).long())))
    made = fm.Problem(
        torch.nn.Linear(3, 3), given, loss=fm.losses.BinaryCrossEntropy("balanced"), metrics=["accuracy", "auroc", "f1"]
    ).prepared
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
