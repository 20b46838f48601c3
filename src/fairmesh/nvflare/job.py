"""A job of NVFlare from an experiment file: what it holds, how it is written, and how a site reads it.

The classes of the job are those of the installed fairmesh, so it carries no code unless the experiment has Python files
of its own. Their digests are in the job, and are compared at each site before anything is imported."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fairmesh.config.tables import checked, from_table, to_table
from fairmesh.errors import BadInput, listed, optional
from fairmesh.mesh.enrol.manifest import EXPERIMENT, collected, refuse_other_file
from fairmesh.mesh.enrol.roster import MESH, check_label
from fairmesh.storage.files import read_bytes, write_atomically

CLIENT, SERVER = "fairmesh.nvflare.client.SiteProcess", "fairmesh.nvflare.server.Overseer"
_CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
_EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
CLASSES = (CLIENT, SERVER, _CONTROLLER, _EXECUTOR)  # what each site, and the server, must allow
RECEIVERS = {
    "tensorboard": "nvflare.app_opt.tracking.tb.tb_receiver.TBAnalyticsReceiver",
    "mlflow": "nvflare.app_opt.tracking.mlflow.mlflow_receiver.MLflowReceiver",
    "wandb": "nvflare.app_opt.tracking.wandb.wandb_receiver.WandBReceiver",
}
FOLDER, JOB_FILE = "fairmesh", "job.json"  # in the app's config folder
_NVFLARE = "2.9"  # has calls between clients; they may change in the next one
_SYNC_S = 120  # for sites to load the job's classes
_AGAIN = "export the job and submit it again"


@checked
@dataclass(frozen=True)
class Job:
    """What every site of a job must know, besides the experiment's files.

    Args:
        run: The name of the run, by which each site keeps its state.
        sites: NVFlare's names of the sites by the names that fairmesh uses, in the order of the experiment's nodes.
        files: SHA-256 of mesh.toml and of the experiment's files.
        patience_s: How long a neighbour may be out of reach before the job ends as interrupted. Default: 120.0.
        model_to_server: Whether the server gets the model and the report at the end. Default: True.
        tracked: Whether the server also gets what is measured at each site, as trackers write it. Default: False.
    """

    run: str
    sites: Mapping[str, str]
    files: Mapping[str, str]
    patience_s: float = 120.0
    model_to_server: bool = True
    tracked: bool = False

    def __post_init__(self):
        check_label(self.run, "run")
        if not self.patience_s > 0:
            raise BadInput(f"patience must be more than 0 seconds, got {self.patience_s:g}")
        if labels(list(self.sites.values())) != dict(self.sites):
            raise BadInput(
                f"the job gives NVFlare's sites other names than their own: {listed(sorted(self.sites))}; by another "
                f"name a site would have other files, and another budget of privacy; {_AGAIN}"
            )
        if MESH not in self.files:
            raise BadInput(f"the job has no {MESH}; {_AGAIN}")
        for name, digest in self.files.items():
            try:
                refuse_other_file(EXPERIMENT if name == MESH else name, digest)
            except BadInput as error:
                raise BadInput(f"the job's {error}; {_AGAIN}") from error

    def called_here(self, nvflare: str) -> str:
        """Returns fairmesh's name of a site."""
        for name, there in self.sites.items():
            if there == nvflare:
                return name
        known = ", ".join(self.sites.values())
        raise BadInput(f"{nvflare} is not a site of the run {self.run}, which has {known}; export the job with --sites")

    @staticmethod
    def read(config: Path, custom: Path) -> "tuple[Job, bytes, dict[str, bytes]]":
        """Reads a job where NVFlare has put it. Refuses a file that is missing or is not the one that was exported.

        Args:
            config: The app's config folder.
            custom: The app's folder of Python code.

        Returns:
            The job, the content of mesh.toml, and the contents of the experiment's files.
        """
        try:
            table = json.loads(read_bytes(config / FOLDER / JOB_FILE))
            job = from_table(Job, table)
        except (ValueError, TypeError) as error:
            raise BadInput(f"the job cannot be read: {error}; {_AGAIN}") from error
        contents = {}
        for name, digest in job.files.items():
            path = (custom if name.endswith(".py") else config / FOLDER) / name
            if not path.is_file():
                raise BadInput(f"the job's file {name} is missing at this site; {_AGAIN}")
            contents[name] = read_bytes(path)
            if hashlib.sha256(contents[name]).hexdigest() != digest:
                raise BadInput(
                    f"the job's file {name} is not the one that was exported: its SHA-256 differs. Nothing was "
                    f"imported. Find out who changed it, or {_AGAIN}"
                )
        return job, contents.pop(MESH, b""), contents


def refuse_other_nvflare() -> None:
    """Refuses an NVFlare that is missing, or of another version than jobs are written for."""
    with optional("nvflare"):
        found = metadata.version("nvflare")
    if not found.startswith(f"{_NVFLARE}."):
        raise BadInput(
            f"NVFlare {found} is installed here, and jobs of this fairmesh need {_NVFLARE}: pip install "
            "'fairmesh[nvflare]'"
        )


def labels(sites: Sequence[str]) -> dict[str, str]:
    """Returns NVFlare's names of sites by names that fairmesh can use in certificates: small letters, digits and -."""
    found: dict[str, str] = {}
    for site in sites:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", site):
            raise BadInput(f"site {site!r}: no name of NVFlare, which has letters, digits, '-', '_' and '.'")
        label = re.sub(r"[^a-z0-9]+", "-", site.lower()).strip("-")
        check_label(label, f"site {site!r}:")
        if label in found:
            raise BadInput(
                f"the sites {found[label]} and {site} would both be {label!r} to fairmesh, which knows small letters, "
                "digits and '-' only; one of them needs another name in NVFlare's project"
            )
        found[label] = site
    return found


def job_from(experiment: Path, sites: Sequence[str], name: str = "", **settings: Any) -> tuple[Job, dict[str, bytes]]:
    """Returns the job of an experiment file, and the contents of its files.

    Args:
        experiment: The experiment file.
        sites: NVFlare's names of the sites, in the order of the experiment's nodes.
        name: The run's name. Default: that of the file.
        settings: Further fields of the job.
    """
    from fairmesh.experiment import load_experiment
    from fairmesh.mesh.enrol.founding import founded

    read, names = load_experiment(experiment), labels(sites)
    run = name or re.sub(r"[^a-z0-9]+", "-", experiment.stem.lower()).strip("-")[:63].strip("-") or "run"
    # Nobody dials these addresses: NVFlare connects the sites. They decide which end of an edge begins.
    mesh = founded(read, check_label(run, "run"), {label: f"{label}:1" for label in names})
    contents = {MESH: mesh.text().encode(), **collected(experiment)}
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    return Job(run, names, digests, **settings), contents


def write_job(job: Job, contents: Mapping[str, bytes], folder: Path, tracking: Sequence[str] = ()) -> None:
    """Writes a job as NVFlare's `job submit` and simulator take it. Refuses to overwrite one.

    Args:
        job: The job.
        contents: Of the experiment's files and of mesh.toml.
        folder: The job's folder.
        tracking: The trackers of NVFlare that write the measurements at the server, from `RECEIVERS`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists already and is not overwritten; give another folder, or move it away")
    sites, app = list(job.sites.values()), folder / "app"
    calls = {"collab_obj_ids": [], "props": {}, "max_inbound_call_threads": 100, "max_outbound_call_threads": 100}
    controller = {"server_obj_id": "_server", "sync_task_timeout": _SYNC_S, **calls}
    executor = {"path": _EXECUTOR, "args": {"client_obj_id": "_client", **calls}}
    receivers = [_receiver(which, job.run) for which in tracking]
    server = {"workflows": [{"id": "controller", "path": _CONTROLLER, "args": controller}]}
    client = {"executors": [{"tasks": ["*"], "executor": executor}]}
    meta = {"name": job.run, "resource_spec": {}, "min_clients": len(sites), "mandatory_clients": sites}
    _write(folder / "meta.json", meta | {"deploy_map": {"app": ["server", *sites]}})
    _write(app / "config" / "config_fed_server.json", _config(server, {"id": "_server", "path": SERVER}, *receivers))
    _write(app / "config" / "config_fed_client.json", _config(client, {"id": "_client", "path": CLIENT}))
    _write(app / "config" / FOLDER / JOB_FILE, to_table(job))
    for name, content in contents.items():
        path = (app / "custom" if name.endswith(".py") else app / "config" / FOLDER) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def _receiver(which: str, run: str) -> dict[str, Any]:
    more: dict[str, Any] = {"mlflow": {"kw_args": {"experiment_name": run, "run_name": run}}}
    more |= {"wandb": {"wandb_args": {"project": run, "name": run}}}
    given = {"events": ["fed.analytix_log_stats"], **more.get(which, {})}
    return {"id": f"{which}_receiver", "path": RECEIVERS[which], "args": given}


def _config(what: Mapping[str, Any], *components: Mapping[str, Any]) -> dict[str, Any]:
    filled = [{"args": {}, **component} for component in components]
    return {"format_version": 2, **what, "components": filled, "task_data_filters": [], "task_result_filters": []}


def _write(path: Path, table: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(table, indent=1) + "\n").encode())
