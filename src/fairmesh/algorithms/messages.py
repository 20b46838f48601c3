"""What a node sends in a round: in words for operators, and as parts of a message."""

from typing import NamedTuple

from torch import Tensor

from fairmesh.compression.codes import Dense
from fairmesh.compression.compressors import FLOAT_BITS, Compressor
from fairmesh.networks.base import Part
from fairmesh.networks.bounds import Content


class GossipSettings(NamedTuple):
    """The compressor and the consensus step of an algorithm, for messages about what to lower."""

    compressor: Compressor
    consensus_step: float | None  # None: found by the run


class Sent(NamedTuple):
    """One part of the message that a node sends to each neighbour in a round."""

    name: str  # as in `ctx.exchange(name=...)`
    content: Content = "vectors"  # which show gradients; weights and losses show how well a site is served
    compressor: Compressor | None = None  # None if its numbers travel as they are
    followed: bool = False  # the change of something that receivers keep a copy of


def plain(rows: Tensor, content: Content = "vectors") -> Part:
    """Returns rows to be sent as they are, with 32 nominal bits per entry."""
    return Part(Dense(rows), FLOAT_BITS * rows.shape[-1], content=content)
