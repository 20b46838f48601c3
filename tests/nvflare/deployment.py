"""An NVFlare project on this machine: a server, three clients and an admin, with certificates, as processes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from fairmesh.nvflare.keep import Ended, Kit
from tests.mesh.fleet import secret
from tests.nvflare.standin import until

SITES = ("site-1", "site-2", "site-3")
ADMIN = "admin@nvidia.com"
_BIN = Path(sys.executable).parent


class Project:
    """The folders and processes of a project."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.home = folder / "example_project" / "prod_00"
        self.environment = os.environ | {
            "NVFLARE_POC_WORKSPACE": str(folder),
            "HOME": str(folder),  # the tool keeps its own settings there
            "PATH": f"{_BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def command(self, *words: object, seconds: float = 120.0) -> str:
        done = subprocess.run(
            [str(_BIN / str(words[0])), *map(str, words[1:])], env=self.environment, cwd=self.folder, timeout=seconds,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    @cached_property
    def kit(self) -> Kit:
        return Kit(self.home / ADMIN)

    def give_secrets(self, run: str) -> None:
        """Gives the sites the draws of tests, so that two runs can be compared."""
        for site in SITES:
            home = self.home / site / "fairmesh" / run / site
            home.mkdir(parents=True)
            (home / f"{site}.secret").write_bytes(secret(site))

    def round_of(self, run: str, site: str) -> int:
        from fairmesh.mesh.node.watching import read_status

        with suppress(Exception):
            return int(read_status(self.state(run, site))["round"])
        return -1

    def state(self, run: str, site: str) -> Path:
        return self.home / site / "fairmesh" / run / site / "state"

    def processes(self, *marks: str) -> list[int]:
        """Returns the processes of this project whose command has all of these marks."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode().replace("\0", " ") if entry.name.isdigit() else ""
                if str(self.home) in words and all(mark in words for mark in marks):
                    found.append(int(entry.name))
        return found

    def kill(self, *marks: str) -> None:
        found = self.processes(*marks)
        assert found, marks
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def awaited(self, kit: Kit, job: str, seconds: float = 300.0) -> Ended:
        ended: list[Ended] = []

        def look() -> bool:
            with suppress(ConnectionError):
                if (found := kit.ended(job)) is not None:
                    ended.append(found)
            return bool(ended)

        until(look, seconds)
        return ended[0]

    def submitted(self, kit: Kit, job: Path, seconds: float = 120.0) -> str:
        """Submits a job as soon as the server can be reached."""
        end = time.monotonic() + seconds
        while True:
            try:
                return kit.submit(job)
            except ConnectionError:
                if time.monotonic() > end:
                    raise
                time.sleep(1)

    def memory_matches(self, pattern: bytes, *marks: str) -> int:
        """Returns how often a pattern is in the memory of processes."""
        count = 0
        for process in self.processes(*marks):
            with suppress(OSError), open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb") as memory:
                for line in maps:
                    where = re.match(r"([0-9a-f]+)-([0-9a-f]+) r", line)
                    if where is None or "[v" in line:
                        continue
                    begins, ends = (int(part, 16) for part in where.groups())
                    with suppress(OSError, OverflowError, ValueError):
                        memory.seek(begins)
                        count += len(re.findall(pattern, memory.read(ends - begins)))
        return count


@contextmanager
def project(folder: Path) -> Iterator[Project]:
    """Provisions and starts a project, in which each site takes the data of the experiment. One runs at a time,
    since it takes the ports of NVFlare's POC mode."""
    made = Project(folder)
    made.command("nvflare", "poc", "prepare", "-n", 3, "--force")
    for site in SITES:
        made.command("fairmesh", "nvflare", "site", made.home / site, "--data", "experiment", "--allow")
        file = made.home / site / "local" / "fairmesh.toml"
        file.write_text(file.read_text() + "allow_revealing = true\n")
    made.command("fairmesh", "nvflare", "site", made.home / "server", "--allow")
    try:
        made.command("nvflare", "poc", "start", seconds=300)
        yield made
        made.kit.close()
    finally:
        for marks in ("sub_start.sh",), ("nvflare.private",):
            for process in made.processes(*marks):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        shutil.rmtree(folder / "example_project", ignore_errors=True)
