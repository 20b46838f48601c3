"""Three sites of a job, over an engine that loses, repeats, delays and reorders calls, and that is restarted."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.experiment import load_experiment
from fairmesh.mesh.node.running import run_node
from fairmesh.mesh.node.state_lock import running_since
from fairmesh.nvflare import participant
from fairmesh.nvflare.calls import head_of, unpacked
from fairmesh.nvflare.job import Job
from fairmesh.nvflare.outcome import FAILED, FINISHED, INTERRUPTED
from fairmesh.nvflare.seals import OPENS, Half
from tests.mesh.experiments import experiment
from tests.mesh.fleet import KnowingSecrets
from tests.nvflare.standin import NAMES, SITES, Engine, Faults, exported, until
from tests.refusals import missing_from, refused

ROUNDS = 40


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    file = exported(tmp_path_factory.mktemp("simulated"), ROUNDS).parent / "trial.toml"
    return fm.run(load_experiment(file), process_group=KnowingSecrets(NAMES))


class Life(NamedTuple):
    """What the jobs of one run came to, in the order in which they were submitted."""

    bad: Engine  # loses, repeats, delays and reorders calls, until it no longer reaches the third site
    cut: dict[str, dict[str, Any]]
    twin: dict[str, Any]  # what a site says in a second job while the first is running
    aborted: dict[str, dict[str, Any]]
    last: Engine
    said: dict[str, dict[str, Any]]


def _turned_away(engine: Engine) -> bool:
    return any(b"gone" in answer for answer in engine.answers)


def _reach(engine: Engine, round: int) -> None:
    until(lambda: (engine.sites[SITES[0]].report().get("round") or 0) >= round, 120)


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lived")
    job = exported(folder, ROUNDS, patience_s=1.0)
    bad = Engine(job, folder, Faults(lost=0.1, unanswered=0.1, repeated=0.1, late=0.1, slow_s=0.005))
    bad.start()
    _reach(bad, 3)
    until(lambda: _turned_away(bad))
    bad.faults.cut = {frozenset((SITES[0], SITES[2])), frozenset((SITES[1], SITES[2]))}
    cut = bad.wait()
    second, twin = Engine(job, folder, Faults(slow_s=0.1)), Engine(job, folder, Faults())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(participant, "_LEFT_S", 0.1)
        second.start()
        until(lambda: all(running_since(site.state_folder) for site in second.sites.values()))
        twin.start()
        failed = twin.wait()[SITES[0]]
    _reach(second, cut[SITES[0]]["round"] + 1)
    aborted = second.abort()
    last = Engine(job, folder, Faults(lost=0.02, unanswered=0.02, repeated=0.05, late=0.05), seed=1)
    last.start()
    return Life(bad, cut, failed, aborted, last, last.wait(120))


def test_run_that_was_cut_off_and_aborted_is_continued_to_the_simulators_models_and_bytes(lived, simulated):
    assert {one["state"] for one in lived.said.values()} == {FINISHED}
    results = [lived.last.result(site) for site in SITES]
    for file in ("model.safetensors", "metrics.jsonl", "summary.json"):
        assert len({result[file] for result in results}) == 1, file
    record = json.loads(results[0]["metrics.jsonl"].splitlines()[-1])
    alone = simulated.final[0]
    for key in ("bytes_busiest_node", "bytes_total", "nominal_bits_total", "round"):
        assert record[key] == alone[key], key
    assert record["loss"]["sites"] == pytest.approx(alone["loss"]["sites"], abs=1e-10)
    assert record["lambda"] == pytest.approx(alone["lambda"], abs=1e-10)
    found = load_file(lived.last.sites[SITES[0]].state_folder / "result" / "model.safetensors")
    for name, tensor in simulated.state_dict(0, "last").items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6)


def test_neighbour_that_cannot_be_reached_ends_the_job_as_interrupted_and_is_named(lived):
    assert {one["state"] for one in lived.cut.values()} == {INTERRUPTED}
    assert lived.cut[SITES[0]]["missing"] == ["site-c"]
    assert not missing_from(lived.cut[SITES[0]]["reason"], "site-c", "1 s")
    assert lived.cut[SITES[0]]["round"] < ROUNDS


def test_second_job_of_a_run_fails_while_the_first_runs_on(lived):
    assert lived.twin["state"] == FAILED
    assert not missing_from(lived.twin["reason"], "another job of the run trial", "nvflare job abort")
    assert "round" not in lived.twin  # those of the other job
    assert {one["state"] for one in lived.aborted.values()} == {INTERRUPTED}
    assert all(one["round"] < ROUNDS for one in lived.aborted.values())


def test_faults_were_met(lived):
    numbers = [
        (caller, site, head["dialled"], head["answered"], head["number"])
        for caller, site, method, what in lived.bad.calls
        if method == "deliver"
        for head in [unpacked(what)[0]]
    ]
    assert len(set(numbers)) < len(numbers)  # some calls were repeated until they were confirmed
    assert _turned_away(lived.bad)  # and old ones


def test_no_message_of_the_run_is_sent_to_a_site_that_is_no_neighbour_of_it(lived):
    assert {(caller, site) for caller, site, method, _ in lived.bad.calls if method == "deliver"} <= {
        (a, b) for a in SITES for b in SITES if a != b
    }


def test_caller_that_lies_about_itself_or_about_the_run_is_turned_away(lived):
    there = lived.last.sites[SITES[1]]
    head = {"run": "trial", "from": "site-a", "to": "site-b", "dialled": Half().public, "answered": "", "number": -1}
    for key, value, told in (("from", "site-c", "site-c"), ("run", "other", "other"), ("to", "site-c", "site-c")):
        answer = json.loads(there.arrived(SITES[0], "deliver", head_of(**head | {key: value})))
        assert not missing_from(answer["gone"], "refused", told)
    for bad in (b"", b"\xff" * 3, b"\xff" * 40, head_of(run="trial"), head_of(**head | {"dialled": "00"})):
        assert "gone" in json.loads(there.arrived(SITES[0], "deliver", bad))
    with refused("stranger", "Site_A"):
        there.arrived("stranger", "deliver", head_of(**head))
    request = (lived.last.sites[SITES[2]].home / "site-c.csr").read_bytes()
    answer = lived.last.sites[SITES[0]].arrived(SITES[1], "enrol", request)  # asks in another's name
    assert b"refused" in answer


def test_opening_is_known_by_the_key_that_its_site_has_shown(lived):
    """Whatever the engine says about who calls: a server may say what it likes."""
    opening, sites = head_of(run="trial"), lived.last.sites
    signature = sites[SITES[2]]._enrolment.signed(OPENS + opening)
    knows = sites[SITES[1]]._enrolment.signed_by
    assert knows("site-c", OPENS + opening, signature)
    assert not knows("site-a", OPENS + opening, signature)
    assert not knows("site-c", OPENS + opening + b" ", signature)
    assert not knows("nobody", OPENS + opening, signature)


def test_site_whose_key_is_another_one_is_refused(lived, tmp_path):
    there, other = lived.last.sites[SITES[1]], lived.last.sites[SITES[2]].home / "site-c.pem"
    assert b"refused" in there.arrived(SITES[0], "introduce", other.read_bytes())
    assert b"refused" not in there.arrived(SITES[2], "introduce", other.read_bytes())


def test_run_is_not_continued_with_another_experiment(lived, tmp_path):
    other = exported(tmp_path, ROUNDS + 1)
    shutil.copytree(lived.last.folder / SITES[0], tmp_path / SITES[0], dirs_exist_ok=True)
    with refused("trial was begun", "another experiment", "experiment.toml", "--name"):
        Engine(other, tmp_path, Faults()).join(SITES[0])


def test_experiment_that_failed_before_its_first_round_is_replaced_under_the_same_name(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise fm.BadInput("the experiment's data has 5 sites, but the mesh has 3")

    with monkeypatch.context() as failing:
        failing.setattr(participant, "run_node", fails)
        engine = Engine(exported(tmp_path, 3), tmp_path, Faults())
        engine.start()
        assert {told["state"] for told in engine.wait().values()} == {FAILED}
    homes = [engine.sites[site].home for site in SITES]
    keys = [(home / f"{home.name}.key").read_bytes() for home in homes]
    assert all("5 sites" in (home / "failure.txt").read_text() for home in homes)
    (tmp_path / "corrected").mkdir()
    engine = Engine(exported(tmp_path / "corrected", 4), tmp_path, Faults())
    engine.start()
    assert {told["state"] for told in engine.wait().values()} == {FINISHED}
    assert {told["rounds"] for told in engine.wait().values()} == {4}
    assert [(home / f"{home.name}.key").read_bytes() for home in homes] == keys
    assert not any((home / "failure.txt").exists() for home in homes)
    with refused("is of a run inside NVFlare", "fairmesh nvflare keep"):
        run_node(homes[0] / "site.toml")


def test_job_s_files_are_compared_with_their_digests(tmp_path):
    job = exported(tmp_path)
    file = job / "app" / "config" / "fairmesh" / "experiment.toml"
    file.write_text(file.read_text() + "\n")
    with refused("experiment.toml", "SHA-256"):
        Job.read(job / "app" / "config", job / "app" / "custom")
    file.unlink()
    with refused("experiment.toml", "missing"):
        Job.read(job / "app" / "config", job / "app" / "custom")


def _half(folder: Path, rounds: int = 40) -> Path:
    """Runs a job that is aborted in the middle of its run. Returns the job's folder."""
    job = exported(folder, rounds)
    engine = Engine(job, folder, Faults(slow_s=0.05))
    engine.start()
    _reach(engine, 3)
    assert all(one["round"] < rounds for one in engine.abort().values())
    return job


@pytest.mark.slow
def test_folder_of_a_site_may_be_moved_between_jobs(tmp_path):
    job = _half(tmp_path)
    shutil.move(tmp_path / SITES[1] / "fairmesh", tmp_path / "elsewhere")
    (tmp_path / SITES[1] / "local").mkdir()
    settings = f'state = "{tmp_path / "elsewhere"}"\ndata = "experiment"\nallow_revealing = true\n'
    (tmp_path / SITES[1] / "local" / "fairmesh.toml").write_text(settings)
    engine = Engine(job, tmp_path, Faults())
    engine.start()
    assert {one["state"] for one in engine.wait(120).values()} == {FINISHED}
    assert engine.result(SITES[0]) == engine.result(SITES[1])


@pytest.mark.slow
@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("lost", SITES[:2])  # the one that signs, and another
def test_site_that_has_lost_its_folder_is_told_what_to_do(tmp_path, lost):
    job = _half(tmp_path)
    shutil.rmtree(tmp_path / lost)
    engine = Engine(job, tmp_path, Faults())
    engine.start()
    until(lambda: engine.sites[lost].state == FAILED, 60)
    reason = engine.sites[lost].report()["reason"]
    assert not missing_from(reason, "lost its folder of this run", "backup", "--name")
    engine.abort()


AD_GDA = {"name": "ad-gda", "primal_step": 0.1, "consensus_step": 0.3}
KINDS = {
    "dsgd": {"algorithm": "dsgd"},
    "choco-sgd": {"algorithm": "choco-sgd"},
    "dr-dsgd": {"algorithm": {"name": "dr-dsgd", "primal_step": 0.1, "temperature": 2.0}},
    "tracked": {"algorithm": {"name": "tracked-ad-gda"}},
    "top-k": {"algorithm": AD_GDA | {"compressor": {"name": "top-k", "fraction": 0.1}}},
    "random-k": {"algorithm": AD_GDA | {"compressor": {"name": "random-k", "fraction": 0.2}}},
    "sign": {"algorithm": AD_GDA | {"compressor": {"name": "sign"}}},
    "star": {"algorithm": AD_GDA, "topology": "star"},
    "complete": {"algorithm": AD_GDA, "topology": "complete"},
    "edges": {"algorithm": AD_GDA, "topology": {"name": "edges", "edges": [[0, 1], [1, 2]]}},
}


@pytest.mark.slow
@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")  # so few rounds do not let the sites agree
def test_every_kind_of_run_ends_where_the_simulator_ends(tmp_path, kind):
    options = {"dtype": "float64", "measure_every": 4, "checkpoint_every": 5}
    text = experiment(12, sampling={"batch": 20}, options=options, **KINDS[kind])
    engine = Engine(exported(tmp_path, text=text), tmp_path, Faults(lost=0.02, repeated=0.1, late=0.1))
    engine.start()
    assert {one["state"] for one in engine.wait(120).values()} == {FINISHED}
    record = json.loads(engine.result(SITES[0])["metrics.jsonl"].splitlines()[-1])
    alone = fm.run(load_experiment(tmp_path / "trial.toml"), process_group=KnowingSecrets(NAMES)).final[0]
    assert record["bytes_total"] == alone["bytes_total"]
    assert record["loss"]["sites"] == pytest.approx(alone["loss"]["sites"], abs=1e-10)
