"""What a site writes when a job begins, whatever has stopped it before, and what it answers to others."""

import threading
import time

import pytest

from fairmesh.mesh.enrol.certificates import check_certificate, fingerprint
from fairmesh.nvflare import participant
from fairmesh.nvflare.calls import CallFailed
from fairmesh.nvflare.enrolment import Enrolment, refused_in_words
from fairmesh.nvflare.outcome import FAILED
from fairmesh.nvflare.participant import Participant
from tests.nvflare.standin import SITES, Engine, Faults, exported, until
from tests.refusals import refused


@pytest.fixture
def engine(tmp_path):
    return Engine(exported(tmp_path), tmp_path, Faults())


def _enrolment(engine: Engine, site: str = SITES[0]) -> Enrolment:
    return engine.join(site)._enrolment


def test_first_job_begins_whatever_a_power_cut_has_left_of_an_earlier_start(engine):
    home = _enrolment(engine).home
    founder = home / "founder"
    founder.mkdir()
    for half_written in (home / "mesh.toml", home / "site-a.key", home / "site-a.secret", founder / "authority.key"):
        half_written.write_bytes(b"")
    enrolment = _enrolment(engine)
    enrolment.write()
    answer = enrolment.sign("site-a", (home / "site-a.csr").read_bytes())
    assert answer.startswith(b"{")
    key = (home / "site-a.key").read_bytes()
    enrolment.write()
    assert (home / "site-a.key").read_bytes() == key
    certificate, authority = (founder / "site-a.pem").read_bytes(), (founder / "authority.pem").read_bytes()
    assert check_certificate(certificate, authority, "site-a", key=home / "site-a.key") == []


def test_key_that_is_shown_again_gets_the_certificate_that_was_recorded(engine):
    enrolment, other = _enrolment(engine), _enrolment(engine, SITES[1])
    enrolment.write()
    other.write()
    request = (other.home / "site-b.csr").read_bytes()
    assert len({enrolment.sign("site-b", request) for _ in range(5)}) == 1
    lines = (enrolment.home / "founder" / "ledger.tsv").read_text().splitlines()
    assert len(lines) == 2  # the columns, and one certificate
    assert fingerprint(request) in lines[1]
    (other.home / "site-b.csr").unlink()
    other.write()
    with refused("another key than before", "--name"):
        enrolment.sign("site-b", (other.home / "site-b.csr").read_bytes())


def test_two_jobs_that_start_at_the_same_moment_make_one_key(engine, monkeypatch):
    monkeypatch.setattr(participant, "_LEFT_S", 0.1)
    monkeypatch.setattr(participant, "run_node", lambda *_, **__: time.sleep(0.5))
    monkeypatch.setattr(Enrolment, "settle", lambda *_: None)
    jobs = [engine.join(SITES[0]) for _ in range(2)]
    for job in jobs:
        job.start()
    until(lambda: all(job.state in ("finished", FAILED) for job in jobs))
    assert sorted(job.state for job in jobs) == [FAILED, "finished"]
    (reason,) = (job.report()["reason"] for job in jobs if job.state == FAILED)
    assert "another job of the run trial" in reason


def _watching(engine: Engine, monkeypatch, ask) -> Participant:
    """Returns a site whose node runs until it is stopped, and whose neighbours answer as a test says."""
    stopped = threading.Event()

    def runs(*_, stoppable, **__) -> None:
        stoppable(lambda reason: stopped.set())
        stopped.wait(10)

    monkeypatch.setattr(participant, "run_node", runs)
    monkeypatch.setattr(Enrolment, "settle", lambda *_: None)
    site = engine.join(SITES[0])
    site._ask = ask
    return site


def test_neighbour_that_answers_with_a_refusal_is_there(engine, monkeypatch):
    monkeypatch.setattr(participant, "_PING_S", 0.0)
    monkeypatch.setattr(participant, "_LOOK_S", 0.01)
    asked: list[str] = []

    def refuses(name: str, *_) -> bytes:
        asked.append(name)
        return refused_in_words(CallFailed("go away"))

    site = _watching(engine, monkeypatch, refuses)
    site.start()
    until(lambda: min(asked.count("site-b"), asked.count("site-c")) > 3)
    site.stop("enough")
    until(lambda: not site._watch.is_alive())


def test_site_sees_the_end_of_the_job_while_its_neighbours_do_not_answer(engine, monkeypatch):
    monkeypatch.setattr(participant, "_PING_S", 0.0)
    monkeypatch.setattr(participant, "_LOOK_S", 0.01)
    waiting, answered = set[str](), threading.Event()

    def hangs(name: str, *_) -> bytes:
        waiting.add(name)
        answered.wait(10)
        raise CallFailed("nothing")

    site = _watching(engine, monkeypatch, hangs)
    site.start()
    until(lambda: waiting == {"site-b", "site-c"})  # at the same time
    engine.aborted.set()
    until(lambda: not site._watch.is_alive(), 2)
    answered.set()
