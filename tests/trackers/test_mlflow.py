"""MLflow: what its own client finds in the database, and a server that is not there."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fairmesh as fm
from tests.refusals import missing_from
from tests.trackers import train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # slow to import, and to make a database


def runs_in(uri, experiment="fairmesh"):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    group = client.get_experiment_by_name(experiment)
    return client, sorted(client.search_runs([group.experiment_id]), key=lambda run: run.data.tags["fairmesh.replica"])


def test_mlflow_reads_back_curves_settings_result_and_a_resumed_run_once(tmp_path):
    environment = dict(os.environ)
    tracker = fm.trackers.MLflow(experiment="wards")
    train(tracker, out=tmp_path / "run", seeds=(0, 1))
    result = train(tracker, out=tmp_path / "run", rounds=8, seeds=(0, 1), resume=True)
    client, runs = runs_in(f"sqlite:///{tmp_path}/run/trackers/mlflow.db", "wards")
    assert [run.info.run_name for run in runs] == ["run: seed 0", "run: seed 1"]
    for r, run in enumerate(runs):
        mine = [record for record in result.records if record["replica"] == r]
        for i, site in enumerate(result.problem.sites):
            history = client.get_metric_history(run.info.run_id, f"accuracy/site/{site.name}")
            assert [(one.step, one.value) for one in history] == [
                (one["round"], one["accuracy"]["sites"][i]) for one in mine
            ]
            assert run.data.metrics[f"lambda/{site.name}"] == mine[-1]["lambda"][i]
        assert run.data.metrics["bytes_total"] == mine[-1]["bytes_total"]
        assert run.data.metrics["interval/accuracy/worst/low"] == result.evidence()["worst"]["interval"][0]
        assert run.data.params["algorithm.name"] == "ad-gda"
        assert run.data.params["seed"] == str(r)
        assert run.info.status == "FINISHED"
        table = client.download_artifacts(run.info.run_id, "result.md", str(tmp_path))
        assert Path(table).read_text().count("\n") == 6
    assert dict(os.environ) == environment


def test_mlflow_sends_nothing_about_its_use():
    code = """
import fairmesh as fm
fm.trackers.MLflow().before_run()
from mlflow.telemetry import get_telemetry_client
assert get_telemetry_client() is None
"""
    outside = ("CI", "GITHUB_ACTIONS", "PYTEST_CURRENT_TEST")  # where MLflow is silent by itself
    environment = {key: value for key, value in os.environ.items() if key not in outside}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


def test_mlflow_without_its_server_says_so_and_the_run_goes_on(caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert train(fm.trackers.MLflow(f"http://127.0.0.1:{port}")).rounds == 4
    (said,) = [one.message for one in caplog.records if one.name == "fairmesh"]
    assert missing_from(said, "MLflow", "refused") == []


def test_mlflow_gives_a_server_up_that_does_not_answer(monkeypatch, caplog):
    monkeypatch.setitem(fm.trackers.MLflow.variables, "MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which takes connections, and says nothing
        began = time.monotonic()
        assert train(fm.trackers.MLflow(f"http://127.0.0.1:{silent.getsockname()[1]}")).rounds == 4
    (said,) = [one.message for one in caplog.records if one.name == "fairmesh"]
    assert missing_from(said, "MLflow", "timed out") == []
    assert time.monotonic() - began < 20
