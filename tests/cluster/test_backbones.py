"""The example of a frozen encoder over processes: each computes the outputs of its own sites, and all end where one
process ends."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "backbones" / "notes.toml"
SETTINGS = ["rounds=6", "options.dtype='float64'", "backbone.dtype='float64'", "options.trace='no'"]


@pytest.mark.slow
def test_processes_compute_outputs_of_their_own_sites_and_end_as_one_does(tmp_path: Path):
    pytest.importorskip("transformers")
    ends = []
    for command in (["run"], ["launch", "--processes", "2", "--restarts", "0"]):
        out, folder = tmp_path / command[0], tmp_path / f"features of {command[0]}"
        given = [word for setting in (*SETTINGS, f"backbone.folder='{folder}'") for word in ("--set", setting)]
        arguments = [command[0], str(EXAMPLE), *command[1:], *given, "--out", str(out), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "fairmesh", *arguments], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert len(list(folder.iterdir())) == 6
        ends.append(load_file(out / "model.safetensors"))
    one, several = ends
    assert all(torch.allclose(one[name], several[name], rtol=0, atol=1e-6) for name in one)
    assert not torch.equal(one["head.1.weight"], torch.zeros_like(one["head.1.weight"]))
