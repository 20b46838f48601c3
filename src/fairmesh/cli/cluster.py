"""`fairmesh launch`, and how `fairmesh run` becomes one rank of a cluster."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairmesh.cli.launching import (
    OUTCOME,
    already_ended,
    launched,
    record_outcome,
)
from fairmesh.cli.terminal import say
from fairmesh.errors import BadInput, FairmeshError, Interrupted

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
    _refuse_unknown(context, context.args)
    sys.exit(launched(context.args, processes, restarts))


def _refuse_unknown(context: typer.Context, arguments: list[str]) -> None:
    """Parses the options as `run` will, so that a mistake is reported once and not by every rank."""
    if "--network" in arguments:
        raise BadInput("--network: a launched run is always on a cluster; remove the option")
    group: Any = context.parent.command if context.parent else None
    if group is not None:
        group.commands["run"].make_context("run", list(arguments), parent=context.parent)


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


def stop_where_ended() -> None:
    """Exits if torchrun restarted this rank although the run has ended on purpose."""
    if already_ended():
        sys.exit(0)
