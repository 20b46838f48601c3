"""Data that cannot be trained on is refused when the problem is made, with the site, the sample and what to do."""

import math

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import fairmesh as fm
from tests.refusals import refused
from tests.toys import CLASSES, FEATURES, problem, sites, small_model

INPUTS = torch.linspace(-1, 1, 12 * FEATURES).reshape(12, FEATURES)
LABELS = torch.arange(12) % CLASSES
GOOD = (INPUTS, LABELS)


class Nothing(Dataset):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int):
        raise IndexError(index)


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


def test_problem_accepts_sound_data():
    assert fm.Problem(model=small_model, sites=with_bad_site(GOOD)).n == 4


@pytest.mark.parametrize("topology", [fm.topologies.Torus(2, 4), fm.topologies.Matrix(((0.5, 0.5), (0.5, 0.5)))])
def test_topology_of_another_size_than_the_sites_is_refused_with_both_numbers(topology):
    with refused("3", 8 if isinstance(topology, fm.topologies.Torus) else 2, "nodes"):
        fm.train(problem(3), topology, fm.algorithms.DSGD(), 1)


def test_edges_that_name_a_node_without_a_site_are_refused():
    with refused("3"):
        fm.train(problem(3), fm.topologies.Edges(((0, 1), (1, 2), (2, 3))), fm.algorithms.DSGD(), 1)


def test_problem_refuses_no_site_at_all():
    problem_refused("site", sites=[])


@pytest.mark.parametrize("empty", [(INPUTS[:0], LABELS[:0]), TensorDataset(INPUTS[:0], LABELS[:0]), Nothing()])
def test_problem_refuses_an_empty_site_by_number_and_name(empty):
    problem_refused("site 2", "Lyon", sites=with_bad_site(empty))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [tuple, lambda pair: fm.data.Samples(*pair), lambda pair: TensorDataset(*pair)])
def test_problem_refuses_a_non_finite_input_with_site_and_sample(value, wrap):
    bad = wrap((spoiled(INPUTS, 7, value), LABELS))
    problem_refused("site 2", "Lyon", "inputs of sample 7", sites=with_bad_site(bad))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_problem_refuses_a_non_finite_target_with_site_and_sample(value):
    targets = torch.zeros(12, CLASSES)
    train = [fm.Site((INPUTS, targets)), fm.Site((INPUTS, spoiled(targets, 5, value)), name="Lyon")]
    problem_refused("site 1", "Lyon", "targets of sample 5", sites=train, loss=torch.nn.functional.mse_loss)


def test_problem_refuses_a_non_finite_test_input_with_split_site_and_sample():
    held = (spoiled(INPUTS, 3, math.nan), LABELS)
    problem_refused("test set of site 0", "sample 3", sites=[fm.Site(GOOD, test=held)])


def test_problem_refuses_a_non_finite_sample_of_a_shared_validation_set():
    held = (spoiled(INPUTS, 3, math.nan), LABELS)
    problem_refused("validation set", "sample 3", sites=[fm.Site(GOOD)], validation=held)


@pytest.mark.parametrize(("labels", "low", "high"), [(LABELS + 1, 1, 3), (LABELS - 1, -1, 1)])
def test_problem_refuses_training_labels_out_of_range_with_site_and_range(labels, low, high):
    problem_refused("site 2", "Lyon", low, high, "3 classes", "0..2", sites=with_bad_site((INPUTS, labels)))


@pytest.mark.parametrize("split", ["test", "validation"])
def test_problem_refuses_held_out_labels_out_of_range_with_the_split(split):
    made = with_bad_site(GOOD, **{split: (INPUTS, LABELS + 5)})
    problem_refused(f"{split} set of site 0", 5, 7, "0..2", sites=made)


def test_problem_refuses_more_inputs_than_targets_with_both_shapes():
    problem_refused("site 2", "(12, 6)", "(11,)", sites=with_bad_site((INPUTS, LABELS[:11])))


def test_problem_refuses_what_is_no_pair():
    problem_refused("site 2", "(inputs, targets)", sites=with_bad_site([INPUTS]))


def test_problem_refuses_inputs_of_another_shape_with_both_shapes():
    problem_refused("site 2", "Lyon", "inputs", "(5,)", "site 0", "(6,)", sites=with_bad_site((INPUTS[:, :5], LABELS)))


def test_problem_refuses_inputs_of_another_dtype_with_both_dtypes():
    problem_refused(
        "site 2",
        "inputs",
        "float64",
        "float32",
        sites=with_bad_site((INPUTS.double(), LABELS)),
    )


def test_problem_refuses_targets_of_another_dtype():
    problem_refused("site 2", "targets", "float32", "int64", sites=with_bad_site((INPUTS, LABELS.float())))


def test_problem_refuses_targets_of_another_shape():
    problem_refused("site 2", "targets", "(1,)", sites=with_bad_site((INPUTS, LABELS[:, None])))


def test_problem_takes_a_shared_test_set_for_sites_without_one():
    made = [fm.Site(GOOD, test=None if i == 2 else GOOD) for i in range(4)]
    assert fm.Problem(model=small_model, sites=made, test=GOOD).n == 4


def test_problem_refuses_test_inputs_of_another_shape_than_the_training_inputs():
    held = (INPUTS[:, :5], LABELS)
    problem_refused("test set of site 0", "inputs", "(5,)", "(6,)", sites=[fm.Site(GOOD, test=held)])


def test_problem_refuses_test_targets_of_another_kind_than_the_training_targets():
    problem_refused("test set of site 0", "targets", "float32", sites=[fm.Site(GOOD, test=(INPUTS, LABELS.float()))])


@pytest.mark.parametrize("bad", [0.0, -0.25, math.nan, math.inf])
def test_prior_that_is_not_positive_and_finite_is_refused_with_the_site(bad):
    problem_refused("prior of site 1", str(bad), "> 0", sites=with_bad_site(GOOD), prior=[0.5, bad, 0.25, 0.25])


@pytest.mark.parametrize("count", [3, 5])
def test_prior_of_wrong_length_is_refused_with_both_lengths(count):
    problem_refused(f"{count} entries", "4 sites", sites=with_bad_site(GOOD), prior=[1.0] * count)


def test_prior_is_scaled_to_one():
    made = fm.Problem(model=small_model, sites=sites(2), prior=[1.0, 3.0])
    assert made.prior_of_sites.tolist() == [0.25, 0.75]
