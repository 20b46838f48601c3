"""Loss traces stored as text: a change that is not meant to change the mathematics leaves them within 1e-9.

Made by `python -m tests.golden.regenerate`."""

import pytest

from tests import toys
from tests.golden.trace import FOLDER, ROUNDS, algorithm_on_file, file_of, read, traced, written

pytestmark = pytest.mark.recorded


@pytest.mark.parametrize("name", toys.ALGORITHMS)
def test_algorithm_has_the_losses_on_file(name):
    stored, now = read(name), traced(toys.ALGORITHMS[name])
    assert [t for t, _, _ in stored] == [t for t, _, _ in now] == list(range(ROUNDS + 1))
    for (t, worst, mean), (_, worst_now, mean_now) in zip(stored, now):
        assert worst_now == pytest.approx(worst, abs=1e-9), f"worst loss after round {t}"
        assert mean_now == pytest.approx(mean, abs=1e-9), f"mean loss after round {t}"
    assert stored[-1][1] < stored[0][1] - 0.1, "nothing was learned: the trace would not notice much"


@pytest.mark.parametrize("name", toys.ALGORITHMS)
def test_trace_on_file_is_of_the_algorithm_as_it_is_configured(name):
    assert algorithm_on_file(name) == toys.ALGORITHMS[name]


def test_traces_exist_for_exactly_the_algorithms_of_the_toys():
    assert {path.name for path in FOLDER.iterdir()} == {file_of(name).name for name in toys.ALGORITHMS}


def test_trace_is_written_with_fifteen_digits():
    trace = [(0, 1.25, 1.0), (1, 1.1234567890123, 0.9)]
    lines = [line for line in written("afl", trace).splitlines() if not line.startswith("#")]
    assert lines == [" 0 1.250000000000000 1.000000000000000", " 1 1.123456789012300 0.900000000000000"]
