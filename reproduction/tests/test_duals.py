"""Ways to find the weights when nodes are many: the experiment runs, and its record says what the documents say."""

import json

import pytest
import torch

from fairmesh.config.tables import to_table
from fairmesh.storage.strict_json import as_json
from reproduction.frontier import duals
from reproduction.frontier import sites as problem
from reproduction.verdicts import RECORDED

RECORD = RECORDED / "frontier_duals.jsonl"
LINES = [json.loads(line) for line in RECORD.read_text().splitlines()]
RUNS = {(line["nodes"], line["graph"], line["weighting"]): line for line in LINES if "graph" in line}
BEST = {line["nodes"]: line["objective"] for line in LINES if "graph" not in line}
SIZES = 50, 1000, 10_000


def above_best(n: int, graph: str, weighting: str) -> float:
    return RUNS[n, graph, weighting]["objective"] - BEST[n]


def test_a_miniature_gives_every_kind_of_line_as_plain_values():
    said: list[str] = []
    lines = duals.lines(say=said.append, miniature=True)
    assert json.loads(as_json(lines)) == lines
    runs = [line for line in lines if "graph" in line]
    assert len(said) == len(runs) == 7 + 7 + 6
    assert {line["weighting"] for line in runs} == {weighting for _, _, weighting in RUNS}
    assert {line["graph"] for line in runs if line["nodes"] == 10} == {"fast", "slow"}
    for line in runs:
        whole = line["nodes"] == 10 or line["weighting"] in ("fixed", "price")
        assert ("apart" in line) == whole
        assert line["dual_bytes"] == {"fixed": 0, "price": 9}.get(line["weighting"], line["dual_bytes"])


def test_the_optimum_that_models_are_compared_with_is_one():
    sites = problem.Sites.drawn(30)
    best = sites.best()
    least = problem.objective_of(sites.outcome(best)[0])
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-2, 1e-1):
        for _ in range(20):
            away = best + size * torch.randn(best.shape, generator=generator, dtype=best.dtype)
            assert problem.objective_of(sites.outcome(away)[0]) > least


@pytest.mark.parametrize("n", SIZES)
def test_a_price_is_nine_bytes_and_four_numbers_and_a_row_grows_with_the_nodes(n):
    price, maximum, ascent = (RUNS[n, "fast", name] for name in ("price", "maximum", "ascent"))
    assert (price["dual_bytes"], price["dual_state_bytes"]) == (9, 16)
    assert maximum["dual_bytes"] == ascent["dual_bytes"] == 4 * n + 5
    assert ascent["dual_state_bytes"] == 4 * n
    assert maximum["dual_state_bytes"] == 8 * n + 4


@pytest.mark.parametrize("n", SIZES)
def test_where_the_graph_mixes_a_price_finds_the_exact_maximum_and_the_optimum(n):
    price, fixed = RUNS[n, "fast", "price"], RUNS[n, "fast", "fixed"]
    assert price["apart"] < 0.1 < 0.7 < fixed["apart"]
    assert abs(price["weights_sum"] - 1) < 0.02
    assert above_best(n, "fast", "price") < 0.002 < 0.1 < above_best(n, "fast", "fixed")


@pytest.mark.parametrize("n", SIZES[:2])
@pytest.mark.parametrize("rows", ["maximum", "maximum, thresholded"])
def test_where_the_graph_mixes_a_price_is_as_good_as_rows_of_losses(n, rows):
    assert RUNS[n, "fast", "price"]["apart"] < RUNS[n, "fast", rows]["apart"] + 0.01
    assert abs(above_best(n, "fast", "price") - above_best(n, "fast", rows)) < 2e-4


@pytest.mark.parametrize("n", SIZES[:2])
def test_a_threshold_spares_about_half_of_the_bytes_of_a_row_and_no_quality(n):
    dense, sparse = RUNS[n, "fast", "maximum"], RUNS[n, "fast", "maximum, thresholded"]
    assert 0.3 * dense["dual_bytes"] < sparse["dual_bytes"] < 0.6 * dense["dual_bytes"]
    assert sparse["apart"] < dense["apart"] + 0.01


def test_at_a_thousand_nodes_an_ascent_overstates_every_weight_with_a_large_step_and_is_late_with_a_small_one():
    assert RUNS[1000, "fast", "ascent"]["weights_sum"] > 5
    assert RUNS[1000, "fast", "ascent, smaller step"]["weights_sum"] > 1.5
    for name in ("ascent", "ascent, thresholded", "ascent, smaller step"):
        assert above_best(1000, "fast", name) > 10 * above_best(1000, "fast", "price")


def test_where_a_thousand_nodes_mix_slowly_rows_lose_the_weights_and_a_price_only_blurs_them():
    for rows in ("maximum", "maximum, thresholded"):  # everyone takes its neighbours' losses for far worse than its own
        assert RUNS[1000, "slow", rows]["weights_sum"] < 0.01
    assert RUNS[1000, "slow", "ascent"]["weights_sum"] > 10
    price = RUNS[1000, "slow", "price"]
    assert abs(price["weights_sum"] - 1) < 0.02
    assert 0.2 < price["apart"] < 0.4
    others = [name for n, graph, name in RUNS if (n, graph) == (1000, "slow") and name != "price"]
    assert above_best(1000, "slow", "price") < min(above_best(1000, "slow", name) for name in others)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: ", ".join(map(str, run)))
def test_the_record_is_of_the_experiment_as_it_is(run):
    n, _, name = run
    algorithm = RUNS[run]["settings"]["algorithm"]
    assert algorithm["weighting"] == json.loads(as_json(to_table(duals.weighings(n)[name])))
    assert algorithm["regularizer"] == to_table(problem.REGULARIZER)
    whole = n <= duals.ROWS_UP_TO or name in ("fixed", "price")
    assert RUNS[run]["rounds"] == (duals.ROUNDS if whole else duals.COST_ONLY)
