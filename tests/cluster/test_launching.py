"""`fairmesh launch`: ranks that die are started again to the same end, Ctrl-C stops all at one round, mistakes are told
once."""

import json
import sys

import pytest
import torch

import fairmesh as fm
from fairmesh.cli.cluster import leave, stop_where_ended
from fairmesh.cli.launching import OUTCOME
from fairmesh.cli.main import main
from fairmesh.errors import LostProcess
from fairmesh.networks.cluster import backend_of
from fairmesh.storage.run_folder import CHECKPOINT, JOB, METRICS


def test_ctrl_c_stops_all_ranks_after_the_same_round_and_one_says_so(survived):
    stopped = json.loads((survived / "stopped.json").read_text())
    rounds, err = stopped["rounds"], stopped["err"]
    assert stopped["code"] == 130
    assert err.count("stopped after round") == 1
    assert f"stopped after round {rounds[CHECKPOINT]} of 100000; its checkpoint is kept" in err
    assert "`fairmesh launch ... --resume` continues" in err
    assert "Traceback" not in err
    assert len(rounds) == 2
    assert len(set(rounds.values())) == 1


def test_after_kill_9_all_go_on_by_themselves_and_the_end_is_bit_identical(survived, clustered):
    err = json.loads((survived / "stopped.json").read_text())["err"]
    assert "lost contact" in err
    assert "resumed as it was begun" in err
    resumed = json.loads((survived / "resumed.json").read_text())
    assert resumed["code"] == 0
    assert json.loads(resumed["out"])["rounds"] == int((survived / "rounds").read_text())  # one rank prints
    run, undisturbed = survived / "run", clustered / "undisturbed"
    names = [METRICS, *(path.name for path in undisturbed.glob("model*.safetensors"))]
    assert len(names) == 4
    for name in names:
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes(), name
    assert not (run / JOB).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("launch", "toy.toml", "--processes", "0"), "--processes must be >= 1, got 0"),
        (("launch", "toy.toml", "--processes", "2", "--restarts", "-1"), "--restarts must be >= 0, got -1"),
        (("launch", "toy.toml", "--processes", "2", "--ratee", "1"), "No such option: --ratee"),
        (("launch", "toy.toml", "--processes", "2", "--network", "memory"), "a launched run is on a cluster"),
        (("run", "examples/plain.toml", "--network", "cluster"), "--network cluster needs torchrun"),
        (("run", "examples/plain.toml", "--network", "carrier-pigeon"), "--network is one of memory, cluster"),
    ],
)
def test_what_cannot_be_started_is_refused_at_once(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["fairmesh", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert words in capsys.readouterr().err


def test_restarts_that_could_not_work_are_refused(monkeypatch, capsys):
    ranks = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in (ranks | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["fairmesh", "run", "examples/plain.toml", "--network", "cluster"])
    with pytest.raises(SystemExit):
        main()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err


def test_an_error_that_every_rank_has_is_told_by_one_and_ends_the_launch(monkeypatch, tmp_path, capsys):
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


def test_a_rank_that_lost_another_is_to_be_started_again(monkeypatch, tmp_path):
    monkeypatch.setenv(OUTCOME, str(tmp_path / "outcome"))
    with pytest.raises(SystemExit) as left:
        leave(LostProcess("rank 1 is gone"))
    assert left.value.code == 1
    assert not (tmp_path / "outcome").exists()


def test_a_rank_has_its_own_gpu_or_none():
    assert backend_of("cpu", 1, 2, gpus=0) == ("gloo", torch.device("cpu"))
    assert backend_of("cuda", 1, 2, gpus=2) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 1))
    with pytest.raises(fm.BadInput, match="4 ranks on a machine with 2 GPUs"):
        backend_of("cuda", 0, 4, gpus=2)
    with pytest.raises(fm.BadInput, match="device 'cuda:0'"):
        backend_of("cuda:0", 0, 1, gpus=1)
