"""The network of a process that hosts some of the nodes: messages are encoded, transported, decoded and mixed."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh.compression import DecodeError, decode, encode
from fairmesh.compression.codes import Code, row_of, tensors_in
from fairmesh.errors import BadInput, Diverged
from fairmesh.networks.base import Delivery, Network, Part
from fairmesh.networks.bounds import Bounds
from fairmesh.networks.clipping import clipped_weights
from fairmesh.networks.product import current
from fairmesh.networks.transport import Edge, Read, Transport
from fairmesh.topology.mixing import Mixing, union_of

Rows = list[dict[str, Tensor]]  # what a message holds: for each replica, the row of each part


class _Norms(NamedTuple):
    """Euclidean norms of one part, which both what is sent and what arrives is compared with."""

    rows: list[list[float]]  # of the hosted nodes' rows (replicas, nodes)
    copies: list[list[list[float]]]  # of the copies that they keep (replicas, nodes, slots); zero if they keep none


class RemoteNetwork(Network):
    """Hosts the nodes at positions `hosted`, which reach the others through a transport. Messages between nodes hosted
    here stay in the process. With a fixed W, a node keeps the mixed copy of its neighbours as one row. With a changing
    W, or with `each_copy`, it keeps a copy of each neighbour of any round: (..., nodes, slots, dim)."""

    def __init__(
        self,
        cycle: Sequence[Mixing],
        hosted: Sequence[int],
        transport: Transport,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        identities: Sequence[int] = (),  # of all nodes
        secrets: Sequence[bytes] = (),  # of the hosted nodes, instead of their identities in random streams
        each_copy: bool = False,
        bounds: Bounds | None = None,  # of what is accepted from nodes elsewhere; None: everything
    ):
        self._here, self._transport, self._bounds = list(hosted), transport, bounds
        n = cycle[0].n
        if not self._here or len(set(self._here)) != len(self._here) or not set(self._here) <= set(range(n)):
            raise BadInput(f"hosted must name some of the {n} nodes, each once, got {self._here}")
        super().__init__(cycle, self._here, transport.process_group, device, dtype, identities, secrets)
        self._one_row = len(cycle) == 1 and not each_copy and not self.liars
        self._neighbours = [[_neighbours(mixing, i) for i in self._here] for mixing in cycle]  # of each round
        self._reached = [_neighbours(union_of(cycle), i) for i in self._here]  # of any round
        # The nodes whose rows are known after the exchange, ordered by position, so that sums agree with the simulator.
        self._known = sorted({j for reached in self._reached for j in reached} | set(self._here))
        weights = np.stack([mixing.matrix[self._here][:, self._known].toarray() for mixing in cycle])
        self._weights = torch.as_tensor(weights, dtype=dtype, device=self.device)  # (cycle, nodes, known)
        self._at = {node: k for k, node in enumerate(self._known)}
        self._own_places = torch.tensor([self._at[i] for i in self._here], device=self.device)
        # The indices of each node and its neighbours among the known, padded with the node's own: (nodes, slots).
        slots = [[self._at[j] for j in (i, *reached)] for i, reached in zip(self._here, self._reached)]
        width = max(map(len, slots))
        self._slots = torch.tensor([row + [row[0]] * (width - len(row)) for row in slots], device=self.device)
        self.kept_of = None if self._one_row else self._names[self._known][self._slots]
        filled = torch.tensor([[k < len(row) for k in range(width)] for row in slots], device=self.device)
        self._slot_weights = (self._weights.gather(-1, self._slots.expand(len(cycle), -1, -1)) * filled).unsqueeze(-1)

    def exchange(self, parts: Mapping[str, Part], round_index: Tensor) -> Delivery:
        now = int(round_index)
        norms = self._norms(parts)
        self._refuse_diverged(parts, norms)
        messages = self._encoded(parts, now)
        outgoing, expected, bits, size = {}, [], [], []
        neighbours = self._neighbours[now % len(self._neighbours)]
        followed = sum(part.nominal_bits for part in parts.values() if part.followed)
        every = sum(part.nominal_bits for part in parts.values())
        for k, (i, reached) in enumerate(zip(self._here, self._reached)):
            whole, short = messages[k]
            near = set(neighbours[k])
            sent = {j: whole if j in near else short for j in reached}
            outgoing |= {
                (i, j): texts[0] if len(texts) == 1 else joined_texts(texts)
                for j, texts in sent.items()
                if j not in self._here and any(texts)
            }
            expected += [(j, i) for j in reached if j not in self._here and (j in near or any(short))]
            bits.append(len(near) * every + (len(reached) - len(near)) * followed)
            size.append([sum(len(texts[r]) for texts in sent.values()) for r in range(len(whole))])
        sent_before = self._transport.as_sent(now, outgoing)
        if sent_before != outgoing:
            self._use_sent(parts, now, sent_before)
            outgoing, norms = sent_before, self._norms(parts)
        read = Read(self._decoder(parts, now), self._checker(parts, norms))
        arrivals = self._transport.exchange(now, outgoing, expected, read)
        nominal = torch.tensor(bits, dtype=torch.float64, device=self.device)
        real = torch.tensor(size, dtype=torch.float64, device=self.device).mT  # (replicas, nodes)
        sent = self._sent_by_nodes(nominal, real)
        # Not a cached_property: in Python 3.11 all instances share a lock.
        arrived = functools.cache(lambda: self._known_rows(parts, arrivals()))
        return Delivery(self, lambda name: arrived()[name], lambda name: arrived().pop(name), round_index, sent)

    def _norms(self, parts: Mapping[str, Part]) -> dict[str, "_Norms"]:
        """Returns the norms of each part. Those of the copies are needed for bounds alone."""
        norms = {}
        for name, part in parts.items():
            rows = torch.linalg.vector_norm(part.rows, dim=-1)
            without = self._bounds is None or part.kept is None or self._one_row
            copies = rows.new_zeros(*rows.shape, 1) if without else torch.linalg.vector_norm(part.kept, dim=-1)
            norms[name] = _Norms(rows.tolist(), copies.tolist())
        return norms

    def _refuse_diverged(self, parts: Mapping[str, Part], norms: Mapping[str, "_Norms"]) -> None:
        """Raises Diverged, before anything is encoded or stored, if numbers of the hosted nodes are not finite or, with
        bounds, if neighbours would refuse them."""
        for name, part in parts.items():
            for r, of_nodes in enumerate(norms[name].rows):
                for node, norm in enumerate(of_nodes):
                    if not math.isfinite(norm):
                        raise Diverged(f"a {name} that is not finite")
                    if self._bounds is not None:
                        self._bounds.check_own(name, part.content, norm, max(norms[name].copies[r][node]))

    def _use_sent(self, parts: Mapping[str, Part], now: int, sent: Mapping[Edge, bytes]) -> None:
        """Makes the parts those of messages that were sent before a restart, so that this node's own public copies stay
        what its neighbours have of it."""
        decode_from = self._decoder(parts, now)
        rows = {name: part.rows.clone() for name, part in parts.items()}
        for (i, j), text in sorted(sent.items(), key=lambda item: len(item[1])):  # the whole messages last
            for r, sent_rows in enumerate(decode_from((j, i), text)):
                for name, row in sent_rows.items():
                    rows[name][r, self._here.index(i)] = row.to(rows[name])
        for name, part in parts.items():
            part.was_sent_as(rows[name])

    def _encoded(self, parts: Mapping[str, Part], now: int) -> list[tuple[list[bytes], list[bytes]]]:
        """Returns for every hosted node, for each replica: its message, and the part that neighbours of other rounds
        get."""
        replicas = _replicas(next(iter(parts.values())).code)
        followed = {name for name, part in parts.items() if part.followed} if len(self._neighbours) > 1 else set()
        made = []
        for k in range(len(self._here)):
            codes = [{name: row_of(part.code, r, k) for name, part in parts.items()} for r in range(replicas)]
            whole = [encode(one, now) for one in codes]
            some = [encode({n: c for n, c in one.items() if n in followed}, now) if followed else b"" for one in codes]
            made.append((whole, some))
        return made

    def _decoder(self, parts: Mapping[str, Part], now: int) -> Callable[[Edge, bytes], Rows]:
        """Returns how the messages of each replica are decoded. If one sender sends the same bytes to several nodes of
        this process, they are decoded once."""
        templates = {name: row_of(part.code, 0, 0) for name, part in parts.items()}
        followed = {name: template for name, template in templates.items() if parts[name].followed}
        neighbours = dict(zip(self._here, self._neighbours[now % len(self._neighbours)]))
        replicas = _replicas(next(iter(parts.values())).code)
        known: dict[bytes, Rows] = {}

        def read(edge: Edge, message: bytes) -> Rows:
            if message not in known:
                expected = templates if edge[0] in neighbours[edge[1]] else followed
                texts = [message] if replicas == 1 else parted_texts(message)
                if len(texts) != replicas:
                    raise DecodeError(f"{len(texts)} messages arrived where {replicas} were expected")
                codes = [decode(text, expected, now) for text in texts]
                known[message] = [{name: code.decode()[0] for name, code in part.items()} for part in codes]
            return known[message]

        return read

    def _checker(self, parts: Mapping[str, Part], norms: Mapping[str, "_Norms"]) -> Callable[[Edge, Rows], None]:
        bounds = self._bounds
        if bounds is None:
            return lambda edge, found: None

        def check(edge: Edge, found: Rows) -> None:
            node = self._here.index(edge[1])
            slot = 1 + self._reached[node].index(edge[0])
            for r, rows in enumerate(found):
                for name, row in rows.items():
                    part, sizes = parts[name], norms[name].copies[r][node]
                    own = max(norms[name].rows[r][node], sizes[0])
                    theirs = None if self._one_row or part.kept is None else part.kept[r, node, slot]
                    known = 0.0 if theirs is None else sizes[slot]
                    bounds.check(name, part.content, row, own, theirs, known)

        return check

    def _known_rows(self, parts: Mapping[str, Part], arrived: Mapping[Edge, Rows]) -> dict[str, Tensor]:
        """Returns every known node's rows of each part: (..., known, dim); zero where none arrived."""
        by_sender: dict[int, Rows] = {}
        for (sender, _), message in arrived.items():
            if sender not in by_sender or len(message[0]) > len(by_sender[sender][0]):
                by_sender[sender] = message  # a whole message contains all that a short one does
        rows = {}
        for name, part in parts.items():
            own = part.rows
            every = own.new_zeros(*own.shape[:-2], len(self._known), own.shape[-1])
            every.index_copy_(-2, self._own_places, own)
            for sender, message in by_sender.items():
                for r, sent_rows in enumerate(message):
                    if name in sent_rows:
                        every[r, self._at[sender]] = sent_rows[name].to(every)
            rows[name] = every
        return rows

    def mixed(self, rows: Tensor, round_index: Tensor, onto: Tensor | None = None) -> Tensor:
        matrix = current(self._weights, round_index).expand(len(rows), -1, -1)
        return torch.bmm(matrix, rows) if onto is None else torch.baddbmm(onto, matrix, rows)

    def added_to(self, kept: Tensor, rows: Tensor, round_index: Tensor) -> Tensor:
        return self.mixed(rows, round_index, kept) if self._one_row else kept + rows[..., self._slots, :]

    def copies(self, models: Tensor) -> Tensor:
        if self._one_row:
            return torch.zeros_like(models)
        return models.new_zeros(*models.shape[:-1], self._slots.shape[-1], models.shape[-1])

    def mixed_copies(self, kept: Tensor, round_index: Tensor) -> Tensor:
        return kept if self._one_row else (current(self._slot_weights, round_index) * kept).sum(dim=-2)

    def _clipped_disagreement(self, own: Tensor, kept: Tensor, round_index: Tensor) -> Tensor:
        apart = kept - own.unsqueeze(-2)  # (..., nodes, slots, dim)
        weights = current(self._slot_weights, round_index).squeeze(-1)
        clipped = clipped_weights(weights, torch.linalg.vector_norm(apart, dim=-1), self.liars)
        return (clipped.unsqueeze(-1) * apart).sum(dim=-2)


def _neighbours(mixing: Mixing, node: int) -> list[int]:
    row = mixing.matrix[[node]].tocoo()
    return sorted(int(j) for j, weight in zip(row.col, row.data) if weight != 0 and j != node)


def _replicas(code: Code) -> int:
    return len(tensors_in(code)[0])


def joined_texts(texts: Sequence[bytes]) -> bytes:
    """Concatenates messages, each preceded by its length in 8 bytes."""
    return b"".join(len(text).to_bytes(8, "little") + text for text in texts)


def parted_texts(data: bytes) -> list[bytes]:
    """Returns the messages that were joined."""
    texts, at = [], 0
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at : at + 8], "little")
        texts.append(data[at + 8 : end])
        at = end
    return texts
