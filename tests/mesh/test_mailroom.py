"""The mailroom delivers every message once and in its step, whatever the streams do."""

import hashlib
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairmesh.compression import DecodeError
from fairmesh.errors import FairmeshError, Interrupted
from fairmesh.mesh.wire.frames import Kind, Refused, StateLost, read_frame
from fairmesh.mesh.wire.journal import Journal
from fairmesh.mesh.wire.mailroom import Mailroom, Progress, Refusal
from tests.examples import THOROUGH
from tests.refusals import missing_from, refused


class Room(Mailroom):
    """A mailroom that opens and closes its own journal."""

    def __init__(self, folder, neighbours=(1,)):
        self.journal, self.folder, self.neighbours = Journal(folder), folder, neighbours
        super().__init__(list(neighbours), self.journal, 0, lambda point, step: None)
        self.largest = 1000

    def close(self):
        super().close()
        self.journal.close()

    def joined(self, durable=0, due=None, position=1):
        """Begins a stream to a neighbour that has so many messages; returns it."""
        stream = object()
        self.connected(position, stream, Progress(durable, durable if due is None else due))
        return stream

    def post_all(self, steps):
        for step in steps:
            self.post(step, {1: text("me", step)})

    def sent(self, steps, acknowledged):
        """Posts and sends messages, so many of which are durable there; returns the stream."""
        self.post_all(steps)
        stream = self.joined()
        frames_of(self, stream)
        self.acknowledged(1, stream, acknowledged)
        return stream

    def exchange(self, steps, stream, send=True):
        for step in steps:
            if send:
                self.post_all([step])
            self.arrived(1, stream, step, text("it", step))
            taken(self, step)


def text(who, step):
    return f"{who} in step {step}".encode()


def taken(mailroom, step, positions=(1,)):
    return mailroom.take(step, list(positions), lambda position, payload: payload)


def until(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def frames_of(mailroom, stream, with_ack=False):
    return [read_frame(data) for _, data in mailroom.outgoing(1, stream, with_ack)]


@pytest.fixture
def opened(tmp_path):
    """Opens the mailroom of a node, or opens it again after a restart."""
    rooms = []

    def open_(neighbours=(1,), flip=None):
        if rooms:
            rooms.pop().close()
        if flip is not None:  # a bit of the journal, at this share of its length
            (path,) = tmp_path.glob("journal-*.log")
            content = bytearray(path.read_bytes())
            content[int(flip * len(content)) + 25] ^= 4
            path.write_bytes(content)
        rooms.append(Room(tmp_path, neighbours))
        return rooms[-1]

    yield open_
    rooms.pop().close()


@pytest.fixture
def mailroom(opened):
    return opened()


def test_posted_messages_go_out_once_per_stream_until_they_are_durable_there(mailroom):
    mailroom.post(0, {1: b"zero"})
    first = mailroom.joined()
    mailroom.post(1, {1: b"one"})
    assert [(frame.step, frame.body) for frame in frames_of(mailroom, first)] == [(0, b"zero"), (1, b"one")]
    assert frames_of(mailroom, first) == []
    mailroom.acknowledged(1, first, 1)
    second = mailroom.joined(1)
    assert frames_of(mailroom, first) == []  # the stream it replaced says nothing any more
    assert [frame.step for frame in frames_of(mailroom, second)] == [1]
    mailroom.acknowledged(1, second, 2)
    assert mailroom.unacknowledged_by() == []


def test_neighbour_that_has_a_message_is_not_sent_it_again_though_it_is_not_durable_there(mailroom):
    mailroom.post(0, {1: b"zero"})
    mailroom.post(1, {1: b"one"})
    assert [frame.step for frame in frames_of(mailroom, mailroom.joined(0, 1))] == [1]
    assert sorted(mailroom.unsettled()) == [0, 1]


@pytest.mark.parametrize(("step", "reason"), [(0, "replayed"), (3, "future"), (2**40, "future")])
def test_replayed_or_future_step_is_refused(mailroom, step, reason):
    stream = mailroom.joined()
    mailroom.arrived(1, stream, 0, b"zero")
    assert taken(mailroom, 0) == {1: b"zero"}
    with refused(reason, f"step {step}", "step 1 ", error=Refused):
        mailroom.arrived(1, stream, step, b"other")


def test_neighbour_cannot_fill_the_memory(mailroom):
    stream = mailroom.joined()
    with refused(1001, 1000, error=Refused):
        mailroom.arrived(1, stream, 0, b"x" * 1001)
    assert [mailroom.arrived(1, stream, step, b"x") for step in range(3)] == [True, True, False]  # the third must wait
    taken(mailroom, 0)
    assert mailroom.arrived(1, stream, 2, b"x")


def test_stream_that_was_replaced_is_refused_without_harm_to_the_one_there_is(mailroom):
    closed = []
    mailroom.serve(lambda positions: None, lambda stream, reason: closed.append(stream))
    before, now = mailroom.joined(), mailroom.joined()
    mailroom.arrived(1, now, 0, b"zero")
    mailroom.refuse(1, "nonsense over the old stream", before)
    assert closed == []
    assert taken(mailroom, 0) == {1: b"zero"}
    mailroom.refuse(1, "nonsense over the new one", now)
    assert closed == [now]


def test_message_lost_here_by_a_power_cut_and_durable_there_is_not_kept_when_it_is_made_again(mailroom):
    mailroom.joined(5)
    mailroom.post_all(range(5))
    assert mailroom.unacknowledged_by() == []
    mailroom.post_all([5])
    assert mailroom.unacknowledged_by() == [1]


def test_restart_knows_that_a_neighbour_holds_everything(opened):
    first = opened()
    first.disconnected(1, first.sent([0], acknowledged=1))
    assert first.unacknowledged_by() == []  # and so noted, though it has gone
    assert opened().unacknowledged_by() == []


@pytest.mark.parametrize("fails", ["decode", "check"])
def test_messages_that_cannot_be_read_or_fail_a_check_are_refused_before_they_are_logged(mailroom, fails):
    closed, found = [], {}
    mailroom.serve(lambda positions: None, lambda stream, reason: closed.append((stream, reason)))

    def refuse(position, payload):
        if payload == b"bad":
            raise DecodeError("its model is huge")
        return payload

    def plain(position, payload):
        return payload

    reading = (refuse, plain) if fails == "decode" else (plain, refuse)
    waiting = threading.Thread(target=lambda: found.update(mailroom.take(0, [1], *reading)))
    waiting.start()
    bad = mailroom.joined()
    mailroom.arrived(1, bad, 0, b"bad")
    until(lambda: closed)
    ((stream, reason),) = closed
    assert stream is bad
    assert missing_from(reason, "step 0", "its model is huge") == []
    assert mailroom.progress(1) == Progress(0, 0)
    mailroom.arrived(1, mailroom.joined(), 0, b"good")
    waiting.join(5)
    assert found == {1: b"good"}


def test_message_accepted_before_is_not_checked_again(mailroom):
    def refuse(position, decoded):
        raise DecodeError("this version refuses everything")

    mailroom.arrived(1, mailroom.joined(), 0, b"fine")
    assert taken(mailroom, 0) == mailroom.take(0, [1], lambda position, payload: payload, refuse) == {1: b"fine"}
    digests = [hashlib.sha256(payload).hexdigest() for payload in (b"fine", b"other")]
    assert [mailroom.has_taken(1, 0, digest) for digest in digests] == [True, False]
    assert [mailroom.has_taken(1, 1, digests[0]), mailroom.has_taken(9, 0, digests[0])] == [None, None]


def test_mailroom_acknowledges_only_what_is_durable(mailroom):
    stream = mailroom.joined()
    mailroom.arrived(1, stream, 0, b"zero")
    assert [(frame.kind, frame.durable) for frame in frames_of(mailroom, stream, with_ack=True)] == [(Kind.ACK, 0)]
    assert mailroom.progress(1) == Progress(0, 1)  # here, but not yet durable
    taken(mailroom, 0)
    until(lambda: mailroom.progress(1) == Progress(1, 1))
    assert mailroom.outgoing(1, stream, False) == []
    assert mailroom.ack_due(1)
    (frame,) = frames_of(mailroom, stream, with_ack=True)
    assert (frame.kind, frame.durable) == (Kind.ACK, 1)


def test_restarted_node_finds_what_it_had_and_is_sent_what_it_missed(opened):
    before = opened()
    stream = before.joined()
    before.exchange(range(3), stream)
    before.arrived(1, stream, 3, b"in memory only")
    after = opened()
    assert after.progress(1) == Progress(3, 3)  # step 3 has to come again
    for step in range(3):
        after.post_all([step])
        assert taken(after, step) == {1: text("it", step)}
    stream = after.joined(1, 2)
    assert [frame.step for frame in frames_of(after, stream)] == [2]


def test_messages_that_come_while_it_catches_up_are_kept_in_order(opened):
    before = opened()
    before.exchange(range(3), before.joined(), send=False)
    after = opened()
    stream = after.joined()
    taken(after, 0)
    after.arrived(1, stream, 3, b"three")
    after.arrived(1, stream, 4, b"four")
    assert [taken(after, step)[1] for step in range(1, 5)] == [text("it", 1), text("it", 2), b"three", b"four"]


def test_message_that_differs_from_before_the_restart_is_an_error(opened):
    opened().post(0, {1: b"this"})
    with refused("step 0", error=FairmeshError):
        opened().post(0, {1: b"that"})


def test_message_stays_as_it_was_sent_whatever_is_computed_after_a_restart(opened):
    before = opened((1, 2))
    before.post(0, {1: b"this", 2: b"this"})
    before.post(1, {1: b"short"})
    after = opened((1, 2))
    assert after.as_sent(0, {1: b"that", 2: b"that"}) == {1: b"this", 2: b"this"}
    assert after.as_sent(1, {1: b"other", 2: b"other"}) == {1: b"short", 2: b"short"}  # lost for 2, not for 1
    assert after.as_sent(2, {1: b"that"}) == {1: b"that"}
    after.post(0, after.as_sent(0, {1: b"that", 2: b"that"}))


@pytest.mark.parametrize(("had", "alone"), [(4, False), (3, False), (None, True)])
def test_other_machine_computes_no_message_again_that_a_neighbour_has(mailroom, had, alone):
    mailroom.other_machine, mailroom.alone = "threads 1 before, 2 now", alone
    if had is not None:
        mailroom.joined(had)
        mailroom.joined(9)  # by then this node has sent new ones
    if had == 3:
        assert mailroom.as_sent(3, {1: b"new"}) == {1: b"new"}
        return
    with refused("step 3", "threads 1 before, 2 now", "vote", error=FairmeshError):
        mailroom.as_sent(3, {1: b"new"})


def test_steps_that_a_neighbour_had_acknowledged_and_lost_come_again_from_the_journal(mailroom):
    mailroom.sent(range(5), acknowledged=5)
    assert mailroom.unacknowledged_by() == []
    again = mailroom.joined(2)
    assert mailroom.unacknowledged_by() == [1]
    assert [(f.step, f.body) for f in frames_of(mailroom, again)] == [(step, text("me", step)) for step in (2, 3, 4)]
    mailroom.acknowledged(1, again, 4)
    assert mailroom.unacknowledged_by() == [1]
    mailroom.acknowledged(1, again, 5)
    assert mailroom.unacknowledged_by() == []


def test_neighbour_that_lost_everything_is_refused_since_it_may_be_another_now(mailroom):
    stream = mailroom.joined()
    mailroom.exchange(range(2), stream)
    until(lambda: mailroom.progress(1) == Progress(2, 2))
    stream = mailroom.joined()  # a power cut lost what it had not acknowledged
    frames_of(mailroom, stream)
    mailroom.acknowledged(1, stream, 1)
    with refused("begins again", "backup", "vote", error=Refused):
        mailroom.joined()


def test_neighbour_that_asks_for_what_is_no_longer_kept_is_told_what_is_lost_and_what_to_do(mailroom):
    mailroom.sent(range(4), acknowledged=4)
    mailroom.rotate(4)
    mailroom.post_all([4])
    with refused("step 2", "acknowledged", "backup", "mesh restore", "vote", error=StateLost):
        mailroom.joined(2)


def test_node_that_lost_a_received_message_asks_for_it_and_uses_what_it_has_after_it(opened):
    before = opened()
    before.exchange(range(6), before.joined(), send=False)
    after = opened(flip=2 / 6)
    assert after.progress(1) == Progress(2, 2)
    stream = after.joined()
    assert [taken(after, step)[1] for step in range(2)] == [text("it", 0), text("it", 1)]
    after.arrived(1, stream, 2, text("it", 2))
    after.arrived(1, stream, 3, text("it", 3))
    assert [taken(after, step)[1] for step in range(2, 6)] == [text("it", step) for step in range(2, 6)]
    for step in range(4, 7):  # the neighbour sends all from the lost one on
        assert after.arrived(1, stream, step, text("it", step))
    assert taken(after, 6) == {1: text("it", 6)}
    until(lambda: after.progress(1) == Progress(7, 7))


def test_sent_message_that_the_journal_lost_goes_out_once_it_is_computed_again_and_none_before_it(opened):
    opened().post_all(range(4))
    after = opened(flip=1 / 4)
    stream = after.joined()
    assert [frame.step for frame in frames_of(after, stream)] == [0]
    after.post_all([0])
    assert frames_of(after, stream) == []
    after.post_all([1])
    assert [(f.step, f.body) for f in frames_of(after, stream)] == [(s, text("me", s)) for s in (1, 2, 3)]


def test_neighbour_that_acknowledges_what_was_not_sent_is_refused(mailroom):
    with refused("step 2", 1, error=Refused):
        mailroom.sent([0], acknowledged=2)


def test_acknowledgement_that_says_nothing_new_is_refused_unless_a_message_carries_it(mailroom):
    stream = mailroom.sent(range(3), 2)
    mailroom.acknowledged(1, stream, 2)
    with refused("step 2 again", error=Refused):
        mailroom.acknowledged(1, stream, 2, alone=True)
    mailroom.acknowledged(1, stream, 3, alone=True)


def test_acknowledgement_waits_for_a_message_to_ride_on_and_goes_alone_where_none_comes(mailroom, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = mailroom.joined()
    for step in (0, 1):
        mailroom.exchange([step], stream)
        frames_of(mailroom, stream)
        now[0] += 1
    until(lambda: mailroom.progress(1).durable == 2)
    assert not mailroom.ack_due(1)  # the next message is due now, a second after the last
    mailroom.post_all([2])
    assert [frame.durable for frame in frames_of(mailroom, stream)] == [2]
    mailroom.arrived(1, stream, 2, b"two")
    taken(mailroom, 2)
    until(lambda: mailroom.progress(1).durable == 3)
    now[0] += 1.9
    assert not mailroom.ack_due(1)
    now[0] += 0.2
    assert mailroom.ack_due(1)


def test_greeting_acknowledges_what_it_says_is_durable(mailroom):
    stream = mailroom.joined()
    mailroom.exchange([0], stream)
    until(lambda: mailroom.progress(1).durable == 1)
    again = object()
    mailroom.connected(1, again, Progress(0, 0), told=1)
    assert not mailroom.ack_due(1)


def test_wait_ends_when_it_is_told_to(mailroom):
    threading.Timer(0.1, lambda: mailroom.stop(Interrupted("enough"))).start()
    with refused("enough", error=Interrupted):
        taken(mailroom, 0)
    assert mailroom.waiting_for.keys() == {1}


@settings(max_examples=25 if THOROUGH else 12, deadline=None)
@given(data=st.data())
def test_mailrooms_exchange_every_step_once_whatever_streams_break_and_nodes_restart(tmp_path_factory, data):
    """Hypothesis decides what happens next: a frame is carried, a stream breaks, or a mailroom restarts."""
    folders = [tmp_path_factory.mktemp("end") for _ in range(2)]
    rooms = [Room(folder, neighbours=[1 - k]) for k, folder in enumerate(folders)]
    steps, done, got = 8, [0, 0], [{}, {}]
    posted = [-1, -1]
    wires: list[list] = [[], []]  # frames under way to each end
    stream = [object(), object()]

    def connect():
        wires[0].clear()
        wires[1].clear()
        for k in range(2):
            stream[k] = object()
        held = [rooms[k].progress(1 - k) for k in range(2)]
        for k in range(2):
            rooms[k].connected(1 - k, stream[k], held[1 - k])

    connect()
    for _ in range(400):
        if done == [steps, steps]:
            break
        k = data.draw(st.integers(0, 1))
        what = data.draw(st.sampled_from(["work"] * 6 + ["carry"] * 6 + ["break", "restart"]))
        if what == "work" and done[k] < steps:
            step = done[k]
            if posted[k] < step:
                rooms[k].post(step, {1 - k: text(k, step)})
                posted[k] = step
            there = rooms[k]._edges[1 - k].inbox.get(step) or rooms[k]._journal.received(1 - k, step)
            if there:
                payload = rooms[k].take(step, [1 - k], lambda position, payload: payload)[1 - k]
                assert got[k].get(step, payload) == payload
                got[k][step] = payload
                done[k] = step + 1
        elif what == "carry":
            wires[1 - k] += [data for _, data in rooms[k].outgoing(1 - k, stream[k], True)]
            if wires[k]:
                frame = read_frame(wires[k].pop(0))
                rooms[k].acknowledged(1 - k, stream[k], frame.durable)
                if frame.kind == Kind.MESSAGE:
                    rooms[k].arrived(1 - k, stream[k], frame.step, frame.body)
        elif what == "break":
            connect()
        elif what == "restart":  # from the beginning: no checkpoint, all from the journal
            rooms[k].close()
            rooms[k] = Room(folders[k], neighbours=[1 - k])
            done[k], posted[k] = 0, -1
            connect()
    for k in range(2):
        assert got[k] == {step: text(1 - k, step) for step in range(len(got[k]))}
        rooms[k].close()


def test_neighbour_that_claims_more_rounds_than_the_run_has_is_refused(mailroom):
    mailroom.rounds = range(1, 11)
    mailroom.joined(15)  # ten rounds, three sums and the comparison of results
    with refused("step 15", error=Refused):
        mailroom.joined(16)


def test_wait_is_counted_from_its_beginning_though_others_arrive_and_some_are_refused(opened):
    both = opened((1, 2))
    stream = both.joined()
    threading.Timer(0.2, lambda: both.arrived(1, stream, 0, b"one")).start()
    threading.Timer(0.8, lambda: both.stop(Interrupted("enough"))).start()
    began = time.monotonic()
    with pytest.raises(Interrupted):
        taken(both, 0, (1, 2))
    assert list(both.waiting_for) == [2]
    assert both.waiting_for[2] - began < 0.15


def test_neighbour_that_never_acknowledges_is_waited_for_by_name(opened):
    both = opened((1, 2))
    stream = both.joined()
    for step in range(64):
        both.post(step, {1: b"x", 2: b"x"})
        both.joined(step + 1, position=2)
    assert both.waiting_for == {}
    waiting = threading.Thread(target=lambda: both.post(64, {1: b"x", 2: b"x"}))
    waiting.start()
    until(lambda: both.waiting_for.keys() == {1})
    frames_of(both, stream)
    while frames_of(both, stream):
        pass
    both.acknowledged(1, stream, 1)
    waiting.join(5)
    assert both.waiting_for == {}
    threading.Timer(0.1, lambda: both.stop(Interrupted("enough"))).start()
    with refused("enough", error=Interrupted):
        both.post(65, {1: b"x", 2: b"x"})
    assert both.waiting_for.keys() == {1}


def test_message_that_is_lost_while_no_stream_can_bring_it_is_an_error_instead_of_a_wait(mailroom):
    mailroom.alone = True
    with refused("step 3", "backup", error=FairmeshError):
        taken(mailroom, 3)


def test_reason_that_quotes_what_a_neighbour_sent_is_kept_short_and_printable():
    """It is in the status, which is written every second and shown in terminals."""
    reason = Refusal().again("another experiment: \x1b[2J" + "x" * (1 << 18)).reason
    assert (len(reason), reason.isprintable()) == (500, True)
