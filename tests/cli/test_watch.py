"""`fairmesh watch` without a browser: what it refuses, the snapshot, and that it changes nothing."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fairmesh as fm
from fairmesh.storage import files
from tests.refusals import missing_from, refused_command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that was killed."""
    folder = tmp_path_factory.mktemp("watched") / "wards"
    experiment = fm.Experiment(fm.data.Digits(nodes=4), algorithm=fm.algorithms.DSGD(), rounds=4)
    fm.run(experiment, out=folder)
    (folder / "summary.json").unlink()
    return folder


@pytest.mark.slow
def test_snapshot_of_a_run_that_has_finished_has_its_verdicts(called, tmp_path):
    experiment = fm.Experiment(fm.data.Digits(nodes=4), rounds=20)
    fm.run(experiment, out=tmp_path / "wards")
    assert called("watch", tmp_path / "wards", "--snapshot", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert missing_from(page, "No: finished", "alone") == []


def content(folder):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir() if path.is_file()}


def test_snapshot_is_one_file_and_the_run_is_as_before(called, run, tmp_path):
    before = content(run)
    code, out, _ = called("watch", run, "--snapshot", tmp_path / "page.html")
    assert (code, out) == (0, f"written: {tmp_path / 'page.html'}\n")
    page = (tmp_path / "page.html").read_text()
    assert missing_from(page, "wards", "does not change", "Not known") == []
    assert "<script" not in page
    assert content(run) == before


def test_snapshot_replaces_no_device(called, run, tmp_path):
    pipe = tmp_path / "page.html"
    os.mkfifo(pipe)
    refused_command(called("watch", run, "--snapshot", pipe, "--overwrite"), "page.html", "no file")
    assert pipe.is_fifo()


def test_snapshot_is_not_overwritten_unasked(called, run, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("dear")
    refused_command(called("watch", run, "--snapshot", page), "page.html", "--overwrite")
    assert page.read_text() == "dear"
    assert called("watch", run, "--snapshot", page, "--overwrite")[0] == 0
    assert page.read_text() != "dear"


def test_a_full_disk_is_a_sentence_and_leaves_what_was_there(called, run, tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("dear")

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    refused_command(called("watch", run, "--snapshot", page, "--overwrite"), "page.html", "No space left")
    assert page.read_text() == "dear"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("what", ["nothing", "empty", "letter.txt", "experiment.toml"])
@pytest.mark.quick_cases("all")
def test_what_is_no_run_is_refused_with_what_to_give(called, tmp_path, what):
    (tmp_path / "empty").mkdir()
    (tmp_path / "letter.txt").write_text("dear")
    (tmp_path / "experiment.toml").write_text('rounds = 3\n[data]\nname = "digits"\n')
    refused_command(called("watch", tmp_path / what), what)


def test_port_that_is_taken_is_refused(called, run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused_command(called("watch", run, "--port", port), port, "--port")


def test_command_serves_the_page_until_it_is_asked_to_end(run, tmp_path):
    """In a process of its own, as it is typed: it must not load what computes. A browser must not get the secret in its
    command line."""
    before = content(run)
    out, browser, got = tmp_path / "out.txt", tmp_path / "browser", tmp_path / "got"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {got}.part\nmv {got}.part {got}\n')
    browser.chmod(0o700)
    with open(out, "w") as file:
        words = [sys.executable, "-u", "-m", "fairmesh", "watch", str(run)]
        seen = {"BROWSER": f"{browser} %s", "DISPLAY": ":99"}
        process = subprocess.Popen(words, stdout=file, stderr=file, env=os.environ | seen)
    try:
        until = time.monotonic() + 30
        while not (found := re.findall(r"http://127.0.0.1:\d+/\S{20,}/", out.read_text())) and time.monotonic() < until:
            time.sleep(0.02)
        assert found, out.read_text()
        maps = Path(f"/proc/{process.pid}/maps")
        if maps.exists():
            assert "libtorch" not in maps.read_text()
            assert "numpy" not in maps.read_text()
        while not got.exists() and time.monotonic() < until:
            time.sleep(0.02)
        page = Path(got.read_text().removeprefix("file://"))
        assert found[0] in page.read_text()
        assert [path.stat().st_mode & 0o077 for path in (page, page.parent)] == [0, 0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert not page.parent.exists()
        assert "Traceback" not in out.read_text()
    finally:
        process.kill()
        process.wait()
    assert content(run) == before
