"""An engine that carries calls between sites of this process, as badly as a test asks for."""

import io
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairmesh.nvflare.calls import CallFailed
from fairmesh.nvflare.job import job_from, write_job
from fairmesh.nvflare.outcome import ENDED
from fairmesh.nvflare.participant import Participant
from tests.mesh.fleet import secret

EXPERIMENT = """
rounds = {rounds}
[data]
name = "digits"
nodes = 3
[model]
name = "logistic"
[topology]
name = "ring"
[sampling]
batch = 20
[algorithm]
name = "ad-gda"
primal_step = {{ name = "constant", value = 0.1 }}
[options]
measure_every = 10
dtype = "float64"
checkpoint_every = 5
"""
SITES = ("Site_A", "site-b", "site.c")
NAMES = ("site-a", "site-b", "site-c")


@dataclass
class Faults:
    """How an engine treats calls of messages; each is a share of the calls."""

    lost: float = 0.0  # never arrive
    unanswered: float = 0.0  # arrive, and the answer is lost
    repeated: float = 0.0  # arrive twice
    late: float = 0.0  # arrive once more, after others
    slow_s: float = 0.0
    cut: set[frozenset[str]] = field(default_factory=set)  # pairs of sites between which nothing gets through


class Engine:
    """Sites in threads of this process."""

    def __init__(self, job: Path, folder: Path, faults: Faults, seed: int = 0):
        self.job, self.folder, self.faults = job, folder, faults
        self.sites: dict[str, Participant] = {}  # by NVFlare's names
        self.aborted = threading.Event()
        self.calls: list[tuple[str, str, str, bytes]] = []  # caller, called, method, what
        self.answers: list[bytes] = []
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._old: list[tuple[str, str, bytes]] = []

    def join(self, site: str) -> Participant:
        app = self.job / "app"
        workspace = self.folder / site

        def ask(name: str, method: str, what: bytes, seconds: float) -> bytes:
            return self.called(site, self.sites[site].job.sites[name], method, what)

        self.sites[site] = Participant(
            site,
            app / "config",
            app / "custom",
            workspace,
            ask,
            self.aborted.is_set,
            simulated=True,
            stream=io.StringIO(),
        )
        return self.sites[site]

    def start(self, sites: Sequence[str] = SITES) -> None:
        for site in sites:
            self.join(site)
        for site in sites:
            self.sites[site].start()

    def called(self, caller: str, site: str, method: str, what: bytes) -> bytes:
        with self._lock:
            self.calls.append((caller, site, method, what))
            chance = self._random.random
            lost, unanswered, repeated, late = (
                method == "deliver" and chance() < share
                for share in (self.faults.lost, self.faults.unanswered, self.faults.repeated, self.faults.late)
            )
            old = self._old.pop(self._random.randrange(len(self._old))) if late and self._old else None
            if method == "deliver":
                self._old = [*self._old[-20:], (caller, site, what)]
        if self.faults.slow_s:
            time.sleep(self.faults.slow_s * self._random.random())
        if lost or frozenset((caller, site)) in self.faults.cut:
            raise CallFailed("lost")
        there = self.sites.get(site)
        if there is None:
            raise CallFailed("no such site")
        if old is not None and old[1] in self.sites:
            self.answers.append(self.sites[old[1]].arrived(old[0], "deliver", old[2]))
        if repeated:
            there.arrived(caller, method, what)
        answer = there.arrived(caller, method, what)
        self.answers.append(answer)
        if unanswered:
            raise CallFailed("the answer was lost")
        return answer

    def wait(self, seconds: float = 60.0) -> dict[str, dict[str, Any]]:
        """Waits until all sites have ended. Returns what they say."""
        until(lambda: all(one.state in ENDED for one in self.sites.values()), seconds)
        return {site: one.report() for site, one in self.sites.items()}

    def abort(self) -> dict[str, dict[str, Any]]:
        self.aborted.set()
        return self.wait()

    def result(self, site: str) -> dict[str, bytes]:
        folder = self.sites[site].state_folder / "result"
        return {name: (folder / name).read_bytes() for name in self.sites[site].result_files()}


def exported(
    folder: Path,
    rounds: int = 20,
    run: str = "trial",
    text: str = "",
    sites: Sequence[str] = SITES,
    **settings: Any,
) -> Path:
    """Writes a job for sites whose draws are those of tests.

    Args:
        folder: Where the job, and each site's workspace, lie.
        rounds: Of the usual experiment.
        run: The name of the run.
        text: The experiment file; "" for the usual one.
        sites: NVFlare's names of the sites.
        settings: Further fields of the job.
    """
    file = folder / f"{run}.toml"
    file.write_text(text or EXPERIMENT.format(rounds=rounds))
    job, contents = job_from(file, sites, run, **settings)
    write_job(job, contents, folder / "job")
    for name, site in job.sites.items():
        home = folder / site / "fairmesh" / run / name
        home.mkdir(parents=True, exist_ok=True)
        (home / f"{name}.secret").write_bytes(secret(name))
    return folder / "job"


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it never came true")
        time.sleep(0.01)
