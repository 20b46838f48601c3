"""Output of every command: lines, tables, JSON."""

import gc
import sys
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairmesh.config.overrides import read_toml
from fairmesh.errors import BadInput, MissingPackage, printable
from fairmesh.storage.files import refuse_no_file

if TYPE_CHECKING:
    from fairmesh.report.text import Table

Track = Annotated[
    list[str],
    typer.Option(
        "--track",
        help="Also write measurements to tensorboard, mlflow or wandb; NAME=PLACE for another folder or server; may be "
        "repeated.",
    ),
]
_FEW = 10  # rows of a table of sites
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def readable_toml(path: Path) -> Path:
    """Refuses a file that cannot be read or is no TOML, before the libraries are imported that its contents need."""
    read_toml(path)
    return path


def existing(paths: Any) -> Any:
    """Refuses paths of runs where nothing is, before anything is imported that reads a run."""
    for path in paths if isinstance(paths, list | tuple) else [paths]:
        if not path.exists():
            raise BadInput(f"there is no folder {path}; give that of a run")
    return paths


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Lets libraries be imported without a search for garbage, which they do not make: a fifth of the time that it
    takes to import torch."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def say(text: str) -> None:
    """Prints a sentence on stderr, without control characters: part of it may be another site's words."""
    print(printable(text), file=sys.stderr, flush=True)


def put(text: str) -> None:
    """Prints a line on stdout, as `say` does on stderr."""
    print(printable(text))


def print_json(value: Any) -> None:
    from fairmesh.storage.strict_json import as_json

    print(as_json(value))


def console(stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=not sys.stdout.isatty(), highlight=False)


def show(part: "Table | str") -> None:
    """Prints a part of a report: a table on stdout, a line on stderr. Nothing if it is empty."""
    if isinstance(part, str):
        if part:
            say(part)
    elif part.title is None:
        show_rows(part.rows)
    elif part.rows:
        show_table(part.rows, part.title)


def few(table: list[list[str]], order: list[int] | None = None) -> list[list[str]]:
    """Returns a table of sites with its header; of more than a dozen, the first ten in an order, and how many more
    there are. JSON has all."""
    header, *rows = table
    if len(rows) <= _FEW + 2:
        return table
    shown = [rows[i] for i in (order or range(len(rows)))[:_FEW]]
    more = f"... and {len(rows) - _FEW} more; --json has all"
    return [header, *shown, [more, *[""] * (len(header) - 1)]]


def show_rows(table: list[list[str]]) -> None:
    """Prints a table. If the terminal is too narrow for it, columns become rows."""
    turned = [list(column) for column in zip(*table)]
    if sys.stdout.isatty() and _width(table) > console().width >= _width(turned):
        table = turned
    show_table(table)


def _width(table: list[list[str]]) -> int:
    """Returns how wide a table is with its borders."""
    return 1 + sum(3 + max(map(len, column)) for column in zip(*table))


def show_table(
    rows: list[list[str]], title: str | None = None, marked: AbstractSet[int] = frozenset(), texts: bool = False
) -> None:
    """Prints a rich table on a terminal, and tab-separated lines elsewhere. Cells are text, whatever they contain:
    words of other sites cannot format or control a terminal. With `texts`, all columns begin at the left."""
    rows = [[", ".join(map(printable, cell.split("\n"))) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title and Text(printable(title)), title_justify="left", header_style="bold")
    for i, name in enumerate(rows[0]):
        table.add_column(Text(name), justify="left" if i == 0 or texts else "right")
    for i, row in enumerate(rows[1:]):
        table.add_row(*map(Text, row), style="bold red" if i in marked else None)
    console().print(table)


def refuse_existing(path: Path, option: str, overwrite: bool) -> None:
    """Refuses to write a file that is there, unless it may be replaced, and what is no plain file in any case."""
    refuse_no_file(path)
    if path.exists() and not overwrite:
        raise BadInput(f"{path} exists; name another file with {option} FILE, or replace it with --overwrite")


def draw(picture: Callable[[Path], None], asked: Path | None, default: Path, overwrite: bool = False) -> Path | None:
    """Draws the picture of a command that prints a table as well.

    Args:
        picture: Draws it to a path.
        asked: The path that the user named; None for the default.
        default: The path otherwise.
        overwrite: Whether a file that is there may be replaced. Default: False.

    Returns:
        The picture's path, or None if matplotlib is missing; a line on stderr then says so.

    Raises:
        MissingPackage: If matplotlib is missing and the user asked for the picture by its path.
        BadInput: If there is a file at the path.
    """
    path = asked or default
    refuse_existing(path, "--plot", overwrite)
    try:
        picture(path)
    except MissingPackage as missing:
        if asked:
            raise
        say(f"no picture: {missing}")
        return None
    return path
