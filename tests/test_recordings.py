"""Where tests record gradients and where they evaluate them as they are written."""

import pytest
import torch

from fairmesh.numerics.tracing import Traced
from tests.examples import THOROUGH


def _calls_after_the_first() -> int:
    """Returns how often a function is evaluated by two further calls of its recording, which the first call made."""
    calls = []

    def doubled(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(rows)
        return (2 * rows,)

    traced = Traced(doubled)
    traced(torch.ones(2))
    calls.clear()
    traced(torch.ones(2))
    traced(torch.ones(2))
    return len(calls)


@pytest.mark.recorded
def test_a_marked_test_of_an_unmarked_module_replays_recordings():
    assert _calls_after_the_first() == 0


@pytest.mark.skipif(THOROUGH, reason="the thorough run records in all tests")
def test_other_tests_of_the_quick_run_call_the_function_every_time():
    assert _calls_after_the_first() == 2
