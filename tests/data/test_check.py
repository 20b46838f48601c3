"""`fairmesh data check`: what looks wrong with tables and other data, in words."""

import contextlib
import json

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.data.check import check_sites, check_table
from tests.data.test_own_data import write_images
from tests.data.test_preprocessing import write
from tests.refusals import missing_from


def rows(count: int = 300) -> dict:
    generator = np.random.default_rng(0)
    site = np.array(["north", "south", "east"])[np.arange(count) % 3]
    mass = generator.normal(70, 10, count).round(6)
    ward = generator.choice(["a", "b"], count)
    ill = np.where(mass + generator.normal(0, 9, count) > 70, "y", "n")
    return {"mass": mass, "ward": ward, "site": site, "ill": ill}


def found(tmp_path, columns, **settings) -> dict[str, str]:
    """What is found, by its kind."""
    data = fm.data.Table(write(tmp_path / "t.csv", columns), "ill", **({"site": "site"} | settings))
    findings = [*check_table(data)]
    with contextlib.suppress(fm.BadInput):
        findings += check_sites(data.sites())
    return {one.what: f"{one.severity}: {one.sentence}" for one in findings}


def changed(name: str, values) -> dict:
    return rows() | {name: values}


def at(site: str, there, name: str) -> dict:
    """The table with other values of a column at one site."""
    columns = rows()
    return columns | {name: np.where(columns["site"] == site, there, columns[name])}


def repeated() -> dict:
    columns = rows()
    return {name: np.concatenate([values, values[:30]]) for name, values in columns.items()}


CASES = {
    "constant column": (changed("ward", ["a"] * 300), ["warning", "'ward'", "exclude"]),
    "empty column": (changed("ward", [""] * 300), ["warning", "'ward'"]),
    "identifier": (changed("ward", [f"P{i}" for i in range(300)]), ["error", "'ward'", "exclude"]),
    "leak": (changed("ward", np.where(rows()["ill"] == "y", "died", "home")), ["error", "'ward'", "'ill'"]),
    "unusable column": (changed("mass", ["heavy", *rows()["mass"][1:]]), ["error", "row 1", "'heavy'"]),
    "missing values differ": (
        at("south", np.where(np.arange(300) < 200, "", rows()["mass"].astype(str)), "mass"),
        ["warning", "'mass'", "67% ", "south"],
    ),
    "no values at sites": (at("south", "", "mass"), ["warning", "'mass'", "south", "missing"]),
    "marker": (changed("mass", np.where(np.arange(300) % 7, rows()["mass"], -9)), ["'mass'", "-9", "missing_values"]),
    "categories differ": (at("east", np.char.add("ward ", rows()["ward"]), "ward"), ["'ward'", "east", "ward a"]),
    "kinds differ": (
        at("east", np.where(rows()["ward"] == "a", "2024-01-01", "2024-01-02"), "ward"), ["east", "date"],
    ),
    "test rows in training": (repeated(), ["error", "test rows"]),
    "duplicate rows": (repeated(), ["warning", "training rows"]),
    "few test rows": ({k: v[:60] for k, v in rows().items()}, ["warning", "(4)", "test_share"]),
    "single class": (at("east", "y", "ill"), ["east", "one class"]),
    "rare class": (changed("ill", ["y"] * 10 + ["n"] * 290), ["warning", "class 'y'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_check_names_what_is_wrong_with_a_table(case, tmp_path):
    columns, names = CASES[case]
    said = found(tmp_path, columns)
    assert case in said, said
    assert [name for name in names if name not in said[case]] == []


def test_check_finds_nothing_wrong_with_a_good_table(tmp_path):
    assert found(tmp_path, rows(600)) == {}


def test_check_takes_no_single_value_at_a_site_for_another_kind(tmp_path):
    sex = np.where(rows(600)["ward"] == "a", "f", "m")
    columns = rows(600) | {"ward": np.where(rows(600)["site"] == "east", "f", sex)}  # alone, "f" may mean "no"
    assert "kinds differ" not in found(tmp_path, columns)


def test_check_finds_a_number_that_tells_the_number_to_predict(tmp_path):
    mass = rows()["mass"]
    columns = rows() | {"grams": 1000 * mass, "ill": mass}
    data = fm.data.Table(write(tmp_path / "t.csv", columns), "ill", "site", predict="numbers")
    assert [one.what for one in check_table(data)] == ["leak", "leak"]


@pytest.mark.parametrize("given", ["table", "experiment"])
def test_check_says_an_identifier_once_and_looks_at_the_rest_without_it(given, tmp_path, called):
    columns = rows() | {"patient": np.array([f"P{i}" for i in range(300)]), "ill": np.array(["y"] * 10 + ["n"] * 290)}
    file, experiment = write(tmp_path / "t.csv", columns), tmp_path / "t.toml"
    experiment.write_text(f'data = {{ name = "table", file = "{file}", target = "ill", site = "site" }}\n')
    what = [file, "--target", "ill", "--site", "site"] if given == "table" else [experiment]
    code, out, _ = called("data", "check", *what, "--json")
    said = [finding["what"] for finding in json.loads(out)["findings"]]
    assert (code, said.count("identifier"), "rare class" in said) == (1, 1, True)


def test_check_takes_equal_rows_of_coarse_columns_for_chance_and_copies_for_errors(tmp_path):
    draw = np.random.default_rng(0)
    coarse = {
        "decade": draw.integers(3, 9, 600),
        "ward": draw.choice(list("abcd"), 600),
        "site": np.array(["north", "south"])[np.arange(600) % 2],
        "ill": draw.choice(["y", "n"], 600),
    }
    said = found(tmp_path, coarse)
    for kind in ("test rows in training", "same rows at sites"):
        assert said[kind].startswith("warning")
        assert "chance" in said[kind]
    assert not any(text.startswith("error") for text in said.values())
    mass = draw.normal(70, 10, 300).round(3)
    again = {name: np.tile(values[:300], 2) for name, values in coarse.items()} | {"mass": np.tile(mass, 2)}
    assert found(tmp_path, again)["test rows in training"].startswith("error")


def test_two_spellings_of_a_number_are_named_where_they_are_two_categories(tmp_path):
    grade = np.where(np.arange(300) % 2, "4.5", np.where(np.arange(300) % 3, "4.50", "5"))
    file = write(tmp_path / "t.csv", rows() | {"ward": grade})
    data = fm.data.Table(file, "ill", "site", types={"ward": "category"})
    said = {one.what: one.sentence for one in check_table(data)}
    assert missing_from(said["two spellings"], "'ward'", "'4.5'", "'4.50'") == []
    with pytest.warns(UserWarning, match=r"'ward'.*'4"):
        data.sites()
    labelled = fm.data.Table(write(tmp_path / "l.csv", rows() | {"ill": grade}), "ill", "site")
    assert "two spellings" in {one.what for one in check_table(labelled)}
    with pytest.warns(UserWarning, match="'ill'"):
        labelled.sites()


def test_check_finds_rows_of_one_site_at_another():
    inputs, labels = torch.randn(200, 3), torch.arange(200) % 2
    sites = [
        fm.Site((inputs[:80], labels[:80]), test=(inputs[100:140], labels[100:140]), name="a"),
        fm.Site((inputs[60:140], labels[60:140]), test=(inputs[140:180], labels[140:180]), name="b"),
    ]
    said = [(one.what, one.sentence) for one in check_sites(sites)]
    assert [what for what, _ in said] == ["same rows at sites", "test rows in training"]
    assert "20 training rows" in said[0][1]
    assert "40 of 40 test rows of a" in said[1][1]


def test_command_checks_a_table_an_experiment_and_images(tmp_path, called):
    columns = rows() | {"mass": np.where(rows()["site"] == "east", 1000, 1) * rows()["mass"]}
    file = write(tmp_path / "t.csv", columns)
    code, out, _ = called("data", "check", file, "--target", "ill", "--site", "site", "--json")
    table = json.loads(out)
    assert (code, table["sites"], table["errors"]) == (0, 3, 0)
    assert any("east" in one["sentence"] and "unit" in one["sentence"] for one in table["findings"])
    (tmp_path / "e.toml").write_text(
        f'[data]\nname = "table"\nfile = "{write(tmp_path / "r.csv", repeated())}"\ntarget = "ill"\nsite = "site"\n'
    )
    code, _, err = called("data", "check", tmp_path / "e.toml")
    assert (code, "error: " in err, "3 sites" in err) == (1, True, True)
    write_images(tmp_path / "scans")
    code, _, err = called("data", "check", tmp_path / "scans")
    assert (code, "lyon" in err) == (0, True)
    assert called("data", "check", file)[0] == 2  # no target
    assert called("data", "check", tmp_path / "no.csv", "--target", "y")[0] == 2
