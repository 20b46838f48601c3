"""Three sites of a job, over an engine that loses, repeats, delays and reorders calls, and that is restarted."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.experiment import load_experiment
from fairmesh.nvflare.calls import packed, unpacked
from fairmesh.nvflare.job import Job
from fairmesh.nvflare.outcome import FAILED, FINISHED, INTERRUPTED
from tests.mesh.fleet import KnowingSecrets
from tests.nvflare.standin import NAMES, SITES, Engine, Faults, exported, until
from tests.refusals import missing_from, refused

ROUNDS = 20


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    file = exported(tmp_path_factory.mktemp("simulated"), ROUNDS).parent / "trial.toml"
    return fm.run(load_experiment(file), process_group=KnowingSecrets(NAMES))


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """Runs a job whose calls fail in all ways, aborts it in the middle, and submits it again."""
    folder = tmp_path_factory.mktemp("lived")
    job = exported(folder, ROUNDS)
    first = Engine(job, folder, Faults(lost=0.1, unanswered=0.1, repeated=0.1, late=0.1, slow_s=0.005))
    first.start()
    until(lambda: (first.sites[SITES[0]].report().get("round") or 0) >= 5, 120)
    stopped = first.abort()
    second = Engine(job, folder, Faults(lost=0.05, unanswered=0.05, repeated=0.05, late=0.05), seed=1)
    second.start()
    return first, stopped, second, second.wait(120)


def test_job_that_was_aborted_is_continued_to_the_simulators_models_and_bytes(lived, simulated):
    _, stopped, second, said = lived
    assert {one["state"] for one in stopped.values()} == {INTERRUPTED}
    assert {one["state"] for one in said.values()} == {FINISHED}
    results = [second.result(site) for site in SITES]
    for file in ("model.safetensors", "metrics.jsonl", "summary.json"):
        assert len({result[file] for result in results}) == 1, file
    record = json.loads(results[0]["metrics.jsonl"].splitlines()[-1])
    alone = simulated.final[0]
    for key in ("bytes_busiest_node", "bytes_total", "nominal_bits_total", "round"):
        assert record[key] == alone[key], key
    assert record["loss"]["sites"] == pytest.approx(alone["loss"]["sites"], abs=1e-10)
    assert record["lambda"] == pytest.approx(alone["lambda"], abs=1e-10)
    found = load_file(second.sites[SITES[0]].state_folder / "result" / "model.safetensors")
    for name, tensor in simulated.state_dict(0, "last").items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6)


def test_faults_were_met(lived):
    first, _, second, _ = lived
    numbers = [
        (caller, site, head["dialled"], head["answered"], head["number"])
        for caller, site, method, what in first.calls + second.calls
        if method == "deliver"
        for head in [unpacked(what)[0]]
    ]
    assert len(set(numbers)) < len(numbers)  # some calls were repeated until they were confirmed
    assert any(b"gone" in answer for answer in first.answers)  # and old ones were turned away


def test_no_message_of_the_run_is_sent_to_a_site_that_is_no_neighbour_of_it(lived):
    first, _, _, _ = lived
    assert {(caller, site) for caller, site, method, _ in first.calls if method == "deliver"} <= {
        (a, b) for a in SITES for b in SITES if a != b
    }


def test_caller_that_lies_about_itself_or_about_the_run_is_turned_away(lived):
    _, _, second, _ = lived
    there = second.sites[SITES[1]]
    head = {"run": "trial", "from": "site-a", "to": "site-b", "dialled": "00", "answered": "", "number": -1}
    for key, value, told in (("from", "site-c", "site-c"), ("run", "other", "other"), ("to", "site-c", "site-c")):
        answer = json.loads(there.arrived(SITES[0], "deliver", packed(head | {key: value}, b"")))
        assert not missing_from(answer["gone"], "refused", told)
    spliced = bytearray(packed(head, b"body"))
    spliced[-1] ^= 1
    assert "digest" in json.loads(there.arrived(SITES[0], "deliver", bytes(spliced)))["gone"]
    for bad in (b"", b"\xff" * 3, b"\xff" * 40, packed({"run": "trial"}, b"")):
        assert "gone" in json.loads(there.arrived(SITES[0], "deliver", bad))
    with refused("stranger", "Site_A"):
        there.arrived("stranger", "deliver", packed(head, b""))
    request = (second.sites[SITES[2]].home / "site-c.csr").read_bytes()
    answer = second.sites[SITES[0]].arrived(SITES[1], "enrol", request)  # asks in another's name
    assert b"refused" in answer


def test_site_whose_key_is_another_one_is_refused(lived, tmp_path):
    _, _, second, _ = lived
    there, other = second.sites[SITES[1]], second.sites[SITES[2]].home / "site-c.pem"
    assert b"refused" in there.arrived(SITES[0], "introduce", other.read_bytes())
    assert b"refused" not in there.arrived(SITES[2], "introduce", other.read_bytes())


def test_neighbour_that_cannot_be_reached_ends_the_job_as_interrupted_and_is_named(tmp_path):
    job = exported(tmp_path, 2000, patience_s=3.0)
    engine = Engine(job, tmp_path, Faults())
    engine.start()
    until(lambda: (engine.sites[SITES[0]].report().get("round") or 0) >= 1, 60)
    engine.faults.cut = {frozenset((SITES[0], SITES[2])), frozenset((SITES[1], SITES[2]))}
    said = engine.wait(60)
    assert {one["state"] for one in said.values()} == {INTERRUPTED}
    assert said[SITES[0]]["missing"] == ["site-c"]
    assert not missing_from(said[SITES[0]]["reason"], "site-c", "3 s")
    home = engine.sites[SITES[0]].home  # what a next job continues from
    assert (home / "state").is_dir()
    with refused("another experiment", "experiment.toml", "--name"):
        other = exported(tmp_path / "other", 30) if (tmp_path / "other").mkdir() is None else None
        for site in SITES:
            shutil.copytree(tmp_path / site, tmp_path / "other" / site, dirs_exist_ok=True)
        Engine(other, tmp_path / "other", Faults()).join(SITES[0])


def test_two_jobs_of_one_run_at_once_are_refused(tmp_path):
    job = exported(tmp_path, 5000)
    engine = Engine(job, tmp_path, Faults(slow_s=0.02))
    engine.start()
    until(lambda: (engine.sites[SITES[0]].report().get("round") or 0) >= 1, 60)
    again = Engine(job, tmp_path, Faults())
    again.start()
    until(lambda: any(one.state == FAILED for one in again.sites.values()), 60)
    failed = next(one for one in again.sites.values() if one.state == FAILED)
    assert not missing_from(failed.report()["reason"], "another node is running")
    again.abort()
    engine.abort()


def test_job_s_files_are_compared_with_their_digests(tmp_path):
    job = exported(tmp_path)
    file = job / "app" / "config" / "fairmesh" / "experiment.toml"
    file.write_text(file.read_text() + "\n")
    with refused("experiment.toml", "SHA-256"):
        Job.read(job / "app" / "config", job / "app" / "custom")
    file.unlink()
    with refused("experiment.toml", "missing"):
        Job.read(job / "app" / "config", job / "app" / "custom")
