"""What the pages on security and on troubles name as shown by tests is there, and nodes say what is quoted."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
SECURITY = DOCS / "results" / "security.md"
NAMED = re.findall(r"`((?:\.\./compression/)?test_\w+\.py)(?:::(test_\w+))?`", SECURITY.read_text(encoding="utf-8"))


def test_protections_name_tests_that_exist():
    assert len(NAMED) > 20
    for file, test in NAMED:
        text = (HERE / file).read_text()
        assert not test or f"def {test}(" in text, f"{file}::{test}"


TROUBLES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "howto" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| mistake", "| failure"))
]
SOURCE = "\n".join(path.read_text() for path in sorted((HERE.parents[1] / "src" / "fairmesh").rglob("*.py")))
SAID = re.sub(r'"\s*\n\s*f?"', "", SOURCE)  # a sentence may be written in several pieces


@pytest.mark.parametrize("trouble", TROUBLES, ids=[trouble[0] for trouble in TROUBLES])
def test_trouble_is_quoted_as_a_node_says_it_and_shown_by_a_test(trouble):
    _, seen, means, remedy, shown = trouble
    quoted = re.findall(r"`([^`]+)`", seen)
    assert quoted
    assert [sentence for sentence in quoted if sentence not in SAID] == []
    assert means
    assert remedy
    ((file, test),) = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", shown)
    assert f"def {test}(" in (HERE / file).read_text() if test else (HERE / file).exists()
