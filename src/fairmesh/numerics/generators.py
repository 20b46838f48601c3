"""The random generators of the whole process: torch's, Python's and numpy's. fairmesh draws from none of them."""

import random
from typing import Any, NamedTuple

import numpy as np
import torch


def seed_generators(key: int) -> None:
    """Seeds torch's generator of the CPU, Python's and numpy's, with a number >= 0."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002


class GeneratorStates(NamedTuple):
    """The states of the process's generators at one moment."""

    torch: Any
    python: Any
    numpy: Any

    @staticmethod
    def now() -> "GeneratorStates":
        return GeneratorStates(torch.get_rng_state(), random.getstate(), np.random.get_state())  # noqa: NPY002

    def restore(self) -> None:
        """Sets the generators back to these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002

    def moved(self) -> list[str]:
        """Returns the names of the generators that were used since then."""
        after = GeneratorStates.now()
        found = {
            "torch": not torch.equal(self.torch, after.torch),
            "Python's random": self.python != after.python,
            "numpy": any(np.any(a != b) for a, b in zip(self.numpy, after.numpy)),
        }
        return [name for name, used in found.items() if used]
