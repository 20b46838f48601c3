"""What sites announce: believed only under their own signature, the newest kept, passed on."""

import json

import pytest

from fairmesh.networks.peers.bulletin import Bulletin
from fairmesh.networks.peers.certificates import make_authority, make_key, sign
from fairmesh.networks.peers.frames import Refused
from fairmesh.networks.peers.mesh import Member, Mesh

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    members = tuple(Member(n, f"127.0.0.1:{7000 + i}", tuple(o for o in NAMES if o != n)) for i, n in enumerate(NAMES))
    mesh = Mesh("three", "0" * 64, members)
    make_authority(folder, mesh.name, 1)
    made = {}
    for name in NAMES:
        key, request = make_key(folder, name)
        made[name] = key.read_bytes(), sign(request.read_bytes(), folder, mesh, 1)
    return made, (folder / "authority.pem").read_bytes()


@pytest.fixture
def boards(keys):
    made, authority = keys
    return {name: Bulletin(name, *made[name], authority, NAMES) for name in NAMES}


def pass_on(boards, sender, receiver):
    boards[receiver].heard(boards[sender].news(0)[1])


def test_news_reach_those_who_are_no_neighbours(boards):
    boards["a"].announce("status", {"round": 7}, 1)
    pass_on(boards, "a", "b")
    pass_on(boards, "b", "c")
    assert boards["c"].of("a", "status") == {"round": 7}
    assert boards["c"].of_all("status") == {"a": {"round": 7}}


def test_the_newest_holds_whatever_comes_later(boards):
    boards["a"].announce("status", {"round": 7}, 1)
    old = boards["a"].news(0)[1]
    boards["a"].announce("status", {"round": 8}, 2)
    boards["a"].announce("status", {"round": 6}, 1)
    pass_on(boards, "a", "b")
    boards["b"].heard(old)
    assert boards["b"].of("a", "status") == {"round": 8}


def test_only_what_is_new_is_told_again(boards):
    pass_on(boards, "a", "b")
    now, entries = boards["b"].news(0)
    assert {entry["site"] for entry in json.loads(entries)} == {"a", "b"}
    assert boards["b"].news(now) == (now, None)
    boards["b"].announce("status", {"round": 1}, 1)
    _, entries = boards["b"].news(now)
    assert [entry["kind"] for entry in json.loads(entries)] == ["status"]


@pytest.mark.parametrize(
    "forge",
    [
        lambda entry: entry | {"body": {"round": 99}},
        lambda entry: entry | {"number": 50},
        lambda entry: entry | {"site": "c"},
        lambda entry: entry | {"signature": "00" * 70},
    ],
    ids=["another body", "a higher number", "another site", "no signature"],
)
def test_a_neighbour_cannot_speak_for_another_site(boards, forge):
    boards["a"].announce("status", {"round": 7}, 1)
    boards["c"].announce("status", {"round": 5}, 1)
    pass_on(boards, "a", "b")
    pass_on(boards, "c", "b")
    boards["a"].announce("status", {"round": 8}, 2)
    entries = json.loads(boards["a"].news(0)[1])
    forged = [forge(entry) if entry["kind"] == "status" else entry for entry in entries]
    with pytest.raises(Refused, match="did not sign"):
        boards["b"].heard(json.dumps(forged).encode())
    assert boards["b"].of("a", "status") == {"round": 7}
    assert boards["b"].of("c", "status") == {"round": 5}


@pytest.mark.parametrize(
    "entries",
    [b"", b"{", b"7", b'[{"site": "a"}]', b'[{"site":"x","kind":"status","number":1,"body":{},"signature":""}]',
     b'[{"site":"a","kind":"gossip","number":1,"body":{},"signature":""}]'],
)  # fmt: skip
def test_what_is_no_news_of_this_mesh_is_refused(boards, entries):
    with pytest.raises(Refused):
        boards["b"].heard(entries)


def test_a_restarted_site_knows_what_it_and_others_had_said(boards, keys, tmp_path):
    made, authority = keys
    boards["a"].announce("frozen", {"round": 12}, 2)
    pass_on(boards, "b", "a")
    (tmp_path / "bulletin.json").write_bytes(boards["a"].saved())
    again = Bulletin("a", *made["a"], authority, NAMES)
    again.restored(tmp_path / "bulletin.json")
    again.announce("frozen", {"round": 3}, 2)  # what was said first holds
    assert again.of("a", "frozen") == {"round": 12}
    assert again.of("b", "certificate") is not None
