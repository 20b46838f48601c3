"""Rows on disk: what is whole is found again, and what a crash or the disk has damaged is not taken for whole."""

import errno
import os

import pytest
import torch

from fairmesh.storage import feature_store
from fairmesh.storage.feature_store import Form, StoredRows, refuse_full_disk
from tests.refusals import missing_from, refused

FORMS = [Form((3,), torch.float32), Form((), torch.int64), Form((2, 2), torch.bfloat16)]
ROWS = 25


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(feature_store, "_MOST_ROWS", 8)  # so that there are several portions


def rows_of(place):
    at = torch.arange(place.start, place.stop)
    return [at[:, None].float().expand(-1, 3), at, (at[:, None, None] / 4).expand(-1, 2, 2)]


def stored(folder, told=None, forms=FORMS):
    return StoredRows(folder / "one", forms, ROWS, 4, (told if told is not None else []).append)


def fill(store, portions):
    for portion in portions:
        store.write(portion, rows_of(store.place(portion)))


def whole(folder, told=None):
    """Writes all rows of a new folder."""
    store = stored(folder, told)
    with store.locked():
        fill(store, store.missing())
    return store


def test_rows_are_read_as_they_were_written(tmp_path, small):
    store = whole(tmp_path)
    assert store.count == 4
    with stored(tmp_path).locked():
        assert stored(tmp_path).missing() == []
    numbers, ids, halves = stored(tmp_path).tensors()
    assert torch.equal(numbers[:, 1], torch.arange(ROWS).float())
    assert torch.equal(ids, torch.arange(ROWS))
    assert halves.dtype == torch.bfloat16
    assert torch.equal(halves[:, 1, 0], (torch.arange(ROWS) / 4).bfloat16())
    assert sum(path.stat().st_size for path in store.folder.glob("*.bin")) == store.nbytes == ROWS * (12 + 8 + 8)
    assert store.folder.stat().st_mode & 0o077 == 0  # features say much about the rows behind them


def test_interrupted_writing_goes_on_after_the_last_finished_portion(tmp_path, small):
    store = stored(tmp_path)
    with store.locked():
        fill(store, store.missing()[:2])
    again = stored(tmp_path)
    assert again.known() == 16
    with again.locked():
        assert again.missing() == [2, 3]


@pytest.mark.parametrize(
    "harm", ["flipped bit", "zeros", "cut short", "gone", "no checksums", "no description", "garbage"]
)
def test_damage_is_found_told_and_only_the_damaged_rows_are_missing(tmp_path, small, harm):
    folder, told = whole(tmp_path).folder, []
    file, sums, about = folder / "tensor-1.bin", folder / "portions.json", folder / "about.json"
    content = bytearray(file.read_bytes())
    if harm == "flipped bit":
        content[9 * 8] ^= 1
        file.write_bytes(content)
    elif harm == "zeros":
        file.write_bytes(content[: 8 * 8] + bytes(len(content) - 8 * 8))  # as some file systems leave after a power cut
    elif harm == "cut short":
        file.write_bytes(content[:-1])
    elif harm == "gone":
        file.unlink()
    elif harm == "garbage":
        sums.write_text("[1, 2")
    else:
        (sums if harm == "no checksums" else about).unlink()
    missing = stored(tmp_path, told).missing()
    assert missing == {"flipped bit": [1], "zeros": [1, 2, 3]}.get(harm, [0, 1, 2, 3])
    if harm not in ("no checksums", "no description", "garbage"):
        assert not missing_from(told[0], folder)
    store = stored(tmp_path)
    fill(store, missing)
    assert stored(tmp_path).missing() == []
    assert torch.equal(store.tensors()[1], torch.arange(ROWS))


def test_rows_of_another_form_are_not_taken(tmp_path):
    whole(tmp_path)
    told: list[str] = []
    other = stored(tmp_path, told, [Form((3,), torch.float64), *FORMS[1:]])
    assert other.known() == 0
    assert other.missing() == [0]
    assert len(told) == 1


def test_full_disk_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    with refused("outputs", "GB", str(tmp_path), "bfloat16"):
        refuse_full_disk(tmp_path / "not" / "there", 1 << 62, "the outputs")

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = stored(tmp_path)
    with store.locked(), refused(str(store.folder), "MB", os.strerror(errno.ENOSPC)):
        store.missing()


def test_a_second_process_waits_for_the_first(tmp_path):
    store, waits = stored(tmp_path), []
    with store.locked():
        child = os.fork()
        if not child:
            try:
                with stored(tmp_path).locked(lambda: (tmp_path / "waits").touch()):
                    os._exit(0)
            finally:
                os._exit(1)
        while not (tmp_path / "waits").exists():
            waits.append(os.waitpid(child, os.WNOHANG))
        assert {pid for pid, _ in waits} <= {0}
    assert os.waitpid(child, 0)[1] == 0
