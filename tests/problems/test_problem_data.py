"""Data that cannot be trained on is refused when the problem is made, with the site, the sample and what to do."""

import math

import pytest
import torch
from torch.utils.data import TensorDataset

import fairmesh as fm
from tests.refusals import refused
from tests.toys import CLASSES, FEATURES, Items, problem, sites, small_model

INPUTS = torch.linspace(-1, 1, 12 * FEATURES).reshape(12, FEATURES)
LABELS = torch.arange(12) % CLASSES
GOOD = (INPUTS, LABELS)


def problem_refused(*names: object, **fields) -> None:
    """Passes if the problem is refused with an error that holds all of the names."""
    with refused(*names):
        fm.Problem(**{"model": small_model} | fields)


def with_bad_site(bad, at: int = 2, count: int = 4, **fields) -> list[fm.Site]:
    return [fm.Site(bad if i == at else GOOD, name="Lyon" if i == at else None, **fields) for i in range(count)]


def spoiled(tensor: torch.Tensor, sample: int, value: float) -> torch.Tensor:
    tensor = tensor.clone().float()
    tensor[sample] = value
    return tensor


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (fm.topologies.Torus(2, 4), (3, 8, "nodes")),
        (fm.topologies.Matrix(((0.5, 0.5), (0.5, 0.5))), (3, 2, "nodes")),
        (fm.topologies.Edges(((0, 1), (1, 2), (2, 3))), (3,)),
    ],
    ids=["torus", "matrix", "edges"],
)
def test_topology_of_another_size_than_the_sites_is_refused_with_both_numbers(topology, words):
    with refused(*words):
        fm.train(problem(3), topology, fm.algorithms.DSGD(), 1)


NAN, INF, NUMBERS, MSE = math.nan, math.inf, torch.zeros(12, CLASSES), torch.nn.functional.mse_loss
EMPTY = ((INPUTS[:0], LABELS[:0]), TensorDataset(INPUTS[:0], LABELS[:0]), Items(0, lambda i: None))
WRAPS = (tuple, lambda pair: fm.data.Samples(*pair), lambda pair: TensorDataset(*pair))


def bad(train, *words: object, **fields):
    """Unfit training data at one of four sites."""
    return ("site 2", *words), {"sites": with_bad_site(train), **fields}


def held(*words: object, **sets):
    """An unfit held-out set."""
    return words, {"sites": [fm.Site(GOOD, **sets)]}


def numbers(value: float) -> list[fm.Site]:
    return [fm.Site((INPUTS, NUMBERS)), fm.Site((INPUTS, spoiled(NUMBERS, 5, value)), name="Lyon")]


def prior(values: list[float], *words: object):
    return words, {"sites": with_bad_site(GOOD), "prior": values}


UNSEEN = (spoiled(INPUTS, 3, NAN), LABELS)


REFUSED = {
    "no site": (("site",), {"sites": []}),
    **{f"empty site {k}": bad(empty, "Lyon") for k, empty in enumerate(EMPTY)},
    **{
        f"input {value} {k}": bad(wrap((spoiled(INPUTS, 7, value), LABELS)), "Lyon", "inputs of sample 7")
        for value in (NAN, INF, -INF)
        for k, wrap in enumerate(WRAPS)
    },
    **{
        f"target {value}": (("site 1", "Lyon", "targets of sample 5"), {"sites": numbers(value), "loss": MSE})
        for value in (NAN, INF)
    },
    "test input": held("test set of site 0", "sample 3", test=UNSEEN),
    "shared validation input": (("validation set", "sample 3"), {"sites": [fm.Site(GOOD)], "validation": UNSEEN}),
    "labels from 1": bad((INPUTS, LABELS + 1), "Lyon", 1, 3, "3 classes", "0..2"),
    "labels from -1": bad((INPUTS, LABELS - 1), "Lyon", -1, 1, "3 classes", "0..2"),
    "test labels": held("test set of site 0", 5, 7, "0..2", test=(INPUTS, LABELS + 5)),
    "validation labels": held("validation set of site 0", 5, 7, "0..2", validation=(INPUTS, LABELS + 5)),
    "more inputs than targets": bad((INPUTS, LABELS[:11]), "(12, 6)", "(11,)"),
    "no pair": bad([INPUTS], "(inputs, targets)"),
    "inputs of another shape": bad((INPUTS[:, :5], LABELS), "Lyon", "inputs", "(5,)", "site 0", "(6,)"),
    "inputs of another dtype": bad((INPUTS.double(), LABELS), "inputs", "float64", "float32"),
    "targets of another dtype": bad((INPUTS, LABELS.float()), "targets", "float32", "int64"),
    "targets of another shape": bad((INPUTS, LABELS[:, None]), "targets", "(1,)"),
    "test inputs of another shape": held("test set of site 0", "inputs", "(5,)", "(6,)", test=(INPUTS[:, :5], LABELS)),
    "test targets of another kind": held("test set of site 0", "targets", "float32", test=(INPUTS, LABELS.float())),
    **{f"prior {v}": prior([0.5, v, 0.25, 0.25], "prior of site 1", v, "> 0") for v in (0.0, -0.25, NAN, INF)},
    **{f"{count} priors": prior([1.0] * count, f"{count} entries", "4 sites") for count in (3, 5)},
}


@pytest.mark.parametrize(("words", "fields"), REFUSED.values(), ids=REFUSED)
def test_unfit_data_is_refused_by_site_and_sample(words, fields):
    problem_refused(*words, **fields)


def test_problem_takes_a_shared_test_set_for_sites_without_one():
    made = [fm.Site(GOOD, test=None if i == 2 else GOOD) for i in range(4)]
    assert fm.Problem(model=small_model, sites=made, test=GOOD).n == 4


def test_prior_is_scaled_to_one():
    made = fm.Problem(model=small_model, sites=sites(2), prior=[1.0, 3.0])
    assert made.prior_of_sites.tolist() == [0.25, 0.75]
