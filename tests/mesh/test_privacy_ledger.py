"""What a site has spent is written before it is sent, adds up over runs, and is not lost or changed unnoticed."""

import json
import os

import pytest

from fairmesh.mesh.node import privacy_ledger
from fairmesh.mesh.node.privacy_ledger import TEST, TRAIN, PrivacyLedger
from fairmesh.privacy.accounting import Releases, epsilon_of
from tests.refusals import refused

RELEASES = Releases(100, 0.2, 40, 1.5, 3)


def _of(run="first", generation=1, units=TRAIN):
    return {"run": run, "generation": generation, "units": units}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.privacy.jsonl"


@pytest.fixture
def ledger(path):
    opened = PrivacyLedger(path)
    yield opened
    opened.close()


def test_release_that_a_restart_repeats_is_charged_once(ledger, path):
    plan = ledger.add_plan(_of(), RELEASES)
    assert ledger.charge(plan, 0, 0, "aa")
    ledger.close()
    again = PrivacyLedger(path)
    assert again.plan(_of()) == plan
    assert again.charge(plan, 0, 0, "aa")
    assert again.made(plan) == 1
    again.close()


def test_release_of_the_same_round_at_another_model_is_charged_again(ledger):
    plan = ledger.add_plan(_of(), RELEASES)
    assert all(ledger.charge(plan, 0, *release) for release in ((0, "aa"), (0, "bb"), (1, "aa")))
    assert ledger.made(plan) == 3


def test_no_more_is_released_than_planned_but_what_was_is_repeated(ledger):
    plan = ledger.add_plan(_of(), RELEASES)
    allowed = [ledger.charge(plan, k, 0, "aa") for k in range(5)]
    assert allowed == [True, True, True, False, False]
    assert ledger.charge(plan, 1, 0, "aa")
    assert ledger.made(plan) == 3


def test_all_runs_add_up_and_test_units_are_counted_apart(ledger):
    first, second = ledger.add_plan(_of(), RELEASES), ledger.add_plan(_of("second"), RELEASES._replace(noise=2.0))
    tested = ledger.add_plan(_of(units=TEST), RELEASES._replace(times=1))
    for plan in (first, second, tested):
        ledger.charge(plan, 0, 0, "aa")
    assert [releases.noise for releases in ledger.spent()] == [1.5, 2.0]
    assert [releases.times for releases in ledger.spent(TEST)] == [1]
    assert epsilon_of(ledger.spent(), 1e-4) > epsilon_of(ledger.spent()[:1], 1e-4)


def test_releases_that_are_only_assumed_count(ledger):
    plan = ledger.add_plan(_of(), RELEASES)
    ledger.assume(plan, 2)
    assert [ledger.charge(plan, k, 0, "aa") for k in range(2)] == [True, False]


@pytest.mark.parametrize("end", [b"", b"\n\n", b"  \n", b"\n", b"\r\n"])
def test_whole_lines_count_however_an_editor_or_a_copy_has_left_the_end(end, ledger, path):
    plan = ledger.add_plan(_of(), RELEASES)
    ledger.charge(plan, 0, 0, "aa")
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole.rstrip() + end)
    again = PrivacyLedger(path)
    assert again.made(plan) == 1
    assert path.read_bytes() == whole
    assert again.charge(plan, 1, 0, "aa")
    again.close()
    last = PrivacyLedger(path)
    assert last.made(plan) == 2
    last.close()


@pytest.mark.parametrize("how", ["renamed", "removed", "shortened", "lengthened"])
def test_release_is_refused_where_the_file_was_changed_meanwhile(how, ledger, path):
    plan = ledger.add_plan(_of(), RELEASES)
    ledger.charge(plan, 0, 0, "aa")
    whole = path.read_bytes()
    if how == "renamed":  # as editors save, and as a backup is put back
        path.with_suffix(".copy").write_bytes(whole)
        os.replace(path.with_suffix(".copy"), path)
    elif how == "removed":
        path.unlink()
    else:
        path.write_bytes(whole + b"x" if how == "lengthened" else whole[:-5])
    with refused(str(path), "newest copy"):
        ledger.charge(plan, 1, 0, "aa")
    assert ledger.made(plan) == 1


def test_line_that_a_crash_cut_short_is_dropped(ledger, path):
    plan = ledger.add_plan(_of(), RELEASES)
    ledger.charge(plan, 0, 0, "aa")
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"plan": 0, "rele')
    again = PrivacyLedger(path)
    assert again.made(plan) == 1
    again.charge(plan, 1, 0, "aa")
    again.close()
    assert path.read_bytes().startswith(whole)
    assert path.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("change", ["a number", "a line less", "another order", "no text"])
def test_changed_ledger_is_refused(ledger, path, change):
    plan = ledger.add_plan(_of(), RELEASES)
    for k in range(3):
        ledger.charge(plan, k, 0, "aa")
    ledger.close()
    lines = path.read_text().splitlines(keepends=True)
    changed = {
        "a number": [lines[0].replace("1.5", "9.5"), *lines[1:]],
        "a line less": [lines[0], *lines[2:]],
        "another order": [lines[0], lines[2], lines[1], lines[3]],
        "no text": ["\x00\n", *lines],
    }[change]
    path.write_text("".join(changed))
    with refused(path, "line", "backup"):
        PrivacyLedger(path)


def test_older_ledger_does_not_have_the_head_of_a_newer_one(ledger, path):
    plan = ledger.add_plan(_of(), RELEASES)
    before = path.read_bytes()
    ledger.charge(plan, 0, 0, "aa")
    head = ledger.head
    assert ledger.has(head)
    assert ledger.has({})
    ledger.close()
    path.write_bytes(before)
    older = PrivacyLedger(path)
    assert not older.has(head)
    older.charge(plan, 0, 0, "another")
    assert not older.has(head)
    older.close()


def test_two_runs_cannot_use_one_ledger_at_once(ledger, path, monkeypatch):
    monkeypatch.setattr(privacy_ledger, "_LOCKED_S", 0.1)
    with refused(path, "another run"):
        PrivacyLedger(path)


def test_ledger_belongs_to_its_owner_alone(path):
    path.touch(0o644)
    PrivacyLedger(path).close()
    assert path.stat().st_mode & 0o077 == 0


def test_every_line_is_on_disk_before_a_release_is_allowed(ledger, path):
    plan = ledger.add_plan(_of(), RELEASES)
    ledger.charge(plan, 7, 0, "aa")
    assert json.loads(path.read_text().splitlines()[-1])["release"] == [7, 0, "aa"]


def test_line_that_a_full_disk_cuts_short_allows_no_release(ledger, path, monkeypatch):
    plan = ledger.add_plan(_of(), RELEASES)
    before, write = path.read_bytes(), os.write
    with monkeypatch.context() as full:
        full.setattr(privacy_ledger.os, "write", lambda file, line: write(file, line[:20]))
        with refused(path, "cannot write"):
            ledger.charge(plan, 0, 0, "aa")
    assert path.read_bytes() == before
    assert ledger.charge(plan, 0, 0, "aa")
    ledger.close()
    assert PrivacyLedger(path, to_write=False).made(plan) == 1
