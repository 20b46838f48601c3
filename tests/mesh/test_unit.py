"""The systemd unit: it names what is there, and a node runs in the sandbox that it describes."""

import configparser
import ctypes
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import fairmesh as fm
from fairmesh.errors import FairmeshError, Interrupted
from fairmesh.mesh.enrol import unit
from fairmesh.mesh.enrol.unit import make_state_folder, unit_of
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.mesh.outages import own_mounts
from tests.refusals import refused

NAMES = ["north", "south", "east"]
EXPERIMENT = experiment(30, algorithm="ad-gda", data={"odd": None})


@pytest.fixture
def sites(tmp_path) -> Path:
    (tmp_path / "trial.toml").write_text(EXPERIMENT)
    fleet.provisioned(tmp_path / "sites", tmp_path / "trial.toml", NAMES)
    return tmp_path / "sites"


def parsed(text: str) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    return {name: dict(section) for name, section in parser.items()}


def test_unit_names_paths_that_exist_and_the_exit_codes_of_the_program(sites, called):
    site = sites / "north" / fleet.SITE
    code, text, told = called("mesh", "unit", site, "--options", "--patience 2h")
    assert code == 0
    assert "daemon-reload" in told
    service = parsed(text)["Service"]
    program, command, file, *options = shlex.split(service["ExecStart"])
    assert (command, Path(file), options) == ("node", site, ["--patience", "2h"])
    assert os.access(program, os.X_OK)
    state = Path(service["ReadWritePaths"])
    assert state == sites / "north" / "state"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert Path(service["WorkingDirectory"]) == sites / "north"
    assert int(service["RestartPreventExitStatus"]) == FairmeshError.exit_code == fm.BadInput.exit_code == 2
    assert int(service["SuccessExitStatus"]) == Interrupted.exit_code == 130
    assert int(service["UMask"], 8) == 0o077


def test_unit_hides_homes_unless_files_of_the_node_are_there_and_gives_no_right_that_is_not_needed(sites, monkeypatch):
    site = sites / "north" / fleet.SITE
    monkeypatch.setattr(unit, "_program", lambda: Path("/usr/bin/fairmesh"))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    service = parsed(unit_of(site))["Service"]
    assert (service["ProtectHome"], service["CapabilityBoundingSet"]) == ("yes", "")
    assert set(service["RestrictAddressFamilies"].split()) >= {"AF_INET", "AF_INET6"}
    assert 0 < int(service["MemoryMax"].rstrip("%")) < 100
    fleet.settle(site.parent, data={"name": "table", "file": "/home/anna/rows.csv", "target": "ill"})
    assert parsed(unit_of(site))["Service"]["ProtectHome"] == "read-only"
    fleet.settle(site.parent, data="rows.py:read", listen="0.0.0.0:443")
    service = parsed(unit_of(site))["Service"]
    assert service["CapabilityBoundingSet"] == service["AmbientCapabilities"] == "CAP_NET_BIND_SERVICE"
    (site.parent / "link").symlink_to("/root/keys")
    fleet.settle(site.parent, key="link/north.key")
    assert parsed(unit_of(site))["Service"]["ProtectHome"] == "read-only"


def test_unit_of_a_folder_that_systemd_cannot_name_and_of_an_unknown_user_is_refused(sites):
    moved = sites / "north of here"
    shutil.copytree(sites / "north", moved)
    with refused("north of here", "spaces"):
        unit_of(moved / fleet.SITE)
    with refused("nobody-here", "user"):
        make_state_folder(sites / "north" / fleet.SITE, "nobody-here")


def test_node_ends_with_the_code_of_the_unit_when_only_a_person_can_help(sites, called):
    (sites / "north" / "experiment.toml").write_text("rounds = 31\n")
    code, _, told = called("node", sites / "north" / fleet.SITE)
    assert code == FairmeshError.exit_code
    assert "is not the file that the founder signed" in told


def test_unit_is_one_that_systemd_accepts(sites, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    make_state_folder(sites / "north" / fleet.SITE)
    service = tmp_path / "fairmesh.service"
    service.write_text(unit_of(sites / "north" / fleet.SITE))
    done = subprocess.run(["systemd-analyze", "verify", service], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "fairmesh" in line]
    assert said == []
    bad = tmp_path / "bad.service"
    bad.write_text(service.read_text().replace("ProtectSystem=strict", "ProtectSystm=strict"))
    done = subprocess.run(["systemd-analyze", "verify", bad], capture_output=True, text=True, timeout=60)
    assert "ProtectSystm" in done.stderr


# The sandbox of the unit: everything is read-only but the state folder and a temporary folder of its own.

_RECURSIVE, _READ_ONLY, _MOUNT_SETATTR = 0x8000, 1, 442


def _set_read_only(path: Path, on: bool) -> None:
    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]

    wanted = Attributes(_READ_ONLY if on else 0, 0 if on else _READ_ONLY, 0, 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(_MOUNT_SETATTR, -100, os.fsencode(path), _RECURSIVE, ctypes.byref(wanted), ctypes.sizeof(wanted)):
        raise OSError(ctypes.get_errno(), "mount_setattr")


def enter_sandbox(service: dict[str, str]) -> None:
    """Makes this process see the files as systemd would show them to the unit."""
    library = ctypes.CDLL(None, use_errno=True)

    def mount(source: Path | None, target: Path, kind: str | None, flags: int = 0) -> None:
        names = [None if one is None else os.fsencode(one) for one in (source, target, kind)]
        if library.mount(*names, flags, None):
            raise OSError(ctypes.get_errno(), f"mount {target}")

    bind, folder, state = 4096 | 16384, Path(service["WorkingDirectory"]), Path(service["ReadWritePaths"])
    own_mounts()
    home = os.open(folder, os.O_PATH)
    mount(None, Path("/tmp"), "tmpfs")  # PrivateTmp; these tests' own folder may be below it
    folder.mkdir(parents=True, exist_ok=True)
    mount(Path(f"/proc/self/fd/{home}"), folder, None, bind)
    mount(state, state, None, bind)
    private = Path("/tmp/private")
    private.mkdir()
    mount(None, private, "tmpfs")
    _set_read_only(Path("/"), True)
    for writable in (state, private):
        _set_read_only(writable, False)
    os.umask(int(service["UMask"], 8))
    os.chdir(folder)


def _environment(service: dict[str, str]) -> dict[str, str]:
    """Returns the environment of the unit, and where the package under test is."""
    given = dict(pair.split("=", 1) for pair in shlex.split(service["Environment"]))
    private = {name: value.replace("/tmp", "/tmp/private") for name, value in given.items()}
    source = str(Path(fm.__file__).parents[1])
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": source, "OMP_NUM_THREADS": "1"} | private


@pytest.mark.slow
def test_node_runs_to_the_end_in_the_sandbox_of_its_unit(sites, tmp_path):
    if fleet.ended(fleet.forked(own_mounts, tmp_path / "probe.log"), 10) != 0:
        pytest.skip("this machine allows no mounts of its own to an ordinary process")
    make_state_folder(sites / "north" / fleet.SITE)
    service = parsed(unit_of(sites / "north" / fleet.SITE))["Service"]

    def sandboxed() -> None:
        enter_sandbox(service)
        for path in (Path("/usr"), Path.home(), Path(sys.prefix), sites / "north"):
            try:
                (path / "written").write_text("")
            except OSError:
                continue
            raise AssertionError(f"{path} can be written")
        program, *arguments = shlex.split(service["ExecStart"])
        os.execve(program, [program, *arguments], _environment(service))

    nodes = [fleet.forked(sandboxed, sites / "north.log"), *(fleet.start(sites, name) for name in NAMES[1:])]
    codes = [fleet.ended(node, 90) for node in nodes]
    assert codes == [0, 0, 0], (sites / "north.log").read_text()
    models = {(sites / name / "state" / "result" / "model.safetensors").read_bytes() for name in NAMES}
    assert len(models) == 1
