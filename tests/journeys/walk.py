"""Walks of users: what a page shows, run in its order by one shell, in a folder of its own, with the extras it names.

    def test_three_clinics_train_as_the_page_says(tmp_path):
        with walking(tmp_path, extras=["mesh"]) as walk:
            walk.bring("examples")                       # files of the repository that the reader has
            for step in steps("docs/howto/deploy.md", "Three clinics on one machine"):
                walk.do(step)
            assert "finished" in walk.run("fairmesh status north/site.toml")
            walk.write("mine.toml", text)                # what the page tells the reader to write
            walk.run("fairmesh run mine.toml", code=2)   # code=None if any will do

`steps` returns the commands and the blocks of Python of a page, or of its sections with these headings. A step whose
exit code is not 0 fails the test with its place on the page and what it printed. One shell runs all commands: `cd`,
`export`, `&`, `wait` and loops mean what they mean on the page. At the end everything that was started is stopped.

All installed packages are hidden but those that fairmesh needs, and the extras that were named: by `extras`, or by a
line such as `pip install '.[plot]'`, which installs nothing here. A `fresh` walk begins instead in a shell that knows
nothing of this environment: the page makes its own, and such a line installs.
"""

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fairmesh
from tests.docs.pages import ROOT, blocks, prose_of

_HIDING = Path(__file__).parent / "hidden"
_UNSET = {"PYTHONPATH", "VIRTUAL_ENV", "FAIRMESH_DATA", "FAIRMESH_TESTS"}  # what a user's shell does not have
_WATCHED_S = 3  # by a reader of a live page
_SHOWN = 3000  # characters of what a failed step printed
_NAMED = re.compile(r"pip install [^#]*?(?:fairmesh|\.)\[([\w,-]+)\]")


class Step(NamedTuple):
    """A command line, or a block of another kind, on a page."""

    place: str  # such as "README.md:31"
    kind: str  # "sh", "python", "toml"
    text: str


def steps(page: str, *sections: str, kinds: Iterable[str] = ("sh", "python")) -> list[Step]:
    """Returns the steps of a page, in their order: each command of its shell blocks, and blocks of other kinds whole.

    Args:
        page: The page's path in the repository.
        sections: The headings above the blocks; all if none is given.
        kinds: Of the blocks. Default: "sh" and "python".
    """
    found: list[Step] = []
    for block in blocks(*kinds):
        if block.page == ROOT / page and (not sections or _heading(block.page, block.line) in sections):
            if block.kind == "sh":
                found += [Step(f"{page}:{block.line + k}", "sh", text) for k, text in _commands(block.text)]
            else:
                found.append(Step(str(block), block.kind, block.text))
    missing = [one for one in sections if not any(_heading(ROOT / page, block.line) == one for block in blocks(*kinds))]
    assert found, f"{page} shows nothing to run"
    assert not missing, f"{page} has nothing to run below {missing}"
    return found


def _heading(page: Path, line: int) -> str:
    """Returns the last heading above a line."""
    above = "\n".join(prose_of(page).split("\n")[:line])
    return (re.findall(r"^#+ +(.+)$", above, re.M) or [""])[-1]


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Yields the complete commands of a shell block, each with the number of its first line."""
    lines: list[str] = []
    for number, line in enumerate(text.splitlines()):
        lines.append(line)
        command = "\n".join(lines)
        if line.endswith("\\") or subprocess.run(["bash", "-nc", command], capture_output=True).stderr:
            continue  # goes on
        if shlex.split(command, comments=True):
            yield number - len(lines) + 1, command
        lines = []
    assert not lines, f"an unfinished command: {lines}"


class Walk:
    """One user's shell, in a folder of its own."""

    def __init__(self, folder: Path, shell: subprocess.Popen, statuses: int, log: Path, fresh: bool):
        self.folder, self._shell, self._statuses, self._log, self._fresh = folder, shell, statuses, log, fresh
        self.extras: set[str] = set()

    def bring(self, *names: str) -> None:
        """Copies files and folders of the repository to the walk's folder, at the same paths."""
        for name in names:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, target)

    def write(self, name: str, text: str) -> Path:
        """Writes a file, and returns its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def do(self, step: Step, timeout: float = 120) -> str:
        """Takes a step of a page. Returns what it printed."""
        if step.kind == "python":
            name = re.sub(r"\W+", "-", step.place)
            self.write(f"{name}.py", step.text)
            return self.run(f"python {name}.py", timeout=timeout, place=step.place)
        assert step.kind == "sh", f"{step.place}: a block of {step.kind} is not run"
        return self.run(step.text, timeout=timeout, place=step.place)

    def run(self, command: str, code: int | None = 0, timeout: float = 120, place: str = "") -> str:
        """Runs a command, and returns what it printed. Fails if its exit code is another one than `code`."""
        if not self._fresh and command.startswith("pip install "):
            return self.install(*(name for names in _NAMED.findall(command) for name in names.split(",")))
        if re.match(r"fairmesh watch (?!.*--snapshot)", command):  # ends when the reader presses Ctrl-C
            command = f"timeout --signal INT --kill-after 20 {_WATCHED_S} {command}"
            code = 124  # of timeout
        begin = self._log.stat().st_size
        started = time.monotonic()
        assert self._shell.stdin
        self._shell.stdin.write(f"{{ {command}\n}} </dev/null 3>&-\necho $? >&3\n")
        self._shell.stdin.flush()
        ended, _, _ = select.select([self._statuses], [], [], timeout)
        status = os.read(self._statuses, 64).decode().strip() if ended else f"none after {timeout} s"
        with self._log.open(encoding="utf-8", errors="replace") as file:
            file.seek(begin)
            printed = file.read()
        print(f"{time.monotonic() - started:6.1f} s  {command[:120]}")  # pytest shows it if the test fails
        told = f"{place} {command}\nended with {status or 'the shell'} instead of {code}:\n{printed[-_SHOWN:]}"
        assert status.isdigit(), told
        assert code in (None, int(status)), told
        return printed

    def install(self, *extras: str) -> str:
        """Lets the packages of extras be found from here on."""
        self.extras |= set(extras)
        return self.run(f"export FAIRMESH_HIDDEN={shlex.quote(' '.join(hidden(frozenset(self.extras))))}")


@contextmanager
def walking(folder: Path, *, extras: Iterable[str] = (), fresh: bool = False) -> Iterator[Walk]:
    """Yields a walk in a folder.

    Args:
        folder: Where the shell begins; made if it is not there.
        extras: Whose packages can be found from the beginning.
        fresh: Whether nothing is installed yet, so that the walk makes its own environment. It has the Python of this
            one as `python3` and $PYTHON, and pip takes the versions in constraints.txt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    here = Path(sys.executable).parent
    variables = {name: value for name, value in os.environ.items() if name not in _UNSET}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if fresh:
        path = [one for one in os.environ["PATH"].split(":") if Path(one) != here]
        python = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
        variables |= {"PATH": ":".join(path), "PYTHON": python, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    else:
        source = Path(fairmesh.__file__).parents[1]
        variables |= {"PATH": f"{here}:{os.environ['PATH']}", "PYTHONPATH": f"{_HIDING}:{source}"}
    log, (statuses, status_of_shell) = folder.with_name(f"{folder.name}.log"), os.pipe()
    with log.open("ab") as printed:
        shell = subprocess.Popen(
            ["bash", "-c", f"exec 3>&{status_of_shell} {status_of_shell}>&-; exec bash"],
            cwd=folder,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            pass_fds=[status_of_shell],
        )
    os.close(status_of_shell)
    try:
        walk = Walk(folder, shell, statuses, log, fresh)
        if not fresh:
            walk.install(*extras)
        yield walk
    finally:
        _end(shell)
        os.close(statuses)


def _end(shell: subprocess.Popen) -> None:
    """Stops the shell and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, number)
        with suppress(subprocess.TimeoutExpired):
            shell.wait(5)
    if shell.stdin:
        with suppress(OSError):
            shell.stdin.close()


@cache
def hidden(extras: frozenset[str]) -> list[str]:
    """Returns the top-level names of all installed packages that fairmesh with these extras does not bring along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    needed: set[tuple[str, str]] = {("pip", ""), ("fairmesh", "")}  # a package, and an extra of it or ""
    waiting = [*project["dependencies"], *(one for extra in extras for one in optional[extra])]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in needed:
                needed.add((name, extra))
                waiting += optional[extra] if name == "fairmesh" else _required_by(name, extra)
    names = {name for name, _ in needed}
    owners = _owners()
    return sorted(name for name in owners if name.isidentifier() and not owners[name] & names)


@cache
def _owners() -> dict[str, set[str]]:
    """Returns which distributions each top-level name comes from."""
    return {
        name: {str(canonicalize_name(one)) for one in found}
        for name, found in metadata.packages_distributions().items()
    }


@cache
def _required_by(name: str, extra: str) -> list[str]:
    """Returns what an installed distribution needs on this machine, or needs in addition for one of its extras."""
    try:
        found = [Requirement(text) for text in metadata.requires(name) or []]
    except metadata.PackageNotFoundError:  # for other machines
        return []
    return [
        f"{one.name}[{','.join(one.extras)}]"
        for one in found
        if one.marker is None or one.marker.evaluate({"extra": extra})
    ]
