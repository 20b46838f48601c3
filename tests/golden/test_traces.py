"""Loss traces stored as text: a change that is not meant to change the mathematics leaves them within 1e-9.

Made by `python -m tests.golden.regenerate`."""

import pytest

from tests import toys
from tests.golden.settings import HOSTS, MESH, SETTINGS, mesh_of_three, on_two_hosts, trace_of
from tests.golden.trace import FOLDER, ROUNDS, algorithm_on_file, file_of, read, traced, written

pytestmark = pytest.mark.recorded


@pytest.mark.parametrize("name", toys.ALGORITHMS)
def test_algorithm_has_the_losses_on_file(name):
    stored = _compared(name, traced(toys.ALGORITHMS[name]))
    assert [t for t, _, _ in stored] == list(range(ROUNDS + 1))
    assert stored[-1][1] < stored[0][1] - 0.1, "nothing was learned: the trace would not notice much"


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", SETTINGS)
def test_setting_has_the_losses_on_file(name):
    stored = _compared(name, trace_of(SETTINGS[name]()))
    assert stored[-1][2] < stored[0][2] - 0.1, "nothing was learned: the trace would not notice much"


def test_two_hosts_have_the_losses_on_file():
    _compared(HOSTS, on_two_hosts())


@pytest.mark.slow
def test_mesh_of_three_has_the_losses_on_file(tmp_path):
    _compared(MESH, mesh_of_three(tmp_path))


def test_every_setting_has_a_trace_of_its_own():
    traces = {name: read(name)[1:] for name in SETTINGS}
    same = [(a, b) for a in traces for b in traces if a < b and traces[a] == traces[b]]
    assert same == []


def _compared(name, now):
    """Returns the trace on file, which is that of now."""
    stored = read(name)
    assert [t for t, _, _ in stored] == [t for t, _, _ in now]
    for (t, worst, mean), (_, worst_now, mean_now) in zip(stored, now):
        assert worst_now == pytest.approx(worst, abs=1e-9), f"worst loss after round {t}"
        assert mean_now == pytest.approx(mean, abs=1e-9), f"mean loss after round {t}"
    return stored


@pytest.mark.parametrize("name", toys.ALGORITHMS)
def test_trace_on_file_is_of_the_algorithm_as_it_is_configured(name):
    assert algorithm_on_file(name) == toys.ALGORITHMS[name]


def test_traces_exist_for_exactly_the_algorithms_of_the_toys_and_the_settings():
    known = [*toys.ALGORITHMS, *SETTINGS, HOSTS, MESH]
    assert {path.name for path in FOLDER.iterdir()} == {file_of(name).name for name in known}


def test_trace_is_written_with_fifteen_digits():
    trace = [(0, 1.25, 1.0), (1, 1.1234567890123, 0.9)]
    lines = [line for line in written("afl", trace).splitlines() if not line.startswith("#")]
    assert lines == [" 0 1.250000000000000 1.000000000000000", " 1 1.123456789012300 0.900000000000000"]
