"""The journal keeps what was logged through any crash and deletes what nobody needs."""

import errno
import os
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairmesh.mesh.wire import journal as module
from fairmesh.mesh.wire.journal import StorageError
from tests.refusals import refused

_opened = []


def Journal(folder):
    _opened.append(module.Journal(folder))
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
    assert (journal.next_from(1), journal.next_from(3)) == (5, None)
    assert journal.steps_sent() == [4]


def test_same_bytes_to_several_are_written_once(tmp_path):
    journal = Journal(tmp_path)
    journal.log_sent(0, dict.fromkeys(range(5), b"x" * 10_000))
    assert journal.size() < 10_100
    assert reopened(journal, tmp_path).sent(0) == dict.fromkeys(range(5), b"x" * 10_000)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), flip=st.booleans())
def test_tail_that_a_crash_cut_short_or_garbled_is_dropped_and_nothing_before_it(tmp_path_factory, cut, flip):
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder)
    for step in range(6):
        journal.log_received(1, step, bytes([step]) * 40)
    journal.close()
    (path,) = folder.glob("journal-*.log")
    content = path.read_bytes()
    record = len(content) // 6
    at = min(cut, len(content) - 1)
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] if flip else content[:at])
    journal = Journal(folder)
    whole = at // record
    assert [journal.received(1, step) for step in range(whole)] == [bytes([step]) * 40 for step in range(whole)]
    assert journal.received(1, whole) is None
    journal.log_received(1, whole, b"again")  # what comes now is written where the garbled part was
    assert reopened(journal, folder).received(1, whole) == b"again"


def test_damage_before_the_newest_segment_is_refused_by_the_files_name(tmp_path):
    journal = Journal(tmp_path)
    journal.log_received(1, 0, b"x" * 50)
    journal.begin_segment({})
    journal.log_received(1, 1, b"y" * 50)
    journal.close()
    first = min(tmp_path.glob("journal-*.log"))
    first.write_bytes(first.read_bytes()[:-3])
    with refused(first.name, error=StorageError):
        Journal(tmp_path)


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
