"""Private runs in jobs: one ledger for all runs of a site, and nothing told to the server that was not released."""

import json
import math
import tomllib
from dataclasses import replace

import pytest

from fairmesh.errors import BadInput
from fairmesh.mesh.enrol.private_terms import refuse_larger_budget
from fairmesh.mesh.enrol.roster import SiteFile
from fairmesh.mesh.node.privacy_ledger import PrivacyLedger
from fairmesh.nvflare import participant
from fairmesh.nvflare.outcome import FAILED, FINISHED
from fairmesh.privacy.accounting import epsilon_of
from tests.nvflare import standin
from tests.nvflare.standin import SITES, Engine, Faults, exported
from tests.refusals import missing_from, refused

ROUNDS, EPSILON, DELTA = 10, 4.0, 1e-4
PRIVATE = standin.EXPERIMENT.replace("batch = 20", f"batch = 40\n[privacy]\nepsilon = {EPSILON}\ndelta = {DELTA}")


@pytest.fixture
def private(monkeypatch):
    monkeypatch.setattr(standin, "EXPERIMENT", PRIVATE.replace('"ad-gda"', '"tracked-ad-gda"'))


def _ledger(engine: Engine, site: str):
    engine.sites[site]._enrolment.write()
    return SiteFile.read(engine.sites[site].home / "site.toml").ledger_path


def test_runs_of_one_site_have_one_ledger(private, tmp_path):
    ledgers = []
    for run in ("first", "second"):
        folder = tmp_path / run
        folder.mkdir()
        engine = Engine(exported(folder, run=run), tmp_path, Faults())
        engine.join(SITES[0])
        ledgers.append(_ledger(engine, SITES[0]))
    assert ledgers == [tmp_path / SITES[0] / "fairmesh" / "site-a.privacy.jsonl"] * 2
    (tmp_path / SITES[0] / "local").mkdir()
    (tmp_path / SITES[0] / "local" / "fairmesh.toml").write_text('data = "experiment"\nledger = "../patients.jsonl"')
    engine.join(SITES[0])
    assert _ledger(engine, SITES[0]) == tmp_path / SITES[0] / "patients.jsonl"


def test_errors_of_a_private_node_are_not_told_to_the_server(private, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise BadInput("row 7: 'leukaemia' is not one of the categories")

    monkeypatch.setattr(participant, "run_node", fails)
    engine = Engine(exported(tmp_path), tmp_path, Faults())
    engine.start()
    for site, told in engine.wait().items():
        assert told["state"] == FAILED
        assert "leukaemia" not in json.dumps(told)
        assert not missing_from(told["reason"], "private", "failure.txt")
        assert "leukaemia" in (engine.sites[site].home / "failure.txt").read_text()
        assert "leukaemia" in engine.sites[site]._stream.getvalue()


def test_site_refuses_experiments_with_more_epsilon_than_it_allows(private, tmp_path):
    engine = Engine(exported(tmp_path), tmp_path, Faults())
    engine.join(SITES[0])._enrolment.write()
    site = SiteFile.read(engine.sites[SITES[0]].home / "site.toml")
    told = tomllib.loads((site.folder / "experiment.toml").read_text())
    refuse_larger_budget(site, told)
    refuse_larger_budget(replace(site, largest_epsilon=EPSILON), told)
    with refused("privacy.epsilon", "4", "largest_epsilon", "2"):
        refuse_larger_budget(replace(site, largest_epsilon=2.0), told)
    with refused("privacy.delta", "largest_delta", "1e-09"):
        refuse_larger_budget(replace(site, largest_delta=1e-9), told)
    del told["privacy"]
    with refused("no [privacy]", "largest_epsilon"):
        refuse_larger_budget(replace(site, largest_epsilon=2.0), told)


@pytest.mark.slow
def test_next_run_has_what_the_first_has_left_and_the_server_hears_released_numbers_only(private, tmp_path):
    engine = Engine(exported(tmp_path, ROUNDS), tmp_path, Faults())
    engine.start()
    for site, told in engine.wait(240).items():
        assert told["state"] == FINISHED, told
        assert (told["worst"], told["mean"]) == (None, None)
        ledger = PrivacyLedger(_ledger(engine, site), to_write=False)
        assert 0.99 * EPSILON < epsilon_of(ledger.spent(), DELTA) <= EPSILON
        log = engine.sites[site].state_folder / "log.jsonl"
        events = [json.loads(line) for line in log.read_text().splitlines()]
        withheld = [event["accuracy"] for event in events if event["what"] == "measured here, and not told"]
        result = b"".join(engine.result(site).values())
        assert len(withheld) > 1
        assert not any(str(value).encode() in result for value in withheld if value not in (0.0, 1.0))
        assert set(engine.result(site)) == {
            "experiment.toml",
            "metrics.jsonl",
            "model.safetensors",
            "model-time-average.safetensors",
            "summary.json",
        }
    (tmp_path / "again").mkdir()
    again = Engine(exported(tmp_path / "again", ROUNDS, run="again"), tmp_path, Faults())
    again.start()
    for site, told in again.wait(120).items():
        assert told["state"] == FAILED
        assert f"{EPSILON:g} leaves too little" in again.sites[site]._stream.getvalue()
        assert math.isclose(
            epsilon_of(PrivacyLedger(_ledger(again, site), to_write=False).spent(), DELTA), 4, rel_tol=0.01
        )
