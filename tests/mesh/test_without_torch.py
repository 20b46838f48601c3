"""Commands that read a mesh's files do not import torch, and say the same as with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fairmesh.config.tables import to_table
from fairmesh.mesh.enrol.revealing import bits_per_parameter, revealing
from tests import toys
from tests.mesh.fleet import provisioned

LIBRARIES = {"torch._C", "numpy.linalg", "scipy._lib", "networkx.classes"}  # modules of what is left out
COMMANDS = f"""
import sys
from fairmesh.cli.main import main

for line in sys.stdin:
    sys.argv = ["fairmesh", *line.split()]
    try:
        main()
    except SystemExit as end:
        print(end.code, sorted({LIBRARIES} & set(sys.modules)), file=sys.stderr)
"""
ANSWERS = """
import json, sys
from fairmesh.cli.without_torch import leave_out_torch

leave_out_torch()
from fairmesh.mesh.enrol.revealing import bits_per_parameter, revealing

tables = json.load(sys.stdin)
print(json.dumps([[revealing(t), bits_per_parameter(t)] for t in tables]))
"""
EXPERIMENT = 'rounds = 4\ndata = { name = "digits", nodes = 3 }\ntopology = "complete"\n'


def _ended(script: str, given: str, folder: Path) -> subprocess.CompletedProcess[str]:
    run = subprocess.run([sys.executable, "-c", script], input=given, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run


@pytest.fixture
def mesh(tmp_path):
    (tmp_path / "trial.toml").write_text(EXPERIMENT)
    provisioned(tmp_path, tmp_path / "trial.toml", ["a", "b", "c"])
    return tmp_path


def test_reading_commands_import_no_library_that_computes_and_show_the_same(mesh, called):
    asked = ["mesh key mesh/mesh.toml b --out new", "mesh show a/site.toml --json --approve", "status a/site.toml"]
    refused = ["mesh init no.toml", "mesh seal no", "mesh check no/site.toml", "mesh remove no/site.toml"]
    run = _ended(COMMANDS, "\n".join([*asked, *refused]), mesh)
    ends = [line for line in run.stderr.splitlines() if line.endswith("[]")]
    assert ends == ["0 []", "0 []", *["2 []"] * 5], run.stderr  # no node has been started, so there is no status
    _, out, _ = called("mesh", "show", mesh / "a" / "site.toml", "--json")
    assert json.loads(run.stdout) == json.loads(out)


def test_stand_ins_for_torch_change_nothing_in_what_any_algorithm_reveals(tmp_path):
    compressors = [{"name": "choco-sgd", "compressor": to_table(one)} for one in toys.COMPRESSORS.values()]
    sections = [*(to_table(one) for one in toys.ALGORITHMS.values()), *compressors]
    tables = [{}, {"trainer": {}}, *({"algorithm": section} for section in sections)]
    run = _ended(ANSWERS, json.dumps(tables), tmp_path)
    here = [[revealing(t), bits_per_parameter(t)] for t in tables]
    assert json.loads(run.stdout) == json.loads(json.dumps(here))


def test_stand_in_refuses_to_be_decided_by(tmp_path):
    script = "from fairmesh.cli.without_torch import leave_out_torch; leave_out_torch(); import torch\n"
    for use in ("bool(torch.ones(3))", "torch.ones(3) > 2", "str(torch.ones(3))", "list(torch.ones(3))"):
        run = subprocess.run([sys.executable, "-c", script + use], capture_output=True, text=True)
        assert "torch.ones" in run.stderr, use
