"""Recipes run in miniature, on generated files with the layout of the real datasets."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import fairmesh as fm
from reproduction.batched import Runner, grouped
from reproduction.lines import lines_of, record
from reproduction.recipes import RECIPES, Row, miniature, rows_of
from reproduction.running import reproduce
from tests.data.test_sources import cifar_row, write_mnist
from tests.refusals import refused


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "fashion-mnist").mkdir()
    write_mnist(folder / "fashion-mnist", train=1000, test=100)
    batches = folder / "cifar-10-batches-bin"
    batches.mkdir()
    for k in range(6):
        rows = [cifar_row(i % 10, (37 * i + k) % 256) for i in range(60)]
        (batches / (f"data_batch_{k + 1}.bin" if k < 5 else "test_batch.bin")).write_bytes(b"".join(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRMESH_DATA", str(folder))
        yield folder


def tiny(row: Row) -> Row:
    small = miniature(row)
    options = replace(small.experiment.options, measure_every=1)
    experiment = replace(small.experiment, rounds=2, sampling=fm.Sampling(4, "cyclic"), options=options)
    return replace(small, experiment=experiment, search_rounds=2)


@pytest.fixture(scope="module")
def table4a(data, tmp_path_factory):
    """The results of table4a, run once for all tests. Copy them before changing them."""
    folder = tmp_path_factory.mktemp("table4a")
    assert reproduce(["table4a"], folder, change=tiny) == {}
    return folder


@pytest.fixture
def only(monkeypatch):
    """Returns a function that leaves only some rows of every recipe."""

    def chosen(wanted):
        monkeypatch.setattr(
            "reproduction.running.rows_of", lambda recipe: [row for row in rows_of(recipe) if wanted(row)]
        )

    return chosen


def _check_recorded(recipe, results, left_out=()) -> None:
    rows = [row for row in rows_of(recipe) if row.label not in left_out]
    lines = lines_of(results, recipe)
    assert [(line["protocol"], line["row"]) for line in lines] == [(row.protocol, row.name) for row in rows]
    for line, row in zip(lines, rows):
        assert row.as_row or set(line["search"]["chosen"]) == set(tiny(row).search)
        assert len(line["final"]["worst"]) == 1
        assert line["final"]["worst"][0] <= line["final"]["worst_group"][0] + 1e-9
        assert line["curve"]["round"] == [0, 1, 2]
        assert line["curve"]["worst"][-1] == line["final"]["worst"][0]


def _finals(results, recipe="table4a"):
    return [line["final"] for line in lines_of(results, recipe)]


def test_reproduce_records_every_row_of_a_recipe(table4a):
    _check_recorded("table4a", table4a)


@pytest.mark.slow  # convolutional networks at twenty nodes
@pytest.mark.parametrize("recipe", ["table4c", "table5", "figure1", "figure4"])
def test_reproduce_records_every_row_of_the_larger_recipes(tmp_path, recipe):
    left_out = reproduce([recipe], tmp_path, change=tiny)
    assert all("COOS7" in label for label in left_out)
    _check_recorded(recipe, tmp_path, left_out)


@pytest.mark.slow
def test_reproduce_runs_a_row_on_cifar(tmp_path, only):
    only(lambda row: row.protocol == "published" and row.name == "alpha = 10")
    assert reproduce(["table4c"], tmp_path, change=tiny) == {}
    (line,) = lines_of(tmp_path, "table4c")
    assert set(line["final"]["groups"]) == {"low contrast", "high contrast", "original contrast"}
    assert line["parameters"] == 81_290


@pytest.mark.slow  # 80 rows with searches
def test_reproduce_records_the_smaller_recipes_and_their_curves_use_the_consensus_steps_of_the_tables(tmp_path):
    recipes = ["table2", "table3", "figure2", "figure3"]
    assert reproduce(recipes, tmp_path, change=tiny) == {}
    for recipe in recipes:
        _check_recorded(recipe, tmp_path)
    found = {(line["protocol"], line["row"]): line["search"]["chosen"] for line in lines_of(tmp_path, "table2")}
    for line in lines_of(tmp_path, "figure2")[1:7]:
        assert line["search"]["chosen"] == found[line["protocol"], f"logistic, AD-GDA, {line['row']}"]


@pytest.mark.slow
def test_reproduce_gives_curves_the_settings_of_their_table_and_runs_them_again_when_these_change(tmp_path, only):
    def other(row: Row) -> Row:
        return replace(tiny(row), search={"consensus_step": (0.2,)}) if row.recipe == "table2" else tiny(row)

    only(lambda row: row.protocol == "formula" and row.name.removeprefix("logistic, AD-GDA, ") == "quantization 8 bit")
    with refused("'table2: logistic, AD-GDA, quantization 8 bit'"):
        reproduce(["figure2"], tmp_path, change=tiny)
    reproduce(["table2"], tmp_path, change=tiny)
    reproduce(["figure2"], tmp_path, change=tiny)
    (table,), (before,) = lines_of(tmp_path, "table2"), lines_of(tmp_path, "figure2")
    assert before["search"]["chosen"] == table["search"]["chosen"]
    assert before["search"]["chosen"]["consensus_step"] != 0.2
    reproduce(["table2", "figure2"], tmp_path, change=other)
    (after,) = lines_of(tmp_path, "figure2")
    assert after["search"]["chosen"] == {"consensus_step": 0.2}


def test_reproduce_runs_rows_that_are_missing_or_changed_and_no_others(table4a, tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(table4a, results)
    before = (results / "table4a.jsonl").read_text()
    ran = []
    lines = Runner.lines

    def watched(self, group, found):
        ran.extend((row.protocol, row.name) for row in group)
        return lines(self, group, found)

    monkeypatch.setattr(Runner, "lines", watched)
    reproduce(["table4a"], results, change=tiny)
    assert not ran
    assert (results / "table4a.jsonl").read_text() == before

    lines_by_name = {(line["protocol"], line["row"]): line for line in map(json.loads, before.splitlines())}
    del lines_by_name["published", "alpha = 1"]
    lines_by_name["published", "alpha = 10"]["settings"]["rounds"] = 3
    (results / "table4a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_by_name.values()))
    reproduce(["table4a"], results, change=tiny)
    assert sorted(ran) == [("published", "alpha = 1"), ("published", "alpha = 10")]
    assert _finals(results) == _finals(table4a)


@pytest.mark.slow
def test_reproduce_replaces_every_row_of_a_recipe_that_was_changed(table4a, tmp_path):
    def other(row: Row) -> Row:
        return replace(tiny(row), experiment=replace(tiny(row).experiment, rounds=3))

    shutil.copytree(table4a, tmp_path / "results")
    reproduce(["table4a"], tmp_path / "results", change=other)
    assert all(line["curve"]["round"][-1] == 3 for line in lines_of(tmp_path / "results", "table4a"))


@pytest.mark.slow
def test_reproduce_resumes_an_interrupted_run_and_deletes_its_checkpoints_once_recorded(
    table4a, tmp_path, only, monkeypatch
):
    work = tmp_path / "work"
    train = fm.train

    def cut(*arguments, **options):
        """As if the machine was switched off before the second run of the group."""
        if len(list(work.glob("*"))) == 1 and not (tmp_path / "cut").exists():
            (tmp_path / "cut").touch()
            raise KeyboardInterrupt
        return train(*arguments, **options)

    only(lambda row: row.protocol == "formula" and row.name == "alpha = 10")
    monkeypatch.setattr("reproduction.batched.train", cut)
    with pytest.raises(KeyboardInterrupt):
        reproduce(["table4a"], tmp_path / "results", change=tiny, work=work)
    assert any(work.rglob("checkpoint.safetensors"))
    reproduce(["table4a"], tmp_path / "results", change=tiny, work=work)
    assert not any(work.iterdir())
    assert _finals(tmp_path / "results") == _finals(table4a)[:1]


def test_reproduce_leaves_out_rows_whose_data_is_missing(tmp_path, data, only, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "fashion-mnist").symlink_to(data / "fashion-mnist")
    monkeypatch.setenv("FAIRMESH_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    only(lambda row: row.protocol == "published" and "DR-DSGD" in row.name)
    left_out = reproduce(["table5"], tmp_path / "results", change=tiny)
    assert set(left_out) == {"table5: CIFAR-10, DR-DSGD", "table5: COOS7, DR-DSGD"}
    assert "CIFAR-10" in left_out["table5: CIFAR-10, DR-DSGD"]
    (line,) = lines_of(tmp_path / "results", "table5")
    assert line["row"] == "Fashion-MNIST, DR-DSGD"


def test_reproduce_runs_the_other_rows_when_one_fails(tmp_path, only, monkeypatch):
    def failing(self, group, found, original=Runner.lines):
        if group[0].protocol == "formula":
            raise fm.BadInput("no such luck")
        return original(self, group, found)

    only(lambda row: row.name == "alpha = 1")
    monkeypatch.setattr(Runner, "lines", failing)
    with refused("no such luck"):
        reproduce(["table4a"], tmp_path, change=tiny)
    assert {line["protocol"] for line in lines_of(tmp_path, "table4a")} == {"published"}


@pytest.mark.slow  # two processes import torch
def test_reproduce_gives_the_same_numbers_with_several_processes(tmp_path):
    reproduce(["table4a", "table5"], tmp_path / "one", change=tiny)
    reproduce(["table4a", "table5"], tmp_path / "two", change=tiny, jobs=2)
    for recipe in ("table4a", "table5"):
        assert _finals(tmp_path / "one", recipe) == _finals(tmp_path / "two", recipe)


@pytest.mark.slow  # a network of 400,000 parameters at ten nodes
def test_reproduce_runs_coos7_rows_when_its_files_are_present(tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py")
    generator = np.random.default_rng(0)
    for name, count in (("test4", 64), ("test3", 16)):
        with h5py.File(tmp_path / f"COOS7_v1.1_{name}.hdf5", "w") as file:
            file["data"] = generator.integers(0, 99, (count, 2, 64, 64)).astype(np.float32)
            file["labels"] = np.arange(count) % 7
    monkeypatch.setenv("FAIRMESH_DATA", str(tmp_path))

    def smaller(row: Row) -> Row:
        data = fm.data.COOS7(per_node=4)
        return replace(tiny(row), experiment=replace(tiny(row).experiment, data=data))

    assert reproduce(["table4b"], tmp_path / "results", change=smaller) == {}
    lines = lines_of(tmp_path / "results", "table4b")
    assert len(lines) == 6
    assert set(lines[0]["final"]["groups"]) == {"microscope 1", "microscope 2"}
    assert lines[0]["parameters"] == 408_727


def test_reproduce_names_the_files_of_coos7_when_they_are_missing(tmp_path):
    left_out = reproduce(["table4b"], tmp_path, change=tiny)
    assert list(left_out) == list(dict.fromkeys(row.label for row in rows_of("table4b")))
    for reason in left_out.values():
        assert "COOS7_v1.1_test4.hdf5" in reason
        assert "COOS7_v1.1_test3.hdf5" in reason
    assert lines_of(tmp_path, "table4b") == []


@pytest.mark.filterwarnings("ignore:loss is not defined")  # of the seed that diverges
@pytest.mark.parametrize("kept", [pytest.param(True, marks=pytest.mark.slow, id="with checkpoints"), False])
def test_runner_takes_the_next_best_candidate_when_a_seed_diverges(tmp_path, kept):
    """A step of 1e30 survives the search, which has one round, and diverges in the full run."""
    row = tiny(rows_of("table4a")[0])
    steps = (1e30, 0.5)
    row = replace(row, search={"primal_step.start": steps}, search_rounds=1)
    searches = []

    class Fooled(Runner):
        def _searched(self, group):
            tried = [{"primal_step.start": step, "worst": 0.9 - k / 10, "mean": 0.9} for k, step in enumerate(steps)]
            searches.append(group)
            return {row.label: {"over": {}, "tried": tried, "chosen": {"primal_step.start": steps[0]}}}

    (line,) = Fooled(work=tmp_path / "work" if kept else None).lines([row], {})
    assert searches
    assert line["search"]["chosen"] == {"primal_step.start": 0.5}
    assert line["search"]["passed_over"] == [{"primal_step.start": 1e30}]
    assert line["diverged"] == []


@pytest.mark.slow
def test_runner_judges_candidates_on_test_sets_cut_from_the_training_data(monkeypatch):
    seen = []
    trained = Runner._trained

    def watched(self, row, experiment, algorithms, rounds):
        seen.append((type(experiment.data), len(algorithms)))
        return trained(self, row, experiment, algorithms, rounds)

    monkeypatch.setattr(Runner, "_trained", watched)
    Runner().lines([tiny(rows_of("table5")[0])], {})
    assert seen == [(fm.data.HeldOut, 2), (fm.data.Fewer, 1)]


def test_grouped_puts_rows_that_differ_only_in_numbers_into_one_run():
    rows = [row for row in rows_of("table2") if row.protocol == "published"]
    assert [len(group) for group in grouped(rows)] == [2] * 12  # AD-GDA and, as published, CHOCO-SGD
    assert [len(group) for group in grouped(rows_of("table4a"))] == [3, 3]


def test_record_replaces_a_row_s_line_and_keeps_the_order_of_the_recipe(tmp_path):
    for value in (1, 2):
        record(tmp_path, {"recipe": "table4a", "row": "alpha = 1", "protocol": "formula", "value": value})
    record(tmp_path, {"recipe": "table4a", "row": "alpha = 10", "protocol": "formula", "value": 3})
    assert [line["value"] for line in lines_of(tmp_path, "table4a")] == [3, 2]


@pytest.mark.parametrize("damage", [b"{", b"{}", b"[1]", b"\xff"])
def test_lines_of_names_the_file_and_line_that_cannot_be_read(tmp_path, damage):
    (tmp_path / "table4a.jsonl").write_bytes(b'{"recipe": "table4a", "row": "", "protocol": ""}\n' + damage)
    with refused("table4a.jsonl", "line 2"):
        lines_of(tmp_path, "table4a")


def test_rows_of_published_have_the_settings_of_the_published_runs():
    rows = {row.label: row for recipe in RECIPES for row in rows_of(recipe) if row.protocol == "published"}
    big = rows["table4a: alpha = 0.01"].experiment
    assert big.topology == fm.topologies.Circulant((1, 2))
    assert big.sampling == fm.Sampling(50, "cyclic")
    expected = fm.ADGDA(
        fm.schedules.Geometric(1.0, 0.998),
        0.01,
        1.0,
        regularizer=fm.regularizers.OwnCoordinate(0.01),
        dual_order="dual-first",
    )
    assert big.algorithm == expected
    assert rows["table4c: alpha = 0.1"].experiment.algorithm.regularizer == fm.regularizers.OwnCoordinate(1.0)
    four = rows["figure4: CIFAR-10, AD-GDA"].experiment.algorithm
    assert (four.consensus_step, four.compressor) == (0.8, fm.compressors.Quantize(4, rounding="ceil"))
    drfa = rows["table5: Fashion-MNIST, DRFA"].experiment
    assert drfa.rounds * drfa.algorithm.local_steps == 5000
    assert (drfa.algorithm.ascends, drfa.algorithm.probed, drfa.algorithm.floor) == ("error", "everyone", 1e-5)
    assert not any(row.search for label, row in rows.items() if label[:6] not in ("table2", "table3"))
