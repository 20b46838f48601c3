"""A finished run stays what it is, whatever the site approves afterwards."""

import pytest

from fairmesh.mesh.enrol.manifest import Manifest
from fairmesh.mesh.node.running import run_node
from fairmesh.mesh.node.store import mark_finished
from fairmesh.mesh.preflight import checks
from tests.mesh import fleet
from tests.mesh.scenarios import EXPERIMENT, Run
from tests.refusals import refused


@pytest.fixture
def home(tmp_path):
    """The folder of a site whose run has finished."""
    Run(tmp_path)
    folder = tmp_path / "a"
    (folder / "state").mkdir(mode=0o700)
    authority = (folder / "authority.pem").read_bytes()
    mark_finished(folder / "state", Manifest.read(folder / "manifest.json", authority))
    return folder


def test_finished_run_is_not_taken_for_that_of_a_manifest_that_was_approved_later(home):
    assert run_node(home / "site.toml") == home / "state" / "result"
    fleet.amend(home.parent / "mesh", home, {})  # signed again, with the same files
    assert run_node(home / "site.toml") == home / "state" / "result"
    fleet.amend(home.parent / "mesh", home, {"experiment.toml": EXPERIMENT.replace("rounds = 48", "rounds = 90")})
    with refused("finished run of another manifest", "experiment.toml", "fairmesh mesh init"):
        run_node(home / "site.toml")
    (found,) = [check for check in checks(home / "site.toml") if check.what == "state"]
    assert not found.ok


@pytest.mark.parametrize("content", ['{"mesh', "[1]", "7", "\xff"])
def test_finished_run_whose_mark_is_damaged_is_refused_in_words(home, content):
    (home / "state" / "finished").write_text(content, encoding="latin-1")
    with refused("finished", "damaged", home / "state" / "result"):
        run_node(home / "site.toml")
