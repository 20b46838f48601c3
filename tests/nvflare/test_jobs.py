"""What is written for NVFlare and read from it: jobs, sites' files, what sites allow, and the keeping of a run."""

import hashlib
import json
import math
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairmesh.cli.main import main
from fairmesh.errors import BadInput, FairmeshError
from fairmesh.mesh.enrol.certificates import make_authority
from fairmesh.nvflare import keep
from fairmesh.nvflare.job import Job, job_from, refuse_other_nvflare
from fairmesh.nvflare.keep import ABORTED, COMPLETED, Ended, GivenUp, Keeper, Kit
from fairmesh.nvflare.outcome import FAILED, INTERRUPTED, OUTCOME, report_of
from fairmesh.nvflare.participant import Participant
from fairmesh.nvflare.site_file import forbidden, refuse_forbidden, settings_of, written
from fairmesh.watch.sources import state_of
from tests.nvflare.standin import EXPERIMENT, NAMES, SITES, exported
from tests.refusals import missing_from, refused, refused_command


@pytest.fixture
def called(monkeypatch, capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fairmesh", "nvflare", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


@pytest.fixture
def experiment(tmp_path):
    file = tmp_path / "trial.toml"
    file.write_text(EXPERIMENT.format(rounds=20))
    return file


# Jobs


def test_experiment_that_cannot_be_a_job_is_refused_with_what_to_do(experiment, called, tmp_path):
    cases = [
        ("3", ('name = "ad-gda"\nprimal_step', 'name = "drfa"\n#'), ("drfa", "server", "tracked-ad-gda")),
        ("Site_A,site-a", ("", ""), ("Site_A", "site-a", "another name")),
        ("berlin,berlin", ("", ""), ("--sites", "berlin", "twice")),
        ("berlin", ("", ""), ("--sites", "two")),
        ("berlin,../paris,rome", ("", ""), ("../paris", "no name of NVFlare")),
        ("", ("", ""), ("--sites", "two")),
    ]
    for sites, (before, after), told in cases:
        experiment.write_text(EXPERIMENT.format(rounds=20).replace(before, after))
        refused_command(called("export", experiment, tmp_path / "job", "--sites", sites), *told)
        assert not (tmp_path / "job").exists()
    experiment.write_text(EXPERIMENT.format(rounds=20))
    refused_command(called("export", experiment, tmp_path / "j", "--sites", 3, "--track", "tensor"), "tensorboard")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    refused_command(called("export", experiment, tmp_path / "full", "--sites", 3), "exists already", "another folder")


def test_job_of_sixty_sites_has_them_all_and_no_code(experiment, called, tmp_path):
    experiment.write_text(EXPERIMENT.format(rounds=20).replace("nodes = 3", "nodes = 60"))
    code, out, err = called("export", experiment, tmp_path / "job", "--sites", 60, "--track", "mlflow", "--json")
    assert (code, json.loads(out)["code"]) == (0, []), err
    meta = json.loads((tmp_path / "job" / "meta.json").read_text())
    assert meta["deploy_map"] == {"app": ["server", *(f"site-{k + 1}" for k in range(60))]}
    assert meta["min_clients"] == len(meta["mandatory_clients"]) == 60
    assert not (tmp_path / "job" / "app" / "custom").exists()
    config = tmp_path / "job" / "app" / "config"
    assert "MLflowReceiver" in (config / "config_fed_server.json").read_text()
    job, mesh, files = Job.read(config, tmp_path / "job" / "app" / "custom")
    assert (job.run, len(job.sites), list(files)) == ("trial", 60, ["experiment.toml"])
    assert mesh.count(b"[[site]]") == 60


def test_measurements_go_to_the_server_only_with_track(experiment, called, tmp_path):
    asked: list[bool] = []
    for options, tracked in (((), False), (("--keep-model-at-sites",), False), (("--track", "mlflow"), True)):
        folder = tmp_path / f"job{len(options)}{tracked}"
        called("export", experiment, folder, "--sites", ",".join(SITES), *options)
        app = folder / "app"
        asked.clear()
        Participant(
            SITES[0], app / "config", app / "custom", tmp_path / "site", lambda *_: b"", bool,
            trackers=lambda first: asked.append(first) or (), simulated=True,
        )  # fmt: skip
        assert asked == [True] * tracked


def test_code_of_the_experiment_is_compared_before_it_is_imported(tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "mine.py").write_text("def sites(nodes):\n    raise RuntimeError\n")
    text = EXPERIMENT.format(rounds=20).replace('name = "digits"', 'name = "import"\npath = "mine.py:sites"')
    (tmp_path / "trial.toml").write_text(text.replace("nodes = 3", "arguments = { nodes = 3 }"))
    job, contents = job_from(tmp_path / "trial.toml", SITES)
    from fairmesh.nvflare.job import write_job

    write_job(job, contents, tmp_path / "job")
    code = tmp_path / "job" / "app" / "custom" / "mine.py"
    code.write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    with refused("mine.py", "SHA-256", "Nothing was imported"):
        _joined(tmp_path / "job", tmp_path)
    assert not ran.exists()


def test_job_brings_no_file_but_those_of_an_experiment():
    digest = "0" * 64
    names = ("../x.py", "/etc/passwd", "site-1.secret", "site-1.key", "site.toml", "state/x", ".x.py", "a/../../x.py")
    for name in names:
        with refused(name, "export"):
            Job("trial", {"a": "a", "b": "b"}, {"mesh.toml": digest, name: digest})
    with refused("SHA-256"):
        Job("trial", {"a": "a", "b": "b"}, {"mesh.toml": "../x"})
    with refused("mesh.toml"):
        Job("trial", {"a": "a", "b": "b"}, {})


def test_job_cannot_rename_a_site_whose_files_and_budget_go_by_its_name():
    for sites in ({"../../local": "berlin", "paris": "paris"}, {"berlin2": "berlin", "paris": "paris"}):
        with refused("other names", next(iter(sites)), "export"):
            Job("trial", sites, {"mesh.toml": "0" * 64})


@pytest.mark.parametrize("changed", ["site name", "secret", "mesh"])
def test_job_that_is_refused_leaves_no_file_at_a_site(changed, tmp_path):
    exported(tmp_path)
    app = tmp_path / "job" / "app" / "config" / "fairmesh"
    table = json.loads((app / "job.json").read_text())
    if changed == "site name":
        table["sites"] = {"../../local" if k == 0 else name: of for k, (name, of) in enumerate(table["sites"].items())}
    elif changed == "secret":
        (app / f"{SITES[0]}.secret").write_bytes(b"K" * 32)
        table["files"][f"{SITES[0]}.secret"] = hashlib.sha256(b"K" * 32).hexdigest()
    else:
        mesh = (app / "mesh.toml").read_bytes().replace(NAMES[0].encode(), b"somebody-else")
        (app / "mesh.toml").write_bytes(mesh)
        table["files"]["mesh.toml"] = hashlib.sha256(mesh).hexdigest()
    (app / "job.json").write_text(json.dumps(table))
    workspace = tmp_path / "workspace"
    (workspace / "local").mkdir(parents=True)
    with refused("job"):
        _joined(tmp_path / "job", workspace, simulated=True)
    assert [path.name for path in workspace.rglob("*")] == ["local"]


def _joined(job: Path, workspace: Path, site: str = SITES[0], simulated: bool = False) -> Participant:
    app = job / "app"
    return Participant(site, app / "config", app / "custom", workspace, lambda *_: b"", bool, simulated=simulated)


# Sites


def test_site_without_a_file_or_of_another_run_is_refused_before_its_node_starts(tmp_path):
    job = exported(tmp_path)
    with refused("local/fairmesh.toml", "missing", "fairmesh nvflare site"):
        _joined(job, tmp_path / "empty")
    with refused("berlin", "trial", *SITES, "--sites"):
        _joined(job, tmp_path, "berlin", simulated=True)
    (tmp_path / "local").mkdir()
    file = tmp_path / "local" / "fairmesh.toml"
    for content, told in (
        ('dat = "x"', ("dat", "did you mean 'data'")),
        ("patience = 3", ("patience",)),
        ("", ("data",)),
    ):
        file.write_text(content)
        with refused(file, *told):
            settings_of(tmp_path)
    assert not (tmp_path / "fairmesh").exists()


def test_sites_file_means_the_same_wherever_it_is_read(tmp_path, called, monkeypatch):
    local = tmp_path / "local"
    monkeypatch.chdir(tmp_path)
    refused_command(called("site", tmp_path, "--data", "patients.csv"), tmp_path, "startup")
    local.mkdir()
    refused_command(called("site", tmp_path, "--data", "patients.csv"), "no file", tmp_path / "patients.csv")
    assert not (local / "fairmesh.toml").exists()
    (tmp_path / "patients.csv").touch()
    written(tmp_path, "patients.csv", "")
    settings = settings_of(tmp_path)
    assert settings.state == tmp_path / "fairmesh"
    assert settings.table["data"] == {"name": "table", "file": str(Path("patients.csv").absolute())}
    with refused("not overwritten", "fairmesh nvflare site"):
        written(tmp_path, "other.csv", "")
    (local / "fairmesh.toml").write_text('state = "../kept"\n[data]\nname = "table"\nfile = "patients.csv"\n')
    settings = settings_of(tmp_path)
    assert settings.state.resolve() == tmp_path / "kept"
    assert settings.table["data"]["file"] == str(local / "patients.csv")


def test_site_refuses_rubbish_in_its_file_by_name(tmp_path, called):
    pytest.importorskip("nvflare", reason="NVFlare is not installed")
    (tmp_path / "local").mkdir()
    (tmp_path / "patients.csv").touch()
    (tmp_path / "mine.py").touch()
    file = tmp_path / "local" / "fairmesh.toml"
    table = '[data]\nname = "table"\nfile = "../patients.csv"\n'
    for content, told in (
        ('largest_epsilon = "abc"\n' + table, "largest_epsilon"),
        ("allow_revealing = 7\n" + table, "allow_revealing"),
        (table.replace("table", "tabel"), "did you mean 'table'"),
        (table.replace("file =", "fiel ="), "fiel"),
        (table.replace('"../patients.csv"', "7"), "file"),
        (table.replace("patients", "nosuch"), "nosuch.csv"),
        (table.replace('"../patients.csv"', '["../patients.csv", "../other.csv"]'), "other.csv"),
        ('data = "../nosuch.py:read"', "nosuch.py"),
    ):
        file.write_text(content)
        refused_command(called("site", tmp_path, "--allow"), "fairmesh.toml", told)
    for content in (table, 'data = "../mine.py:read"', 'data = "experiment"', table.replace("patients.csv", "*.csv")):
        file.write_text(content)
        code, _, err = called("site", tmp_path, "--allow")
        assert code == 0, err


def test_workspace_that_is_no_folder_is_refused_and_not_made(tmp_path, called):
    pytest.importorskip("nvflare", reason="NVFlare is not installed")
    refused_command(called("site", tmp_path / "typo", "--allow"), "no folder", "typo")
    assert not (tmp_path / "typo").exists()


def test_server_is_no_site_with_data(tmp_path, called):
    pytest.importorskip("nvflare", reason="NVFlare is not installed")
    for name in ("local", "startup"):
        (tmp_path / name).mkdir()
    (tmp_path / "startup" / "fed_server.json").write_text("{}")
    refused_command(called("site", tmp_path, "--data", "experiment"), "server", "leave --data out")
    assert not (tmp_path / "local" / "fairmesh.toml").exists()


def test_site_says_which_classes_it_does_not_allow_and_how_to_allow_them(tmp_path, called):
    pytest.importorskip("nvflare", reason="NVFlare is not installed")
    local = tmp_path / "local"
    local.mkdir()
    default = local / "resources.json.default"
    default.write_text(json.dumps({"class_allow_list": ["nvflare.app_common."], "components": [7]}))
    refused_command(called("site", tmp_path), "fairmesh.nvflare.client.SiteProcess", "--allow", "class_allow_list")
    with refused("this site does not allow", "fairmesh.nvflare.client.SiteProcess", "--allow"):
        refuse_forbidden(tmp_path)
    code, _, err = called("site", tmp_path, "--allow")
    assert (code, list(forbidden(tmp_path))) == (0, []), err
    refuse_forbidden(tmp_path)
    allowed = json.loads((local / "resources.json").read_text())
    assert not missing_from(allowed["class_allow_list"], "nvflare.app_common.", "fairmesh.nvflare.")
    assert allowed["components"] == [7]
    assert json.loads(default.read_text())["class_allow_list"] == ["nvflare.app_common."]
    (local / "resources.json").write_text("{")
    refused_command(called("site", tmp_path), "resources.json", "cannot be read")


def test_nvflare_that_is_missing_or_of_another_version_is_named(monkeypatch, called, tmp_path):
    monkeypatch.setattr(metadata, "version", lambda name: "2.8.1")
    with refused("2.8.1", "2.9", "pip install 'fairmesh[nvflare]'"):
        refuse_other_nvflare()

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    for command in (("site", tmp_path), ("keep", exported(tmp_path), "--kit", tmp_path)):
        code, _, err = called(*command)
        assert code, command
        assert not missing_from(err, "2.9", "pip install 'fairmesh[nvflare]'"), err


# What the server says


def test_server_refuses_other_clients_than_the_jobs_and_says_who_is_missing():
    pytest.importorskip("nvflare", reason="NVFlare is not installed")
    from fairmesh.nvflare.server import JobEnded, _judged, _refuse_other_sites

    job = Job("trial", {"site-a": "Site-A", "site-b": "Site-B", "c": "c"}, {"mesh.toml": "0" * 64})
    with refused("without Site-B, c", "with d", "--sites", error=JobEnded):
        _refuse_other_sites(job, ["Site-A", "d"])
    gone = {"state": INTERRUPTED, "reason": "c could not be reached for 3 s", "missing": ["c"]}
    state, reason = _judged(job, {"Site-A": gone, "Site-B": gone | {"missing": ["site-b"]}, "c": {"state": "finished"}})
    assert state == INTERRUPTED
    assert not missing_from(reason, "missing: c, Site-B", "Site-A, Site-B: c could not", "submit the same job again")
    state, reason = _judged(job, {"Site-A": gone, "Site-B": {"state": FAILED, "reason": "no data"}})
    assert (state, reason) == (FAILED, "Site-B: no data")


def test_report_of_a_site_keeps_what_it_can_mean_whatever_the_site_says():
    sites = ["a", "b"]
    whole = {"state": "running", "reason": "", "missing": [], "activity": "training", "round": 3, "rounds": 9}
    assert report_of(whole | {"worst": 0.5, "mean": 0.7}, sites) == whole | {"worst": 0.5, "mean": 0.7}
    odd = {"round": "3", "rounds": -1, "worst": math.nan, "mean": 10**400, "activity": "\x1b[2J", "more": [[]]}
    for missing in (None, "ab", 7, {"a": 1}):
        assert report_of(whole | odd | {"reason": 5, "missing": missing}, sites) == {
            "state": "running", "reason": "", "missing": []
        }  # fmt: skip
    told = report_of(whole | {"state": FAILED, "reason": "\x1b" + "x" * 10**6, "missing": [["b"], "b", "z", 5]}, sites)
    assert told["missing"] == ["b"]
    assert told["reason"].startswith("?x")
    assert len(told["reason"]) < 10_000
    for nothing in (None, [], "running", {}, {"state": "silent"}, {"state": ["running"]}):
        with refused("nothing", error=FairmeshError):
            report_of(nothing, sites)


# Keeping


class Server:
    """A deployment whose jobs end as a test says; an error in the list is raised when a job is submitted."""

    def __init__(self, *ends: Ended | Exception):
        self.ends, self.submitted, self.lost = list(ends), 0, list[str]()
        self.waiting, self.beats = False, 0.0
        self.looks, self.looked = 0, 0  # how often each job is looked at before it ends

    def submit(self, job: Path) -> str:
        self.submitted += 1
        if isinstance(self.ends[0], Exception):
            self.lost = ["lost"]
            raise self.ends.pop(0)
        return str(self.submitted)

    def running(self, name: str) -> list[str]:
        return self.lost

    def waits(self, job_id: str) -> bool:
        return self.waiting

    def heard(self) -> dict[str, float]:
        self.beats += 1
        return {SITES[0]: self.beats, SITES[1]: 1.0, "other": self.beats}

    def ended(self, job_id: str) -> Ended | None:
        self.lost = []
        self.looked = (self.looked + 1) % (self.looks + 1)
        return None if self.looked else self.ends.pop(0)


def _ended(state: str, round: int = 0, status: str = "FINISHED:EXECUTION_EXCEPTION") -> Ended:
    return Ended(status, {"state": state, "reason": f"because of {state}", "sites": {"a": {"round": round}}})


@pytest.fixture
def slept(monkeypatch):
    waits = []
    monkeypatch.setattr(keep, "time", SimpleNamespace(sleep=waits.append, monotonic=lambda: float(sum(waits))))
    return waits


def _kept(tmp_path: Path, server: Server, most: int = 9) -> tuple[list[str], Ended | GivenUp]:
    log: list[str] = []
    try:
        return log, Keeper(tmp_path / "job", server, most, 2.0, log.append).keep()
    except GivenUp as error:
        return log, error


def test_run_is_kept_through_interruptions_with_pauses_that_grow_while_nothing_is_done(tmp_path, slept):
    exported(tmp_path)
    still, further = _ended(INTERRUPTED, 7), _ended(INTERRUPTED, 8)
    server = Server(still, still, still, further, Ended("RUNNING, but", None), Ended(COMPLETED, None))
    log, last = _kept(tmp_path, server)
    assert (last.status, server.submitted) == (COMPLETED, 6)
    assert slept == [2, 4, 8, 2, 4]
    assert len([line for line in log if "because of interrupted" in line]) == 4
    assert len([line for line in log if "RUNNING, but" in line and "fairmesh nvflare site WORKSPACE" in line]) == 1


def test_job_whose_id_was_lost_is_watched_and_not_submitted_twice(tmp_path, slept):
    exported(tmp_path)
    server = Server(ConnectionError("no answer"), _ended(INTERRUPTED), Ended(COMPLETED, None))
    log, last = _kept(tmp_path, server)
    assert (last.status, server.submitted) == (COMPLETED, 2)
    assert not missing_from(log, "cannot be reached", "has the job lost")


def test_keeper_says_for_which_sites_a_job_waits_as_often_as_they_change(tmp_path, slept):
    exported(tmp_path)
    server = Server(Ended(COMPLETED, None))
    server.waiting, server.looks = True, 30
    log, _ = _kept(tmp_path, server)
    assert len([line for line in log if f"once {SITES[2]} is connected" in line]) == 2
    assert len([line for line in log if f"not heard {SITES[1]} for a minute" in line]) == 1


def test_log_of_keep_has_why_it_gave_up(tmp_path, called):
    pytest.importorskip("nvflare", reason="NVFlare is not installed")
    refused_command(called("keep", exported(tmp_path), "--kit", tmp_path), "fed_admin.json")
    assert not missing_from((tmp_path / "job.keep.log").read_text(), "gave up: ", "fed_admin.json")


def test_job_without_an_outcome_that_ran_for_long_does_not_make_the_pause_grow(tmp_path, slept):
    exported(tmp_path)
    unsaid = Ended("FINISHED:EXECUTION_EXCEPTION", None)
    server = Server(unsaid, unsaid, unsaid, Ended(COMPLETED, None))
    server.looks = int(keep._LONG_S / keep._LOOK_S) + 1
    _kept(tmp_path, server)
    assert [pause for pause in slept if pause != keep._LOOK_S] == [2, 2, 2]


def test_keeper_gives_up_after_two_jobs_that_ended_at_their_start_and_names_who_forbids_them(tmp_path, slept):
    exported(tmp_path)
    unsaid = Ended("FINISHED:EXECUTION_EXCEPTION", None)
    for ends, told in (
        ([unsaid, unsaid], ("fairmesh nvflare site WORKSPACE", "EXECUTION_EXCEPTION")),
        ([unsaid, unsaid._replace(forbidding=["rome"])], ("rome does not allow", "fairmesh nvflare site WORKSPACE")),
    ):
        server = Server(*ends)
        log, given_up = _kept(tmp_path, server)
        assert server.submitted == 2
        assert not missing_from(str(given_up), *told), given_up
    server = Server(unsaid, _ended(INTERRUPTED), unsaid, Ended(keep._LOST, None), unsaid, Ended(COMPLETED, None))
    log, last = _kept(tmp_path, server)
    assert (last.status, server.submitted) == (COMPLETED, 6)
    assert not missing_from(log, f"job 4: {keep._LOST}")


def test_keeper_says_that_the_server_lacks_the_result(tmp_path, slept):
    exported(tmp_path)
    log, _ = _kept(tmp_path, Server(Ended(COMPLETED, {"state": "finished", "reason": "", "result_failure": "no room"})))
    assert not missing_from(log, "no room", "fairmesh/trial/SITE/state/result")


def test_keeper_gives_up_where_submitting_again_would_not_help(tmp_path, slept):
    exported(tmp_path)
    for server, told in (
        (Server(_ended(FAILED)), "because of failed"),
        (Server(Ended(ABORTED, None)), "aborted by a person"),
        (Server(_ended(INTERRUPTED, status=ABORTED)), "aborted by a person"),
        (Server(*[_ended(INTERRUPTED)] * 3), "--most"),
    ):
        _, given_up = _kept(tmp_path, server, most=3)
        assert not missing_from(given_up, told)
    with refused("is not a job of fairmesh", "fairmesh nvflare export"):
        Keeper(tmp_path, Server(), 1, 1.0, print).keep()


@pytest.fixture
def kit(tmp_path, monkeypatch):
    pytest.importorskip("nvflare", reason="NVFlare is not installed")
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_admin.json").touch()
    return Kit(tmp_path)


def test_job_that_began_before_its_server_was_started_again_has_ended(kit, tmp_path):
    meta = {"status": "RUNNING", "last_schedule_time": 100.0}

    def downloaded(job_id: str, folder: str) -> None:
        (Path(folder) / OUTCOME).write_text('{"state": "finished", "reason": ""}')

    kit._session = session = SimpleNamespace(
        get_job_meta=lambda job_id: meta,
        get_system_info=lambda: SimpleNamespace(server_info=SimpleNamespace(start_time=50.0)),
        list_jobs=lambda: [{"job_id": "1", "job_name": "trial"}, {"job_id": "2", "job_name": "other"}],
        download_job_result=downloaded,
    )
    assert kit.ended("1") is None
    assert not kit.waits("1")
    assert kit.running("trial") == ["1"]
    session.get_system_info = lambda: SimpleNamespace(server_info=SimpleNamespace(start_time=150.0))
    assert "server was started again" in kit.ended("1").status
    assert kit.running("trial") == []
    meta["status"] = COMPLETED
    assert kit.ended("1") == Ended(COMPLETED, {"state": "finished", "reason": ""})
    meta["status"] = "SUBMITTED"
    assert kit.running("trial") == ["1"]
    assert kit.waits("1")
    berlin = SimpleNamespace(name="berlin", last_connect_time=7.0)
    session.get_system_info = lambda: SimpleNamespace(client_info=[berlin])
    assert kit.heard() == {"berlin": 7.0}
    with refused("startup/fed_admin.json"):
        Kit(tmp_path / "startup")


def test_job_that_the_server_has_lost_has_ended(kit):
    from nvflare.fuel.flare_api.api_spec import JobNotFound

    kit._session = SimpleNamespace(get_job_meta=raising(JobNotFound("no such job")), list_jobs=list)
    assert kit.ended("1") == Ended(keep._LOST, None)


def test_result_is_asked_for_again_while_the_connection_fails_and_not_for_ever(kit, tmp_path, monkeypatch):
    (tmp_path / "components").mkdir()
    (tmp_path / "components" / "ERRORLOG_rome").write_text("Component 'x' is not in allow_list")
    (tmp_path / "components" / "ERRORLOG_berlin").write_text("other")
    session = SimpleNamespace(
        get_job_meta=lambda job_id: {"status": "FINISHED:EXECUTION_EXCEPTION"},
        download_job_result=raising(TimeoutError("too slow")),
        download_job_components=lambda job_id: str(tmp_path / "components"),
        close=lambda: None,
    )
    monkeypatch.setattr("nvflare.fuel.flare_api.flare_api.new_secure_session", lambda *_: session)
    for _ in range(keep._DOWNLOADS - 1):
        with refused("too slow", error=ConnectionError):
            kit.ended("1")
    assert kit.ended("1") == Ended("FINISHED:EXECUTION_EXCEPTION", None, ["rome"])


def test_admin_whom_the_server_goes_on_to_refuse_is_named_and_a_server_that_is_away_is_awaited(kit, monkeypatch):
    from nvflare.apis.fl_exception import FLCommunicationError
    from nvflare.fuel.flare_api.api_spec import AuthenticationError, AuthorizationError, NoConnection

    def asked(*errors: Exception) -> list[type[Exception]]:
        return [_raised_by(kit, monkeypatch, error) for error in errors]

    away, nobody = NoConnection("no server"), AuthenticationError("who is this?")
    unregistered = FLCommunicationError("error:client_registration")
    unregistered.__context__ = FLCommunicationError("error:client_registration no certificate")
    assert asked(away, nobody, unregistered, away, nobody, unregistered) == [ConnectionError] * 6
    assert asked(nobody) == [BadInput]
    with refused("--user", kit._folder.name, "lead"):
        kit.heard()
    kit._session = SimpleNamespace(submit_job=raising(AuthorizationError("not authorized")), close=lambda: None)
    with refused("not authorized", "a role that may submit jobs"):
        kit.submit(kit._folder)


def test_certificate_of_the_admin_that_has_expired_is_named_once_the_server_cannot_be_reached(kit, monkeypatch):
    made = make_authority(kit._folder / "startup", "lead", -1.0)
    made.rename(made.with_name("client.crt"))
    assert _raised_by(kit, monkeypatch, ConnectionError("bad handshake")) is BadInput
    with refused("client.crt", "expired", "provision"):
        kit.heard()


def _raised_by(kit: Kit, monkeypatch, error: Exception) -> type[Exception]:
    """Returns what is raised when a new session raises this."""
    monkeypatch.setattr("nvflare.fuel.flare_api.flare_api.new_secure_session", raising(error))
    with pytest.raises((ConnectionError, BadInput)) as raised:
        kit.heard()
    return raised.type


def raising(error: Exception):
    def raises(*_, **__):
        raise error

    return raises


def test_site_toml_of_a_run_is_known_as_that_of_a_site(tmp_path):
    """By `fairmesh status`, `watch` and `report`, whose path the documentation names."""
    _joined(exported(tmp_path), tmp_path / "workspace", simulated=True)._enrolment.write()
    (file,) = (tmp_path / "workspace").rglob("site.toml")
    assert state_of(file) == (file.parent / "state", file)
    assert state_of(file.parent) == (file.parent / "state", file)
