"""Units: rows of one patient are not divided, whatever divides rows; time: test rows come after training rows."""

import csv
import json
import tomllib
import warnings
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import fairmesh as fm
from fairmesh.data.check import check_inputs, check_sites, check_units, looks_like_unit
from fairmesh.data.datasets.own import split_by_site
from fairmesh.data.reserve import reserve, too_few_in_words
from fairmesh.data.samples import Samples
from fairmesh.data.units import (
    DivisionWarning,
    folds_of_units,
    identifier_text,
    latest,
    noticed,
    numbered,
    warn_of_spanning,
    whole_units,
    with_units,
)
from fairmesh.personalization.cross_fit import _folds_of, can_judge
from fairmesh.problems.hosted_nodes import HostedNodes, division_of
from fairmesh.problems.identity import fingerprint
from fairmesh.problems.notes import on_units
from fairmesh.problems.objective import Objective, held_out_rows
from tests.examples import examples
from tests.refusals import missing_from, refused

SIZES = st.lists(st.integers(1, 12), min_size=2, max_size=20)


def write(path, columns):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values()))
    return str(path)


def visits(sites=3, units=8, rows=6, seed=0):
    """Columns of a table in which every patient has several visits, in a random order."""
    generator = np.random.default_rng(seed)
    count = sites * units * rows
    patient = np.arange(count) // rows
    order = generator.permutation(count)
    columns = {
        "clinic": np.array([f"C{k}" for k in patient // units]),
        "patient_id": np.array([f"P{k}" for k in patient]),
        "date": np.datetime64("2024-01-01") + (patient * 4 % 50 + np.arange(count) % rows).astype("timedelta64[D]"),
        "mass": generator.normal(70, 10, count).round(3),
        "ill": np.where((patient % 3 == 0) ^ (generator.random(count) < 0.1), "yes", "no"),
    }
    return {name: values[order] for name, values in columns.items()}


@pytest.fixture
def table(tmp_path):
    def made(columns=None, **settings):
        path = write(tmp_path / "visits.csv", columns or visits())
        return fm.data.Table(path, "ill", **({"site": "clinic", "unit": "patient_id"} | settings))

    return made


def units_in(site):
    (read,) = with_units([site])
    return {
        name: set(part.units.tolist())
        for name in ("train", "test", "validation", "reserved")
        if (part := getattr(read, name)) is not None
    }


def apart(sets):
    every = [unit for units in sets.values() for unit in units]
    return len(every) == len(set(every))


# Identifiers


def test_identifier_is_one_however_a_table_writes_it():
    assert {identifier_text(value) for value in (4, 4.0, "4", " 4", "4.0", "04", np.int64(4))} == {"4"}
    assert len({identifier_text(value) for value in ("P4", "p4", "4.5", "10000000000000000000001")}) == 4


def test_number_of_a_unit_is_the_same_in_every_process_and_has_63_bits():
    numbers = numbered(["P7", 7, "7.0"], 3, "rows")
    assert numbers.tolist() == [7859628945914675306, 4703935488074688627, 4703935488074688627]


@pytest.mark.parametrize("missing", [None, "", float("nan"), "NA"])
def test_row_without_an_identifier_is_refused_with_its_number_and_what_to_do(missing):
    with refused("row 2", "unit", "'row 2'"):
        numbered(["a", missing, "b"], 3, "Lyon")


def test_units_that_are_no_identifiers_or_too_few_are_refused():
    with refused("identifiers", 1.5):
        numbered([1.5, 2.0], 2, "Lyon")
    with refused("(2,)", 3):
        numbered(["a", "b"], 3, "Lyon")


# Dividing


@examples(40)
@given(SIZES, st.floats(0.05, 0.6), st.integers(0, 99))
def test_whole_units_are_taken_or_left_and_come_as_near_to_the_wish_as_half_a_unit(sizes, share, seed):
    generator = torch.Generator().manual_seed(seed)
    units = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    units = units[torch.randperm(len(units), generator=generator)]
    count = max(1, round(share * len(units)))
    targets = torch.randn(len(units), generator=generator)
    held = whole_units(units, targets, count, torch.rand(len(sizes), generator=generator))
    assert not set(units[held].tolist()) & set(units[~held].tolist())
    assert 0 < int(held.sum()) < len(units)
    left = [sizes[unit] for unit in set(units[~held].tolist())]
    if len(left) > 1 and int(held.sum()) > min(sizes):  # neither the least that is taken, nor the most
        assert abs(int(held.sum()) - count) <= max(sizes) / 2
        assert count - int(held.sum()) <= min(left) / 2


@examples(40)
@given(SIZES, st.integers(2, 5), st.integers(0, 99))
def test_folds_keep_units_whole_and_are_as_full_as_whole_units_allow(sizes, folds, seed):
    generator = torch.Generator().manual_seed(seed)
    units = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    samples = Samples(torch.zeros(len(units), 1), torch.randn(len(units), generator=generator), units=units)
    fold = folds_of_units(samples, folds, torch.tensor(seed))
    assert all(len(set(fold[units == unit].tolist())) == 1 for unit in range(len(sizes)))
    counts = torch.bincount(fold, minlength=folds)
    assert int(counts.max() - counts.min()) <= 2 * max(sizes)
    assert len(set(fold.tolist())) == min(folds, len(sizes))


def test_folds_of_a_site_without_unseen_rows_keep_units_whole():
    units, targets = torch.arange(40) // 5, torch.arange(40) % 2
    pool = Samples(torch.zeros(40, 2), targets, units=units)
    fold = _folds_of(pool, torch.zeros(40, dtype=torch.bool), 4)
    assert torch.bincount(fold).tolist() == [10] * 4
    assert len(set(zip(units.tolist(), fold.tolist()))) == 8


def test_held_out_units_have_the_classes_in_their_proportions():
    units = torch.arange(40).repeat_interleave(5)
    targets = (units >= 30).long()  # a quarter of the units
    for seed in range(5):
        held = whole_units(units, targets, 40, torch.rand(40, generator=torch.Generator().manual_seed(seed)))
        assert torch.bincount(targets[held]).tolist() == [30, 10]


@examples(40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=2, max_size=40), st.booleans())
def test_latest_rows_come_after_all_training_rows(rows, with_units):
    times, units = (torch.tensor(part) for part in zip(*rows))
    test, left_out = latest(times.double(), units if with_units else None, max(1, len(rows) // 5))
    train = ~test & ~left_out
    assert bool(train.any())
    assert not bool((test & left_out).any())
    if bool(test.any()):
        assert times[train].max() < times[test].min()
        assert with_units or not bool(left_out.any())
        assert not with_units or not set(units[test].tolist()) & set(units[~test].tolist())


def test_split_without_units_draws_the_rows_that_it_always_drew():
    pool = split_by_site((torch.arange(12), torch.zeros(12)), ["a"] * 7 + ["b"] * 5, 0.3, seed=3)
    generator, tested = np.random.default_rng(3), []
    for rows, count in ((range(7), 2), (range(7, 12), 2)):
        tested += sorted(generator.permutation(rows)[:count].tolist())
    assert pool.test[0].tolist() == tested


# Sources


@pytest.mark.parametrize("settings", [{}, {"validation_share": 0.2}, {"time": "date"}, {"seed": 5}])
def test_table_divides_no_unit(table, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivisionWarning)
        sites = table(**settings).sites()
    for site in reserve(sites, 0.25):
        sets = units_in(site)
        assert apart(sets)
        assert len(sets["test"]) in (1, 2)
    assert ("validation" in sets) == ("validation_share" in settings)
    assert ("reserved" in sets) == ("validation" not in sets)


def test_time_is_an_input_only_if_inputs_names_it_and_unit_is_none(table):
    assert table(time="date").input_names(visits()) == ("mass",)
    assert table(inputs=("mass", "date"), time="date").input_names(visits()) == ("mass", "date")
    with refused("unit", "'patient_id'", "inputs"):
        table(inputs=("mass", "patient_id"))


def test_splits_test_on_other_units(table):
    tested = [units_in(table().resplit(k).sites()[0])["test"] for k in range(6)]
    assert len(set(map(frozenset, tested))) > 2


def test_table_with_times_tests_on_rows_after_its_training_rows_and_says_what_it_leaves_out(table):
    columns, said = visits(), []
    with noticed(said):
        sites = table(columns, time="date").sites()
    for site in sites:
        rows = site.table.rows
        assert columns["date"][rows["train"]].max() < columns["date"][rows["test"]].min()
    assert len(said) == 1
    assert f"{len(columns['ill']) - sum(len(r) for s in sites for r in s.table.rows.values())} of" in said[0]


def test_run_announces_once_what_is_to_look_at_in_the_division_of_all_splits(table):
    columns, said = visits(), []
    columns["patient_id"] = np.array([int(name[1:]) % 8 for name in columns["patient_id"].tolist()])
    experiment = fm.Experiment(table(columns), rounds=1, splits=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fm.run(experiment, announce=said.append)
    assert sum("trained on at another" in sentence for sentence in said) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fm.run(experiment)
    assert [issubclass(warning.category, DivisionWarning) for warning in caught] == [True]


def test_splits_of_times_are_refused_since_they_would_all_be_the_same(table):
    with refused("splits", "time"):
        table(time="date").resplit(1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"date": ["", *visits()["date"][1:]]}, ["'date'", "row 1", "no time"]),
        ({"date": ["soon", *visits()["date"][1:]]}, ["'date'", "row 1", "'soon'", "2026-11-30"]),
        ({"patient_id": ["", *visits()["patient_id"][1:]]}, ["'patient_id'", "row 1", "unit"]),
        ({"patient_id": visits()["clinic"]}, ["every site", "single unit", "'patient_id'", "test"]),
        ({"date": ["2024-01-01"] * 144}, ["times", "train", "test"]),
    ],
)
def test_bad_units_and_times_of_a_table_are_refused(table, changes, words):
    with refused(*words):
        table(visits() | changes, time="date" if "date" in changes else None).sites()


@pytest.mark.parametrize("key", ["unit", "time"])
def test_target_says_neither_whose_a_row_is_nor_when_it_was(table, key):
    with refused(key, "'ill'", "target"):
        table(**{key: "ill"})


def test_site_of_one_unit_trains_and_is_not_measured(table):
    columns = visits()
    columns["patient_id"][columns["clinic"] == "C1"] = "P99"
    sites = {site.name: site for site in table(columns).sites()}
    assert sites["C1"].test is None
    assert sites["C0"].test is not None


def test_times_in_the_future_are_told(table):
    columns, said = visits(), []
    columns["date"] = np.where(columns["clinic"] == "C1", np.datetime64("2999-01-01"), columns["date"])
    with noticed(said):
        table(columns, unit=None, time="date", exclude=("patient_id",)).sites()
    assert len(said) == 1
    assert "48 of 144" in said[0]
    assert "future" in said[0]


def test_arrays_and_images_divide_no_unit(tmp_path):
    columns = visits()
    labels = (columns["ill"] == "yes").astype(int)
    np.savez(
        tmp_path / "a.npz", x=columns["mass"][:, None], y=labels, site=columns["clinic"], who=columns["patient_id"]
    )
    for site in fm.data.Npz(str(tmp_path / "a.npz"), unit="who").sites():
        assert apart(units_in(site))
    with refused("'whom'", "who"):
        fm.data.Npz(str(tmp_path / "a.npz"), unit="whom").sites()
    image = pytest.importorskip("PIL.Image")
    for k in range(24):
        folder = tmp_path / "scans" / "Lyon" / f"class{k % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        image.new("L", (2, 2), k).save(folder / f"P{k // 4}_{k}.png")
    for stream in (False, True):
        (site,) = fm.data.ImageFolder(str(tmp_path / "scans"), unit="^(P[0-9]+)_", stream=stream).sites()
        sets = units_in(site)
        assert apart(sets)
        assert sum(map(len, sets.values())) == 6
    with refused("unit", "group"):
        fm.data.ImageFolder(str(tmp_path / "scans"), unit="P").sites()


def test_rows_of_parquet_files_divide_no_unit(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(visits()), tmp_path / "v.parquet")
    rows = fm.data.ParquetRows(str(tmp_path / "v.parquet"), "ill", "clinic", unit="patient_id", inputs=("mass",))
    for site in rows.sites():
        assert apart(units_in(site))
    ordered = fm.data.ParquetRows(str(tmp_path / "v.parquet"), "ill", "clinic", time="date", inputs=("mass",))
    assert all(len(site.test) >= 1 for site in ordered.sites())


def test_held_out_source_and_fewer_rows_keep_units(table):
    for site in fm.data.HeldOut(table(), share=0.25).sites():
        assert apart(units_in(site))
    (first, *_) = fm.data.Fewer(table(), train=20, test=5).sites()
    assert len(first.train.units) == 20
    assert len(first.test.units) == 5


# Sites


def site_of(units, **sets):
    rows = len(units["train"]) if isinstance(units, dict) else len(units)
    return fm.Site((torch.randn(rows, 2), torch.arange(rows) % 2), units=units, name="Lyon", **sets)


def test_samples_keep_their_units_when_rows_are_taken():
    (site,) = with_units([site_of([k // 3 for k in range(12)])])
    samples = Samples.of(site.train, "rows")
    assert torch.equal(samples.units, site.train.units)
    assert torch.equal(samples.take(torch.tensor([7, 2])).units, samples.units[[7, 2]])
    stream = fm.data.Streamed(torch.utils.data.TensorDataset(torch.zeros(6, 1), torch.zeros(6).long()))
    (streamed,) = with_units([fm.Site(stream, units=list("aabbcc"))])
    assert len(streamed.train.take(torch.tensor([0, 5])).units.unique()) == 2
    assert Samples.elsewhere(3, samples).units is None


def test_unit_in_training_and_test_is_refused_with_its_name_and_what_splits_by_unit():
    test = (torch.randn(2, 2), torch.arange(2))
    site = site_of({"train": ["P1", "P2", "P3"], "test": ["P9", "P2"]}, test=test)
    with refused("'P2'", "Lyon", "training", "test", "fm.data.split"):
        fm.Problem(torch.nn.Linear(2, 2), [site]).prepared  # noqa: B018


def test_units_of_some_sets_only_are_refused():
    test = (torch.randn(2, 2), torch.arange(2))
    with refused("Lyon", "test", "units"):
        with_units([site_of(["a", "b"], test=test)])
    with refused("'tests'", "test"):
        with_units([site_of({"train": ["a", "b"], "tests": ["c", "d"]}, test=test)])


def test_split_moves_whole_units_into_a_test_set():
    sites = fm.data.split([site_of([f"P{k // 5}" for k in range(50)]) for _ in range(2)], 0.3, seed=1)
    assert all(apart(units_in(site)) and len(site.test) == 15 for site in sites)
    with refused("test set"):
        fm.data.split(sites)
    with refused("single", "unit"):
        fm.data.split([site_of(["P1"] * 9)])
    (plain,) = fm.data.split([fm.Site((torch.zeros(20, 1), torch.zeros(20).long()))])
    assert (len(plain.train), len(plain.test)) == (16, 4)


def test_units_that_one_site_tests_on_and_another_trains_on_are_told_with_their_number():
    rows = torch.zeros(2, 2), torch.zeros(2).long()
    north = fm.Site(rows, rows, name="north", units={"train": ["P1", "P2"], "test": ["P3", "P4"]})
    south = fm.Site(rows, rows, name="south", units={"train": ["P4", "P2"], "test": ["P5", "P6"]})
    with pytest.warns(DivisionWarning, match=r"one unit.*north and south"):
        warn_of_spanning(with_units([north, south]))
    warn_of_spanning(with_units([north, replace(south, units={"train": ["P2", "P7"], "test": ["P3", "P6"]})]))


def test_site_with_few_units_holds_nothing_out():
    few, many = with_units([site_of([k % units for k in range(60)]) for units in (3, 4)])
    objective = Objective("held-out")
    assert not bool(held_out_rows(few.train, 0, objective).any())
    held = held_out_rows(many.train, 0, objective)
    assert int(held.sum()) == 15
    assert len(many.train.units[held].unique()) == 1
    assert [site.reserved is None for site in reserve([few, many])] == [True, False]


@pytest.mark.parametrize("judged_on", ["held-out", "validation"])
def test_rows_that_judge_a_site_count_once_per_unit_where_chance_is_concerned(judged_on):
    rows = torch.randn(60, 2), torch.arange(60) % 2
    units = {"train": [k // 6 for k in range(60)], "validation": [100 + k // 30 for k in range(60)]}
    site = fm.Site(rows, validation=rows, units=units)
    problem = fm.Problem(torch.nn.Linear(2, 2), [site], objective=Objective(judged_on, rounds=5)).prepared
    nodes = HostedNodes(problem, torch.arange(1), torch.arange(1), [0], None, [], torch.float64)
    division = division_of(nodes, torch.tensor([60]))
    assert division.apart.flatten().tolist() == [2]
    assert division.judges.flatten().tolist() == [12 if judged_on == "held-out" else 60]


def test_other_units_make_other_data_for_a_resumed_run():
    samples = Samples(torch.zeros(4, 1), torch.zeros(4))
    prints = {fingerprint(samples)}
    for units in (["a", "a", "b", "b"], ["a", "b", "a", "b"]):
        (site,) = with_units([fm.Site((torch.zeros(4, 1), torch.zeros(4)), units=units)])
        prints.add(fingerprint(site.train))
    assert len(prints) == 3


def test_sites_with_few_units_are_announced():
    sites = [site_of([k % units for k in range(60)]) for units in (3, 8)]
    sites[1] = replace(sites[1], name="Oslo", units=[f"O{k % 8}" for k in range(60)])
    problem = fm.Problem(torch.nn.Linear(2, 2), sites, objective=Objective("held-out", rounds=5)).prepared
    assert missing_from(on_units(problem) or "", "Lyon", "4") == []
    assert "Oslo" not in (on_units(problem) or "")
    assert [can_judge(problem, i) for i in range(2)] == [False, True]
    assert "3 units" in too_few_in_words(problem.sites[0].train)


@pytest.mark.slow
def test_run_with_units_trains_on_whole_units_and_announces_sites_with_few(table):
    columns = visits()
    columns["patient_id"] = np.where(
        columns["clinic"] == "C2", np.char.add("Q", (np.arange(144) % 3).astype(str)), columns["patient_id"]
    )
    experiment = fm.Experiment(table(columns), rounds=3, personalization=fm.personalization.Mixture(local_steps=5))
    said = []
    result = fm.run(experiment, announce=said.append)
    assert any("units" in line and "C2" in line for line in said)
    notes = {site.name: site.note for site in result.personal[0].sites}
    assert "units" in (notes["C2"] or "")
    assert "units" not in (notes["C0"] or "")


# Contracts


CONTRACT = fm.data.Contract(
    (fm.data.Column("mass", min=0, max=200),), fm.data.Column("ill", "label", classes=("no", "yes")), unit="patient_id"
)


def test_contract_says_the_unit_for_every_site(table):
    for site in CONTRACT.sites(table(unit=None)):
        assert apart(units_in(site))
    with refused("unit", '"date"', '"patient_id"'):
        CONTRACT.sites(table(unit="date"))
    with refused("patient_id"):
        CONTRACT.sites(table({name: values for name, values in visits().items() if name != "patient_id"}, unit=None))
    with refused("unit", "units="):
        CONTRACT.checked([fm.Site((torch.ones(4, 1), torch.arange(4) % 2))])
    assert CONTRACT.checked([fm.Site((torch.ones(4, 1), torch.arange(4) % 2), units=list("aabb"))])[0].units


def test_contract_says_the_time_for_every_site(table):
    columns, contract = visits(), fm.data.Contract(CONTRACT.columns, CONTRACT.target, time="date")
    for site in contract.sites(table(columns, unit=None)):
        assert columns["date"][site.table.rows["train"]].max() < columns["date"][site.table.rows["test"]].min()


# What `data check` says


@pytest.mark.parametrize("name", ["patient_id", "ID", "subjectNo", "MRN", "patientid", "case", "Case Number", "device"])
def test_names_of_units_are_known(name):
    assert looks_like_unit(name)


@pytest.mark.parametrize("name", ["patient_age", "acid", "paid", "mass", "case_severity", "identity_score", "grid"])
def test_names_of_measurements_are_not_those_of_units(name):
    assert not looks_like_unit(name)


def findings(data, columns, exclude=()):
    return [finding.sentence for finding in check_units(columns, data.sites(), exclude)]


def test_check_finds_identifiers_that_training_and_test_rows_share(table):
    columns = visits()
    (said,) = findings(table(unit=None), columns)
    assert "'patient_id'" in said
    assert 'unit = "patient_id"' in said
    assert not findings(table(), columns)
    columns = {("chart" if name == "patient_id" else name): values for name, values in columns.items()}
    data = table(columns, unit=None, exclude=("chart", "date"))
    assert not findings(data, columns)  # neither its name nor a person says so
    assert len(findings(data, columns, ("chart", "date"))) == 1  # dates are no identifiers
    assert [
        f.what
        for f in check_inputs(
            table(visits(), unit=None, categories={"patient_id": ("P1",)}, exclude=("date",)).sites()[0]
        )
    ] == ["units divided"]


def test_equal_rows_of_one_unit_are_no_duplicates():
    def said(units):
        inputs, labels = torch.arange(40.0)[:, None] // 2, torch.arange(40) // 2 % 2
        return {finding.what for finding in check_sites([fm.Site((inputs, labels), name="Lyon", units=units)])}

    assert "duplicate rows" not in said([k // 2 for k in range(40)])
    assert "duplicate rows" in said(list(range(40)))


def test_commands_name_what_looks_like_a_unit_and_take_it(tmp_path, called):
    file = write(tmp_path / "visits.csv", visits())
    told = ["'patient_id'", 'unit = "patient_id"']
    code, _, err = called("data", "check", file, "--target", "ill", "--site", "clinic")
    assert (code, missing_from(err, *told)) == (0, [])
    options = ("--unit", "patient_id", "--time", "date")
    code, out, _ = called("data", "check", file, "--target", "ill", "--site", "clinic", *options, "--json")
    kinds = {finding["what"] for finding in json.loads(out)["findings"]}
    assert (code, kinds & {"units divided", "identifier"}, "division of rows" in kinds) == (0, set(), True)
    _, out, err = called("data", "contract", file, "--target", "ill")
    assert ("unit" in tomllib.loads(out)["contract"], missing_from(err, "--unit patient_id")) == (False, [])
    _, out, err = called("data", "contract", file, "--target", "ill", *options, "--without", "clinic")
    contract = tomllib.loads(out)["contract"]
    assert (contract["unit"], contract["time"], "--unit" in err) == ("patient_id", "date", False)
    assert [column["name"] for column in contract["columns"]] == ["mass"]
