"""clipping.md says what was measured."""

import json
from pathlib import Path

from reproduction.clipping import ATTACKS, accuracies, algorithms, page_table, problem_of

HERE = Path(__file__).parents[1]


def test_page_has_the_recorded_numbers():
    recorded = json.loads((HERE / "results" / "clipping.json").read_text())
    assert page_table(recorded["rows"]) in (HERE / "clipping.md").read_text()
    assert len(recorded["rows"]) == 2 * len(ATTACKS) * len(algorithms(1))


def test_scaling_destroys_a_run_without_clipping_and_not_with_it():
    problem, algorithm = problem_of(), algorithms(40)["ad-gda"]
    plain, clipped = (accuracies(problem, algorithm, "scaling by 1,000", clip, 40, 1) for clip in (False, True))
    assert float(plain.mean()) < 0.2
    assert float(clipped.mean()) > 0.6
