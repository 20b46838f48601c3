"""A data contract refuses, with column, rows, value and remedy, what would mislead the model, and settles the rest."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.config.tables import from_table, to_table
from tests.data.test_own_data import write_images
from tests.refusals import missing_from, refused

ROWS = 60
ALONE = {"name": "even", "nodes": 1}
CONTRACT = fm.data.Contract(
    (
        fm.data.Column("age", "whole", unit="years", min=18, max=110, center=54.0, scale=20.0),
        fm.data.Column("creatinine", unit="mg/dl", min=0.2, max=15, center=1.0, scale=0.5),
    ),
    fm.data.Column("ill", "label", classes=("no", "yes")),
)


def rows(count: int = ROWS) -> dict[str, list[str]]:
    generator = np.random.default_rng(0)
    ages, levels = generator.integers(20, 90, count), generator.uniform(0.5, 2.5, count)
    return {
        "age": [str(age) for age in ages],
        "creatinine": [f"{level:.2f}" for level in levels],
        "ill": ["yes" if level > 1.4 else "no" for level in levels],
    }


def table(path: Path, columns: dict[str, list[str]]) -> fm.data.Table:
    lines = [",".join(columns), *(",".join(row) for row in zip(*columns.values()))]
    path.write_text("\n".join(lines) + "\n")
    return fm.data.Table(str(path), "ill", partition=fm.data.Even(1))


def changed(column: str, change) -> dict[str, list[str]]:
    found = rows()
    found[column] = [change(i, value) for i, value in enumerate(found[column])]
    return found


def with_value(column: str, row: int, value: str) -> dict[str, list[str]]:
    return changed(column, lambda i, given: value if i == row else given)


WRONG = {
    "another unit": (
        changed("creatinine", lambda i, value: str(float(value) * 88.4)),
        ["'creatinine'", "rows 1, 2, 3 and 57 more", "0.2 to 15 mg/dl", "another unit", "convert"],
    ),
    "one wrong value": (with_value("age", 6, "680"), ["'age'", "row 7", "680", "18 to 110 years", "correct"]),
    "another type": (with_value("age", 3, "50 y"), ["'age'", "row 4", "y'", "number"]),
    "no whole number": (with_value("age", 0, "35.5"), ["'age'", "row 1", "35.5", "whole"]),
    "a missing number": (
        changed("creatinine", lambda i, value: ["", "NA", "nan"][i] if i < 3 else value),
        ["'creatinine'", "rows 1, 2, 3", "missing", "fill"],
    ),
    "a missing label": (with_value("ill", 1, ""), ["'ill'", "row 2", "missing"]),
    "an unknown class": (
        changed("ill", lambda i, value: value.replace("yes", "Yes")),
        ["'ill'", "'Yes'", "['no', 'yes']"],
    ),
    "exchanged columns": (
        rows() | {"age": rows()["creatinine"], "creatinine": rows()["age"]},
        ["'age'", "whole numbers", "another column", "'creatinine'", "0.2 to 15 mg/dl"],
    ),
    "a renamed column": (
        {name.replace("creatinine", "kreatinin"): values for name, values in rows().items()},
        ["no column 'creatinine'", "did you mean 'kreatinin'", "rename"],
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_mistake_in_a_table_is_refused_by_column_rows_value_and_remedy(tmp_path, mistake):
    columns, names = WRONG[mistake]
    data = table(tmp_path / "rows.csv", columns)
    with refused("rows.csv", *names):
        CONTRACT.sites(data)


def test_columns_are_matched_by_name_and_others_are_not_used(tmp_path):
    given, other = rows(), {name: rows()[name] for name in ("ill", "creatinine", "age")}
    other["ward"] = ["A"] * ROWS
    one, two = (CONTRACT.sites(table(tmp_path / f"{k}.csv", columns))[0] for k, columns in enumerate((given, other)))
    assert one.train[0].equal(two.train[0])
    assert one.train[1].equal(two.train[1])


def test_model_sees_values_scaled_as_the_contract_says(tmp_path):
    assert from_table(fm.data.Contract, to_table(CONTRACT, defaults=False)) == CONTRACT
    data = table(tmp_path / "rows.csv", rows())
    (site,) = CONTRACT.sites(data)
    (raw,) = fm.data.Table(data.file, "ill", standardize=False, classes=("no", "yes"), partition=data.partition).sites()
    expected = (raw.train[0] - torch.tensor([54.0, 1.0])) / torch.tensor([20.0, 0.5])
    torch.testing.assert_close(site.train[0], expected)
    assert site.train[1].equal(raw.train[1])


def test_missing_value_is_filled_if_the_contract_says_with_what(tmp_path):
    columns = changed("creatinine", lambda i, value: "NA" if i % 2 else "1.50")
    filled = fm.data.Contract((fm.data.Column("creatinine", min=0.2, max=15, fill=3.0),), CONTRACT.target)
    (site,) = filled.sites(table(tmp_path / "rows.csv", columns))
    assert set(site.train[0].flatten().tolist()) == {1.5, 3.0}


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ({"classes": ["yes", "no"]}, ["data.classes", '["yes", "no"] here', '["no", "yes"]', "remove classes"]),
        ({"standardize": True}, ["data.standardize", "true here", "says false", "remove"]),
        ({"scale_target": True}, ["data.scale_target", "now false", "remove", "standardize in [contract]"]),
        ({"inputs": ["creatinine", "age"]}, ["data.inputs", '["age", "creatinine"]']),
        ({"predict": "numbers"}, ["data.predict", '"labels"']),
        ({"target": "age"}, ["data.target", '"ill"']),
    ],
)
def test_site_cannot_set_what_the_contract_says(setting, names):
    given = {"name": "table", "file": "rows.csv", "partition": ALONE}
    assert CONTRACT.settled(given)["classes"] == ["no", "yes"]
    with refused(*names):
        CONTRACT.settled({"name": "held-out", "data": given | setting})


def test_experiment_checks_its_data_also_inside_other_data(tmp_path):
    columns, names = WRONG["another unit"]
    for data in (table(tmp_path / "rows.csv", columns), fm.data.HeldOut(table(tmp_path / "rows.csv", columns))):
        with refused(*names):
            fm.Experiment(data, contract=CONTRACT).problem()
    right = fm.data.HeldOut(table(tmp_path / "rows.csv", rows()))
    assert fm.Experiment(right, contract=CONTRACT).problem().n == 1


def site(inputs, labels=(0, 1, 1), **parts) -> fm.Site:
    return fm.Site((np.asarray(inputs, np.float32), np.asarray(labels)), name="Lyon", **parts)


ARRAYS = {
    "another shape": (site(np.zeros((3, 4))), ["Lyon, training samples", "[4]", "[2, 2]", "resize"]),
    "another type": (fm.Site((np.zeros((3, 2, 2), np.uint8), np.arange(3) % 2)), ["uint8", "float32", "convert"]),
    "another range": (site(np.full((3, 2, 2), 200.0)), ["rows 1, 2, 3", "200", "0 to 1 grey", "unit"]),
    "a test sample": (
        site(np.zeros((3, 2, 2)), test=(np.full((1, 2, 2), -7.0, np.float32), np.array([0]))),
        ["test samples", "row 1", "-7"],
    ),
    "another class": (
        site(np.zeros((3, 2, 2)), (0, 2, 1)),
        ["target 'ill'", "row 2", "class number 2", "['no', 'yes']"],
    ),
    "numbers as targets": (site(np.zeros((3, 2, 2)), (0.5, 1.0, 0.0)), ["float64", "classes"]),
}


@pytest.mark.parametrize("mistake", ARRAYS)
def test_mistake_in_arrays_is_refused(mistake):
    given, names = ARRAYS[mistake]
    grey = fm.data.Arrays((2, 2), "float32", min=0, max=1, unit="grey")
    contract = fm.data.Contract(target=CONTRACT.target, inputs=grey)
    with refused(*names):
        contract.checked([given])
    contract.checked([site(np.full((3, 2, 2), 0.5))])


def test_rows_without_names_are_checked_and_scaled_by_position():
    shared = (np.array([[74.0, 1.5]], np.float32), np.array([1]))
    one, two = CONTRACT.checked([site([[54, 1.0], [34, 2.0], [94, 0.5]], test=shared)] * 2)
    assert one.train[0].tolist() == [[0, 0], [-1, 2], [2, -1]]
    assert one.test is two.test
    assert one.test[0].tolist() == [[1, 1]]
    with refused("Lyon", "column 'age'", "rows 1, 2, 3", "18 to 110"):
        CONTRACT.checked([site([[1.0, 54], [2.0, 34], [0.5, 94]])])
    with refused("[3]", "age, creatinine"):
        CONTRACT.checked([site([[1.0, 54, 3]] * 3)])


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"columns": [{"name": "a"}, {"name": "a"}]}, ["'a' twice"]),
        ({"columns": [{"name": "a", "min": 2, "max": 1}]}, ["'a'", "min = 2", "max = 1"]),
        ({"columns": [{"name": "a", "scale": 0}]}, ["'a'", "scale"]),
        ({"columns": [{"name": "a", "type": "label", "classes": ["x", "y"]}]}, ["'a'", "number"]),
        ({"target": {"name": "a", "type": "label"}}, ["'a'", "classes"]),
        ({"target": {"name": "a", "type": "label", "classes": ["x", "x"]}}, ["'x' twice"]),
        ({"columns": [{"name": "a", "standardize": True, "scale": 2}]}, ["'a'", "standardize"]),
        ({"target": {"name": "a", "standardize": True}}, ["'a'", "[contract]"]),
        ({"columns": [{"name": "a"}], "inputs": {"shape": [2]}}, ["not both"]),
        ({"inputs": {"dtype": "float23"}}, ["'float23'"]),
    ],
)
def test_contract_that_contradicts_itself_is_refused(fields, names):
    with refused(*names):
        from_table(fm.data.Contract, fields, "contract")


@pytest.fixture
def drafted(called, tmp_path):
    """Drafts a contract from a table, and returns what is printed and the experiment that has it."""

    def draft(columns):
        file = table(tmp_path / "rows.csv", columns).file
        code, out, err = called("data", "contract", file, "--target", "ill")
        assert (code, missing_from(err, "all sites will see")) == (0, [])
        (tmp_path / "trial.toml").write_text(
            f'[data]\nname = "table"\nfile = "{file}"\npartition = {{ name = "even", nodes = 1 }}\n{out}'
        )
        return out, fm.load_experiment(tmp_path / "trial.toml")

    return draft


def test_drafted_contract_fits_its_table_and_refuses_another_unit(drafted, called, tmp_path):
    out, read = drafted(with_value("age", 5, ""))
    assert [column.name for column in read.contract.columns] == ["age", "creatinine"]
    assert (read.contract.columns[0].type, read.contract.classes) == ("whole", ("no", "yes"))
    assert abs(float(read.problem().sites[0].train.inputs.mean())) < 0.3  # centred and scaled
    again = called("data", "contract", tmp_path / "trial.toml")[1]
    assert re.sub(r"(?m)^#.*\n", "", again) == re.sub(r"(?m)^#.*\n", "", out)
    for other in ("another unit", "exchanged columns"):
        table(tmp_path / "rows.csv", WRONG[other][0])
        with refused("'creatinine'"):
            read.problem()
    assert called("data", "contract", tmp_path / "rows.csv")[0] == 2


def test_drafted_contract_for_numbers_scales_the_target_which_has_no_scale_of_its_own(called, tmp_path):
    file = table(tmp_path / "rows.csv", rows()).file
    code, out, _ = called("data", "contract", file, "--target", "age", "--without", "ill", "--numbers")
    assert code == 0
    where = f'[data]\nname = "table"\nfile = "{file}"\npartition = {{ name = "even", nodes = 1 }}\n'
    (tmp_path / "trial.toml").write_text(where + out)
    read = fm.load_experiment(tmp_path / "trial.toml")
    target = read.problem().preprocessing.target
    assert read.contract.standardize
    assert target.center > 18
    assert target.scale > 1
    with refused("'age'", "scale", "standardize = true in [contract]"):
        fm.load_experiment(tmp_path / "trial.toml", ["contract.target.scale=17"])


@pytest.mark.parametrize("images", [False, True])
def test_drafted_contract_of_arrays_fits_them(images, called, tmp_path):
    path, data = tmp_path / "trial.toml", '{ name = "digits", nodes = 3 }'
    if images:
        write_images(tmp_path / "scans")
        data = f'{{ name = "image-folder", folder = "{tmp_path / "scans"}" }}'
    path.write_text(f"data = {data}\n")
    path.write_text(path.read_text() + called("data", "contract", path)[1])
    contract = fm.load_experiment(path).contract
    classes = ("benign", "tumour") if images else tuple("0123456789")
    assert (contract.inputs.shape, contract.classes) == ((8, 6) if images else (8, 8), classes)
    assert fm.load_experiment(path).problem().n == (2 if images else 3)


def test_draft_names_columns_that_cannot_be_inputs_and_leaves_them_out_if_asked(called, tmp_path):
    remarks = [f"came on day {k % 20}, " + "and was sent home, " * 15 for k in range(ROWS)]
    mixed = ["12" if k else "about 12" for k in range(ROWS)]
    extra = {"patient id": [f"P{k:03}" for k in range(ROWS)], "mixed": mixed, "empty": [""] * ROWS}
    extra["remark"] = [f'"{text}"' for text in remarks]
    file = table(tmp_path / "rows.csv", rows() | extra).file
    code, _, err = called("data", "contract", file, "--target", "ill")
    named = ["'patient id' has a different value in every row", "--without 'patient id'", "'mixed'", "'about 12'"]
    named += [
        "--without mixed",
        "'remark'",
        "characters",
        "--without remark",
        "'empty' has no values",
        "--without empty",
    ]
    assert (code, missing_from(err, *named)) == (2, [])
    assert "exclude" not in err  # which is a setting of an experiment file
    experiment = tmp_path / "trial.toml"
    types, even = '{ mixed = "category" }', '{ name = "even", nodes = 1 }'
    experiment.write_text(
        f'[data]\nname = "table"\nfile = "{file}"\ntarget = "ill"\npartition = {even}\ntypes = {types}\n'
    )
    leave_out = [part for name in extra if name != "mixed" for part in ("--without", name)]
    code, out, err = called("data", "contract", experiment, *leave_out)
    assert (code, missing_from(out, '["12", "about 12"]')) == (0, [])
    assert "the contract says" not in err  # there is none yet
    leave_out = [part for name in extra for part in ("--without", name)]
    code, out, err = called("data", "contract", file, "--target", "ill", *leave_out)
    assert (code, re.findall(r'(?m)^name = "(.*)"$', out)) == (0, ["age", "creatinine", "ill"])
    for name, reason in {"ill": "column to predict", "ages": "did you mean 'age'"}.items():
        code, _, err = called("data", "contract", file, "--target", "ill", "--without", name)
        assert (code, missing_from(err, f"--without {name}", reason)) == (2, [])


def test_draft_has_categories_yes_and_no_and_dates_which_the_model_sees_as_numbers(drafted):
    extra = {
        "ward": ["west" if k == 7 else "" if k == 9 else ["north", "south"][k % 2] for k in range(ROWS)],
        "smokes": ["yes" if k % 3 else "no" for k in range(ROWS)],
        "since": [f"2026-{1 + k % 12:02}-11" for k in range(ROWS)],
    }
    out, read = drafted(rows() | extra)
    assert missing_from(out, 'fewer than 5 rows of this table, and all sites will see them: ["west"]') == []
    kinds = {column.name: (column.type, column.classes, column.fill) for column in read.contract.columns}
    assert kinds["ward"] == ("category", ("north", "south", "west"), "mean")
    assert (kinds["smokes"], kinds["since"]) == (("yes-no", (), None), ("date", (), None))
    inputs = read.problem().sites[0].train.inputs
    assert inputs.shape[1] > 6
    assert float(inputs.abs().max()) < 5  # days are scaled


@pytest.mark.parametrize(
    ("name", "numbers"), [("row", range(7, 7 + ROWS)), ("patient_id", range(1000, 1000 + 3 * ROWS, 3))]
)
def test_draft_warns_of_numbers_that_look_like_identifiers(called, tmp_path, name, numbers):
    file = table(tmp_path / "rows.csv", {name: [str(k) for k in numbers]} | rows()).file
    code, out, err = called("data", "contract", file, "--target", "ill")
    assert (code, missing_from(err, f"'{name}'", "identifier", f"--without {name}")) == (0, [])
    assert (err.count("identifier"), out.count("looks like an identifier")) == (1, 1)
    assert "identifier" not in "".join(called("data", "contract", file, "--target", "ill", "--without", name)[1:])
