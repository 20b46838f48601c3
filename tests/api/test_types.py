"""mypy and pyright see the real types of the public names: consumer.py has no error, and mistakes are found."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairmesh as fm

CONSUMER = Path(__file__).with_name("consumer.py")
SOURCE = Path(fm.__file__).parents[1]
CORRECT = "reveal_type(fm.ADGDA(dual_step=0.1))"
MISTAKES = ["fm.ADGDA(primal_stp=1)", "fm.Rign()", "fm.schedules.Geometrc(1.0, 0.9)", 'fm.topologies.Torus("3", 4)']
HEAVY = "torch.*,numpy.*,scipy.*,networkx.*,matplotlib.*"  # checking these takes minutes; their types become Any


@pytest.fixture
def mistakes(tmp_path):
    """Writes a program whose line 3 is correct and whose later lines each hold one mistake."""
    path = tmp_path / "mistakes.py"
    path.write_text("\n".join(["import fairmesh as fm", "", CORRECT, *MISTAKES, ""]))
    return path


def check(found, mistakes):
    """Checks errors and revealed types, given as (file, line, text)."""
    assert [text for file, _, text in found if file == CONSUMER.name] == []
    at = {line: text for file, line, text in found if file == mistakes.name}
    assert "ADGDA" in at.pop(3)
    assert sorted(at) == list(range(4, 4 + len(MISTAKES)))


@pytest.mark.slow  # pyright sees them in the quick tests
def test_mypy_sees_real_types(mistakes, tmp_path):
    config = tmp_path / "mypy.ini"
    config.write_text(
        f"[mypy]\nstrict = true\nfollow_imports = silent\nignore_missing_imports = true\nmypy_path = {SOURCE}\n"
        f"cache_dir = {tmp_path / 'cache'}\n[mypy-{HEAVY}]\nfollow_imports = skip\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), str(CONSUMER), str(mistakes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    lines = re.findall(r"^(.+?):(\d+): (?:error|note): (.+)$", done.stdout, re.M)
    assert lines, done.stdout + done.stderr
    check([(Path(file).name, int(line), text) for file, line, text in lines], mistakes)


def test_pyright_sees_real_types(mistakes, tmp_path):
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps(
            {"include": [str(CONSUMER), str(mistakes)], "extraPaths": [str(SOURCE)], "typeCheckingMode": "standard"}
        )
    )
    command = [sys.executable, "-m", "basedpyright", "--project", str(tmp_path), "--outputjson"]
    done = subprocess.run([*command, "--pythonpath", sys.executable], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    check([(Path(d["file"]).name, d["range"]["start"]["line"] + 1, d["message"]) for d in found], mistakes)
