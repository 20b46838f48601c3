"""Recorded rows compared with today's recipes, field by field."""

import copy
import json
from dataclasses import dataclass, field, replace

import pytest

import fairmesh as fm
from fairmesh.config.tables import to_table
from fairmesh.storage.strict_json import as_json
from reproduction.lines import described, describes, is_as_its_recipe, lines_of, was_run_as
from reproduction.recipes import RECIPES, rows_of
from reproduction.verdicts import RECORDED


@dataclass(frozen=True)
class Inner:
    size: int
    added: float = 0.5  # newer than the records below


@dataclass(frozen=True)
class Outer:
    inner: Inner
    rounds: int = 10
    added: tuple[int, ...] = field(default=())  # newer too


THING = Outer(Inner(3))


@pytest.mark.parametrize(
    ("table", "thing", "agrees"),
    [
        ({"inner": {"size": 3}, "rounds": 10}, THING, True),  # a new field has its default
        ({"inner": {"size": 3, "added": 0.5}, "rounds": 10, "added": []}, THING, True),  # nothing is new
        ({"inner": {"size": 4}, "rounds": 10}, THING, False),  # a recorded field differs
        ({"inner": {"size": 3, "added": 0.6}, "rounds": 10}, THING, False),
        ({"inner": {"size": 3}, "rounds": 11}, THING, False),
        ({"inner": {"size": 3, "removed": 1}, "rounds": 10}, THING, False),  # the class no longer knows a field
        ({"inner": {"size": 3}, "rounds": 10, "removed": None}, THING, False),
        ({"inner": {"size": 3}, "rounds": 10}, Outer(Inner(3, added=0.6)), False),  # a new field is not at its default
        ({"inner": {"size": 3}, "rounds": 10}, Outer(Inner(3), added=(1,)), False),
        ({"inner": {}, "rounds": 10}, THING, False),  # a field without a default is absent
        ({"inner": {"size": "three"}, "rounds": 10}, THING, False),
    ],
)
def test_describes_compares_the_recorded_fields_and_takes_defaults_for_the_others(table, thing, agrees):
    assert describes(table, thing) is agrees


def test_describes_takes_the_default_of_a_class_as_that_class_stores_it():
    """A default of 0.0 is stored as a schedule; members of a family are compared by name and fields."""
    weighting = fm.weighting.ShadowPrice()
    table = json.loads(as_json(to_table(weighting)))
    for name in [name for name in table if name != "name"]:
        assert describes({key: value for key, value in table.items() if key != name}, weighting), name
    assert not describes(table | {"name": "exact-maximum"}, weighting)


@pytest.fixture
def row():
    return next(row for row in rows_of("table2") if row.search)


@pytest.fixture
def line(row):
    return {"settings": copy.deepcopy(described(row))}


def test_was_run_as_accepts_a_line_that_lacks_fields_at_their_defaults(line, row):
    del line["settings"]["weight_decay"], line["settings"]["metrics"], line["settings"]["as_row"]
    del line["settings"]["algorithm"]["compressor"]["norms"]
    assert was_run_as(line, row)


def test_was_run_as_refuses_a_line_whose_recorded_field_differs(line, row):
    line["settings"]["algorithm"]["compressor"]["bits"] += 1
    assert not was_run_as(line, row)


def test_was_run_as_refuses_a_line_with_a_field_that_is_no_longer_known(line, row):
    line["settings"]["algorithm"]["vantage"] = 0.0
    assert not was_run_as(line, row)


def test_was_run_as_refuses_a_line_that_lacks_a_field_with_another_value_than_its_default(line, row):
    changed = replace(row, experiment=replace(row.experiment, weight_decay=0.1))
    del line["settings"]["weight_decay"]
    assert was_run_as(line, row)
    assert not was_run_as(line, changed)


@pytest.mark.parametrize(
    ("name", "value"),
    [("search", {"consensus_step": [0.1]}), ("search_rounds", 7), ("search_seeds", 1), ("as_row", "table2: other")],
)
def test_was_run_as_compares_how_a_row_was_searched(line, row, name, value):
    assert was_run_as(line, row)
    line["settings"][name] = value
    assert not was_run_as(line, row)


def test_was_run_as_compares_of_the_options_only_which_rounds_are_measured(line, row):
    options = row.experiment.options
    other = replace(
        row, experiment=replace(row.experiment, options=replace(options, count_bytes=not options.count_bytes))
    )
    assert was_run_as(line, other)
    line["settings"]["options"]["measure_every"] += 1
    assert not was_run_as(line, row)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "table4b"])
def test_recorded_lines_belong_to_the_recipes_of_today(recipe):
    lines = {(line["protocol"], line["row"]): line for line in lines_of(RECORDED, recipe)}
    for row in rows_of(recipe):
        if "COOS7" not in row.name:
            assert is_as_its_recipe(lines.pop((row.protocol, row.name))), row.label
    assert not lines, "recorded, but of no recipe"


def test_recorded_curves_have_the_settings_recorded_for_their_tables():
    lines = {
        (line["protocol"], f"{recipe}: {line['row']}"): line
        for recipe in RECIPES
        for line in lines_of(RECORDED, recipe)
    }
    for row in [row for recipe in ("figure2", "figure3") for row in rows_of(recipe)]:
        chosen = [lines[row.protocol, label]["search"]["chosen"] for label in (row.label, row.as_row)]
        assert chosen[0] == chosen[1], row.label
