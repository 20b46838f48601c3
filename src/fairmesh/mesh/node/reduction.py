"""Sums over all sites without a server: partial sums go up a spanning tree of the graph, and the total comes down.

Some coordinates of a row belong to one site, such as its accuracy. Only that site may contribute to them: a partial sum
that has something there of a site outside its branch is refused, and so is a total in which they are not what this
branch sent up. Sums of all sites are bounded like messages, or by what they can mean. What a site in the middle says of
several sites together may be its invention, within these bounds."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from scipy.sparse.csgraph import breadth_first_order
from torch import Tensor

from fairmesh.compression import DecodeError, decode, encode
from fairmesh.compression.codes import Dense
from fairmesh.errors import listed
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.networks.bounds import FACTOR, norm_of
from fairmesh.topology.mixing import Mixing

_PART = "sums"
_OTHER_PARTS = (
    "if the two chose different best rounds, a third site has told them different things: see whose are ignored"
)
_ROUNDING = 1e-9  # of a sum

Wrong = Callable[[Tensor, Sequence[int]], str]
"""Returns what the sum of some nodes cannot be, in words; "" if it can be what it is."""


class Branch(NamedTuple):
    """A node's place in the tree."""

    parent: int | None  # the root has none
    children: tuple[int, ...]
    below: tuple[tuple[int, ...], ...]  # the nodes in the branch of each child, that child included


def spanning_tree(mixing: Mixing) -> list[Branch]:
    """Returns the breadth-first tree from node 0 over a graph's edges. It is the same at every node."""
    order, parents = breadth_first_order(mixing.matrix.sorted_indices(), 0)
    below: dict[int, tuple[int, ...]] = {}  # the nodes in each node's branch, itself included
    branches: dict[int, Branch] = {}
    for node in reversed(order.tolist()):
        children = tuple((parents == node).nonzero()[0].tolist())
        below[node] = (node, *(inner for child in children for inner in below[child]))
        parent = int(parents[node]) if node else None
        branches[node] = Branch(parent, children, tuple(below[child] for child in children))
    return [branches[node] for node in range(mixing.n)]


class Sums:
    """The sums of one node over all sites.

    Args:
        number: The number of this node.
        branch: Its place in the tree.
        positions: The positions of the tree's nodes in the mesh.
        names: Their names.
        mailroom: What carries the messages.
    """

    def __init__(self, number: int, branch: Branch, positions: Sequence[int], names: Sequence[str], mailroom: Mailroom):
        self._number, self._branch, self._positions, self._names = number, branch, positions, names
        self._mailroom = mailroom
        self._below = dict(zip(branch.children, branch.below))

    @property
    def neighbours(self) -> list[int]:
        """Returns the positions of the parent and of the children."""
        parent = () if self._branch.parent is None else (self._branch.parent,)
        return [self._positions[node] for node in (*parent, *self._branch.children)]

    @property
    def source(self) -> str | None:
        """Returns the site that the totals come from; None at the root."""
        return None if self._branch.parent is None else self._names[self._branch.parent]

    def over_sites(
        self,
        row: Tensor,
        step: int,
        owners: Tensor,
        factor: float = FACTOR,
        wrong: Wrong = lambda sums, nodes: "",
    ) -> Tensor:
        """Returns the sum of a float64 row over all nodes, with the same bits at every node: children are added in
        order, and every node passes on the root's total.

        Args:
            row: What this node contributes.
            step: The step of the messages.
            owners: For each coordinate, the number of the only node that contributes to it, or -1 if all do.
            factor: How many times larger than this node's contribution, or than 1, the mean of others may be. Default:
                that of messages.
            wrong: Refuses what a child says of its branch, and what the parent says of all nodes but those of this
                branch. Default: nothing more is refused.
        """
        row = row.double()
        template = {_PART: Dense(torch.zeros_like(row).unsqueeze(0))}
        limit = factor * max(1.0, norm_of(row[owners < 0]))
        total, branch = row, self._branch
        ours = (self._number, *(node for nodes in branch.below for node in nodes))

        def read(text: bytes) -> Tensor:
            try:
                return decode(text, template, step)[_PART].decode()[0]
            except DecodeError as error:
                raise DecodeError(f"{error}; {_OTHER_PARTS}") from error

        def received(nodes: Sequence[int], check: Callable[[int, Tensor], None]) -> list[Tensor]:
            number_at = {self._positions[node]: node for node in nodes}
            found = self._mailroom.take(
                step,
                list(number_at),
                lambda _, text: read(text),
                lambda position, sums: check(number_at[position], sums),
            )
            return [found[position] for position in number_at]

        def sent(nodes: Sequence[int], tensor: Tensor) -> Tensor:
            """Sends a row, and returns it as it was sent: before a restart, another machine may have computed other
            last bits."""
            text = encode({_PART: Dense(tensor.unsqueeze(0))}, step)
            texts = self._mailroom.as_sent(step, {self._positions[node]: text for node in nodes})
            self._mailroom.post(step, texts)
            as_sent = next(iter(texts.values()), text)
            return tensor if as_sent == text else read(as_sent)

        def refuse_wrong(sums: Tensor, nodes: Sequence[int]) -> None:
            if reason := wrong(sums, nodes):
                sites = listed([self._names[node] for node in nodes])
                raise DecodeError(f"its sum says {reason}, of {sites}")

        def check_part(child: int, sums: Tensor) -> None:
            _refuse_large(sums[owners < 0], limit * len(self._below[child]))
            of_others = (owners >= 0) & ~_among(owners, self._below[child])
            self._refuse_other(sums, torch.zeros_like(sums), of_others, owners)
            refuse_wrong(sums, self._below[child])

        def check_total(parent: int, sums: Tensor) -> None:
            _refuse_large(sums[owners < 0], limit * len(self._positions))
            self._refuse_other(sums, total, _among(owners, ours), owners)
            others = [node for node in range(len(self._positions)) if node not in ours]
            refuse_wrong(torch.where((sums - total).abs() <= _ROUNDING * sums.abs(), 0.0, sums - total), others)

        for part in received(branch.children, check_part):
            total = total + part
        if branch.parent is not None:
            total = sent([branch.parent], total)
            (total,) = received([branch.parent], check_total)
        return sent(branch.children, total)

    def _refuse_other(self, sums: Tensor, expected: Tensor, where: Tensor, owners: Tensor) -> None:
        wrong = (where & (sums != expected)).nonzero().flatten().tolist()
        if wrong:
            first = wrong[0]
            raise DecodeError(
                f"its sum says {float(sums[first]):.6g} about site {self._names[int(owners[first])]}, which sent "
                f"{float(expected[first]):.6g}"
            )


def _among(owners: Tensor, nodes: Sequence[int]) -> Tensor:
    return torch.isin(owners, torch.tensor(nodes))


def _refuse_large(sums: Tensor, limit: float) -> None:
    norm = norm_of(sums)
    if not norm <= limit:
        raise DecodeError(f"its sum has the norm {norm:.3g}; the limit is {limit:.3g}")
