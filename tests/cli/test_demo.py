"""The demo: its claims for five seeds, the README's table for the first, and the page it writes."""

import json
import re
from pathlib import Path

import pytest

from fairmesh.cli.demo import demo
from tests.pairwise import some_quick

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def algorithms() -> dict:
    """Returns the results of the demo with the README's seed."""
    return demo(0, None).as_json()["algorithms"]


@some_quick("seed", {f"seed {seed}": seed for seed in range(5)}, "seed 0")
def test_demo_at_least_halves_the_gap_and_keeps_the_mean_within_two_points(seed, algorithms):
    algorithms = demo(seed, None).as_json()["algorithms"] if seed else algorithms
    plain, robust = algorithms["choco-sgd"], algorithms["ad-gda"]
    assert plain["gap"] > 0.1, "without a gap there is nothing to show"
    assert robust["gap"] <= plain["gap"] / 2
    assert abs(robust["mean"] - plain["mean"]) <= 0.02
    assert robust["worst"] > plain["worst"]


def test_demo_gives_the_table_of_the_readme(algorithms):
    table = re.search(r"<!-- demo -->(.*?)<!-- /demo -->", README.read_text(), re.DOTALL).group(1)
    shown = [[float(x) for x in re.findall(r"(\d+\.\d)", line)] for line in table.strip().splitlines()[2:]]
    for row, name in zip(shown, ("choco-sgd", "ad-gda")):
        facts = algorithms[name]
        measured = [facts["groups"]["upright"], facts["groups"]["mirrored"], facts["gap"], facts["mean"]]
        assert row == pytest.approx([100 * value for value in measured], abs=0.5), name


def test_demo_shows_every_site_and_writes_its_page_and_plots(tmp_path, monkeypatch):
    monkeypatch.setattr("fairmesh.cli.demo.ROUNDS", 10)
    outcome = demo(0, tmp_path / "new")
    page = (tmp_path / "new" / "report.html").read_text()
    for name in outcome.as_json()["algorithms"]["ad-gda"]["sites"]:
        assert name in page
    assert outcome.sentence.split(";")[0] in page
    assert page.count("<svg") == 3
    assert "http" not in page.replace("http://www.w3.org/", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ), "the page must need nothing but itself"
    for name in ("curves.png", "sites.png", "ad-gda/model.safetensors", "choco-sgd/metrics.jsonl"):
        assert (tmp_path / "new" / name).stat().st_size > 0


def test_demo_in_a_folder_that_has_one_makes_another(called, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fairmesh.cli.demo.ROUNDS", 4)
    (tmp_path / "fairmesh-demo").mkdir()
    (tmp_path / "fairmesh-demo" / "report.html").touch()
    assert json.loads(called("demo", "--json")[1])["folder"] == "fairmesh-demo-2"
