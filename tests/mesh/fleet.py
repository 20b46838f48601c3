"""Meshes on this machine for tests: provisioned as sites are, each node a process forked from one that has everything
imported, so that starting one takes moments."""

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch._dynamo  # otherwise torch.func imports it at the first gradient, which takes each node seconds

from fairmesh.cli.mesh import SITE
from fairmesh.experiment import load_experiment
from fairmesh.mesh.enrol.approval import approve, not_allowed
from fairmesh.mesh.enrol.certificates import AUTHORITY, make_key, secret_of, sign
from fairmesh.mesh.enrol.founding import founded, hand_out
from fairmesh.mesh.enrol.manifest import MANIFEST, handed_out, seal, write_files
from fairmesh.mesh.enrol.roster import MESH, OF_THE_EXPERIMENT, Mesh, SiteFile
from fairmesh.networks.base import Network
from fairmesh.networks.memory import MemoryNetwork, SingleProcess
from fairmesh.topology.mixing import Mixing


def secret(name: str) -> bytes:
    """The secret of a site's draws in tests: the same in every mesh, so that runs can be compared."""
    return hashlib.sha256(f"the secret of {name}".encode()).digest()


class KnowingSecrets(SingleProcess):
    """A simulation that is given the sites' secrets, and so draws what they draw."""

    def __init__(self, names: Sequence[str]):
        super().__init__()
        self._secrets = [secret(name) for name in names]

    def network(self, cycle: Sequence[Mixing], **form: Any) -> Network:
        return MemoryNetwork(cycle, secrets=self._secrets, **form)


_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Returns ports below the range of outgoing connections, which could take the port of a node that is down. No port
    is given out twice, and test processes that run at the same time have different ranges."""
    found: list[int] = []
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 6
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000 + 2_000 * worker, 22_000 + 2_000 * worker)
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            found.append(port)
    return found


def provisioned(folder: Path, experiment: Path, names: Sequence[str], listening: Sequence[str] | None = None) -> Mesh:
    """A mesh's folder with a folder for each site, as `fairmesh mesh init | key | sign | show --approve` leave them."""
    ports = dict(zip(names, free_ports(len(names))))
    listening = names if listening is None else listening
    addresses = {name: f"127.0.0.1:{ports[name]}" if name in listening else "" for name in names}
    mesh = founded(load_experiment(experiment), "test-mesh", addresses)
    founder = folder / "mesh"
    founder.mkdir(parents=True)
    handout = hand_out(experiment, mesh, founder, 30)
    modules = sorted({module for module, _ in not_allowed(handout.contents, ())})
    allow = {"allow": modules, "allow_revealing": True}  # sites trust the test's own files, and each other
    for name in names:
        site = folder / name
        site.mkdir()
        key, request = make_key(site, name)
        secret_of(key).write_bytes(secret(name))
        (site / f"{name}.pem").write_bytes(sign(request.read_bytes(), founder, mesh, 30))
        write_files(site, handout.contents)
        for file in (MESH, AUTHORITY, MANIFEST):
            (site / file).write_bytes((founder / file).read_bytes())
        table = {"name": name} | ({"listen": f"127.0.0.1:{ports[name]}"} if name in listening else {})
        SiteFile.of(site / SITE, table | allow | {"data": OF_THE_EXPERIMENT}).write()
        approve_at(site)
    return mesh


def settle(home: Path, **settings: Any) -> None:
    """Changes settings in a site's site.toml."""
    table = tomllib.loads((home / SITE).read_text()) | settings
    (home / SITE).write_text(tomli_w.dumps(table))


def approve_at(home: Path) -> None:
    """Approves what a site would run, as `fairmesh mesh show --approve` does."""
    site = SiteFile.read(home / SITE)
    approve(site, handed_out(site, Mesh.read(site.mesh)))


def amend(founder: Path, home: Path, changes: Mapping[str, str]) -> None:
    """The founder signs other files, in a folder next to its own, and a site gets and approves
    them."""
    other = Path(tempfile.mkdtemp(dir=founder.parent))
    shutil.copytree(founder, other, dirs_exist_ok=True)
    for name, text in changes.items():
        (other / name).write_text(text)
    files = [*json.loads((founder / MANIFEST).read_text())["files"], *changes]
    seal(other, Mesh.read(other / MESH), files)
    for name in (MANIFEST, *files):
        (home / name).write_bytes((other / name).read_bytes())
    approve_at(home)


def forked(work: Callable[[], None], log: Path) -> int:
    """Forks a process that does some work and writes its output to a file; returns its id."""
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        with open(log, "ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def start(folder: Path, name: str, **options) -> int:
    """A site's node as a process; `options` are those of run_node."""

    def work() -> None:
        torch.set_num_threads(1)
        from fairmesh.mesh.node.running import run_node

        run_node(folder / name / SITE, stream=sys.stderr, **options)

    return forked(work, folder / f"{name}.log")


def ended(process: int, seconds: float) -> int | None:
    """Returns a process's exit code, negative for a signal, or None if it still runs after `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None
