"""Real nodes whose disk is damaged, or whose neighbours flood, stall or come back with another key: the run of the
others ends as it should, and the log names the cause."""

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import fairmesh
from fairmesh.mesh.enrol.certificates import fingerprint, make_key, sign, signature
from fairmesh.mesh.enrol.keys import trust
from fairmesh.mesh.enrol.roster import Mesh, host_and_port
from fairmesh.mesh.wire import frames, greeting, links
from fairmesh.mesh.wire.bulletin import Announcement
from fairmesh.mesh.wire.journal import Journal
from fairmesh.mesh.wire.links import Links
from fairmesh.storage.files import write_record
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.mesh.lives import Lives
from tests.mesh.stranger import hello_of, spoken
from tests.refusals import missing_from

NAMES = ["alpha", "beta", "gamma"]
EXPERIMENT = experiment(60, options={"checkpoint_every": 25})

pytestmark = pytest.mark.slow


def provisioned(folder: Path, rounds: int = 60) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "experiment.toml").write_text(EXPERIMENT.replace("rounds = 60", f"rounds = {rounds}"))
    fleet.provisioned(folder / "mesh", folder / "experiment.toml", NAMES)
    return folder / "mesh"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a run ends with that nobody disturbs."""
    with Lives(provisioned(tmp_path_factory.mktemp("undisturbed")), NAMES) as nodes:
        nodes.start_all()
        nodes.finish(60)
        return nodes.results()


@pytest.fixture
def nodes(tmp_path):
    with Lives(provisioned(tmp_path), NAMES) as lives:
        yield lives


def events(nodes: Lives, name: str, what: str) -> list[dict]:
    return [event for event in nodes.log_of(name) if what in event["what"]]


# A damaged disk


@pytest.mark.parametrize("which", ["last", "before the last"])
def test_node_whose_journal_has_a_flipped_bit_gets_what_it_lost_from_its_neighbours(
    nodes, tmp_path, undisturbed, which
):
    damaged: list[Path] = []
    lost: list[int] = []

    def flip(name: str) -> None:
        """Flips bits in a segment, so that received messages are lost. With the newest checkpoint gone, both segments
        are needed."""
        folder = nodes.newest_checkpoint(name).parent
        segments = sorted(path for path in folder.glob("journal-*.log") if path.stat().st_size)
        if which != "last":
            nodes.newest_checkpoint(name).unlink()
        path = segments[-1 if which == "last" else -2]
        content = bytearray(path.read_bytes())
        for k in range(1, 6):  # not in the first half, where the model is that all start from
            content[(7 + k) * len(content) // 14] ^= 16
        path.write_bytes(content)
        damaged.append(path)
        copy = Journal(shutil.copytree(folder, tmp_path / "copy"))
        copy.close()
        received = [step for _, step in copy._received]
        lost.extend(
            s for s in range(min(received), max(received)) if not all((at, s) in copy._received for at in (0, 2))
        )

    nodes.while_down = flip
    nodes.start_all()
    nodes.wait(lambda: nodes.step("beta") >= 45, 60)
    nodes.kill("beta", pause=0.5)
    nodes.wait(lambda: events(nodes, "beta", "damaged"), 60)
    (said,) = events(nodes, "beta", "damaged")
    assert said["file"] == damaged[0].name
    assert (damaged[0].parent / said["kept_as"]).exists()  # until the run has ended
    nodes.finish(60)
    assert lost
    assert nodes.results() == undisturbed
    assert said["lost_bytes"] > 0


def test_node_that_lost_its_state_waits_and_says_what_to_do(nodes):

    def forget(name: str) -> None:
        shutil.rmtree(nodes.newest_checkpoint(name).parent)

    nodes.while_down = forget
    nodes.start_all()
    nodes.wait(lambda: nodes.step("beta") >= 54, 60)
    nodes.kill("beta", pause=1.5)
    nodes.wait(lambda: any("older" in said["reason"] for said in events(nodes, "beta", "a claim")), 30)
    said = events(nodes, "beta", "a claim")[-1]
    assert missing_from(said["reason"], "begins again", "backup", "fairmesh mesh restore") == []
    assert not nodes.exits


# A member that announces without end


def _flood(nodes: Lives, name: str) -> None:
    """Makes the node of a site send announcements, as fast as its neighbours take them, next to its messages. They are
    signed by its own key, beforehand, so that the flood costs the node itself little."""
    home = nodes.folder / name
    key = (home / f"{name}.key").read_bytes()
    numbers = itertools.count(int(1000 * time.time()) + 10_000_000)
    body = {"round": 1, "rounds_sent": 1, "activity": "x" * 100, "metric": None, "metric_round": None, "weight": 0.5}
    body |= {"waiting_for": {}, "bytes_out": 0, "wire_out": 0, "time": 1.5, "again_s": 15}

    def announcement() -> dict:
        one = Announcement(name, "status", next(numbers), body, b"")
        return one._replace(signature=signature(key, one.text())).table()

    texts = [frames.news(json.dumps([announcement() for _ in range(100)]).encode()) for _ in range(80)]
    honest = Links._writing

    async def writing(self, neighbour, stream, connection) -> None:
        async def flood() -> None:
            for text in itertools.cycle(texts):
                await connection.send(text)
                await asyncio.sleep(0)

        flooding = asyncio.create_task(flood())
        try:
            await honest(self, neighbour, stream, connection)
        finally:
            flooding.cancel()

    Links._writing = writing  # type: ignore[method-assign]


def rounds_per_second(folder: Path, attack: Callable[[Lives, str], None] | None, seconds: float = 8) -> dict:
    with Lives(provisioned(folder, 100_000), NAMES) as nodes:
        nodes.before_start = lambda name: attack(nodes, name) if attack and name == "beta" else None
        nodes.start_all()
        nodes.wait(lambda: min(map(nodes.step, NAMES)) >= 5, 60)
        before, began = nodes.step("alpha"), time.monotonic()
        nodes.wait(lambda: time.monotonic() - began > seconds, 2 * seconds)
        pace = (nodes.step("alpha") - before) / seconds
        memory = _memory_kib(nodes._processes["alpha"])
        said = [event["site"] for event in events(nodes, "alpha", "announcements dropped")]
        return {"rounds_per_second": pace, "memory_kib": memory, "dropped": said}


def _memory_kib(process: int) -> int:
    (line,) = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])


def test_member_that_announces_without_end_is_named_and_does_not_stop_the_others(tmp_path):
    calm, flooded = rounds_per_second(tmp_path / "calm", None), rounds_per_second(tmp_path / "flooded", _flood)
    print(f"\n{calm=}\n{flooded=}")
    assert set(flooded["dropped"]) == {"beta"}
    assert flooded["rounds_per_second"] > 0.1 * calm["rounds_per_second"]
    assert flooded["memory_kib"] < calm["memory_kib"] + (64 << 10)


# Peers that stay, and a neighbour whose disk hangs


def test_peer_that_is_refused_or_never_greets_is_disconnected_and_one_that_was_voted_out_is_named(nodes):
    folder = nodes.folder
    address = Mesh.read(folder / "gamma" / "mesh.toml").member("gamma").address or ""

    def hurry(name: str) -> None:
        links._GREETING_S = 2.0

    def stays(credentials: Path, name: str, said: bytes) -> float:
        """Says something, then only heartbeats, and reads nothing; returns after how many seconds it is cut off."""
        context = ssl.create_default_context(cafile=credentials / "authority.pem")
        context.load_cert_chain(credentials / f"{name}.pem", credentials / f"{name}.key")
        began = time.monotonic()
        plain = socket.create_connection(host_and_port(address, "it"), timeout=5)
        with context.wrap_socket(plain, server_hostname="gamma") as secured:
            secured.sendall(said)
            with suppress(OSError):
                while time.monotonic() - began < 20:
                    time.sleep(0.2)
                    secured.sendall(b"\xff" * 4)
        return time.monotonic() - began

    hello = frames.hello(hello_of(folder / "beta", agreed={"rounds": 7}))
    nodes.before_start = hurry
    removal = {"generation": 1, "sites": ["alpha"], "round": None, "restored": [], "votes": {}, "commits": {}}
    (folder / "gamma" / "state").mkdir(mode=0o700)
    decided = {"decisions": [removal], "begun": [[2, 0, 0, 0]]}
    write_record(folder / "gamma" / "state" / "decisions.json", decided)
    nodes.start("gamma")
    nodes.wait(lambda: (folder / "gamma" / "state" / "status.json").exists(), 30)
    opened = Path(f"/proc/{nodes._processes['gamma']}/fd")
    files = len(list(opened.iterdir()))
    assert stays(folder / "beta", "beta", struct.pack("<I", len(hello)) + hello) < 5  # another experiment
    assert 1.5 < stays(folder / "beta", "beta", b"") < 5
    assert stays(folder / "alpha", "alpha", b"") < 5
    nodes.wait(lambda: len(list(opened.iterdir())) <= files, 10)
    said = [(event["site"], event["reason"]) for event in events(nodes, "gamma", "refused")]
    assert [site for site, _ in said] == ["beta", "beta", "alpha"]
    for (_, reason), words in zip(said, ("rounds", "no greeting", "left the mesh")):
        assert words in reason


def test_neighbour_whose_disk_hangs_is_named_by_all_who_wait_and_counts_for_patience(tmp_path):
    names = [*NAMES, "delta"]  # a ring, in which delta is no neighbour of beta
    text = EXPERIMENT.replace("nodes = 3", "nodes = 4").replace("rounds = 60", "rounds = 100000")
    (tmp_path / "experiment.toml").write_text(text.replace("checkpoint_every = 25", "checkpoint_every = 100000"))
    folder = tmp_path / "mesh"
    fleet.provisioned(folder, tmp_path / "experiment.toml", names)

    def hanging() -> None:
        sync, calls = os.fdatasync, itertools.count()
        os.fdatasync = lambda number: time.sleep(1000) if next(calls) > 20 else sync(number)
        from fairmesh.mesh.node.running import run_node

        run_node(folder / "beta" / fleet.SITE)

    def status(name: str) -> dict:
        return json.loads((folder / name / "state" / "status.json").read_text())

    processes = {name: fleet.start(folder, name) for name in ("gamma", "delta")}
    processes["alpha"] = fleet.start(folder, "alpha", patience_s=8)
    processes["beta"] = fleet.forked(hanging, folder / "beta.log")
    try:
        assert fleet.ended(processes.pop("alpha"), 60) == 1
        assert re.search("Interrupted: waited .* for beta, longer", (folder / "alpha.log").read_text())
        nodes = Lives(folder, names)
        assert "beta" in {event["site"] for event in events(nodes, "gamma", "waiting")}
        assert events(nodes, "beta", "disk does not answer")
        assert status("delta")["sites"]["beta"]["activity"] == "waiting for its disk"
        assert status("delta")["sites"]["gamma"]["waiting_for"].keys() == {"beta"}
        assert "beta" in status("delta")["waiting_chain"]
    finally:
        for process in processes.values():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


# Keys


def test_site_that_comes_back_with_another_key_waits_until_the_others_confirm_it(nodes, tmp_path, undisturbed):
    home, kept = nodes.folder / "beta", tmp_path / "stolen"

    def new_key(name: str) -> None:
        shutil.copytree(home, kept)
        (home / "beta.key").unlink()
        _, request = make_key(home, "beta")
        signed = sign(request.read_bytes(), nodes.folder / "mesh", Mesh.read(home / "mesh.toml"), 30)
        (home / "beta.pem").write_bytes(signed)

    def keys(name: str) -> dict:
        path = nodes.folder / name / "state" / "status.json"  # it is written after a second
        return json.loads(path.read_text())["keys"] if path.exists() else {}

    nodes.while_down = new_key
    nodes.start_all()
    nodes.wait(lambda: nodes.step("beta") >= 30, 60)
    nodes.kill("beta", pause=1.0)
    nodes.wait(lambda: all(keys(name).get("beta", {}).get("unconfirmed") for name in ("alpha", "gamma")), 30)
    stopped = nodes.step("alpha")
    shown = fingerprint((home / "beta.pem").read_bytes())
    assert {keys(name)["beta"]["unconfirmed"] for name in ("alpha", "gamma")} == {shown}
    assert len(events(nodes, "alpha", "must be confirmed")) == 1
    assert nodes.step("alpha") == stopped < 60
    trust(nodes.folder / "gamma" / "state", "beta", shown)
    nodes.wait(lambda: keys("gamma")["beta"] == {"fingerprint": shown, "unconfirmed": None}, 60)
    address = Mesh.read(home / "mesh.toml").member("gamma").address or ""
    told = spoken(kept, "beta", address, "gamma", lambda due: [frames.hello(hello_of(home, due=due))])["told"]
    assert ["was replaced" in reason for reason in told] == [True]
    assert nodes.step("alpha") <= stopped + 1  # it waits for its own operator
    trust(nodes.folder / "alpha" / "state", "beta", shown)
    nodes.finish(60)
    assert nodes.results() == undisturbed


# Age


def test_run_that_began_with_one_version_ends_with_another(nodes, undisturbed):
    """Sites upgrade one after the other, in the middle of the run; each says which versions differ."""
    version = dict.fromkeys(NAMES, fairmesh.__version__)

    def installed(name: str) -> None:
        fairmesh.__version__ = version[name]  # in the node's own process

    nodes.before_start = installed
    nodes.start_all()
    for k, name in enumerate(NAMES):
        nodes.wait(lambda k=k: min(map(nodes.step, NAMES)) >= 12 * (k + 1), 60)
        version[name] = "99.0"
        nodes.kill(name, pause=0.5)
        nodes.wait(lambda name=name: len(nodes.recoveries) > NAMES.index(name), 30)
    nodes.finish(60)
    assert nodes.results() == undisturbed
    said = {event["reason"] for name in NAMES for event in events(nodes, name, "versions differ")}
    assert any("99.0 there" in reason for reason in said)
    assert any("99.0 here" in reason for reason in said)
    ended = [json.loads((nodes.folder / name / "state" / "status.json").read_text()) for name in NAMES]
    assert {one["version"] for one in ended} == {"99.0"}


def test_version_with_another_compatibility_number_does_not_continue_a_run_and_leaves_its_state_alone(
    nodes, undisturbed
):
    number = dict.fromkeys(NAMES, greeting.COMPATIBILITY)

    def installed(name: str) -> None:
        greeting.COMPATIBILITY = number[name]

    nodes.before_start = installed
    nodes.start_all()
    nodes.wait(lambda: nodes.step("beta") >= 30, 60)
    number["beta"] += 1
    nodes.awaited.add("beta")
    nodes.kill("beta")
    nodes.wait(lambda: "beta" in nodes.exits, 30)
    (said,) = events(nodes, "beta", "stopped")
    here, there = number["beta"], number["alpha"]
    assert f"compatibility number of fairmesh is {here} here but {there} there" in said["reason"]
    number["beta"] -= 1
    nodes.start_again("beta")
    nodes.finish(60)
    assert nodes.results() == undisturbed
