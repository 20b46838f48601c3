"""Submits a job again after an interruption, until the run has ended. NVFlare lets no site rejoin a running job, so
this is what makes a run survive a reboot."""

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from fairmesh.errors import BadInput, FairmeshError, in_a_line, listed
from fairmesh.nvflare.job import FOLDER, JOB_FILE, refuse_other_nvflare
from fairmesh.nvflare.outcome import FAILED, INTERRUPTED, OUTCOME

ABORTED, COMPLETED = "FINISHED:ABORTED", "FINISHED:COMPLETED"  # statuses of NVFlare's jobs
_BEGUN = ("DISPATCHED", "RUNNING")
_NOT_ENDED = ("SUBMITTED", "APPROVED", *_BEGUN)
_UNSAID = (
    ", and no site could say why. If this was at the start, run fairmesh nvflare site WORKSPACE at the server and at "
    "each site: it says whether jobs of fairmesh are allowed there"
)
_LOOK_S = 5.0
_LONGEST_PAUSE_S = 600.0


class Ended(NamedTuple):
    """How a job has ended: NVFlare's status, and what fairmesh's server object says; None where it said nothing."""

    status: str
    outcome: dict[str, Any] | None


class Deployment(Protocol):
    """What is asked of an NVFlare deployment. Each method raises ConnectionError while it cannot be reached."""

    def submit(self, job: Path) -> str:
        """Submits a job. Returns its id."""
        ...

    def running(self, name: str) -> list[str]:
        """Returns the ids of the jobs of this name that have not ended."""
        ...

    def ended(self, job_id: str) -> Ended | None:
        """Returns how a job has ended; None while it has not."""
        ...

    def connected(self) -> list[str]:
        """Returns the sites that are connected to the server."""
        ...


class GivenUp(FairmeshError):
    """The run did not end, and submitting its job again would not help, or was done often enough."""

    exit_code = 1


@dataclass
class Keeper:
    """Keeps a run alive.

    Args:
        job: The folder of its job.
        deployment: Where it runs.
        most: How often to submit the job at most.
        pause_s: How long to wait before it is submitted again, at first; doubled while no round is done in between.
        tell: Writes a line of the log.
    """

    job: Path
    deployment: Deployment
    most: int
    pause_s: float
    tell: Callable[[str], None]
    _submitted: int = field(default=0, init=False)

    def keep(self) -> Ended:
        """Submits the job until the run has finished. Returns how its last job has ended. Raises GivenUp."""
        name, _ = run_of(self.job)
        pause, reached = self.pause_s, -1
        while True:
            job_id = self._reached(lambda: self._begun(name))
            ended = self._awaited(job_id)
            if ended.status == COMPLETED:
                self.tell(f"the run {name} has finished")
                return ended
            outcome = ended.outcome or {"state": INTERRUPTED, "reason": f"NVFlare says {ended.status}{_UNSAID}"}
            if ended.status == ABORTED:  # NVFlare gives failures and lost processes other names
                raise GivenUp(
                    f"job {job_id} was aborted by a person; nothing is lost, and `fairmesh nvflare keep {self.job}` "
                    "continues the run"
                )
            if outcome["state"] == FAILED:
                raise GivenUp(f"job {job_id} failed, and would fail again: {outcome['reason']}")
            done = max((int(one.get("round") or 0) for one in outcome.get("sites", {}).values()), default=0)
            pause = self.pause_s if done > reached else min(2 * pause, _LONGEST_PAUSE_S)
            reached = max(done, reached)
            self.tell(f"job {job_id}: {outcome['reason']}")
            if self._submitted < self.most:
                self.tell(f"again in {pause:.0f} s")
                time.sleep(pause)

    def _begun(self, name: str) -> str:
        """Submits the job, unless one of this run has not ended: a person's, or one whose id was lost on its way."""
        for job_id in self.deployment.running(name):
            self.tell(f"the run {name} has the job {job_id}, which has not ended; watching it")
            return job_id
        if self._submitted == self.most:
            raise GivenUp(f"the job was submitted {self.most} times (--most), and the run has not ended")
        job_id = self.deployment.submit(self.job)
        self._submitted += 1
        self.tell(f"submitted, for the {self._submitted}. time: job {job_id}")
        absent = sorted(set(run_of(self.job)[1]) - set(self.deployment.connected()))
        if absent:
            self.tell(
                f"NVFlare starts it once {listed(absent)} is connected, which is not so now; if this is no site of the "
                "project, abort the job, and export it with --sites"
            )
        return job_id

    def _awaited(self, job_id: str) -> Ended:
        while (ended := self._reached(lambda: self.deployment.ended(job_id))) is None:
            time.sleep(_LOOK_S)
        return ended

    def _reached(self, ask: Callable[[], Any]) -> Any:
        """Returns an answer of the deployment; waits as long as it cannot be reached."""
        told, pause = False, 1.0
        while True:
            try:
                return ask()
            except ConnectionError as error:
                if not told:
                    self.tell(f"NVFlare's server cannot be reached ({in_a_line(error)}); trying again")
                told = True
                time.sleep(pause)
                pause = min(2 * pause, 60.0)


def run_of(job: Path) -> tuple[str, list[str]]:
    """Returns the name of a job's run, and NVFlare's names of its sites."""
    try:
        found = json.loads(next(job.glob(f"*/config/{FOLDER}/{JOB_FILE}")).read_text(encoding="utf-8"))
        return str(found["run"]), list(found["sites"].values())
    except (StopIteration, OSError, ValueError, KeyError) as error:
        raise BadInput(f"{job} is not a job of fairmesh; make one: fairmesh nvflare export FILE {job}") from error


class Kit:
    """A deployment, as an admin with a startup kit sees it.

    Args:
        folder: The admin's folder, which has `startup`.
        user: The admin's name; "": that of the folder.
    """

    def __init__(self, folder: Path, user: str = ""):
        refuse_other_nvflare()
        if not (folder / "startup" / "fed_admin.json").exists():
            raise BadInput(f"{folder} is not the folder of an NVFlare admin: it has no startup/fed_admin.json")
        self._folder, self._user = folder.resolve(), user or folder.resolve().name
        self._session: Any = None

    def submit(self, job: Path) -> str:
        return str(self._asked(lambda session: session.submit_job(str(job.resolve()))))

    def running(self, name: str) -> list[str]:
        jobs = self._asked(lambda session: session.list_jobs())
        of_run = [str(job["job_id"]) for job in jobs if job.get("name", job.get("job_name")) == name]
        return [job_id for job_id in of_run if self._status(job_id) in _NOT_ENDED]

    def _status(self, job_id: str) -> str:
        """Returns the status of a job. A server that was killed goes on to say that its jobs are running."""
        meta = self._asked(lambda session: session.get_job_meta(job_id))
        status = str(meta["status"])
        if status in _BEGUN:
            server = self._asked(lambda session: session.get_system_info()).server_info
            if float(meta.get("last_schedule_time") or math.inf) < float(server.start_time):
                return f"{status}, but the server was started again since"
        return status

    def ended(self, job_id: str) -> Ended | None:
        status = self._status(job_id)
        if status in _NOT_ENDED:
            return None
        with TemporaryDirectory() as folder:
            try:
                self._asked(lambda session: session.download_job_result(job_id, folder))
                found = next(Path(folder).rglob(OUTCOME))
                return Ended(status, json.loads(found.read_text(encoding="utf-8")))
            except (StopIteration, OSError, ValueError, FairmeshError):
                return Ended(status, None)

    def connected(self) -> list[str]:
        return [client.name for client in self._asked(lambda session: session.get_system_info()).client_info]

    def _asked(self, ask: Callable[[Any], Any]) -> Any:
        """Asks over a session, a new one after a failure."""
        from nvflare.fuel.flare_api.api_spec import InvalidJobDefinition, JobNotFound
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        try:
            if self._session is None:
                self._session = new_secure_session(self._user, str(self._folder))
            return ask(self._session)
        except (InvalidJobDefinition, JobNotFound) as error:
            raise BadInput(f"NVFlare refuses the job: {in_a_line(error)}") from error
        except Exception as error:
            self.close()
            raise ConnectionError(in_a_line(error)) from error

    def close(self) -> None:
        """Ends the session, whose threads would keep this process alive."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):  # the server may be gone
                session.close()
