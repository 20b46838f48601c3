"""The blocks of docs/howto/own-models.md run, one after another."""

import re
from pathlib import Path

import pytest


@pytest.mark.slow
def test_blocks_of_the_page_run():
    page = Path(__file__).parents[2] / "docs" / "howto" / "own-models.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 4
    exec("\n".join(blocks), {})
