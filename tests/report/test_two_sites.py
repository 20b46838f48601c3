"""The animation of the README: a real run gives what it shows, and it stays small."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import fairmesh as fm

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


def test_animation_takes_five_seconds_and_little_space():
    image = pytest.importorskip("PIL.Image")
    with image.open(PICTURES / "two-sites.gif") as animation:
        took = 0
        for frame in range(animation.n_frames):
            animation.seek(frame)
            took += animation.info["duration"]
    assert 4500 <= took <= 5500
    assert (PICTURES / "two-sites.gif").stat().st_size < 400_000
    assert (PICTURES / "two-sites.png").stat().st_size < 100_000


@pytest.mark.slow
def test_animation_shows_what_the_runs_give():
    spec = importlib.util.spec_from_file_location("two_sites", PICTURES / "two_sites.py")
    assert spec is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.manual_seed(0)
    problem = fm.Problem(torch.nn.Linear(2, 2), script.sites())
    found = [script.run(problem, algorithm)[1][-1] for algorithm in script.METHODS.values()]
    told = re.search(r"two-sites.gif.*?alt=\"(.*?)\"", (ROOT / "README.md").read_text()).group(1)
    numbers = [100 * value for record in found for value in record["accuracy"]["sites"]]
    assert [int(one) for one in re.findall(r"(\d+) %", told)] == pytest.approx(numbers, abs=1)
    weights = [float(one) for one in re.findall(r"0\.\d+", told)]
    assert weights == pytest.approx([40 / 400, found[1]["lambda"][1]], abs=0.1)
