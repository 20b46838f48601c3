"""Recipes in miniature on generated files of the datasets' own layout."""

import json
from dataclasses import replace

import numpy as np
import pytest

import fairmesh as fm
from reproduction.batched import Runner, grouped
from reproduction.lines import described, is_as_its_recipe, lines_of, record
from reproduction.recipes import RECIPES, Row, miniature, rows_of
from reproduction.running import reproduce
from reproduction.verdicts import RECORDED
from tests.data.test_sources import cifar_row, write_mnist

NOT_HERE = {"table4b"}


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


def _recorded(recipe, results, left_out=()) -> None:
    rows = [row for row in rows_of(recipe) if row.label not in left_out]
    lines = lines_of(results, recipe)
    assert [(line["protocol"], line["row"]) for line in lines] == [(row.protocol, row.name) for row in rows]
    for line, row in zip(lines, rows):
        assert row.as_row or set(line["search"]["chosen"]) == set(tiny(row).search)
        assert len(line["final"]["worst"]) == 1
        assert line["final"]["worst"][0] <= line["final"]["worst_group"][0] + 1e-9
        assert line["curve"]["round"] == [0, 1, 2]
        assert line["curve"]["worst"][-1] == line["final"]["worst"][0]


@pytest.mark.parametrize("recipe", ["table4a", "table4c", "table5", "figure1", "figure4"])
def test_every_row_of_a_recipe_runs_and_is_recorded(tmp_path, recipe):
    left_out = reproduce([recipe], tmp_path, change=tiny)
    assert all("COOS7" in label for label in left_out)
    _recorded(recipe, tmp_path, left_out)


def test_convergence_curves_take_the_rate_found_for_the_tables(tmp_path):
    recipes = ["table2", "table3", "figure2", "figure3"]
    assert reproduce(recipes, tmp_path, change=tiny) == {}
    for recipe in recipes:
        _recorded(recipe, tmp_path)
    found = {(line["protocol"], line["row"]): line["search"]["chosen"] for line in lines_of(tmp_path, "table2")}
    for line in lines_of(tmp_path, "figure2")[1:7]:
        assert line["search"]["chosen"] == found[line["protocol"], f"logistic, AD-GDA, {line['row']}"]
    with pytest.raises(fm.BadInput, match="takes its settings from 'table2: "):
        reproduce(["figure2"], tmp_path / "alone", change=tiny)


def test_what_is_recorded_is_not_run_again_and_what_is_missing_is(tmp_path, monkeypatch):
    reproduce(["table4a"], tmp_path, change=tiny)
    before = (tmp_path / "table4a.jsonl").read_text()
    said = []
    monkeypatch.setattr(Runner, "lines", lambda *a: said.append("ran") or [])
    reproduce(["table4a"], tmp_path, change=tiny)
    assert not said
    assert (tmp_path / "table4a.jsonl").read_text() == before
    monkeypatch.undo()

    kept = [line for line in before.splitlines() if '"row": "alpha = 1"' not in line]
    (tmp_path / "table4a.jsonl").write_text("".join(line + "\n" for line in kept))
    reproduce(["table4a"], tmp_path, change=tiny)
    again = lines_of(tmp_path, "table4a")
    assert [line["final"] for line in again] == [json.loads(line)["final"] for line in before.splitlines()]


def test_a_row_that_was_changed_is_run_again(tmp_path):
    def other(row: Row) -> Row:
        return replace(tiny(row), experiment=replace(tiny(row).experiment, rounds=3))

    reproduce(["table4a"], tmp_path, change=tiny)
    reproduce(["table4a"], tmp_path, change=other)
    assert all(line["curve"]["round"][-1] == 3 for line in lines_of(tmp_path, "table4a"))


def test_runs_in_progress_are_kept_and_gone_on_with_and_cleared_when_recorded(tmp_path, monkeypatch):
    work = tmp_path / "work"
    stopped = fm.train

    def cut(*arguments, **options):
        """As if the machine went off in the middle of the second run of the group."""
        if len(list(work.glob("*"))) == 1 and not (tmp_path / "cut").exists():
            (tmp_path / "cut").touch()
            raise KeyboardInterrupt
        return stopped(*arguments, **options)

    monkeypatch.setattr("reproduction.batched.train", cut)
    with pytest.raises(KeyboardInterrupt):
        reproduce(["table4a"], tmp_path / "cut-off", change=tiny, work=work)
    assert any(work.rglob("checkpoint.safetensors"))
    reproduce(["table4a"], tmp_path / "cut-off", change=tiny, work=work)
    assert not any(work.iterdir())
    reproduce(["table4a"], tmp_path / "whole", change=tiny)
    ends = [[line["final"] for line in lines_of(tmp_path / name, "table4a")] for name in ("cut-off", "whole")]
    assert ends[0] == ends[1]


def test_curves_alone_take_what_was_recorded_before_and_are_run_again_when_that_changes(tmp_path):
    def other(row: Row) -> Row:
        return replace(tiny(row), search={"consensus_step": (0.2,)}) if row.recipe == "table2" else tiny(row)

    def few(rows):
        return lambda recipe: [
            row for row in rows_of(recipe) if row.protocol == "formula" and "quantization 8" in row.name
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reproduction.running.rows_of", few(rows_of))
        reproduce(["table2"], tmp_path, change=tiny)
        reproduce(["figure2"], tmp_path, change=tiny)
        before = lines_of(tmp_path, "figure2")
        reproduce(["table2", "figure2"], tmp_path, change=other)
    (after,) = lines_of(tmp_path, "figure2")
    assert before[0]["search"]["chosen"]["consensus_step"] != 0.2
    assert after["search"]["chosen"] == {"consensus_step": 0.2}


def test_data_that_is_missing_leaves_its_rows_out_and_the_others_run(tmp_path, data, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "fashion-mnist").symlink_to(data / "fashion-mnist")
    monkeypatch.setenv("FAIRMESH_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    left_out = reproduce(["table5"], tmp_path / "results", change=tiny)
    assert {label.split(",")[0] for label in left_out} == {"table5: CIFAR-10", "table5: COOS7"}
    assert "cannot fetch CIFAR-10" in left_out["table5: CIFAR-10, DRFA"]
    assert len(lines_of(tmp_path / "results", "table5")) == 4


def test_a_row_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def failing(self, group, found, original=Runner.lines):
        if group[0].protocol == "formula":
            raise fm.BadInput("no such luck")
        return original(self, group, found)

    monkeypatch.setattr(Runner, "lines", failing)
    with pytest.raises(fm.BadInput, match="no such luck"):
        reproduce(["table4a"], tmp_path, change=tiny)
    assert {line["protocol"] for line in lines_of(tmp_path, "table4a")} == {"published"}


@pytest.mark.slow  # two processes import torch
def test_processes_find_what_one_finds(tmp_path):
    reproduce(["table4a", "table5"], tmp_path / "one", change=tiny)
    reproduce(["table4a", "table5"], tmp_path / "two", change=tiny, jobs=2)
    for recipe in ("table4a", "table5"):
        one, two = lines_of(tmp_path / "one", recipe), lines_of(tmp_path / "two", recipe)
        assert [line["final"] for line in one] == [line["final"] for line in two]


def test_coos7_rows_run_where_its_files_are(tmp_path, monkeypatch):
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


def test_without_its_files_coos7_is_left_out_and_named(tmp_path):
    left_out = reproduce(["table4b"], tmp_path, change=tiny)
    assert list(left_out) == list(dict.fromkeys(row.label for row in rows_of("table4b")))
    assert all("put COOS7_v1.1_test4.hdf5 and COOS7_v1.1_test3.hdf5 into" in reason for reason in left_out.values())
    assert lines_of(tmp_path, "table4b") == []


@pytest.mark.parametrize("kept", [True, False], ids=["with checkpoints", "without"])
def test_a_row_of_which_a_seed_diverges_goes_to_the_next_best_candidate(tmp_path, kept):
    """A step of 1e30 does no harm in the search, which has one round, and shows only in the full run."""
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


def test_rows_that_differ_in_numbers_only_run_as_one():
    rows = [row for row in rows_of("table2") if row.protocol == "published"]
    assert [len(group) for group in grouped(rows)] == [2] * 12  # AD-GDA and, as published, CHOCO-SGD
    assert [len(group) for group in grouped(rows_of("table4a"))] == [3, 3]


def test_recorded_lines_are_of_the_recipes_as_they_stand():
    for recipe in RECIPES:
        lines = {(line["protocol"], line["row"]): line for line in lines_of(RECORDED, recipe)}
        for row in rows_of(recipe):
            if recipe not in NOT_HERE and "COOS7" not in row.name:
                recorded = lines.pop((row.protocol, row.name))
                assert recorded["settings"] == described(row), row.label
                assert is_as_its_recipe(recorded)
        assert not lines, "recorded, but of no recipe"


def test_curves_were_recorded_at_the_settings_that_are_recorded_for_the_tables():
    lines = {
        (line["protocol"], f"{recipe}: {line['row']}"): line
        for recipe in RECIPES
        for line in lines_of(RECORDED, recipe)
    }
    rows = [row for recipe in ("figure2", "figure3") for row in rows_of(recipe)]
    for row in rows:
        chosen = [lines[row.protocol, label]["search"]["chosen"] for label in (row.label, row.as_row)]
        assert chosen[0] == chosen[1], row.label


def test_a_line_takes_the_place_of_the_one_it_had(tmp_path):
    for value in (1, 2):
        record(tmp_path, {"recipe": "table4a", "row": "alpha = 1", "protocol": "formula", "value": value})
    record(tmp_path, {"recipe": "table4a", "row": "alpha = 10", "protocol": "formula", "value": 3})
    assert [line["value"] for line in lines_of(tmp_path, "table4a")] == [3, 2]  # in the order of the recipe
    for damage in (b"{", b"{}", b"[1]", b"\xff"):
        (tmp_path / "table4a.jsonl").write_bytes(b'{"recipe": "table4a", "row": "", "protocol": ""}\n' + damage)
        with pytest.raises(fm.BadInput, match=r"table4a.jsonl, line 2: .*; remove the line"):
            lines_of(tmp_path, "table4a")


def test_published_settings_are_those_of_the_published_runs():
    rows = {row.label: row for recipe in RECIPES for row in rows_of(recipe) if row.protocol == "published"}
    big = rows["table4a: alpha = 0.01"].experiment
    assert big.topology == fm.topologies.Circulant((1, 2))
    assert big.sampling == fm.Sampling(50, "cyclic")
    expected = fm.ADGDA(
        fm.schedules.Geometric(1.0, 0.998),
        0.01,
        regularizer=fm.regularizers.OwnCoordinate(0.01),
        dual_order="dual-first",
    )
    assert big.algorithm == expected
    assert rows["table4c: alpha = 0.1"].experiment.algorithm.regularizer == fm.regularizers.OwnCoordinate(1.0)
    four = rows["figure4: CIFAR-10, AD-GDA"].experiment.algorithm
    assert (four.consensus_step, four.compressor) == (0.8, fm.Quantize(4, rounding="ceil"))
    drfa = rows["table5: Fashion-MNIST, DRFA"].experiment
    assert drfa.rounds * drfa.algorithm.local_steps == 5000
    assert (drfa.algorithm.ascends, drfa.algorithm.probed, drfa.algorithm.floor) == ("error", "everyone", 1e-5)
    assert not any(row.search for label, row in rows.items() if label[:6] not in ("table2", "table3"))


def test_nothing_is_searched_on_test_data(tmp_path, monkeypatch):
    """Candidates are judged on sites whose test sets are cut from their training data."""
    seen = []
    trained = Runner._trained

    def watched(self, row, experiment, algorithms, rounds):
        seen.append((type(experiment.data), len(algorithms)))
        return trained(self, row, experiment, algorithms, rounds)

    monkeypatch.setattr(Runner, "_trained", watched)
    Runner().lines([tiny(rows_of("table5")[0])], {})
    assert seen == [(fm.data.HeldOut, 2), (fm.data.Fewer, 1)]
