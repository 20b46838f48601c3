"""A private run with all defaults: examples/private.toml from the command line."""

import json
import os
import signal

import pytest

from tests.docs.pages import ROOT
from tests.journeys.user import User
from tests.mesh.fleet import ended

FILE = ROOT / "examples" / "private.toml"


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> User:
    return User(tmp_path_factory.mktemp("private"))


def test_example_ends_with_a_useful_model_within_its_budget(user):
    printed = user.runs(f"fairmesh run {FILE}")
    folder = user.folder / "runs" / "private"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["privacy"]["epsilon"] <= 4.0
    assert (summary["privacy"]["delta"], summary["privacy"]["unit"]) == (1e-4, "patient")
    assert "accountant" in summary["privacy"]
    assert len({one["train"] for one in summary["provenance"]["data"]["sites"]}) == 5  # sites of unequal sizes
    most = max(max(one["classes"]) / one["n"] for one in summary["support"])  # what a constant answer reaches
    assert summary["worst"] > 0.7
    assert summary["mean"] > most + 0.1
    assert f"epsilon = {summary['privacy']['epsilon']:.3g} of 4" in printed


@pytest.mark.slow
def test_run_that_is_interrupted_goes_on_and_ends_as_if_it_was_not(user):
    sets = "--set rounds=400 --set privacy.repeatable=true --set options.measure_every=5"
    process, log = user.starts(f"fairmesh run {FILE} {sets} --out stopped")
    records = user.folder / "stopped" / "metrics.jsonl"
    while not records.exists() or records.read_text().count("\n") < 5:
        assert ended(process, 0.05) is None, log.read_text()
    os.kill(process, signal.SIGINT)
    assert ended(process, 30) not in (None, 0), log.read_text()
    assert not (user.folder / "stopped" / "summary.json").exists()
    user.runs(f"fairmesh run {FILE} {sets} --out stopped --resume")
    user.runs(f"fairmesh run {FILE} {sets} --out straight")
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (user.folder / "stopped" / name).read_bytes() == (user.folder / "straight" / name).read_bytes()
    user.runs("fairmesh report stopped")
    assert "do not publish" in (user.folder / "stopped" / "model-card.md").read_text()
