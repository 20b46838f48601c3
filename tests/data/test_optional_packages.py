"""What needs a package of an extra says how to get it; everything else works without."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fairmesh as fm
from fairmesh.cli.main import app
from fairmesh.data.datasets.sources import SOURCES
from fairmesh.errors import MissingPackage, optional
from fairmesh.report.runs import Run
from tests.refusals import refused

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without(monkeypatch):
    """Hides packages as if they were not installed."""

    def hide(*names: str) -> None:
        for loaded in list(sys.modules):
            if loaded.split(".")[0] in names:
                monkeypatch.delitem(sys.modules, loaded)
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


def sites():
    return [fm.Site((torch.randn(8, 3), torch.arange(8) % 2)) for _ in range(2)]


def image_folder(folder: Path) -> fm.data.ImageFolder:
    (folder / "a" / "cat").mkdir(parents=True)
    (folder / "a" / "cat" / "1.png").write_bytes(b"")
    return fm.data.ImageFolder(str(folder))


def coos7(folder: Path) -> fm.data.COOS7:
    for file in SOURCES["coos7"].files:
        (folder / file.name).touch()
    return fm.data.COOS7(folder=str(folder))


NEEDS = {  # extra -> package, and something that cannot be done without it
    "plot": ("matplotlib", lambda folder: fm.report.picture(sites(), folder / "sites.png")),
    "images": ("PIL", lambda folder: image_folder(folder).sites()),
    "coos7": ("h5py", lambda folder: coos7(folder).sites()),
    "parquet": ("pyarrow", lambda folder: fm.data.Table(str(folder / "rows.parquet"), target="y", site="s").sites()),
}


@pytest.mark.parametrize("extra", NEEDS)
def test_missing_package_is_named_with_the_extra_that_installs_it(extra, tmp_path, without):
    package, use = NEEDS[extra]
    without(package)
    with refused(f"fairmesh[{extra}]", error=MissingPackage):
        use(tmp_path)


def test_optional_lets_other_errors_of_an_import_through():
    with refused("no_such_name", error=ImportError), optional("plot"):
        from numpy import no_such_name  # noqa: F401


def test_extras_named_in_messages_are_declared():
    declared = (ROOT / "pyproject.toml").read_text()
    for path in (ROOT / "src").rglob("*.py"):
        for name in re.findall(r"optional\(\"(\w+)\"\)", path.read_text()):
            assert re.search(rf"^{name} = \[", declared, re.M), f"{path} names the extra {name}"


@pytest.mark.slow
def test_demo_without_matplotlib_writes_its_page_and_says_how_to_get_the_picture(tmp_path, monkeypatch, without):
    monkeypatch.setattr("fairmesh.cli.demo.ROUNDS", 4)
    monkeypatch.setattr("fairmesh.cli.demo.SPLITS", 2)
    without("matplotlib")
    shown = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "new")])
    assert shown.exit_code == 0
    assert "site 9 (shifted)" in shown.output
    assert "fairmesh[plot]" in shown.output
    assert "<svg" in (tmp_path / "new" / "report.html").read_text()
    assert not (tmp_path / "new" / "methods.png").exists()
    assert Run.from_folder(tmp_path / "new" / "ad-gda").summary["rounds"] == 4


def test_topology_without_matplotlib_gives_its_numbers(tmp_path, monkeypatch, without):
    monkeypatch.chdir(tmp_path)
    without("matplotlib")
    facts = CliRunner().invoke(app, ["topology", "ring", "--nodes", "5", "--json"])
    assert facts.exit_code == 0
    assert json.loads(facts.stdout)["plot"] is None
    assert np.isclose(json.loads(facts.stdout)["beta"], fm.Ring().build(5)[0].beta)
    asked = CliRunner().invoke(app, ["topology", "ring", "--nodes", "5", "--plot", "ring.png"])
    assert isinstance(asked.exception, MissingPackage)
