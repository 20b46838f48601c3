"""Random changes of training batches, by functions that take `draw` and by functions that draw from any generator."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fairmesh as fm
from fairmesh.numerics.random_streams import GeneratorStates
from fairmesh.problems.augmentation import Augmenter
from fairmesh.problems.oracle import Oracle
from tests import toys
from tests.refusals import refused
from tests.toys import CLASSES, FEATURES


class Transform(nn.Module):
    """Draws as transforms of torchvision do: each from one of the process's generators, with branches on what it drew;
    it takes any number of arguments."""

    def forward(self, *inputs):
        (sample,) = inputs
        if torch.rand(1).item() < 0.5:
            sample = sample.flip(-1)
        shift = int(torch.randint(0, 3, size=(1,)).item())
        noise = random.uniform(0.9, 1.1) + 0.1 * np.random.standard_normal()  # noqa: NPY002
        return sample.roll(shift, dims=-1) * noise + 0.1 * torch.empty_like(sample).normal_()


def _mixed(inputs, targets, share, other):
    labels = F.one_hot(targets, CLASSES).to(inputs.dtype)
    return share * inputs + (1 - share) * inputs[other], share * labels + (1 - share) * labels[other]


def mixup(inputs, targets, draw):
    return _mixed(inputs, targets, draw(1), draw(len(inputs)).argsort())


def mixup_by_torch(inputs, targets):
    return _mixed(inputs, targets, torch.rand(1), torch.randperm(len(inputs)))


def noisy(inputs, draw):
    """May use random functions of torch next to `draw`."""
    return inputs + draw(1) * torch.randn_like(inputs)


SEEDED = pytest.mark.parametrize("augment", [Transform(), mixup_by_torch], ids=["sample", "batch"])


def problem(augment, **fields) -> fm.Problem:
    return toys.problem(3, augment=augment, sampling=fm.Sampling(batch=5), **fields)


def trained(made: fm.Problem, rounds: int, **options) -> fm.Result:
    return fm.train(made, fm.Ring(), fm.ADGDA(1.0), rounds, dtype="float64", trace="no", **options)


def oracle(augment, hosted, seeds=(0,)) -> Oracle:
    hosted = torch.tensor(hosted)
    return Oracle(problem(augment), hosted, hosted, seeds=seeds, trace=False)


def batch(augment, hosted, seeds=(0,), round_index=4):
    inputs, targets, _ = oracle(augment, hosted, seeds).batches.at(torch.tensor(round_index), 0, 1)
    return inputs, targets


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (Transform(), "sample"),
        (lambda sample: sample, "sample"),
        (lambda sample, strength=0.5: sample, "sample"),
        (torch.relu, "sample"),
        (lambda batch, draw: batch, "inputs, draw"),
        (lambda batch, uniforms: batch, "inputs, draw"),
        (lambda inputs, labels: (inputs, labels), "inputs, targets"),
        (lambda x, y, u: (x, y), "inputs, targets, draw"),
        (lambda inputs, targets=None, draw=None: (inputs, targets), "inputs, targets, draw"),
    ],
)
def test_augment_is_told_by_its_parameters(function, takes):
    assert Augmenter.of(function).takes == takes


@SEEDED
def test_seeded_calls_leave_the_generators_of_the_process_as_they_were_and_do_not_depend_on_them(augment):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)  # noqa: NPY002
        before = GeneratorStates.now()
        found.append(trained(problem(augment), 3).row())
        assert before.moved() == []
    assert torch.equal(*found)


@SEEDED
def test_seeded_calls_are_the_same_wherever_a_node_is_hosted_and_whatever_trains_next_to_it(augment):
    together = batch(augment, [0, 1, 2], seeds=(0, 1))
    for node, replica in itertools.product(range(3), range(2)):
        for own, all_ in zip(batch(augment, [node], seeds=(replica,)), together):
            assert torch.equal(own[0], all_[replica * 3 + node])


def test_seeded_calls_differ_between_samples_nodes_rounds_and_seeds():
    rounds = [batch(lambda inputs: torch.randn_like(inputs), [0, 1], seeds=(0, 1), round_index=t)[0] for t in (0, 1)]
    found = torch.cat(rounds).reshape(-1, FEATURES)[:, 0]
    assert len(found.unique()) == len(found) == 2 * 2 * 2 * 5


@pytest.mark.parametrize(
    "augment", [Transform(), mixup, mixup_by_torch, noisy], ids=["sample", "mixup", "batch", "both"]
)
@pytest.mark.quick_cases("all")
def test_augmented_runs_resume_bit_for_bit_and_agree_however_many_models_are_evaluated_at_once(augment, tmp_path):
    made = problem(augment)
    whole = trained(made, 4)
    trained(made, 2, out=tmp_path)
    assert torch.equal(whole.row(), trained(made, 4, out=tmp_path, resume=True).row())
    one = trained(problem(augment, models_at_once=1), 4)
    torch.testing.assert_close(one.row(), whole.row(), rtol=1e-10, atol=1e-12)


WEIGHTS = (1.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        (fm.losses.CrossEntropy(class_weights=WEIGHTS, label_smoothing=0.1, ignore_index=-1), torch.tensor(WEIGHTS)),
        (fm.losses.Focal(class_weights=WEIGHTS), torch.tensor(WEIGHTS)),
        (fm.losses.Dice(background=True), None),
    ],
)
def test_soft_loss_of_pure_labels_is_the_loss_of_the_labels(loss, weights):
    outputs, labels = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    pure = loss.soft(outputs, F.one_hot(labels, 3).float(), weights)
    torch.testing.assert_close(pure, loss.each(outputs, labels, weights))


def test_soft_loss_of_one_logit_reads_shares_of_no_and_yes():
    logits, shares = torch.tensor([[0.5], [-2.0]]), torch.tensor([0.25, 1.0])
    both = torch.stack([1 - shares, shares], dim=1)
    wanted = F.binary_cross_entropy_with_logits(logits.flatten(), shares, reduction="none")
    for loss in (fm.losses.BinaryCrossEntropy(), fm.losses.CrossEntropy()):
        torch.testing.assert_close(loss.soft(logits, both), wanted)


def test_soft_cross_entropy_is_that_of_torch():
    outputs = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    mixed = torch.softmax(outputs.flip(0), dim=1)
    wanted = F.cross_entropy(outputs, mixed, reduction="none", label_smoothing=0.2).mean(dim=1)
    torch.testing.assert_close(fm.losses.CrossEntropy(label_smoothing=0.2).soft(outputs, mixed), wanted)


@pytest.mark.parametrize("augment", [mixup, mixup_by_torch])
def test_mixed_labels_train_with_named_losses_metrics_and_algorithms_that_follow_errors(augment):
    result = trained(problem(augment, loss=fm.losses.Focal(), metrics=["balanced-accuracy", "brier"]), 2)
    assert {"balanced-accuracy", "brier", "accuracy"} <= set(result.records[-1])
    rows = oracle(augment, [0, 1, 2])
    errors = rows.errors(rows.initial_models(), torch.tensor(0), 0)
    assert bool(((errors >= 0) & (errors <= 1)).all())
    with refused("Huber", "mixed"):
        fm.losses.Huber().soft(torch.zeros(2, 2), torch.zeros(2, 2))


OWN, MIXED = np.random.default_rng(0), ("(inputs, targets)", "Tensor")
OTHER_PARAMETERS = [lambda a, b, c, d: a, lambda: 0, lambda inputs, *, strength: inputs]


@pytest.mark.parametrize(
    ("augment", "names"),
    [
        *[(function, ("draw", "targets")) for function in OTHER_PARAMETERS],
        (lambda sample: sample + OWN.standard_normal(), ("twice", "np.random")),
        (lambda sample: sample[: 1 + int(torch.randint(0, 2, (1,)))], ("same shape",)),
        (lambda batch: batch + torch.rand(len(batch), 1), ("one sample",)),
        (lambda sample: sample.no_such_method(), ("no_such_method", "sample")),
        (lambda inputs, targets: inputs, MIXED),
        (lambda inputs, targets, draw: inputs, MIXED),
    ],
)
def test_unfit_augmentation_is_refused_before_training(augment, names):
    with refused("augment", *names):
        problem(augment)


def test_seeded_augmentation_is_announced_with_its_granularity():
    said = []
    fm.train(problem(Transform()), fm.Ring(), fm.algorithms.DSGD(0.1), 1, announce=said.append, trace="no")
    assert any("every sample" in line and "CPU" in line for line in said)


def test_augmentation_of_a_dictionary_of_inputs_gets_one_sample_of_each():
    def erased(sample):
        return {"image": sample["image"] * (torch.rand(()) < 0.5), "age": sample["age"]}

    def forward(self, image, age):
        return self.head(torch.cat([image.flatten(1), age], dim=1))

    data = {"image": torch.ones(8, 2, 2), "age": torch.ones(8, 1), "label": torch.arange(8) % 2}
    model = toys.module(forward, head=nn.Linear(5, 2))
    made = fm.Problem(model, [data] * 2, augment=erased, sampling=fm.Sampling(batch=8)).prepared
    inputs, _, _ = Oracle(made, torch.arange(2), torch.arange(2), seeds=[0]).batches.at(torch.tensor(0), 0, 1)
    assert set(inputs["image"].mean(dim=(2, 3)).flatten().tolist()) == {0.0, 1.0}
    assert bool((inputs["age"] == 1).all())


def test_transforms_of_torchvision_train_and_repeat():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    transform = v2.Compose(
        [v2.RandomHorizontalFlip(), v2.RandomCrop(8, padding=2), v2.ColorJitter(0.2), v2.RandomErasing(p=0.5)]
    )
    images = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    sites = [(images, torch.arange(12) % 2)] * 2
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made = fm.Problem(model, sites, augment=transform, sampling=fm.Sampling(batch=4))
        rows.append(fm.train(made, fm.Ring(), fm.algorithms.DSGD(0.1), 3, device=device).row())
    assert torch.equal(*rows)
    cut_mix = v2.CutMix(num_classes=2)
    made = fm.Problem(model, sites, augment=lambda inputs, targets: cut_mix(inputs, targets))
    fm.train(made, fm.Ring(), fm.algorithms.DSGD(0.1), 1, device=device)
