"""`fairmesh nvflare`: write a job for NVFlare, prepare a site for it, and keep a run alive."""

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from fairmesh.cli.node import seconds_of
from fairmesh.cli.terminal import Json, print_json, readable_toml, say
from fairmesh.errors import BadInput, FairmeshError, listed, nearest

nvflare = typer.Typer(
    help="Run inside an NVFlare deployment.\n\nWrite a job, prepare a site, keep a run alive.", no_args_is_help=True
)


@nvflare.command()
def export(
    experiment: Annotated[Path, typer.Argument(help="The experiment file.", callback=readable_toml)],
    out: Annotated[Path, typer.Argument(help="The job's folder, which is created.")],
    sites: Annotated[
        str, typer.Option(help="NVFlare's names of the sites, such as berlin,paris,rome; 3 means site-1,site-2,site-3.")
    ],
    name: Annotated[str, typer.Option(help="The run's name, by which sites keep its state; that of the file.")] = "",
    patience: Annotated[
        str, typer.Option(help="How long a neighbour may be out of reach before the job ends as interrupted.")
    ] = "2m",
    track: Annotated[
        list[str], typer.Option(help="Let the server write measurements to tensorboard, mlflow or wandb.")
    ] = [],  # noqa: B006
    keep_model: Annotated[
        bool, typer.Option("--keep-model-at-sites", help="The server gets neither the model nor the report.")
    ] = False,
    json_: Json = False,
) -> None:
    """Write a job for NVFlare from an experiment file.

    `nvflare job submit -j OUT` runs it. In NVFlare's simulator, sites take the experiment's data."""
    from fairmesh.nvflare.job import RECEIVERS, job_from, write_job

    for which in track:
        if which not in RECEIVERS:
            raise BadInput(f"--track {which}: NVFlare tracks with {', '.join(RECEIVERS)}{nearest(which, RECEIVERS)}")
    names = _names(sites)
    settings = {
        "patience_s": seconds_of(patience, "--patience"),
        "model_to_server": not keep_model,
        "tracked": bool(track),
    }
    job, contents = job_from(experiment, names, name, **settings)
    write_job(job, contents, out, track)
    code = sorted(file for file in job.files if file.endswith(".py"))
    if json_:
        print_json({"job": str(out), "run": job.run, "sites": dict(job.sites), "code": code})
        return
    say(f"{out} holds the job of the run {job.run!r} for {listed(names)}")
    if code:
        say(f"it carries {listed(code)}, so each site must let the submitter bring code (byoc)")
    else:
        say("it carries no code; each site allows the classes of the installed fairmesh")
    say("1. at each site, once: pip install 'fairmesh[nvflare]'; fairmesh nvflare site WORKSPACE --data FILE --allow")
    say("   at the server, once: pip install 'fairmesh[nvflare]'; fairmesh nvflare site WORKSPACE --allow")
    say(f"2. submit it: nvflare job submit -j {out} --startup-kit ADMIN")
    say(f"   or let it be submitted again after interruptions: fairmesh nvflare keep {out} --kit ADMIN")


def _names(sites: str) -> list[str]:
    given = [name.strip() for name in sites.split(",") if name.strip()]
    if len(given) == 1 and given[0].isdigit():
        given = [f"site-{k + 1}" for k in range(int(given[0]))]
    twice = sorted({name for name in given if given.count(name) > 1})
    if twice:
        raise BadInput(f"--sites names {listed(twice)} twice")
    if len(given) < 2:
        raise BadInput(f"--sites {sites!r}: a run needs two sites or more, such as --sites berlin,paris,rome")
    return given


@nvflare.command()
def site(
    workspace: Annotated[Path, typer.Argument(help="The site's NVFlare workspace, which has `local` and `startup`.")],
    data: Annotated[
        str,
        typer.Option(
            help="This site's table; file.py:function, which returns its fm.Site; or 'experiment', for a trial."
        ),
    ] = "",
    state: Annotated[str, typer.Option(help="The folder for the states of runs; by default in the workspace.")] = "",
    allow: Annotated[
        bool, typer.Option("--allow", help="Allow the classes of such jobs here, in local/resources.json.")
    ] = False,
    json_: Json = False,
) -> None:
    """At a site: name its data, and check that jobs of fairmesh may run.

    Writes local/fairmesh.toml with --data; without, checks what is there. Of the server, and of a workspace of
    NVFlare's simulator, only what is allowed is checked."""
    from fairmesh.nvflare import site_file
    from fairmesh.nvflare.job import refuse_other_nvflare

    refuse_other_nvflare()
    site_file.refuse_no_workspace(workspace)
    file = workspace / "local" / site_file.FILE
    if data:
        site_file.written(workspace, data, state)
    is_site = (workspace / "startup" / "fed_client.json").exists() or file.exists()
    settings = site_file.settings_of(workspace) if is_site else None
    if settings is not None:
        site_file.refuse_other_data(settings, file)
    if allow:
        say(f"{site_file.allow_here(workspace)} allows the classes of such jobs, from the next job on")
    missing = list(site_file.forbidden(workspace))
    if json_:
        kept = None if settings is None else str(settings.state)
        print_json({"file": str(file), "state": kept, "forbidden": missing})
    elif settings is not None:
        say(f"{file}: runs keep their state in {settings.state}; back it up as you do the data")
    if missing:
        raise BadInput(f"this place does not allow {listed(missing)}: {site_file.how_to_allow(workspace)}")
    if not json_:
        say("jobs of fairmesh without code of their own may run here")


@nvflare.command()
def keep(
    job: Annotated[Path, typer.Argument(help="The job's folder, as `fairmesh nvflare export` wrote it.")],
    kit: Annotated[Path, typer.Option(help="The admin's folder of the provisioned project, which has `startup`.")],
    user: Annotated[str, typer.Option(help="The admin's name; by default that of the folder.")] = "",
    most: Annotated[int, typer.Option(min=1, help="How often to submit the job at most.")] = 50,
    pause: Annotated[str, typer.Option(help="How long to wait before it is submitted again.")] = "30s",
) -> None:
    """At the admin's: submit a job, and submit it again after interruptions.

    NVFlare lets no site rejoin a running job, so a run of days needs this. Ends when the run has finished, when a
    person aborts the job, or when it fails for a reason that stays."""
    from fairmesh.nvflare.keep import Keeper, Kit, run_of

    run_of(job)
    log = job.resolve().with_name(f"{job.resolve().name}.keep.log")

    def note(line: str) -> str:
        stamped = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {line}"
        with open(log, "a", encoding="utf-8") as file:
            file.write(stamped + "\n")
        return stamped

    try:
        with closing(Kit(kit, user)) as deployment:
            Keeper(job, deployment, most, seconds_of(pause, "--pause"), lambda line: say(note(line))).keep()
    except FairmeshError as error:
        note(f"gave up: {error}")
        raise
