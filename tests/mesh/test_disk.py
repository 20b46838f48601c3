"""How much disk a node needs: per checkpoint, during a run, and what remains at its end."""

import shutil
from collections import namedtuple
from contextlib import suppress

import pytest

from fairmesh.mesh.enrol.roster import SiteFile
from fairmesh.mesh.node.disk import disk_of
from fairmesh.mesh.node.ledger import wish
from fairmesh.mesh.node.membership import Membership, own_data
from fairmesh.mesh.preflight import disk_checks
from tests.mesh.experiments import experiment
from tests.mesh.lives import Lives
from tests.mesh.scenarios import Run
from tests.refusals import missing_from, refused

NAMES = ["a", "b", "c", "d"]

NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
        super().__init__(nn.Flatten(), *layers)
"""


def _mesh(folder, algorithm, topology="ring", **more):
    options = {"measure_every": 5, "checkpoint_every": 8}
    Run(folder, NAMES, experiment(60, 4, algorithm, topology, options=options, **more))


def _own(folder):
    return own_data(Membership.read(folder / "a" / "site.toml")).sites[0]


def _needed(folder):
    return disk_of(Membership.read(folder / "a" / "site.toml"), _own(folder))


# Rows of the size of the model in a checkpoint: the model, its mean over time, the public copies of the node (twice)
# and of each neighbour; and for Tracked AD-GDA the momentum, balance and mean squares, and the same copies of the
# trackers.
@pytest.mark.parametrize(
    ("algorithm", "topology", "rows"),
    [("dsgd", "ring", 2), ("choco-sgd", "ring", 6), ("ad-gda", "ring", 6), ("ad-gda", "complete", 7),
     ("tracked-ad-gda", "ring", 13), ("tracked-ad-gda", "complete", 15)],
)  # fmt: skip
def test_size_of_a_checkpoint_by_algorithm_and_neighbours(tmp_path, algorithm, topology, rows):
    _mesh(tmp_path, algorithm, topology)
    needed = _needed(tmp_path)
    assert needed.model == 650 * 4
    assert rows <= needed.checkpoint / needed.model < rows + 0.1


def test_finished_work_of_training_functions_is_counted(tmp_path):
    (tmp_path / "mine.py").write_text("def train(module, data, ctx):\n    raise NotImplementedError\n")
    _mesh(tmp_path, "choco-sgd", trainer="mine.py:train")
    needed = _needed(tmp_path)
    assert needed.work == 3 * needed.model  # the update, and the two rows that Adam keeps
    assert 8 <= needed.checkpoint / needed.model < 8.1
    _mesh(tmp_path / "without", "choco-sgd")
    more = needed.at_most - _needed(tmp_path / "without").at_most
    assert more >= 6 * (needed.work + needed.checkpoint) - 3 * needed.checkpoint  # a file per round, for all sites
    (found,) = disk_checks(SiteFile.read(tmp_path / "a" / "site.toml"), _own(tmp_path))
    assert missing_from(found.found, "training function", "Adam") == []


def test_check_says_what_the_run_needs_and_refuses_a_disk_that_is_too_small(tmp_path, monkeypatch):
    _mesh(tmp_path, "tracked-ad-gda")
    site = SiteFile.read(tmp_path / "a" / "site.toml")
    (found,) = disk_checks(site, _own(tmp_path))
    assert found.ok
    assert missing_from(found.found, "at most", "checkpoint", str(site.state)) == []
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1000))
    (found,) = disk_checks(site, _own(tmp_path))
    assert not found.ok
    assert missing_from(found.found + found.advice, "MB are there", "state in site.toml") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "models"), [("dsgd", 2), ("choco-sgd", 6), ("ad-gda", 6), ("tracked-ad-gda", 13)]
)
def test_checkpoints_of_a_run_have_at_most_that_size_and_little_remains_at_its_end(tmp_path, algorithm, models):
    (tmp_path / "net.py").write_text(NET)
    _mesh(tmp_path, algorithm, model={"name": "import", "path": "net.py:Net"})
    needed = _needed(tmp_path)
    lives = Lives(tmp_path, NAMES)
    ratios, sizes = [], []

    def look():
        state = tmp_path / "a" / "state"
        for path in state.glob("generation-1/**/checkpoint-*.safetensors"):
            try:
                done, size = int(path.stem.split("-")[1]), path.stat().st_size
            except FileNotFoundError:  # it is old
                continue
            if done:
                ratios.append(size / needed.model)
        with suppress(FileNotFoundError):
            sizes.append(sum(path.stat().st_size for path in state.rglob("*") if path.is_file()))
        return all(lives.exits.get(name) == 0 for name in NAMES)

    lives.start_all()
    try:
        lives.wait(look, 120)
    finally:
        lives.end()
    header = 5000  # names, shapes, digests of rows, the identity of the run
    print(f"{algorithm}: {min(ratios):.1f} to {max(ratios):.1f} times the model")
    assert ratios
    assert max(ratios) < models + header / needed.model
    assert models * needed.model < needed.checkpoint
    assert max(sizes) < needed.at_most
    state = tmp_path / "a" / "state"
    left = {path.relative_to(state).parts[0] for path in state.rglob("*") if path.is_file()}
    small = "machines.json data.json bulletin.json decisions.json facts.json outputs.json keys.json lock log.jsonl"
    assert left == {*small.split(), "status.json", "traffic.json", "finished", "result", "local"}
    results = sum(path.stat().st_size for path in (state / "result").glob("*.safetensors"))
    assert results < 3 * needed.model + header
    with refused("ended", "new mesh"):
        site = SiteFile.read(tmp_path / "a" / "site.toml")
        wish(site.state, Membership.read(site.path).mesh, "a", [], 30)
