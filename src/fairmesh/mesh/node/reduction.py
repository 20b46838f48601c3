"""Sums over all sites without a server: partial sums go up a spanning tree of the graph, and the total comes down."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.compression import decode, encode
from fairmesh.compression.codes import Dense
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.topology.mixing import Mixing

_PART = "sums"


class Branch(NamedTuple):
    """A node's place in the tree."""

    parent: int | None  # the root has none
    children: tuple[int, ...]


def spanning_tree(mixing: Mixing) -> list[Branch]:
    """Returns the breadth-first tree from node 0 over a graph's edges. It is the same at every node."""
    n = mixing.n
    links = mixing.matrix.tolil().rows
    parents: dict[int, int | None] = {0: None}
    reached = [0]
    for node in reached:
        for other in sorted(links[node]):
            if other not in parents:
                parents[other] = node
                reached.append(other)
    return [Branch(parents[i], tuple(j for j in range(n) if parents[j] == i)) for i in range(n)]


def sum_over_sites(row: Tensor, step: int, branch: Branch, positions: Sequence[int], mailroom: Mailroom) -> Tensor:
    """Returns the sum of a float64 row over all nodes, with the same bits at every node: children are added in order,
    and every node passes on the root's total. `positions` are the positions of the tree's nodes in the mesh."""
    total = row.double()
    template = {_PART: Dense(torch.zeros_like(total).unsqueeze(0))}

    def received(nodes: Sequence[int]) -> list[Tensor]:
        found = mailroom.take(step, [positions[i] for i in nodes], lambda _, text: decode(text, template, step))
        return [found[positions[i]][_PART].decode()[0] for i in nodes]

    def sent(nodes: Sequence[int], tensor: Tensor) -> None:
        text = encode({_PART: Dense(tensor.unsqueeze(0))}, step)
        mailroom.post(step, {positions[i]: text for i in nodes})

    for part in received(branch.children):
        total = total + part
    if branch.parent is not None:
        sent([branch.parent], total)
        (total,) = received([branch.parent])
    sent(branch.children, total)
    return total
