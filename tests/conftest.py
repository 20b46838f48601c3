"""What every test runs under: one thread, the same examples of hypothesis on every machine, shared recordings."""

import pytest
import torch

from tests.examples import THOROUGH, load_profile
from tests.recordings import shared_recordings

load_profile()


@pytest.fixture(autouse=True)
def one_thread():
    """Operations on a few hundred numbers only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def recordings():
    """In the quick run a problem's gradients are recorded once for all tests that use it."""
    if THOROUGH:
        yield
    else:
        with shared_recordings():
            yield
