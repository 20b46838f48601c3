"""A user at a terminal: runs commands in a folder, some of them in the background, and looks at what they print.

Commands are forked from this process, which has everything imported, so that each takes moments. The README's journey
starts real ones."""

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from fairmesh.cli.main import main
from tests.docs.pages import ROOT, blocks
from tests.mesh.fleet import ended, forked


class User:
    """Somebody who works in one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._printed = 0

    def runs(self, line: str, code: int = 0, seconds: float = 240) -> str:
        """Runs a command line to its end and returns what it printed; it must exit with `code`."""
        process, log = self.starts(line)
        found = ended(process, seconds)
        if found is None:
            os.kill(process, signal.SIGKILL)
        text = log.read_text(errors="replace")
        assert found == code, f"$ {line}\nexit code {found}, not {code}\n{text[-6000:]}"
        return text

    def starts(self, line: str) -> tuple[int, Path]:
        """Starts a command line; returns its process and the file that it prints to."""
        program, *arguments = shlex.split(line, comments=True)
        assert program == "fairmesh", line
        self._printed += 1
        log = self.folder / f".terminal-{self._printed}"
        log.touch()

        def work() -> None:
            torch.set_num_threads(1)  # OMP_NUM_THREADS=1, as the pages say where several processes share a machine
            os.chdir(self.folder)
            sys.argv = ["fairmesh", *arguments]
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            try:
                main()
            except SystemExit as done:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(done.code if isinstance(done.code, int) else 1 if done.code else 0)

        return forked(work, log), log

    def writes(self, name: str, text: str) -> Path:
        """Writes a file into the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path


def shown(page: str, kind: str, beginning: str, changes: Mapping[str, str] | None = None) -> str:
    """Returns the block of code on a page that contains some text, with these texts replaced."""
    found = [block.text for block in blocks(kind) if block.page == ROOT / page and beginning in block.text]
    assert len(found) == 1, f"{page} has {len(found)} blocks of {kind} with {beginning!r}"
    text = found[0]
    for old, new in (changes or {}).items():
        assert old in text, f"{page}: no {old!r} in\n{text}"
        text = text.replace(old, new)
    return text


def commands_shown(page: str, beginning: str) -> list[str]:
    """Returns the command lines of a block on a page."""
    lines = shown(page, "sh", beginning).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if re.match(r"\s*\w", line)]


def eventually(holds: Callable[[], object], seconds: float, what: Callable[[], str]) -> None:
    """Waits until something holds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"after {seconds:.0f} s: {what()}"
        time.sleep(0.1)
