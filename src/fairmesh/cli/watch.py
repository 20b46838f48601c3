"""`fairmesh watch`: a live page about a run or a node."""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairmesh.cli.terminal import put, refuse_existing, say
from fairmesh.cli.without_torch import leave_out_torch

if TYPE_CHECKING:
    from fairmesh.watch.sources import Source


def watch(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Folder of a run, or a site's site.toml, folder or state folder.")
    ],
    port: Annotated[int, typer.Option(help="A port of 127.0.0.1; 0 for any that is free.", min=0, max=65535)] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the page's address.")] = False,
    snapshot: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the page as it is now to a file, and end.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the snapshot if there is one.")] = False,
) -> None:
    """Show a run or a node on a live page.

    On top is what to know and to do now, then who waits for whom, curves, weights, bytes and the log. Only this machine
    can open the page, and only with the secret in its address. It reads files and changes nothing; closing it changes
    nothing either."""
    if snapshot:
        refuse_existing(snapshot, "--snapshot", overwrite)
    leave_out_torch()
    from fairmesh.watch.sources import source_of

    source = source_of(path)
    if snapshot:
        _write(source, snapshot)
        return
    from fairmesh.watch.server import serving

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with serving(source, port) as server, ExitStack() as ends:
        put(server.address)
        sys.stdout.flush()
        if not no_browser and not _opened(ends.enter_context(_redirecting(server.address)).as_uri()):
            say("no browser was found: open this address in one on this machine")
        say("Ctrl-C ends the page; what it shows goes on")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            say("the page has ended")


def _write(source: "Source", path: Path) -> None:
    from fairmesh.storage.files import write_atomically
    from fairmesh.watch.page import snapshot

    write_atomically(path, snapshot(source.view(wait=True)).encode("utf-8", "replace"))
    put(f"written: {path}")


@contextmanager
def _redirecting(address: str) -> Iterator[Path]:
    """Yields a file that leads a browser to an address, and that only its owner can read. A browser is given the file
    instead of the address, whose secret every user of the machine would see in the list of processes."""
    with tempfile.TemporaryDirectory(prefix="fairmesh-watch-") as folder:  # which only its owner can enter
        page = Path(folder, "open.html")
        with open(os.open(page, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            file.write(f'<!doctype html><meta http-equiv="refresh" content="0;url={address}"><title>fairmesh</title>\n')
        yield page


def _opened(address: str) -> bool:
    """Opens the page in the user's browser. Returns whether there is one; one of text would take the terminal."""
    import webbrowser

    graphical = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    try:
        return bool(graphical) and webbrowser.open(address)
    except webbrowser.Error:
        return False
