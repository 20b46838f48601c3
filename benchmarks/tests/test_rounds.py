"""`python -m benchmarks rounds`, and what was recorded with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fairmesh as fm
from benchmarks import floor, rounds

ROOT = Path(__file__).parents[2]
FIELDS = {"case", "replicas", "ms_per_round", "floor_ms", "over_floor", "loop_ms", "speedup_over_loop"}


def _recorded(name: str) -> dict[tuple[str, int], dict]:
    cases = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["cases"]
    return {(case["case"], case["replicas"]): case for case in cases}


def test_the_command_prints_one_json_object_with_times_floor_and_loop():
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "rounds",
        "--case",
        "logistic-10",
        "--replicas",
        "1",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)["cases"]
    assert case.keys() >= FIELDS
    assert case["case"] == "logistic-10"
    assert 0 < case["ms_low"] <= case["ms_per_round"] <= case["ms_high"]
    assert case["over_floor"] == pytest.approx(case["ms_per_round"] / case["floor_ms"])
    assert case["speedup_over_loop"] > 1.5  # far below what is recorded: tests share their cores


def test_an_unknown_case_is_refused_by_name():
    with pytest.raises(fm.BadInput, match=r"no case 'logistics'; cases are logistic-10, fc-50"):
        list(rounds.timings("cpu", ["logistics"]))


def test_the_profile_names_operations_and_their_times():
    table = rounds.profile("cpu", "logistic-10", 1, rounds=2)
    assert any("bmm" in name for name, _, _ in table)
    assert [ms for _, ms, _ in table] == sorted((ms for _, ms, _ in table), reverse=True)


def test_the_loop_and_the_stack_learn_the_same_problem():
    setting = rounds.Setting(6, 40, (1, 8, 8), 4, fm.models.Logistic(), 20)
    problem = setting.problem()
    text = rounds.per_node_loop()
    matrix = fm.Ring().build(6)[0].matrix
    around = [{int(j): float(matrix[i, j]) for j in matrix[[i]].indices} for i in range(6)]
    loop = text.PerNodeLoop(problem.model, [(s.train.inputs, s.train.targets) for s in problem.sites], around, batch=20)
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


def test_the_floor_counts_what_a_round_must_do():
    problem = rounds.SETTINGS["logistic-10"].problem()
    phases = {phase.name: phase for phase in floor.phases(problem, degree=2)}
    assert phases["losses and gradients"].products == 2 * 2 * 10 * 50 * 784 * 10  # forward, and the weights' gradient
    assert phases["compression"].bytes == 2 * 4 * 78_500
    slow = floor.Rates(bytes=1e9, products=1e9, operations=1e9)
    wanted = 1e3 * sum(max(p.bytes, p.products + p.operations) / 1e9 for p in phases.values())
    assert floor.floor_ms(problem, 2, 1, slow) == pytest.approx(wanted)
    assert floor.floor_ms(problem, 2, 3, slow) == pytest.approx(3 * wanted)


GOALS = {  # milliseconds on an H200: alone, and a replica of 20
    "logistic-10": (0.10, 0.012),
    "fc-50": (0.20, 0.060),
    "cifar-cnn-20": (1.2, 1.0),
    "coos7-cnn-10": (2.0, 1.5),
}


@pytest.mark.parametrize("name", GOALS)
def test_rounds_on_an_h200_were_as_fast_as_they_should_be(name):
    recorded = _recorded("rounds-h200.json")
    alone, together = GOALS[name]
    assert recorded[name, 1]["ms_per_round"] <= alone
    assert recorded[name, 20]["ms_per_round"] / 20 <= together


def test_ten_thousand_nodes_took_at_most_20_ms_on_an_h200():
    assert _recorded("rounds-h200.json")["logistic-10000", 1]["ms_per_round"] <= 20


def test_the_readme_shows_what_was_recorded():
    lines = (ROOT / "README.md").read_text().splitlines()
    gpu, cpu = _recorded("rounds-h200.json"), _recorded("rounds-cpu.json")
    shown = {
        "logistic-10": "| logistic, 10 nodes |",
        "fc-50": "| 784-25-10 network, 50 nodes |",
        "cifar-cnn-20": "| the paper's CNN, CIFAR-10, 20 nodes |",
        "coos7-cnn-10": "| the paper's CNN, COOS7, 10 nodes |",
    }
    for name, start in shown.items():
        row = next(line for line in lines if line.startswith(start))
        alone, together = gpu[name, 1], gpu[name, 20]
        times = [alone["ms_per_round"], together["ms_per_round"] / 20, alone["loop_ms"]]
        times += [cpu[name, 1]["ms_per_round"], cpu[name, 1]["loop_ms"]]
        assert [float(cell) for cell in row.split("|")[2:-1]] == pytest.approx(times, rel=0.03)
