"""What a node accepts of a neighbour: numbers of a size that training can have, and weights that are weights.

A message is refused, before it is written to disk, if its numbers could break the receiver's state for good. The bound
on a part of a message is relative to the largest of four Euclidean norms: 1, the receiver's own part, its own public
copy, and the neighbour's public copy so far. All of these are in the receiver's state, so a node that was started again
decides as before. The bound adapts as they grow, and it is generous: it refuses what breaks a run, not what misleads
it. A member can still raise its numbers by this factor in every round.
"""

from typing import Literal

import torch
from torch import Tensor

from fairmesh.compression import DecodeError
from fairmesh.errors import Diverged

Content = Literal["vectors", "losses", "weights"]

TOO_LARGE = "has the norm"  # in the reason of a refusal

FACTOR = 1e3  # times the reference, for models and trackers
_LOSSES_FACTOR = FACTOR**2  # a loss can be the square of what a model gives
_UNEVENNESS = 1e3  # counts at most, of the sites' shares of the data
_LARGEST = 1e15  # its square, times the size of any model, is a float32
_ROUNDING = 1e-2  # of weights that travel uncompressed
_COMPRESSED = 0.5  # of copies of weights that travel compressed; those of the runs measured were within 0.05


class Bounds:
    """The bounds of one node.

    Args:
        unevenness: How many times larger the largest site's share of the data is than this site's, >= 1. A site's
            gradients have the weight of its share, so they can differ by this factor. Counts up to 1,000. Default: 1.
    """

    def __init__(self, unevenness: float = 1.0):
        self._factor = FACTOR * min(max(unevenness, 1.0), _UNEVENNESS)

    def check(
        self, name: str, content: Content, theirs: Tensor, own: float, copy: Tensor | None, copy_norm: float = 0.0
    ) -> None:
        """Raises DecodeError if a part of a neighbour's message must be refused.

        Args:
            name: The name of the part.
            content: What it holds.
            theirs: Its row (dim,), decoded.
            own: The size of this node's own: the larger of the norms of its part and of its public copy.
            copy: This node's copy of the neighbour, to which the row will be added; None if there is none.
            copy_norm: The norm of the copy. Default: 0.
        """
        norm = norm_of(theirs)
        factor = _LOSSES_FACTOR if content == "losses" else self._factor
        limit = min(factor * max(1.0, own, copy_norm), _LARGEST - copy_norm)
        if not norm <= limit:  # also if it is not a number
            raise DecodeError(f"its {name} {TOO_LARGE} {norm:.3g}; the limit is {limit:.3g} now")
        if content == "weights":
            _check_weights(name, theirs, copy)

    def check_own(self, name: str, content: Content, norm: float, known: float) -> None:
        """Raises Diverged if neighbours would refuse a part of this node's own message.

        Args:
            name: The name of the part.
            content: What it holds.
            norm: The norm of its row.
            known: The largest norm of the public copies of this node and its neighbours. 0 before the first message,
                when this node cannot know what size the numbers of the others have.
        """
        factor = _LOSSES_FACTOR if content == "losses" else self._factor
        limit = min(factor * max(1.0, known), _LARGEST) if known else _LARGEST
        if not norm <= limit:
            grown = f", while public copies have at most {known:.3g}" if known else ""
            raise Diverged(f"a {name} that changes by too much for its neighbours (norm {norm:.3g}{grown})")


def _check_weights(name: str, theirs: Tensor, copy: Tensor | None) -> None:
    """Refuses weights off the simplex. Copies of compressed weights need not sum to one, since compressors leave out
    coordinates; each coordinate is near one that the weights had."""
    rows = theirs if copy is None else copy + theirs
    slack = _ROUNDING if copy is None else _COMPRESSED
    least, largest, total = float(rows.min()), float(rows.max()), float(rows.sum())
    if not (least >= -slack and largest <= 1 + slack):
        raise DecodeError(f"its {name} has weights from {least:.3g} to {largest:.3g}; weights lie in [0, 1]")
    if copy is None and not abs(total - 1) <= slack:
        raise DecodeError(f"its {name} has weights that sum to {total:.3g}; weights sum to 1")


def norm_of(row: Tensor) -> float:
    """Returns the Euclidean norm."""
    return float(torch.linalg.vector_norm(row))
