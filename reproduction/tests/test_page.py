"""The committed page, figures and verdicts compared with the raw recorded lines."""

import json
import re
from collections import Counter
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import matplotlib
import numpy
import pytest

from reproduction.page import _IN, counts, page
from reproduction.paper import CELLS
from reproduction.plots import drawable, figures
from reproduction.verdicts import RECORDED, Lines, factors, orderings
from reproduction.verdicts import verdicts as verdicts_on

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "reproduction"
PAGE, FIGURES, DIFFERENCES = FOLDER / "README.md", FOLDER / "figures", FOLDER / "differences.md"
LINES = [json.loads(line) for path in sorted(RECORDED.glob("*.jsonl")) for line in path.read_text().splitlines()]
PINNED = re.search(r"^matplotlib==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)

RUN = [cell for cell in CELLS if cell.recipe != "table4b" and "COOS7" not in cell.row]
PLACEMENTS = {"table2": 20, "table3": 20, "table4a": 3, "table4c": 3, "table5": 3}


def line_of(recipe, row, protocol):
    found = [
        one for one in LINES if (one.get("recipe"), one.get("row"), one.get("protocol")) == (recipe, row, protocol)
    ]
    assert len(found) <= 1, "a row has one line"
    if not found:
        pytest.skip(f"{recipe}: {row} is not recorded in the {protocol} protocol")
    return found[0]


def values_of(cell, protocol="published"):
    final = line_of(cell.recipe, cell.row, protocol)["final"]
    return numpy.array(final[cell.number] if cell.number in final else final["groups"][cell.number])


@cache
def verdicts():
    return verdicts_on(RECORDED)


@cache
def rows_of_page():
    """Returns the page's tables as {(heading, cell): [paper, formula, published, verdict]}."""
    rows, heading = {}, ""
    for text in PAGE.read_text().splitlines():
        if text.startswith("#"):
            heading = text.lstrip("# ").split(":")[0]
        elif text.startswith("| ") and text.count("|") == 6:
            name, *entries = (entry.strip() for entry in text.strip("|").split("|"))
            rows[heading, name] = entries
    return rows


def row_of_page(cell):
    heading, name = cell.name.replace("fc, ", "fully connected, ").split(": ", 1)
    return rows_of_page()[heading.replace("table", "Table "), name]


def test_page_is_generated_from_the_recorded_results():
    assert PAGE.read_text() == page(RECORDED, "figures"), "run: python -m reproduction page"


def test_figures_are_those_that_are_recorded():
    assert {path.stem for path in FIGURES.glob("*.svg")} == set(drawable(Lines(RECORDED)))


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("figure1", "figure2a", "figure2b", "figure4")),
        "figure3",
    ],
)
def test_figures_are_drawn_from_the_recorded_results(name):
    assert PINNED is not None
    if matplotlib.__version__ != PINNED[1]:
        pytest.skip(f"the figures were drawn with matplotlib {PINNED[1]}, this is {matplotlib.__version__}")
    text = figures(RECORDED, [name])[name]
    assert (FIGURES / f"{name}.svg").read_text() == text, f"{name}: run python -m reproduction page"
    assert len(text) < 150_000


@pytest.mark.parametrize("cell", RUN, ids=lambda cell: cell.name)
def test_page_shows_each_cell_and_verdict_of_the_raw_lines(cell):
    values = values_of(cell)
    difference = values.mean() - cell.mean
    paper, formula, published, verdict = row_of_page(cell)
    assert paper == f"{cell.mean:.2f} ± {cell.std:.2f}"
    for text, raw in ((published, values), (formula, values_of(cell, "formula"))):
        mean, std = (float(part) for part in re.match(r"(\S+) ± (\S+)", text).groups())
        assert mean == pytest.approx(raw.mean(), abs=0.006)
        assert std == pytest.approx(raw.std(ddof=1), abs=0.006)
    if abs(difference) > 3 + 1e-9:
        word, distance = verdict.replace("*", "").split(" by ")
        assert word == ("above" if difference > 0 else "below")
        assert float(distance) == pytest.approx(abs(difference), abs=0.051)
    else:
        assert verdict.startswith("within 3 points (")


@pytest.mark.parametrize("cell", RUN, ids=lambda cell: cell.name)
def test_recorded_cells_have_as_many_placements_as_the_paper(cell):
    for protocol in ("formula", "published"):
        assert len(values_of(cell, protocol)) >= (5 if "DRFA" in cell.row else PLACEMENTS[cell.recipe])


def test_verdicts_count_60_within_7_above_and_none_below():
    found = Counter(cell["verdict"] for cell in verdicts())
    assert found == {"within 3 points": 60, "above": 7, "not run": 12}


@pytest.mark.parametrize("path", [PAGE, ROOT / "README.md"], ids=["page", "readme"])
def test_counts_of_verdicts_are_shown_as_recorded(path):
    """The front page may show the table between marks; where it does, it is the recorded one."""
    text, expected = path.read_text(encoding="utf-8"), counts(verdicts())
    marked = re.search(r"<!-- verdicts -->\n(.*?)\n<!-- /verdicts -->", text, re.DOTALL)
    assert expected in text if path == PAGE else marked is None or marked.group(1) == expected


def test_differences_explain_every_published_cell_below_the_paper():
    below = [cell["cell"] for cell in verdicts() if cell["verdict"] == "below"]
    reasons = re.findall(r"`(table[^`]*)`", DIFFERENCES.read_text())
    unexplained = [cell for cell in below if not any(fnmatchcase(cell, reason) for reason in reasons)]
    assert not unexplained, "name each in backticks (with * as a wildcard) in differences.md, with the reason"


def required_orderings():
    """Returns the orderings required of the `published` protocol, without those of COOS7."""
    found = [o for o in orderings(RECORDED) if o["protocol"] == "published" and o["required"] is not None]
    return [o for o in found if "table4b" not in o["ordering"] and "COOS7" not in o["ordering"]]


@pytest.mark.parametrize("ordering", required_orderings(), ids=lambda o: o["ordering"])
def test_orderings_of_the_paper_hold_in_the_published_protocol(ordering):
    if ordering["measured"] is None:
        pytest.skip("not recorded")
    assert ordering["holds"], f"{ordering['measured']} of {ordering['required']}: {ordering['detail']}"


@pytest.mark.parametrize("table", ["table2", "table3"])
def test_orderings_hold_the_leads_over_choco_sgd_of_the_raw_lines(table):
    leads = [o for o in orderings(RECORDED) if o["ordering"].startswith(table) and o["measured"] is not None]
    for o in leads:
        model, rest = o["ordering"].removeprefix(f"{table}: ").rsplit(": ", 1)[0].split(", ", 1)
        means = [
            numpy.mean(line_of(table, f"{model}, {which}, {rest}", o["protocol"])["final"]["worst"])
            for which in ("AD-GDA", "CHOCO-SGD")
        ]
        assert o["measured"] == pytest.approx(means[0] - means[1], abs=1e-3)
        assert o["holds"] == (means[0] - means[1] >= 12)


def first_reached(curve, level, what):
    """Returns where the curve first reaches a level, on a fine grid between its points."""
    fine = numpy.linspace(0, len(curve["worst"]) - 1, 200_001)
    at = numpy.arange(len(curve["worst"]))
    worst = numpy.interp(fine, at, curve["worst"])
    return numpy.interp(fine, at, curve[what])[numpy.argmax(worst >= level)]


@pytest.mark.parametrize("setup", ["Fashion-MNIST", "CIFAR-10"])
@pytest.mark.parametrize("rival", ["DRFA", "DR-DSGD"])
def test_factors_follow_from_the_raw_curves_and_the_page_shows_them(setup, rival):
    ours = line_of("figure4", f"{setup}, AD-GDA", "published")["curve"]
    theirs = line_of("table5", f"{setup}, {rival}", "published")["curve"]
    level = min(ours["worst"][-1], theirs["worst"][-1])
    for billing, what in (("nominal", "nominal_bits_busiest"), ("bytes", "bytes_busiest_node")):
        kind = {"setup": setup, "rival": rival, "protocol": "published", "worst": "node", "billing": billing}
        (found,) = [f for f in factors(RECORDED) if kind.items() <= f.items()]
        assert found["factor"] == pytest.approx(
            first_reached(theirs, level, what) / first_reached(ours, level, what), 0.01
        )
        shown = next(s for s in PAGE.read_text().splitlines() if s.startswith(f"- {setup},") and f" {rival}:" in s)
        assert f"{found['factor']:.1f}x {_IN[billing]}" in shown
        assert (f"{_IN[billing]} (" in shown) == (not found["holds"])  # a missed factor is named with its share
