"""Connections that are made of calls: each frame arrives once, in order, whatever happens to the calls."""

import asyncio
import hashlib
import json
import threading
import time
from contextlib import asynccontextmanager

import pytest

from fairmesh.mesh.wire.connections import CannotConnect, ConnectionLost
from fairmesh.mesh.wire.frames import Kind, Refused, message
from fairmesh.nvflare import calls
from fairmesh.nvflare.calls import CallCarrier, CallConnection, CallFailed, Stopped, frames_of, head_of, unpacked
from fairmesh.nvflare.seals import OPENS, Half
from tests.nvflare.standin import until
from tests.refusals import refused

LARGEST = 1 << 20


class Name:
    """The identity of a site, whose signature is a digest of its name and the data."""

    def __init__(self, name: str):
        self.name = name

    def certificate_of(self, site: str) -> bytes:
        return b""

    def signed(self, data: bytes) -> bytes:
        return hashlib.sha256(self.name.encode() + data).digest()

    def signed_by(self, site: str, data: bytes, signature: bytes) -> bool:
        return Name(site).signed(data) == signature


class Pair:
    """Two sites; `a` dials `b`. A test says what happens to calls by replacing `call`."""

    def __init__(self):
        self.sites = {name: CallCarrier("run", name, self._caller(name), Name(name)) for name in "ab"}
        self.call = self.pass_on
        self.there: list = []  # connections that b serves
        self.leave = asyncio.Event()

    def _caller(self, caller: str):
        return lambda site, what, seconds: self.call(caller, site, what)

    def pass_on(self, caller: str, site: str, what: bytes) -> bytes:
        return self.sites[site].arrived(caller, what)

    async def answer(self, connection) -> None:
        self.there.append(connection)
        await self.leave.wait()

    @asynccontextmanager
    async def connected(self):
        async with self.opened(), self.sites["a"].dialled("", "b") as here:
            yield here, self.there[0]

    @asynccontextmanager
    async def opened(self):
        for site in self.sites.values():
            await site.open(LARGEST, self.answer, lambda address, reason: None)
        try:
            yield
        finally:
            self.leave.set()
            for site in self.sites.values():
                await site.close()


def _run(test, seconds: float = 20.0):
    async def limited():
        async with asyncio.timeout(seconds):
            await test(Pair())

    asyncio.run(limited())


def test_first_call_of_the_answering_side_may_come_before_the_answer():
    async def test(pair):
        came = threading.Event()

        def call(caller, site, what):
            answer = pair.pass_on(caller, site, what)
            if caller == "a" and unpacked(what)[0]["number"] == -1:
                assert came.wait(5)  # the answer is on its way while the other side has sent
            elif caller == "b":
                came.set()
            return answer

        async def greet(connection):
            await connection.send(b"\x05")
            await pair.leave.wait()

        pair.call, pair.answer = call, greet
        async with pair.opened(), pair.sites["a"].dialled("", "b") as here:
            assert await here.receive() == b"\x05"

    _run(test)


def test_frames_arrive_once_and_in_order_over_calls_that_are_repeated_late_and_unanswered():
    async def test(pair):
        old, count = [], 0

        def call(caller, site, what):
            nonlocal count
            count += 1
            old.append((caller, site, what))
            if count % 3 == 0:
                pair.pass_on(caller, site, what)
            if count % 4 == 0:
                pair.pass_on(*old[-4])
            answer = pair.pass_on(caller, site, what)
            if count % 5 == 0:
                raise CallFailed("the answer was lost")
            return answer

        async with pair.connected() as (here, there):
            pair.call = call
            for k in range(20):
                await here.send(message(k, 0, b"x"), message(k, 1, b"y"))
            got = [await there.receive() for _ in range(40)]
            assert got == [message(k, half, b"xy"[half : half + 1]) for k in range(20) for half in (0, 1)]
            assert there._arrived.empty()

    _run(test)


def test_side_that_does_not_read_has_few_bytes_waiting_and_gets_all_of_them_later(monkeypatch):
    monkeypatch.setattr(calls, "_ROOM_S", 0.01)

    async def test(pair):
        async with pair.connected() as (here, there):
            big = message(0, 0, bytes(LARGEST))
            sending = asyncio.create_task(here.send(big)), asyncio.create_task(_several(here, big, 9))
            await asyncio.sleep(0.3)
            assert there._waiting_bytes <= max(calls._BYTES, len(big))
            assert [await there.receive() for _ in range(10)] == [big] * 10
            await asyncio.gather(*sending)

    _run(test)


async def _several(connection, frame, count):
    for _ in range(count):
        await connection.send(frame)


def test_end_of_one_side_is_seen_at_the_other_and_after_it_nothing_is_taken():
    async def test(pair):
        async with pair.connected() as (here, there):
            await there.send(b"\x05")
            pair.leave.set()  # the answering side ends
            assert [await here.receive(), await here.receive()] == [b"\x05", None]
            with pytest.raises(ConnectionLost):
                await here.send(b"\x05")
        assert [site._connections for site in pair.sites.values()] == [{}, {}]

    _run(test)


def test_connection_whose_other_side_is_silent_or_cannot_be_called_is_lost(monkeypatch):
    monkeypatch.setattr(calls, "_SILENCE_S", 0.2)
    monkeypatch.setattr(calls, "_GIVE_UP_S", 0.2)

    def fail(*_):
        raise CallFailed("no route")

    async def test(pair):
        async with pair.connected() as (here, _):
            pair.call = fail
            with pytest.raises(ConnectionLost, match="no call of it"):
                await here.receive()
            with pytest.raises(ConnectionLost, match="no route"):
                await here.send(b"\x05")
            with pytest.raises(CannotConnect, match="no route"):
                await pair.sites["a"].dialled("", "b").__aenter__()

            def stopped(*_):
                raise Stopped("NVFlare has ended the job")

            pair.call = stopped
            began = time.monotonic()
            with pytest.raises(ConnectionLost, match="ended the job"):
                await here.send(b"\x05")
            assert time.monotonic() - began < 1

    _run(test)


def test_call_that_waits_for_room_is_answered_when_the_site_closes():
    pair = None

    async def test(made):
        nonlocal pair
        pair = made
        async with pair.connected() as (here, there):
            for _ in range(calls._FRAMES):
                await here.send(b"\x05")
            envelope = here.packed({"number": here._sent}, b"")
            threading.Thread(target=lambda: answers.append(pair.pass_on("a", "b", envelope)), daemon=True).start()
            await asyncio.sleep(0.1)
            assert there._arrived.qsize() == calls._FRAMES

    answers: list[bytes] = []
    _run(test)
    until(lambda: answers, 2)
    assert json.loads(answers[0]).keys() & {"gone", "again"}


def _opening(signer: str, half: Half) -> bytes:
    head = head_of(**{"run": "run", "from": "a", "to": "b", "dialled": half.public, "answered": "", "number": -1})
    return head + Name(signer).signed(OPENS + head)


def test_relay_can_neither_open_a_connection_nor_answer_or_call_on_one_in_a_sites_name():
    async def test(pair):
        async with pair.opened():
            b = pair.sites["b"]
            forged = _opening("relay", Half())
            assert "has not signed" in json.loads(await asyncio.to_thread(b.arrived, "a", forged))["gone"]
            assert not b._connections
            pair.call = lambda *_: json.dumps({"answered": Half().public, "signature": Name("relay").name}).encode()
            with pytest.raises(CannotConnect, match="has not signed"):
                await pair.sites["a"].dialled("", "b").__aenter__()

    _run(test)


def test_call_that_a_relay_makes_changes_or_splices_on_an_open_connection_is_refused():
    async def test(pair):
        async with pair.connected() as (here, there):
            relay = CallConnection(pair.sites["a"], "b", here.dialled)  # it has seen both public keys
            relay.agree(here.answered, Half().agreed(here.answered, b"", dialled=True))
            whole, next_one = here.packed({"number": 0}, b""), here.packed({"number": 1}, b"")
            changed, spliced = bytearray(whole), unpacked(next_one)[1] + unpacked(whole)[2]
            changed[-1] ^= 1
            end = relay.packed({"number": 0, "end": True}, b"")
            for bad in (relay.packed({"number": 0}, b""), bytes(changed), spliced, end):
                answer = json.loads(await asyncio.to_thread(pair.sites["b"].arrived, "a", bad))
                assert "not sealed by its sender" in answer["gone"]
            assert (there.ended, there._taken, there._arrived.empty()) == (False, 0, True)
            assert json.loads(await asyncio.to_thread(pair.sites["b"].arrived, "a", whole)) == {"taken": 0}

    _run(test)


def test_peer_cannot_open_connections_without_end_or_keep_a_site_calling_without_pause():
    async def test(pair):
        async with pair.opened():
            b = pair.sites["b"]
            openings = [_opening("a", Half()) for _ in range(3 * calls._OPEN)]
            answers = [json.loads(await asyncio.to_thread(b.arrived, "a", opening)) for opening in openings]
            assert sum("answered" in answer for answer in answers) == len(b._connections) == calls._OPEN
            assert all("gone" in answer for answer in answers[calls._OPEN :])

            asked = []
            pair.call = lambda *_: asked.append(1) or b'{"again": true}'
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.55):
                    await pair.sites["a"].called("b", b"")
            assert len(asked) <= 6

    _run(test)


def test_body_that_is_cut_short_too_long_or_of_too_many_frames_is_refused():
    frame = message(0, 0, b"x")
    whole = len(frame).to_bytes(4, "little") + frame
    assert frames_of(whole * 2, 10) == [frame, frame]
    for body, told in ((whole[:-1], "cut short"), (whole + b"\x01", "cut short")):
        with refused(told, error=Refused):
            frames_of(body, 10)
    with refused("without a byte", error=Refused):
        frames_of(whole + bytes(4), 10)
    for kind, length in ((Kind.FINISHED, 2), (Kind.MESSAGE, 10 + (1 << 20) + 1)):
        body = length.to_bytes(4, "little") + bytes([kind]) * length
        with refused("at most", error=Refused):
            frames_of(body, 10)
    with refused("in one call", error=Refused):
        frames_of(whole * ((1 << 20) // len(whole) + 1), 10)
