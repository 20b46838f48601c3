"""Sums over a spanning tree: the same bits everywhere, over any connected graph."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fairmesh as fm
from fairmesh.compression import DecodeError, encode
from fairmesh.compression.codes import Dense
from fairmesh.mesh.node.reduction import Branch, Sums, spanning_tree
from fairmesh.topology.mixing import union_of
from tests import toys
from tests.refusals import refused


class _Post:
    """Hands messages from node to node within the process."""

    def __init__(self):
        self.letters, self.changed = {}, threading.Condition()
        self.sent_before = {}  # (sender, step) -> messages by receiver

    def end(self, own):
        return _End(self, own)


class _End:
    def __init__(self, post, own):
        self.post_office, self.own = post, own

    def as_sent(self, step, payloads):
        before = self.post_office.sent_before.get((self.own, step), {})
        return {other: before.get(other, text) for other, text in payloads.items()}

    def post(self, step, payloads):
        with self.post_office.changed:
            for other, payload in payloads.items():
                assert (self.own, other, step) not in self.post_office.letters, "each edge carries one message each way"
                self.post_office.letters[self.own, other, step] = payload
            self.post_office.changed.notify_all()

    def take(self, step, positions, read, check):
        with self.post_office.changed:
            keys = {other: (other, self.own, step) for other in positions}
            assert self.post_office.changed.wait_for(lambda: set(keys.values()) <= self.post_office.letters.keys(), 20)
            found = {other: read(other, self.post_office.letters[key]) for other, key in keys.items()}
        for other, decoded in found.items():
            check(other, decoded)
        return found


POSITIONS = [10 * i for i in range(8)]  # in the mesh, which others have left
NAMES = [f"site-{i}" for i in range(8)]


def summed(own, row, tree, post, owners=None, **bounds):
    owners = torch.full((len(row),), -1) if owners is None else owners
    sums = Sums(own, tree[own], POSITIONS[: len(tree)], NAMES[: len(tree)], post.end(POSITIONS[own]))
    return sums.over_sites(row, 31, owners, **bounds)


@pytest.mark.parametrize("name", toys.TOPOLOGIES)
def test_spanning_tree_sum_has_the_same_bits_at_every_node(name):
    mixing = union_of(toys.TOPOLOGIES[name].build(8))
    tree, post = spanning_tree(mixing), _Post()
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 10.0 ** torch.arange(5)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: summed(i, rows[i], tree, post), range(8)))
    assert all(torch.equal(one, found[0]) for one in found)
    assert torch.allclose(found[0], rows.sum(dim=0), rtol=1e-13)
    assert len(post.letters) == 2 * 7  # a tree: one message each way over each of its edges


def test_tree_spans_the_graph_over_its_edges_and_all_nodes_find_the_same():
    mixing = union_of(toys.TOPOLOGIES["erdos-renyi"].build(8))
    tree = spanning_tree(mixing)
    assert tree[0].parent is None
    for node, branch in enumerate(tree):
        for child in branch.children:
            assert tree[child].parent == node
            assert mixing.matrix[node, child] > 0
    assert sum(len(branch.children) for branch in tree) == 7


# Nodes 0 - 1 - 2 in a line; 0 is the root. The first coordinate is of all, and each of the others of one node.
LINE = [Branch(None, (1,), ((1, 2),)), Branch(0, (2,), ((2,),)), Branch(1, (), ())]
OWNERS = torch.tensor([-1, 0, 1, 2])
ROWS = [torch.tensor([1.0, 10.0, 0.0, 0.0]), torch.tensor([2.0, 0.0, 20.0, 0.0]), torch.tensor([3.0, 0.0, 0.0, 30.0])]


def sum_with(own, mine=None, wrong=None, **from_others):
    """Returns the sum of one node of the line, given what the others send it; of rows of all nodes, if this one's is
    given and what is `wrong` with those of others."""
    post = _Post()
    for other, row in from_others.items():
        sender = int(other.removeprefix("node_"))
        message = encode({"sums": Dense(torch.tensor([row], dtype=torch.float64))}, 31)
        post.letters[POSITIONS[sender], POSITIONS[own], 31] = message
    if mine is not None:
        return summed(own, torch.tensor(mine), LINE, post, factor=math.inf, wrong=wrong)
    return summed(own, ROWS[own], LINE, post, OWNERS)


def test_sums_of_honest_nodes_are_accepted():
    total = [6.0, 10.0, 20.0, 30.0]
    assert sum_with(0, node_1=[5.0, 0.0, 20.0, 30.0]).tolist() == total
    assert sum_with(1, node_2=[3.0, 0.0, 0.0, 30.0], node_0=total).tolist() == total
    assert sum_with(2, node_1=total).tolist() == total


@pytest.mark.parametrize(
    ("own", "sent", "named"),
    [
        (2, {"node_1": [6.0, 10.0, 20.0, 31.0]}, "site-2"),  # another number about this site comes back
        (1, {"node_2": [3.0, 0.0, 0.0, 30.0], "node_0": [6.0, 10.0, 20.0, 99.0]}, "site-2"),  # about one below
        (1, {"node_2": [3.0, 0.0, 5.0, 30.0], "node_0": [6.0, 10.0, 20.0, 30.0]}, "site-1"),  # a child speaks for this
        (0, {"node_1": [5.0, -3.0, 20.0, 30.0]}, "site-0"),
        (0, {"node_1": [1e4, 0.0, 20.0, 30.0]}, "norm"),
        (2, {"node_1": [1e30, 10.0, 20.0, 30.0]}, "norm"),
        (2, {"node_1": [float("nan"), 10.0, 20.0, 30.0]}, "finite"),
    ],
)
def test_sum_that_forges_what_a_site_said_of_itself_or_is_huge_is_refused(own, sent, named):
    with refused(named, error=DecodeError):
        sum_with(own, **sent)


def test_sum_stays_as_it_was_sent_though_a_machine_computes_another_one_after_a_restart():
    tree = spanning_tree(union_of(fm.Ring().build(3)))
    row, step = torch.tensor([1.0, 2.0], dtype=torch.float64), 31

    def of(value):
        return encode({"sums": Dense(torch.tensor([value], dtype=torch.float64))}, step)

    root, leaf = _Post(), _Post()
    root.sent_before[0, step] = {POSITIONS[1]: of([5.0, 7.0]), POSITIONS[2]: of([5.0, 7.0])}
    root.letters |= {(POSITIONS[i], 0, step): of([1.0, 1.0]) for i in (1, 2)}
    assert summed(0, row, tree, root).tolist() == [5.0, 7.0]
    leaf.sent_before[POSITIONS[1], step] = {0: of([1.5, 2.5])}
    leaf.letters[0, POSITIONS[1], step] = of([9.0, 2.5])
    assert summed(1, row, tree, leaf, torch.tensor([-1, 1])).tolist() == [9.0, 2.5]  # its own entry, as it was sent


def test_sum_of_other_parts_is_refused_with_a_hint_at_who_may_have_set_the_two_against_each_other():
    """Announced, a reason has 200 characters."""
    post, tree = _Post(), spanning_tree(union_of(fm.Ring().build(3)))
    post.end(10).post(5, {0: encode({"sums": Dense(torch.zeros(1, 4).double())}, 5)})
    post.end(20).post(5, {0: encode({"sums": Dense(torch.zeros(1, 4).double())}, 5)})
    with refused("dimension 4", "third site", error=DecodeError) as caught:
        Sums(0, tree[0], POSITIONS[:3], NAMES[:3], post.end(0)).over_sites(torch.zeros(7), 5, torch.full((7,), -1))
    assert len(f"message of step 123456: {caught.value}") <= 200
