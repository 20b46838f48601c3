"""What a path is, and views of the folders of runs while these are written, resumed, moved away and ended."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import fairmesh as fm
from fairmesh.cli.node import status as node_status
from fairmesh.storage.files import write_record
from fairmesh.storage.run_status import DIVERGED, FAILED, STOPPED, locked
from fairmesh.watch import finished
from fairmesh.watch.answers import answers
from fairmesh.watch.finished import Finished
from fairmesh.watch.now import DIED, FINISHED, GONE, TRAINING, UNSEEN
from fairmesh.watch.page import rendered
from fairmesh.watch.sources import source_of
from fairmesh.watch.view import Curve, Curves, Estimate, Variant, View
from tests import toys
from tests.mesh.statuses import seen, waiting
from tests.refusals import missing_from, refused
from tests.watch.folders import NAMES, record, records, run_folder, status

ROUNDS = 6
NOT_YET = {"round": -1, "sites": []}


@pytest.fixture
def folder(tmp_path):
    return run_folder(tmp_path / "wards")


@pytest.fixture(autouse=True)
def report_in_this_process(monkeypatch):
    """A process of its own takes seconds to start."""
    monkeypatch.setattr(finished, "asked", lambda folder: json.loads(json.dumps(finished.told_by_report(folder))))


def _named(view: View) -> dict:
    return {site.name: site for site in view.sites}


def test_run_in_progress_shows_its_round_its_sites_and_its_curves(folder):
    with locked(folder):
        view = source_of(folder).view()
    assert (view.kind, view.title, view.state, view.live, view.urgency) == ("run", "wards", TRAINING, True, "fine")
    assert (view.round, view.rounds, view.rounds_per_s) == (150, 400, 0.5)
    assert view.seconds_left == pytest.approx(500, abs=5)
    assert missing_from(view.sentence, "round 150 of 400", "about 8 minutes left", "north, 65.0 % (55.0 to 75.0)") == []
    north = _named(view)["north"]
    assert (north.value.value, north.value_round, north.rows, north.weight, north.prior) == (0.65, 150, 100, 0.5, 0.2)
    assert (view.worst_site, view.order) == (0, (0, 1, 2))
    assert [edge.ends for edge in view.edges] == [(0, 1), (1, 2)]
    assert view.curves.rounds == (0, 50, 100, 150)
    assert (view.traffic.sent, view.traffic.total, view.traffic.per_s) == (15000, 45000, 50.0)
    assert view.log[-1].text == "training data is in memory"
    assert 0 <= view.age_s < 10


def test_run_whose_process_was_killed_has_died(folder):
    view = source_of(folder).view()
    assert (view.state, view.live, view.seconds_left) == (DIED, False, None)
    assert {site.state for site in view.sites} == {"died"}
    assert "connection" in rendered(view)["network"]
    assert "cannot be reached" not in rendered(view)["network"]


@pytest.mark.parametrize(("state", "shown"), [(STOPPED, "stopped"), (FAILED, "stopped"), (DIVERGED, "diverged")])
@pytest.mark.quick_cases("all")
def test_sites_of_a_run_that_ended_early_have_not_finished(tmp_path, state, shown):
    view = source_of(run_folder(tmp_path / "wards", state=state)).view()
    assert {site.state for site in view.sites} == {shown}


def test_run_that_was_started_by_a_command_can_be_resumed_by_the_one_that_is_named(tmp_path):
    folder = run_folder(tmp_path / "two words")
    (folder / "checkpoint.safetensors").touch()
    assert source_of(folder).view().says == ()
    (folder / "experiment.toml").write_text('[data]\nname = "digits"\n')
    command = f"fairmesh run '{folder}/experiment.toml' --out '{folder}' --resume"
    assert source_of(folder).view().says == (f"to continue it, in the folder where it was started: {command}",)
    with locked(folder):
        assert source_of(folder).view().says == ()


def test_run_that_trains_its_references_has_not_finished(ended, tmp_path):
    folder = shutil.copytree(ended[0], tmp_path / "toy")
    phase = {"name": "training each site alone", "done": 618, "of": 2000}
    names = json.loads((folder / "summary.json").read_text())["sites"]
    of_four = {"sites": names, "rows": [1] * 4, "prior": [0.25] * 4, "measured": NOT_YET}
    (folder / "status.json").write_text(json.dumps(status(round=ROUNDS, rounds=ROUNDS, phase=phase, **of_four)))
    with locked(folder):
        view = source_of(folder).view(wait=True)
    said = "all rounds are done; now training each site alone, 618 of 2,000 steps"
    assert view.sentence.startswith(said)
    assert (view.live, view.state, view.urgency) == (True, phase["name"], "fine")
    died = source_of(folder).view(wait=True)
    assert missing_from(died.sentence, "has died after all rounds", "training each site alone", "--resume") == []


def test_run_that_begins_to_train_its_references_while_its_report_is_read_has_not_finished(
    ended, tmp_path, monkeypatch
):
    folder = shutil.copytree(ended[0], tmp_path / "toy")

    def begins(of):
        told = status(round=ROUNDS, rounds=ROUNDS, phase={"name": "training references", "done": 0, "of": 0})
        (folder / "status.json").write_text(json.dumps(told))
        return {"why_not": "it takes seconds"}

    monkeypatch.setattr(finished, "asked", begins)
    with locked(folder):
        assert source_of(folder).view(wait=True).sentence.startswith("all rounds are done; now training references")


def test_sites_of_a_sweep_and_their_curves_are_those_of_the_variant_that_is_shown(tmp_path):
    variants = [{"changes": {"step": s}, "replicas": [k]} for k, s in enumerate((0.05, 0.8))]
    folder = run_folder(tmp_path / "sweep", variants=variants, replicas=2, measured=NOT_YET)
    lines = [record(done, [0.4 + r / 5, 0.8, 0.9], replica=r) for done in (0, 50) for r in range(2)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    view = source_of(folder).view()
    assert view.curves.worst.values == pytest.approx((0.6, 0.6))
    assert [curve.values[-1] for curve in view.curves.sites] == pytest.approx([0.6, 0.8, 0.9])
    assert any("chosen on test data" in text for text in view.notes)


def test_worst_site_of_a_variant_is_that_of_the_means_over_its_replicas_as_in_the_sentence(tmp_path):
    variants = [{"changes": {"step": s}, "replicas": [2 * k, 2 * k + 1]} for k, s in enumerate((0.1, 1.0))]
    folder = run_folder(tmp_path / "sweep", variants=variants, replicas=4, measured=NOT_YET)
    values = ([0.1, 0.2, 0.3], [0.1, 0.2, 0.3], [0.6, 0.7, 0.9], [0.8, 0.7, 0.9])
    (folder / "metrics.jsonl").write_text("".join(record(50, of, replica=r) for r, of in enumerate(values)))
    view = source_of(folder).view()
    assert view.variants[1].worst.value == view.worst.value == pytest.approx(0.7)


def test_run_of_another_machine_is_judged_by_the_age_of_its_news(tmp_path):
    fresh = run_folder(tmp_path / "fresh", machine="another")
    assert source_of(fresh).view().live
    assert source_of(run_folder(tmp_path / "old", machine="another", time=time.time() - 600)).view().state == UNSEEN
    assert source_of(run_folder(tmp_path / "nfs", locked=False)).view().live
    assert source_of(run_folder(tmp_path / "ahead", locked=False, time=time.time() + 9e9)).view().age_s == 0.0


def test_intervals_belong_to_the_values_that_are_shown_also_while_there_are_newer_records(folder):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(records(200))
    site = source_of(folder).view().sites[0]
    assert (site.value.value, site.value.interval, site.value_round) == (0.65, (0.55, 0.75), 150)


def test_folder_that_is_moved_away_keeps_its_last_view_and_one_that_returns_is_read_anew(folder):
    source = source_of(folder)
    before = source.view()
    folder.rename(folder.with_name("wards-old"))
    gone = source.view()
    assert (gone.state, gone.live, gone.sites, gone.curves) == (GONE, False, before.sites, before.curves)
    run_folder(folder, 0, 10, sites=[*NAMES, "west"], measured=NOT_YET, rows=[1] * 4, prior=[0.25] * 4, round=10)
    (folder / "metrics.jsonl").write_text(record(0, [0.1] * 4) + record(10, [0.2, 0.3, 0.4, 0.5]))
    again = source.view()
    assert (again.state, len(again.sites), again.curves.rounds) == (DIED, 4, (0, 10))
    assert again.sites[3].value.value == 0.5


def test_resumed_run_goes_on_from_its_checkpoint(folder):
    source = source_of(folder)
    assert source.view().curves.rounds == (0, 50, 100, 150)
    (folder / "metrics.partial").write_text(records(0, 50, 100))
    os.replace(folder / "metrics.partial", folder / "metrics.jsonl")
    assert source.view().curves.rounds == (0, 50, 100)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 99}', '{"run": 1}', '{"run": 1, "time": 1.0, "sites": 3}'])
@pytest.mark.quick_cases("all")
def test_status_that_cannot_be_read_is_no_error(folder, text):
    (folder / "status.json").write_text(text)
    view = source_of(folder).view()
    assert (view.state, view.urgency, view.live) == (UNSEEN, "look", False)


def test_status_of_another_version_is_told_from_none_and_from_a_damaged_one(folder):
    source = source_of(folder)
    (folder / "status.json").write_text('{"run": 99, "version": "7.1"}')
    assert "version 7.1 of fairmesh has written its status.json" in source.view().sentence
    (folder / "status.json").write_text("{")
    assert "its status.json is damaged" in source.view().sentence
    (folder / "status.json").unlink()
    assert "it has no status.json" in source.view().sentence


def test_run_that_hangs_shows_no_speed_and_no_time_left(tmp_path):
    folder = run_folder(tmp_path / "hangs", time=time.time() - 720)
    with locked(folder):
        view = source_of(folder).view()
    assert (view.quiet, view.rounds_per_s, view.seconds_left, view.live) == (True, None, None, True)
    assert "no news for 12 minutes" in view.sentence


def test_sweep_shows_every_algorithm_and_the_sites_of_the_best_so_far(tmp_path):
    variants = [{"changes": {"step": s}, "replicas": [2 * k, 2 * k + 1]} for k, s in enumerate((0.1, 1.0))]
    folder = run_folder(tmp_path / "sweep", variants=variants, replicas=4, measured=NOT_YET)
    lines = [record(50, [0.5 + r / 10, 0.8, 0.9], replica=r) for r in range(4)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    view = source_of(folder).view()
    assert (view.kind, [one.name for one in view.variants]) == ("sweep", ["step = 0.1", "step = 1.0"])
    assert [one.shown for one in view.variants] == [False, True]
    assert view.sites[0].value.value == pytest.approx(0.75)
    assert [one.curves.worst.low for one in view.variants] == [(0.5,), (0.7,)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that has finished, and what was seen of it from round to round."""
    folder, views = tmp_path_factory.mktemp("runs") / "toy", []

    def look(done: int, state: object) -> None:
        views.append(source_of(folder).view())

    fm.train(
        toys.problem(4), fm.Ring(), toys.ALGORITHMS["ad-gda"], ROUNDS, out=folder, observers=[look], measure_every=2
    )
    return folder, views


def test_real_run_says_its_round_and_then_has_a_result(ended):
    folder, views = ended
    assert all(view.live for view in views)
    assert {view.state for view in views} <= {TRAINING, "preparing", "summing up"}
    assert views[-1].curves.rounds == (0, 2, 4, 6)
    assert len(views[-1].edges) == 4
    assert not (folder / "status.json").exists()
    view = source_of(folder).view(wait=True)
    assert (view.state, view.live, view.urgency, view.round) == (FINISHED, False, "fine", ROUNDS)
    assert missing_from(view.sentence, f"finished after {ROUNDS} rounds") == []
    assert all(site.value and site.rows for site in view.sites)
    assert view.curves.rounds == (0, 2, 4, 6)


def test_curves_of_a_finished_sweep_are_those_of_the_variant_that_the_report_shows(tmp_path, monkeypatch):
    variants = [{"changes": {"step": s}, "replicas": [k]} for k, s in enumerate((0.05, 0.8))]
    curves = [Curves((0, 9), Curve((0.1, low)), Curve((0.2, 0.5))) for low in (0.3, 0.4)]
    view = replace(
        View("sweep", "toy", FINISHED, "", "fine", 0.0, 0.0),
        variants=tuple(Variant(f"step = {one['changes']['step']}", c) for one, c in zip(variants, curves)),
        curves=curves[0],
    )
    told = {"sites": [], "worst_first": [], "privacy": {}, "says": [], "notes": [], "edges": [], "bytes": (0, 0)}
    told |= dict.fromkeys(("sentence", "urgency", "advice", "worst", "mean", "server"), None)
    rows = [{"worst": None, "mean": None, "diverged": 0, "shown": k == 1} for k in range(2)]
    told |= {"variants": [row | {"name": one.name} for row, one in zip(rows, view.variants)]}
    (tmp_path / "summary.json").touch()
    monkeypatch.setattr(finished, "asked", lambda folder: told)
    assert Finished(tmp_path).added_to(view, wait=True).curves is curves[1]


def test_report_that_fails_is_named_and_the_rest_is_shown(ended, monkeypatch):
    monkeypatch.setattr(finished, "asked", lambda folder: {"why_not": "outcomes are damaged"})
    view = source_of(ended[0]).view(wait=True)
    assert view.state == FINISHED
    assert any("outcomes are damaged" in note for note in view.notes)
    assert view.worst is not None


@pytest.mark.slow
def test_report_of_a_finished_run_is_asked_in_a_process_of_its_own(ended, monkeypatch):
    monkeypatch.undo()
    told = finished.asked(ended[0])
    assert told["sentence"].startswith("finished after")
    assert "why_not" in finished.asked(ended[0] / "nowhere")


def test_run_that_diverged_says_so(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(fm.errors.Diverged):
        fm.train(toys.problem(4), fm.Ring(), fm.algorithms.DSGD(1e9), 30, out=folder, measure_every=5)
    view = source_of(folder).view()
    assert (view.state, view.urgency, view.live) == ("diverged", "act", False)


def test_what_is_no_run_is_refused_with_what_to_give(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    (tmp_path / "exp.toml").write_text('rounds = 4\ndata = "digits"\n')
    (tmp_path / "mesh.toml").write_text('[mesh]\nname = "clinics"\ngeneration = 1\n\n[[site]]\nname = "north"\n')
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.json").write_text('{"accuracy": 0.5}')
    for name, words in {
        "missing": ["there is no", "site.toml"],
        "empty": ["is empty"],
        "notes": ["no run's folder"],
        "exp.toml": ["experiment", "runs/exp"],
        "mesh.toml": ["about all sites of a mesh", "north/site.toml"],
        "old": ["summary.json", "version"],
        ".": ["wards"],
    }.items():
        with refused(*words):
            source_of(tmp_path / name)


WITHOUT_TORCH = """
import sys
from pathlib import Path
from fairmesh.cli.without_torch import leave_out_torch
leave_out_torch()
from fairmesh.watch.sources import source_of
print(source_of(Path(sys.argv[1])).view().state, sorted({"torch._C", "numpy.linalg", "scipy._lib"} & set(sys.modules)))
"""


def test_page_that_runs_for_weeks_holds_no_library_that_computes(folder):
    ended = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, folder], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == f"{DIED} []"


@pytest.fixture
def state(tmp_path):
    (tmp_path / "north").mkdir()
    log = [
        {"time": f"2030-03-17T17:00:{k:02}Z", "level": "info", "what": "connected", "site": f"s{k}"} for k in range(40)
    ]
    (tmp_path / "north" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log) + '{"cut')
    return tmp_path / "north"


def _node(state: Path, status: dict, running: bool = True, lock_time: float = 0.0) -> View:
    from fairmesh.mesh.node.state_lock import locked as node_locked

    table = {key: value for key, value in status.items() if key not in ("running", "uses")}
    if not running:
        write_record(state / "status.json", table)
        return source_of(state).view()
    with node_locked(state):
        shift = time.time() - seen()["time"]
        waits = {name: since + shift for name, since in status["waiting_for"].items()}
        write_record(state / "status.json", table | {"time": status["time"] + shift, "waiting_for": waits})
        os.utime(state / "lock", (lock_time, lock_time))
        return source_of(state).view()


def test_node_shows_what_it_sees_and_marks_what_others_say(state):
    view = _node(state, seen(votes={"remove east": ["south"]}))
    assert (view.kind, view.title, view.seen_from, view.live) == ("node", "oncology", "west", True)
    assert missing_from(view.sentence, "round 1,840 of 4,000", "north", "by its own word") == []
    sites = _named(view)
    assert sites["west"].claimed == frozenset()
    assert {"round", "value"} <= sites["north"].claimed
    assert (view.worst_site, view.worst.value) == (1, 0.71)
    assert {edge.ends: edge.connected for edge in view.edges} == {
        (0, 1): True,
        (1, 2): None,
        (2, 3): None,
        (0, 3): True,
    }
    assert view.votes[0].voters == ("south",)
    assert len(view.log) == 20  # the last line of the file is being written
    assert view.log[-1].text == "connected: site s39"
    assert view.order[0] == 0


def test_node_that_waits_shows_for_whom_since_when_and_who_cannot_be_reached(state):
    status = waiting("north", "east")
    status["edges"]["north"] = status["edges"]["north"] | {"connected": False}
    status["sites"]["south"] |= {"waiting_for": {"east": status["time"] - 103.0}}
    status["sites"]["east"] = {}
    view = _node(state, status)
    assert [(w.site, w.awaited, round(w.seconds, -1), w.seen) for w in view.waits] == [
        (0, 1, 720, True),
        (3, 2, 100, False),
    ]
    assert view.chain == (0, 1, 2)
    assert [site.state for site in view.sites] == ["at work", "unreachable", "unknown", "waits"]
    assert view.seconds_left is None


def test_node_that_died_stopped_or_starts_is_shown_as_that(state):
    died = _node(state, seen(), running=False)
    assert (died.state, died.live, died.sites[0].state) == ("not running", False, "died")
    assert died.waits == ()
    stopped = _node(state, seen(activity="stopped", ended={"reason": "asked", "diverged": False}), running=False)
    assert (stopped.state, stopped.urgency, stopped.sites[0].state) == ("stopped", "act", "stopped")
    finished = _node(state, seen(activity="finished"), running=False)
    assert (finished.state, finished.urgency, {site.state for site in finished.sites}) == (
        "finished",
        "fine",
        {"ended"},
    )


def _before_its_end() -> dict:
    """The status that west has written last, while it and south waited."""
    status = waiting("north", "east", phase={"what": "finding reference losses", "done": 1, "of": 2})
    status["sites"]["west"] |= {"waiting_for": {"north": status["time"] - 720.0}}
    status["sites"]["south"] |= {"waiting_for": {"east": status["time"] - 103.0}}
    return status


def test_waits_and_connections_of_before_are_not_those_of_a_node_that_has_died_or_starts_again(state):
    for running in (False, True):
        view = _node(state, _before_its_end() | {"time": seen()["time"] - 180}, running, time.time() + 9)
        assert view.state == ("starting" if running else "not running")
        assert (view.waits, view.chain, view.missing, view.phase, view.rounds_per_s) == ((), (), None, None, None)
        assert {edge.connected for edge in view.edges} == {None}
        assert {site.state for site in view.sites[1:]} == {"unknown"}
        assert not view.quiet
        made = [answer.answer for answer in answers(view)]
        assert made[:2] == (["Yes: starting", "Not known yet"] if running else ["No: not running", "This site"])


def test_status_of_a_node_that_has_died_says_how_old_its_news_is_and_no_connection_or_wait(state, capsys):
    write_record(state / "status.json", _before_its_end() | {"time": time.time() - 97})
    node_status(state)
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    rows, edges = ([dict(zip(lines[k], line)) for line in lines[k + 1 : end]] for k, end in ((0, 5), (5, 8)))
    assert [row["site"] for row in rows] == ["west", "north", "east", "south"]
    assert {(row["waits for"], row["reported"]) for row in rows} == {("", "100 s ago")}  # 3 seconds old at that time
    assert {edge["neighbour"]: edge["connected"] for edge in edges} == {"north": "", "south": ""}


def test_wait_of_a_site_that_is_away_or_silent_is_over(state):
    """It had said so before it died, and would not know for whom it waits now."""
    waits = {"waiting_for": {"west": seen()["time"] - 60.0}}
    status = seen(edges={"north": seen()["edges"]["north"] | {"connected": False}, "south": seen()["edges"]["south"]})
    for name in ("north", "east", "south"):
        status["sites"][name] |= waits
    status["sites"]["east"] |= {"heard_s_ago": 400.0}
    view = _node(state, status)
    assert [site.state for site in view.sites] == ["at work", "unreachable", "silent", "waits"]
    assert [(wait.site, wait.awaited) for wait in view.waits] == [(3, 0)]
    assert view.sites[1].doing == "was training"
    status["sites"]["south"] |= {"heard_s_ago": 400.0}  # it has a connection, and says nothing
    assert _node(state, status).waits == ()


def test_status_of_a_finished_node_says_the_sentence_of_its_page(state, ended, capsys):
    shutil.copytree(ended[0], state / "result")
    _node(state, seen(activity="finished"), running=False)
    view = source_of(state).view(wait=True)
    assert view.sentence.startswith(f"finished after {ROUNDS} rounds; ")
    node_status(state)
    assert capsys.readouterr().err.startswith(view.sentence)


def test_finished_node_does_nothing_any_more(state):
    view = _node(state, seen(activity="finished"), running=False)
    assert {site.doing for site in view.sites} == {""}


def test_page_says_that_a_report_is_being_read(ended, monkeypatch):
    read = threading.Event()
    monkeypatch.setattr(finished, "asked", lambda folder: (read.wait(10), {"why_not": "no"})[1])
    view = source_of(ended[0]).view()
    read.set()
    assert view.state == FINISHED
    assert "report of this run is being read" in view.says[-1]
    assert rendered(view)["network"] == ""  # whose connections are not known yet
    assert "Not known yet" in [one.answer for one in answers(view) if one.question.startswith("What should I do")]


def test_report_of_other_sites_than_the_view_has_changes_no_site(ended, monkeypatch):
    told = finished.told_by_report(ended[0])
    told = told | {"sites": told["sites"] * 2, "worst_first": [7, *range(7)]}
    monkeypatch.setattr(finished, "asked", lambda folder: json.loads(json.dumps(told)))
    view = source_of(ended[0]).view(wait=True)
    assert sorted(view.order) == [0, 1, 2, 3]
    assert view.sentence == told["sentence"]


def test_warnings_that_repeat_each_other_are_one_line_with_a_count(state):
    def line(minute, level, what, **more):
        return json.dumps({"time": f"2030-03-17T17:{minute:02}:00Z", "level": level, "what": what} | more)

    warned = [line(k, "warning", "cannot connect", site="south", more_times=4) for k in range(1, 25)]
    lines = [line(0, "info", "connected", site="south"), *warned, line(9, "warning", "waiting", sites="south")]
    lines += [line(30, "info", "connected", site="south"), line(40, "warning", "cannot connect", site="south")]
    (state / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert [one.text for one in _node(state, seen()).log] == [
        "connected: site south",
        "cannot connect: site south (96 times since 2030-03-17 17:01:00)",
        "waiting: sites south",
        "connected: site south",
        "cannot connect: site south",
    ]


def test_node_shows_what_its_log_says_of_refusals_also_when_newer_lines_follow(state):
    head = {"time": "2030-03-17T17:00:00Z", "level": "warning"}
    refusal = head | {"what": "refused", "address": "10.0.0.7", "reason": "a certificate of another authority"}
    message = head | {"what": "refuses a site's messages; told to all sites", "site": "south"}
    newer = [head | {"level": "info", "what": "connected", "site": f"s{k}"} for k in range(40)]
    (state / "log.jsonl").write_text("\n".join(map(json.dumps, [refusal, message, *newer, refusal])) + "\n")
    texts = [line.text for line in _node(state, seen()).refused]
    assert len(texts) == 2
    assert missing_from(texts[0], "refuses a site's messages", "south") == []
    assert missing_from(texts[1], "refused: address 10.0.0.7", "another authority", "2 times") == []
    (state / "log.jsonl").write_text("\n".join(map(json.dumps, newer)) + "\n")
    assert _node(state, seen()).refused == ()


def test_node_shows_the_intervals_of_all_sites(state):
    status = seen()
    status["sites"]["north"] |= {"interval": [0.64, 0.77]}
    view = _node(state, status)
    assert view.worst == view.sites[1].value == Estimate(0.71, (0.64, 0.77))
    assert view.sites[0].value == Estimate(0.84)
    assert "71.0 % (64.0 to 77.0) by its own word" in view.sentence


def test_wrong_clock_at_a_site_makes_no_wait_negative(state):
    for wrong in (-1e9, 1e9):
        status = seen()
        status["sites"]["north"] |= {
            "time": status["time"] + wrong,
            "waiting_for": {"east": status["time"] + wrong - 9},
        }
        (wait,) = _node(state, status).waits
        assert 9 <= wait.seconds < 60
        status["sites"]["north"]["waiting_for"] = {"east": status["time"] + wrong + 1e9}
        assert _node(state, status).waits[0].seconds >= 0


def test_node_of_sixty_sites_some_removed_has_those_that_need_attention_first(state):
    told = seen()["sites"]["north"]
    sites = (
        {"west": told}
        | {f"s{k}": told | {"round": 100 + k} for k in range(58)}
        | {"s9": {}, "s8": told | {"heard_s_ago": 9e3}}
    )
    view = _node(state, seen(sites=sites, removed=["left"], edges={}, graph=[["west", "left"], ["west", "s3"]]))
    names = [view.sites[i].name for i in view.order]
    assert (len(names), names[:4]) == (59, ["west", "s9", "s8", "s0"])
    assert (view.removed, [edge.ends for edge in view.edges]) == (("left",), [(0, 4)])


def test_node_whose_folder_is_removed_while_it_is_watched_keeps_its_last_view(state):
    _node(state, seen(), running=False)
    source = source_of(state)
    before = source.view()
    shutil.rmtree(state)
    gone = source.view()
    assert (gone.live, gone.urgency, gone.sites) == (False, "act", before.sites)
