"""One job on several engines: how it is measured, what is recorded, and the engines that need no other package."""

import json
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import process_tree, table
from benchmarks.engines.table import ENGINES, ROUNDS, Engine
from tests.refusals import refused

# A process that ignores its children's ends, so that the system adds nothing up, leaves one behind, and ends.
_FAMILY = """
import os, signal, sys, time
def work(seconds):
    while time.process_time() < seconds:
        pass
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if not os.fork():
    if os.fork():
        os._exit(0)
    work(0.5)
    os._exit(0)
work(0.5)
"""


def recorded() -> dict[str, dict[str, Any]]:
    return {row["engine"]: row for row in json.loads(table.RESULTS.read_text())["engines"]}


def test_processor_time_is_that_of_the_command_and_of_all_that_it_leaves_behind(tmp_path):
    log = tmp_path / "log.txt"
    command = [sys.executable, process_tree.__file__, str(log), "30", sys.executable, "-c", _FAMILY]
    used = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert used["code"] == 0, log.read_text()
    assert 0.85 <= used["cpu_s"] <= 1.5


def test_command_that_takes_too_long_is_ended_with_all_that_it_has_started(tmp_path):
    child = f"[sys.executable, '-c', 'import time; time.sleep(987)', {str(tmp_path)!r}]"
    sleeping = [sys.executable, "-c", f"import subprocess, sys; subprocess.run({child})"]
    command = [sys.executable, process_tree.__file__, str(tmp_path / "log.txt"), "0.5", *sleeping]
    used = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout)
    assert used["code"] != 0
    left = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and _names(entry, str(tmp_path))]
    assert left == []


def _names(process: Path, word: str) -> bool:
    try:
        return word in (process / "cmdline").read_text()
    except OSError:
        return False


def outcome(cpu_s: float, network: float | None, worst: float = 0.5) -> Mapping[str, Any]:
    return {"cpu_s": cpu_s, "network_bytes": network, "worst": worst, "mean": 0.9, "message_bytes": 5200}


def test_cost_of_a_round_is_the_difference_of_long_and_short_runs():
    engine = Engine("mesh", (ROUNDS, ROUNDS + 100), "ring", "dsgd")
    pairs = [(outcome(8.0, 5e5, 0.7), outcome(9.0, 1.5e6)), (outcome(8.0, 5e5, 0.7), outcome(8.5, 1.5e6))]
    cost = table.cost_of("it", engine, pairs)
    assert (cost.cpu_ms_low, cost.cpu_ms, cost.cpu_ms_high) == pytest.approx((5.0, 7.5, 10.0))
    assert (cost.network_bytes, cost.worst) == (1000.0, 0.7), "per node; the accuracy is that of the run of 200 rounds"
    assert table.cost_of("it", engine, [(outcome(8.0, None), outcome(9.0, None))]).network_bytes is None


def test_engine_that_is_not_installed_is_skipped_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(table, "has", lambda python, package: package != "ray")
    (skipped,) = table.costs(["Flower, FedAvg"], {"flower": "/venv/bin/python"}, 1)
    assert isinstance(skipped, table.Skipped)
    assert "ray" in skipped.reason
    assert "/venv/bin/python" in skipped.reason
    assert "flwr[simulation]" in skipped.install


def test_interpreter_of_a_peer_is_asked_for_packages():
    assert table.has(sys.executable, "numpy")
    assert not table.has(sys.executable, "no_such_package")
    with refused("/no/python", "interpreter"):
        table.has("/no/python", "numpy")


def test_unknown_engine_is_refused():
    with refused("Flour", "Flower, FedAvg"):
        list(table.costs(["Flour"], {}, 1))


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize(
    ("name", "message"), [("plain loop", 2 * 4 * 650), ("fairmesh, simulator, DSGD", 2 * (4 * 650 + 21))]
)
def test_engine_without_other_packages_runs_the_job(tmp_path, monkeypatch, name, message):
    rounds, engine = 20, ENGINES[name]
    table.write_job(tmp_path, engine, rounds)
    monkeypatch.setattr(sys, "argv", ["it", str(tmp_path), str(rounds)])
    runpy.run_module(f"benchmarks.engines.runners.{engine.program}", run_name="__main__")
    told = json.loads((tmp_path / "outcome.json").read_text())
    assert told["message_bytes"] == message
    assert 0.2 < told["worst"] < told["mean"] < 0.9


def test_every_engine_is_recorded_or_skipped_with_a_reason():
    skipped = json.loads(table.RESULTS.read_text())["skipped"]
    assert {*recorded()} | {one["engine"] for one in skipped} == {*ENGINES}
    assert all(one["reason"] for one in skipped)
    assert {name for name in ENGINES if "fairmesh" in name} <= {*recorded()}
    assert json.loads(table.RESULTS.read_text())["repeats"] >= 2


def test_page_shows_what_is_recorded():
    assert table.shown(json.loads(table.RESULTS.read_text())) in table.PAGE.read_text()


def test_recorded_rounds_of_fairmesh_take_less_processor_time_than_those_of_the_others():
    costs = {name: row["cpu_ms"] for name, row in recorded().items()}
    assert costs["fairmesh, simulator"] < costs["plain loop"]
    for peer in costs.keys() & {"NVFlare, peer-to-peer", "NVFlare, FedAvg", "Flower, FedAvg"}:
        assert costs["fairmesh, simulator"] < costs["fairmesh, mesh"] < costs[peer]
    assert all(row["cpu_ms_low"] <= row["cpu_ms"] <= row["cpu_ms_high"] for row in recorded().values())


def test_recorded_worst_site_is_better_with_robust_weights_on_every_engine_of_fairmesh():
    found = recorded()
    others = [row["worst"] for row in found.values() if row["algorithm"] != "tracked-ad-gda"]
    assert min(found[f"fairmesh{where}"]["worst"] for where in (", simulator", ", mesh", " in NVFlare")) > max(others)
