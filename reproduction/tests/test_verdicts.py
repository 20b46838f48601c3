"""Verdicts, orderings and factors of small invented lines, checked against answers worked out by hand."""

import json

import pytest

from reproduction.page import page, stated, write
from reproduction.paper import CELLS, COMPRESSIONS
from reproduction.plots import figures, fitted
from reproduction.verdicts import factors, orderings, reached_at, verdicts


def line(recipe, row, protocol="published", worst=(50.0,), *, group=None, best=None, groups=None, curve=None, **more):
    """Returns a line as runs write it. Final numbers that are not given are those of the worst node."""
    worst = list(worst)
    numbers = {"worst": worst, "worst_group": group or worst, "mean": worst, "best": best or worst}
    final = numbers | {"mean_of_groups": worst, "groups": groups or {"class 0": worst}}
    curve = {"round": [0, 10], "worst": [0.0, 50.0], "nominal_bits_busiest": [0, 80], "bytes_busiest_node": [0, 5]} | (
        curve or {}
    )
    curve = {"worst_group": curve["worst"], "mean": curve["worst"], "worst_loss": [1.0] * len(curve["worst"])} | curve
    return {
        "recipe": recipe, "row": row, "protocol": protocol, "settings": {}, "seeds": list(range(len(worst))),
        "search": {"over": {}, "tried": [], "chosen": {}}, "nodes": 10, "parameters": 100, "final": final,
        "curve": curve, "diverged": [], "seconds": 1.5, "machine": "a machine",
    } | more  # fmt: skip


@pytest.fixture
def record(tmp_path):
    """Writes lines into a folder of results and returns it."""

    def recorded(*lines):
        for one in lines:
            with (tmp_path / f"{one['recipe']}.jsonl").open("a") as file:
                file.write(json.dumps(one) + "\n")
        return tmp_path

    return recorded


ROW = "logistic, AD-GDA, quantization 16 bit"  # the paper: 59.19 ± 2.05


def cell_of(results, name):
    return next(cell for cell in verdicts(results) if cell["cell"] == name)


@pytest.mark.parametrize(
    ("worst", "verdict", "difference"),
    [
        ((58.19, 60.19), "within 3 points", 0.0),
        ((62.19,), "within 3 points", 3.0),
        ((62.3,), "above", 3.11),
        ((56.19,), "within 3 points", -3.0),
        ((54.0, 55.0), "below", -4.69),
    ],
)
def test_verdicts_compare_the_published_mean_with_the_paper_s(record, worst, verdict, difference):
    cell = cell_of(record(line("table2", ROW, worst=worst), line("table2", ROW, "formula", (10.0,))), f"table2: {ROW}")
    assert cell["verdict"] == verdict
    assert cell["difference"] == pytest.approx(difference)
    assert cell["paper"] == {"mean": 59.19, "std": 2.05}
    assert cell["formula"]["mean"] == 10.0


def test_verdicts_give_the_sample_standard_deviation_and_none_for_one_placement(record):
    results = record(line("table2", ROW, worst=(58.0, 60.0)), line("table2", ROW, "formula", (58.0,)))
    cell = cell_of(results, f"table2: {ROW}")
    assert cell["published"]["mean"] == 59.0
    assert cell["published"]["std"] == 1.414
    assert cell["published"]["placements"] == 2
    assert cell["formula"]["std"] is None


def test_verdicts_name_cells_that_were_not_run(record):
    results = record(line("table2", ROW, "formula", (59.0,)))
    cells = {cell["cell"]: cell for cell in verdicts(results)}
    assert len(cells) == len(CELLS)
    assert cells[f"table2: {ROW}"]["verdict"] == "published not run"
    others = [cell for name, cell in cells.items() if name != f"table2: {ROW}"]
    assert {cell["verdict"] for cell in others} == {"not run"}
    assert all(cell["formula"] is None and cell["published"] is None for cell in others)


def test_verdicts_read_groups_and_hold_both_definitions_of_worst(record):
    groups = {"low contrast": [38.0, 40.0], "high contrast": [41.0, 41.0], "original contrast": [43.0, 43.0]}
    results = record(line("table4c", "alpha = 0.01", worst=(36.0, 37.0), group=[38.0, 40.0], groups=groups))
    low = cell_of(results, "table4c: alpha = 0.01, low contrast")
    assert low["published"]["mean"] == 39.0
    assert low["worst"]["published"]["node"]["mean"] == 36.5
    assert low["worst"]["published"]["group"]["mean"] == 39.0
    assert low["worst"]["formula"] is None
    assert cell_of(results, "table5: CIFAR-10, AD-GDA")["published"]["mean"] == 39.0


def ordering_of(results, text, protocol="published"):
    return next(o for o in orderings(results) if text in o["ordering"] and o["protocol"] == protocol)


@pytest.mark.parametrize(("choco", "holds"), [(38.0, True), (38.1, False)])
def test_orderings_require_a_lead_of_twelve_points_over_choco_sgd(record, choco, holds):
    results = record(line("table2", ROW), line("table2", "logistic, CHOCO-SGD, quantization 16 bit", worst=(choco,)))
    lead = ordering_of(results, "table2: logistic, quantization 16 bit")
    assert lead["measured"] == pytest.approx(50 - choco)
    assert lead["required"] == 12
    assert lead["holds"] is holds
    assert ordering_of(results, "table2: logistic, quantization 16 bit", "formula")["holds"] is None


def test_orderings_have_a_lead_for_every_cell_of_tables_2_and_3_in_both_protocols(tmp_path):
    assert sum(o["required"] == 12 for o in orderings(tmp_path)) == 2 * 2 * (len(COMPRESSIONS) + 4)


@pytest.mark.parametrize(("best", "holds"), [(89.0, True), (91.0, False)])
def test_orderings_require_a_smaller_gap_with_the_weaker_regularizer(record, best, holds):
    strong = line("table4a", "alpha = 10", worst=(50.0,), best=[90.0])
    weak = line("table4a", "alpha = 0.01", worst=(50.0,), best=[best])
    gap = ordering_of(record(strong, weak), "table4a: the gap")
    assert gap["measured"] == 90 - best
    assert gap["holds"] is holds


def test_orderings_take_the_gap_between_contrasts_on_cifar(record):
    strong = line("table4c", "alpha = 10", groups={"low contrast": [34.0], "original contrast": [44.0]})
    weak = line("table4c", "alpha = 0.01", groups={"low contrast": [39.0], "original contrast": [43.0]})
    gap = ordering_of(record(strong, weak), "table4c: the gap")
    assert gap["measured"] == 6.0
    assert gap["detail"] == "10.0 to 4.0 points"


def test_orderings_require_the_first_place_on_fashion_mnist_and_report_it_on_cifar(record):
    results = record(
        line("table4a", "alpha = 0.01", worst=(58.0,)),
        line("table5", "Fashion-MNIST, DRFA", worst=(56.0,)),
        line("table5", "Fashion-MNIST, DR-DSGD", worst=(57.0,)),
        line("table4c", "alpha = 0.01", worst=(36.0,), group=[39.0]),
        line("table5", "CIFAR-10, DRFA", worst=(37.0,), group=[38.0]),
        line("table5", "CIFAR-10, DR-DSGD", worst=(35.0,), group=[38.5]),
    )
    fashion = ordering_of(results, "Fashion-MNIST: AD-GDA first by its worst node")
    assert (fashion["measured"], fashion["required"], fashion["holds"]) == (1.0, 0.0, True)
    by_node = ordering_of(results, "CIFAR-10: AD-GDA first by its worst node")
    assert (by_node["measured"], by_node["required"], by_node["holds"]) == (-1.0, None, False)
    by_group = ordering_of(results, "CIFAR-10: AD-GDA first by its worst group")
    assert (by_group["measured"], by_group["required"], by_group["holds"]) == (0.5, None, True)


def test_reached_at_interpolates_to_the_first_point_at_or_above_the_level():
    assert reached_at(30.0, [0.0, 20.0, 40.0, 10.0, 50.0], [0, 10, 20, 30, 40]) == 15.0
    assert reached_at(20.0, [0.0, 20.0, 40.0], [0, 10, 20]) == 10.0
    assert reached_at(0.0, [0.0, 20.0], [5, 10]) == 5
    assert reached_at(60.0, [0.0, 20.0, 40.0], [0, 10, 20]) is None


def compared(record, ours=(0.0, 20.0, 60.0), theirs=(0.0, 20.0, 40.0)):
    """Records AD-GDA with 10 nodes and 100 parameters, DRFA and DR-DSGD."""

    def curve(worst, bits, size):
        traffic = {"nominal_bits_busiest": [0, bits, 2 * bits], "bytes_busiest_node": [0, size, 2 * size]}
        return {"round": [0, 10, 20], "worst": list(worst), "worst_group": [0.0, 30.0, 60.0]} | traffic

    return record(
        line("figure4", "Fashion-MNIST, AD-GDA", curve=curve(ours, 100, 10)),
        line("table5", "Fashion-MNIST, DRFA", curve=curve(theirs, 900, 180)),
        line("table5", "Fashion-MNIST, DR-DSGD", curve=curve(theirs, 450, 30)),
    )


def factor_of(results, rival, billing, worst="node"):
    kinds = {"setup": "Fashion-MNIST", "rival": rival, "protocol": "published", "billing": billing, "worst": worst}
    (found,) = [f for f in factors(results) if kinds.items() <= f.items()]
    return found


def test_factors_compare_at_the_lower_of_the_two_final_accuracies(record):
    results = compared(record)
    drfa = factor_of(results, "DRFA", "nominal")
    assert drfa["level"] == 40.0
    assert (drfa["ours"], drfa["theirs"]) == (150.0, 1800.0)
    assert (drfa["factor"], drfa["required"], drfa["holds"]) == (12.0, 4.0, True)
    assert factor_of(results, "DRFA", "bytes")["factor"] == 24.0
    dr_dsgd = factor_of(results, "DR-DSGD", "bytes")
    assert (dr_dsgd["factor"], dr_dsgd["required"], dr_dsgd["holds"]) == (4.0, 8.0, False)
    assert factor_of(results, "DRFA", "nominal", "group")["factor"] == 9.0


def test_factors_count_bits_as_the_published_plots_do(record):
    results = compared(record)
    drfa = factor_of(results, "DRFA", "published")
    assert drfa["ours"] == 15 * (4 * 100 + 32 * 10) * 4
    assert drfa["theirs"] == 20 * 32 * 100 * 5 * 2
    assert factor_of(results, "DR-DSGD", "published")["theirs"] == 20 * 32 * 100 * 4
    assert not [f for f in factors(results) if f["protocol"] == "formula" and f["billing"] == "published"]


def test_factors_take_a_better_rival_s_traffic_where_it_reaches_our_final_accuracy(record):
    found = factor_of(compared(record, ours=(0.0, 30.0, 30.0), theirs=(0.0, 20.0, 40.0)), "DRFA", "nominal")
    assert (found["level"], found["ours"], found["theirs"]) == (30.0, 100.0, 1350.0)


def test_factors_are_none_for_a_level_met_at_the_start_and_for_missing_runs(record):
    results = compared(record, theirs=(0.0, 0.0, 0.0))
    assert factor_of(results, "DRFA", "nominal")["factor"] is None
    assert all(f["factor"] is None for f in factors(results) if f["setup"] != "Fashion-MNIST")


@pytest.mark.parametrize("rate", [0.3, 0.5, 1.0])
def test_fitted_finds_the_rate_and_floor_of_a_known_curve(rate):
    rounds = list(range(0, 2001, 20))
    fit = fitted(rounds, [2.3] + [0.4 + 2 * t**-rate for t in rounds[1:]])
    assert fit is not None
    assert fit.rate == rate
    assert fit.floor == pytest.approx(0.4, abs=1e-6)
    assert fit.scale == pytest.approx(2, abs=1e-5)


def test_fitted_gives_none_for_a_rising_or_short_curve():
    assert fitted([0, 10, 20, 30, 40, 50], [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]) is None
    assert fitted([0, 10, 20], [1.0, 0.9, 0.8]) is None


def test_stated_shows_a_verdict_with_its_distance():
    assert stated({"verdict": "below", "difference": -4.69}) == "**below** by 4.7"
    assert stated({"verdict": "above", "difference": 3.11}) == "above by 3.1"
    assert stated({"verdict": "within 3 points", "difference": -0.04}) == "within 3 points (+0.0)"
    assert stated({"verdict": "not run", "difference": None}) == "not run"


def test_page_can_be_made_of_no_results_and_of_few(record, tmp_path):
    assert page(tmp_path / "nowhere", "figures").count("| – | – | not run |") == len(CELLS)
    results = record(line("table2", ROW, worst=(58.0, 60.0), diverged=[1]))
    paths = write(compared(record), tmp_path / "PAGE.md", tmp_path / "figures")
    assert [path.name for path in paths] == ["figure4.svg", "PAGE.md"]
    text = (tmp_path / "PAGE.md").read_text()
    assert text == page(results, "figures")
    assert "59.00 ± 1.41 (1 of 2 diverged) † | within 3 points (−0.2)" in text
    assert "](figures/figure4.svg)" in text


@pytest.mark.slow
def test_figures_are_the_same_when_drawn_twice(record):
    results = compared(record)
    assert figures(results) == figures(results)
