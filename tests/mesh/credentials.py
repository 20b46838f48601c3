"""Sites that know each other, with keys and certificates of one authority, and without a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fairmesh.mesh.enrol.certificates import AUTHORITY, make_authority, make_key, sign
from fairmesh.mesh.enrol.roster import Member, Mesh
from fairmesh.mesh.fields import Terms
from fairmesh.mesh.wire.tls_stream import Credentials


def mesh_of(names: Sequence[str]) -> Mesh:
    """A mesh in which all sites are neighbours."""
    addresses = {name: f"127.0.0.1:{7000 + i}" for i, name in enumerate(names)}
    return Mesh("test", tuple(Member(n, addresses[n], tuple(o for o in names if o != n)) for n in names))


def terms_of(names: Sequence[str], **more: int) -> Terms:
    """The terms of such a mesh, for `Bulletin`."""
    return Terms({member.name: member.neighbours for member in mesh_of(names).members}, **more)


def signed(folder: Path, names: Sequence[str], days: Mapping[str, float] | None = None) -> dict[str, Credentials]:
    """What each site has, with certificates for a day unless others are given; the authority is in the folder."""
    make_authority(folder, "test", 1)
    return {name: _signed(folder, names, name, (days or {}).get(name, 1)) for name in names}


def with_new_key(folder: Path, names: Sequence[str], name: str) -> Credentials:
    """What a site has after it had to replace its key."""
    (folder / f"{name}.key").unlink()
    return _signed(folder, names, name, 1)


def _signed(folder: Path, names: Sequence[str], name: str, days: float) -> Credentials:
    key, request = make_key(folder, name)
    certificate = sign(request.read_bytes(), folder, mesh_of(names), days)
    return Credentials(key.read_bytes(), certificate, (folder / AUTHORITY).read_bytes())
