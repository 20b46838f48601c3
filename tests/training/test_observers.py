"""Observers: what a run calls after every round, and what it may rely on."""

import csv
import json
import signal
from types import SimpleNamespace
from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

import fairmesh as fm
from fairmesh.networks.roles import OVER_NODES, Duals, Models, Role, StateView, SumsToZero, roles_of
from fairmesh.training.observers import CsvWriter, EarlyStopping, ObservedRun, Observer
from tests import toys
from tests.refusals import refused

ALGORITHM = toys.ALGORITHMS["ad-gda"]


def train(observers, rounds=8, **options):
    return fm.train(toys.problem(), fm.Ring(), ALGORITHM, rounds, measure_every=2, observers=observers, **options)


class Diary(Observer):
    def __init__(self):
        self.lines = []

    def start(self, run: ObservedRun) -> None:
        self.run = run
        self.lines.append(("start", run.round))

    def after_round(self, round, state) -> None:
        self.lines.append((round, len(self.run.new_records)))

    def finish(self, error) -> None:
        self.lines.append(("finish", type(error).__name__))


def test_observer_sees_every_round_and_what_was_measured_after_it_and_does_not_change_the_run():
    diary, shapes, told = Diary(), [], []
    functions = [lambda round, state: shapes.append((round, state.algorithm.models.shape[1]))]
    watch = fm.observers.Watch(lambda done, records: told.extend((done, record) for record in records))
    result = train([diary, *functions, watch], rounds=3)
    assert diary.lines == [("start", 0), (0, 1), (1, 0), (2, 1), (3, 1), ("finish", "NoneType")]
    assert shapes == [(0, 8), (1, 8), (2, 8), (3, 8)]
    assert told == [(record["round"], record) for record in result.records]
    assert torch.equal(result.row(), train([], rounds=3).row())


def test_observer_that_is_neither_is_refused():
    with refused("observers", "'csv'"):
        train(["csv"])


class Faulty(Observer):
    def after_round(self, round, state) -> None:
        if round == 5:
            raise RuntimeError("out of ink")


@pytest.mark.slow
def test_observer_that_raises_leaves_a_folder_that_resumes_to_the_same_end(tmp_path):
    diary = Diary()
    with refused("out of ink", error=RuntimeError):
        train([Faulty(), diary], out=tmp_path / "faulty", checkpoint_every=2)
    assert diary.lines[-1] == ("finish", "RuntimeError")
    resumed = train([], out=tmp_path / "faulty", checkpoint_every=2, resume=True)
    whole = train([], out=tmp_path / "whole", checkpoint_every=2)
    assert torch.equal(resumed.row(), whole.row())
    assert resumed.records == whole.records
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("faulty", "whole")]
    assert metrics[0] == metrics[1]


def test_observer_that_fails_to_start_leaves_a_folder_that_can_be_used(tmp_path):
    class Broken(Observer):
        def start(self, run):
            raise RuntimeError("no licence")

    with pytest.raises(RuntimeError):
        train([Broken()], out=tmp_path / "run")
    assert train([], out=tmp_path / "run", rounds=2).rounds == 2


def test_stop_ends_the_run_with_a_measured_result_and_a_checkpoint(tmp_path):
    class Enough(Observer):
        def after_round(self, round, state):
            if round == 3:
                self.run.stop("seen enough")

    result = train([Enough()], out=tmp_path / "run")
    assert (result.rounds, result.final[0]["round"], result.stop_reason) == (3, 3, "seen enough")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_early"] == "seen enough"
    extended = train([], out=tmp_path / "run", resume=True)
    assert torch.equal(extended.row(), train([]).row())


@pytest.mark.parametrize(("metric", "best"), [(None, max), ("loss", min)])
def test_early_stopping_waits_for_the_worst_site_to_stop_improving(metric, best):
    result = train([EarlyStopping(patience=2, metric=metric, split="test")], rounds=400)
    worst = [record[metric or "accuracy"]["worst"] for record in result.records]
    if metric is None or result.stop_reason is not None:
        assert result.stop_reason is not None
        assert len(worst) - 1 - worst.index(best(worst)) == 2
        assert result.rounds < 400
    assert best(worst[0], worst[-1]) == worst[-1]


@pytest.mark.parametrize("stopper", [EarlyStopping(split="test", metric="acuracy"), EarlyStopping()])
def test_early_stopping_refuses_what_is_not_measured(stopper):
    with refused("accuracy"):
        train([stopper])


def test_csv_writer_has_a_row_per_measurement_and_replica(tmp_path):
    path = tmp_path / "metrics.csv"
    result = train([CsvWriter(str(path))], rounds=4, seeds=(0, 1))
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["round"]), int(row["replica"])) for row in rows] == [(t, r) for t in (0, 2, 4) for r in (0, 1)]
    assert float(rows[-1]["accuracy_worst"]) == result.final[1]["accuracy"]["worst"]
    assert int(rows[-1]["bytes_total"]) == result.final[1]["bytes_total"]


def test_csv_writer_goes_on_with_the_file_of_a_resumed_run(tmp_path):
    writer = CsvWriter(str(tmp_path / "metrics.csv"))
    train([writer], rounds=4, out=tmp_path / "run")
    train([writer], rounds=8, out=tmp_path / "run", resume=True)
    with open(tmp_path / "metrics.csv", newline="") as file:
        assert [int(row["round"]) for row in csv.DictReader(file)] == [0, 2, 4, 6, 8]


def test_train_changes_no_signal_handler_and_no_environment(tmp_path, monkeypatch):
    import os

    handlers, environment = [], dict(os.environ)
    numbers = (signal.SIGINT, signal.SIGTERM)

    def look(round, state):
        handlers.append([signal.getsignal(number) for number in numbers])

    before = [signal.getsignal(number) for number in numbers]
    train([look], rounds=1, out=tmp_path / "run")
    assert all(now == before for now in handlers)
    assert dict(os.environ) == environment


def test_train_leaves_the_allocator_alone():
    from fairmesh.numerics import malloc

    seen = []
    train([lambda round, state: seen.append(bool(malloc.libraries))], rounds=1)
    assert not any(seen)
    with malloc.reused():
        assert malloc.libraries


class Inner(NamedTuple):
    duals: Duals
    gains: SumsToZero | None


class Outer(NamedTuple):
    models: Models
    plain: Tensor
    inner: Inner
    copies: Annotated[Inner | None, OVER_NODES]


def test_roles_of_nested_states_add_up_and_leave_out_what_is_none():
    one = torch.zeros(1, 2, 3)
    roles = roles_of(Outer(one, one, Inner(one, None), None))
    assert roles == {
        "state.models": Role(shows="models"),
        "state.plain": Role(),
        "state.inner.duals": Role(over_nodes=True, on_simplex=True, shows="duals"),
    }
    assert roles_of(Inner(one, one), outer=OVER_NODES)["state.gains"] == Role(over_nodes=True, sums_to_zero=True)


def test_state_view_reads_what_the_roles_show():
    one, two = torch.zeros(1, 2, 3), torch.ones(1, 2, 3)
    state = Outer(one, one, Inner(two, None), None)
    view = StateView(state)
    assert view.models(state) is one
    assert view.duals(state) is two
    assert view.own_weights(state) is None


def test_state_view_refuses_a_state_without_models_and_one_that_shows_a_thing_twice():
    one = torch.zeros(1, 2, 3)
    with refused("models"):
        StateView(Inner(one, None))
    with refused("several"):
        StateView(Outer(one, one, Inner(one, None), Inner(one, None)))


def test_metric_round_trips_through_an_experiment_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import fairmesh as fm\n\n\ndef spread(outputs, targets):\n    return outputs.std()\n\n\n"
        "LOW = fm.metrics.Metric(spread, higher_is_better=False)\n"
    )
    text = 'rounds = 1\nmetrics = { low = "mine.py:LOW" }\ndata = "digits"\ntopology = "ring"\nalgorithm = "dsgd"\n'
    (tmp_path / "run.toml").write_text(text)
    experiment = fm.load_experiment(tmp_path / "run.toml")
    fm.run(experiment, out=tmp_path / "run")
    again = fm.load_experiment(tmp_path / "run" / "experiment.toml")
    assert again.metrics["low"].higher_is_better is False


def test_csv_writer_keeps_the_rows_of_a_node_that_is_restarted_without_records(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("round,bytes_total\n0,0\n40,7\n80,9\n")
    group = SimpleNamespace(is_leader=True)
    training = SimpleNamespace(network=SimpleNamespace(process_group=group))
    fm.observers.CsvWriter(str(path)).start(SimpleNamespace(training=training, records=[], round=80))
    assert path.read_text().split() == ["round,bytes_total", "0,0", "40,7"]
