"""Whether a site reaches its neighbours."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass

from fairmesh.networks.peers.mesh import Mesh, SiteFile, host_and_port

_WAIT_S = 5.0


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what was found, and what to do where it is not well."""

    what: str
    ok: bool
    found: str
    advice: str = ""


def neighbour_checks(site_file: SiteFile, mesh: Mesh) -> Iterator[Check]:
    """One check for each neighbour: that its port answers where this site dials it."""
    for other in mesh.neighbours(site_file.name):
        what, address = f"neighbour {other}", mesh.member(other).address
        if address is None or not mesh.dials(site_file.name, other):
            yield Check(what, True, "dials this site; nothing to try from here")
            continue
        try:
            socket.create_connection(host_and_port(address, what), timeout=_WAIT_S).close()
        except OSError as error:
            advice = f"is its node running, and may this machine open a connection to {address}?"
            yield Check(what, False, f"{address} does not answer: {error.strerror or error}", advice)
        else:
            yield Check(what, True, f"{address} answers")
