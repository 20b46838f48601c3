"""Real nodes whose disk is damaged, or whose neighbours flood, stall or come back with another key: the run of the
others ends as it should, and the log names the cause."""

import shutil
import time
from pathlib import Path

import pytest

from fairmesh.mesh.wire.journal import Journal
from tests.mesh import fleet
from tests.mesh.lives import Lives

NAMES = ["alpha", "beta", "gamma"]
EXPERIMENT = """
rounds = 60
data = { name = "digits", nodes = 3, odd = 1 }
topology = "ring"
algorithm = { name = "ad-gda", consensus_step = 0.5, compressor = { name = "quantize", bits = 4 } }
options = { checkpoint_every = 25 }
"""

pytestmark = pytest.mark.slow


def provisioned(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "experiment.toml").write_text(EXPERIMENT)
    fleet.provisioned(folder / "mesh", folder / "experiment.toml", NAMES)
    return folder / "mesh"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a run ends with that nobody disturbs."""
    nodes = Lives(provisioned(tmp_path_factory.mktemp("undisturbed")), NAMES)
    try:
        nodes.start_all()
        nodes.finish(60)
        return nodes.results()
    finally:
        nodes.end()


def events(nodes: Lives, name: str, what: str) -> list[dict]:
    return [event for event in nodes.log_of(name) if what in event["what"]]


# A damaged disk


@pytest.mark.parametrize("which", ["last", "before the last"])
def test_node_whose_journal_has_a_flipped_bit_gets_what_it_lost_from_its_neighbours(tmp_path, undisturbed, which):
    nodes = Lives(provisioned(tmp_path), NAMES)
    damaged: list[Path] = []
    lost: list[int] = []

    def flip(name: str) -> None:
        """Flips bits in a segment, so that received messages are lost. With the newest checkpoint gone, both segments
        are needed."""
        folder = nodes.newest_checkpoint(name).parent
        segments = sorted(path for path in folder.glob("journal-*.log") if path.stat().st_size)
        if which != "last":
            nodes.newest_checkpoint(name).unlink()
        path = segments[-1 if which == "last" else -2]
        content = bytearray(path.read_bytes())
        for k in range(1, 6):
            content[k * len(content) // 7] ^= 16
        path.write_bytes(content)
        damaged.append(path)
        copy = Journal(shutil.copytree(folder, tmp_path / "copy"))
        copy.close()
        received = [step for _, step in copy._received]
        lost.extend(
            s for s in range(min(received), max(received)) if not all((at, s) in copy._received for at in (0, 2))
        )

    nodes.while_down = flip
    try:
        nodes.start_all()
        nodes.wait(lambda: nodes.step("beta") >= 45, 60)
        nodes.kill("beta", pause=0.5)
        nodes.finish(60)
        assert lost
        assert nodes.results() == undisturbed
        (said,) = events(nodes, "beta", "damaged")
        assert said["file"] == damaged[0].name
        assert (damaged[0].parent / said["kept_as"]).exists()
        assert said["lost_bytes"] > 0
    finally:
        nodes.end()


def test_node_that_lost_its_state_is_told_what_to_do_and_neither_crashes_nor_spins(tmp_path):
    nodes = Lives(provisioned(tmp_path), NAMES)

    def forget(name: str) -> None:
        for path in nodes.newest_checkpoint(name).parent.iterdir():
            path.unlink()

    def said() -> list[dict]:
        return [event for event in events(nodes, "beta", "refused") if "begins again" in event["reason"]]

    nodes.while_down = forget
    try:
        nodes.start_all()
        nodes.wait(lambda: nodes.step("beta") >= 54, 60)
        nodes.kill("beta", pause=1.5)
        nodes.wait(lambda: {event["site"] for event in said()} == {"alpha", "gamma"}, 30)
        time.sleep(2)
        assert "backup" in said()[0]["reason"]
        assert "beta" not in nodes.exits
    finally:
        nodes.end()
    assert len(said()) < 6
