"""Tables as hospitals have them: a file per site with columns of its own, marks for missing values, 4 and 4.0."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import fairmesh as fm
from fairmesh.data.check import check_table
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.sums import Misfit, Sums, TableSums, columns_of_two_sites, fitted
from fairmesh.mesh.announcements import KINDS
from fairmesh.mesh.enrol.agreement import own_site
from fairmesh.mesh.node.site_statistics import in_common
from tests.data.test_preprocessing import write
from tests.refusals import missing_from, refused


def hospital(seed: int, rows: int = 40, **more) -> dict:
    draw = np.random.default_rng(seed)
    age = draw.integers(20, 90, rows)
    ill = np.where(age + draw.normal(0, 9, rows) > 55, "yes", "no")
    return {"age": age, "bmi": draw.normal(27, 4, rows).round(2), "ill": ill} | more


def folder_of(tmp_path, **hospitals) -> str:
    """A folder with a file per site, and its pattern."""
    for name, columns in hospitals.items():
        (tmp_path / "hospitals").mkdir(exist_ok=True)
        write(tmp_path / "hospitals" / f"{name}.csv", columns)
    return str(tmp_path / "hospitals" / "*.csv")


def without(columns: dict, *names: str) -> dict:
    return {key: values for key, values in columns.items() if key not in names}


@pytest.fixture
def files(tmp_path) -> str:
    """Lyon does not measure bmi, and Nice has a column that no other has."""
    return folder_of(
        tmp_path, lyon=without(hospital(0), "bmi"), nice=hospital(1, crp=np.arange(40) / 7), paris=hospital(2)
    )


def test_table_of_a_file_per_site_has_the_union_of_columns_and_marks_those_that_a_file_lacks(files):
    lyon, nice, paris = fm.data.Table(files, target="ill").sites()
    assert [lyon.name, nice.name, paris.name] == ["lyon", "nice", "paris"]
    made = lyon.table.preprocessing
    assert made.inputs == ("age", "bmi", "bmi missing", "crp", "crp missing")
    assert (lyon.train[0][:, 1:3] == 0).logical_or(lyon.train[0][:, 1:3] == 1).all(), "filled by the mean, and marked"
    assert [float(site.train[0][:, 2].mean()) for site in (lyon, nice, paris)] == [1, 0, 0]
    assert [float(site.train[0][:, 4].mean()) for site in (lyon, nice, paris)] == [1, 0, 1]


def test_folder_list_and_table_of_paths_give_the_same_sites(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [f"hospitals/{name}.csv" for name in ("lyon", "nice", "paris")]
    expected = fm.data.Table(files, "ill").sites()
    for file in ("hospitals", "hospitals/*.csv", paths, dict(zip(["lyon", "nice", "paris"], paths))):
        sites = fm.data.Table(file, "ill").sites()
        assert [site.name for site in sites] == ["lyon", "nice", "paris"]
        assert all((a.train[0] == b.train[0]).all() for a, b in zip(sites, expected))
    experiment = tmp_path / "t.toml"
    experiment.write_text('data = { name = "table", file = { a = "hospitals/nice.csv" }, target = "ill" }\n')
    assert [site.name for site in fm.load_experiment(experiment).data.sites()] == ["a"]


def test_files_of_csv_and_parquet_and_a_site_column_within_them(files, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = hospital(3, grade=np.array([4.0, np.nan] * 20), ward=np.array([1, 2] * 20))
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table(columns), tmp_path / "hospitals" / "oslo.parquet")
    write(tmp_path / "hospitals" / "rome.csv", hospital(4, grade=[4, 5] * 20, ward=["1.0", "2.0"] * 20))
    kinds = {"grade": "category", "ward": "category"}
    sites = fm.data.Table(str(tmp_path / "hospitals"), "ill", types=kinds).sites()
    made = {column.name: column for column in sites[0].table.preprocessing.columns}
    assert (made["grade"].classes, made["ward"].classes) == (("4", "5"), ("1", "2"))
    both = folder_of(tmp_path / "hospitals", a=hospital(5, where=["x", "y"] * 20), b=hospital(6, where=["y", "z"] * 20))
    assert [site.name for site in fm.data.Table(both, "ill", site="where").sites()] == ["x", "y", "z"]


REFUSED = {
    "no match": (lambda f: {}, ["no file matches", "*.csv"]),
    "no column in common": (lambda f: {"a": hospital(0), "b": {"crp": range(9), "ill": list("yn") * 4 + ["y"]}},
                            ["b.csv", "in common", "a.csv", "age"]),
    "the first apart": (lambda f: {"a": {"crp": range(9), "ill": list("yn") * 4 + ["y"]}, "b": hospital(0),
                                   "c": hospital(1)}, ["a.csv has no input in common with", "b.csv, which has age"]),
    "no target": (lambda f: {"a": hospital(0), "b": without(hospital(1), "ill")}, ["b.csv", "'ill'"]),
    "case": (lambda f: {"a": hospital(0), "b": without(hospital(1), "age") | {"Age ": range(40)}},
             ["a.csv", "'age'", "b.csv", "'Age'", "same way"]),
    "kind": (lambda f: {"a": hospital(0), "b": hospital(1) | {"bmi": ["high", "low"] * 20}},
             ["'bmi'", "number in", "a.csv", "category in", "b.csv", "types", "exclude"]),
    "no value of the target": (lambda f: {"a": hospital(0), "b": hospital(1) | {"ill": ["yes", ""] * 20}},
                               ["b.csv", "row 2", "'ill'"]),
    "a value": (lambda f: {"a": hospital(0), "b": hospital(1) | {"bmi": ["1e99"] * 40}}, ["b.csv", "row 1", "'bmi'"]),
}  # fmt: skip


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_fit_together_are_refused_by_file_and_column(case, tmp_path):
    make, names = REFUSED[case]
    folder_of(tmp_path, **make(None))
    with refused(*names):
        fm.data.Table(str(tmp_path / "hospitals" / "*.csv"), "ill").sites()


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize(
    ("names", "apart"),
    [
        (["zzz", "age", "age"], "a"),
        (["age", "age", "zzz"], "c"),
        (["zzz", "age bmi", "bmi crp", "crp"], "a"),
        (["age", "bmi", "crp"], "abc"),
        (["age", "age", "zzz", "zzz", "crp"], "abcde"),
        (["age", "age crp", "crp"], ""),
        (["age"], ""),
    ],
)
def test_sites_outside_the_largest_group_with_common_columns_are_named_in_any_order(names, apart):
    def told(*columns: str) -> TableSums:
        made = tuple(fm.data.Column(name, fill="mean") for name in columns)
        plan = Preprocessing(made, fm.data.Column("ill", "label", classes=("no", "yes")))
        return TableSums(plan, dict.fromkeys(columns, Sums()), Sums())

    sites = {site: told(*columns.split()) for site, columns in zip("abcde", names)}
    with refused("in common", *apart, error=Misfit) if apart else contextlib.nullcontext() as caught:
        fitted(sites)
    assert not apart or caught.value.sites == list(apart)


def test_site_that_lacks_a_column_predicts_on_its_own_file(files, tmp_path):
    experiment = fm.Experiment(fm.data.Table(files, "ill"), algorithm=fm.algorithms.DSGD(0.5), rounds=3)
    model = fm.inference.TrainedModel.of(fm.run(experiment))
    found = fm.predict(model, tmp_path / "hospitals" / "lyon.csv")
    (note,) = found.notes
    assert (len(found.labels), missing_from(note, "lyon.csv", "'bmi'", "'crp'")) == (40, [])
    empty = {name: [""] * 40 for name in ("bmi", "crp")} | fm.data.read_table(tmp_path / "hospitals" / "lyon.csv")
    np.testing.assert_array_equal(found.values, fm.predict(model, empty).values)
    required = tuple(replace(c, fill=None) if c.name == "bmi" else c for c in model.preprocessing.columns)
    with refused("lyon.csv", "'bmi'"):
        fm.predict(
            replace(model, preprocessing=replace(model.preprocessing, columns=required)),
            tmp_path / "hospitals" / "lyon.csv",
        )


def test_files_that_cannot_be_sites_are_refused(files, tmp_path):
    again = tmp_path / "copy" / "lyon.csv"
    again.parent.mkdir()
    again.write_text("age,ill\n")
    with refused("lyon", "copy", "file = {"):
        fm.data.Table((str(tmp_path / "hospitals" / "lyon.csv"), str(again)), "ill").sites()
    with refused("copy/lyon.csv", "rows"):
        fm.data.Table({"a": str(tmp_path / "hospitals" / "lyon.csv"), "b": str(again)}, "ill").sites()
    with refused("no folder", "absent"):
        fm.data.Table("absent", "ill").sites()
    with refused("lyon.csv", "'bmi'", "impute"):
        fm.data.Table(files, "ill", missing="refuse").sites()


# Marks for missing values


def marked(tmp_path, **settings) -> fm.data.Table:
    age = np.where(np.arange(40) % 4, hospital(0)["age"].astype(str), "?")
    bmi = np.where(np.arange(40) % 5, hospital(0)["bmi"].astype(str), "-9.0")
    change = np.where(np.arange(40) % 5, hospital(0)["bmi"].astype(str), "-9")
    ward = np.where(np.arange(40) % 3, "north", "?")
    columns = hospital(0) | {"age": age, "bmi": bmi, "change": change, "ward": ward}
    return fm.data.Table(write(tmp_path / "m.csv", columns), "ill", partition=fm.data.Even(1), **settings)


def test_marks_stand_for_missing_values_in_their_columns_and_are_values_in_others(tmp_path):
    data = marked(tmp_path, missing_values={"*": ["?"], "bmi": [-9]})
    (site,) = data.sites()
    made = site.table.preprocessing
    assert made.inputs == (
        "age", "age missing", "bmi", "bmi missing", "change", "ward = north", "ward = other", "ward missing",
    )  # fmt: skip
    assert site.table.columns["bmi"][[0, 5, 10]].tolist() != [-9] * 3
    assert site.table.columns["change"].min() == -9
    for text in ("-9", "-9.00", "-9e0", "?", "NA"):  # new rows are read in the same way, also after the run
        same = fm.data.Preprocessing.from_json(made.to_json())
        row = same.transform({"age": ["50"], "bmi": [text], "change": ["-9"], "ward": ["?"]})
        assert row[0, [3, 7]].tolist() == [1, 1]
    (all_of_them,) = marked(tmp_path, missing_values=("?", "-9")).sites()
    assert "change missing" in all_of_them.table.preprocessing.inputs


def test_error_about_a_text_among_numbers_names_the_setting_that_mends_it(tmp_path):
    with refused("'age'", "'?'", 'missing_values = { "age" = ["?"] }'):
        marked(tmp_path).sites()
    assert marked(tmp_path, missing_values={"age": ["?"]}).sites()
    said = {one.what: one.sentence for one in check_table(marked(tmp_path, missing_values={"age": ["?"]}))}
    assert missing_from(said["marker"], "'change'", "-9", 'missing_values = { "change" = ["-9"] }') == []
    with refused("'shoe'"):
        marked(tmp_path, missing_values={"shoe": ["?"]}).sites()
    with refused("'ward'", "'north'", "missing"):
        marked(tmp_path, categories={"ward": ("north",)}, missing_values=("north",))
    with refused("'ill'", "'no'", "missing"):
        marked(tmp_path, classes=("no", "yes"), missing_values={"ill": ["no"]})


@pytest.mark.parametrize(("values", "warned"), [
    ([*range(20, 90), 999, 999, 999], "999"), ([*range(5, 70), -9, -9, -9], "-9"), ([0, 1] * 20 + [9] * 3, "9"),
    ([*range(20, 90), 99, 99, 99], ""), ([*range(-30, 30), -9, -9, -9], ""), ([-1, 1] * 20, ""), ([1, 9] * 20, ""),
])  # fmt: skip
@pytest.mark.quick_cases("all")
def test_repeated_nines_far_from_the_others_are_called_marks(values, warned, tmp_path):
    columns = {"x": values, "z": range(len(values)), "ill": ["y", "n", *"y" * (len(values) - 2)]}
    data = fm.data.Table(write(tmp_path / "t.csv", columns), "ill", partition=fm.data.Even(1))
    said = [one.sentence for one in check_table(data) if one.what == "marker"]
    assert [f"is {warned} in" in one for one in said] == [True] * bool(warned)


def test_contract_says_the_marks_of_a_column_and_a_site_those_of_its_own_file(tmp_path):
    columns = (
        fm.data.Column("age", "whole", min=18, max=110, fill=50.0, missing_values=("?",)),
        fm.data.Column("bmi", min=5, max=80, fill="mean"),
    )
    contract = fm.data.Contract(columns, fm.data.Column("ill", "label", classes=("no", "yes")))
    with refused("'bmi'", "-9"):
        contract.sites(marked(tmp_path))
    (site,) = contract.sites(marked(tmp_path, missing_values={"bmi": ["-9"]}))
    made = site.table.preprocessing
    assert [column.missing_values for column in made.columns] == [("?",), ("-9",)]
    told = site.table.sums().to_table()
    assert "missing_values" not in json.dumps(told)
    assert KINDS["table"].fields["sums"](told)
    told["plan"]["columns"][0]["missing_values"] = ["50"]
    assert not KINDS["table"].fields["sums"](told), "one site could make values of others missing"


def test_column_that_a_file_lacks_is_missing_if_the_contract_has_a_fill_and_refused_if_it_was_mistyped(tmp_path):
    age, bmi = fm.data.Column("age", fill=50.0), fm.data.Column("bmi", fill=27.0)
    ill = fm.data.Column("ill", "label", classes=("no", "yes"))
    files = folder_of(tmp_path, lyon=without(hospital(0), "bmi"), paris=hospital(1))
    lyon, _ = fm.data.Contract((age, bmi), ill).sites(fm.data.Table(files, "ill"))
    assert (lyon.train[0][:, 1] == 27).all()
    (alone,) = fm.data.Contract((age, bmi), ill).sites(
        fm.data.Table(str(tmp_path / "hospitals" / "lyon.csv"), "ill", partition=fm.data.Even(1))
    )
    assert (alone.train[0][:, 1] == 27).all()
    with refused("lyon.csv", "'bmi'", "contract"):
        fm.data.Contract((age, replace(bmi, fill=None)), ill).sites(fm.data.Table(files, "ill"))
    files = folder_of(tmp_path, lyon=without(hospital(0), "bmi") | {"BMI": hospital(0)["bmi"]})
    mistyped = fm.data.Table(str(tmp_path / "hospitals" / "lyon.csv"), "ill", partition=fm.data.Even(1))
    with refused("lyon.csv", "'bmi'", "BMI"):
        fm.data.Contract((age, bmi), ill).sites(mistyped)


# 4 and 4.0


def test_4_and_4_0_are_one_category_label_site_and_subgroup(tmp_path):
    spelt = np.array(["4", "4.0", " 4 ", "5", "5.0", "5"] * 20)
    columns = {"x": range(120), "grade": spelt, "site": np.repeat(spelt, 1), "group": spelt, "ill": spelt}
    data = fm.data.Table(
        write(tmp_path / "t.csv", columns), "ill", "site", subgroup="group", types={"grade": "category"}
    )
    sites = data.sites()
    made = sites[0].table.preprocessing
    assert [site.name for site in sites] == ["4", "5"]
    assert made.classes == ("4", "5")
    assert made.columns[1].classes == ("4", "5")
    assert {name for site in sites for name in site.train[2]} == {"4", "5"}
    assert not [one for one in check_table(data) if one.what == "two spellings"]
    same = made.transform({"x": [1, 1, 1], "grade": ["4", "4.0", 4.0]})
    assert (same == same[0]).all()
    assert made.labels(["5.0", 5, 5.0]).tolist() == [1, 1, 1]
    named = replace(data, classes=("5.0", "4.0"), categories={"grade": ("4.0", "5")})
    assert named.sites()[0].table.preprocessing.classes == ("5", "4")


# Between organisations


def test_sums_of_tables_with_other_columns_give_the_preprocessing_of_a_simulation(files):
    sites = fm.data.Table(files, "ill").sites()
    sums = {site.name: site.table.sums() for site in sites}
    told = {
        "lyon": lacking(sums["lyon"], "bmi", "crp"), "nice": sums["nice"], "paris": lacking(sums["paris"], "crp")
    }  # fmt: skip
    expected = sites[0].table.preprocessing
    assert fitted(told) == expected
    left, alone = columns_of_two_sites(told)
    assert alone == {"crp": "nice"}, "a member could have invented it"
    assert fitted(left).columns == expected.columns[:2]


def lacking(sums: TableSums, *names: str) -> TableSums:
    plan = replace(sums.plan, columns=tuple(column for column in sums.plan.columns if column.name not in names))
    return replace(sums, plan=plan, columns=without(sums.columns, *names))


def test_files_of_one_site_of_a_mesh_are_one_table_and_relative_to_its_site_file(files, tmp_path):
    mesh = SimpleNamespace(position=lambda name: 0, members=["a", "b"])
    experiment = fm.Experiment(fm.data.Digits(nodes=2), fm.Ring(), fm.TrackedADGDA())
    for file in ("hospitals/*.csv", "hospitals", ["hospitals/lyon.csv", "hospitals/nice.csv", "hospitals/paris.csv"]):
        data = {"name": "table", "file": file, "target": "ill"}
        own = own_site(SimpleNamespace(name="a", data=data, folder=tmp_path, path=tmp_path), experiment, mesh)
        assert (own.name, sum(map(len, own.table.rows.values()))) == ("a", 120)


def test_statistics_are_compared_for_columns_that_all_sites_have():
    said = {
        "a": {"mean": [1.0, 2.0], "spread": [0.1, 0.2], "shares": [0.5, 0.5], "relation": []},
        "b": {"mean": [2.0, 9.0], "spread": [0.2, 0.9], "shares": [0.5, 0.5], "relation": [0.1, 0.3]},
    }
    shared, columns = in_common(said, {"a": ("age", "bmi"), "b": ("bmi", "crp")}, ())
    assert [told["mean"] for told in shared.values()] == [[2.0], [2.0]]
    assert shared["b"]["relation"] == [0.1]
    assert [column.name for column in columns] == ["bmi"]
    assert in_common(said, {"a": ("x", "y"), "b": ("x", "y")}, ())[0] is said


# The command line


def test_table_trains_in_one_command_and_leaves_a_file_to_go_on_with(tmp_path, called, monkeypatch):
    monkeypatch.chdir(tmp_path)
    identifier = [f"P{k}" for k in range(40)]
    folder_of(
        tmp_path, lyon=without(hospital(0, patient=identifier), "bmi"), nice=hospital(1, 30), paris=hospital(2, 7)
    )
    arguments = ["run", "hospitals/*.csv", "--target", "ill", "--set", "rounds=3"]
    code, _, said = called(*arguments)
    assert (code, missing_from(said, "'patient'", "identifier", "--without patient")) == (2, [])
    code, _, said = called(*arguments, "--without", "patient")
    assert (code, missing_from(said, "bmi", "lyon", "runs/hospitals/hospitals.toml")) == (0, [])
    file = tmp_path / "runs" / "hospitals" / "hospitals.toml"
    assert fm.load_experiment(file).data == fm.data.Table("hospitals/*.csv", "ill", exclude=("patient",))


@pytest.mark.parametrize(("arguments", "names"), [
    (["t.csv"], ["--target"]), (["t.csv", "--target", "ill"], ["--site", "file per site"]),
    (["t.csv", "--target", "age", "--site", "where"], ["--numbers"]), (["x/*.csv", "--target", "ill"], ["no file"]),
    (["t.toml", "--target", "ill"], ["--target", "[data]"]),
    (["t.csv", "--target", "il", "--site", "where"], ["'ill'"]),
])  # fmt: skip
@pytest.mark.quick_cases("all")
def test_table_that_cannot_be_trained_on_is_refused_with_the_option_to_give(
    arguments, names, tmp_path, called, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    columns = hospital(0, 300, where=["a", "b", "c"] * 100)
    write(tmp_path / "t.csv", columns | {"age": columns["age"] + np.arange(300) / 1000})
    (tmp_path / "t.toml").write_text('data = { name = "digits" }\n')
    code, _, said = called("run", *arguments)
    assert (code, missing_from(said, *names)) == (2, [])
