"""`python -m benchmarks size` counts what it says that it counts."""

import ast

import pytest

from benchmarks.size import code_lines, complexity, sizes

_FUNCTION = '''
def chosen(rows, limit=None):
    """Returns rows."""
    # A comment.
    if limit is None and rows or not rows:
        return [row for row in rows if row]

    return max(rows) if rows else (
        limit
    )
'''


def test_code_lines_leave_out_docstrings_comments_and_blank_lines():
    assert code_lines(_FUNCTION) == 6


def test_complexity_counts_branches_operands_and_comprehensions():
    assert complexity(ast.parse(_FUNCTION)) == 1 + 1 + 2 + 2 + 1  # itself, if, and-or, comprehension with if, else


@pytest.mark.slow
def test_sizes_are_of_this_repository():
    found = sizes()
    assert found["folders"]["src"]["lines"] > found["folders"]["src"]["code_lines"] > 10_000
    assert 5 < found["is_none_per_1000"] < 40
    assert len(found["largest_files"]) == len(found["most_complex"]) == 10
    assert 30 < found["public_names"] < 100
