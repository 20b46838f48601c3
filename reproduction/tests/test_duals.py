"""Weightings for many nodes: the experiment runs, and its record supports what frontier.md says."""

import json

import pytest
import torch

from fairmesh.storage.strict_json import as_json
from reproduction.frontier import duals
from reproduction.frontier import sites as problem
from reproduction.lines import describes
from reproduction.verdicts import RECORDED

RECORD = RECORDED / "frontier_duals.jsonl"
LINES = [json.loads(line) for line in RECORD.read_text().splitlines()]
RUNS = {(line["nodes"], line["graph"], line["weighting"]): line for line in LINES if "graph" in line}
BEST = {line["nodes"]: line["objective"] for line in LINES if "graph" not in line}
SIZES = 50, 1000, 10_000


def above_best(n: int, graph: str, weighting: str) -> float:
    return RUNS[n, graph, weighting]["objective"] - BEST[n]


@pytest.mark.slow
def test_duals_in_miniature_give_every_kind_of_line_as_plain_values():
    said: list[str] = []
    lines = duals.lines(say=said.append, miniature=True)
    assert json.loads(as_json(lines)) == lines
    runs = [line for line in lines if "graph" in line]
    assert len(said) == len(runs) == 7 + 7 + 6
    assert {line["weighting"] for line in runs} == {weighting for _, _, weighting in RUNS}
    assert {line["graph"] for line in runs if line["nodes"] == 10} == {"fast", "slow"}
    for line in runs:
        whole = line["nodes"] == 10 or line["weighting"] in ("prior weights", "shadow price")
        assert ("apart" in line) == whole
        assert line["dual_bytes"] == {"prior weights": 0, "shadow price": 9}.get(line["weighting"], line["dual_bytes"])


def test_duals_in_miniature_give_lines_of_one_weighting(monkeypatch):
    every = duals.weightings
    monkeypatch.setattr(duals, "weightings", lambda n: {"shadow price": every(n)["shadow price"]})
    lines = duals.lines(miniature=True)
    assert json.loads(as_json(lines)) == lines
    assert [(line["nodes"], line.get("graph")) for line in lines] == [
        (10, None), (10, "fast"), (10, "slow"), (20, None), (20, "fast")
    ]  # fmt: skip
    assert all({"message_bytes", "apart", "settings"} <= set(line) for line in lines if "graph" in line)


def test_sites_best_model_is_an_optimum():
    sites = problem.Sites.drawn(30)
    best = sites.best()
    least = problem.objective_of(sites.outcome(best)[0])
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-2, 1e-1):
        for _ in range(20):
            away = best + size * torch.randn(best.shape, generator=generator, dtype=best.dtype)
            assert problem.objective_of(sites.outcome(away)[0]) > least


@pytest.mark.parametrize("n", SIZES)
def test_shadow_price_takes_nine_bytes_while_rows_grow_with_the_nodes(n):
    price, maximum, ascent = (RUNS[n, "fast", name] for name in ("shadow price", "exact maximum", "projected ascent"))
    assert (price["dual_bytes"], price["dual_state_bytes"]) == (9, 16)
    assert maximum["dual_bytes"] == ascent["dual_bytes"] == 4 * n + 5
    assert ascent["dual_state_bytes"] == 4 * n
    assert maximum["dual_state_bytes"] == 8 * n + 4


@pytest.mark.parametrize("n", SIZES)
def test_shadow_price_finds_the_exact_maximum_and_the_optimum_on_the_fast_graph(n):
    price, fixed = RUNS[n, "fast", "shadow price"], RUNS[n, "fast", "prior weights"]
    assert price["apart"] < 0.1 < 0.7 < fixed["apart"]
    assert abs(price["weights_sum"] - 1) < 0.02
    assert above_best(n, "fast", "shadow price") < 0.002 < 0.1 < above_best(n, "fast", "prior weights")


@pytest.mark.parametrize("n", SIZES[:2])
@pytest.mark.parametrize("rows", ["exact maximum", "exact maximum, thresholded"])
def test_shadow_price_is_as_good_as_rows_of_losses_on_the_fast_graph(n, rows):
    assert RUNS[n, "fast", "shadow price"]["apart"] < RUNS[n, "fast", rows]["apart"] + 0.01
    assert abs(above_best(n, "fast", "shadow price") - above_best(n, "fast", rows)) < 2e-4


@pytest.mark.parametrize("n", SIZES[:2])
def test_threshold_saves_about_half_of_the_bytes_of_a_row_at_the_same_quality(n):
    dense, sparse = RUNS[n, "fast", "exact maximum"], RUNS[n, "fast", "exact maximum, thresholded"]
    assert 0.3 * dense["dual_bytes"] < sparse["dual_bytes"] < 0.6 * dense["dual_bytes"]
    assert sparse["apart"] < dense["apart"] + 0.01


def test_projected_ascent_overstates_weights_at_a_thousand_nodes():
    assert RUNS[1000, "fast", "projected ascent"]["weights_sum"] > 5
    assert RUNS[1000, "fast", "projected ascent, smaller step"]["weights_sum"] > 1.5
    for name in ("projected ascent", "projected ascent, thresholded", "projected ascent, smaller step"):
        assert above_best(1000, "fast", name) > 10 * above_best(1000, "fast", "shadow price")


def test_shadow_price_is_best_where_a_thousand_nodes_mix_slowly():
    for rows in (
        "exact maximum",
        "exact maximum, thresholded",
    ):  # each node takes its neighbours' losses to be far worse than its own
        assert RUNS[1000, "slow", rows]["weights_sum"] < 0.01
    assert RUNS[1000, "slow", "projected ascent"]["weights_sum"] > 10
    price = RUNS[1000, "slow", "shadow price"]
    assert abs(price["weights_sum"] - 1) < 0.02
    assert 0.2 < price["apart"] < 0.4
    others = [name for n, graph, name in RUNS if (n, graph) == (1000, "slow") and name != "shadow price"]
    assert above_best(1000, "slow", "shadow price") < min(above_best(1000, "slow", name) for name in others)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: ", ".join(map(str, run)))
def test_recorded_runs_are_of_the_experiment_as_it_is(run):
    n, _, name = run
    algorithm = RUNS[run]["settings"]["algorithm"]
    assert describes(algorithm["weighting"], duals.weightings(n)[name])
    assert describes(algorithm["regularizer"], problem.REGULARIZER)
    whole = n <= duals.ROWS_UP_TO or name in ("prior weights", "shadow price")
    assert RUNS[run]["rounds"] == (duals.ROUNDS if whole else duals.COST_ONLY)
