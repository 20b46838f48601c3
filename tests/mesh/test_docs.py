"""What docs/security.md names as shown by tests is there."""

import re
from pathlib import Path

HERE = Path(__file__).parent
SECURITY = HERE.parents[1] / "docs" / "security.md"
NAMED = re.findall(r"`((?:\.\./compression/)?test_\w+\.py)(?:::(test_\w+))?`", SECURITY.read_text(encoding="utf-8"))


def test_protections_name_tests_that_exist():
    assert len(NAMED) > 20
    for file, test in NAMED:
        text = (HERE / file).read_text()
        assert not test or f"def {test}(" in text, f"{file}::{test}"
