"""Who is in a mesh, who dials whom, and which files are refused."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairmesh.mesh.enrol.roster import Member, Mesh, SiteFile, host_and_port
from tests.refusals import refused


def ring(n: int, addresses: dict[int, str] | None = None) -> Mesh:
    addresses = {i: f"10.0.0.{i + 1}:7700" for i in range(n)} if addresses is None else addresses
    members = [Member(f"s{i}", addresses.get(i, ""), (f"s{(i - 1) % n}", f"s{(i + 1) % n}")) for i in range(n)]
    return Mesh("ring", tuple(members))


@st.composite
def meshes(draw) -> Mesh:
    """A connected graph of up to seven sites, some without an address, some gone."""
    n = draw(st.integers(3, 7))
    edges = {(draw(st.integers(0, i - 1)), i) for i in range(1, n)}
    pairs = draw(st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))))
    edges |= {tuple(sorted(pair)) for pair in pairs if pair[0] != pair[1]}
    name = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
    names = draw(st.lists(name, min_size=n, max_size=n, unique=True))
    hidden = draw(st.none() | st.integers(0, n - 1))
    around = [{b for a, b in edges if a == i} | {a for a, b in edges if b == i} for i in range(n)]
    ports = [draw(st.integers(1, 65535)) for _ in range(n)]
    addresses = ["" if i == hidden else f"h{i}.example:{ports[i]}" for i in range(n)]
    members = [Member(names[i], addresses[i], tuple(names[j] for j in around[i])) for i in range(n)]
    mesh = Mesh(draw(st.sampled_from(["trial", "a", "x-1"])), tuple(members))
    leaf = next((m.name for m in mesh.members if len(m.neighbours) == 1), None)
    return mesh.without(leaf) if leaf and draw(st.booleans()) else mesh


@given(meshes())
def test_mesh_written_and_read_is_the_same(tmp_path_factory, made):
    path = tmp_path_factory.mktemp("mesh") / "mesh.toml"
    made.write(path)
    assert Mesh.read(path) == made


@given(meshes())
def test_edges_are_dialled_by_exactly_one_end(made):
    for member in made.present:
        for other in made.neighbours(member.name):
            assert made.dials(member.name, other) != made.dials(other, member.name)
            answering = other if made.dials(member.name, other) else member.name
            assert made.member(answering).address
    assert 2 * len(made.edges) == sum(len(made.neighbours(m.name)) for m in made.present)


def test_edges_between_two_addresses_are_dialled_by_the_earlier_site(mesh):
    assert mesh.edges == (("alpha", "beta"), ("gamma", "alpha"), ("gamma", "beta"))
    with refused("s0", "s2", "neighbours"):
        ring(4).dials("s0", "s2")


def test_order_in_which_neighbours_are_written_does_not_matter(mesh):
    turned = tuple(replace(m, neighbours=m.neighbours[::-1]) for m in mesh.members)
    assert replace(mesh, members=turned) == mesh


def test_file_is_short_and_readable(mesh):
    lines = mesh.text().splitlines()
    assert len(lines) <= 5 + 5 * len(mesh.members)
    assert 'neighbours = ["beta", "gamma"]' in lines
    assert "generation = 1" in lines


def test_sites_that_remain_keep_their_positions():
    whole = ring(4)
    rest = whole.without("s1")
    assert (whole.generation, rest.generation) == (1, 2)
    assert [m.name for m in rest.present] == ["s0", "s2", "s3"]
    assert [rest.position(name) for name in ("s0", "s2", "s3")] == [0, 2, 3]
    assert rest.neighbours("s0") == ("s3",)
    assert rest.neighbours("s1") == ()
    assert rest.removed == ("s1",)


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (lambda: ring(4).without("s1").without("s3"), ["s1, s3", "{s0}", "{s2}"]),
        (lambda: ring(3).without("s0").without("s1"), ["sites", 1]),
        (lambda: ring(3).without("s0").without("s0"), ["s0", "left"]),
        (lambda: ring(3).without("s9"), ["mesh ring", "'s9'"]),
        (lambda: ring(4, {0: "a:1", 2: "b:1"}).without("s0").without("s2"), ["{s1}", "{s3}"]),
        (lambda: ring(4, {0: "a:1", 1: "b:1"}), ["s2", "s3", "address"]),
        (lambda: ring(3, {0: "a:1", 1: "a:1"}), ["address", "a:1"]),
        (lambda: replace(ring(3), members=(*ring(3).members, ring(3).members[0])), ["names", "s0"]),
        (lambda: replace(ring(3), removed=("s7",)), ["removed", "'s7'"]),
        (lambda: replace(ring(3), name="Trial"), ["mesh 'Trial'", 63]),
        (lambda: Mesh("m", (Member("a", "a:1", ("b",)), Member("b", "b:1"))), ["neighbour", "b does not name"]),
        (lambda: Mesh("m", (Member("a", "a:1", ("a",)), Member("b", "b:1"))), ["site a", "itself"]),
        (lambda: Mesh("m", (Member("a", "a:1", ("c",)), Member("b", "b:1"))), ["site a", "neighbour", "'c'"]),
        (lambda: Mesh("m", (Member("a", "a:1"), Member("b", "b:1"))), ["{a}", "{b}"]),
        (lambda: Member("a.b", "a:1"), ["site 'a.b'", 63]),
        (lambda: Member("a" * 64), ["a" * 64, 63]),
        (lambda: Member("-a"), ["site '-a'"]),
        (lambda: Member("a", "host"), ["'host'", "host:port"]),
        (lambda: Member("a", "host:0"), ["'host:0'", 65535]),
        (lambda: Member("a", "host:65536"), ["'host:65536'", 65535]),
        (lambda: Member("a", "a b:1"), ["site a", "'a b'"]),
        (lambda: Member("a", ":1"), ["site a", "''"]),
        (lambda: Member("a", "::1:7700"), ["'::1'", "IPv6", "[ ]"]),
        (lambda: Member("a", "[::zz]:7700"), ["'::zz'", "IPv6"]),
        (lambda: Member("a", "0.0.0.0:7700"), ["site a", "0.0.0.0"]),
    ],
)
def test_mesh_file_that_cannot_be_a_mesh_is_refused_with_the_reason(made, names):
    with refused(*names):
        made()


def test_address_may_be_ipv6():
    assert host_and_port("[2001:db8::1]:7700", "x") == ("2001:db8::1", 7700)


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("address =", "adress =", ["site[0].adress", "'address'"]),
        ("generation = 1", "generation = 2", ["mesh.generation", 2, "removed"]),
        ("generation = 1", "generation = 'one'", ["mesh.generation", "'one'"]),
        ("[mesh]", "[mash]", ["mash", "'mesh'"]),
        ("removed =", "remowed =", ["mesh.remowed", "'removed'"]),
        ("[mesh]", "[mesh", ["TOML"]),
    ],
)
def test_mesh_file_that_is_wrong_is_refused_by_key(mesh, tmp_path, old, new, names):
    path = tmp_path / "mesh.toml"
    path.write_text(mesh.text().replace(old, new, 1))
    with refused(path, *names):
        Mesh.read(path)


def test_site_file_names_files_beside_it(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text('name = "alpha"\nkey = "secret/alpha.key"\nauthority = "/etc/authority.pem"\n')
    read = SiteFile.read(path)
    assert read.key == tmp_path / "secret" / "alpha.key"
    assert read.certificate == tmp_path / "alpha.pem"
    assert str(read.authority) == "/etc/authority.pem"
    assert (read.mesh, read.state) == (tmp_path / "mesh.toml", tmp_path / "state")
    assert (read.listen, read.data) == ("", "")


def test_site_file_written_and_read_is_the_same_and_never_written_over(tmp_path):
    data = {"name": "npz", "file": "rows.npz"}
    own = {"allow_revealing": True, "announce_statistics": False, "on_unusual_data": "wait", "largest_prior": 1.0}
    made = SiteFile.of(tmp_path / "site.toml", {"name": "alpha", "listen": "0.0.0.0:7700", "data": data} | own)
    made.write()
    assert SiteFile.read(tmp_path / "site.toml") == made
    with refused(made.path, "exists"):
        made.write()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["name:"]),
        ('name = "alpha"\nlisten = "7700"', ["listen", "'7700'", "host:port"]),
        ('name = "alpha"\npath = "x"', ["path", "unknown"]),
        ('name = "alpha"\nmesh = 3', ["mesh:", "3"]),
        ('name = "alpha"\nsertificate = "x"', ["sertificate", "'certificate'"]),
        ('name = "alpha"\ndata = "rows.csv"', ["data", "'rows.csv'", "'file.py:function'"]),
        ('name = "alpha"\ndata = 3', ["data:", "string"]),
        ('name = "Alpha"', ["name 'Alpha'", 63]),
        ('name = "alpha"\nlargest_prior = 80', ["largest_prior", "80"]),
        ('name = "alpha"\non_unusual_data = "stop"', ["on_unusual_data", "'stop'", "'wait'"]),
    ],
)
def test_site_file_that_is_wrong_is_refused_with_the_reason(tmp_path, text, names):
    path = tmp_path / "site.toml"
    path.write_text(text)
    with refused(path, *names):
        SiteFile.read(path)


@pytest.mark.slow
def test_files_can_be_read_without_the_extra():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['cryptography', 'prometheus_client']))"
    read = f"{blocked}; import fairmesh.mesh.enrol.roster, fairmesh.mesh.enrol.agreement, fairmesh.cli.main"
    asked = f"{blocked}; import fairmesh.mesh.enrol.certificates"
    assert subprocess.run([sys.executable, "-c", read], capture_output=True).returncode == 0
    ended = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert "'fairmesh[mesh]'" in ended.stderr
