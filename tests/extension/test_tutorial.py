"""docs/howto/extending.md: its files are written, its code is run in order, and its command works."""

import re
import sys
from pathlib import Path

import pytest

from fairmesh.cli.main import main
from tests.refusals import missing_from

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "extending.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.(?:py|toml))\n")


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.slow
def test_extending_page_runs_from_top_to_bottom(at_home, monkeypatch, capsys):
    blocks = BLOCK.findall(PAGE.read_text())
    for _, text in blocks:  # the parts of a file are on the page in their order
        if found := FILE.match(text):
            with (at_home / found[1]).open("a") as file:
                file.write(text + "\n")
    names: dict[str, object] = {"__name__": "tutorial"}
    ran = [text for kind, text in blocks if kind == "python" and not FILE.match(text)]
    for text in ran:
        exec(compile(text, str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert said.count("worst") == 2
    assert missing_from(said, "state.models", "hosts") == []
    (command,) = [line for kind, text in blocks if kind == "sh" for line in text.splitlines() if " run " in line]
    monkeypatch.setattr(sys, "argv", [*command.split(), "--json"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (0, None)
    assert "ExactDiffusion" in capsys.readouterr().out
    assert (at_home / "runs" / "file" / "model-3.safetensors").exists()  # four replicas


def test_extending_page_has_an_algorithm_of_about_25_lines():
    text = next(text for kind, text in BLOCK.findall(PAGE.read_text()) if "class ExactDiffusion" in text)
    assert len([line for line in text.split("class DiffusionState")[1].splitlines() if line.strip()]) <= 25
