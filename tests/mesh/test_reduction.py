"""Sums over a spanning tree: the same bits everywhere, over any connected graph."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fairmesh.mesh.node.reduction import spanning_tree, sum_over_sites
from fairmesh.topology.mixing import union_of
from tests import toys


class _Post:
    """Hands messages from node to node within the process."""

    def __init__(self):
        self.letters, self.changed = {}, threading.Condition()

    def end(self, own):
        return _End(self, own)


class _End:
    def __init__(self, post, own):
        self.post_office, self.own = post, own

    def post(self, step, payloads):
        with self.post_office.changed:
            for other, payload in payloads.items():
                assert (self.own, other, step) not in self.post_office.letters, "each edge carries one message each way"
                self.post_office.letters[self.own, other, step] = payload
            self.post_office.changed.notify_all()

    def take(self, step, positions, read):
        with self.post_office.changed:
            keys = {other: (other, self.own, step) for other in positions}
            assert self.post_office.changed.wait_for(lambda: set(keys.values()) <= self.post_office.letters.keys(), 20)
            return {other: read(other, self.post_office.letters[key]) for other, key in keys.items()}


@pytest.mark.parametrize("name", toys.TOPOLOGIES)
def test_spanning_tree_sum_has_the_same_bits_at_every_node(name):
    mixing = union_of(toys.TOPOLOGIES[name].build(8))
    tree, post = spanning_tree(mixing), _Post()
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 10.0 ** torch.arange(5)
    positions = [10 * i for i in range(8)]  # in the mesh, which others have left
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda i: sum_over_sites(rows[i], 31, tree[i], positions, post.end(positions[i])), range(8))
        )
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
