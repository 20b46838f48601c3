"""Submits a job again after an interruption, until the run has ended. NVFlare lets no site rejoin a running job, so
this is what makes a run survive a reboot."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from fairmesh.errors import BadInput, FairmeshError, in_a_line, optional
from fairmesh.nvflare.job import FOLDER, JOB_FILE
from fairmesh.nvflare.outcome import FAILED, FINISHED, OUTCOME

ABORTED, COMPLETED = "FINISHED:ABORTED", "FINISHED:COMPLETED"  # statuses of NVFlare's jobs
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

    def keep(self) -> Ended:
        """Submits the job until the run has ended. Returns how its last job has ended. Raises GivenUp."""
        name = run_of(self.job)
        submitted, pause, reached = 0, self.pause_s, -1
        waiting = self._reached(lambda: self.deployment.running(name))
        while True:
            if waiting:
                job_id, waiting = waiting[0], []
                self.tell(f"the run {name} has the job {job_id}, which has not ended; watching it")
            else:
                if submitted == self.most:
                    raise GivenUp(f"the job was submitted {submitted} times (--most), and the run has not ended")
                job_id = self._reached(lambda: self.deployment.submit(self.job))
                submitted += 1
                self.tell(f"submitted, for the {submitted}. time: job {job_id}")
            ended = self._awaited(job_id)
            outcome = ended.outcome or {"state": "interrupted", "reason": f"NVFlare says {ended.status}"}
            if outcome["state"] == FINISHED and ended.status == COMPLETED:
                self.tell(f"the run {name} has finished")
                return ended
            if ended.status == ABORTED and not ended.outcome:
                raise GivenUp(
                    f"job {job_id} was aborted by a person; nothing is lost, and `fairmesh nvflare keep {self.job}` "
                    "continues the run"
                )
            if outcome["state"] == FAILED:
                raise GivenUp(f"job {job_id} failed, and would fail again: {outcome['reason']}")
            done = max((int(one.get("round") or 0) for one in outcome.get("sites", {}).values()), default=0)
            pause = self.pause_s if done > reached else min(2 * pause, _LONGEST_PAUSE_S)
            reached = max(done, reached)
            self.tell(f"job {job_id}: {outcome['reason']}; again in {pause:.0f} s")
            time.sleep(pause)

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


def run_of(job: Path) -> str:
    """Returns the name of a job's run."""
    try:
        found = next(job.glob(f"*/config/{FOLDER}/{JOB_FILE}"))
        return str(json.loads(found.read_text(encoding="utf-8"))["run"])
    except (StopIteration, OSError, ValueError, KeyError) as error:
        raise BadInput(f"{job} is not a job of fairmesh; make one: fairmesh nvflare export FILE {job}") from error


class Kit:
    """A deployment, as an admin with a startup kit sees it.

    Args:
        folder: The admin's folder, which has `startup`.
        user: The admin's name; "": that of the folder.
    """

    def __init__(self, folder: Path, user: str = ""):
        with optional("nvflare"):
            import nvflare.fuel.flare_api.flare_api  # noqa: F401
        if not (folder / "startup" / "fed_admin.json").exists():
            raise BadInput(f"{folder} is not the folder of an NVFlare admin: it has no startup/fed_admin.json")
        self._folder, self._user = folder.resolve(), user or folder.resolve().name
        self._session: Any = None

    def submit(self, job: Path) -> str:
        return str(self._asked(lambda session: session.submit_job(str(job.resolve()))))

    def running(self, name: str) -> list[str]:
        jobs = self._asked(lambda session: session.list_jobs())
        of_run = [job for job in jobs if job.get("name", job.get("job_name")) == name]
        return [str(job["job_id"]) for job in of_run if not str(job["status"]).startswith("FINISHED")]

    def ended(self, job_id: str) -> Ended | None:
        status = str(self._asked(lambda session: session.get_job_meta(job_id))["status"])
        if not status.startswith("FINISHED"):
            return None
        with TemporaryDirectory() as folder:
            try:
                self._asked(lambda session: session.download_job_result(job_id, folder))
                found = next(Path(folder).rglob(OUTCOME))
                return Ended(status, json.loads(found.read_text(encoding="utf-8")))
            except (StopIteration, OSError, ValueError, FairmeshError):
                return Ended(status, None)

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
            session, self._session = self._session, None
            if session is not None:
                session.close()
            raise ConnectionError(in_a_line(error)) from error
