"""The server's part of a job, next to sites that a test plays."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fairmesh.errors import FairmeshError
from fairmesh.nvflare.outcome import FINISHED, INTERRUPTED, OUTCOME, RUNNING, WAITING
from tests.nvflare.standin import SITES, exported
from tests.refusals import missing_from, refused

pytest.importorskip("nvflare", reason="NVFlare is not installed")

from fairmesh.nvflare import server


class Site:
    """A site whose answers a test makes."""

    def __init__(self, name: str, answer: Callable[[str], str | None]):
        self.name, self._answer, self.asked = name, answer, list[str]()

    def __call__(self, timeout: float) -> "Site":
        return self

    def _says(self, method: str) -> bytes:
        self.asked.append(method)
        state = self._answer(method)
        if state is None:
            raise RuntimeError("no answer")
        return json.dumps({"state": state, "reason": "", "missing": [], "round": 7}).encode()

    def begin(self) -> bytes:
        return self._says("begin")

    def report(self) -> bytes:
        return self._says("report")

    def halt(self, reason: str) -> bytes:
        return self._says("halt")


def _overseen(tmp_path: Path, monkeypatch, *sites: Site, **settings: Any) -> Any:
    """Runs the server's part. Returns the object that NVFlare gives it."""
    job = exported(tmp_path, model_to_server=False, **settings)
    workspace = SimpleNamespace(
        get_run_dir=lambda job_id: str(tmp_path / "run"),
        get_app_config_dir=lambda job_id: str(job / "app" / "config"),
        get_app_custom_dir=lambda job_id: str(job / "app" / "custom"),
    )
    context = SimpleNamespace(get_job_id=lambda: "1")
    collab = SimpleNamespace(workspace=workspace, fl_ctx=context, clients=sites, is_aborted=False)
    monkeypatch.setattr(server, "collab", collab)
    monkeypatch.setattr(server, "_LOOK_S", 0.01)
    return collab


def test_outcome_of_a_job_that_nvflare_ends_names_the_sites_that_were_not_reached(tmp_path, monkeypatch):
    def dies(method: str) -> str | None:
        if method == "begin":
            return RUNNING
        collab.is_aborted = len(gone.asked) > 3
        return None

    gone = Site(SITES[1], dies)
    others = [Site(name, lambda method: RUNNING) for name in (SITES[0], SITES[2])]
    collab = _overseen(tmp_path, monkeypatch, others[0], gone, others[1])
    with pytest.raises(RuntimeError):
        server.Overseer().oversee()
    outcome = json.loads((tmp_path / "run" / OUTCOME).read_text())
    assert outcome["state"] == INTERRUPTED
    assert not missing_from(outcome["reason"], f"did not reach {SITES[1]}", "submit the same job again")
    assert {site["round"] for site in outcome["sites"].values()} == {7}


def test_site_whose_first_call_was_lost_is_told_again_to_begin(tmp_path, monkeypatch):
    states: list[str | None] = [None, WAITING, RUNNING, FINISHED]
    lossy = Site(SITES[0], lambda method: states.pop(0))
    others = [Site(name, lambda method: FINISHED) for name in SITES[1:]]
    _overseen(tmp_path, monkeypatch, lossy, *others)
    assert server.Overseer().oversee()["state"] == FINISHED
    assert lossy.asked == ["begin", "begin", "begin", "report"]


def test_result_that_could_not_be_brought_to_the_server_is_said_in_the_outcome(tmp_path):
    site = SimpleNamespace(result_files=lambda: b"{}")
    kept = server.Overseer()._kept(lambda timeout: site, SimpleNamespace(run="trial"), tmp_path)
    assert kept["result"] == ""
    assert kept["result_failure"]


@pytest.mark.parametrize(
    "files",
    [
        {"../x": 1},
        {"/etc/passwd": 1},
        {"x": -1},
        {"x": True},
        {"x": "1"},
        {f"x{k}": (server._AT_MOST >> 1) + 1 for k in range(2)},
        dict.fromkeys(map(str, range(server._FILES + 1)), 1),
        ["x"],
    ],
)
def test_site_cannot_hand_over_more_than_a_result(files):
    with refused("a site hands over", error=FairmeshError):
        server._files_of(files)


def test_file_of_a_result_gets_no_more_bytes_than_were_told(tmp_path):
    site = SimpleNamespace(piece=lambda name, offset: b"xxxx")
    server._write_file(lambda timeout: site, tmp_path, "a/b", 6)
    assert (tmp_path / "a" / "b").read_bytes() == b"x" * 6
