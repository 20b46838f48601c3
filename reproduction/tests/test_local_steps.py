"""The table of local steps in the documentation is that of the recorded runs."""

import json
from pathlib import Path

from reproduction.local_steps import PROBLEMS, RESULTS, table

PAGE = Path(__file__).parents[2] / "docs" / "results" / "local-steps.md"


def test_page_has_the_recorded_rows():
    rows = json.loads(RESULTS.read_text())
    assert table(rows) in PAGE.read_text(encoding="utf-8"), "write it again: python -m reproduction.local_steps --show"
    assert {row["problem"] for row in rows} == set(PROBLEMS)
    assert {row["local_steps"] for row in rows} == {1, 5, 20, 100}
    assert all(len(row["worst"]) == 5 for row in rows)


def test_no_run_has_diverged():
    rows = json.loads(RESULTS.read_text())
    assert min(value for row in rows for value in row["mean"]) > 0.2  # all problems have ten classes
