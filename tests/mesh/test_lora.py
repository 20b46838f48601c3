"""Nodes whose model has adapters: only digests of the frozen base travel, and a site with another base is refused."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

import fairmesh as fm
from fairmesh.compression import DecodeError
from fairmesh.mesh.node.start import Start
from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run, play
from tests.refusals import missing_from, refused

pytestmark = pytest.mark.slow

NAMES = ["a", "b", "c"]
MINE = """
import os
import torch

def base():
    torch.manual_seed(int(os.environ.get("OTHER_BASE", "0")))
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
"""
LORA = {"name": "lora", "base": {"name": "import", "path": "mine.py:base"}, "targets": ["1"], "rank": 2}


def another_base_model_at_b(run: Run) -> None:
    """Somebody there puts it right."""
    run.start("a", "c")
    run.start("b", before=lambda: os.environ.update(OTHER_BASE="1"))
    run.until(lambda: run.events("b", "refused"), 120)
    (said, *_) = run.events("b", "refused")
    assert not missing_from(said, "base_model.model.1.base_layer", "another frozen base model", "SHA-256"), said
    assert said["site"] in ("a", "c"), said
    assert not any(run.round(name) for name in NAMES)
    run.crash("b")
    run.start("b")
    run.end(*NAMES)


def test_site_with_another_base_model_is_refused_by_name_and_goes_on_with_the_right_one(tmp_path: Path):
    pytest.importorskip("peft")
    text = experiment(6, algorithm="choco-sgd", data={"odd": None}, model=LORA)
    play(another_base_model_at_b, tmp_path, NAMES, text, {"mine.py": MINE})


def start(folder: Path, changed: bool = False, head: tuple[str, ...] = ()) -> Start:
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 3))
    module = fm.models.LoRA(targets=("0",), head=head).adapt(base)
    if changed:
        module.base_model.model[0].base_layer.weight.data[0, 0] += 1e-6
    folder.mkdir(exist_ok=True)
    return Start(folder, module, "this machine", lambda position, there: None)


def test_start_carries_digests_of_the_base_and_refuses_another_one_after_a_restart(tmp_path: Path):
    pytest.importorskip("peft")
    made = start(tmp_path)
    content = save(made._travelling)
    names = load(content).keys()
    assert "sha256 base_model.model.0.base_layer.weight" in names
    assert "base_model.model.0.base_layer.weight" not in names
    made.keep(content)
    start(tmp_path).refuse_other(content, "there")
    start(tmp_path).model()
    with refused("base_layer.weight", "another frozen base model", "there", error=DecodeError):
        start(tmp_path, changed=True).refuse_other(content, "there")
    with refused("base model of this site has changed", "base_layer.weight"):
        start(tmp_path, changed=True).model()


def test_start_carries_a_head_that_machines_draw_differently(tmp_path: Path):
    pytest.importorskip("peft")
    names = start(tmp_path, head=("1",))._travelling.keys()
    assert "base_model.model.1.modules_to_save.default.weight" in names
    assert "base_model.model.1.original_module.weight" in names
