"""What every tracker writes, when, and what a library that fails does to a run. The library here is a dictionary."""

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

import fairmesh as fm
from fairmesh.errors import MissingPackage
from fairmesh.networks.memory import SingleProcess
from fairmesh.storage.run_folder import TRACKERS
from fairmesh.trackers import trackers_of
from fairmesh.trackers.base import Tracker, replica_names
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.refusals import missing_from, refused

ALGORITHM = toys.ALGORITHMS["ad-gda"]


@dataclass
class Book(Tracker):
    """Keeps what it is told, by the library's name of the run."""

    fails_at: str = ""  # "open", "write", "write_result" or "close"
    runs: dict[str, list[tuple[int, dict[str, float]]]] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    intervals: dict[str, Any] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)

    extra: ClassVar[str] = "tensorboard"

    def load(self) -> None:
        pass

    def _may(self, what: str) -> None:
        if self.fails_at == what:
            raise OSError(28, "No space left on device")

    def open(self, replica, folder, alone) -> None:
        self._may("open")
        replica.id = replica.id or f"{len(self.runs)} {replica.name}"
        self.runs.setdefault(replica.id, [])
        self.settings[replica.id] = replica.flat_settings

    def write(self, replica, round, numbers) -> None:
        self._may("write")
        self.runs[replica.id].append((round, dict(numbers)))

    def write_result(self, replica, round, intervals, table) -> None:
        self._may("write_result")
        self.intervals[replica.id], self.tables[replica.id] = dict(intervals), table

    def close(self, replica, status) -> None:
        self._may("close")
        self.closed.append(status)


def train(observers, rounds=8, **options):
    options = {"measure_every": 2, "dtype": "float64", "trace": "no"} | options
    return fm.train(toys.problem(4), fm.Ring(), ALGORITHM, rounds, observers=observers, **options)


@pytest.fixture(scope="module")
def tracked():
    book = Book()
    return book, train([book])


def test_tracker_writes_curves_of_every_site_weights_and_bytes(tracked):
    book, result = tracked
    (rounds,) = book.runs.values()
    assert [round for round, _ in rounds] == [0, 2, 4, 6, 8]
    last, record = rounds[-1][1], result.final[0]
    for i, site in enumerate(result.problem.sites):
        assert last[f"accuracy/site/{site.name}"] == record["accuracy"]["sites"][i]
        assert last[f"lambda/{site.name}"] == record["lambda"][i]
    assert last["loss/worst"] == record["loss"]["worst"]
    assert (last["bytes_total"], last["consensus_models"]) == (record["bytes_total"], record["consensus_models"])
    assert book.closed == ["finished"]


def test_tracker_writes_the_result_with_the_intervals_of_the_summary(tracked):
    book, result = tracked
    (intervals,), (table,) = book.intervals.values(), book.tables.values()
    evidence = result.evidence()
    for i, row in enumerate(evidence["sites"]):
        where = f"interval/accuracy/site/{row['name']}"
        assert [intervals[f"{where}/low"], intervals[f"{where}/high"]] == row["interval"]
        assert table.rows[i][:5] == [row["name"], result.final[0]["accuracy"]["sites"][i], *row["interval"], row["n"]]
    assert intervals["interval/accuracy/worst/low"] == evidence["worst"]["interval"][0]
    assert table.markdown().count("\n") == 1 + len(result.problem.sites)


def test_tracker_writes_every_replica_as_a_run_with_its_own_settings():
    book = Book()
    algorithms = [fm.ADGDA(consensus_step=step) for step in (0.2, 0.4)]
    options = {"measure_every": 2, "trace": "no"}
    fm.train(toys.problem(4), fm.Ring(), algorithms, 2, seeds=(3, 5), observers=[book], **options)
    found = {(one["algorithm.consensus_step"], one["seed"]) for one in book.settings.values()}
    assert found == {(0.2, 3), (0.2, 5), (0.4, 3), (0.4, 5)}
    assert all([round for round, _ in rounds] == [0, 2] for rounds in book.runs.values())
    assert len(book.tables) == 4


def test_names_of_replicas_differ_and_say_in_what():
    def names(algorithms, seeds=(0,), placements=None):
        return replica_names(replicas_of(algorithms, seeds, placements, 4), "hospitals")

    assert names([ALGORITHM]) == ["hospitals"]
    assert names([ALGORITHM], (0, 1)) == ["seed 0", "seed 1"]
    swept = names([fm.ADGDA(consensus_step=0.2), fm.ADGDA(consensus_step=0.4)])
    assert swept == ["consensus_step=0.2", "consensus_step=0.4"]
    assert len(set(names([ALGORITHM], placements=3))) == 3


def test_tracker_continues_a_resumed_run_without_repeating_it(tmp_path):
    first, second = Book(), Book()

    class Stop(fm.observers.Observer):
        def after_round(self, round, state):
            if round == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # after round 6 was written, but its last checkpoint is that of round 4
        train([first, Stop()], out=tmp_path / "run", checkpoint_every=4)
    assert first.closed == ["interrupted"]
    train([second], out=tmp_path / "run", checkpoint_every=4, resume=True)
    assert list(second.runs) == list(first.runs)
    rounds = [round for book in (first, second) for round, _ in next(iter(book.runs.values()))]
    assert rounds == [0, 2, 4, 6, 8]


def test_tracker_that_joins_a_resumed_run_gets_the_earlier_records(tmp_path):
    train([], out=tmp_path / "run", rounds=4)
    book = Book()
    train([book], out=tmp_path / "run", resume=True)
    assert [round for round, _ in next(iter(book.runs.values()))] == [0, 2, 4, 6, 8]


def test_tracker_leaves_the_run_as_it_is(tmp_path):
    plain, tracked = train([], out=tmp_path / "plain"), train([Book()], out=tmp_path / "tracked")
    assert torch.equal(plain.row(), tracked.row())
    for name in ("metrics.jsonl", "model.safetensors", "experiment.toml"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "tracked" / name).read_bytes()
    train([], out=tmp_path / "tracked", rounds=10, resume=True)  # without it


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("fails_at", ["open", "write", "write_result", "close"])
def test_tracker_that_fails_says_so_once_and_the_run_goes_on(fails_at, caplog):
    with caplog.at_level(logging.WARNING, "fairmesh"):
        result = train([Book(fails_at), Book()], seeds=(0, 1))
    assert result.rounds == 8
    (said,) = [one.message for one in caplog.records if "Book" in one.message]
    assert missing_from(said, "Book", "No space left on device") == []


def test_tracker_without_its_library_is_refused_before_data_is_read(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with refused("pip install 'fairmesh[wandb]'", error=MissingPackage):
        fm.run(
            fm.Experiment(fm.data.Table("missing.csv", target="y", site="s"), rounds=2), observers=[fm.trackers.WandB()]
        )


@pytest.mark.slow
def test_tracker_of_other_processes_than_the_first_writes_nothing(monkeypatch):
    monkeypatch.setattr(SingleProcess, "is_leader", property(lambda self: False))
    book = Book()
    train([book])
    assert book.runs == {}


def test_trackers_of_a_command_line_have_a_name_and_perhaps_a_place():
    board = trackers_of(["tensorboard=runs/a=b"])
    assert board == [fm.trackers.TensorBoard("runs/a=b")]
    with refused("--track", "tensorbord", "tensorboard"):
        trackers_of(["tensorbord"])


def test_tracker_is_an_observer_that_files_name(tmp_path):
    (tmp_path / "a.toml").write_text('data = "digits"\n[[observers]]\nname = "mlflow"\nexperiment = "wards"\n')
    assert fm.load_experiment(tmp_path / "a.toml").observers == (fm.trackers.MLflow(experiment="wards"),)


def test_what_trackers_wrote_does_not_hold_up_a_restart_before_the_first_checkpoint(tmp_path):
    from fairmesh.storage.run_folder import JOB, RunFolder

    class Launched(SingleProcess):
        job = "17"

    (tmp_path / TRACKERS).mkdir()
    (tmp_path / JOB).write_text("17")
    assert not RunFolder(tmp_path, resume=False, process_group=Launched()).resuming
    (tmp_path / JOB).unlink()
    with refused(tmp_path, "not empty"):
        RunFolder(tmp_path, resume=False)
