"""`python -m benchmarks rounds`, and the results recorded with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fairmesh as fm
from benchmarks import floor, growth, rounds
from benchmarks.__main__ import app
from benchmarks.per_node_loop import PerNodeLoop
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
COMMAND = ["rounds", "--case", "logistic-10", "--replicas", "1", "--json"]
FIELDS = {"case", "replicas", "ms_per_round", "floor_ms", "over_floor", "loop_ms", "speedup_over_loop"}


def _recorded(name: str) -> dict[tuple[str, int], dict]:
    cases = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["cases"]
    return {(case["case"], case["replicas"]): case for case in cases}


def _check(printed: str) -> dict:
    (case,) = json.loads(printed)["cases"]
    assert case.keys() >= FIELDS
    assert case["case"] == "logistic-10"
    assert 0 < case["ms_low"] <= case["ms_per_round"] <= case["ms_high"]
    assert case["over_floor"] == pytest.approx(case["ms_per_round"] / case["floor_ms"])
    return case


def test_rounds_command_prints_one_json_object_with_times_floor_and_loop(monkeypatch):
    small = rounds.SETTINGS["logistic-10"]._replace(samples=60)
    monkeypatch.setitem(rounds.SETTINGS, "logistic-10", small)
    monkeypatch.setattr(rounds, "_blocks", lambda step, loop: (2, 5))
    done = CliRunner().invoke(app, COMMAND, catch_exceptions=False)
    assert _check(done.stdout)["speedup_over_loop"] > 0


@pytest.mark.slow  # measures for 12 seconds
def test_rounds_command_finds_the_stack_faster_than_the_loop():
    command = [sys.executable, "-m", "benchmarks", *COMMAND]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert _check(done.stdout)["speedup_over_loop"] > 1.5  # far below the recorded ratio: tests share their cores


def test_rounds_refuses_an_unknown_case_by_name():
    with refused("'logistics'", "logistic-10, fc-50"):
        list(rounds.timings("cpu", ["logistics"]))


@pytest.mark.slow
def test_profile_names_operations_and_their_times():
    table = rounds.profile("cpu", "logistic-10", 1, rounds=2)
    assert any("bmm" in name for name, _, _ in table)
    assert [ms for _, ms, _ in table] == sorted((ms for _, ms, _ in table), reverse=True)


def test_growth_command_prints_a_curve_for_each_quantity(monkeypatch):
    monkeypatch.setattr(growth, "milliseconds", lambda device, **case: float(case["nodes"]))
    done = CliRunner().invoke(app, ["growth", "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert found["base"] == growth.BASE
    assert found["milliseconds"]["nodes"] == [[n, n] for n in growth.GRID["nodes"]]
    assert [n for n, _ in found["milliseconds"]["batch"]] == growth.GRID["batch"]


def test_growth_milliseconds_times_a_round():
    assert growth.milliseconds(torch.device("cpu"), nodes=3, hidden=2, batch=2, replicas=1) > 0


@pytest.mark.slow
def test_per_node_loop_and_stack_learn_the_same_problem():
    setting = rounds.Setting(6, 40, (1, 8, 8), 4, fm.models.Logistic(), 20)
    problem = setting.problem()
    matrix = fm.Ring().build(6)[0].matrix
    around = [{int(j): float(matrix[i, j]) for j in matrix[[i]].indices} for i in range(6)]
    loop = PerNodeLoop(
        problem.initial.model, [(s.train.inputs, s.train.targets) for s in problem.sites], around, batch=20
    )
    for _ in range(150):
        loop.step()
    result = fm.train(problem, fm.Ring(), setting.algorithm(), 150)
    rows = {"loop": torch.stack([node.theta for node in loop.nodes]).mean(dim=0), "stack": result.row()[0]}
    inputs = torch.cat([site.train.inputs for site in problem.sites]).float() / 255
    targets = torch.cat([site.train.targets for site in problem.sites])
    hits = {k: float((problem.flat_model(row, inputs).argmax(-1) == targets).float().mean()) for k, row in rows.items()}
    assert min(hits.values()) > 0.9, hits
    sent = result.final[0]["bytes_total"] / float(loop.bytes_sent.sum())
    assert 0.9 < sent < 4  # headers weigh much on 260 parameters


def test_floor_counts_the_bytes_and_operations_of_a_round():
    problem = rounds.SETTINGS["logistic-10"]._replace(samples=60).problem()
    phases = {phase.name: phase for phase in floor.phases(problem, degree=2)}
    assert phases["losses and gradients"].products == 2 * 2 * 10 * 50 * 784 * 10  # forward, and the weights' gradient
    assert phases["compression"].bytes == 2 * 4 * 78_500
    slow = floor.Rates(bytes=1e9, products=1e9, operations=1e9)
    wanted = 1e3 * sum(max(p.bytes, p.products + p.operations) / 1e9 for p in phases.values())
    assert floor.floor_ms(problem, 2, 1, slow) == pytest.approx(wanted)
    assert floor.floor_ms(problem, 2, 3, slow) == pytest.approx(3 * wanted)


GOALS = {  # milliseconds on an H200: alone, and per replica of 20
    "logistic-10": (0.10, 0.012),
    "fc-50": (0.20, 0.060),
    "cifar-cnn-20": (1.2, 1.0),
    "coos7-cnn-10": (2.0, 1.5),
}


@pytest.mark.parametrize("name", GOALS)
def test_recorded_rounds_on_an_h200_meet_their_goals(name):
    recorded = _recorded("rounds-h200.json")
    alone, together = GOALS[name]
    assert recorded[name, 1]["ms_per_round"] <= alone
    assert recorded[name, 20]["ms_per_round"] / 20 <= together


def test_recorded_round_of_ten_thousand_nodes_takes_at_most_20_ms_on_an_h200():
    assert _recorded("rounds-h200.json")["logistic-10000", 1]["ms_per_round"] <= 20


def _cells(text: str, start: str) -> list[list[str]]:
    """Returns the cells of every table row that begins with `start`."""
    return [[cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("name", GOALS)
def test_performance_page_shows_the_recorded_rounds(name):
    on_gpu, on_cpu, *_ = _cells((ROOT / "docs" / "results" / "performance.md").read_text(), f"| {name} |")
    gpu, cpu = _recorded("rounds-h200.json"), _recorded("rounds-cpu.json")
    alone, together = gpu[name, 1], gpu[name, 20]
    times = [alone["ms_per_round"], together["ms_per_round"] / 20, alone["loop_ms"]]
    assert [float(on_gpu[k]) for k in (0, 1, 3)] == pytest.approx(times, rel=0.03)
    alone, together = cpu[name, 1], cpu[name, 4]
    times = [alone["ms_per_round"], together["ms_per_round"] / 4, alone["loop_ms"], alone["speedup_over_loop"]]
    assert [float(on_cpu[k]) for k in (0, 1, 4, 5)] == pytest.approx(times, rel=0.05)


def test_readme_shows_the_recorded_rounds():
    """The front page may show the table; where it does, its numbers are the recorded ones."""
    readme = (ROOT / "README.md").read_text()
    gpu, cpu = _recorded("rounds-h200.json"), _recorded("rounds-cpu.json")
    shown = {
        "logistic-10": "| logistic, 10 nodes |",
        "fc-50": "| 784-25-10 network, 50 nodes |",
        "cifar-cnn-20": "| the paper's CNN, CIFAR-10, 20 nodes |",
        "coos7-cnn-10": "| the paper's CNN, COOS7, 10 nodes |",
    }
    for name, start in shown.items():
        for cells in _cells(readme, start):
            alone, together = gpu[name, 1], gpu[name, 20]
            times = [alone["ms_per_round"], together["ms_per_round"] / 20, alone["loop_ms"]]
            times += [cpu[name, 1]["ms_per_round"], cpu[name, 1]["loop_ms"]]
            assert [float(cell) for cell in cells] == pytest.approx(times, rel=0.03)
