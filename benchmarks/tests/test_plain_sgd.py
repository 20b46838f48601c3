"""`python -m benchmarks loops`, and the results recorded with it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fairmesh as fm
from benchmarks import plain_sgd
from benchmarks.__main__ import app
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "benchmarks" / "results" / "loops-cpu.json").read_text())["cases"]


def test_recorded_first_rounds_on_a_cpu_come_within_three_seconds():
    assert {one["case"] for one in RECORDED} == set(plain_sgd.cases())
    assert max(one["first_round_s"] for one in RECORDED) <= 3


def test_performance_page_shows_the_recorded_ratios():
    page = (ROOT / "docs" / "results" / "performance.md").read_text()
    for case in plain_sgd.cases():
        tuned, plain = (next(o for o in RECORDED if (o["case"], o["tuned"]) == (case, t)) for t in (True, False))
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {case} | {tuned['at_once']} |"))
        assert line.endswith(f"| {tuned['ratio']:.2f} | {plain['ratio']:.2f} |")


def test_plain_loop_takes_the_rounds_of_dsgd():
    images = torch.randint(0, 255, (4, 1, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    data = [(image, torch.tensor([i % 3])) for i, image in enumerate(images)]
    torch.manual_seed(0)
    module = nn.Linear(6, 3)
    loop = plain_sgd.PlainLoop(module, data, batch=1)
    for _ in range(5):
        loop.step()
    problem = fm.Problem(module, [fm.Site(pair) for pair in data], sampling=fm.Sampling(batch=1))
    trained = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(plain_sgd._STEP), 5)
    torch.testing.assert_close(loop.average(), trained.row()[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_loops_command_times_a_round_next_to_the_loop(monkeypatch):
    monkeypatch.setattr(plain_sgd, "_SECONDS", 0.1)
    command = ["loops", "--case", "logistic-10", "--no-tune-malloc", "--json"]
    (one,) = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)["cases"]
    assert one["at_once"] == "all"
    assert min(one["ratio"], one["first_round_s"], one["loop_ms"]) > 0


def test_loops_command_refuses_an_unknown_case():
    with refused("no-such-case", "resnet18-8"):
        list(plain_sgd.timings(["no-such-case"], tuned=False))
