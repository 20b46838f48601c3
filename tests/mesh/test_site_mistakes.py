"""Mistakes at one site that are not about its data. The site that made one gets a sentence with the remedy; the others
wait and lose nothing; and once it is mended, all end with the same model."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fairmesh.cli.main import main
from fairmesh.cli.node import status
from fairmesh.experiment import load_experiment
from fairmesh.mesh.enrol.roster import MESH
from fairmesh.mesh.wire import greeting
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.mesh.stranger import certified, foreign
from tests.refusals import missing_from

NAMES = ["alpha", "beta", "gamma"]  # gamma makes the mistakes; alpha and beta dial it
EXPERIMENT = experiment(20, algorithm="ad-gda", data={"odd": None}, model={"name": "import", "path": "net.py:Net"})
NET = """
import torch


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
        if torch.__version__ == "other":  # as a version would that initialises models differently
            torch.nn.init.zeros_(self.weight)

    def forward(self, inputs):
        return super().forward(inputs.flatten(1))
"""


class Sites:
    """Real nodes as processes, each started as `fairmesh node` is."""

    def __init__(self, folder: Path):
        self.folder, self.running = folder, dict[str, int]()
        (folder / "trial.toml").write_text(EXPERIMENT)
        (folder / "net.py").write_text(NET)
        load_experiment(folder / "trial.toml").problem()  # what this imports, forked processes need not
        self.mesh = fleet.provisioned(folder / "sites", folder / "trial.toml", NAMES)

    def home(self, name: str = "gamma") -> Path:
        return self.folder / "sites" / name

    def start(self, name: str, home: Path | None = None, prepare: Callable[[], None] = lambda: None) -> int:
        def work() -> None:
            torch.set_num_threads(1)
            prepare()
            sys.argv = ["fairmesh", "node", str((home or self.home(name)) / fleet.SITE)]
            try:
                main()
            except SystemExit as ended:
                sys.stderr.flush()
                os._exit(int(ended.code or 0))

        self.running[name] = fleet.forked(work, self.folder / f"{name}.log")
        return self.running[name]

    def said(self, name: str = "gamma") -> str:
        log = self.folder / f"{name}.log"
        return log.read_text() if log.exists() else ""

    def until_said(self, name: str, *words: str) -> None:
        end = time.monotonic() + 40
        while not any(not missing_from(line, *words) for line in self.said(name).splitlines()):
            assert time.monotonic() < end, f"{words} not in the log of {name}:\n{self.said(name)}"
            time.sleep(0.05)

    def stops(self, name: str, *words: str) -> None:
        """Passes if a node ends with the code for which only a person can help, and its last line has these words."""
        code = fleet.ended(self.running.pop(name), 40)
        *_, last = self.said(name).splitlines()
        assert code == 2, self.said(name)
        assert missing_from(last, "error: ", *words) == [], last

    def stop(self, *names: str) -> None:
        for name in names:
            os.kill(self.running[name], signal.SIGTERM)
            assert fleet.ended(self.running.pop(name), 40) == 130, self.said(name)

    def wait(self, *names: str) -> None:
        """Passes if these nodes run and have not begun."""
        for name in names:
            assert fleet.ended(self.running[name], 0.1) is None, self.said(name)

    def end(self) -> None:
        """Passes if all nodes end with the same model."""
        for name in NAMES:
            assert fleet.ended(self.running.pop(name), 60) == 0, self.said(name)
        models = {(self.home(name) / "state" / "result" / "model.safetensors").read_bytes() for name in NAMES}
        assert len(models) == 1

    def kill(self) -> None:
        for process in self.running.values():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


@pytest.fixture
def sites(tmp_path) -> Iterator[Sites]:
    made = Sites(tmp_path)
    yield made
    made.kill()


def _wrong_path(home: Path, founder: Path) -> None:
    file = home / fleet.SITE
    file.write_text(file.read_text().replace("experiment.toml", "elsewhere/experiment.toml"))


def _key_of_another(home: Path, founder: Path) -> None:
    shutil.copy(home.parent / "alpha" / "alpha.key", home / "gamma.key")


def _expired(home: Path, founder: Path) -> None:
    made = certified(home.parent / "expired", "gamma", founder, -1)
    for file in ("gamma.key", "gamma.pem"):
        shutil.copy(made / file, home / file)


def _foreign_authority(home: Path, founder: Path) -> None:
    made = foreign(home.parent / "foreign", "gamma", founder)
    for file in ("gamma.key", "gamma.pem", "authority.pem"):
        shutil.copy(made / file, home / file)


def _no_folder(home: Path, founder: Path) -> None:
    file = home / fleet.SITE
    file.write_text(file.read_text().replace('state = "state"', 'state = "/proc/no-such-disk/state"'))


def _certificate_of_another(home: Path, founder: Path) -> None:
    shutil.copy(home.parent / "alpha" / "alpha.pem", home / "gamma.pem")


def _certificate_of_another_authority(home: Path, founder: Path) -> None:
    shutil.copy(foreign(home.parent / "foreign", "gamma", founder) / "gamma.pem", home / "gamma.pem")


STOPPING = {
    "certificate of another site": (_certificate_of_another, ["the certificate is for 'alpha'", "put gamma.pem here"]),
    "certificate of another authority": (
        _certificate_of_another_authority,
        ["signed by another authority", "founder", "NAME.csr"],
    ),
    "path": (_wrong_path, ["elsewhere", "No such file", "founder"]),
    "key": (_key_of_another, ["gamma.pem", "does not belong to"]),
    "expired certificate": (_expired, ["gamma.pem", "expired on"]),
    "foreign authority": (_foreign_authority, ["was not signed by the authority", "telephone"]),
    "folder": (_no_folder, ["cannot use the folder /proc/no-such-disk/state", "No such file"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STOPPING)
def test_node_with_a_wrong_file_stops_with_a_sentence_and_the_others_wait(sites, case):
    spoil, words = STOPPING[case]
    sound = sites.folder / "sound"
    shutil.copytree(sites.home(), sound)
    spoil(sites.home(), sites.folder / "sites" / "mesh")
    for name in NAMES:
        sites.start(name)
    sites.stops("gamma", *words)
    sites.wait("alpha", "beta")
    shutil.rmtree(sites.home())
    shutil.copytree(sound, sites.home())
    sites.start("gamma")
    sites.end()


@pytest.mark.slow
def test_second_node_of_a_site_is_refused_and_the_first_continues(sites):
    for name in ("alpha", "beta"):
        sites.start(name)
    sites.start("gamma")
    sites.until_said("gamma", "connected", "alpha")
    clone = sites.folder / "clone"
    shutil.copytree(sites.home(), clone)
    shutil.rmtree(clone / "state")  # a new one: it is not known yet that this site has a node
    sites.start("clone", clone)
    sites.stops("clone", "cannot listen on", "another program uses the port")
    sites.end()


@pytest.mark.slow
def test_clock_that_is_ahead_is_named_by_the_others_and_the_run_ends(sites, capsys):
    def ahead() -> None:
        now = time.time
        time.time = lambda: now() + 1000

    for name in ("alpha", "beta"):
        sites.start(name)
    sites.start("gamma", prepare=ahead)
    sites.until_said("alpha", "clocks differ", "gamma", "17 minutes ahead")
    sites.until_said("gamma", "clocks differ", "alpha", "behind")
    sites.end()
    assert missing_from(_status(sites, "alpha", capsys), "the clock of gamma is 17 minutes ahead") == []
    assert missing_from(_status(sites, "gamma", capsys), "this site's clock differs", "set it") == []


def _status(sites: Sites, name: str, capsys) -> str:
    """Returns what `fairmesh status` says below its tables."""
    status(sites.home(name) / fleet.SITE)
    return capsys.readouterr().err


@pytest.mark.slow
def test_port_that_others_do_not_dial_is_named_by_the_check_and_by_the_node(sites, called):
    address = sites.mesh.member("gamma").address or ""
    port = fleet.free_ports(1)[0]
    file = sites.home() / fleet.SITE
    file.write_text(file.read_text().replace(address, f"127.0.0.1:{port}"))
    for name in NAMES:
        sites.start(name)
    sites.until_said("gamma", "others dial another port", str(port), address)
    sites.until_said("alpha", "cannot connect", "gamma")
    code, out, _ = called("mesh", "check", str(file))
    assert code == 1
    assert any(not missing_from(line, "listening", "WRONG", port, address) for line in out.splitlines()), out
    sites.stop("gamma")
    file.write_text(file.read_text().replace(f"127.0.0.1:{port}", address))
    sites.start("gamma")
    sites.end()


@pytest.mark.slow
def test_version_of_torch_that_makes_another_model_is_refused_with_both_machines(sites):
    def other() -> None:
        torch.__version__ = "other"  # type: ignore[assignment]

    sites.start("gamma", prepare=other)
    for name in ("alpha", "beta"):
        sites.start(name)
    there = f"There: torch {torch.__version__}"
    sites.until_said("gamma", "refused", "is not the one that this site makes", "weight", there, "Here: torch other")
    sites.until_said("alpha", "waiting", "gamma")
    sites.wait("alpha", "beta")
    sites.stop("gamma")
    shutil.rmtree(sites.home() / "state")  # nothing was sent yet
    sites.start("gamma")
    sites.end()


@pytest.mark.slow
def test_version_that_cannot_work_with_the_others_is_refused_with_both_versions(sites):
    def other() -> None:
        greeting.COMPATIBILITY = 99

    sites.start("gamma", prepare=other)
    for name in ("alpha", "beta"):
        sites.start(name)
    sites.until_said("gamma", "refused", "cannot work together", "compatibility numbers")
    sites.until_said("alpha", "refused", "gamma", "cannot work together")
    sites.wait("alpha", "beta")
    sites.stop("gamma")
    sites.start("gamma")
    sites.end()


@pytest.mark.slow
def test_site_that_moves_to_another_address_is_found_with_a_new_mesh_file(sites):
    old = sites.mesh.member("gamma").address or ""
    new = f"127.0.0.1:{fleet.free_ports(1)[0]}"
    file = sites.home() / fleet.SITE
    file.write_text(file.read_text().replace(old, new))
    for name in NAMES:
        sites.start(name)
    sites.until_said("alpha", "cannot connect", "gamma", "nobody listens there")
    sites.stop("alpha", "beta")
    for name in NAMES:
        mesh = sites.home(name) / MESH
        mesh.write_text(mesh.read_text().replace(old, new))
    for name in ("alpha", "beta"):
        sites.start(name)
    sites.end()
