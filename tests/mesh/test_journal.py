"""The journal keeps what was logged through any crash and deletes what nobody needs."""

import errno
import os
import zlib
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairmesh.mesh.wire import journal as module
from fairmesh.mesh.wire.journal import StorageError
from tests.examples import THOROUGH
from tests.refusals import refused

_opened = []


def Journal(folder, *report):
    _opened.append(module.Journal(folder, *report))
    return _opened[-1]


@pytest.fixture(autouse=True)
def _closed():
    yield
    while _opened:
        _opened.pop().close()


def reopened(journal, folder):
    journal.close()
    return Journal(folder)


def test_journal_entries_are_found_again(tmp_path):
    journal = Journal(tmp_path)
    journal.log_sent(4, {1: b"to one", 2: b"to two"})
    journal.log_received(2, 4, b"from two")
    journal.log_received(1, 4, b"")
    journal = reopened(journal, tmp_path)
    assert journal.sent(4) == {1: b"to one", 2: b"to two"}
    assert journal.received(2, 4) == b"from two"
    assert journal.received(1, 4) == b""
    assert journal.received(1, 5) is None
    assert (journal.next_from(1), journal.next_from(3)) == (5, 0)
    assert [journal.missing_from(1, first) for first in (3, 4)] == [3, 5]
    assert journal.steps_sent() == [4]


def test_same_bytes_to_several_are_written_once(tmp_path):
    journal = Journal(tmp_path)
    journal.log_sent(0, dict.fromkeys(range(5), b"x" * 10_000))
    assert journal.size() < 10_100
    assert reopened(journal, tmp_path).sent(0) == dict.fromkeys(range(5), b"x" * 10_000)


RECORD = 8 + 11 + 40  # the head of a record, and of a message


def written(folder, segments=1):
    """A journal of six messages per segment; returns its segments."""
    journal = Journal(folder)
    for k in range(segments):
        if k:
            journal.begin_segment({})
        for step in range(6 * k, 6 * k + 6):
            journal.log_received(1, step, bytes([step]) * 40)
    journal.close()
    return sorted(folder.glob("journal-*.log"))


def found(folder, steps, events):
    """Opens a journal; returns which of the steps it has, intact. Collects its warnings."""
    journal = Journal(folder, lambda level, what, **fields: level == "info" or events.append(fields))
    messages = {step: journal.received(1, step) for step in steps}
    assert all(message in (None, bytes([step]) * 40) for step, message in messages.items())
    return {step for step, message in messages.items() if message is not None}, journal


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 6 * RECORD - 1))
def test_tail_that_a_crash_cut_short_is_dropped_and_nothing_before_it(tmp_path_factory, cut):
    folder, events = tmp_path_factory.mktemp("journal"), []
    (path,) = written(folder)
    path.write_bytes(path.read_bytes()[:cut])
    have, journal = found(folder, range(6), events)
    assert (have, events) == (set(range(cut // RECORD)), [])
    journal.log_received(1, cut // RECORD, b"again")  # what comes now is written where the torn record was
    assert reopened(journal, folder).received(1, cut // RECORD) == b"again"


@settings(max_examples=150 if THOROUGH else 50, deadline=None)
@given(bit=st.integers(0, 12 * RECORD * 8 - 1))
def test_flipped_bit_costs_one_record_and_is_reported_unless_that_was_the_last(tmp_path_factory, bit):
    """Also in a length, also in the segment before the last."""
    folder, events = tmp_path_factory.mktemp("journal"), []
    segments = written(folder, segments=2)
    which, at = divmod(bit // 8, 6 * RECORD)
    content = bytearray(segments[which].read_bytes())
    content[at] ^= 1 << bit % 8
    segments[which].write_bytes(content)
    hit = bit // 8 // RECORD
    have, journal = found(folder, range(12), events)
    assert have == set(range(12)) - {hit}
    assert journal.missing_from(1, 0) == hit
    last = hit == 11  # looks like a record that a crash cut short
    assert [(event["file"], event["lost_bytes"]) for event in events] == (
        [] if last else [(segments[which].name, RECORD)]
    )
    if not last:
        assert (folder / events[0]["kept_as"]).read_bytes() == content
    journal.log_received(1, hit, bytes([hit]) * 40)
    journal.close()
    again, _ = found(folder, range(12), events)
    assert again == set(range(12))
    assert len(events) == (not last)  # the mended segment is intact


def test_several_damages_and_a_torn_tail_lose_only_what_they_hit(tmp_path):
    (path,) = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[RECORD] ^= 0x80  # the length of the second
    content[3 * RECORD + 20 : 4 * RECORD + 20] = bytes(RECORD)  # zeros over the fourth and the head of the fifth
    path.write_bytes(content[:-3])
    events = []
    have, journal = found(tmp_path, range(6), events)
    assert have == {0, 2}
    assert len(events) == 1
    assert journal.missing_from(1, 0) == 1


def test_segment_that_lacks_its_end_is_damaged_if_it_is_not_the_last(tmp_path):
    first, _ = written(tmp_path, segments=2)
    first.write_bytes(first.read_bytes()[:-3])
    events = []
    have, _ = found(tmp_path, range(12), events)
    assert have == set(range(12)) - {5}
    assert [event["file"] for event in events] == [first.name]


def test_records_within_a_message_are_not_taken_for_records_when_a_segment_is_damaged(tmp_path):
    """A neighbour could hide records in its messages, in the hope that a length is damaged one day."""
    (other,) = written(tmp_path / "other")
    hidden = other.read_bytes()
    journal = Journal(tmp_path / "own")
    for salt in (0, 1):
        body = module._RECORD.pack(1, 7, 2) + b"forged"
        hidden += module._HEAD.pack(len(body), zlib.crc32(body, salt)) + body
    journal.log_received(1, 0, hidden)
    journal.log_received(1, 1, b"one")
    journal.close()
    (path,) = (tmp_path / "own").glob("journal-*.log")
    content = bytearray(path.read_bytes())
    content[1] ^= 1
    path.write_bytes(content)
    journal = Journal(tmp_path / "own")
    assert (journal.received(2, 7), journal.received(1, 0), journal.received(1, 1)) == (None, None, b"one")


def test_checkpoint_ends_a_segment_and_only_what_is_needed_is_kept(tmp_path):
    journal = Journal(tmp_path)
    for step in range(1, 31):
        journal.log_sent(step, {1: b"s%d" % step})
        journal.log_received(1, step, b"r%d" % step)
        if step % 10 == 0:
            journal.begin_segment({step: {1: b"s%d" % step}})
            journal.drop_before(max(0, step - 9))
    assert [journal.received(1, step) for step in (20, 21, 30)] == [None, b"r21", b"r30"]
    assert journal.steps_sent() == [*range(20, 31)]  # 20 was still needed when its segment ended
    journal = reopened(journal, tmp_path)
    assert journal.received(1, 20) is None
    assert journal.received(1, 21) == b"r21"
    assert journal.sent(30) == {1: b"s30"}
    assert len(list(tmp_path.glob("journal-*.log"))) == 2


def test_message_that_somebody_still_needs_outlives_its_segment(tmp_path):
    journal = Journal(tmp_path)
    journal.log_sent(1, {1: b"needed", 2: b"settled"})
    journal.begin_segment({1: {1: b"needed"}})
    journal.drop_before(100)
    assert reopened(journal, tmp_path).sent(1) == {1: b"needed"}


@pytest.mark.parametrize("room", [0, 3, 20])
def test_full_disk_says_what_to_do_and_what_was_logged_stays(tmp_path, room):
    journal = Journal(tmp_path)
    journal.log_received(1, 0, b"before")
    file = journal._file

    class Full:
        left = room

        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, data):
            if not self.left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written, self.left = file.write(data[: self.left]), 0
            return written

    journal._file = Full()  # type: ignore[assignment]
    with refused(os.strerror(errno.ENOSPC), error=StorageError):
        journal.log_received(1, 1, b"after")
    journal = reopened(journal, tmp_path)
    assert (journal.received(1, 0), journal.received(1, 1)) == (b"before", None)
    journal.log_received(1, 1, b"after")
    assert reopened(journal, tmp_path).received(1, 1) == b"after"


def test_disk_that_writes_in_pieces_is_asked_again(tmp_path):
    journal = Journal(tmp_path)
    file = journal._file

    class Slow:
        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, data):
            return file.write(data[:5])

    journal._file = Slow()  # type: ignore[assignment]
    journal.log_received(1, 0, b"longer than five bytes")
    assert reopened(journal, tmp_path).received(1, 0) == b"longer than five bytes"


def test_checkpoints_of_the_same_round_have_segments_of_their_own(tmp_path):
    """After a damaged checkpoint the node goes back to an older one and does its round again."""
    journal = Journal(tmp_path)
    for _ in range(3):
        journal.begin_segment({})
        journal.drop_before(20)
        journal.log_received(1, 21, b"after the checkpoint")
        journal = reopened(journal, tmp_path)
        assert journal.received(1, 21) == b"after the checkpoint"


def test_journal_found_at_the_start_is_made_durable_before_anybody_is_told_so(tmp_path):
    journal = Journal(tmp_path)
    journal.log_received(1, 0, b"written, but perhaps not on the disk yet")
    journal.close()
    with mock.patch.object(os, "fdatasync", wraps=os.fdatasync) as made_durable:
        Journal(tmp_path)
    assert made_durable.call_count == 1


def test_segment_has_its_name_on_the_disk_before_it_is_written_to(tmp_path):
    journal = Journal(tmp_path)
    with mock.patch.object(module, "sync_folder") as named:
        journal.begin_segment({1: {1: b"needed"}})
    assert named.mock_calls == [mock.call(tmp_path)]
