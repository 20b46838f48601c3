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
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run
from tests.mesh.stranger import certified, foreign
from tests.refusals import missing_from

pytestmark = pytest.mark.slow

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


class Sites(Run):
    """Real nodes, each started as `fairmesh node` is."""

    def __init__(self, folder: Path):
        (folder / "net.py").write_text(NET)
        super().__init__(folder, NAMES, EXPERIMENT)
        load_experiment(folder / "experiment.toml").problem()  # what this imports, forked processes need not

    def home(self, name: str = "gamma") -> Path:
        return self.folder / name

    def start(self, *names: str, before: Callable[[], None] = lambda: None) -> None:
        for name in names:

            def work(name: str = name) -> None:
                torch.set_num_threads(1)
                before()
                sys.argv = ["fairmesh", "node", str(self.home(name) / fleet.SITE)]
                try:
                    main()
                except SystemExit as ended:
                    sys.stderr.flush()
                    os._exit(int(ended.code or 0))

            self.running[name] = fleet.forked(work, self.folder / f"{name}.log")

    def said(self, name: str) -> list[str]:
        log = self.folder / f"{name}.log"
        return log.read_text().splitlines() if log.exists() else []

    def until_said(self, name: str, *words: str) -> None:
        self.until(lambda: any(not missing_from(line, *words) for line in self.said(name)), 40)

    def stops(self, name: str, *words: str) -> None:
        """Passes if a node ends with the code for which only a person can help, and its last line has these words."""
        assert self._ended(name, 40) == 2, self.said(name)
        assert missing_from(self.said(name)[-1], "error: ", *words) == []

    def stop(self, *names: str) -> None:
        for name in names:
            os.kill(self.running[name], signal.SIGTERM)
            assert self._ended(name, 40) == 130, self.said(name)

    def wait(self, *names: str) -> None:
        """Passes if these nodes run and have not begun."""
        for name in names:
            assert self._ended(name, 0.1) is None, self.said(name)


@pytest.fixture
def sites(tmp_path) -> Iterator[Sites]:
    with Sites(tmp_path) as made:
        yield made


def copied(home: Path, source: Path, *files: str) -> None:
    for file in files:
        shutil.copy(source / file, home / file)


STOPPING: dict[str, tuple[Callable[[Path, Path], object], list[str]]] = {  # done to gamma's folder, given the founder's
    "certificate of another site": (
        lambda home, founder: shutil.copy(home.parent / "alpha" / "alpha.pem", home / "gamma.pem"),
        ["the certificate is for 'alpha'", "put gamma.pem here"],
    ),
    "certificate of another authority": (
        lambda home, founder: copied(home, foreign(home.parent / "foreign", "gamma", founder), "gamma.pem"),
        ["signed by another authority", "founder", "NAME.csr"],
    ),
    "path": (
        lambda home, founder: fleet.settle(home, experiment="elsewhere/experiment.toml"),
        ["elsewhere", "No such file", "founder"],
    ),
    "key": (
        lambda home, founder: shutil.copy(home.parent / "alpha" / "alpha.key", home / "gamma.key"),
        ["gamma.pem", "does not belong to"],
    ),
    "expired certificate": (
        lambda home, founder: copied(
            home, certified(home.parent / "expired", "gamma", founder, -1), "gamma.key", "gamma.pem"
        ),
        ["gamma.pem", "expired on"],
    ),
    "foreign authority": (
        lambda home, founder: copied(
            home, foreign(home.parent / "foreign", "gamma", founder), "gamma.key", "gamma.pem", "authority.pem"
        ),
        ["was not signed by the authority", "telephone"],
    ),
    "folder": (
        lambda home, founder: fleet.settle(home, state="/proc/no-such-disk/state"),
        ["cannot use the folder /proc/no-such-disk/state", "No such file"],
    ),
}


@pytest.mark.parametrize("case", STOPPING)
def test_node_with_a_wrong_file_stops_with_a_sentence_and_the_others_wait(sites, case):
    spoil, words = STOPPING[case]
    sound = shutil.copytree(sites.home(), sites.home("sound"))
    spoil(sites.home(), sites.home("mesh"))
    sites.start(*NAMES)
    sites.stops("gamma", *words)
    sites.wait("alpha", "beta")
    shutil.rmtree(sites.home())
    shutil.copytree(sound, sites.home())
    sites.start("gamma")
    sites.end(*NAMES)


def test_second_node_of_a_site_is_refused_and_the_first_continues(sites):
    sites.start(*NAMES)
    sites.until_said("gamma", "connected", "alpha")
    clone = shutil.copytree(sites.home(), sites.home("clone"))
    shutil.rmtree(clone / "state")  # a new one: it is not known yet that this site has a node
    sites.start("clone")
    sites.stops("clone", "cannot listen on", "another program uses the port")
    sites.end(*NAMES)


def test_clock_that_is_ahead_is_named_by_the_others_and_the_run_ends(sites, capsys):
    def ahead() -> None:
        now = time.time
        time.time = lambda: now() + 1000

    sites.start("alpha", "beta")
    sites.start("gamma", before=ahead)
    sites.until_said("alpha", "clocks differ", "gamma", "17 minutes ahead")
    sites.until_said("gamma", "clocks differ", "alpha", "behind")
    sites.end(*NAMES)
    assert missing_from(_status(sites, "alpha", capsys), "the clock of gamma is 17 minutes ahead") == []
    assert missing_from(_status(sites, "gamma", capsys), "this site's clock differs", "set it") == []


def _status(sites: Sites, name: str, capsys) -> str:
    """Returns what `fairmesh status` says below its tables."""
    status(sites.home(name) / fleet.SITE)
    return capsys.readouterr().err


def test_port_that_others_do_not_dial_is_named_by_the_check_and_by_the_node(sites, called):
    address = sites.mesh.member("gamma").address or ""
    port = fleet.free_ports(1)[0]
    file = sites.home() / fleet.SITE
    fleet.settle(sites.home(), listen=f"127.0.0.1:{port}")
    sites.start(*NAMES)
    sites.until_said("gamma", "others dial another port", str(port), address)
    sites.until_said("alpha", "cannot connect", "gamma")
    code, out, _ = called("mesh", "check", str(file))
    assert code == 1
    assert any(not missing_from(line, "listening", "WRONG", port, address) for line in out.splitlines()), out
    sites.stop("gamma")
    fleet.settle(sites.home(), listen=address)
    sites.start("gamma")
    sites.end(*NAMES)


def test_version_of_torch_that_makes_another_model_is_refused_with_both_machines(sites):
    def other() -> None:
        torch.__version__ = "other"  # type: ignore[assignment]

    sites.start("gamma", before=other)
    sites.start("alpha", "beta")
    there = f"There: torch {torch.__version__}"
    sites.until_said("gamma", "refused", "is not the one that this site makes", "weight", there, "Here: torch other")
    sites.until_said("alpha", "waiting", "gamma")
    sites.wait("alpha", "beta")
    sites.stop("gamma")
    shutil.rmtree(sites.home() / "state")  # nothing was sent yet
    sites.start("gamma")
    sites.end(*NAMES)


def test_site_that_moves_to_another_address_is_found_with_a_new_mesh_file(sites):
    old = sites.mesh.member("gamma").address or ""
    new = f"127.0.0.1:{fleet.free_ports(1)[0]}"
    fleet.settle(sites.home(), listen=new)
    sites.start(*NAMES)
    sites.until_said("alpha", "cannot connect", "gamma", "nobody listens there")
    sites.stop("alpha", "beta")
    for name in NAMES:
        mesh = sites.home(name) / MESH
        mesh.write_text(mesh.read_text().replace(old, new))
    sites.start("alpha", "beta")
    sites.end(*NAMES)
