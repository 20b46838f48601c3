"""A host that holds the data of some sites knows only the number of samples of the others."""

import pytest
import torch

import fairmesh as fm
from fairmesh.problems.evaluator import Evaluator
from fairmesh.problems.oracle import Oracle
from tests import toys
from tests.refusals import refused


def oracle_of(problem, nodes):
    hosted = torch.tensor(nodes)
    return Oracle(problem, hosted, hosted, seeds=[0], dtype=torch.float64)


@pytest.mark.parametrize("order", ["random", "cyclic", "full"])
def test_oracle_needs_only_the_data_of_hosted_nodes(order):
    whole = toys.problem(sampling=fm.Sampling(batch=7, order=order))
    some = whole.keeping({2, 5})
    everyone, few = oracle_of(whole, range(8)), oracle_of(some, [2, 5])
    models = everyone.initial_models() + torch.randn(1, 8, whole.flat_model.dim, dtype=torch.float64)
    expected = everyone.losses_and_gradients(models, torch.tensor(3), 0)
    found = few.losses_and_gradients(models[:, [2, 5]].clone(), torch.tensor(3), 0)
    for all_nodes, these in zip(expected, found):
        assert torch.allclose(all_nodes[:, [2, 5]], these, rtol=0, atol=1e-12)


def test_keeping_drops_the_others_data_and_knows_their_share():
    whole = toys.problem()
    some = whole.keeping({2, 5})
    assert some.here == [2, 5]
    assert torch.equal(some.prior_of_sites, whole.prior_of_sites)
    assert all(site.train.inputs.device.type == "meta" for i, site in enumerate(some.sites) if i not in (2, 5))
    with refused("meta", error=RuntimeError):
        some.sites[0].train.inputs.sum().item()


def test_keeping_frees_the_tensor_that_a_site_was_cut_from():
    pool = torch.randn(800, toys.FEATURES, dtype=torch.float64)
    labels = torch.arange(800) % toys.CLASSES
    problem = toys.problem(sites=[fm.Site((pool[k::8], labels[k::8])) for k in range(8)])
    kept = problem.keeping({1}).sites[1].train
    assert kept.inputs.untyped_storage().nbytes() == kept.inputs.nbytes


def test_oracle_refuses_a_node_without_its_data():
    with refused("[3]"):
        oracle_of(toys.problem().keeping({2}), [2, 3])
    with refused("sites"):
        toys.problem().keeping(set())


def test_evaluator_judges_only_sites_that_are_here():
    whole = toys.problem()
    rows = whole.initial_row(0).unsqueeze(0)
    expected = Evaluator(whole, "test", "cpu", torch.float64).of_sites(rows)
    found = Evaluator(whole.keeping({0, 6}), "test", "cpu", torch.float64).of_sites(rows)
    for name, values in expected.items():
        assert torch.equal(found[name][:, [0, 6]], values[:, [0, 6]])
        assert found[name].isnan().sum() == 6


def test_digest_of_all_sites_can_be_put_together_from_hosts():
    whole = toys.problem()
    parts = whole.keeping({0, 1, 2}).digests_here() | whole.keeping({3, 4, 5, 6, 7}).digests_here()
    some = whole.keeping({4})
    assert some.digest(parts) == whole.digest()
    assert some.digest() != whole.digest()
