"""Tables with mixed columns: one preprocessing, fitted by sums over all sites, and what is refused."""

import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.sums import TableSums, fitted
from fairmesh.storage.run_folder import PREPROCESSING
from tests.refusals import refused


def write(path, columns) -> str:
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values()))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def clinic(rows: int = 120) -> dict:
    """A table of three hospitals with numbers, categories, yes and no, dates and missing values."""
    generator = np.random.default_rng(0)
    age = generator.integers(20, 90, rows).astype(str)
    age[::9] = ""
    ward = generator.choice(["north", "south", "east"], rows).astype(object)
    ward[::6] = "NA"
    ward[5] = "rare"
    smokes = generator.choice(["yes", "no"], rows)
    seen = [f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(rows)]
    where = np.array(["a", "b", "c"])[np.arange(rows) % 3]
    ill = np.where((smokes == "yes") ^ (generator.random(rows) < 0.1), "ill", "well")
    days = generator.normal(40, 12, rows).round(1)
    return {"age": age, "ward": ward, "smokes": smokes, "seen": seen, "days": days, "where": where, "ill": ill}


@pytest.fixture
def file(tmp_path) -> str:
    return write(tmp_path / "clinic.csv", clinic())


def table(file: str, **settings) -> fm.data.Table:
    return fm.data.Table(file, "ill", **({"site": "where"} | settings))


def made_of(sites) -> Preprocessing:
    (made,) = {site.table.preprocessing for site in sites}
    return made


def test_table_finds_numbers_categories_yes_no_and_dates_by_their_values(file):
    sites = table(file).sites()
    made = made_of(sites)
    kinds = {"age": "number", "ward": "category", "smokes": "yes-no", "seen": "date", "days": "number"}
    assert {column.name: column.kind for column in made.columns} == kinds
    assert made.inputs == (
        "age", "age missing", "ward = east", "ward = north", "ward = south", "ward = other", "ward missing",
        "smokes", "seen", "days",
    )  # fmt: skip
    assert made.classes == ("ill", "well")
    assert sites[0].train[0].shape[1] == len(made.inputs)


def test_preprocessing_uses_the_mean_and_spread_of_all_training_rows(file):
    sites, columns = table(file).sites(), clinic()
    rows = np.concatenate([site.table.rows["train"] for site in sites])
    made = {column.name: column for column in made_of(sites).columns}
    days = np.array(columns["days"], float)[rows]
    assert math.isclose(made["days"].center, days.mean(), rel_tol=1e-12)
    assert math.isclose(made["days"].scale, days.std(), rel_tol=1e-12)
    inputs = torch.cat([site.train[0] for site in sites]).double()
    k = made_of(sites).inputs.index("days")
    assert abs(float(inputs[:, k].mean())) < 1e-6
    age = np.array([float(x) for x in columns["age"][rows] if x])
    assert abs(made["age"].fill - age.mean()) < 0.1 * age.std()  # sites weigh by all their rows


def test_preprocessing_does_not_change_with_the_test_rows(file, tmp_path):
    sites = table(file).sites()
    columns = clinic()
    tests = np.concatenate([site.table.rows["test"] for site in sites])
    columns["days"][tests] = 1e6
    columns["age"][tests] = ""
    columns["ward"][tests] = "elsewhere"
    changed = table(write(tmp_path / "changed.csv", columns)).sites()
    assert made_of(changed) == made_of(sites)


def test_preprocessing_is_the_same_from_sums_in_any_order_and_through_json(file):
    sites = table(file).sites()
    sums = {site.name: TableSums.from_table(json.loads(json.dumps(site.table.sums().to_table()))) for site in sites}
    assert fitted(sums) == fitted(dict(reversed(sums.items()))) == made_of(sites)
    assert Preprocessing.from_json(made_of(sites).to_json()) == made_of(sites)


def test_site_tells_no_category_and_no_number_of_fewer_than_5_rows(tmp_path):
    columns = {
        "x": [*range(20)],
        "flag": [1, 1, 1, *[0] * 17],
        "kind": ["one"] * 3 + ["two"] * 17,
        "gap": [""] * 3 + [*range(17)],
        "few": ["1.5", "2.5", *[""] * 18],
        "y": [0, 1] * 10,
    }
    data = fm.data.Table(write(tmp_path / "t.csv", columns), "y", partition=fm.data.Even(1), test_share=0.05)
    (site,) = data.sites()
    told = site.table.sums().columns
    assert told["kind"].names == ("two",)
    assert (told["flag"].mean, told["flag"].squares) == (0.0, 0.0)
    assert (told["gap"].missing, told["few"].known) == (0, 0)
    assert told["x"].known == 19
    withheld = site.table.sums().withheld()
    assert all(not any(one) for one in withheld.columns.values())


def test_unknown_category_and_missing_value_have_inputs_of_their_own(file):
    made = made_of(table(file).sites())
    rows = {"age": ["", "50"], "ward": ["moon", None], "smokes": ["Yes", 0], "seen": ["2024-01-01"] * 2, "days": [1, 2]}
    inputs = dict(zip(made.inputs, made.transform(rows).T.tolist()))
    assert inputs["age missing"] == [1.0, 0.0]
    assert inputs["age"][0] == 0.0  # the mean
    assert inputs["ward = other"] == [1.0, 0.0]
    assert inputs["ward missing"] == [0.0, 1.0]
    assert inputs["smokes"][0] > inputs["smokes"][1]


def test_preprocessing_json_can_be_applied_by_its_own_description(file):
    """Follows `how` with the standard library, as a stranger would."""
    data = table(file)
    made = made_of(data.sites())
    columns, described = data.read(), json.loads(made.to_json())
    numbers = {"yes": 1.0, "no": 0.0}
    by_hand = []
    for i in range(30):
        row = []
        for column in described["columns"]:
            text = str(columns[column["name"]][i])
            missing = text in ("", "NA")
            if column["type"] == "category":
                known = [float(text == one) for one in column["classes"]]
                row += [*known, float(not sum(known) and not (missing and column["indicator"]))]
            else:
                if column["type"] == "date":
                    x = (np.datetime64(text) - np.datetime64("1970-01-01")).astype(float)
                else:
                    x = column["fill"] if missing else numbers.get(text) if text in numbers else float(text)
                row.append((x - column["center"]) / column["scale"])
            row += [float(missing)] if column["indicator"] else []
        by_hand.append(row)
    assert described["inputs"] == list(made.inputs)
    found = made.transform({name: values[:30] for name, values in reversed(columns.items())})  # in any order
    assert np.allclose(found, np.array(by_hand, np.float32), atol=1e-6)


def test_table_settings_say_otherwise(file):
    settings = {"exclude": ("seen",), "types": {"smokes": "category"}, "categories": {"ward": ("north", "south")}}
    settings |= {"fill": {"age": 50, "ward": "north"}, "standardize": False, "indicators": False}
    made = made_of(table(file, classes=("well", "ill"), **settings).sites())
    age, ward, smokes, _ = made.columns
    assert (age.fill, age.center, age.scale, age.indicator) == (50.0, 0.0, 1.0, False)
    assert (ward.classes, ward.fill) == (("north", "south"), "north")
    assert smokes.classes == ("no", "yes")
    assert made.classes == ("well", "ill")


def test_table_holds_out_validation_rows_for_keep_best(file):
    sites = table(file, validation_share=0.2).sites()
    for site in sites:
        train, test, validation = (set(site.table.rows[part].tolist()) for part in ("train", "test", "validation"))
        assert (len(train), len(test), len(validation)) == (24, 8, 8)
        assert len(train | test | validation) == 40
    experiment = fm.Experiment(
        table(file, validation_share=0.2), rounds=4, algorithm=fm.algorithms.DSGD(), options=fm.Options(keep_best=True)
    )
    assert fm.run(experiment).state.best is not None


def test_numbers_to_predict_are_learned_in_spreads_and_predicted_in_their_units(tmp_path):
    generator = np.random.default_rng(1)
    x = generator.normal(size=200).round(3)
    columns = {"x": x, "y": (5000 + 800 * x + generator.normal(0, 10, 200)).round(2), "s": [*"ab"] * 100}
    data = fm.data.Table(write(tmp_path / "t.csv", columns), "y", site="s", predict="numbers")
    error = fm.metrics.Metric(
        lambda outputs, targets: (outputs.flatten() - targets).abs().mean(), higher_is_better=False
    )
    experiment = fm.Experiment(data, rounds=150, algorithm=fm.algorithms.DSGD(primal_step=0.1), metrics={"mae": error})
    result = fm.run(experiment, out=tmp_path / "run")
    final = result.final[0]
    assert final["mae"]["worst"] < 60, "in the units of y"
    assert final["loss"]["worst"] < 0.01, "in spreads"
    target = Preprocessing.from_json((tmp_path / "run" / PREPROCESSING).read_text()).target
    assert (target.type, 600 < target.scale < 900) == ("number", True)
    assert result.problem.preprocessing.target == target


def test_run_folder_has_the_preprocessing_and_the_run_says_what_was_chosen(file, tmp_path):
    said = []
    result = fm.run(fm.Experiment(table(file), rounds=2), out=tmp_path / "run", announce=said.append)
    assert Preprocessing.from_json((tmp_path / "run" / PREPROCESSING).read_text()) == result.problem.preprocessing
    (words,) = [one for one in said if one.startswith("table")]
    for name in ("age", "ward", "east", "smokes (yes-no)", "seen (date)", "well"):
        assert name in words


def test_repeated_splits_have_the_same_inputs_also_if_a_category_is_rare_in_some(tmp_path):
    columns = clinic()
    columns["ward"][np.flatnonzero(columns["where"] == "b")[:6]] = "rare"
    columns["age"] = np.arange(120).astype(str)
    columns["age"][np.flatnonzero(columns["where"] == "b")[:6]] = ""
    data = table(write(tmp_path / "t.csv", columns))
    widths = {made_of(data.resplit(k).sites()).inputs for k in range(8)}
    assert len(widths) > 1, "the test needs splits that differ"
    problem = fm.Experiment(data, splits=8).problem()
    (inputs,) = {one.preprocessing.inputs for one in problem.every_split}
    assert {"ward = rare", "age missing"} <= set(inputs)
    assert len(problem.every_split) == 8


def spoilt(name: str, values) -> dict:
    return clinic() | {name: values}


BAD = {
    "mixed": (spoilt("days", ["7", "tall", *map(str, range(118))]), {}, ["row 2", "'days'", "'tall'", "119", "types"]),
    "decimal commas": (spoilt("days", ['"1,5"'] * 120), {}, ["row 1", "'days'", "'1,5'", "point"]),
    "some commas": (spoilt("days", ["1.5", *['"1,5"'] * 119]), {}, ["row 2", "'days'", "'1,5'", "point"]),
    "thousands": (spoilt("days", ['"1,234.5"'] * 120), {}, ["row 1", "'days'", "point"]),
    "unit": (spoilt("days", [f"{i} mg" for i in range(120)]), {}, ["row 1", "'days'", "'0 mg'", "unit"]),
    "other dates": (spoilt("seen", [f"{1 + i % 28}.3.2024" for i in range(120)]), {}, ["'seen'", "2026-11-30"]),
    "identifiers": (spoilt("ward", [f"P{i:03d}x" for i in range(120)]), {}, ["'ward'", "120", "exclude"]),
    "infinite": (spoilt("days", ["inf", *range(119)]), {}, ["row 1", "'days'", "'inf'"]),
    "unknown label": (clinic(), {"classes": ("ill", "fit")}, ["'ill'", "rows", "'well'", "classes"]),
    "no column": (clinic(), {"inputs": ("age", "wards")}, ["'wards'", "ward"]),
    "excluded target": (clinic(), {"exclude": ("ill",)}, ["exclude", "'ill'"]),
    "images": (clinic(), {"partition": fm.data.Instrument(2)}, ["Instrument", "table"]),
    "wrong type": (clinic(), {"types": {"ward": "date"}}, ["'ward'", "2026-11-30", "row"]),
    "validation": (clinic(), {"validation_share": 0.9}, ["validation_share"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_table_that_is_not_understood_is_refused_with_column_row_and_remedy(case, tmp_path):
    columns, settings, names = BAD[case]
    with refused(*names):
        table(write(tmp_path / "t.csv", columns), **settings).sites()


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"a;b\n1;2\n", ["semicolons", "commas"]),
        (b"a\tb\n1\t2\n", ["tabs"]),
        (b"a,a\n1,2\n", ["'a'", "rename"]),
        (b"a,,b\n1,2,3\n", ["column 2"]),
        (b"a,b\n1,2,5\n", ["row 1", "3 values", "comma"]),
        ("ä,b\n1,2\n".encode("latin-1"), ["UTF-8"]),
    ],
)
def test_file_that_is_no_table_is_refused_with_the_reason(content, names, tmp_path):
    (tmp_path / "t.csv").write_bytes(content)
    with refused("t.csv", *names):
        fm.data.read_table(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfa,b\n1,2\n")  # a byte order mark
    assert list(fm.data.read_table(tmp_path / "t.csv")) == ["a", "b"]


def test_tables_of_sites_that_do_not_fit_together_are_refused_by_name(file, tmp_path):
    def sums(name: str, columns, **settings) -> TableSums:
        path = write(tmp_path / f"{name}.csv", {key: values for key, values in columns.items() if key != "where"})
        (site,) = fm.data.Table(path, "ill", partition=fm.data.Even(1), **settings).sites()
        return site.table.sums()

    north, columns = sums("north", clinic()), clinic()
    without = {key: values for key, values in columns.items() if key != "age"}
    renamed = {key.upper(): values for key, values in without.items() if key not in ("where", "ill")}
    for south, names in (
        (sums("south", without | {"Age": columns["age"]}), ["'age'", "'Age'", "south", "north"]),
        (sums("south", {f"{key} of 2024": v for key, v in renamed.items()} | {"ill": columns["ill"]}), ["in common"]),
        (sums("south", columns | {"ward": np.arange(120)}), ["'ward'", '"category" at north', '"number" at south']),
        (sums("south", columns, standardize=False), ["'age'", "settings", "south"]),
        (sums("south", columns, classes=("ill", "well")), ["classes", "north", "south"]),
    ):
        with refused(*names) as caught:
            fitted({"north": north, "south": south})
        assert sorted(caught.value.sites) == ["north", "south"], "of two, either may be wrong"
    with refused("'age'", "south has no", "north", "impute"):
        complete = columns | {"age": np.arange(120), "ward": ["north", "south"] * 60}
        short = {key: values for key, values in complete.items() if key != "age"}
        fitted({"north": sums("north", complete, missing="refuse"), "south": sums("south", short, missing="refuse")})


def test_contract_may_have_categories_and_scale_by_what_all_sites_have(file):
    columns = (
        fm.data.Column("age", "whole", min=18, max=110, fill="mean"),
        fm.data.Column("ward", "category", classes=("north", "south", "east", "rare"), fill="mean"),
        fm.data.Column("smokes", "yes-no"),
        fm.data.Column("days", unit="days", center=40.0, scale=10.0),
    )
    target = fm.data.Column("ill", "label", classes=("well", "ill"))
    contract = fm.data.Contract(columns, target, standardize=True)
    data = fm.data.Table(file, "ill", site="where", classes=("well", "ill"), inputs=tuple(c.name for c in columns))
    made = made_of(contract.sites(data))
    assert [c.name for c in made.columns] == ["age", "ward", "smokes", "days"]
    assert (made.columns[3].center, made.columns[3].scale) == (40.0, 10.0)
    assert made.columns[0].center == made.columns[0].fill > 0
    assert made.columns[1].classes == ("north", "south", "east", "rare")
    with refused("'ward'", "'rare'", "categories", "row 6"):
        fm.data.Contract((fm.data.Column("ward", "category", classes=("north", "south", "east"), fill="mean"),)).sites(
            fm.data.Table(file, "ill", site="where", inputs=("ward",), standardize=False)
        )
    with refused("'ward'", "fill", "classes"):
        fm.data.Contract((fm.data.Column("ward", "category", classes=("north",), fill="west"),))
    with refused("'age'", "mean", "arrays"):
        contract.checked([fm.Site((torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64)))])


def test_example_goes_from_a_file_with_gaps_to_predictions(tmp_path, capsys):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "clinic_tables.py"))
    example["main"](tmp_path)
    said = capsys.readouterr().out
    worst = float(said.split("worst clinic: ")[1].split()[0])
    labels = said.split("first new patients: ")[1].strip().split(", ")
    assert worst > 0.55
    assert (len(labels), set(labels) <= {"ill", "well"}) == (5, True)


def test_column_of_a_contract_may_be_scaled_and_marked_alone(file):
    age = fm.data.Column("age", fill="mean", standardize=True, indicator=True)
    contract = fm.data.Contract((age, fm.data.Column("days")), fm.data.Column("ill", "label", classes=("well", "ill")))
    made = made_of(contract.sites(fm.data.Table(file, "ill", site="where", indicators=False)))
    assert made.inputs == ("age", "age missing", "days")
    assert ([column.has_scale for column in made.columns], made.open) == ([True, False], False)
