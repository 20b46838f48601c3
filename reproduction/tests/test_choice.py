"""The recorded bed of the choice: it was made by the rule as it is, and its tables count right."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fairmesh.personalization import Choice
from reproduction import choice
from reproduction.choice import CONSTANTS, DRAWS, MODELS, POPULATIONS, SIZES, Cell

RECORDED = json.loads(choice.FILE.read_text())
ROWS = {name: row for name, row in RECORDED.items() if name != "settings"}
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "personal.md"
SHORT = Choice(steps=3, local_steps=3, folds=2)


# The recorded table.


def test_record_was_made_with_the_present_constants_and_settings():
    assert RECORDED["settings"] == json.loads(json.dumps(choice.settings())), "run: python -m reproduction.choice"


def test_every_population_draw_and_variant_is_recorded():
    drawn = Counter((row["population"], row["targets"], row["sites"]) for row in ROWS.values())
    kinds = [(population, targets) for population in POPULATIONS for targets in ("numbers", "labels")]
    assert drawn == {(*kind, sites): draws for kind in kinds for sites, draws in DRAWS.items()}
    assert len(choice.variants()) == 6
    for row in ROWS.values():
        assert list(row["variants"]) == list(choice.variants())
        for losses in (*(row[name] for name in MODELS), *row["variants"].values()):
            assert np.isfinite(losses).all()
            assert len(losses) == row["sites"]


def test_cells_hold_every_recorded_site_once():
    cells = choice.cells_of(RECORDED)
    assert len(cells) == 3 * len(POPULATIONS) * 2 * len(DRAWS)
    assert sum(len(cell.better) for cell in cells) == sum(row["sites"] for row in ROWS.values())


def test_page_has_the_recorded_table_and_says_where_the_choice_is_worse():
    cells = choice.cells_of(RECORDED)
    section = PAGE.read_text(encoding="utf-8").split("### On sites whose truths are known")[1].split("\n## ")[0]
    assert choice.compared(choice.by_size(cells) | {"all": cells}) in section
    more = {cell[:4]: cell.against_better("chosen") for cell in cells}
    (worse,) = [cell[:4] for cell in cells if cell.verdict("chosen") < 0]
    assert worse == ("alike", "labels", 5, (21, 300))
    assert f"those of 21 to 300 rows lose {100 * more.pop(worse):.0f} %" in section
    unclear = {
        ("spread 1.0", "numbers", 5, (6, 20)): "sites of 6 to 20 rows among five",
        ("a fifth contradicts", "numbers", 12, (2, 5)): "sites of 2 to 5 rows among 12",
        ("a fifth contradicts", "numbers", 40, (6, 20)): "sites of 6 to 20 rows among 40",
    }
    assert {key for key, value in more.items() if value > 0.1} == unclear.keys()
    for key, words in unclear.items():
        assert f"{100 * more[key]:.0f} % at {words}" in " ".join(section.split())


def test_page_says_what_more_sites_and_other_constants_change():
    cells = choice.cells_of(RECORDED)
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    gains = []
    for sites in DRAWS:
        some = [cell for cell in cells if cell.sites == sites and cell.size == (6, 20)]
        gains.append(-100 * choice.summary(some, ["chosen"])["chosen"]["more"])
    assert "gain {:.0f} % among 5 sites, {:.0f} % among 12 and {:.0f} % among 40".format(*gains) in page
    found = [choice.summary(cells, [name])[name] for name in ("chosen", *choice.variants())]
    means = [100 * one["more"] for one in found]
    assert f"between {max(means):.1f} % and {min(means):.1f} %, against {means[0]:.1f} %" in page
    fewest, usual = min(one["better"] for one in found), found[0]["better"]
    assert f"only {fewest} cells are better, not {usual}" in page


# Cells with known answers.


def _cell(common: list[float], own: list[float], chosen: list[float]) -> Cell:
    losses = {"common": common, "own": own, "chosen": chosen}
    return Cell("alike", "numbers", 5, (2, 5), {name: np.array(values) for name, values in losses.items()})


@pytest.mark.parametrize(
    ("chosen", "verdict", "more"),
    [
        ([0.8, 0.9, 0.7], 1, -0.2),
        ([1.2, 1.3, 1.1], -1, 0.2),
        ([1.0, 1.0, 1.0], 0, 0.0),
        ([0.2, 1.9, 0.8], 0, -1 / 30),  # of sites that disagree nothing is known
        ([1.4, 1.5, 1.3], -1, 0.4),  # better than the own model is not enough
    ],
)
@pytest.mark.quick_cases("all")
def test_cell_compares_with_the_better_of_common_and_own_beyond_two_standard_errors(chosen, verdict, more):
    cell = _cell(common=[1.0, 1.0, 1.0], own=[2.0, 0.5, 2.0], chosen=chosen)
    assert cell.verdict("chosen") == verdict
    assert cell.against_better("chosen") == pytest.approx(more)


def test_cell_of_two_sites_has_no_verdict():
    assert _cell([1.0, 1.0], [2.0, 2.0], [0.1, 0.11]).verdict("chosen") == 0


def test_summary_counts_cells_and_averages_what_they_lose():
    cells = [_cell([1.0] * 3, [2.0] * 3, [0.8, 0.9, 0.7]), _cell([2.0] * 3, [1.0] * 3, [1.1, 1.2, 1.0])]
    found = choice.summary(cells, ["chosen", "common"])
    assert (found["cells"], found["sites"]) == (2, 6)
    assert found["chosen"] == {"more": pytest.approx(-0.05), "worse": 0, "better": 1}
    assert found["common"] == {"more": pytest.approx(0.5), "worse": 1, "better": 0}


# Populations and runs.


def test_populations_have_sites_of_all_sizes_and_the_shares_that_they_state():
    usual = POPULATIONS["alike"].sites(40, True, 0)
    assert set(Counter(len(site.train[1]) for site in usual)) == set(SIZES)
    assert set(Counter(len(site.train[1]) for site in usual).values()) <= {2, 3}
    differing = {
        "spread 1.0": 40,
        "half alike, half spread 0.7": 20,
        "a fifth contradicts": 8,
    }
    for name, expected in differing.items():
        sites = POPULATIONS[name].sites(40, True, 0)
        truths = [np.linalg.lstsq(*map(np.asarray, site.test), rcond=None)[0] for site in (*usual[:1], *sites)]
        assert sum(float(np.abs(truth - truths[0]).max()) > 0.3 for truth in truths[1:]) == pytest.approx(
            expected, abs=1
        )


def test_constants_are_changed_for_a_while_only():
    before = {name: constant.present for name, constant in CONSTANTS.items()}
    assert all(constant.present in constant.values for constant in CONSTANTS.values())
    with choice.constants(dict.fromkeys(CONSTANTS, 99)):
        assert {constant.present for constant in CONSTANTS.values()} == {99}
    with pytest.raises(KeyError), choice.constants({next(iter(CONSTANTS)): 99}):
        raise KeyError
    assert {name: constant.present for name, constant in CONSTANTS.items()} == before


def test_choice_is_made_again_among_the_same_candidates():
    tried, outcome = choice.tried_by(choice.problem_of(choice.sites_of((20, 8, 4), 1.0)).prepared, SHORT, 3)
    assert tried.losses() == pytest.approx(outcome.values("personal", "loss"), rel=1e-5)
    (common,) = {name for name in CONSTANTS if "common" in name}
    assert tried.losses({common: 1e9}) == pytest.approx(outcome.values("common", "loss"), rel=1e-3)
    assert tried.losses({common: 0.1}) != pytest.approx(tried.losses(), rel=1e-3)


def test_bed_in_miniature_is_written_and_shown(tmp_path):
    table = choice.run(tmp_path / "bed.json", ["a fifth contradicts"], {5: 1}, rounds=3, method=SHORT)
    assert json.loads((tmp_path / "bed.json").read_text()) == table
    assert [row for row in choice.shown(table).splitlines() if row.startswith("| a fifth contradicts, ")]
