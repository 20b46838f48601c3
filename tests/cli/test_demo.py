"""The demo's claims, over five deals of the digits."""

import pytest

from fairmesh.cli.demo import demo


@pytest.mark.parametrize("seed", range(5))
def test_the_demo_at_least_halves_the_gap_and_keeps_the_mean_within_two_points(seed):
    algorithms = demo(seed, None).as_json()["algorithms"]
    plain, robust = algorithms["choco-sgd"], algorithms["ad-gda"]
    assert plain["gap"] > 0.1, "without a gap there is nothing to show"
    assert robust["gap"] <= plain["gap"] / 2
    assert abs(robust["mean"] - plain["mean"]) <= 0.02
    assert robust["worst"] > plain["worst"]


def test_the_demo_shows_every_site_and_writes_its_page_and_plots(tmp_path, monkeypatch):
    monkeypatch.setattr("fairmesh.cli.demo.ROUNDS", 10)
    outcome = demo(0, tmp_path / "new")
    page = (tmp_path / "new" / "report.html").read_text()
    for name in outcome.as_json()["algorithms"]["ad-gda"]["sites"]:
        assert name in page
    assert outcome.sentence.split(";")[0] in page
    assert page.count("<svg") == 3
    assert "http" not in page.replace("http://www.w3.org/", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ), "the page must need nothing beside itself"
    for name in ("curves.png", "sites.png", "ad-gda/model.safetensors", "choco-sgd/metrics.jsonl"):
        assert (tmp_path / "new" / name).stat().st_size > 0
