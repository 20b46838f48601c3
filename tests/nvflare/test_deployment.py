"""Jobs in a provisioned project on this machine, whose processes are killed, and in NVFlare's simulator."""

import json
import shutil
import subprocess
import threading
import time
from contextlib import closing, suppress
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.experiment import load_experiment
from fairmesh.nvflare.keep import _REFUSALS, ABORTED, COMPLETED, Ended, GivenUp, Keeper, Kit
from fairmesh.nvflare.outcome import INTERRUPTED
from tests.mesh.fleet import KnowingSecrets, secret
from tests.nvflare.deployment import ADMIN, SITES, Project, project
from tests.nvflare.standin import EXPERIMENT, until
from tests.nvflare.test_results import DATA, MODEL, TEXT
from tests.refusals import refused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),
]  # NVFlare uses what is deprecated
pytest.importorskip("nvflare", reason="NVFlare is not installed")

ROUNDS = 240
FILES = ("model.safetensors", "model-best.safetensors", "metrics.jsonl")
ENVELOPE = rb'"dialled": "[0-9a-f]{64}"'  # in every call, inside what is sealed


def _exported(place: Project, run: str):
    file = place.folder / f"{run}.toml"
    file.write_text(EXPERIMENT.format(rounds=ROUNDS))
    place.command("fairmesh", "nvflare", "export", file, place.folder / run, "--sites", 3, "--patience", "20s")
    place.give_secrets(run)
    return place.folder / run


def _result(place: Project, run: str, site: str) -> dict[str, bytes]:
    folder = place.state(run, site) / "result"
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with project(tmp_path_factory.mktemp("poc")) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(place):
    job, kit = _exported(place, "undisturbed"), place.kit
    number = place.submitted(kit, job)
    until(lambda: place.round_of("undisturbed", "site-2") >= ROUNDS // 3, 200)
    seen = {
        who: place.memory_matches(ENVELOPE, what)
        for who, what in (("server", "nvflare.private.fed.app.server"), ("site", "worker_process"))
    }
    return seen, place.awaited(kit, number), _result(place, "undisturbed", "site-1")


def test_job_ends_at_the_simulators_models_and_hands_over_its_result(place, undisturbed):
    _, ended, result = undisturbed
    assert (ended.status, ended.outcome["state"]) == (COMPLETED, "finished")
    assert all(_result(place, "undisturbed", site) == result for site in SITES)
    alone = fm.run(load_experiment(place.folder / "undisturbed.toml"), process_group=KnowingSecrets(SITES)).final[0]
    record = json.loads(result["metrics.jsonl"].splitlines()[-1])
    assert (record["bytes_total"], record["round"]) == (alone["bytes_total"], ROUNDS)
    assert record["loss"]["sites"] == pytest.approx(alone["loss"]["sites"], abs=1e-10)


def test_server_that_relays_the_calls_has_no_plaintext_of_them(undisturbed):
    seen, _, _ = undisturbed
    assert seen["site"] > 10
    assert seen["server"] == 0


class Life(NamedTuple):
    """A run whose first job is aborted, and whose next ones lose a process each."""

    aborted: Ended
    abort_s: float
    log: list[str]  # of the keeper
    end: Ended
    results: list[dict[str, bytes]]


@pytest.fixture(scope="module")
def lived(place):
    job, kit, log, ends = _exported(place, "lived"), place.kit, [], []
    number = place.submitted(kit, job)
    _await_rounds(place)
    began = time.monotonic()
    kit._asked(lambda session: session.abort_job(number))
    until(lambda: not place.processes("worker_process"), 60)
    seconds, aborted = time.monotonic() - began, place.awaited(kit, number)
    keeper = threading.Thread(target=lambda: ends.append(Keeper(job, kit, 8, 1.0, log.append).keep()), daemon=True)
    keeper.start()
    _await_rounds(place)
    place.kill("worker_process", "site-2/startup")
    _await_rounds(place)
    place.kill("worker_process", "site-3/startup")
    place.kill("client_train", "site-3")
    _await_rounds(place)
    place.kill("runner_process")
    place.kill("server_train")
    until(lambda: not keeper.is_alive(), 300)
    assert ends, log
    return Life(aborted, seconds, log, ends[0], [_result(place, "lived", site) for site in SITES])


def _await_rounds(place: Project, count: int = 20) -> None:
    """Waits until a job has done more rounds of the run than the jobs before it."""
    until(lambda: not place.processes("worker_process") or place.round_of("lived", "site-2") < 0, 120)
    done = place.round_of("lived", "site-2")
    until(lambda: place.processes("worker_process") and place.round_of("lived", "site-2") >= done + count, 200)


def test_abort_stops_all_sites_within_seconds(lived):
    assert lived.aborted.status == ABORTED
    assert (lived.aborted.outcome or {"state": INTERRUPTED})["state"] == INTERRUPTED
    assert lived.abort_s < 30


def test_run_is_kept_through_killed_processes_clients_and_servers_to_the_bit_identical_end(lived, undisturbed):
    assert lived.end.status == COMPLETED, lived.log
    assert len([line for line in lived.log if "submitted" in line]) == 4, lived.log
    assert len([line for line in lived.log if "server was started again" in line]) == 1, lived.log
    assert lived.results == [undisturbed[2]] * 3


def test_keeper_gives_up_where_submitting_again_would_not_help(place):
    file = place.folder / "other-sites.toml"
    file.write_text(EXPERIMENT.format(rounds=ROUNDS).replace("nodes = 3", "nodes = 2"))
    place.command("fairmesh", "nvflare", "export", file, place.folder / "other", "--sites", "site-1,site-2")
    (place.folder / "other" / "app" / "config" / "fairmesh" / "experiment.toml").write_text("rounds = 1\n")
    keeper = Keeper(place.folder / "other", place.kit, 5, 1.0, lambda line: None)
    with pytest.raises(GivenUp, match="failed"):
        keeper.keep()


@pytest.fixture
def forbidding(place):
    """A site that no longer allows jobs of fairmesh."""
    resources = place.home / "site-3" / "local" / "resources.json"
    allowed = resources.read_text()
    resources.write_text(json.dumps(json.loads(allowed) | {"class_allow_list": ["nvflare.app_common."]}))
    yield "site-3"
    resources.write_text(allowed)


def test_keeper_names_the_site_that_does_not_allow_the_classes_of_the_job(place, undisturbed, forbidding):
    log: list[str] = []
    with pytest.raises(GivenUp, match=f"{forbidding} does not allow .* fairmesh nvflare site WORKSPACE"):
        Keeper(_exported(place, "forbidden"), place.kit, 5, 1.0, log.append).keep()
    assert len([line for line in log if "submitted" in line]) == 2, log


def test_site_that_does_not_allow_the_classes_refuses_jobs_with_code_too(place, undisturbed, forbidding):
    """NVFlare itself does not look at the list for such a job."""
    (place.folder / "mine.py").write_text(DATA + MODEL)
    (place.folder / "coded.toml").write_text(TEXT)
    place.command("fairmesh", "nvflare", "export", place.folder / "coded.toml", place.folder / "coded", "--sites", 3)
    with pytest.raises(GivenUp, match=f"{forbidding}: this site does not allow fairmesh.nvflare.client.SiteProcess"):
        Keeper(place.folder / "coded", place.kit, 5, 1.0, lambda line: None).keep()


def test_admin_whom_the_project_does_not_know_is_refused(place, undisturbed):
    admin = place.folder / "admins" / ADMIN
    shutil.copytree(place.home / ADMIN, admin)
    file = admin / "startup" / "fed_admin.json"  # in a provisioned project admins name themselves
    file.write_text(file.read_text().replace('"uid_source": "cert"', '"uid_source": "user_input"'))
    with closing(Kit(admin)) as known:
        assert known.heard().keys() == set(SITES)
    with closing(Kit(admin, "nobody@nvidia.com")) as unknown:
        for _ in range(_REFUSALS - 1):
            with suppress(ConnectionError):
                unknown.heard()
        with refused("nobody@nvidia.com", "--user"):
            unknown.heard()


def test_simulator_of_nvflare_ends_where_fairmeshs_simulator_ends(tmp_path):
    made = Project(tmp_path)
    file = tmp_path / "simulated.toml"
    file.write_text(EXPERIMENT.format(rounds=40))
    made.command("fairmesh", "nvflare", "export", file, tmp_path / "job", "--sites", 3, "--track", "tensorboard")
    (tmp_path / "ws").mkdir()
    made.command("fairmesh", "nvflare", "site", tmp_path / "ws", "--allow")
    state = tmp_path / "states"
    (tmp_path / "ws" / "local" / "fairmesh.toml").write_text(
        f'state = "{state}"\ndata = "experiment"\nallow_revealing = true\n'
    )
    for site in SITES:
        home = state / "simulated" / site
        home.mkdir(parents=True)
        (home / f"{site}.secret").write_bytes(secret(site))
    try:
        made.command("nvflare", "simulator", tmp_path / "job", "-w", tmp_path / "ws", "-n", 3, "-t", 3, seconds=300)
    except subprocess.TimeoutExpired as error:
        raise AssertionError((error.stdout or b"").decode()[-3000:]) from error
    alone = fm.run(load_experiment(file), process_group=KnowingSecrets(SITES))
    run_folder = tmp_path / "ws" / "server" / "simulate_job"
    record = json.loads((run_folder / "fairmesh" / "metrics.jsonl").read_text().splitlines()[-1])
    expected = alone.final[0]
    assert record["bytes_total"] == expected["bytes_total"]
    assert record["loss"]["sites"] == pytest.approx(expected["loss"]["sites"], abs=1e-10)
    saved = torch.load(run_folder / "FL_global_model.pt", weights_only=True)["model"]
    for name, tensor in alone.state_dict(0, "last").items():
        assert torch.allclose(saved[name], tensor, rtol=0, atol=1e-6)
    assert load_file(run_folder / "fairmesh" / "model.safetensors").keys() == saved.keys()
    assert (run_folder / "fairmesh" / "report.html").exists()
    assert (run_folder / "fairmesh" / "model-card.md").exists()
    assert list(run_folder.glob("tb_events/*/events*"))
    counted = sum(
        edge["bytes_out"]
        for site in SITES
        for edge in json.loads((state / "simulated" / site / "state" / "status.json").read_text())["edges"].values()
    )
    assert counted == expected["bytes_total"]
