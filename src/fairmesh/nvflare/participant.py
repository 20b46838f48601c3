"""A site's part in a job: it enrols, runs the node of its mesh, and says how far it is. Knows nothing of NVFlare.

All that a run keeps at a site lies in a folder that is named after the run, not after the job. So the next job of the
same run goes on where this one stopped."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from fairmesh.config.overrides import read_toml
from fairmesh.errors import BadInput, FairmeshError, Interrupted, in_a_line, listed
from fairmesh.mesh.enrol.manifest import EXPERIMENT
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.node.running import run_node
from fairmesh.mesh.node.state_lock import locked, running_since
from fairmesh.mesh.node.store import RESULT
from fairmesh.mesh.node.watching import live_status
from fairmesh.nvflare.calls import CallCarrier, Stopped
from fairmesh.nvflare.enrolment import SITE, Ask, Enrolment, Missing, read_answer, refused_in_words
from fairmesh.nvflare.job import Job
from fairmesh.nvflare.outcome import ENDED, FAILED, FINISHED, INTERRUPTED, RUNNING, WAITING
from fairmesh.nvflare.site_file import FILE, settings_of
from fairmesh.storage.files import private_files, write_atomically
from fairmesh.trackers import Tracker

_LOOK_S = 0.5
_PING_S = 10.0
_PIECE = 1 << 22  # bytes of a result's file per call
_SAVING_S = 60.0  # for what a node writes when it stops
_FAILURE = "failure.txt"  # in the site's folder of the run: why its last job has failed
_NOT_TOLD = (
    "its node ended with an error that it tells nobody, since the run is private and an error may quote rows; "
    f"{_FAILURE} in this site's folder of the run has it"
)
_LEFT_S = 30.0  # for the processes of a job that has just ended


class Participant:
    """One site in one job.

    Args:
        site: NVFlare's name of this site.
        config: The app's config folder.
        custom: The app's folder of Python code.
        workspace: The site's NVFlare workspace.
        ask: Calls another site, by fairmesh's name.
        aborted: Returns whether NVFlare has ended the job.
        trackers: What the measurements of all sites are also written to if the job says so, given whether this site is
            the first.
        simulated: Whether this is NVFlare's simulator. Default: False.
        stream: Where the node logs. Default: stderr.
    """

    def __init__(
        self,
        site: str,
        config: Path,
        custom: Path,
        workspace: Path,
        ask: Ask,
        aborted: Callable[[], bool],
        trackers: Callable[[bool], Sequence[Tracker]] = lambda first: (),
        simulated: bool = False,
        stream: Any = None,
    ):
        self._ask, self._aborted, self._stream = ask, aborted, stream
        self.job, mesh, contents = Job.read(config, custom)
        self.site = self.job.called_here(site)
        settings = settings_of(workspace, simulated)
        home = settings.state / self.job.run / self.site
        # All runs read the same data of this site, so what they spend of its privacy adds up.
        ledger = settings.table.get("ledger") or str((settings.state / f"{self.site}.privacy.jsonl").absolute())
        table = {**settings.table, "ledger": ledger}
        self._enrolment = Enrolment(home, self.job, mesh, contents, self.site, table, self._log)
        self._private = "privacy" in read_toml(contents.get(EXPERIMENT, b"").decode(), EXPERIMENT)
        self.home, self.state_folder = home, home / "state"
        self._editable = str(workspace / "local" / FILE)  # what a person changes, instead of the run's site.toml
        self._trackers = trackers(self.site == next(iter(self.job.sites))) if self.job.tracked else ()
        around = self._enrolment.mesh.neighbours(self.site)
        self._neighbours, self._since = around, time.monotonic()
        self._pings = dict[str, threading.Thread]()  # that last called each neighbour
        self._heard = dict[str, float]()  # when each site was reached last, by time.monotonic()
        self._carrier = CallCarrier(self.job.run, self.site, self._deliver, self._enrolment)
        self._lock, self._stop_node = threading.Lock(), None
        self._stopped_because = ""
        self._has_state = False  # once no other job of the run has this site's state
        self.state, self._reason, self._missing = WAITING, "", list[str]()
        self._thread = threading.Thread(target=self._work, name="fairmesh", daemon=True)
        self._watch = threading.Thread(target=self._watching, name="fairmesh-watch", daemon=True)

    def _log(self, level: str, what: str, **fields: Any) -> None:
        print(f"fairmesh: {level}: {what} {fields or ''}", file=self._stream, flush=True)

    # What others ask of this site

    def start(self) -> None:
        """Begins to take part. A site that has begun goes on."""
        with self._lock:
            if self.state == WAITING:
                self.state, self._since = RUNNING, time.monotonic()
                self._thread.start()
                self._watch.start()

    def arrived(self, caller: str, method: str, what: bytes) -> bytes:
        """Answers another site, which the engine has authenticated."""
        name = self.job.called_here(caller)
        self._heard[name] = time.monotonic()
        if method == "ping":
            return b"here"
        if method == "deliver":
            return self._carrier.arrived(name, what)
        answer = {"enrol": self._enrolment.sign, "introduce": self._enrolment.shown}[method]
        try:
            return answer(name, what)
        except FairmeshError as error:
            self._log("warning", "refused", site=name, reason=str(error))
            return refused_in_words(error)

    def report(self) -> dict[str, Any]:
        """Returns how far this site is, for the server: its state, why it has ended, and whom it misses."""
        said: dict[str, Any] = {"state": self.state, "reason": self._reason, "missing": self._missing}
        if not self._has_state:
            return said
        with suppress(FairmeshError):
            status = live_status(self.state_folder)
            for key in ("activity", "round", "rounds", "worst", "mean", "metric_name"):
                said[key] = status.get(key)
        return said

    def result_files(self) -> dict[str, int]:
        """Returns the files of the result and their sizes."""
        folder = self.state_folder / RESULT
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.stat().st_size for path in found}

    def piece(self, name: str, offset: int) -> bytes:
        """Returns a piece of a file of the result."""
        if name not in self.result_files():
            raise FairmeshError(f"the result has no file {name!r}")
        with open(self.state_folder / RESULT / name, "rb") as file:
            file.seek(offset)
            return file.read(_PIECE)

    def stop(self, reason: str, missing: Sequence[str] = ()) -> None:
        """Lets the node save what it has and end. Can be called from any thread, and more than once."""
        with self._lock:
            if self._stopped_because or self.state in ENDED:
                return
            self._stopped_because, self._missing = reason, list(missing)
            stop = self._stop_node
        if stop is not None:
            stop(reason)

    def wait_until_saved(self) -> None:
        """Waits until the node has ended, for a minute at most."""
        if self._thread.is_alive():
            self._thread.join(_SAVING_S)

    # The threads

    def _deliver(self, site: str, envelope: bytes, seconds: float) -> bytes:
        return self._asked(site, "deliver", envelope, seconds)

    def _asked(self, site: str, method: str, what: bytes, seconds: float) -> bytes:
        self._raise_if_stopped()
        answer = self._ask(site, method, what, seconds)
        self._heard[site] = time.monotonic()
        return answer if method in ("deliver", "ping") else read_answer(answer)

    def _raise_if_stopped(self) -> None:
        if self._aborted():
            raise Stopped("NVFlare has ended the job")

    def _carried(self, membership: Membership) -> CallCarrier:
        return self._carrier

    def _stoppable(self, stop: Callable[[str], None]) -> None:
        with self._lock:
            self._stop_node, asked = stop, self._stopped_because
        if asked:
            stop(asked)

    def _enrolling(self) -> None:
        """Raises an error if this site must stop before its node has begun."""
        if self._stopped_because:
            raise Interrupted(self._stopped_because)
        self._raise_if_stopped()

    def _alone(self) -> ExitStack:
        """Locks this site's state of the run. Refuses a second job of it."""
        try:
            return locked(self.state_folder, _LEFT_S)
        except BadInput as error:
            if running_since(self.state_folder) is None:
                raise
            raise BadInput(
                f"another job of the run {self.job.run} is running at {self.site}; let it end, or abort it (nvflare "
                "job abort), and submit this one again"
            ) from error

    def _work(self) -> None:
        patience_s, has_rows = self.job.patience_s, False
        try:
            with self._alone() as lock:
                self._has_state = True
                (self.home / _FAILURE).unlink(missing_ok=True)
                self._enrolment.write()
                self._enrolment.settle(self._asked, patience_s, self._enrolling)
                self._since, has_rows = time.monotonic(), True
                run_node(
                    self._enrolment.site_file,
                    stream=self._stream,
                    trackers=self._trackers,
                    lock=lock,
                    carrier_of=self._carried,
                    stoppable=self._stoppable,
                )
            ended = FINISHED, ""
        except Missing as error:
            self._missing = error.sites
            ended = INTERRUPTED, str(error)
        except (Interrupted, Stopped) as error:
            ended = INTERRUPTED, self._stopped_because or str(error)
        except FairmeshError as error:
            ended = FAILED, str(error)
        except BaseException as error:
            ended = FAILED, in_a_line(error)
        state, reason = ended
        for name in (str(self.home / SITE), SITE):
            reason = reason.replace(name, self._editable)
        self._log("info" if state == FINISHED else "warning", f"this site has {state}", reason=reason)
        if state == FAILED and self._has_state:
            with suppress(OSError), private_files():
                write_atomically(self.home / _FAILURE, f"{reason}\n".encode())
        with self._lock:
            self.state = state
            self._reason = _NOT_TOLD if state == FAILED and self._private and has_rows else reason

    def _watching(self) -> None:
        """Stops the node when NVFlare ends the job, or when a neighbour has been out of reach for too long."""
        while self._thread.is_alive():
            time.sleep(_LOOK_S)
            if self._aborted():
                self.stop("NVFlare has ended the job")
                return
            for name in self._neighbours:
                self._ping(name)
            patience_s = self.job.patience_s
            gone = [name for name in self._neighbours if self._silent_s(name) > patience_s]
            if gone and self._stop_node is not None:
                self.stop(f"{listed(gone)} could not be reached for {patience_s:.0f} s", gone)

    def _ping(self, name: str) -> None:
        """Calls a neighbour that has not been heard for a while, since it may be busy with its data. Does not wait."""
        seconds = min(_PING_S, self.job.patience_s / 4)
        before = self._pings.get(name)
        if self._silent_s(name) > seconds and (before is None or not before.is_alive()):
            self._pings[name] = threading.Thread(target=self._pinged, args=(name, seconds), daemon=True)
            self._pings[name].start()

    def _pinged(self, name: str, seconds: float) -> None:
        with suppress(FairmeshError):
            self._asked(name, "ping", b"", seconds)

    def _silent_s(self, name: str) -> float:
        return time.monotonic() - max(self._since, self._heard.get(name, 0.0))
