"""The process of a site in a job of NVFlare: what it publishes to the other sites and to the server."""

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput, FairmeshError, in_a_line, optional
from fairmesh.nvflare.calls import CallFailed, Stopped
from fairmesh.nvflare.job import refuse_other_nvflare
from fairmesh.nvflare.outcome import FAILED
from fairmesh.nvflare.participant import Participant
from fairmesh.nvflare.site_file import refuse_forbidden
from fairmesh.nvflare.tracking import Analytics

with optional("nvflare"):
    from nvflare.apis.fl_constant import SiteType
    from nvflare.apis.workspace import Workspace
    from nvflare.collab import collab
    from nvflare.collab.api.context import Context
    from nvflare.collab.api.exceptions import CollabCallError, RunAborted

_SIMULATED = "simulate_job"  # the id of every job in NVFlare's simulator, which has no certificates
_TOO_MUCH = ("nvflare.collab.runtime.cell_dispatcher", "nvflare.collab.runtime.dispatch")  # a line of log per call


def folders(workspace: "Workspace", job_id: str) -> tuple[Path, Path]:
    """Returns the app's config folder and its folder of Python code."""
    return Path(workspace.get_app_config_dir(job_id)), Path(workspace.get_app_custom_dir(job_id))


class SiteProcess:
    """The client object of a job. NVFlare makes it, and calls its published methods in threads of its own."""

    def __init__(self):
        self._participant: Participant | None = None
        self._failure = ""  # why this site cannot take part
        self._lock = threading.Lock()

    @collab.init
    def prepare(self) -> None:
        """Reads the job and this site's file, before the first call of another site can come."""
        for name in _TOO_MUCH:
            logging.getLogger(name).setLevel(logging.WARNING)
        context = collab.context
        workspace, job_id = context.workspace, collab.fl_ctx.get_job_id()
        config, custom = folders(workspace, job_id)
        aborted: Callable[[], bool] = lambda: bool(context.is_aborted())  # noqa: E731
        tracker = Analytics(collab.fl_ctx)
        try:
            refuse_other_nvflare()
            simulated = job_id == _SIMULATED
            if not simulated:
                refuse_forbidden(Path(workspace.get_root_dir()))
            calls = _Calls(context, simulated)
            self._participant = Participant(
                collab.site_name,
                config,
                custom,
                Path(workspace.get_root_dir()),
                calls,
                aborted,
                lambda first: [tracker] if first else [],
                simulated,
            )
            calls.sites = dict(self._participant.job.sites)
        except FairmeshError as error:  # told to the server, which ends the job for all
            self._failure = str(error)
        except Exception as error:
            self._failure = in_a_line(error)

    # For the server

    @collab.publish
    def begin(self) -> bytes:
        _of_server()
        if self._participant is not None:
            self._participant.start()
        return self._said()

    @collab.publish
    def report(self) -> bytes:
        _of_server()
        return self._said()

    @collab.publish
    def halt(self, reason: str) -> bytes:
        _of_server()
        if self._participant is not None:
            self._participant.stop(str(reason)[:500])
        return self._said()

    @collab.publish
    def result_files(self) -> bytes:
        _of_server()
        return json.dumps(self._handing_over().result_files()).encode()

    @collab.publish
    def piece(self, name: str, offset: int) -> bytes:
        _of_server()
        return self._handing_over().piece(name, offset)

    def _handing_over(self) -> Participant:
        if self._participant is None or not self._participant.job.model_to_server:
            raise FairmeshError("this site hands over no result")
        return self._participant

    def _said(self) -> bytes:
        if self._participant is None:
            return json.dumps({"state": FAILED, "reason": self._failure or "it has not begun", "missing": []}).encode()
        return json.dumps(self._participant.report()).encode()

    # For other sites

    @collab.publish
    def enrol(self, what: bytes) -> bytes:
        return self._answer("enrol", what)

    @collab.publish
    def introduce(self, what: bytes) -> bytes:
        return self._answer("introduce", what)

    @collab.publish
    def ping(self, what: bytes) -> bytes:
        return self._answer("ping", what)

    @collab.publish
    def deliver(self, what: bytes) -> bytes:
        return self._answer("deliver", what)

    def _answer(self, method: str, what: bytes) -> bytes:
        if self._participant is None:
            return b""
        return self._participant.arrived(collab.caller, method, what)

    @collab.final
    def end(self) -> None:
        """Saves what the node has. Comes at the end of every job, also of one that was aborted."""
        if self._participant is not None:
            self._participant.stop("NVFlare has ended the job")
            self._participant.wait_until_saved()


def _of_server() -> None:
    if collab.caller != SiteType.SERVER:
        raise FairmeshError(f"{collab.caller} asks what only the server may ask")


class _Calls:
    """Calls other sites, sealed from end to end: the server, which relays the calls, cannot read them.

    Args:
        context: Of this site's app.
        simulated: Whether this is NVFlare's simulator, which runs on one machine and cannot seal.
    """

    def __init__(self, context: "Context", simulated: bool):
        self._context, self.sites = context, dict[str, str]()
        self._proxies = {proxy.name: proxy for proxy in context.clients}
        self._secure = not simulated
        cell = next(iter(self._proxies.values())).backend.cell
        if self._secure and not cell.core_cell.supports_secure_messages():
            raise BadInput(
                "this NVFlare project has no certificates, so calls between sites cannot be sealed and the server "
                "would read them; provision it with certificates (nvflare provision), or use nvflare's simulator"
            )

    def __call__(self, site: str, method: str, what: bytes, seconds: float) -> bytes:
        proxy = self._proxies.get(self.sites.get(site, ""))
        if proxy is None:
            raise CallFailed(f"NVFlare has no site {self.sites.get(site, site)} in this job")
        context = self._context.app.new_context(self._context.app.name, self._context.app.name)  # of this thread
        try:
            answer: Any = getattr(proxy(timeout=seconds, secure=self._secure), method)(what=what)
        except RunAborted as error:
            raise Stopped("NVFlare has ended the job") from error
        except CollabCallError as error:
            if context.is_aborted():
                raise Stopped("NVFlare has ended the job") from error
            raise CallFailed(in_a_line(error)) from error
        if not isinstance(answer, bytes):
            raise CallFailed(f"{method} of {site} gives {type(answer).__name__} instead of bytes")
        return answer
