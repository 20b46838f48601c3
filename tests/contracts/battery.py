"""What the contract tests share: the bits of a state, and rounds with the bits that were billed for them."""

from typing import Any

from torch import Tensor

import fairmesh as fm
from fairmesh.storage.state_tree import flatten_state
from fairmesh.testing import stacks


def after(algorithm: fm.algorithms.Algorithm, network, oracle, rounds: int, state: Any = None, first: int = 0):
    """Returns the state after some rounds, and the bits that nodes and server sent in them."""
    end = stacks.after(algorithm, network, oracle, rounds, state, first)
    return end.state, end.sent.node_bits, end.sent.server_bits


def same_bits(here: dict[str, Tensor], there: dict[str, Tensor]) -> bool:
    return here.keys() == there.keys() and all(
        here[name].dtype == there[name].dtype and here[name].equal(there[name]) for name in here
    )


def state_bits(state: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in flatten_state(state).items()}
