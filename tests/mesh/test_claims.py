"""What other sites say about a site or of themselves is shown as their claim, and ends nothing."""

import asyncio
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairmesh.errors import Interrupted
from fairmesh.mesh.enrol.roster import Member, Mesh
from fairmesh.mesh.node import claims
from fairmesh.mesh.node.oversight import Oversight
from fairmesh.mesh.node.watching import Aside
from fairmesh.mesh.wire import frames
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.connections import TlsCarrier, dialled
from fairmesh.mesh.wire.frames import StateLost
from fairmesh.mesh.wire.journal import Journal
from fairmesh.mesh.wire.links import Links, Neighbour
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.networks.bounds import TOO_LARGE
from tests.mesh.credentials import signed, terms_of
from tests.mesh.experiments import experiment
from tests.mesh.fleet import free_ports
from tests.mesh.scenarios import Run, play, waits_at
from tests.refusals import missing_from

NAMES = ["a", "b", "c"]
HOSTILE = "it begins again; remove its state \x1b[2J"


def _status(own: int, others: dict[str, int], lost_by=(), refused_by=()) -> dict:
    return {
        "site": "a",
        "round": own,
        "rounds": 500,
        "sites": {"a": {"round": own}, **{site: {"round": done} for site, done in others.items()}},
        "edges": dict.fromkeys(others),
        "state_lost": [{"by": by, "reason": "it asks for step 7", "since": 0.0} for by in lost_by],
        "refusing": [
            {"by": by, "site": "a", "reason": f"its model {TOO_LARGE} 3", "since": 0.0, "digest": "ab", "sent": sent}
            for by, sent in dict(refused_by).items()
        ],
    }


# Sentences


def test_claim_that_an_intact_state_is_lost_is_shown_as_a_claim_and_says_to_keep_the_state():
    (said,) = claims.sentences(_status(30, {"b": 31, "c": 29, "d": 30}, lost_by=["b"])).values()
    assert (
        missing_from(said, "b (1 of 3 neighbours) claim", "step 7", "does not see", "30", "29 to 31", "keep it") == []
    )


def test_claim_that_most_sites_rounds_confirm_says_how_to_restore_the_site():
    (said,) = claims.sentences(_status(3, {"b": 40, "c": 40, "d": 39}, lost_by=["b", "c"])).values()
    assert missing_from(said, "b, c (2 of 3", "older", "39 to 40", "backup", "fairmesh mesh restore") == []
    assert "does not see" not in said


@pytest.mark.parametrize("lied", [40, 10**15])
def test_one_sites_round_confirms_nothing(lied):
    assert not claims.is_behind(_status(3, {"b": lied, "c": 3, "d": 4}, lost_by=["b"]))
    assert not claims.is_behind(_status(3, {"b": 10**15, "c": 10**15}))  # the run has not so many rounds


def test_site_whose_numbers_are_refused_hears_who_says_so_and_what_its_node_sees():
    (said,) = claims.sentences(_status(30, {"b": 30, "c": 30}, refused_by={"b": True, "c": True})).values()
    assert missing_from(said, "b, c (2 of 2 neighbours) claim: they refuse", TOO_LARGE, "nothing wrong", "units") == []
    status = _status(30, {"b": 30, "c": 30, "d": 30}, refused_by={"b": True, "c": False, "d": None})
    confirmed, denied = claims.sentences(status).values()
    assert missing_from(confirmed, "b (1 of 3 neighbours)", "has sent that message", "units") == []
    assert missing_from(denied, "c, d (2 of 3", "no message that this site has sent", "Ask c, d") == []
    assert claims.sentences(_status(30, {"b": 30})) == {}


def test_site_that_says_that_it_has_diverged_is_named_with_what_to_do():
    claim = {"by": "b", "generation": 1, "since": 6, "round": 7, "what": "an exploded model", "kept": [0, 3]}
    parts = ("b says", "rounds 6 and 7", '"an exploded model"', "ends no other", "units", "mesh remove", "mesh rewind",
             "kept here: 0, 3", "need not be started again")  # fmt: skip
    assert missing_from(claims.diverged(claim), *parts) == []


def test_claim_about_messages_of_another_site_is_shown_as_what_its_author_says():
    """Also if two say so: nobody else can know what they got. What a node finds itself is a fact there."""
    found = {"site": "d", "since": 5, "round": 10, "signed": "aa", "other": "bb", "both": False, "kept": [0, 5]}
    here = {"signed_here": "aa", "agrees_here": True}
    said = claims.contradicted(found | {"by": "b"} | here, "c")
    assert missing_from(said, "b says that d sent it", "rounds 5 and 10", "this site got what d", "ask both") == []
    said = claims.contradicted(found | {"by": "b"} | {"signed_here": "cc", "agrees_here": False}, "c")
    assert missing_from(said, "b says that d", "b quotes another hash", "one of them lies") == []
    said = claims.contradicted(found | {"by": "b", "both": True} | {"signed_here": "bb", "agrees_here": True}, "c")
    assert missing_from(said, "b says that d has signed two", "ask both") == []
    assert "quotes another" not in said, "d may have told this site the other one, and b is honest"
    said = claims.contradicted(found | {"by": "b"} | here, "d")
    assert missing_from(said, "b says that d sent it", "sends all neighbours the same", "ask b") == []
    assert "ask both" not in said
    said = claims.contradicted(found | {"by": "c"}, "c")
    assert missing_from(said, "d has sent this site other", "mesh remove", "mesh rewind", "kept here: 0, 5") == []
    said = claims.contradicted(found | {"by": "c", "both": True}, "c")
    assert missing_from(said, "d has signed two", claims.CONTRADICTIONS, "prove it to everybody") == []


def test_refusal_that_names_no_message_or_one_that_was_not_sent_points_to_the_site_that_refuses():
    claim = {"by": "b", "site": "a", "digest": "ab"}
    said = [claims.refused(claim | {"sent": sent}) for sent in (True, False, None)]
    assert said == ["a has sent it", "a denies it: ask b too", "a has not said"]
    said = claims.refused(claim | {"sent": True, "taken_here": True})
    assert missing_from(said, "a has sent it", "this site has taken the same message", "ask b") == []
    assert claims.refused(claim | {"digest": None, "sent": None}) == "names no message: ask b"


# One node


def _overseer(bulletin: Bulletin, folder: Path, logged: list) -> SimpleNamespace:
    """The parts of a's watch that hear of divergences. It can neither stop nor interrupt anything."""
    mesh = SimpleNamespace(generation=1, present=[SimpleNamespace(name=name) for name in NAMES])

    def report(level: str, what: str, **fields) -> None:
        logged.append((level, what, fields["site"], fields["reason"]))

    node = SimpleNamespace(
        _membership=SimpleNamespace(name="a", mesh=mesh, experiment=SimpleNamespace(rounds=40)),
        _bulletin=bulletin,
        _folder=folder,
        _node=SimpleNamespace(aside=Aside(report)),
        _round=7,
    )
    node._diverged = lambda: Oversight._diverged(node)
    return node


def test_site_that_says_again_and_again_that_it_has_diverged_is_logged_once_and_interrupts_nothing(tmp_path):
    said = {"generation": 1, "since": 6, "round": 7, "what": "numbers"}
    board, logged = SimpleNamespace(ages=lambda kind: {}), []
    board.of_all = lambda kind: {"b": dict(said)} if kind == "diverged" else {}
    node = _overseer(board, tmp_path, logged)
    for round in (7, 8, 9):
        said["round"] = round
        Oversight._notice_divergence(node)
    ((level, what, site, reason),) = logged
    assert (level, what, site) == ("warning", "a site says that it has diverged", "b")
    assert missing_from(reason, "b says", "numbers", "kept here: none") == []
    assert [one["by"] for one in node._diverged()] == ["b"]
    node._round = 9 + len(NAMES)  # so far it could not be without b
    assert node._diverged() == []
    node._round, said["generation"] = 7, 2
    assert node._diverged() == []


def test_neighbours_who_refuse_a_sites_numbers_do_not_make_its_node_end_or_diverge():
    """Also not if all of them say that the numbers are too large."""
    logged, interrupted = [], []
    waits = SimpleNamespace(seconds=60.0)
    node = SimpleNamespace(
        _notices={1: waits, 2: waits},
        _node=SimpleNamespace(aside=Aside(lambda level, what, **fields: logged.append((level, what)))),
        status=lambda: _status(30, {"b": 30, "c": 30}, refused_by={"b": None, "c": None}),
        _interrupt=interrupted.append,
        _end=interrupted.append,
    )
    for _ in range(3):
        Oversight._notice_claims(node)
    assert (logged, interrupted) == ([("warning", "a claim about this site")], [])


@pytest.fixture
def door(tmp_path):
    """The streams of beta, whose neighbour alpha dials it: how alpha speaks to it, and beta's mailroom."""
    sites = signed(tmp_path, ("alpha", "beta"))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    mesh = Mesh("test", (Member("alpha", "", ("beta",)), Member("beta", address, ("alpha",))))
    texts = sites["beta"]
    bulletin = Bulletin("beta", texts, terms_of(mesh.names))
    mailroom = Mailroom([0], journal := Journal(tmp_path / "journal"), 0, lambda point, step: None)
    mailroom.rounds = range(100)
    logged = []
    here = Links(
        [Neighbour("alpha", 0, "")], texts, TlsCarrier(texts, address), mailroom, bulletin, lambda: {"site": "beta"},
        lambda name, table: True, lambda level, what, **fields: logged.append((level, fields.get("reason", ""))), 1000,
        lambda point, step: None,
    )  # fmt: skip
    here.start()

    def spoken(*said: bytes, until=lambda: True, holds=(0, 0), greets=True) -> list[int]:
        """Says something as alpha after a greeting; returns the kinds of frames that came."""

        async def speak() -> list[int]:
            came = []

            async def listen() -> None:
                while (frame := await connection.receive()) is not None:
                    came.append(frame[0])

            async with asyncio.timeout(10):
                async with dialled(address, "beta", sites["alpha"].for_dialling(), 1000) as connection:
                    listening = asyncio.create_task(listen())
                    hello = [frames.hello({"site": "alpha", "holds": list(holds)})] if greets else []
                    for frame in (*hello, *said):
                        await connection.send(frame)
                    while not until():
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.05)
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
            return came

        return asyncio.run(speak())

    yield SimpleNamespace(spoken=spoken, mailroom=mailroom, logged=logged)
    mailroom.stop(Interrupted("the test has ended"))
    here.stop()
    mailroom.close()
    journal.close()


def test_neighbour_that_says_that_a_site_has_lost_its_state_ends_nothing(door):
    lost, taken = frames.refused(StateLost(HOSTILE)), []
    waiting = threading.Thread(
        target=lambda: taken.append(door.mailroom.take(0, [0], lambda who, data: data)), daemon=True
    )
    waiting.start()
    door.spoken(lost, until=door.mailroom.state_lost, greets=False)
    door.spoken(lost, until=lambda: door.mailroom.state_lost()[0].times == 2)
    claim = door.mailroom.state_lost()[0]
    assert (claim.times, claim.reason.isprintable(), "begins again" in claim.reason) == (2, True, True)
    assert any("says that this site has lost its state" in reason for _, reason in door.logged)
    assert {level for level, _ in door.logged} <= {"info", "warning"}
    assert waiting.is_alive()
    door.spoken(frames.message(0, 0, b"sound"), until=lambda: not waiting.is_alive())  # it changes its mind
    assert taken == [{0: b"sound"}]
    assert not door.mailroom.state_lost()


def test_neighbour_that_has_lost_its_state_is_told_so_and_still_gets_announcements(door):
    """So that its operator sees how far the others are, and which votes there are."""
    mailroom = door.mailroom
    for step in range(3):
        mailroom.post(step, {0: b"x"})
    sent = [frames.message(step, 0, b"y") for step in range(2)]
    door.spoken(*sent, until=lambda: mailroom.progress(0).due == 2)
    for step in range(2):
        mailroom.take(step, [0], lambda who, data: data)
    door.spoken(holds=(3, 3), until=lambda: mailroom.progress(0).durable == 2)
    mailroom.rotate(3)
    came = door.spoken()
    assert frames.Kind.STATE_LOST in came
    assert frames.Kind.NEWS in came[came.index(frames.Kind.STATE_LOST) :]
    assert frames.Kind.MESSAGE not in came


# Real nodes


def _slandering() -> None:
    """From round 8 on, b says to its neighbours that they have lost their state, once per second, and sends nothing."""
    writing = Links._writing

    async def slander(self, neighbour, stream, connection) -> None:
        if self.mailroom.progress(neighbour.position).due > 8:
            while True:
                await connection.send(frames.refused(StateLost(HOSTILE)))
                await asyncio.sleep(1)
        said = asyncio.create_task(writing(self, neighbour, stream, connection))
        while self.mailroom.progress(neighbour.position).due <= 8 and not said.done():
            await asyncio.sleep(0.01)
        said.cancel()
        await slander(self, neighbour, stream, connection)

    Links._writing = slander


def _refusing_all() -> None:
    """A node announces that it refuses the numbers of all others, and sends nothing from round 8 on."""
    said = {"reason": f"message of step 9: its model {TOO_LARGE} 1e9", "since": time.time(), "step": 9}
    said |= {"digest": "ab" * 32}

    def announce(self) -> None:
        if self._round >= 4:
            others = [name for name in NAMES if name != self._membership.name]
            self._bulletin.announce("refusing", {"sites": dict.fromkeys(others, said)})

    Oversight._announce_refusals = announce
    outgoing = Mailroom.outgoing
    Mailroom.outgoing = lambda self, at, stream, ack: (
        [] if self.progress(at).due > 8 else outgoing(self, at, stream, ack)
    )


def _no_node_has_ended(run: Run, *names: str) -> None:
    for name in names:
        assert os.waitpid(run.running[name], os.WNOHANG) == (0, 0), run.logs()
        assert not run.events(name, "stopped")
        assert not run.events(name, "diverged")
        assert all(event["level"] != "error" for event in run.every_event(name))


def a_member_that_says_that_all_have_lost_their_state(run: Run) -> None:
    run.start("a", "c")
    run.start("b", before=_slandering)
    run.until(lambda: run.events("a", "a claim about this site") and run.events("c", "a claim about this site"))
    time.sleep(3)
    _no_node_has_ended(run, "a", "c")
    for name in "ac":
        (said,) = run.events(name, "a claim about this site")
        assert missing_from(said["reason"], "b (1 of 2 neighbours) claim", "does not see", "keep") == []
        assert [claim["by"] for claim in run.status(name)["state_lost"]] == ["b"]
    run.vote("a", "c", out=["b"])
    run.end("a", "c")


def two_members_who_refuse_a_sites_numbers(run: Run) -> None:
    run.start("a")
    run.start("b", "c", before=_refusing_all)
    both = "b, c (2 of 2 neighbours) claim: they refuse"
    run.until(lambda: any(both in said["reason"] for said in run.events("a", "a claim about this site")))
    time.sleep(10)
    _no_node_has_ended(run, *NAMES)
    said = run.events("a", "a claim about this site")[-1]
    assert missing_from(said["reason"], both, "nothing wrong", "no message that this site has sent", "Ask b, c") == []
    denied = [one for one in run.status("a")["refusing"] if one["site"] == "a"]
    assert {(one["by"], one["sent"]) for one in denied} == {("b", False), ("c", False)}
    assert {claims.refused(one) for one in denied} == {"a denies it: ask b too", "a denies it: ask c too"}
    assert not run.status("a")["activity"].startswith("diverged")
    for name in "bc":
        run.crash(name)
    run.start("b", "c")  # honest ones
    run.end(*NAMES)


def _says_that_it_has_diverged() -> None:
    """A node announces in its tenth round that its numbers have diverged, and goes on as if nothing had happened."""
    said = []

    def announce(self) -> None:
        if self._round >= 10 and not said:
            said.append(self._round)
            body = {"generation": 1, "since": self._round, "round": self._round + 1, "what": "numbers that are none"}
            self._bulletin.announce("diverged", body)

    Oversight._announce_refusals = announce


def a_member_that_says_that_it_has_diverged_and_goes_on(run: Run) -> None:
    flag = run.folder / "go"
    what = "a site says that it has diverged"
    run.start("a", "c")
    run.start("b", before=_says_that_it_has_diverged, observe=waits_at(14, flag))
    run.until(lambda: run.events("a", what) and run.events("c", what))
    run.crash("c")
    run.start("c")  # which hears it from a and b
    run.until(lambda: len(run.events("c", what)) == 2 and run.events("a", "waiting"))
    _no_node_has_ended(run, *NAMES)
    for name in "ac":
        (said,) = run.status(name)["diverged"]
        assert missing_from(claims.diverged(said), "b says", "numbers that are none", "kept here: 0") == []
    flag.touch()
    run.end(*NAMES)
    assert [run.status(name)["diverged"] for name in "ac"] == [[], []]
    assert len(run.events("a", what)) == 1


def _slandering_one(whom: int, until: Path) -> None:
    """From round 8 on, b says to one neighbour that it has lost its state, until a file exists."""
    writing = Links._writing

    async def slander(self, neighbour, stream, connection) -> None:
        said = asyncio.create_task(writing(self, neighbour, stream, connection))
        while neighbour.position == whom and not until.exists() and not said.done():
            if self.mailroom.progress(whom).due > 8:
                said.cancel()
                await connection.send(frames.refused(StateLost(HOSTILE)))
                while not until.exists():
                    await asyncio.sleep(0.05)
                return  # and connects again
            await asyncio.sleep(0.01)
        await said

    Links._writing = slander


def a_member_that_says_to_one_neighbour_that_it_has_lost_its_state(run: Run) -> None:
    """a waits for b alone, and exchanges messages with c; when b takes its words back, all go on by themselves."""
    flag = run.folder / "go"
    run.start("a", "c")
    run.start("b", before=lambda: _slandering_one(0, flag))
    run.until(lambda: run.events("a", "a claim about this site"))
    seen = run.status("a")
    assert [claim["by"] for claim in seen["state_lost"]] == ["b"]
    assert (list(seen["waiting_for"]), seen["waiting_chain"]) == (["b"], ["a", "b"])
    assert seen["edges"]["c"]["connected"]
    assert seen["edges"]["c"]["messages_in"] >= seen["round"] + 1  # also of the round that it waits in
    assert not run.status("c")["state_lost"]
    _no_node_has_ended(run, *NAMES)
    flag.touch()
    run.end(*NAMES)
    assert run.status("a")["state_lost"] == []


def _withholding_from(whom: int, blames: str) -> None:
    """b sends one neighbour nothing from round 8 on, and says that it waits for another site."""
    outgoing, status, since = Mailroom.outgoing, Oversight.status, time.time()
    Mailroom.outgoing = lambda self, at, stream, ack: (
        [] if at == whom and self.progress(at).due > 8 else outgoing(self, at, stream, ack)
    )
    lie = {"round": 7, "rounds_sent": 0, "waiting_for": {blames: since}}
    Oversight.status = lambda self: status(self) | (lie if self._round >= 8 else {})


def a_member_that_withholds_and_says_that_it_waits_for_another(run: Run) -> None:
    run.start("a", "c")
    run.start("b", before=lambda: _withholding_from(0, "c"))
    run.until(lambda: all(run.status(name).get("paused_for") for name in "ac"))
    run.until(lambda: "b says that it waits for c, which says" in run.status("a")["unconfirmed_wait"])
    assert run.status("a")["waiting_chain"] == ["a", "b"]
    run.until(lambda: any("b says that it waits" in e.get("unconfirmed", "") for e in run.events("a", "waiting")))
    assert run.status("c")["paused_for"] == ["a", "b"]
    _no_node_has_ended(run, *NAMES)
    run.vote("a", "c", out=["b"])
    run.end("a", "c")


SCENARIOS = (
    a_member_that_says_to_one_neighbour_that_it_has_lost_its_state,
    a_member_that_withholds_and_says_that_it_waits_for_another,
    a_member_that_says_that_all_have_lost_their_state,
    two_members_who_refuse_a_sites_numbers,
    a_member_that_says_that_it_has_diverged_and_goes_on,
)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_claims_of_hostile_members_end_no_node(scenario, tmp_path):
    play(scenario, tmp_path, NAMES, experiment(40))
