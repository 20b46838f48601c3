"""The command line. Heavy imports are delayed until a command needs them."""

from typing import Annotated

import typer

from fairmesh.cli.advise import advise
from fairmesh.cli.cluster import launch, leave
from fairmesh.cli.data import data
from fairmesh.cli.keys import keys
from fairmesh.cli.launching import stop_where_ended
from fairmesh.cli.mesh import mesh
from fairmesh.cli.models import export, predict
from fairmesh.cli.node import node, status
from fairmesh.cli.nvflare import nvflare
from fairmesh.cli.report import compare, report, topology
from fairmesh.cli.run import demo, run
from fairmesh.cli.watch import watch
from fairmesh.errors import FairmeshError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: formatting it with rich imports a Markdown parser and doubles the start-up
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, advise, run, compare, report, export, predict, keys, topology, node, status, watch):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(launch)
app.add_typer(data, name="data")
app.add_typer(mesh, name="mesh")
app.add_typer(nvflare, name="nvflare")


def _print_version(wanted: bool) -> None:
    if wanted:
        from fairmesh import __version__

        print(f"fairmesh {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Trains one model that works for every site: robust decentralized learning with compressed messages and no
    server."""


def main() -> None:
    """Runs the command line. Prints errors that fairmesh raises on purpose as one line, without a traceback."""
    stop_where_ended()
    try:
        app()
    except FairmeshError as error:
        leave(error)
