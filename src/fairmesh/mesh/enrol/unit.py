"""The systemd unit of a site's node."""

import os
import pwd
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from fairmesh.errors import BadInput, FairmeshError, Interrupted
from fairmesh.mesh.enrol.roster import Mesh, SiteFile, host_and_port
from fairmesh.storage.files import private_folder

_HOMES = ("/home", "/root", "/run/user")
_UNIT = """\
# /etc/systemd/system/fairmesh.service
[Unit]
Description=fairmesh node {site} of the mesh {mesh}
Wants=network-online.target
After=network-online.target
# A node that fails again and again stays down, and `systemctl status` shows it.
StartLimitIntervalSec=1h
StartLimitBurst=20

[Service]
Type=exec
User={user}
WorkingDirectory={folder}
ExecStart={program} node {file}{options}
# Exit code {person}: only a person can help. {stopped}: it was asked to stop, or waited longer than --patience.
Restart=on-failure
RestartSec=10
RestartPreventExitStatus={person}
SuccessExitStatus={stopped}
TimeoutStopSec=5min
# The node writes to its state folder, and to a temporary folder of its own, where torch keeps what it compiles.
ProtectSystem=strict
ReadWritePaths={state}
PrivateTmp=yes
Environment=HOME=/tmp TMPDIR=/tmp
NoNewPrivileges=yes
UMask=0077
# Homes of people cannot be seen, unless files of the node are there; then they cannot be written.
ProtectHome={home}
# TCP, and what the machine needs to look up names.
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
CapabilityBoundingSet={rights}
AmbientCapabilities={rights}
# If a node needs more, it is ended and started again, instead of the machine's other work.
MemoryMax=80%

[Install]
WantedBy=multi-user.target
"""


def unit_of(path: Path, user: str | None = None, options: str = "") -> str:
    """Returns the unit of the node of a site file.

    Args:
        path: The site file.
        user: Who runs the node. Default: the owner of the site file.
        options: Options of `fairmesh node`. Default: none.
    """
    site = SiteFile.read(path)
    paths = {"folder": site.folder, "file": site.path, "state": site.state, "program": _program()}
    for one in paths.values():
        if any(letter.isspace() or letter in "%\"'\\$" for letter in str(one)):
            raise BadInput(f"{one}: a systemd unit needs paths without spaces, quotes, %, $ and \\; move the folder")
    return _UNIT.format(
        site=site.name,
        mesh=Mesh.read(site.mesh).name,
        user=user or pwd.getpwuid(site.path.stat().st_uid).pw_name,
        options=options and f" {options}",
        person=FairmeshError.exit_code,
        stopped=Interrupted.exit_code,
        home="read-only" if _is_at_home([*paths.values(), sys.base_prefix, *_named_in(site)]) else "yes",
        rights="CAP_NET_BIND_SERVICE" if site.listen and host_and_port(site.listen, "listen")[1] < 1024 else "",
        **paths,
    )


def _named_in(site: SiteFile) -> list[Path]:
    """Returns the files of a site, and those that its data names in a table."""
    texts = [] if isinstance(site.data, str) else [text for text in site.data.values() if isinstance(text, str)]
    return [site.key, site.certificate, site.authority, site.mesh, *(site.folder / text for text in texts)]


def _is_at_home(paths: Iterable[str | Path]) -> bool:
    """Returns whether a path, or what it links to, is in a folder that ProtectHome hides."""
    found = [one for path in paths for one in (Path(path), Path(path).resolve())]
    return any(one.is_relative_to(home) for one in found for home in _HOMES)


def make_state_folder(path: Path, user: str | None = None) -> Path:
    """Makes the state folder of a site, since systemd starts no unit that may write to a folder that is not there. It
    belongs to the user who runs the node, if this process may give it away."""
    site = SiteFile.read(path)
    private_folder(site.state)
    owner = site.path.stat()
    try:
        found = pwd.getpwnam(user) if user else pwd.getpwuid(owner.st_uid)
    except KeyError as error:
        raise BadInput(f"--user {user}: there is no such user on this machine; create it first") from error
    if os.geteuid() == 0:
        os.chown(site.state, found.pw_uid, found.pw_gid)
    elif found.pw_uid != os.geteuid():
        raise BadInput(f"the state folder must belong to {found.pw_name}; run this as root or as {found.pw_name}")
    return site.state


def _program() -> Path:
    """Returns the installed command `fairmesh`."""
    beside = Path(sys.executable).parent
    program = shutil.which("fairmesh", path=beside) or shutil.which("fairmesh")
    if not program:
        raise BadInput(f"the command fairmesh is not next to {sys.executable}; install fairmesh there")
    return Path(program).absolute()
