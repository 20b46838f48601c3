"""Another class with the same fields does not continue a checkpoint, whatever it is a class of."""

from typing import Any

import pytest
import torch
from torch import nn

import fairmesh as fm
from tests import toys
from tests.refusals import refused


class OtherDSGD(fm.algorithms.DSGD):
    pass


class OtherTopK(fm.compressors.TopK):
    pass


class OtherRing(fm.Ring):
    pass


class OtherChiSquare(fm.ChiSquare):
    pass


class OtherStaircase(fm.schedules.Staircase):
    pass


class OtherPrice(fm.weighting.ShadowPrice):
    pass


class Net(nn.Linear):
    pass


class OtherNet(nn.Linear):
    pass


def one_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def other_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def made(net: type[nn.Module]) -> fm.Problem:
    torch.manual_seed(0)
    return toys.problem(3, model=net(toys.FEATURES, toys.CLASSES))


def gossip(compressor: Any) -> fm.ChocoSGD:
    return fm.ChocoSGD(0.1, consensus_step=0.2, compressor=compressor)


# Problems are made by the test: making one evaluates the model, which takes longer than to collect a whole folder.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "algorithm": ({"algorithm": fm.algorithms.DSGD(0.1)}, {"algorithm": OtherDSGD(0.1)}),
    "compressor": ({"algorithm": gossip(fm.compressors.TopK(0.5))}, {"algorithm": gossip(OtherTopK(0.5))}),
    "topology": ({"topology": fm.Ring()}, {"topology": OtherRing()}),
    "regularizer": (
        {"algorithm": fm.ADGDA(0.1, regularizer=fm.ChiSquare(0.5))},
        {"algorithm": fm.ADGDA(0.1, regularizer=OtherChiSquare(0.5))},
    ),
    "schedule": (
        {"algorithm": fm.algorithms.DSGD(fm.schedules.Staircase(0.5, 0.5, 3))},
        {"algorithm": fm.algorithms.DSGD(OtherStaircase(0.5, 0.5, 3))},
    ),
    "weighting": (
        {"algorithm": fm.TrackedADGDA(0.1, weighting=fm.weighting.ShadowPrice())},
        {"algorithm": fm.TrackedADGDA(0.1, weighting=OtherPrice())},
    ),
    "loss": (
        {"problem": lambda: toys.problem(3, loss=one_loss)},
        {"problem": lambda: toys.problem(3, loss=other_loss)},
    ),
    "model": ({"problem": lambda: made(Net)}, {"problem": lambda: made(OtherNet)}),
    "data": (
        {"problem": lambda: toys.problem(3, sites=toys.sites(3, seed=0))},
        {"problem": lambda: toys.problem(3, sites=toys.sites(3, seed=1))},
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.quick_cases(3)
def test_checkpoint_is_not_continued_by_another_class_with_the_same_fields(kind, tmp_path):
    usual = {"problem": lambda: toys.problem(3), "topology": fm.Ring(), "algorithm": fm.algorithms.DSGD(0.1)}
    one, other = ({**usual, **changed} for changed in PAIRS[kind])
    for arguments in (one, other):
        arguments["problem"] = arguments["problem"]()
    fm.train(**one, rounds=2, out=tmp_path / "run", trace="no")
    with refused(tmp_path / "run", "another experiment", error=fm.errors.CheckpointError):
        fm.train(**other, rounds=2, out=tmp_path / "run", resume=True, trace="no")
    assert fm.train(**one, rounds=2, out=tmp_path / "run", resume=True, trace="no").rounds == 2
