"""A node's life from the outside: waiting, stopping, watching, ending where the simulator ends."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.cli.node import _expected_end, _site_rows, status
from fairmesh.cli.report import report
from fairmesh.experiment import load_experiment
from fairmesh.mesh.enrol.certificates import make_key, make_secret, secret_of
from fairmesh.mesh.enrol.roster import Mesh, SiteFile
from fairmesh.mesh.node import life
from fairmesh.mesh.node.membership import Membership, common_problem, facts, outputs_of_run, refuse_many_outputs
from fairmesh.mesh.node.rounds import identity_of
from fairmesh.mesh.node.running import run_node
from fairmesh.mesh.node.state_lock import locked
from fairmesh.mesh.node.watching import live_status, read_status, waiting_chain
from fairmesh.mesh.preflight import checks, privacy_checks
from fairmesh.mesh.wire.greeting import COMPATIBILITY
from fairmesh.report.contents import contents
from fairmesh.report.runs import Run
from fairmesh.storage.files import open_to_others, write_record
from fairmesh.training.rounds_per_second import Pace
from tests import toys
from tests.mesh import fleet
from tests.mesh.experiments import STEADY_AD_GDA, experiment
from tests.mesh.lives import RESULTS
from tests.refusals import missing_from, refused
from tests.trackers.test_tensorboard import read as read_events

NAMES = ["a", "b", "c"]
STARTING, ENDED = life.described(life.STARTING), life.described(life.NOT_RUNNING)
EXPERIMENT = experiment(
    120,
    algorithm=STEADY_AD_GDA,
    options={"measure_every": 40, "checkpoint_every": 25, "dtype": "float64"},
    observers=[{"name": "import", "path": "observing.py:Impatient"}],
)
OBSERVER = '''
import json
from dataclasses import dataclass
from pathlib import Path

import fairmesh as fm


@dataclass
class Impatient(fm.observers.Observer):
    """Keeps this site's records next to the file of this class, and asks to end the run at every one."""

    def after_round(self, round, state):
        for record in self.run.new_records:
            with open(Path(__file__).parent / "records.jsonl", "a") as file:
                print(json.dumps(record), file=file)
            self.run.stop("seen enough")
'''


def _until(condition, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except (fm.BadInput, OSError):
            pass
        time.sleep(0.05)
    raise TimeoutError("it never came true")


def _write_experiment(folder: Path) -> None:
    (folder / "experiment.toml").write_text(EXPERIMENT)
    (folder / "observing.py").write_text(OBSERVER)


def _scenario(folder: Path) -> None:
    _write_experiment(folder)
    fleet.provisioned(folder, folder / "experiment.toml", NAMES, listening=["a", "b"])
    seen: dict = {}
    # Alone it waits, and with little patience it stops.
    seen["patience"] = fleet.ended(fleet.start(folder, "a", patience_s=1.0), 60)
    seen["status alone"] = read_status(folder / "a" / "state")
    # Two of three: they know of each other and of whom they wait for.
    tracked = {"trackers": [fm.trackers.TensorBoard()]}
    running = {"a": fleet.start(folder, "a"), "b": fleet.start(folder, "b", **tracked)}
    _until(lambda: read_status(folder / "a" / "state")["sites"]["b"])
    seen["second node"] = fleet.ended(fleet.start(folder, "a"), 60)

    def held_back(point: str, step: int) -> None:
        if point == "computed" and step == 60:
            while not (folder / "go").exists():
                time.sleep(0.05)

    (port,) = fleet.free_ports(1)
    running["c"] = fleet.start(folder, "c", observe=held_back, monitor_port=port)
    status = _until(lambda: _waits(folder, "a", "c"))
    seen["status"] = status
    _until(lambda: len((folder / "a" / "state" / "progress" / "metrics.jsonl").read_text().splitlines()) == 2)
    shutil.copytree(folder / "a" / "state" / "progress", folder / "then" / "state" / "progress")
    page = _until(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode())
    seen["metrics"] = page
    # Asked to stop, it stops with its state, and goes on from it.
    os.kill(running["b"], signal.SIGTERM)
    seen["asked to stop"] = fleet.ended(running["b"], 60)
    running["b"] = fleet.start(folder, "b", **tracked)
    (folder / "go").touch()
    seen["ends"] = {name: fleet.ended(process, 120) for name, process in running.items()}
    seen["again"] = fleet.ended(fleet.start(folder, "a"), 60)
    (folder / "seen.json").write_text(json.dumps(seen))


def _waits(folder, name, whom):
    status = read_status(folder / name / "state")
    heard = all(told.get("metric_round") for told in status["sites"].values())
    return status if whom in status["waiting_for"] and heard and status["lambda"] else None


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    scenario = fleet.forked(lambda: _scenario(folder), folder / "scenario.log")
    assert fleet.ended(scenario, 400) == 0, (folder / "scenario.log").read_text()
    return folder, json.loads((folder / "seen.json").read_text())


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    _write_experiment(folder)
    fleet.provisioned(folder, folder / "experiment.toml", NAMES)
    return folder


@pytest.fixture
def site(sites, tmp_path) -> SiteFile:
    """A site of a mesh whose nodes have not been started."""
    return SiteFile.read(shutil.copytree(sites / "a", tmp_path / "a") / "site.toml")


def _events(folder, name):
    return [json.loads(line) for line in (folder / name / "state" / "log.jsonl").read_text().splitlines()]


def _last_record(folder):
    return json.loads((folder / "a" / "state" / "result" / "metrics.jsonl").read_text().splitlines()[-1])


def test_alone_a_node_waits_and_with_little_patience_stops_and_says_for_whom(lived):
    folder, seen = lived
    assert seen["patience"] == 1
    stopped = next(event for event in _events(folder, "a") if event["what"] == "stopped")
    assert missing_from(stopped["reason"], "b, c", "--patience") == []
    status = seen["status alone"]
    assert (status["sites"]["c"], status["metric"], status["metric_name"]) == ({}, None, "accuracy")


def test_asked_to_stop_it_keeps_its_state_which_is_no_error_and_the_run_ends_all_the_same(lived):
    folder, seen = lived
    assert seen["asked to stop"] == 1
    stopped = {name: [event for event in _events(folder, name) if event["what"] == "stopped"] for name in "ab"}
    levels = {name: [event["level"] for event in events] for name, events in stopped.items()}
    assert levels == {"a": ["warning"], "b": ["info"]}  # a was out of patience
    assert "round" in stopped["b"][0]["reason"]
    assert seen["ends"] == dict.fromkeys(NAMES, 0)
    assert seen["again"] == 0  # a finished run ends at once


def test_tracker_of_a_node_that_was_stopped_has_what_all_sites_measured_once(lived):
    folder, _ = lived
    events = read_events(folder / "b" / "state" / "trackers" / "tensorboard")
    metrics = (folder / "b" / "state" / "result" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in metrics]
    for i, name in enumerate(NAMES):
        curve = events.Scalars(f"accuracy/site/{name}")
        assert [one.step for one in curve] == [0, 40, 80, 120]
        assert [one.value for one in events.Scalars(f"lambda/{name}")][1] == pytest.approx(records[1]["lambda"][i])
    assert len(events.Tensors("result/text_summary")) == 1


def test_state_folder_cannot_be_shared_by_two_nodes(lived):
    folder, seen = lived
    assert seen["second node"] == 1
    assert missing_from((folder / "a.log").read_text(), folder / "a" / "state", "another") == []


def test_status_shows_who_is_where_and_who_waits_for_whom(lived):
    status = lived[1]["status"]
    assert (status["site"], status["mesh"], status["rounds"], status["generation"]) == ("a", "test-mesh", 120, 1)
    assert status["activity"] == "training"
    assert "c" in status["waiting_for"]  # and b for a moment, until its last message arrives
    assert status["prior"] == pytest.approx(dict.fromkeys(NAMES, 1 / 3), rel=0.01)
    assert status["refusing"] == []
    assert set(status["sites"]) == set(NAMES)
    told = status["sites"]["b"]
    assert 40 <= told["metric_round"] <= told["round"] <= 61
    assert 0 < told["metric"] <= 1
    assert 0 < told["weight"] < 1
    metrics = [site["metric"] for site in status["sites"].values()]
    assert (status["worst"], status["mean"]) == (min(metrics), pytest.approx(sum(metrics) / 3))
    edge = status["edges"]["c"]
    assert edge["connected"]
    assert edge["bytes_in"] > 1000
    assert 0 <= status["time"] - edge["last_seen"] < 60


def test_report_of_a_run_in_progress_has_curves_and_says_so(lived):
    folder, _ = lived
    report([folder / "then"])
    page = (folder / "then" / "state" / "progress" / "report.html").read_text()
    assert missing_from(page, "<svg", "Run then", "The run has 120 rounds", "its own model on its own test data") == []


@pytest.mark.slow
def test_report_of_the_end_has_curves_and_says_on_what_the_best_round_was_chosen(lived):
    folder, _ = lived
    report([folder / "a" / "state"])
    page = (folder / "a" / "state" / "result" / "report.html").read_text()
    (best,) = json.loads((folder / "a" / "state" / "result" / "summary.json").read_text())["best_round"]
    said = (f"of round {best}", "by the worst accuracy", "too good", "Only the last record is of their average")
    assert missing_from(page, "<svg", *said) == []


def test_expected_end_follows_the_rate_of_the_last_minutes_without_pauses():
    now, done = [0.0], 0
    pace = Pace(lambda: now[0])
    for _ in range(100):
        pace.note(done, paused=False)
        now[0], done = now[0] + 1, done + 10
    assert pace.rounds_per_s() == pytest.approx(10)
    pace.note(done, paused=True)
    now[0] += 3600
    pace.note(done, paused=True)
    assert pace.rounds_per_s() is None
    for _ in range(1000):
        pace.note(done, paused=False)
        now[0], done = now[0] + 1, done + 2
    assert pace.rounds_per_s() == pytest.approx(2)
    pace.note(5, paused=False)  # the sites went back
    assert pace.rounds_per_s() is None


def test_expected_end_is_said_with_the_rate_and_counts_down():
    seen = {"activity": "training", "paused_for": [], "seconds_left": 7200.0 + 60, "rounds_per_s": 0.5}
    assert missing_from(_expected_end(seen, 60.0), "in 2 h", "0.5 rounds per second") == []
    assert _expected_end(seen | {"paused_for": ["b", "c"]}, 0.0) == "paused, waiting for b, which waits for c"
    assert _expected_end(seen | {"seconds_left": None}, 0.0) is None
    assert _expected_end(seen | {"activity": "finished"}, 0.0) is None


@pytest.mark.parametrize("ahead", [86400.0, -86400.0])
def test_row_of_a_site_whose_clock_is_wrong_shows_when_it_was_heard(lived, ahead):
    status = lived[1]["status"]
    told = status["sites"]["b"] | {"heard_s_ago": 30.0, "time": status["time"] + ahead}
    told |= {"waiting_for": {"c": status["time"] + ahead - 40}}
    header, row = _site_rows(status | {"sites": {"b": told}}, "accuracy")
    shown = dict(zip(header, row))
    assert (shown["reported"], shown["waits for"]) == ("30 s ago", "c (70 s)")


def test_status_has_of_its_own_site_what_it_says_elsewhere_and_not_what_was_announced_before(lived):
    status = lived[1]["status"]
    here = status["sites"]["a"]
    newest = ("time", "round", "rounds_sent", "activity", "metric", "metric_round", "weight", "waiting_for", "wire_out")
    assert {field: here[field] for field in newest} == {field: status[field] for field in newest}
    assert here["heard_s_ago"] == 0.0
    for told in filter(None, status["sites"].values()):  # by the rows that each has announced
        assert told["interval"][0] < told["metric"] < told["interval"][1]


def test_status_of_a_finished_node_does_not_ask_whether_it_runs(lived, capsys):
    ended = read_status(lived[0] / "a" / "state")
    shown = _shown_with(lived, capsys, **(ended | {"time": time.time() - 3600}))
    assert "finished" in shown
    assert "running" not in shown


def _shown_with(lived, capsys, **changes) -> str:
    path = lived[0] / "a" / "state" / "status.json"
    before = path.read_text()
    write_record(path, lived[1]["status"] | changes)
    status(lived[0] / "a" / "site.toml")
    path.write_text(before)
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_status_shows_weights_of_one_round_that_sum_to_one(lived, capsys):
    """The newest weights of sites are of different rounds. With Tracked AD-GDA, also those of one round sum to one only
    in the course of the run."""
    weights = lived[1]["status"]["lambda"]
    assert weights["round"] in (0, 40)  # the row of round 40 may be on its way
    assert sum(weights["sites"].values()) == pytest.approx(1)
    sites = {name: told | {"weight": 0.45} for name, told in lived[1]["status"]["sites"].items()}
    shown = _shown_with(lived, capsys, sites=sites)
    shares = [f"{share:.4g}" for share in weights["sites"].values()]
    assert missing_from(shown, f"in round {weights['round']}", *shares) == []
    assert "0.45" not in shown
    assert "share" not in _shown_with(lived, capsys, **{"lambda": None})  # before all have measured a round


def test_status_of_a_killed_node_says_that_it_does_not_run_and_not_that_it_trains(lived, capsys):
    seen = lived[1]["status"]
    others = {name: told | {"heard_s_ago": 300.0, "activity": "training"} for name, told in seen["sites"].items()}
    shown = _shown_with(lived, capsys, sites=others, activity="training", seconds_left=60.0, rounds_per_s=1.0)
    assert missing_from(shown, "not running", "start it again", "silent; was training") == []
    assert "expected end" not in shown


def test_status_of_a_node_that_imports_says_that_it_starts(tmp_path):
    def status(**changes) -> dict:
        before = {"site": "a", "sites": {"a": {"activity": "training"}}, "activity": "training", "time": 0.0}
        write_record(tmp_path / "status.json", before | changes)
        return live_status(tmp_path)

    with refused("not been started", tmp_path):
        live_status(tmp_path)
    with locked(tmp_path):
        now = pytest.approx(time.time(), abs=5)
        assert live_status(tmp_path) == {"time": now, "running": True, "activity": STARTING}
        again = status()
        assert [again["activity"], again["sites"]["a"]["activity"], again["running"]] == [STARTING, STARTING, True]
        assert status(time=time.time() + 1)["activity"] == "training"
    assert live_status(tmp_path)["activity"] == ENDED
    assert status(activity="stopped")["activity"] == "stopped"


@pytest.mark.slow
def test_status_of_a_real_node_says_that_it_starts_then_what_it_does_and_that_it_was_killed(site):
    site, state = str(site.path), site.state
    node = subprocess.Popen([sys.executable, "-m", "fairmesh", "node", site], stderr=subprocess.DEVNULL)
    try:
        _until(lambda: live_status(state)["activity"] == STARTING)
        said = subprocess.run([sys.executable, "-m", "fairmesh", "status", site], capture_output=True, text=True)
        assert said.returncode == 0
        _until(lambda: live_status(state)["activity"] != STARTING)
        (state / "lock").unlink()
        second = subprocess.run([sys.executable, "-m", "fairmesh", "node", site], capture_output=True, text=True)
        assert second.returncode == 2
        assert missing_from(second.stdout + second.stderr, "another node", state) == []
    finally:
        node.kill()
        node.wait()
    assert live_status(state)["activity"] == ENDED


def test_prometheus_gets_rounds_edges_and_the_worst_site(lived):
    page = lived[1]["metrics"]
    assert re.search(r"^fairmesh_rounds 120\.0$", page, re.M)
    assert re.search(r'^fairmesh_connected\{site="a"\} 1\.0$', page, re.M)
    assert re.search(r'^fairmesh_edge_bytes_total\{direction="out",of="messages",site="b"\} [1-9]', page, re.M)
    worst, mean = (float(re.search(rf"^fairmesh_{what} (\S+)$", page, re.M)[1]) for what in ("worst", "mean"))
    assert 0 < worst <= mean <= 1


def test_sites_end_with_the_simulators_report(lived):
    folder, _ = lived
    results = [folder / name / "state" / "result" for name in NAMES]
    for file in (*RESULTS, "experiment.toml"):
        assert len({(result / file).read_bytes() for result in results}) == 1, file
    experiment = load_experiment(folder / "experiment.toml")
    simulated = dataclasses.replace(experiment, observers=())  # they would end a simulation
    expected = fm.run(simulated, process_group=fleet.KnowingSecrets(NAMES))
    lines = [json.loads(line) for line in (results[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 40, 80, 120]
    record, alone = lines[-1], expected.final[0]
    for key in ("bytes_busiest_node", "bytes_total", "nominal_bits_busiest", "nominal_bits_total", "round", "seed"):
        assert record[key] == alone[key], key
    for key in ("consensus_models", "consensus_duals"):
        assert record[key] == pytest.approx(alone[key], abs=1e-10), key
    assert record["lambda"] == pytest.approx(alone["lambda"], abs=1e-10)
    for metric in ("loss", "accuracy"):
        assert record[metric]["sites"] == pytest.approx(alone[metric]["sites"], abs=1e-10)
        assert record[metric]["worst"] == pytest.approx(alone[metric]["worst"], abs=1e-10)
    for which, file in (("last", "model"), ("time-average", "model-time-average")):
        found = load_file(results[0] / f"{file}.safetensors")
        for name, tensor in expected.state_dict(0, which).items():
            assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6)


def _edges(folder, name):
    return list(read_status(folder / name / "state")["edges"].values())


def test_counted_bytes_of_all_edges_are_the_algorithms_and_the_report_has_those_on_the_wire(lived):
    folder, _ = lived
    record = _last_record(folder)
    edges = [edge for name in "ac" for edge in _edges(folder, name)]
    assert all(edge["messages_out"] >= 120 for edge in edges)
    assert all(edge["messages_out"] >= 120 for edge in _edges(folder, "b"))  # which was stopped and started again
    assert sum(edge["bytes_out"] for edge in edges) >= record["bytes_busiest_node"] * 2 * 0.9
    for name in "ac":  # the report has them, and what is on the wire besides: at least a record of TLS per message
        wire = contents([Run.from_folder(folder / name / "state" / "result")], "")["runs"][0]["traffic"]["on_the_wire"]
        assert (wire["site"], wire["payload_out"]) == (name, sum(e["bytes_out"] for e in _edges(folder, name)))
        assert wire["overhead_out"] >= sum(43 * edge["messages_out"] for edge in _edges(folder, name))


def test_observers_see_this_site_s_records_and_cannot_end_the_run_alone(lived):
    folder, _ = lived
    end = _last_record(folder)
    for name in NAMES:
        records = [json.loads(line) for line in (folder / name / "records.jsonl").read_text().splitlines()]
        assert {record["round"] for record in records} == {0, 40, 80, 120}
        assert all(len(record["accuracy"]["sites"]) == 1 for record in records)
        assert records[-1]["round"] == end["round"] == 120
        warnings = [event for event in _events(folder, name) if event.get("reason") == "seen enough"]
        assert len(warnings) == (2 if name == "b" else 1)  # b was restarted


def test_logs_name_no_data(lived):
    folder, _ = lived
    known = {"time", "level", "what", "site", "sites", "reason", "since", "seconds", "round", "rounds", "folder",
             "accuracy", "loss", "file", "options", "more_times", "days", "address", "processor",
             "mesh", "generation", "fairmesh", "compatibility", "torch", "python", "threads", "device",
             "manifest", "files", "certificate", "signed", "facts", "data_and_model",
             "done", "of"}  # fmt: skip
    for name in NAMES:
        for event in _events(folder, name):
            assert event.keys() <= known, event


def test_log_begins_with_what_runs_here_and_that_it_was_approved(lived):
    folder, _ = lived
    membership = Membership.read(folder / "a" / "site.toml")
    events = _events(folder, "a")
    started, approved = events[0], events[1]
    assert (started["what"], approved["what"]) == ("started", "approved")
    assert started["fairmesh"] == fm.__version__
    assert started["compatibility"] == COMPATIBILITY
    assert started["torch"] == torch.__version__
    assert started["manifest"] == approved["manifest"] == membership.manifest.digest()
    for name, digest in membership.manifest.files.items():
        assert f"{name} {digest}" in started["files"]
    assert approved["since"].startswith("20")
    starts = [event for event in _events(folder, "b") if event["what"] == "started"]
    assert len(starts) == 2  # it was stopped once
    agreed = {event["facts"] for name in NAMES for event in _events(folder, name) if "facts" in event}
    assert len(agreed) == 1


def test_data_of_another_form_is_refused_by_the_sites_name_and_the_field():
    class Member:
        name, names = "a", ["a", "b"]
        mesh = type("M", (), {"present": [type("P", (), {"name": n}) for n in "ab"]})
        experiment = fm.Experiment(fm.data.Digits(), rounds=1)

    sites = fm.Problem(torch.nn.Linear(3, 2), [fm.Site((torch.randn(5, 3), torch.arange(5) % 2))]).prepared.sites
    mine = facts(sites[0])
    other = mine | {"inputs": ["torch.float32", [4]]}
    with refused("inputs", '["torch.float32", [4]] at b', '["torch.float32", [3]] at a'):
        common_problem(Member(), sites[0], {"a": mine, "b": other})  # type: ignore[arg-type]


TWO = {"a": {"outputs": 2}, "b": {"outputs": 3}}
ALL = TWO | {"gone": {"outputs": 5}}


@pytest.mark.parametrize(
    ("claimed", "known", "announced", "outputs"),
    [
        (0, {}, TWO, 2),
        (0, ALL, {}, 5),
        (10_000, ALL, TWO | {"b": {"outputs": 10_000}}, 5),  # this lie would end the run at all others
        (10_000, TWO, ALL, 5),  # it left before this site began, or lost its disk
        (0, TWO, ALL, 3),
        (7, TWO, TWO, 7),  # nobody here can say what the removed site needed
    ],
)
@pytest.mark.quick_cases("all")
def test_claims_add_outputs_up_to_what_the_labels_of_all_sites_need(claimed, known, announced, outputs):
    mine = fm.Site((torch.randn(4, 3), torch.arange(4) % 2))
    assert outputs_of_run(claimed, mine, known, announced, ["a", "b", "gone"]) == outputs


def test_data_with_more_classes_than_other_sites_accept_are_refused_at_the_site_itself():
    experiment = fm.Experiment(fm.data.Digits(), fm.Ring(), fm.ADGDA(), rounds=1)
    refuse_many_outputs({"outputs": 10_000}, experiment)
    with refused("10001 outputs", "10000", "classes"):
        refuse_many_outputs({"outputs": 10_001}, experiment)
    listed = fm.data.Table("rows.csv", "kind", "site", classes=tuple(map(str, range(20_000))))
    refuse_many_outputs({"outputs": 20_000}, dataclasses.replace(experiment, data=listed))


def test_site_that_left_cannot_start(site):
    Mesh.read(site.mesh).without("a").write(site.mesh)
    with refused("site a", "mesh test-mesh"):
        run_node(site.path)


def test_mesh_file_with_another_graph_than_the_experiments_is_refused(site):
    text = site.mesh.read_text().replace('neighbours = ["b", "c"]', 'neighbours = ["b"]')
    site.mesh.write_text(text.replace('neighbours = ["a", "b"]', 'neighbours = ["b"]'))
    with refused("a", "neighbours", "['b']", "['b', 'c']"):
        run_node(site.path)


def test_secret_of_the_draws_is_made_with_the_key_for_its_owner_alone(tmp_path):
    key, _ = make_key(tmp_path, "a")
    path = secret_of(key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_secret(path) == path.read_bytes() != os.urandom(32)
    assert len(path.read_bytes()) == 32


def test_secret_that_is_missing_or_damaged_in_a_run_is_refused(site):
    membership, path = Membership.read(site.path), secret_of(site.key)
    path.write_bytes(b"short")
    with refused(path, 5, 32, "backup", "remove"):
        membership.with_secret()
    path.unlink()
    assert len(membership.with_secret().secret) == 32  # the run has not begun, so another is made
    path.unlink()
    (site.state / "generation-1").mkdir(parents=True)
    (site.state / "generation-1" / "journal").touch()
    with refused(path, "backup", "fairmesh mesh restore"):
        membership.with_secret()
    (found,) = [check for check in checks(site.path) if check.what == "secret of the draws"]
    assert not found.ok


def test_checkpoint_of_another_secret_is_not_continued(site):
    membership, problem = Membership.read(site.path), toys.problem()
    secrets = None, fleet.secret("a"), fleet.secret("b")
    members = [dataclasses.replace(membership, secret=secret) for secret in secrets]
    identities = [identity_of(member, problem)["secret of the draws"] for member in members]
    assert len(set(identities)) == 3
    assert fleet.secret("a").hex() not in identities[1]


def test_batches_in_a_public_order_are_refused(tmp_path):
    file = tmp_path / "experiment.toml"
    file.write_text('sampling = { order = "cyclic" }\n' + experiment(3))
    with refused("cyclic", "random"):
        fleet.provisioned(tmp_path, file, NAMES)


def test_state_is_its_owners_alone_with_all_that_is_in_it(lived):
    folder, _ = lived
    state = folder / "a" / "state"
    assert state.stat().st_mode & 0o777 == 0o700
    assert [path for path in state.rglob("*") if open_to_others(path)] == []


def test_state_folder_that_others_can_read_is_closed_and_named_by_the_check(site):
    site.state.mkdir()
    site.state.chmod(0o755)
    found = {check.what: check for check in privacy_checks(site)}
    assert [what for what, check in found.items() if not check.ok] == ["state folder"]
    assert missing_from(found["state folder"].advice, 700, site.state) == []
    with locked(site.state):
        assert site.state.stat().st_mode & 0o777 == 0o700


def test_chain_of_waiting_ends_at_the_site_to_look_at():
    a, c = _said(9, 10, b=5.0, c=3.0), _said(8, 9, d=2.0)
    sites = {"a": a, "b": _said(9, 9), "c": c, "d": _said(7, 7)}
    assert waiting_chain("a", sites, "a") == (["a", "c", "d"], "")
    assert waiting_chain("d", sites, "a") == (["d"], "")
    assert waiting_chain("a", sites | {"d": _said(7, 8, c=1.0)}, "a") == (["a", "c", "d"], "")


def test_chain_of_waiting_ends_at_a_site_that_says_what_the_other_end_does_not_confirm():
    """c withholds its messages from a, and says that it waits for d, which has sent them, or for nobody knows whom."""
    sites = {"a": _said(9, 10, c=3.0), "c": _said(8, 9, d=2.0), "d": _said(9, 10, e=1.0), "e": _said(9, 9)}
    chain, says = waiting_chain("a", sites, "a")
    assert chain == ["a", "c"]
    assert missing_from(says, "c says that it waits for d", "which says that it has sent its message") == []
    del sites["d"]
    chain, says = waiting_chain("a", sites, "a")
    assert (chain, missing_from(says, "c says that it waits for d", "not said how far")) == (["a", "c"], [])


def test_site_that_says_that_it_has_sent_what_this_one_waits_for_is_shown_with_what_it_says():
    sites = {"a": _said(9, 10, c=3.0), "c": _said(9, 10, a=3.0)}
    assert waiting_chain("a", sites, "a") == (["a", "c"], "c says that it has sent its message")
    assert waiting_chain("a", {"a": sites["a"]}, "a") == (["a", "c"], "")  # which has said nothing
    slow = sites["c"] | {"activity": life.SLOW_DISK, "waiting_for": {}}  # it has not acknowledged what others sent
    assert waiting_chain("a", sites | {"c": slow}, "a") == (["a", "c"], "")


def test_chain_of_waiting_ends_at_a_site_that_is_away_whatever_it_has_said_before():
    sites = {"a": _said(9, 10, c=3.0), "c": _said(9, 10, d=3.0), "d": _said(9, 11)}
    assert waiting_chain("a", sites, "a", away={"c"}) == (["a", "c"], "")  # a says that it has sent its message
    sites["c"] = _said(8, 9, d=2.0)
    assert waiting_chain("a", sites, "a").says
    assert waiting_chain("a", sites, "a", away={"d"}) == (["a", "c", "d"], "")


def _said(done: int, sent: int, **since: float) -> dict:
    return {"round": done, "rounds_sent": sent, "waiting_for": since, "activity": life.TRAINING}
