"""`python -m benchmarks models`, and the results recorded with it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import real_models
from benchmarks.__main__ import app

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "benchmarks" / "results" / "models-h200.json").read_text())["cases"]


@pytest.mark.parametrize(("case", "milliseconds"), [("resnet18-10", 16), ("vit-10", 15)])
def test_recorded_rounds_of_real_models_meet_their_goals_in_bf16(case, milliseconds):
    found = [one for one in RECORDED if one["case"] == case and one["precision"] == "bf16"]
    assert {one["algorithm"] for one in found} == {"ad-gda", "tracked-ad-gda"}
    assert all(one["ms_per_round"] <= milliseconds for one in found)


def test_recorded_copies_of_a_resnet_are_at_most_twenty():
    assert max(one["copies"] for one in RECORDED if one["case"] == "resnet18-10") <= 20


def test_performance_page_shows_the_recorded_real_models():
    page = (ROOT / "docs" / "results" / "performance.md").read_text()
    for one in RECORDED:
        assert f"{one['ms_per_round']:.1f} |" in page


def test_real_models_have_the_sizes_that_are_told():
    sizes = {
        name: sum(p.numel() for p in setting.model.build((3, 64, 64), 10).parameters())
        for name, setting in real_models.SETTINGS.items()
    }
    assert sizes["resnet18-10"] == pytest.approx(11.2e6, rel=0.01)
    assert sizes["vit-10"] == pytest.approx(2.7e6, rel=0.02)


@pytest.mark.slow  # trains a transformer
def test_models_command_times_rounds_next_to_a_loop(monkeypatch):
    small = real_models.SETTINGS["vit-8"]._replace(nodes=3, batch=4)
    monkeypatch.setitem(real_models.SETTINGS, "vit-8", small)
    command = ["models", "--case", "vit-8", "--algorithm", "ad-gda", "--json"]
    (one,) = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)["cases"]
    assert one["over_loop"] > 0
    assert 0 < one["ms_low"] <= one["ms_per_round"] <= one["ms_high"]
