"""An algorithm of one's own, from the blocks of extending.md to a simulation, processes and a mesh."""

import hashlib
import re

import pytest

from tests.docs.pages import ROOT, blocks
from tests.journeys.consortium import Consortium
from tests.journeys.user import User, commands_shown, shown

PAGE = "docs/howto/extending.md"


def _mine() -> str:
    """Returns the file that the page's reader has: all blocks that begin with its name."""
    return "\n\n".join(
        block.text for block in blocks("python") if block.page == ROOT / PAGE and block.text.startswith("# mine.py")
    )


@pytest.mark.slow
def test_own_algorithm_runs_from_a_file_over_processes_and_in_a_moved_folder(tmp_path):
    user = User(tmp_path / "first")
    user.folder.mkdir()
    user.writes("mine.py", _mine())
    user.writes("diffusion.toml", shown(PAGE, "toml", "# diffusion.toml"))
    for line in commands_shown(PAGE, "fairmesh run diffusion.toml"):
        user.runs(line)
    moved = User(user.folder.rename(tmp_path / "second"))
    moved.runs("fairmesh run diffusion.toml --out runs/file --resume")
    moved.runs("fairmesh report runs/file")


@pytest.mark.slow
def test_own_algorithm_trains_between_organisations(tmp_path):
    user = User(tmp_path)
    user.writes("mine.py", _mine())
    text = shown(
        PAGE, "toml", "# diffusion.toml", {"nodes = 10": "nodes = 3", "odd = 2": "odd = 1", "seeds = [0, 1]\n": ""}
    )
    user.writes("diffusion.toml", re.sub(r"\[sweep\].*", "", text, flags=re.S))
    refusals = []

    def give_data(home, k):
        """Each site takes the experiment's data, and allows what the refusal says that it must allow."""
        text = (home / "site.toml").read_text()
        (home / "site.toml").write_text(f'data = "experiment"\n{text}')
        refused = user.runs(f"fairmesh mesh check {home.name}/site.toml", code=1)
        refusals.append(refused)
        (home / "site.toml").write_text(f'data = "experiment"\nallow_revealing = true\n{text}')

    mesh = Consortium(tmp_path, "diffusion.toml", ["north", "south", "east"], give_data)
    try:
        mesh.start()
        mesh.end(*mesh.sites)
    finally:
        mesh.kill_all()
    assert all("allow_revealing" in refused for refused in refusals)
    models = [mesh.state(site) / "result" / "model.safetensors" for site in mesh.sites]
    assert len({hashlib.sha256(model.read_bytes()).hexdigest() for model in models}) == 1
