"""Nodes whose model has adapters: only digests of the frozen base travel, and a site with another base is refused."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

import fairmesh as fm
from fairmesh.compression import DecodeError
from fairmesh.mesh.node.start import Start
from tests.mesh.scenarios import Run, played
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
EXPERIMENT = """
rounds = 6
data = { name = "digits", nodes = 3 }
algorithm = "choco-sgd"
[model]
name = "lora"
base = { name = "import", path = "mine.py:base" }
targets = ["1"]
rank = 2
"""


def scenario(folder: Path) -> None:
    """b has another base model; somebody there puts it right."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(MINE)
    run = Run(folder, NAMES, EXPERIMENT)

    def other() -> None:
        import os

        os.environ["OTHER_BASE"] = "1"

    run.start("a", "c")
    run.start("b", before=other)
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
    played("tests.mesh.test_lora", str(tmp_path))


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


if __name__ == "__main__":
    scenario(Path(sys.argv[1]))
