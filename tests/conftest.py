"""What every test runs under: one thread, the same examples of hypothesis on every machine, shared recordings."""

import contextlib
import os
from collections import defaultdict

import pytest
import torch

from tests.examples import THOROUGH, load_profile
from tests.recordings import shared_recordings, with_recordings, without_recordings

load_profile()


QUICK_CASES = 2  # of a test with more than that many, unless it says otherwise
# Their files have few tests that take long. They begin first: one that begins last leaves the other processes idle.
LONG = ("tests/journeys/", "tests/mesh/", "tests/nvflare/", "tests/cluster/", "tests/docs/")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as slow all but some cases of each test with many. The quick ones are the first of `QUICK_CASES` equal
    shares of its cases, in the order in which they are written down. `@pytest.mark.quick_cases(count)` asks for another
    number, and `quick_cases("all")` for all that are not marked as slow themselves. No member of a family depends on
    this rule: tests/contracts/test_every_member.py has a quick case of each. What `tests/api` checks costs nothing.
    Then puts files of long tests first."""
    cases = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("quick_cases")
        count = marker.args[0] if marker else "all" if "tests/api/" in item.nodeid else QUICK_CASES
        if count != "all" and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0], count].append(item)
    for (_, count), of_one_test in cases.items():
        quick = {k * len(of_one_test) // count for k in range(count)}
        for k in set(range(len(of_one_test))) - quick:
            of_one_test[k].add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


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
    with contextlib.nullcontext() if THOROUGH else shared_recordings():
        yield


@pytest.fixture(autouse=True, scope="module")
def few_recordings(request):
    """In the quick run gradients are recorded only where a module or a test is marked as `recorded`: to record them
    takes as long as to evaluate them some forty times, and few tests have more rounds."""
    with contextlib.nullcontext() if THOROUGH or request.node.get_closest_marker("recorded") else without_recordings():
        yield


@pytest.fixture(autouse=True)
def recorded_alone(request, few_recordings):
    """A test that is marked itself records, too: a module does not see the marks of its tests."""
    with with_recordings() if request.node.get_closest_marker("recorded") else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def features(tmp_path_factory):
    """Features of frozen encoders are kept in a folder of the tests."""
    os.environ["FAIRMESH_FEATURES"] = str(tmp_path_factory.mktemp("features"))
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    del os.environ["FAIRMESH_FEATURES"], os.environ["XDG_STATE_HOME"]
