"""`fairmesh watch` of real runs in a real browser: one that goes on, is stopped, resumed and ends; one that diverges;
and a mesh whose node dies and returns."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from fairmesh.storage.run_status import read_run_status
from tests.journeys.consortium import TABLE, Consortium
from tests.journeys.patients import write_ill
from tests.journeys.user import shown
from tests.watch.browser import Pages, chromium
from tests.watch.test_browser import says, sentence

pytestmark = pytest.mark.slow
EXPERIMENT = """
rounds = 20000
[data]
name = "digits"
nodes = 6
[topology]
name = "ring"
[algorithm]
name = "choco-sgd"
{step}
[options]
measure_every = 100
"""
_LONG_MS = 120_000  # on a machine that does other things, too


def command(*words, out):
    """Starts a command as a user's shell does, with its own process and everything that it prints in a file."""
    with open(out, "w") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "fairmesh", *map(str, words)], stdout=file, stderr=file, env=environment
        )


@contextmanager
def watched(path, folder):
    """Yields the address of a page that a command shows, and checks that it ends as a user ends it."""
    out = folder / f"watch-{time.monotonic_ns()}.txt"
    process = command("watch", path, "--no-browser", out=out)
    try:
        until = time.monotonic() + 60
        while not (found := re.findall(r"http://\S+", out.read_text())) and time.monotonic() < until:
            assert process.poll() is None, out.read_text()
            time.sleep(0.05)
        yield found[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, out.read_text()
        assert "Traceback" not in out.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def pages(tmp_path):
    with chromium() as browser:
        opened = Pages(browser)
        yield opened
        opened.close()
    assert not opened.faults


@pytest.fixture
def run(tmp_path):
    """Runs an experiment in the background."""
    with ExitStack() as ends:

        def start(step, *flags):
            (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(step=step))
            words = ("run", tmp_path / "experiment.toml", "--out", tmp_path / "run", *flags)
            process = command(*words, out=tmp_path / f"run{len(flags)}.txt")
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        yield start


def becomes(page, pattern, where="#now"):
    page.wait_for_function(
        "([where, pattern]) => new RegExp(pattern, 'i').test(document.querySelector(where).innerText)",
        arg=[where, pattern],
        timeout=_LONG_MS,
    )


def exists(path):
    until = time.monotonic() + _LONG_MS / 1000
    while not path.exists():
        assert time.monotonic() < until, f"no {path}"
        time.sleep(0.05)


def begins(folder):
    """Waits until a run has done its first rounds."""
    until = time.monotonic() + _LONG_MS / 1000
    while read_run_status(folder, time.time()).get("round", 0) == 0:
        assert time.monotonic() < until, "the run does no round"
        time.sleep(0.01)


def test_run_is_shown_while_it_goes_on_is_stopped_is_resumed_and_ends(run, pages, tmp_path):
    first = run("")
    begins(tmp_path / "run")
    first.send_signal(signal.SIGSTOP)  # on a fast machine it would end before the browser is there
    with watched(tmp_path / "run", tmp_path) as address:
        page = pages.open(address)
        becomes(page, r"round [\d,]+ of 20,000")
        becomes(page, "^Is it running.\\s*Yes", "#answers")
        before = sentence(page)
        first.send_signal(signal.SIGCONT)
        page.wait_for_function("before => document.querySelector('#now').innerText !== before", arg=before)
        becomes(page, "rounds", "#pictures")
        first.send_signal(signal.SIGINT)
        first.wait(60)
        becomes(page, "^Is it running.\\s*No", "#answers")
        assert "resume" in sentence(page).lower()
        again = run("", "--resume")
        becomes(page, "^Is it running.\\s*Yes", "#answers")
        assert again.wait(600) == 0
        becomes(page, "^Is it running.\\s*No: finished", "#answers")
        assert page.locator("#sites tbody tr").count() == 6
        page.close()


def test_run_that_diverges_is_shown_as_that(run, pages, tmp_path):
    process = run("primal_step = 1e30")
    exists(tmp_path / "run")
    process.wait(120)
    with watched(tmp_path / "run", tmp_path) as address:
        page = pages.open(address)
        becomes(page, "diverged")
        assert page.locator("#now .act, #now .look").count() == 1
        page.close()


def test_node_that_dies_and_returns_is_shown_as_that_to_the_others(pages, tmp_path):
    sites = ["north", "south", "west"]
    settings = {"rounds = 300": "rounds = 4000"}
    text = shown("docs/howto/deploy.md", "toml", "[[contract.columns]]", settings)
    (tmp_path / "risk.toml").write_text(text)

    def give_data(home, k):
        write_ill(home / "patients.csv", 60 + 90 * k, seed=k)
        with open(home / "site.toml", "a") as file:
            file.write(TABLE)

    mesh = Consortium(tmp_path, "risk.toml", sites, give_data)
    try:
        mesh.start()
        mesh.until("north", lambda status: status["round"] >= 5)
        with watched(tmp_path / "north" / "site.toml", tmp_path) as address:
            page = pages.open(address)
            becomes(page, "^Is it running.\\s*Yes", "#answers")
            assert page.locator("#sites tbody tr").count() == 3
            mesh.kill("south")
            becomes(page, "south")
            becomes(page, "Who holds it up.\\s*south", "#answers")
            page.wait_for_selector("svg.chart .wait", state="attached", timeout=_LONG_MS)
            mesh.start("south")
            becomes(page, r"round [\d,]+ of 4,000")
            page.wait_for_selector("svg.chart .wait", state="detached", timeout=_LONG_MS)
            says(page, "connected", "#traffic")
            page.close()
    finally:
        mesh.kill_all()
