"""Mixing matrices: symmetric, doubly stochastic, mixing exactly when the graph is connected, and refused otherwise."""

import math
import time

import networkx
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import fairmesh as fm
from fairmesh.topology import mixing as mixing_module
from fairmesh.topology.mixing import Mixing, mixing_matrix, union_of
from tests import toys
from tests.examples import examples
from tests.refusals import refused

EVERY = pytest.mark.parametrize("name", toys.TOPOLOGIES)
RULES = ["metropolis", "max-degree"]


@st.composite
def graphs(draw, most: int = 12) -> networkx.Graph:
    """Any simple graph: sparse ones fall apart, dense ones do not."""
    n = draw(st.integers(1, most))
    pairs = [(i, j) for i in range(n) for j in range(i)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2 * n)) if pairs else []
    graph = networkx.empty_graph(n)
    graph.add_edges_from(chosen)
    return graph


def second_modulus(matrix: np.ndarray) -> float:
    return sorted(abs(np.linalg.eigvalsh(matrix)))[-2]


@pytest.mark.parametrize("rule", RULES)
@given(graph=graphs())
def test_gap_is_positive_exactly_when_the_graph_is_connected(rule, graph):
    mixing = mixing_matrix(networkx.to_scipy_sparse_array(graph, nodelist=range(len(graph))), rule)
    matrix = mixing.matrix.toarray()
    n = graph.number_of_nodes()
    np.testing.assert_allclose(matrix, matrix.T, atol=0)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-14)
    assert (matrix >= 0).all()
    assert (mixing.gap > 1e-9) == networkx.is_connected(graph)
    assert mixing.degrees.tolist() == [degree for _, degree in sorted(graph.degree)]
    linked = {(i, j) for i, j in np.argwhere(matrix > 0).tolist() if i < j}
    assert linked == {(min(edge), max(edge)) for edge in graph.edges}
    edges = fm.topologies.Edges(tuple(graph.edges), mixing=rule)
    if networkx.is_connected(graph):
        assert np.array_equal(edges.build(n)[0].matrix.toarray(), matrix)
    else:
        with refused("disconnected"):
            edges.build(n)


@given(graph=graphs())
def test_metropolis_weights_are_1_over_1_plus_the_larger_degree(graph):
    matrix = mixing_matrix(
        networkx.to_scipy_sparse_array(graph, nodelist=range(len(graph))), "metropolis"
    ).matrix.toarray()
    for i, j in graph.edges:
        assert matrix[i, j] == pytest.approx(1 / (1 + max(graph.degree[i], graph.degree[j])))


@given(graph=graphs())
def test_maximum_degree_weights_are_all_1_over_1_plus_the_largest_degree(graph):
    matrix = mixing_matrix(
        networkx.to_scipy_sparse_array(graph, nodelist=range(len(graph))), "max-degree"
    ).matrix.toarray()
    largest = max(degree for _, degree in graph.degree)
    for i, j in graph.edges:
        assert matrix[i, j] == pytest.approx(1 / (1 + largest))


@pytest.mark.parametrize("rule", ["metropolis", "uniform", "max-degree"])
def test_mixing_rules_agree_where_all_degrees_agree(rule):
    matrix = fm.topologies.Circulant((1, 2), mixing=rule).build(9)[0].matrix.toarray()
    expected = [0.2 if (i - j) % 9 in (0, 1, 2, 7, 8) else 0.0 for i in range(9) for j in range(9)]
    np.testing.assert_allclose(matrix.ravel(), expected, atol=1e-15)


@pytest.mark.parametrize(
    ("kind", "n", "neighbours_of_0"),
    [
        (fm.Ring(), 6, {1, 5}),
        (fm.topologies.Torus(3, 4), 12, {1, 3, 4, 8}),
        (fm.topologies.Torus(1, 4), 4, {1, 3}),
        (fm.topologies.Circulant((1, 2)), 8, {1, 2, 6, 7}),
        (fm.topologies.Circulant((1, 4)), 8, {1, 4, 7}),
        (fm.topologies.Complete(), 5, {1, 2, 3, 4}),
        (fm.topologies.Star(), 5, {1, 2, 3, 4}),
        (fm.topologies.Hypercube(), 8, {1, 2, 4}),
        (fm.topologies.Exponential(), 10, {1, 2, 4, 8, 9, 6}),
        (fm.topologies.Edges(((0, 2), (2, 1), (0, 0))), 3, {2}),
    ],
    ids=str,
)
def test_topology_gives_node_0_its_neighbours(kind, n, neighbours_of_0):
    mixing = kind.build(n)[0]
    assert set(np.flatnonzero(mixing.matrix.toarray()[0])) - {0} == neighbours_of_0
    assert mixing.degrees[0] == len(neighbours_of_0)


def test_random_regular_graph_has_its_degree_everywhere_and_its_seed_decides_it():
    first, again, other = (
        fm.topologies.RandomRegular(4, seed=seed).build(20)[0].matrix.toarray() for seed in (1, 1, 2)
    )
    assert ((first > 0).sum(axis=1) == 5).all()
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_erdos_renyi_graph_has_about_its_share_of_edges_and_its_seed_decides_it():
    first, again, other = (fm.topologies.ErdosRenyi(0.3, seed=seed).build(60)[0] for seed in (1, 1, 2))
    assert first.degrees.sum() / (60 * 59) == pytest.approx(0.3, abs=0.05)
    assert np.array_equal(first.matrix.toarray(), again.matrix.toarray())
    assert not np.array_equal(first.matrix.toarray(), other.matrix.toarray())


@EVERY
def test_rho_and_beta_are_those_of_the_dense_eigenvalues(name):
    for mixing in toys.TOPOLOGIES[name].graphs(8):
        matrix = mixing.matrix.toarray()
        assert mixing.gap == pytest.approx(1 - second_modulus(matrix), abs=1e-12)
        assert mixing.beta == pytest.approx(np.linalg.norm(np.eye(8) - matrix, 2), abs=1e-12)


def test_gap_counts_an_eigenvalue_near_minus_one():
    # a ring of four with 0.1 on the diagonal: eigenvalues 1, 0.1, 0.1 and -0.8
    swapping = fm.topologies.Matrix(0.1 * np.eye(4) + 0.45 * (lazy_ring(4) * 3 - np.eye(4))).build(4)[0]
    assert swapping.gap == pytest.approx(0.2)
    assert swapping.beta == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("kind", "n"),
    [
        (fm.Ring(), 60),
        (fm.Ring(), 61),
        (fm.Ring(), 700),  # crowded eigenvalues: the plain iteration gives up
        (fm.topologies.Torus(6, 8), 48),
        (fm.topologies.Star(), 50),
        (fm.topologies.Complete(), 40),
        (fm.topologies.ErdosRenyi(0.2, seed=1), 60),
        (fm.topologies.RandomRegular(3, seed=1), 64),
        (fm.topologies.Edges(tuple((i, i + 1) for i in range(399))), 400),
        (fm.topologies.Circulant((1, 2)), 500),
        (fm.topologies.Edges(tuple((i, i + 1) for i in range(59) if i != 30)), 60),  # two pieces: gap 0
        (fm.topologies.Matrix((np.eye(40)[::-1] * 0.98 + np.full((40, 40), 0.02 / 40)).tolist()), 40),  # near -1
    ],
    ids=lambda value: str(value)[:30],
)
def test_rho_and_beta_are_the_same_on_the_sparse_and_the_dense_path(monkeypatch, kind, n):
    dense = kind.graphs(n)[0]
    rho, beta = dense.gap, dense.beta
    monkeypatch.setattr(mixing_module, "DENSE_EIGENVALUES_UP_TO", 1)
    monkeypatch.setattr(np.linalg, "eigvalsh", None)  # not to be used
    sparse = kind.graphs(n)[0]
    assert sparse.gap == pytest.approx(rho, rel=1e-6, abs=1e-11)
    assert sparse.beta == pytest.approx(beta, rel=1e-6)


@given(graph=graphs(), delta=st.floats(0.01, 1))
def test_consensus_step_of_theorem_is_its_formula(graph, delta):
    mixing = mixing_matrix(networkx.to_scipy_sparse_array(graph, nodelist=range(len(graph))), "metropolis")
    rho, beta = mixing.gap, mixing.beta
    if rho > 1e-9:
        expected = rho**2 * delta / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * delta)
        assert mixing.consensus_step_of_theorem(delta) == pytest.approx(expected)
        assert 0 < mixing.consensus_step_of_theorem(delta) < 1


def test_consensus_step_of_theorem_of_a_complete_graph_is_delta_over_23_minus_8_delta():
    # W = 11'/n: rho = 1, beta = 1, so gamma = delta / (16 + 1 + 4 + 2 - 8 delta)
    assert fm.topologies.Complete().build(5)[0].consensus_step_of_theorem(0.5) == pytest.approx(0.5 / 19)


@pytest.mark.parametrize("delta", [0.0, -0.1, 1.5, math.nan])
def test_consensus_step_of_theorem_refuses_a_delta_outside_0_1(delta):
    with refused("delta", "(0, 1]", delta):
        fm.Ring().build(4)[0].consensus_step_of_theorem(delta)


@pytest.mark.parametrize(
    "kind",
    [
        fm.Ring(),
        fm.Ring("uniform"),
        fm.topologies.Circulant(),
        fm.topologies.Complete(),
        fm.topologies.Star(),
        fm.topologies.Hypercube(),
        fm.topologies.Exponential(),
        fm.topologies.ErdosRenyi(0.9), fm.topologies.Changing((fm.Ring(), fm.topologies.Star())),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("n", [1, 2])
def test_topology_of_one_and_two_nodes_works(kind, n):
    mixing = kind.build(n)[0]
    assert mixing.matrix.toarray().tolist() == ([[1.0]] if n == 1 else [[0.5, 0.5], [0.5, 0.5]])
    assert mixing.degrees.tolist() == [n - 1] * n
    assert mixing.gap == pytest.approx(1.0)
    assert mixing.beta == pytest.approx(n - 1.0)


def test_torus_edges_and_matrix_of_a_single_node_work():
    for kind in (fm.topologies.Torus(1, 1), fm.topologies.Edges(()), fm.topologies.Matrix(((1.0,),))):
        assert kind.build(1)[0].matrix.toarray().tolist() == [[1.0]]


def test_edges_of_a_networkx_graph_are_its_edges_with_nodes_numbered_in_order():
    graph = networkx.Graph([("a", "b"), ("b", "c"), ("c", "d"), ("d", "a"), ("a", "a")])
    graph.edges["a", "b"]["weight"] = 7.0
    kind = fm.topologies.Edges.of(graph, mixing="max-degree")
    assert kind.mixing == "max-degree"
    assert np.array_equal(kind.build(4)[0].matrix.toarray(), fm.Ring().build(4)[0].matrix.toarray())
    with refused("directed"):
        fm.topologies.Edges.of(networkx.DiGraph([(0, 1)]))


@given(graph=graphs())
@examples(8)
def test_edges_of_any_networkx_graph_have_its_mixing_matrix(graph):
    matrix = mixing_matrix(
        networkx.to_scipy_sparse_array(graph, nodelist=range(len(graph))), "metropolis"
    ).matrix.toarray()
    built = fm.topologies.Edges.of(graph).graphs(graph.number_of_nodes())[0].matrix.toarray()
    assert np.array_equal(built, matrix)


def test_ring_of_5000_nodes_is_sparse_and_built_and_measured_in_seconds():
    started = time.perf_counter()
    mixing = fm.Ring().build(5000)[0]
    built = time.perf_counter() - started
    assert isinstance(mixing.matrix, scipy.sparse.csr_array)
    assert mixing.matrix.nnz == 15_000
    assert built < 3
    assert mixing.gap == pytest.approx(2 / 3 * (1 - math.cos(2 * math.pi / 5000)), rel=1e-6)
    assert mixing.beta == pytest.approx(4 / 3, rel=1e-9)
    assert time.perf_counter() - started < 20


# Graphs that change.

HALVES = (fm.topologies.Edges(((0, 1), (2, 3))), fm.topologies.Edges(((1, 2),)))


def test_changing_accepts_disconnected_graphs_whose_union_is_connected():
    cycle = fm.topologies.Changing(HALVES, every=2).build(4)
    assert len(cycle) == 4
    assert [mixing.degrees.tolist() for mixing in cycle] == [[1, 1, 1, 1]] * 2 + [[0, 1, 1, 0]] * 2
    assert all(mixing.gap == pytest.approx(0, abs=1e-12) for mixing in cycle)
    union = union_of(cycle)
    np.testing.assert_allclose(union.matrix.toarray(), sum(mixing.matrix.toarray() for mixing in cycle) / 4)
    assert union.degrees.tolist() == [1, 2, 2, 1]


def test_changing_refuses_graphs_whose_union_is_disconnected():
    with refused("disconnected", "{0, 1}", "{2, 3}"):
        fm.topologies.Changing((HALVES[0], HALVES[0])).build(4)


# What is refused.


def matrix(rows) -> fm.topologies.Matrix:
    return fm.topologies.Matrix(rows)


def lazy_ring(n: int) -> np.ndarray:
    return fm.Ring().build(n)[0].matrix.toarray()


ASYMMETRIC = lazy_ring(6)
ASYMMETRIC[2, 3] += 0.1
NEGATIVE = lazy_ring(4) + np.array([[0.5, -0.5, 0, 0], [-0.5, 0.5, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
DOUBLED = lazy_ring(4) + np.diag([0, 0, 0.5, 0])
NOT_FINITE = lazy_ring(4) * np.array([[1, 1, 1, math.nan]] * 4)


@pytest.mark.parametrize(
    ("kind", "n", "names"),
    [
        (fm.topologies.Edges(((0, 1), (2, 3))), 5, ["disconnected", "3 pieces", "{0, 1}", "{2, 3}", "{4}"]),
        (fm.topologies.Circulant((2,)), 20, ["2 pieces", "{0, 2, 4, 6, 8, 10, ...}", "{1, 3, 5, 7, 9, 11, ...}"]),
        (fm.topologies.Edges(()), 7, ["7 pieces", "{0}", "{1}", "{2}", "{3}"]),
        (matrix(ASYMMETRIC), 6, ["symmetric", "W[2, 3] = 0.433333", "W[3, 2] = 0.333333"]),
        (matrix(NEGATIVE), 4, ["negative", "W[", "] = -0.166667"]),
        (matrix(DOUBLED), 4, ["row 2", "1.5"]),
        (matrix(NOT_FINITE), 4, ["finite"]),
        (matrix([[0.5, 0.5]]), 2, ["square", "1", "[2]"]),
        (matrix([[1.0], [0.5, 0.5]]), 2, ["square", "2", "[1, 2]"]),
        (matrix([[0.0, 1.0], [1.0, 0.0]]), 2, ["eigenvalue", "-1"]),
        (matrix((lazy_ring(6) - np.eye(6) / 3) * 1.5), 6, ["eigenvalue", "-1"]),
        (matrix(lazy_ring(4)), 5, ["4 nodes", "5 sites"]),
        (fm.topologies.Torus(3, 4), 10, ["3 x 4", "12", "10"]),
        (fm.topologies.Hypercube(), 6, ["hypercube", "6"]),
        (fm.topologies.Star("uniform"), 5, ["uniform", "node 1", "node 0", "4"]),
        (fm.topologies.Edges(((0, 5),)), 4, ["[0, 5]", "0..3"]),
        (fm.topologies.Edges(((0, -1),)), 4, ["[0, -1]", "0..3"]),
        (fm.topologies.RandomRegular(3), 5, ["degree", "3", "5"]),
        (fm.topologies.RandomRegular(5), 4, ["degree", "5", "4"]),
        (fm.topologies.RandomRegular(1), 40, ["40", "degree", "3"]),
        (fm.topologies.ErdosRenyi(0.001), 50, ["probability", "0.078"]),
        (fm.Ring(), 0, ["node", "0"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_topology_that_cannot_work_is_refused_with_the_place(kind, n, names):
    with refused(*names):
        kind.build(n)


def test_matrix_of_an_odd_ring_without_weights_on_themselves_is_accepted():
    odd = fm.topologies.Matrix((lazy_ring(7) - np.eye(7) / 3) * 1.5)
    assert odd.build(7)[0].gap > 0.05


def test_matrix_weights_too_small_to_matter_do_not_connect():
    tiny = np.array([[1 - 1e-15, 1e-15], [1e-15, 1 - 1e-15]])
    with refused("disconnected"):
        fm.topologies.Matrix(tiny).build(2)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: fm.Ring("metropolitan"), ["'metropolitan'", "'metropolis'", "'uniform'", "'max-degree'"]),
        (lambda: fm.topologies.Torus(0, 4), ["rows", ">= 1", "0"]),
        (lambda: fm.topologies.Circulant((0, 1)), ["offsets[0]", ">= 1", "0"]),
        (lambda: fm.topologies.Circulant(()), ["offsets", "none"]),
        (lambda: fm.topologies.ErdosRenyi(0.0), ["probability", "(0, 1]", "0.0"]),
        (lambda: fm.topologies.ErdosRenyi(1.1), ["probability", "(0, 1]", "1.1"]),
        (lambda: fm.topologies.Edges(((0, 1, 2),)), ["edges[0]", "2", "3"]),
        (lambda: fm.topologies.Changing(()), ["topology"]),
        (lambda: fm.topologies.Changing((fm.Ring(),), every=0), ["every", ">= 1", "0"]),
        (lambda: Mixing(scipy.sparse.csr_array(np.ones((1, 2)))), ["square", "1 x 2"]),
    ],
)
def test_topology_refuses_settings_out_of_range(make, names):
    with refused(*names):
        make()


def test_matrix_may_be_lists_numpy_or_scipy():
    dense = lazy_ring(5)
    for form in (dense.tolist(), dense, scipy.sparse.csr_array(dense)):
        assert np.array_equal(fm.topologies.Matrix(form).build(5)[0].matrix.toarray(), dense)
