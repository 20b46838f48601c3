"""The server's part in a job: it lets the sites begin, watches them, and keeps their result. No message of the run and
no weight is made here; the sites train with each other."""

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairmesh.errors import FairmeshError, in_a_line, listed, optional
from fairmesh.mesh.wire.frames import read_json
from fairmesh.nvflare.client import folders
from fairmesh.nvflare.job import Job, refuse_other_nvflare
from fairmesh.nvflare.outcome import ENDED, FAILED, FINISHED, GO_ON, INTERRUPTED, OUTCOME, WAITING, report_of
from fairmesh.storage.files import write_atomically

with optional("nvflare"):
    from nvflare.collab import collab

RESULT, GLOBAL_MODEL = "fairmesh", "FL_global_model.pt"
_ASK_S, _LOOK_S, _SAY_S = 20.0, 1.0, 30.0
_SILENT = "silent"  # the state of a site that did not answer
_SAVING_S = 60.0  # for sites to save, once one has stopped
_AT_MOST, _FILES = 8 << 30, 1000  # bytes of a result, and files


class JobEnded(FairmeshError):
    """The job cannot go on. NVFlare shows the text as the reason."""


class Overseer:
    """The server object of a job."""

    def __init__(self):
        self._log = logging.getLogger("fairmesh.nvflare")
        self._said_at = 0.0
        self._sites: Collection[str] = ()
        self._said: dict[str, dict[str, Any]] = {}  # what each site has said last
        self._silent: set[str] = set()  # the sites that did not answer the server when it asked last

    @collab.main
    def oversee(self) -> dict[str, Any]:
        """Runs a job to its end. Raises JobEnded if the sites could not finish it."""
        workspace, job_id = collab.workspace, collab.fl_ctx.get_job_id()
        run_folder = Path(workspace.get_run_dir(job_id))
        config, custom = folders(workspace, job_id)
        clients = {client.name: client for client in collab.clients}
        job = None
        try:
            refuse_other_nvflare()
            job, _, _ = Job.read(config, custom)
            _refuse_other_sites(job, list(clients))
            self._watch(job, clients)
        except FairmeshError as error:
            outcome = _outcome(FAILED, str(error), self._said)
        except BaseException as error:
            why = "NVFlare has ended the job" if collab.is_aborted else f"the server's part broke: {in_a_line(error)}"
            _write(run_folder, _outcome(INTERRUPTED, _when_broken(why, self._silent, self._said), self._said))
            raise
        else:
            outcome = _outcome(*_judged(job, self._said), self._said)
        if outcome["state"] == FINISHED and job is not None and job.model_to_server:
            outcome |= self._kept(next(iter(clients.values())), job, run_folder)
        _write(run_folder, outcome)
        if outcome["state"] != FINISHED:
            raise JobEnded(f"{outcome['state']}: {outcome['reason']}")
        return outcome

    def _watch(self, job: Job, clients: Mapping[str, Any]) -> None:
        """Lets the sites run until all have ended, and notes what each says."""
        self._sites, said = list(job.sites), self._said
        for name, client in clients.items():
            said[name] = self._asked(name, client, "begin")
        halted_at: float | None = None
        heard = dict.fromkeys(clients, time.monotonic())
        while any(one["state"] not in ENDED for one in said.values()):
            time.sleep(_LOOK_S)
            for name, client in clients.items():
                if said[name]["state"] in ENDED:
                    continue
                # A first call that was lost, or whose answer was lost, is repeated.
                now = self._asked(name, client, "begin" if said[name]["state"] in (WAITING, _SILENT) else "report")
                if now["state"] != _SILENT:
                    said[name], heard[name] = now, time.monotonic()
                elif time.monotonic() - heard[name] > job.patience_s:
                    reason = f"it has not answered the server for {job.patience_s:.0f} s"
                    said[name] = {"state": INTERRUPTED, "reason": reason, "missing": [job.called_here(name)]}
            self._say(job, said)
            stopped = [name for name, one in said.items() if one["state"] in (INTERRUPTED, FAILED)]
            if stopped and halted_at is None:
                halted_at = time.monotonic()
                for name, client in clients.items():
                    if said[name]["state"] not in ENDED:
                        self._asked(name, client, "halt", f"{listed(stopped)} has stopped")
            if halted_at is not None and time.monotonic() - halted_at > _SAVING_S:
                break

    def _asked(self, name: str, client: Any, method: str, *given: Any) -> dict[str, Any]:
        asked_at = time.monotonic()
        try:
            said = report_of(read_json(getattr(client(timeout=_ASK_S), method)(*given)), self._sites)
        except Exception as error:
            if collab.is_aborted:
                if time.monotonic() - asked_at > _LOOK_S:  # it did not answer before either
                    self._silent.add(name)
                raise
            self._silent.add(name)
            return {"state": _SILENT, "reason": in_a_line(error), "missing": []}
        self._silent.discard(name)
        return said

    def _say(self, job: Job, said: Mapping[str, Mapping[str, Any]]) -> None:
        """Logs from time to time how far the sites are."""
        if time.monotonic() - self._said_at < _SAY_S:
            return
        self._said_at = time.monotonic()
        rounds = {
            name: f"{one.get('activity') or one['state']}, round {one.get('round', 0)}" for name, one in said.items()
        }
        self._log.info("fairmesh: run %s: %s", job.run, "; ".join(f"{name}: {what}" for name, what in rounds.items()))

    def _kept(self, client: Any, job: Job, run_folder: Path) -> dict[str, str]:
        """Writes the result of the run, which is the same at every site, into the job's folder. Returns where it is, or
        why it is not there."""
        try:
            folder = run_folder / RESULT
            for name, size in _files_of(read_json(client(timeout=_ASK_S).result_files())).items():
                _write_file(client, folder, name, size)
            for_nvflare(folder, run_folder, job.run)
            return {"result": str(folder)}
        except Exception as error:  # the sites have the result
            self._log.warning("fairmesh: the result could not be brought to the server: %s", in_a_line(error))
            return {"result": "", "result_failure": in_a_line(error)}


def _files_of(told: Any) -> dict[str, int]:
    """Returns the names and sizes of the files that a site hands over. Refuses what is not a result's."""
    if not isinstance(told, dict) or len(told) > _FILES:
        raise FairmeshError(f"a site hands over more than {_FILES} files, or none at all")
    for name, size in told.items():
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or type(size) is not int or size < 0:
            raise FairmeshError(f"a site hands over a file that does not belong to a result: {name!r}")
    if sum(told.values()) > _AT_MOST:
        raise FairmeshError(f"a site hands over {sum(told.values()):,} bytes; at most {_AT_MOST:,} are taken")
    return told


def _write_file(client: Any, folder: Path, name: str, size: int) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        while file.tell() < size:
            piece = client(timeout=_ASK_S).piece(name, file.tell())
            if not isinstance(piece, bytes) or not piece:
                raise FairmeshError(f"{name} ends after {file.tell()} of {size} bytes")
            file.write(piece[: size - file.tell()])


def for_nvflare(result: Path, run_folder: Path, run: str) -> None:
    """Writes, from the folder of a result, what NVFlare's tools look for: the model as its PyTorch persistor saves it;
    and fairmesh's report and model card."""
    import torch
    from safetensors.torch import load_file

    from fairmesh.report.runs import Run
    from fairmesh.report.writing import write_report

    model = result / "model.safetensors"
    if model.exists():
        torch.save({"model": load_file(model)}, run_folder / GLOBAL_MODEL)
    write_report([replace(Run.from_folder(result), label=run)], result, run)


def _refuse_other_sites(job: Job, clients: Sequence[str]) -> None:
    expected, there = set(job.sites.values()), set(clients)
    if expected != there:
        missing, more = sorted(expected - there), sorted(there - expected)
        what = [f"without {listed(missing)}"] if missing else []
        what += [f"with {listed(more)} in addition"] if more else []
        raise JobEnded(
            f"the run {job.run} has the sites {listed(sorted(expected))}, and this job runs {' and '.join(what)}; "
            "export it with --sites and the names of this project's clients"
        )


def _judged(job: Job, sites: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Returns how the run has ended, and why."""
    failed = {name: one for name, one in sites.items() if one["state"] == FAILED}
    if failed:
        return FAILED, _reasons(failed)
    stopped = {name: one for name, one in sites.items() if one["state"] != FINISHED}
    if not stopped:
        return FINISHED, ""
    gone = sorted({site for one in stopped.values() for site in one.get("missing", ())})
    whom = f"missing: {listed([job.sites.get(name, name) for name in gone])}; " if gone else ""
    return INTERRUPTED, f"{whom}{_reasons(stopped)}. {GO_ON}"


def _when_broken(why: str, silent: Collection[str], sites: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns why a job has ended before all its sites have, with the sites that the server did not reach last."""
    ended = {name: one for name, one in sites.items() if one["state"] in (INTERRUPTED, FAILED)}
    whom = f"; the server did not reach {listed(sorted(silent))} any more" if silent else ""
    return f"{why}{whom}{f'; {_reasons(ended)}' if ended else ''}. {GO_ON}"


def _reasons(sites: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns why sites have ended; a reason that several give, once."""
    by_reason: dict[str, list[str]] = {}
    for name, one in sites.items():
        by_reason.setdefault(str(one["reason"]).replace(name, "NAME"), []).append(name)
    told = [f"{listed(names)}: {reason.replace('NAME', names[0])}" for reason, names in by_reason.items()]
    return "; ".join(told[:3])


def _outcome(state: str, reason: str, sites: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {"state": state, "reason": reason, "sites": {name: dict(one) for name, one in sites.items()}}


def _write(run_folder: Path, outcome: Mapping[str, Any]) -> None:
    run_folder.mkdir(parents=True, exist_ok=True)
    write_atomically(run_folder / OUTCOME, (json.dumps(outcome, indent=1) + "\n").encode())
