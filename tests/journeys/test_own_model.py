"""A model file of one's own in every command, in a folder that moves on the way."""

import hashlib
import json
import os
import signal

import pytest

from tests.journeys.consortium import TABLE, Consortium
from tests.journeys.patients import write_ill, write_table
from tests.journeys.user import User, eventually, shown
from tests.mesh.fleet import ended

MODEL = '''"""A small network."""

import torch
from torch import nn


def block(width):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Risk(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.into = nn.Linear(2, width)
        self.body = block(width)
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        return self.out(self.body(torch.tanh(self.into(x))))
'''
OWN = '\n[model]\nname = "import"\npath = "risk_model.py:Risk"\narguments = { width = 6 }\n'


def _experiment(rounds: int) -> str:
    return shown("docs/howto/deploy.md", "toml", "[[contract.columns]]", {"rounds = 300": f"rounds = {rounds}"}) + OWN


def _table(user: User) -> None:
    """A table of all sites, for the simulation."""
    header, rows = ["site", "age", "creatinine", "ill"], []
    for k in range(4):
        write_ill(user.folder / "one.csv", 80 + 40 * k, seed=k)
        lines = (user.folder / "one.csv").read_text().splitlines()[1:]
        rows += [[f"clinic {k}", *line.split(",")[1:]] for line in lines]
    write_table(user.folder / "patients.csv", header, rows)


@pytest.mark.slow
def test_own_model_in_every_command_of_a_simulation_and_in_a_moved_folder(tmp_path):
    user = User(tmp_path / "first")
    user.folder.mkdir()
    user.writes("risk_model.py", MODEL)
    user.writes("risk.toml", _experiment(3000) + TABLE + 'site = "site"\n')
    _table(user)
    user.runs("fairmesh advise risk.toml")
    user.runs("fairmesh data check risk.toml")
    process, log = user.starts("fairmesh run risk.toml")
    eventually(lambda: "round 100" in log.read_text() or "/3000" in log.read_text(), 60, log.read_text)
    os.kill(process, signal.SIGINT)
    assert ended(process, 60) in (130, 0), log.read_text()

    moved = User(user.folder.rename(tmp_path / "second"))
    moved.runs("fairmesh run risk.toml --resume")
    moved.runs("fairmesh report runs/risk")
    moved.runs("fairmesh export runs/risk --onnx")
    write_ill(moved.folder / "new.csv", 20, seed=7)
    moved.runs("fairmesh predict runs/risk new.csv --out predicted.csv")
    moved = User(moved.folder.rename(tmp_path / "third"))
    moved.runs("fairmesh predict runs/risk new.csv")  # finished, and moved with its model file
    moved.runs("fairmesh launch risk.toml --processes 2 --out runs/processes --set rounds=40")
    moved.runs("fairmesh run risk.toml --with-references --out runs/references --set rounds=40")
    moved.runs("fairmesh compare runs/references runs/processes")


@pytest.mark.slow
def test_own_model_in_a_mesh_whose_folder_moves(tmp_path):
    user = User(tmp_path)
    user.writes("risk_model.py", MODEL)
    user.writes("risk.toml", _experiment(1500))

    def give_data(home, k):
        write_ill(home / "patients.csv", 100 + 60 * k, seed=k)
        with open(home / "site.toml", "a") as file:
            file.write(TABLE)

    mesh = Consortium(tmp_path, "risk.toml", ["north", "south", "east"], give_data)
    try:
        mesh.start()
        mesh.until("north", lambda status: status["round"] >= 100)
        for site in ("north", "east"):
            mesh.stop(site)
            mesh.move(site, f"elsewhere/{site}")
        mesh.start("north", "east")
        mesh.end(*mesh.sites)
    finally:
        mesh.kill_all()
    results = [mesh.state(site) / "result" for site in mesh.sites]
    assert len({hashlib.sha256((result / "model.safetensors").read_bytes()).hexdigest() for result in results}) == 1
    assert json.loads((results[0] / "summary.json").read_text())["rounds"] == 1500
    user.runs("fairmesh report elsewhere/north/site.toml")
    write_ill(tmp_path / "new.csv", 20, seed=7)
    user.runs("fairmesh predict elsewhere/north/state/result new.csv")
    user.runs("fairmesh export elsewhere/north/state/result --onnx")
