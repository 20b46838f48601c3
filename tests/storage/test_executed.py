"""Run folders of other people: what their experiment.toml names is imported only if it is harmless or allowed."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.cli.main import app
from fairmesh.report.contents import _graph
from fairmesh.report.runs import Run
from fairmesh.storage.executed import refuse_foreign
from tests.refusals import refused

MODEL = """
from pathlib import Path
import torch

Path(__file__).with_name("executed").touch()


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
"""
EXPERIMENT = """
rounds = 2
[data]
name = "npz"
file = "{folder}/arrays.npz"
[model]
name = "import"
path = "mine.py:Net"
[topology]
name = "ring"
[algorithm]
name = "dsgd"
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def run(home) -> Path:
    """The folder of a run with a model of the user's own, next to its file."""
    inputs, labels = torch.randn(40, 3).numpy(), (torch.arange(40) % 2).numpy()
    np.savez(home / "arrays.npz", x=inputs, y=labels, site=np.arange(40) % 3)
    np.savez(home / "new.npz", x=inputs)
    (home / "mine.py").write_text(MODEL)
    (home / "mine.toml").write_text(EXPERIMENT.format(folder=home))
    fm.run(fm.load_experiment(home / "mine.toml"), out=home / "run")
    (home / "executed").unlink()
    return home / "run"


def _from_somebody_else(run: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(run.parent / "another machine"))


def _file_in(run: Path) -> str:
    """The model's file, as the run's folder names it."""
    return (run / "experiment.toml").read_text().split('path = "')[1].split(":")[0]


def test_run_of_ones_own_is_used_without_asking(run):
    assert isinstance(fm.inference.load_model(run).module, torch.nn.Linear)
    (run.parent / "mine.py").write_text(MODEL + "# a note\n")
    assert len(fm.predict(run, run.parent / "new.npz").rows) == 40


def test_run_of_ones_own_is_used_without_asking_where_the_folder_has_moved(run, tmp_path_factory):
    moved = tmp_path_factory.mktemp("moved") / "here"
    run.parent.rename(moved)
    run.parent.mkdir()  # with the notes of this machine
    (moved / "state").rename(run.parent / "state")
    assert isinstance(fm.inference.load_model(moved / "run").module, torch.nn.Linear)
    (moved / "helper.py").write_text("# what another file might import")
    with refused("mine.py:Net", "--allow"):
        fm.inference.load_model(moved / "run")


def test_run_of_somebody_else_executes_nothing_that_is_not_allowed(run, monkeypatch):
    _from_somebody_else(run, monkeypatch)
    for use in (fm.inference.load_model, lambda folder: fm.predict(folder, run.parent / "new.npz")):
        with refused("mine.py:Net", "--allow", "allow=["):
            use(run)
    assert not (run.parent / "executed").exists()
    fm.inference.load_model(run, allow=[_file_in(run)])


@pytest.mark.parametrize("command", ["predict", "export"])
def test_commands_refuse_code_of_somebody_elses_run_and_take_it_with_a_flag(run, monkeypatch, command, capsys):
    _from_somebody_else(run, monkeypatch)
    rest = [str(run.parent / "new.npz")] if command == "predict" else ["--safetensors"]
    with refused("mine.py", "--allow"):
        app([command, str(run), *rest], standalone_mode=False)
    app([command, str(run), *rest, "--allow", _file_in(run)], standalone_mode=False)


@pytest.mark.parametrize("path", ["os:system", "posixpath.py:os.system", "antigravity:a b"])
def test_folder_that_names_another_function_is_refused_before_it_is_imported(run, path):
    text = (run / "experiment.toml").read_text()
    line = next(one for one in text.splitlines() if one.startswith("path = "))
    (run / "experiment.toml").write_text(text.replace(line, f'path = "{path}"'))
    with refused(path):
        fm.inference.load_model(run)


def test_models_of_torch_need_no_permission(home):
    refuse_foreign({"name": "import", "path": "torch.nn:Linear"}, home, ())
    with refused("torch.hub:load", "--allow torch.hub"):
        refuse_foreign({"name": "import", "path": "torch.hub:load"}, home, ())


def test_report_does_not_import_a_graph_inside_another(run):
    text = (run / "experiment.toml").read_text()
    (run.parent / "graphs.py").write_text(MODEL)
    graph = f'{{ name = "import", path = "{run.parent}/graphs.py:Net" }}'
    nested = f'[topology]\nname = "changing"\ntopologies = [{graph}, {{ name = "ring" }}]\n'
    changed = re.sub(r"\[topology\]\n(\w.*\n)+", nested, text)
    assert changed != text
    (run / "experiment.toml").write_text(changed)
    assert _graph(Run.from_folder(run)) is None
    assert not (run.parent / "executed").exists()
