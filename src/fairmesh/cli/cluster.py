"""`fairmesh launch`, and how `fairmesh run` becomes one rank of a cluster."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairmesh.cli.launching import OUTCOME, launched, record_outcome
from fairmesh.cli.terminal import say
from fairmesh.errors import BadInput, FairmeshError, Interrupted
from fairmesh.storage.occupied import refuse_unusable

if TYPE_CHECKING:
    from fairmesh.experiment import Experiment
    from fairmesh.networks.process_group import ProcessGroup

NETWORKS = ("memory", "cluster")


def launch(
    context: typer.Context,
    processes: Annotated[int, typer.Option(help="Number of ranks; each has a share of the nodes and their data.")],
    restarts: Annotated[int, typer.Option(help="How often to restart all ranks after one has died.")] = 3,
) -> None:
    """Train over several processes of this machine.

    Use it as: fairmesh launch EXPERIMENT --processes P [options of run]"""
    if processes < 1:
        raise BadInput(f"--processes must be >= 1, got {processes}")
    if restarts < 0:
        raise BadInput(f"--restarts must be >= 0, got {restarts}")
    _refuse_early(context, context.args)
    sys.exit(launched(context.args, processes, restarts))


def folder_of(experiment: Path, out: Path | None) -> Path:
    """Returns the folder of a run of this file; of a pattern of files, it is called as their folder."""
    name = (experiment.parent.resolve() if "*" in experiment.stem or "?" in experiment.stem else experiment).stem
    return out or Path("runs") / name


def _refuse_early(context: typer.Context, arguments: list[str]) -> None:
    """Parses the options as `run` will and looks at the run's folder, so that a mistake is reported once, and before
    any rank has started."""
    if "--network" in arguments:
        raise BadInput("--network: a launched run is always on a cluster; remove the option")
    group: Any = context.parent.command if context.parent else None
    if group is not None:
        given = group.commands["run"].make_context("run", list(arguments), parent=context.parent).params
        folder = folder_of(Path(given["experiment"]), given["out"] and Path(given["out"]))
        refuse_unusable(folder, resume=given["resume"], overwrite=given["overwrite"])


@contextmanager
def loaded_on(
    network: str, timeout_s: float, load: Callable[[], "Experiment"]
) -> Iterator[tuple["Experiment", "ProcessGroup | None"]]:
    """Yields the experiment, and the processes that train it together, if there are several."""
    if network not in NETWORKS:
        raise BadInput(f"--network must be one of {', '.join(NETWORKS)}, got {network!r}")
    if network == "memory":
        yield load(), None
        return
    from fairmesh.networks.cluster import joined

    experiment, failure = None, None
    try:
        experiment = load()
    except FairmeshError as error:  # to be reported once, when all ranks have joined
        failure = error
    with joined(experiment.options.device if experiment else "cpu", timeout_s) as process_group:
        with process_group.fail_together():
            if failure:
                raise failure
        if experiment:
            yield experiment, process_group


def leave(error: FairmeshError) -> None:
    """Prints in one line what ended a command, and exits with its code. Of the ranks of a launched run, one prints."""
    code = error.exit_code
    text = str(error) if code != FairmeshError.exit_code else f"error: {error}"
    ours = OUTCOME in os.environ
    if isinstance(error, Interrupted):
        command = "launch" if ours else sys.argv[1] if len(sys.argv) > 1 else ""
        text += f"; `fairmesh {command} ... --resume` continues it" if command in ("run", "launch") else ""
    if not ours or code == 1:
        if not error.reported_elsewhere:
            say(text)
        sys.exit(code)
    if not error.reported_elsewhere and record_outcome(code):
        say(text)
    sys.exit(0)  # so that torchrun does not restart it
