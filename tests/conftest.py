"""What every test runs under: one thread, the same examples of hypothesis on every machine, shared recordings."""

import zlib
from collections import defaultdict

import pytest
import torch

from tests.examples import THOROUGH, load_profile
from tests.recordings import shared_recordings

load_profile()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as slow all but `count` cases of a test with `@pytest.mark.quick_cases(count)`. The quick ones are spread
    over its cases, and begin elsewhere in every test, so that each member of a family stays in some quick test."""
    cases = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("quick_cases"):
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    for (test, count), every in cases.items():
        every = [item for item in every if not item.get_closest_marker("slow")]
        begin = zlib.crc32(test.encode())
        quick = {(begin + k * len(every) // count) % len(every) for k in range(count)} if every else set()
        for k in set(range(len(every))) - quick:
            every[k].add_marker(pytest.mark.slow)


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
