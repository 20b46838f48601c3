"""Submits a job again after an interruption, until the run has ended. NVFlare lets no site rejoin a running job, so
this is what makes a run survive a reboot."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from fairmesh.errors import BadInput, FairmeshError, in_a_line, listed
from fairmesh.mesh.enrol.certificates import valid_until
from fairmesh.nvflare.job import FOLDER, JOB_FILE, refuse_other_nvflare
from fairmesh.nvflare.outcome import FAILED, GO_ON, OUTCOME
from fairmesh.storage.files import read_bytes

ABORTED, COMPLETED = "FINISHED:ABORTED", "FINISHED:COMPLETED"  # statuses of NVFlare's jobs
_BEGUN = ("DISPATCHED", "RUNNING")
_WAITING = ("SUBMITTED", "APPROVED")
_RESTARTED = ", but the server was started again since"
_LOST = "lost by the server, which knows no such job any more"
_CHECK = (
    "run fairmesh nvflare site WORKSPACE at the server and at each site: it says whether jobs of fairmesh are allowed "
    "there, and what to do"
)
_LOOK_S = 5.0
_LOOK_FOR_SITES_S = 60.0
_LONGEST_PAUSE_S = 600.0
_AT_THE_START_S, _LONG_S = 60.0, 120.0  # how long a job has run that ended at its start, or that has done rounds
_ERRORS, _NOT_ALLOWED = "ERRORLOG_", "is not in allow_list"  # a site's log of a job, and what NVFlare writes there
_UNREGISTERED = "error:client_registration "  # how NVFlare begins why the server does not know an admin
_REFUSALS = 3  # of new sessions, one after the other
_DOWNLOADS = 5  # attempts to download the result of a job that has ended


class Ended(NamedTuple):
    """How a job has ended.

    Args:
        status: NVFlare's status.
        outcome: What fairmesh's server object says; None where it said nothing.
        forbidding: Where NVFlare's log says that the classes of the job are not allowed. Default: ().
    """

    status: str
    outcome: dict[str, Any] | None
    forbidding: Sequence[str] = ()


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

    def waits(self, job_id: str) -> bool:
        """Returns whether a job waits for its start."""
        ...

    def heard(self) -> Mapping[str, float]:
        """Returns when the server heard each site last that is connected, in seconds by the server's clock."""
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
        pause, reached, unsaid = self.pause_s, -1, 0
        while True:
            job_id = self._reached(lambda: self._begun(name))
            ended, ran_s = self._awaited(job_id)
            if ended.status == COMPLETED:
                self._say_finished(name, ended)
                return ended
            self._refuse_to_go_on(job_id, ended)
            unsaid = unsaid + 1 if _ended_at_the_start(ended, ran_s) else 0
            reason = _reason(ended)
            if unsaid == 2:
                raise GivenUp(f"job {job_id} ended at its start, as the one before, and would again: {reason}")
            done = _round_of(ended)
            gained = done > reached or (ended.outcome is None and ran_s >= _LONG_S)
            pause = self.pause_s if gained else min(2 * pause, _LONGEST_PAUSE_S)
            reached = max(done, reached)
            self.tell(f"job {job_id}: {reason}")
            if self._submitted < self.most:
                self.tell(f"again in {pause:.0f} s")
                time.sleep(pause)

    def _say_finished(self, name: str, ended: Ended) -> None:
        self.tell(f"the run {name} has finished")
        outcome = ended.outcome or {}
        if outcome.get("result_failure"):
            self.tell(
                f"its result could not be brought to the server ({outcome['result_failure']}); each site has it, in "
                f"fairmesh/{name}/SITE/state/result of its workspace"
            )

    def _refuse_to_go_on(self, job_id: str, ended: Ended) -> None:
        """Raises GivenUp if the run would not go on in another job. NVFlare gives lost processes other names."""
        if ended.status == ABORTED:
            raise GivenUp(
                f"job {job_id} was aborted by a person; nothing is lost, and `fairmesh nvflare keep {self.job}` "
                "continues the run"
            )
        if ended.outcome is not None and ended.outcome["state"] == FAILED:
            raise GivenUp(f"job {job_id} failed, and would fail again: {ended.outcome['reason']}")

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
        return job_id

    def _awaited(self, job_id: str) -> tuple[Ended, float]:
        """Returns how a job has ended, and for how many seconds it has run."""
        heard, said, look_at = dict[str, float](), list[str](), -math.inf
        began_at: float | None = None
        while (ended := self._reached(lambda: self.deployment.ended(job_id))) is None:
            now = time.monotonic()
            if began_at is None and not self._reached(lambda: self.deployment.waits(job_id)):
                began_at = now
            if began_at is None and now >= look_at:
                look_at, before, heard = now + _LOOK_FOR_SITES_S, heard, dict(self._reached(self.deployment.heard))
                said = self._say_absent(said, before, heard)
            time.sleep(_LOOK_S)
        return ended, 0.0 if began_at is None else time.monotonic() - began_at

    def _say_absent(self, said: list[str], before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
        """Says, unless it has been said, which sites a job waits for. Returns them."""
        _, sites = run_of(self.job)
        gone = sorted(site for site in sites if site not in now)
        silent = sorted(site for site in sites if site in now and now[site] == before.get(site))
        if gone and gone + silent != said:
            self.tell(
                f"NVFlare starts it once {listed(gone)} is connected, which is not so now; if this is no site of the "
                "project, abort the job, and export it with --sites"
            )
        if silent and gone + silent != said:
            self.tell(
                f"the server has not heard {listed(silent)} for a minute; NVFlare starts the job once it is there again"
            )
        return gone + silent

    def _reached(self, ask: Callable[[], Any]) -> Any:
        """Returns an answer of the deployment; waits as long as it cannot be reached."""
        told, pause = False, 1.0
        while True:
            try:
                answer = ask()
                if told:
                    self.tell("NVFlare's server answers again")
                return answer
            except ConnectionError as error:
                if not told:
                    self.tell(f"NVFlare's server cannot be reached ({in_a_line(error)}); trying again")
                told = True
                time.sleep(pause)
                pause = min(2 * pause, 60.0)


def _ended_at_the_start(ended: Ended, ran_s: float) -> bool:
    """Returns whether NVFlare ended a job before fairmesh could say anything."""
    return ended.outcome is None and ended.status.startswith("FINISHED") and ran_s < _AT_THE_START_S


def _reason(ended: Ended) -> str:
    if ended.outcome is not None:
        return str(ended.outcome["reason"])
    if ended.forbidding:
        return f"{listed(ended.forbidding)} does not allow its classes; {_CHECK}"
    if ended.status == _LOST:
        return _LOST
    if ended.status.endswith(_RESTARTED):
        return f"NVFlare's server was started again while this job ran. {GO_ON}"
    return f"NVFlare says {ended.status}, and no site could say why. If this was at the start, {_CHECK}"


def _round_of(ended: Ended) -> int:
    """Returns the last round that a site has told."""
    sites = (ended.outcome or {}).get("sites", {})
    return max((int(site.get("round") or 0) for site in sites.values()), default=0)


def run_of(job: Path) -> tuple[str, list[str]]:
    """Returns the name of a job's run, and NVFlare's names of its sites."""
    try:
        found = json.loads(next(job.glob(f"*/config/{FOLDER}/{JOB_FILE}")).read_text(encoding="utf-8"))
        return str(found["run"]), list(found["sites"].values())
    except (StopIteration, OSError, ValueError, KeyError) as error:
        raise BadInput(f"{job} is not a job of fairmesh; make one: fairmesh nvflare export FILE {job}") from error


def _said_in(error: BaseException | None) -> Iterator[str]:
    """Yields what an error of NVFlare says, and those that it was raised for, whose reasons it leaves out."""
    while error is not None:
        yield str(getattr(error, "message", error))
        error = error.__cause__ or error.__context__


class NoSuchJob(BadInput):
    """The server knows no job of this id."""


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
        self._refused = 0  # how often in a row the server has refused a new session
        self._downloads: dict[str, int] = {}  # failed ones, by job

    def submit(self, job: Path) -> str:
        return str(self._asked(lambda session: session.submit_job(str(job.resolve()))))

    def running(self, name: str) -> list[str]:
        jobs = self._asked(lambda session: session.list_jobs())
        of_run = [str(job["job_id"]) for job in jobs if job.get("name", job.get("job_name")) == name]
        return [job_id for job_id in of_run if self._status(job_id) in (*_WAITING, *_BEGUN)]

    def _status(self, job_id: str) -> str:
        """Returns the status of a job. A server that was killed goes on to say that its jobs are running."""
        try:
            meta = self._asked(lambda session: session.get_job_meta(job_id))
        except NoSuchJob:
            return _LOST
        status = str(meta["status"])
        if status in _BEGUN:
            server = self._asked(lambda session: session.get_system_info()).server_info
            if float(meta.get("last_schedule_time") or math.inf) < float(server.start_time):
                return status + _RESTARTED
        return status

    def waits(self, job_id: str) -> bool:
        return self._status(job_id) in _WAITING

    def ended(self, job_id: str) -> Ended | None:
        status = self._status(job_id)
        if status in (*_WAITING, *_BEGUN):
            return None
        outcome = None if status == _LOST else self._outcome(job_id)
        return Ended(status, outcome, self._forbidding(job_id) if outcome is None and status != _LOST else ())

    def _outcome(self, job_id: str) -> dict[str, Any] | None:
        """Returns what fairmesh's server object says of a job that has ended; None if it said nothing."""
        with TemporaryDirectory() as folder:
            try:
                self._asked(lambda session: session.download_job_result(job_id, folder))
                found = next(Path(folder).rglob(OUTCOME))
                outcome = json.loads(found.read_text(encoding="utf-8"))
                return outcome if isinstance(outcome, dict) and {"state", "reason"} <= outcome.keys() else None
            except ConnectionError:
                failed = self._downloads[job_id] = self._downloads.get(job_id, 0) + 1
                if failed < _DOWNLOADS:
                    raise
                return None
            except (StopIteration, OSError, ValueError, FairmeshError):
                return None

    def _forbidding(self, job_id: str) -> list[str]:
        """Returns the sites whose error log of a job says that a class is not allowed, of those that the server has."""
        found = []
        with suppress(OSError, FairmeshError):
            folder = Path(self._asked(lambda session: session.download_job_components(job_id)))
            for log in folder.glob(f"{_ERRORS}*"):
                if _NOT_ALLOWED in log.read_text(encoding="utf-8", errors="replace"):
                    found.append(log.name.removeprefix(_ERRORS))
                log.unlink()
        return sorted(found)

    def heard(self) -> dict[str, float]:
        clients = self._asked(lambda session: session.get_system_info()).client_info
        return {client.name: float(client.last_connect_time) for client in clients}

    def _asked(self, ask: Callable[[Any], Any]) -> Any:
        """Asks over a session, a new one after a failure."""
        from nvflare.fuel.flare_api.api_spec import InvalidJobDefinition, JobNotFound
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        is_new = self._session is None
        try:
            if is_new:
                self._session = new_secure_session(self._user, str(self._folder))
            answer = ask(self._session)
        except InvalidJobDefinition as error:
            raise BadInput(f"NVFlare refuses the job: {in_a_line(error)}") from error
        except JobNotFound as error:
            raise NoSuchJob(f"NVFlare has no such job: {in_a_line(error)}") from error
        except Exception as error:
            self.close()
            self._refuse_what_stays(error, is_new)
            raise ConnectionError(in_a_line(error)) from error
        self._refused = 0
        return answer

    def _refuse_what_stays(self, error: Exception, is_new: bool) -> None:
        """Raises BadInput if the server does not let this admin do what is asked, or goes on to refuse the admin: it
        may do so once if it is just starting, and always over a session of before its start."""
        from nvflare.fuel.flare_api.api_spec import AuthenticationError, AuthorizationError

        unregistered = [said for said in _said_in(error) if said.startswith(_UNREGISTERED)]
        if unregistered or isinstance(error, AuthenticationError):
            self._refused += is_new
        else:
            self._refused = 0
        if self._refused >= _REFUSALS or isinstance(error, AuthorizationError):
            why = (*unregistered, in_a_line(error))[0]
            raise BadInput(
                f"NVFlare's server refuses the admin {self._user} ({why}). Name with --user the one that "
                f"{self._folder} was provisioned for; it needs a role that may submit jobs, download them and see the "
                "system, such as project_admin or lead"
            ) from error
        certificate = self._folder / "startup" / "client.crt"
        if certificate.exists() and (ended := valid_until(read_bytes(certificate))) < datetime.now(UTC):
            raise BadInput(
                f"{certificate} expired on {ended:%Y-%m-%d}; look at this machine's clock, and else let the project's "
                "owner provision the kit again"
            ) from error

    def close(self) -> None:
        """Ends the session, whose threads would keep this process alive."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):  # the server may be gone
                session.close()
