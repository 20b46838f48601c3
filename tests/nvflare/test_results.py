"""What a job with code of its own leaves at the sites and brings to the server."""

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fairmesh.cli.main import main
from fairmesh.errors import FairmeshError
from fairmesh.nvflare.outcome import FINISHED
from tests.nvflare.standin import SITES, Engine, Faults, exported
from tests.refusals import refused

MODEL = """
import torch

def net():
    return torch.nn.Linear(2, 2)
"""
DATA = """
import torch
import fairmesh as fm

def sites():
    made = []
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        inputs = torch.randn(40, 2, generator=draw)
        made.append(fm.Site((inputs, (inputs.sum(1) > 0).long()), test=(inputs, (inputs.sum(1) > 0).long())))
    return made
"""
TEXT = """
rounds = 4
topology = "ring"
algorithm = { name = "dsgd", primal_step = 0.3 }
[data]
name = "import"
path = "mine.py:sites"
[model]
name = "import"
path = "mine.py:net"
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own-code")
    (folder / "mine.py").write_text(DATA + MODEL)
    engine = Engine(exported(folder, text=TEXT), folder, Faults())
    engine.start()
    return engine, engine.wait(60)


def test_job_with_code_of_its_own_runs_to_its_end(ended):
    engine, said = ended
    assert {one["state"] for one in said.values()} == {FINISHED}, said
    assert "mine.py" in engine.sites[SITES[0]].job.files
    assert len({engine.result(site)["model.safetensors"] for site in SITES}) == 1


def test_result_that_was_brought_to_the_server_predicts(ended, tmp_path, monkeypatch, capsys):
    pytest.importorskip("nvflare", reason="NVFlare is not installed")
    from fairmesh.nvflare.server import GLOBAL_MODEL, Overseer

    site = ended[0].sites[SITES[0]]
    client = SimpleNamespace(result_files=lambda: json.dumps(site.result_files()).encode(), piece=site.piece)
    kept = Overseer()._kept(lambda timeout: client, site.job, tmp_path)
    assert "result_failure" not in kept
    assert (tmp_path / GLOBAL_MODEL).exists()
    np.savez(tmp_path / "rows.npz", x=np.float32([[3, 3], [-3, -3]]))
    shutil.copy(ended[0].job / "app" / "custom" / "mine.py", kept["result"])
    command = ["predict", kept["result"], str(tmp_path / "rows.npz"), "--allow", "mine.py", "--json"]
    monkeypatch.setattr(sys, "argv", ["fairmesh", *command])
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capsys.readouterr()
    assert not stopped.value.code, err
    assert [row["prediction"] for row in json.loads(out)["predictions"]] == ["1", "0"]


def test_model_that_stays_at_the_sites_is_not_handed_over(tmp_path, monkeypatch):
    pytest.importorskip("nvflare", reason="NVFlare is not installed")
    from fairmesh.nvflare import client

    engine = Engine(exported(tmp_path, model_to_server=False), tmp_path, Faults())
    monkeypatch.setattr(client, "collab", SimpleNamespace(caller="server"))
    process = client.SiteProcess()
    process._participant = engine.join(SITES[0])
    for asks in (process.result_files, lambda: process.piece("model.safetensors", 0)):
        with refused("hands over no result", error=FairmeshError):
            asks()
