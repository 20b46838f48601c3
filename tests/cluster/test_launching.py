"""`fairmesh launch`: ranks that die are started again to the same end, Ctrl-C stops all at one round, mistakes are told
once."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.cli.cluster import leave
from fairmesh.cli.launching import OUTCOME, known_to, stop_where_ended
from fairmesh.cli.main import main
from fairmesh.errors import LostProcess
from fairmesh.networks.cluster import backend_of
from fairmesh.storage.run_folder import CHECKPOINT, JOB, METRICS
from tests.refusals import refused
from tests.trackers.test_tensorboard import read as read_events


def fairmesh(folder, *arguments: str) -> str:
    """Runs a command in a folder; returns what it said on stderr."""
    command = [sys.executable, "-m", "fairmesh", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow  # tests/cluster/test_runs.py runs ranks in the quick tests
@pytest.mark.parametrize("stopped", ["undisturbed", "killed"], indirect=True)
def test_launch_stops_all_ranks_after_the_same_round_on_ctrl_c(stopped):
    rounds, err = stopped["rounds"], stopped["err"]
    assert stopped["code"] == 130
    (line,) = [line for line in err.splitlines() if "fairmesh launch ... --resume" in line]  # one rank says so
    assert {str(rounds[CHECKPOINT]), "100000"} <= set(re.findall(r"\d+", line))
    assert "Traceback" not in err
    assert len(rounds) == 2
    assert len(set(rounds.values())) == 1


@pytest.mark.slow
def test_launch_restarts_a_killed_rank_to_the_same_end(survived, clustered):
    resumed = json.loads((survived / "resumed.json").read_text())
    assert resumed["code"] == 0
    assert json.loads(resumed["out"])["rounds"] == int((survived / "rounds").read_text())  # one rank prints
    run, undisturbed = survived / "run", clustered / "undisturbed"
    names = [METRICS, *(path.name for path in undisturbed.glob("model*.safetensors"))]
    assert len(names) == 3
    for name in names:
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes(), name
    assert not (run / JOB).exists()


_REFERRED = """
rounds = 10
options = {measure_every = 10, device = "cpu"}
data = {name = "digits", nodes = 4}
model = {name = "logistic"}
algorithm = {name = "dsgd"}
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", 'personalization = {name = "mixture"}\n'], ids=["common model", "own models"])
def test_launch_with_references_and_sites_left_out_gives_what_one_process_gives(more, tmp_path):
    (tmp_path / "toy.toml").write_text(_REFERRED + more)
    tables, left_out = [], []
    for command in (["run"], ["launch", "--processes", "2", "--restarts", "0"]):
        out = tmp_path / command[0]
        asked = ["--with-references", "--leave-one-out", "--out", str(out), "--json"]
        assert "runpy" not in fairmesh(tmp_path, command[0], "toy.toml", *command[1:], *asked)
        tables.append(json.loads((out / "summary.json").read_text())["references"])
        left_out.append(json.loads((out / "leave_one_out.json").read_text())["values"]["accuracy"][0])
    one, several = tables
    assert left_out[1] == pytest.approx(left_out[0], abs=1e-6)
    assert list(one) == list(several)
    for name in one:
        assert several[name]["sites"] == pytest.approx(one[name]["sites"], abs=1e-6), name
        assert several[name]["versus"]["sites"].keys() == one[name]["versus"]["sites"].keys()


_TRAINED = """
rounds = 3
options = {measure_every = 3, device = "cpu", dtype = "float64"}
data = {name = "digits", nodes = 4}
model = {name = "logistic"}
trainer = {function = "mine.py:train"}
"""
_OWN_TRAINING = """
import torch

def train(module, data, ctx):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    if "optimizer" in ctx.state:
        optimizer.load_state_dict(ctx.state["optimizer"])
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    ctx.state["optimizer"] = optimizer.state_dict()
    with open("worked", "a") as lines:
        lines.write(f"{torch.distributed.is_initialized()} {ctx.round} {ctx.site}\\n")
"""


@pytest.mark.slow
def test_launch_with_a_trainer_gives_what_one_process_gives(tmp_path):
    (tmp_path / "mine.py").write_text(_OWN_TRAINING)
    (tmp_path / "toy.toml").write_text(_TRAINED)
    models = []
    for command, more in (("run", []), ("launch", ["--processes", "2", "--restarts", "0"])):
        fairmesh(tmp_path, command, "toy.toml", *more, "--out", command)
        models.append(load_file(tmp_path / command / "model.safetensors"))
    one, several = models
    assert one.keys() == several.keys()
    for name in one:
        assert torch.allclose(several[name], one[name], rtol=0, atol=1e-12), name
    worked = (tmp_path / "worked").read_text().splitlines()
    sites = {line.split(maxsplit=2)[2] for line in worked}
    assert len(sites) == 4
    assert sorted(worked) == sorted(
        f"{cluster} {t} {site}" for cluster in (False, True) for t in range(3) for site in sites
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_launch_tracks_from_one_rank(tmp_path):
    (tmp_path / "toy.toml").write_text(_REFERRED)
    fairmesh(tmp_path, "launch", "toy.toml", "--processes", "2", "--track", "tensorboard", "--out", "run")
    folder = tmp_path / "run" / "trackers" / "tensorboard"
    assert len(list(folder.iterdir())) == 1
    assert [one.step for one in read_events(folder).Scalars("accuracy/worst")] == [0, 10]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("launch", "toy.toml", "--processes", "0"), ["--processes", ">= 1", "0"]),
        (("launch", "toy.toml", "--processes", "2", "--restarts", "-1"), ["--restarts", ">= 0", "-1"]),
        (("launch", "toy.toml", "--processes", "2", "--ratee", "1"), ["--ratee"]),
        (("launch", "toy.toml", "--processes", "2", "--network", "memory"), ["--network", "cluster"]),
        (("run", "examples/plain.toml", "--network", "cluster"), ["--network", "torchrun"]),
        (("run", "examples/plain.toml", "--network", "carrier-pigeon"), ["--network", "memory", "cluster"]),
    ],
)
def test_launch_refuses_at_once_what_cannot_be_started(monkeypatch, capsys, arguments, names):
    monkeypatch.setattr(sys, "argv", ["fairmesh", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert [name for name in names if name not in err] == []


def test_launch_under_torchrun_refuses_restarts_that_could_not_work(monkeypatch, capsys):
    ranks = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in (ranks | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["fairmesh", "run", "examples/plain.toml", "--network", "cluster"])
    with pytest.raises(SystemExit):
        main()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err


def test_leave_tells_an_error_of_every_rank_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(OUTCOME, str(tmp_path / "outcome"))
    for _ in range(2):
        with pytest.raises(SystemExit) as left:
            leave(fm.BadInput("not this"))
        assert left.value.code == 0  # else torchrun would start it again
    assert capsys.readouterr().err == "error: not this\n"
    assert (tmp_path / "outcome").read_text() == "2"
    with pytest.raises(SystemExit) as left:
        stop_where_ended()
    assert left.value.code == 0


def test_leave_of_a_rank_that_lost_another_asks_for_a_restart(monkeypatch, tmp_path):
    monkeypatch.setenv(OUTCOME, str(tmp_path / "outcome"))
    with pytest.raises(SystemExit) as left:
        leave(LostProcess("rank 1 is gone"))
    assert left.value.code == 1
    assert not (tmp_path / "outcome").exists()


def test_backend_of_a_rank_is_its_own_gpu_or_none():
    assert backend_of("cpu", 1, 2, gpus=0) == ("gloo", torch.device("cpu"))
    assert backend_of("cuda", 1, 2, gpus=2) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 1))
    with refused("4 ranks", "2 GPUs"):
        backend_of("cuda", 0, 4, gpus=2)
    with refused("rank", "GPU"):
        backend_of("cuda:0", 0, 1, gpus=1)


def test_launch_leaves_out_what_an_older_torchrun_does_not_take():
    asked = ["launching", "--nnodes=1", "--shutdown-timeout=60", "-m", "fairmesh"]
    assert known_to({"--nnodes", "--shutdown-timeout"}, asked) == asked
    assert known_to({"--nnodes"}, asked) == ["launching", "--nnodes=1", "-m", "fairmesh"]
