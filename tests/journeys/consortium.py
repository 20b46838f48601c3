"""Organisations that found a mesh by deploy.md's commands."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.journeys.user import User, eventually
from tests.mesh.fleet import ended, free_ports

TABLE = '\n[data]\nname = "table"\nfile = "patients.csv"\n'


class Consortium:
    """The sites' folders next to each other, and their nodes. Founder and operators type what deploy.md shows."""

    def __init__(self, folder: Path, experiment: str, sites: Sequence[str], give_data: Callable[[Path, int], None]):
        self.user = User(folder)
        self.folder, self.sites, self._nodes = folder, list(sites), {}
        self.homes = {site: site for site in sites}  # where each site's folder is now
        self.home_logs: dict[str, Path] = {}
        self._found(experiment, give_data)

    def _found(self, experiment: str, give_data: Callable[[Path, int], None]) -> None:
        ports = free_ports(len(self.sites))
        # The last site has no address and dials the others.
        addressed = [f"--site {site}=127.0.0.1:{port}" for site, port in zip(self.sites[:-1], ports)]
        self.user.runs(f"fairmesh mesh init {experiment} {' '.join(addressed)} --site {self.sites[-1]} --out mesh")
        for k, site in enumerate(self.sites):
            self.user.runs(f"fairmesh mesh key mesh/mesh.toml {site} --out {site}")
            self.user.runs(f"fairmesh mesh sign {site}/{site}.csr --authority mesh")
            give_data(self.folder / site, k)
            self.user.runs(f"fairmesh mesh show {site}/site.toml --approve")
        checked = self.user.runs(f"fairmesh mesh check {self.sites[0]}/site.toml", code=1)  # nobody answers yet
        assert "connection refused" in checked

    def start(self, *sites: str) -> None:
        """Starts the nodes of these sites, or of all."""
        for site in sites or self.sites:
            self._nodes[site], self.home_logs[site] = self.user.starts(f"fairmesh node {self.homes[site]}/site.toml")

    def stop(self, site: str) -> None:
        """Asks a node to stop, as systemctl does."""
        node = self._nodes.pop(site)
        os.kill(node, signal.SIGTERM)
        assert ended(node, 60) in (130, 0), self.said(site)

    def kill(self, site: str) -> None:
        """Ends a node as a power cut does."""
        node = self._nodes.pop(site)
        with contextlib.suppress(ProcessLookupError):
            os.kill(node, signal.SIGKILL)
            ended(node, 60)

    def end(self, *sites: str, seconds: float = 240) -> None:
        """Waits until these nodes have ended with their result."""
        for site in sites:
            assert ended(self._nodes.pop(site), seconds) == 0, self.said(site)

    def kill_all(self) -> None:
        """Leaves nothing running."""
        for site in list(self._nodes):
            self.kill(site)

    def move(self, site: str, to: str) -> None:
        """Moves a site's folder, as a restored backup or another mount point does."""
        shutil.move(self.folder / self.homes[site], self.folder / to)
        self.homes[site] = to

    def at(self, site: str, command: str, code: int = 0) -> str:
        """Somebody at a site runs `fairmesh mesh COMMAND site.toml ...`."""
        verb, *rest = command.split(" ", 1)
        return self.user.runs(" ".join([f"fairmesh mesh {verb} {self.homes[site]}/site.toml", *rest]), code)

    def status(self, site: str) -> dict[str, Any]:
        """Returns what `fairmesh status --json` prints."""
        return json.loads(self.user.runs(f"fairmesh status {self.homes[site]}/site.toml --json"))

    def state(self, site: str) -> Path:
        """Returns a site's state folder."""
        return self.folder / self.homes[site] / "state"

    def until(self, site: str, holds: Callable[[dict[str, Any]], object], seconds: float = 120) -> None:
        """Waits until a site's status is so."""

        def now() -> bool:
            running = os.waitpid(self._nodes[site], os.WNOHANG)[0] == 0 if site in self._nodes else True
            assert running, f"the node of {site} has ended\n{self.said(site)}"
            file = self.state(site) / "status.json"
            return file.exists() and bool(holds(json.loads(file.read_text())))

        eventually(now, seconds, lambda: f"{site}\n{self.said(site)}")

    def said(self, site: str) -> str:
        """Returns the end of what a node has printed."""
        return f"--- {site}\n{self.home_logs[site].read_text(errors='replace')[-4000:]}"
