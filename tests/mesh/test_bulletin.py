"""Announcements of sites: only signed ones are accepted, the newest is kept, and all are passed on."""

import json
from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest

from fairmesh.mesh.announcements import CELLS, FURTHER, KINDS
from fairmesh.mesh.enrol import certificates
from fairmesh.mesh.enrol.keys import KnownKeys, trust
from fairmesh.mesh.fields import Terms
from fairmesh.mesh.wire import frames, links
from fairmesh.mesh.wire.bulletin import Announcement, Bulletin
from fairmesh.mesh.wire.frames import Refused
from fairmesh.mesh.wire.limits import TokenBucket
from tests.mesh import credentials, fuzz
from tests.mesh.credentials import mesh_of, signed, terms_of
from tests.refusals import missing_from, refused

NAMES = ("a", "b", "c")
TERMS = terms_of(NAMES, rounds=30)
SOUND = {kind: fuzz.sound(kind, TERMS.by("a"), Random(4)) for kind in KINDS}
SOUND["statistics"] = {"mean": [1.0, 60.0], "spread": [1.0, 9.0], "shares": [0.5, 0.5], "relation": [0.5, -0.1]}
SOUND["versus_local"] |= {"cells": dict(zip(CELLS, (60, 10, 5, 25))), "verdict": "", "why_not": ""}
SOUND["measured"] |= {
    "columns": ["accuracy", "loss", "weight", "bits", "bytes", "sent"],
    "rows": [[done, 0.5, 0.5, 0.3, 8.0 * done, done, None] for done in (0, 10, 20)],
}
SOUND["status"] |= {"waiting_for": {}}
SOUND["diverged"] |= {"since": 3, "round": 4}
SOUND["vote"] |= {"sites": ["c"], "generation": 1}
COMMIT, MEASURED, RESULT, FACTS = (SOUND[kind] for kind in ("commit", "measured", "result", "facts"))
UNLIKE = {"since": 0, "round": 10, "signed": "0a" * 32, "other": "0b" * 32, "both": False}
CONTRADICTED = {"generation": 1, "sites": {"b": UNLIKE}}
STATISTICS, COUNTS = SOUND["statistics"], SOUND["versus_local"]


def status(done: int) -> dict:
    return SOUND["status"] | {"round": done}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return signed(tmp_path_factory.mktemp("keys"), NAMES)


def boards_of(keys):
    return {name: Bulletin(name, keys[name], TERMS) for name in NAMES}


@pytest.fixture
def boards(keys):
    return boards_of(keys)


@pytest.fixture
def own(tmp_path):
    """Boards of sites whose keys no other test has, as keys of these may be replaced."""
    return boards_of(signed(tmp_path, NAMES))


@pytest.fixture
def with_new_key(tmp_path, monkeypatch):
    """Returns what site a has after it had to replace its key, two seconds later."""

    def replaced():
        now = certificates._clock()
        monkeypatch.setattr(certificates, "_clock", lambda: now + timedelta(seconds=2))
        return credentials.with_new_key(tmp_path, NAMES, "a")

    return replaced


def restarted(name, credentials, folder, content):
    """Returns a site's board that has read what an earlier one had saved, and what it passed over."""
    (folder / "bulletin.json").write_bytes(content)
    again = Bulletin(name, credentials, TERMS)
    return again, again.restored(folder / "bulletin.json")


def pass_on(boards, sender, receiver):
    boards[receiver].heard(boards[sender].news(0)[1])


def test_news_reach_those_who_are_no_neighbours_and_the_newest_holds_whatever_comes_later(boards):
    boards["a"].announce("status", status(7), 1)
    old = boards["a"].news(0)[1]
    boards["a"].announce("status", status(8), 2)
    boards["a"].announce("status", status(6), 1)
    pass_on(boards, "a", "b")
    boards["b"].heard(old)
    pass_on(boards, "b", "c")
    assert [boards[name].of("a", "status") for name in "bc"] == [status(8)] * 2
    assert boards["c"].of_all("status") == {"a": status(8)}


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("number", [1, 2])
def test_metrics_that_come_after_newer_ones_are_kept_to_be_compared(boards, number):
    """Those of the same number too: a site may tell two sites different things under one number."""
    other = MEASURED | {"rows": [[*MEASURED["rows"][0][:-1], "0b" * 32]]}
    boards["a"].announce("measured", other, number)
    second = boards["a"].news(0)[1]
    boards["a"]._known.pop(("a", "measured"))
    boards["a"].announce("measured", MEASURED, 2)
    pass_on(boards, "a", "b")
    for _ in range(2):
        boards["b"].heard(second)
    assert [entry.body for entry in boards["b"].superseded()] == [other] * 2
    assert boards["b"].superseded() == []
    assert boards["b"].of("a", "measured") == MEASURED
    forged = json.loads(second)
    forged[-1]["body"]["rows"][0][-1] = "0c" * 32
    boards["b"].heard(json.dumps(forged).encode())
    assert boards["b"].superseded() == []


def test_announcements_are_told_again_only_if_new(boards):
    pass_on(boards, "a", "b")
    now, entries = boards["b"].news(0)
    assert {entry["site"] for entry in json.loads(entries)} == {"a", "b"}
    assert boards["b"].news(now) == (now, b"")
    boards["b"].announce("status", status(1), 1)
    _, entries = boards["b"].news(now)
    assert [entry["kind"] for entry in json.loads(entries)] == ["status"]


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize(
    "forged", [{"body": status(99)}, {"number": 50}, {"site": "c"}, {"signature": "00" * 70}], ids=str
)
def test_neighbour_cannot_speak_for_another_site(boards, forged):
    boards["a"].announce("status", status(7), 1)
    boards["c"].announce("status", status(5), 1)
    pass_on(boards, "a", "b")
    pass_on(boards, "c", "b")
    boards["a"].announce("status", status(8), 2)
    entries = json.loads(boards["a"].news(0)[1])
    forged = [entry | forged if entry["kind"] == "status" else entry for entry in entries]
    with refused("'status'", "sign", error=Refused):
        boards["b"].heard(json.dumps(forged).encode())
    assert boards["b"].of("a", "status") == status(7)
    assert boards["b"].of("c", "status") == status(5)


@pytest.mark.parametrize(
    "entries",
    [b"", b"{", b"7", b'[{"site": "a"}]', b'[{"site":"x","kind":"status","number":1,"body":{},"signature":""}]',
     b'[{"site":"a","kind":"gossip","number":1,"body":{},"signature":""}]'],
)  # fmt: skip
def test_announcements_that_are_no_news_of_this_mesh_are_refused(boards, entries):
    with pytest.raises(Refused):
        boards["b"].heard(entries)


def test_restarted_site_knows_what_it_and_others_had_said(boards, keys, tmp_path):
    boards["a"].announce("commit", COMMIT, 2)
    pass_on(boards, "b", "a")
    again, _ = restarted("a", keys["a"], tmp_path, boards["a"].saved())
    again.announce("commit", COMMIT | {"round": 3}, 2)  # what was said first holds
    assert again.of("a", "commit") == COMMIT
    assert again.of("b", "certificate") != {}


# What is announced, and the field that the refusal names; a number that JSON cannot hold is in no field.
WRONG = {
    "no fields": ("status", {}, "round"),
    "a round in words": ("status", status(1) | {"round": "two"}, "round"),
    "commands to a terminal": ("status", status(1) | {"activity": "\x1b[2J"}, "activity"),
    "waiting for a list": ("status", status(1) | {"waiting_for": [1]}, "waiting_for"),
    "a number without end": ("status", status(1) | {"time": 10**4000}, None),
    "a vote for no list": ("vote", {"sites": "b", "generation": 2, "round": None, "restored": []}, "sites"),
    "a round below none": ("commit", COMMIT | {"round": -1}, "round"),
    "a truth for a round": ("commit", COMMIT | {"round": True}, "round"),
    "too much": ("commit", COMMIT | {"sites": ["x" * 100] * 200}, "much"),
    "a field of its own": ("commit", COMMIT | {"more": 1}, "more"),
    "outputs without end": ("commit", COMMIT | {"outputs": 1 << 53}, "outputs"),
    "a generation of three numbers": ("commit", COMMIT | {"begun": [[1, 0, 2]]}, "begun"),
    "votes in words": ("commit", COMMIT | {"votes": {"a": "yes"}}, "votes"),
    "a certificate without commits": ("follow", {"certificates": [{"generation": 1, "sites": []}]}, "certificates"),
    "facts of a model that fits no memory": ("facts", FACTS | {"outputs": 10**9}, "outputs"),
    "outputs that are no integer": ("facts", FACTS | {"outputs": 10.0}, "outputs"),
    "fewer outputs than none": ("facts", FACTS | {"outputs": -1}, "outputs"),
    "samples without end": ("facts", FACTS | {"samples": 1 << 50}, "samples"),
    "no samples": ("facts", FACTS | {"samples": 0}, "samples"),
    "samples in words": ("facts", FACTS | {"samples": "many"}, "samples"),
    "a shape with many axes": ("facts", FACTS | {"inputs": ["torch.float32", [1] * 9]}, "inputs"),
    "a shape of words": ("facts", FACTS | {"inputs": ["torch.float32", ["8"]]}, "inputs"),
    "a shape below none": ("facts", FACTS | {"targets": ["torch.int64", [-1]]}, "targets"),
    "no shape": ("facts", FACTS | {"targets": []}, "targets"),
    "a metric in words": ("result", RESULT | {"metrics": {"accuracy": "good"}}, "metrics"),
    "digests that are numbers": ("result", RESULT | {"measured": {"a": 7}}, "measured"),
    "traffic that is null": ("measured", MEASURED | {"rows": [[10, 0.5, 0.5, 0.3, 0.0, None, None]]}, "rows"),
    "traffic of 400 digits": ("measured", MEASURED | {"rows": [[10, 0.5, 0.5, 0.3, 0.0, 10**400, None]]}, "rows"),
    "a metric of 400 digits": ("measured", MEASURED | {"rows": [[10, 10**400, 0.5, 0.3, 0.0, 0, None]]}, "rows"),
    "traffic below nothing": ("measured", MEASURED | {"rows": [[10, 0.5, 0.5, 0.3, -8.0, 0, None]]}, "rows"),
    "a hash that is none": ("measured", MEASURED | {"rows": [[10, 0.5, 0.5, 0.3, 0.0, 0, "AB" * 32]]}, "rows"),
    "a row of fewer columns": ("measured", MEASURED | {"rows": [[10, 0.0, 0]]}, "rows"),
    "rows that go back": ("measured", MEASURED | {"rows": MEASURED["rows"][::-1]}, "rows"),
    "rows without traffic": ("measured", MEASURED | {"columns": ["accuracy"], "rows": [[10, 0.5, None]]}, "columns"),
    "a mean next to nothing": ("statistics", STATISTICS | {"mean": [5e-324, 2.0]}, "mean"),
    "a negative spread": ("statistics", STATISTICS | {"spread": [-1.0, 2.0]}, "spread"),
    "more than all of a class": ("statistics", STATISTICS | {"shares": [1.5]}, "shares"),
    "fewer spreads than means": ("statistics", STATISTICS | {"spread": [1.0]}, "spread"),
    "a count alone": ("versus_local", COUNTS | {"cells": {"both": 50}}, "cells"),
    "counts without end": ("versus_local", COUNTS | {"cells": COUNTS["cells"] | {"both": 1 << 53}}, "cells"),
    "counts of few rows": ("versus_local", COUNTS | {"cells": dict.fromkeys(COUNTS["cells"], "<5")}, "cells"),
    "counts and a verdict": ("versus_local", COUNTS | {"verdict": "better"}, "verdict"),
    "tables without end": ("refusing", {"sites": json.loads('{"b":' * 500 + "1" + "}" * 500)}, ""),
    "a row without a round": ("measured", MEASURED | {"rows": [[]]}, "rows"),
    "a row of words": ("measured", MEASURED | {"rows": [[10, "good"]]}, "rows"),
    "a round that is no integer": ("measured", MEASURED | {"rows": [[1.5, 0.1]]}, "rows"),
    "models of rounds in words": ("measured", MEASURED | {"kept": ["ten"]}, "kept"),
    "columns of tables": ("measured", MEASURED | {"columns": [{}]}, "columns"),
    "refusals without reasons": ("refusing", {"sites": {"b": {"since": 1.0}}}, "sites"),
    "a round after the last": ("status", status(31), "round"),
    "a metric of a round after the last": ("status", status(1) | {"metric_round": 31}, "metric_round"),
    "waiting for nobody's neighbour": ("status", status(1) | {"waiting_for": {"nobody": 1.5}}, "waiting_for"),
    "waiting for itself": ("status", status(1) | {"waiting_for": {"a": 1.5}}, "waiting_for"),
    "rows after the last round": ("measured", MEASURED | {"rows": [[31, 0.5, 0.5, 0.3, 0.0, 0, None]]}, "rows"),
    "models after the last round": ("measured", MEASURED | {"kept": [31]}, "kept"),
    "numbers that exploded after the run": ("diverged", SOUND["diverged"] | {"round": 31}, "round"),
    "sound numbers after exploded ones": ("diverged", SOUND["diverged"] | {"since": 8}, "since"),
    "messages of a site that is none": ("contradicted", CONTRADICTED | {"sites": {"nobody": UNLIKE}}, "sites"),
    "messages that do not differ": (
        "contradicted",
        CONTRADICTED | {"sites": {"b": UNLIKE | {"other": "0a" * 32}}},
        "b",
    ),
    "messages before they came": ("contradicted", CONTRADICTED | {"sites": {"b": UNLIKE | {"since": 10}}}, "b"),
    "a vote against nobody": ("vote", SOUND["vote"] | {"sites": ["nobody"]}, "sites"),
    "a vote against the same site twice": ("vote", SOUND["vote"] | {"sites": ["c", "c"]}, "sites"),
    "a vote for a round after the last": ("vote", SOUND["vote"] | {"round": 31}, "round"),
    "votes of nobody": ("commit", COMMIT | {"votes": {"nobody": 1}}, "votes"),
    "rows of nobody": ("result", RESULT | {"measured": {"nobody": "12ab"}}, "measured"),
    "columns that nobody measures": ("measured", MEASURED | {"columns": ["beauty", "loss", *FURTHER]}, "columns"),
    "more right than all": ("measured", MEASURED | {"rows": [[10, 1.1, 0.5, 0.3, 0.0, 0, None]]}, "accuracy"),
    "a weight below none": ("measured", MEASURED | {"rows": [[10, 1.0, 0.5, -1.5, 0.0, 0, None]]}, "weight"),
    "a result better than the best": ("result", RESULT | {"metrics": {"best accuracy": 7.0}}, "best accuracy"),
    "a metric that nobody measures": ("result", RESULT | {"metrics": {"beauty": 0.5}}, "metrics"),
    "a test set without a size": ("facts", FACTS | {"test": True}, "test"),
    "a table by nobody": ("table", SOUND["table"] | {"fitted_by": ["nobody"]}, "fitted_by"),
    "a refusal of nobody": (
        "refusing",
        {"sites": {"nobody": {"since": 1.0, "reason": "r", "step": 1, "digest": None}}},
        "sites",
    ),
    "commands in a reason": (
        "refusing",
        {"sites": {"b": {"since": 1.0, "reason": "\x1b[2J", "step": 1, "digest": None}}},
        "sites",
    ),
}


@pytest.mark.quick_cases(len(WRONG))
@pytest.mark.parametrize("case", WRONG)
def test_signed_facts_must_have_the_form_that_others_rely_on(boards, case):
    kind, body, field = WRONG[case]
    boards["a"].announce(kind, body, 1)
    with refused(*([repr(kind), "from a", field] if field else []), error=Refused):
        pass_on(boards, "a", "b")
    assert boards["b"].entry("a", kind) is None


def test_sound_announcements_are_accepted(boards):
    for kind, body in SOUND.items():
        if kind != "certificate":
            boards["a"].announce(kind, body, 1)
            pass_on(boards, "a", "b")
            assert boards["b"].of("a", kind) == body


def test_as_many_outputs_are_accepted_as_the_experiment_has_classes(boards, keys):
    many = Bulletin("b", keys["b"], terms_of(NAMES, outputs=20_000))
    boards["a"].announce("facts", FACTS | {"outputs": 20_000}, 1)
    many.heard(boards["a"].news(0)[1])
    with refused("facts", "outputs = 20000", error=Refused):
        pass_on(boards, "a", "c")


def test_announced_numbers_that_are_not_finite_become_null(boards):
    boards["a"].announce("status", status(7) | {"metric": float("nan"), "weight": float("inf")}, 1)
    pass_on(boards, "a", "b")
    assert boards["b"].of("a", "status") == status(7) | {"metric": None, "weight": None}


def test_announcements_are_passed_on_after_their_site_s_certificate_has_expired(tmp_path):
    keys = signed(tmp_path, NAMES, {"a": -0.001})
    boards = boards_of(keys)
    boards["a"].announce("status", status(7), 1)
    boards["a"].announce("ready", {"facts": "x"}, 1)
    pass_on(boards, "a", "b")
    pass_on(boards, "b", "c")
    assert boards["c"].of("a", "status") == status(7)
    again, _ = restarted("c", keys["c"], tmp_path, boards["c"].saved())
    assert again.of("a", "ready") == {"facts": "x"}
    assert again.of("a", "status") == {}  # its node may have ended since


def test_renewed_certificate_takes_the_old_ones_place_and_drops_what_the_old_key_signed(own, with_new_key):
    own["a"].announce("status", status(7), 1)
    pass_on(own, "a", "b")
    renewed = Bulletin("a", with_new_key(), TERMS)
    own["b"].heard(renewed.news(0)[1])
    assert own["b"].of("a", "status") == {}
    renewed.announce("status", status(8), 1)
    own["b"].heard(renewed.news(0)[1])
    pass_on(own, "b", "c")
    assert own["c"].of("a", "status") == status(8)


def test_neighbour_that_has_not_confirmed_a_new_key_yet_may_pass_on_what_the_old_one_signed(own, with_new_key):
    own["a"].announce("status", status(7), 1)
    pass_on(own, "a", "c")
    renewed = Bulletin("a", with_new_key(), TERMS)
    own["b"].heard(renewed.news(0)[1])
    pass_on(own, "c", "b")
    assert own["b"].of("a", "status") == {}
    forged = Announcement("a", "status", 9, status(9), bytes(64)).table()
    with refused("a did not sign", error=Refused):
        own["b"].heard(json.dumps([forged]).encode())


def test_site_with_a_new_key_says_again_what_it_had_said_and_knows_what_others_did(own, tmp_path, with_new_key):
    own["b"].announce("commit", COMMIT | {"round": 9}, 1)
    pass_on(own, "b", "a")
    own["a"].announce("commit", COMMIT, 1)
    renewed, _ = restarted("a", with_new_key(), tmp_path, own["a"].saved())
    assert renewed.of("b", "commit") == COMMIT | {"round": 9}
    own["c"].heard(renewed.news(0)[1])
    assert own["c"].of("a", "commit") == COMMIT


def test_damaged_memory_is_passed_over(keys, tmp_path):
    again, passed_over = restarted("a", keys["a"], tmp_path, b'[{"site": "a"')
    assert (len(passed_over), again.of("b", "certificate")) == (1, {})


def test_what_an_older_version_took_over_is_passed_over_and_named_and_votes_are_kept(boards, keys, tmp_path):
    boards["a"].announce("statistics", STATISTICS | {"mean": [5e-324, 60.0]}, 1)
    boards["a"].announce("vote", SOUND["vote"], 1)
    entries = json.loads(boards["a"].news(0)[1])
    content = json.dumps([entries[0], {"site": "a"}, *entries[1:]]).encode()
    again, passed_over = restarted("b", keys["b"], tmp_path, content)
    assert len(passed_over) == 2
    assert missing_from(passed_over, "cannot be read", "from a", "mean") == []
    assert (again.of("a", "statistics"), again.of("a", "vote")["sites"]) == ({}, ["c"])


def test_much_news_is_told_in_pieces_and_all_of_it(boards, monkeypatch):
    monkeypatch.setattr("fairmesh.mesh.wire.bulletin.A_FRAME", 100)
    pass_on(boards, "b", "a")
    boards["a"].announce("commit", COMMIT, 1)
    boards["a"].announce("status", status(3))
    since, pieces = 0, []
    while (told := boards["a"].news(since))[1]:
        since, entries = told
        pieces.append(entries)
        boards["c"].heard(entries)
    assert len(pieces) == 4
    assert boards["c"].of("a", "status") == status(3)
    assert boards["c"].of("b", "certificate") != {}


def test_announcements_replace_earlier_ones_though_the_clock_went_back(boards, monkeypatch):
    boards["a"].announce("status", status(1))
    monkeypatch.setattr("time.time", lambda: 1000.0)
    boards["a"].announce("status", status(2))
    pass_on(boards, "a", "b")
    assert boards["b"].of("a", "status") == status(2)


# A member that announces without end


def test_flood_of_one_site_is_dropped_before_it_is_verified_and_named(boards, monkeypatch):
    counted = []
    verified = certificates.verified
    monkeypatch.setattr(certificates, "verified", lambda *given: counted.append(1) or verified(*given))
    pass_on(boards, "a", "b")
    counted.clear()
    frames = []
    for number in range(1, 101):
        boards["a"].announce("status", status(number % 30), number)
        frames.append(boards["a"].news(0)[1])
    assert set.union(*(boards["b"].heard(frame, "a") for frame in frames)) == {"a"}
    assert 15 < len(counted) < 40
    boards["c"].announce("status", status(3), 1)  # others are not affected, over any neighbour
    assert boards["b"].heard(boards["c"].news(0)[1], "a") == set()
    assert boards["b"].of("c", "status") == status(3)
    assert boards["b"].heard(frames[-1], "c") == set()
    assert boards["b"].of("a", "status") == status(100 % 30)


def test_flood_of_one_kind_keeps_no_other_kind_from_anybody(boards):
    for number in range(1, 101):
        boards["a"].announce("status", status(number % 30), number)
        boards["b"].heard(boards["a"].news(0)[1], "a")
    assert boards["b"].of("a", "status") != boards["a"].of("a", "status")
    boards["a"].announce("vote", SOUND["vote"], 1)
    boards["b"].heard(boards["a"].news(0)[1], "a")
    assert boards["b"].of("a", "vote") == SOUND["vote"]


def test_refusal_can_name_only_neighbours_of_the_site_that_refuses(keys):
    line = Terms({"a": ("b",), "b": ("a", "c"), "c": ("b",)})
    boards = {name: Bulletin(name, keys[name], line) for name in NAMES}
    why = {"since": 1.0, "reason": "r", "step": None, "digest": None}
    boards["b"].announce("refusing", {"sites": {"a": why, "c": why}}, 1)
    pass_on(boards, "b", "a")
    assert boards["a"].of("b", "refusing")["sites"].keys() == {"a", "c"}
    boards["a"].announce("refusing", {"sites": {"c": why}}, 1)
    with refused("refusing", "from a", "sites", error=Refused):
        pass_on(boards, "a", "b")


def test_only_a_neighbour_can_say_what_a_site_has_sent_it_and_everybody_what_it_has_signed(keys):
    line = Terms({"a": ("b",), "b": ("a", "c"), "c": ("b",)})
    boards = {name: Bulletin(name, keys[name], line) for name in NAMES}
    boards["a"].announce("contradicted", CONTRADICTED | {"sites": {"b": UNLIKE, "c": UNLIKE | {"both": True}}}, 1)
    pass_on(boards, "a", "b")
    assert boards["b"].of("a", "contradicted")["sites"].keys() == {"b", "c"}
    boards["a"].announce("contradicted", CONTRADICTED | {"sites": {"c": UNLIKE}}, 2)
    with refused("contradicted", "from a", "c", "neighbour", error=Refused):
        pass_on(boards, "a", "b")


def test_announcement_that_is_known_costs_nothing(boards, monkeypatch):
    boards["a"].announce("status", status(1), 1)
    frame = boards["a"].news(0)[1]
    boards["b"].heard(frame, "a")
    monkeypatch.setattr(certificates, "verified", lambda *given: pytest.fail("verified again"))
    for _ in range(200):
        assert boards["b"].heard(frame, "a") == set()


def test_announcements_do_not_go_back_over_the_stream_that_they_came_over(boards):
    stream, other = object(), object()
    boards["a"].announce("status", status(1), 1)
    boards["b"].heard(boards["a"].news(0)[1], "a", stream)
    assert {entry["site"] for entry in json.loads(boards["b"].news(0, stream)[1])} == {"b"}
    assert {entry["site"] for entry in json.loads(boards["b"].news(0, other)[1])} == {"a", "b"}


def test_every_kind_has_a_size_that_is_checked_before_the_signature(boards, monkeypatch):
    pass_on(boards, "a", "b")
    body = status(1) | {"waiting_for": {f"site-{i:050d}": 1.5 for i in range(150)}}
    boards["a"].announce("status", body, 1)
    monkeypatch.setattr(certificates, "verified", lambda *given: pytest.fail("verified"))
    with refused("'status'", "too much", error=Refused):
        pass_on(boards, "a", "b")


def test_token_bucket_allows_a_burst_and_then_its_rate():
    now = [0.0]
    bucket = TokenBucket(2.0, 5.0, lambda: now[0])
    assert [bucket.spend(1) for _ in range(6)] == [True] * 5 + [False]
    now[0] += 1
    assert [bucket.spend(1) for _ in range(3)] == [True, True, False]
    now[0] += 100
    assert [bucket.spend(6), bucket.spend(5)] == [False, True]


# Clocks and keys


def test_site_whose_clock_was_ahead_is_heard_again_after_a_restart_with_the_right_time(boards, keys, monkeypatch):
    with monkeypatch.context() as ahead:
        ahead.setattr("time.time", lambda: 5e9)  # the year 2128
        boards["a"].announce("status", status(1))
    pass_on(boards, "a", "b")
    again = Bulletin("a", keys["a"], TERMS)
    again.announce("status", status(2))
    boards["b"].heard(again.news(0)[1], "a")
    assert boards["b"].of("a", "status") == status(1)  # its number is from the future
    again.heard(boards["b"].news(0)[1], "b")
    assert again.of("a", "status") == status(2)
    boards["b"].heard(again.news(0)[1], "a")
    assert boards["b"].of("a", "status") == status(2)
    again.announce("status", status(3))
    boards["b"].heard(again.news(0)[1], "a")
    assert boards["b"].of("a", "status") == status(3)


def test_nobody_else_can_raise_a_site_s_numbers(boards):
    boards["a"].announce("status", status(1), 1)
    forged = json.loads(boards["a"].news(0)[1])[-1] | {"number": 1 << 52}
    boards["a"].heard(json.dumps([forged]).encode(), "b")
    boards["a"].announce("status", status(2))
    assert json.loads(boards["a"].news(0)[1])[-1]["number"] < 1 << 50


def test_new_key_is_passed_over_until_it_is_confirmed_and_its_messenger_is_not_refused(tmp_path, with_new_key):
    keys = signed(tmp_path, NAMES)
    events, states = [], {name: tmp_path / name for name in NAMES}
    for state in states.values():
        state.mkdir()
    known = {name: KnownKeys(states[name], lambda *event, **fields: events.append(fields)) for name in ("b", "c")}
    boards = {n: Bulletin(n, keys[n], TERMS, k.refusal) for n, k in known.items()}
    boards["a"] = Bulletin("a", keys["a"], TERMS)
    boards["a"].announce("status", status(1), 1)
    pass_on(boards, "a", "b")
    pass_on(boards, "b", "c")
    old = boards["a"].news(0)[1]
    boards["a"] = Bulletin("a", new := with_new_key(), TERMS)
    boards["a"].announce("status", status(2), 2)
    pass_on(boards, "a", "b")
    assert boards["b"].of("a", "status") == status(1)
    shown = certificates.fingerprint(new.certificate)
    assert known["b"].view()["a"]["unconfirmed"] == shown
    assert shown in events[-1]["reason"]
    trust(states["b"], "a", shown)
    pass_on(boards, "a", "b")
    assert boards["b"].of("a", "status") == status(2)
    assert known["b"].view()["a"] == {"fingerprint": shown, "unconfirmed": None}
    pass_on(boards, "b", "c")  # c has not confirmed it, and keeps its stream to b
    assert boards["c"].of("a", "status") == status(1)
    boards["b"].heard(old)
    assert boards["b"].of("a", "status") == status(2)


def test_certificate_that_is_not_valid_yet_is_replaced_by_one_with_the_right_dates(tmp_path, monkeypatch):
    """The founder's clock was ahead when it signed, and so was b's when it heard of it."""
    keys, now = signed(tmp_path, NAMES), certificates._clock()
    boards = boards_of(keys)
    with monkeypatch.context() as ahead:
        ahead.setattr(certificates, "_clock", lambda: now + timedelta(hours=3))
        early = certificates.sign((tmp_path / "a.csr").read_bytes(), tmp_path, mesh_of(NAMES), 1)
    wrong = Bulletin("a", replace(keys["a"], certificate=early), TERMS)
    with monkeypatch.context() as ahead:
        ahead.setattr(certificates, "check_certificate", lambda *given: [])
        boards["b"].heard(wrong.news(0)[1])
    boards["a"].announce("status", status(1), 1)
    pass_on(boards, "a", "b")
    assert boards["b"].of("a", "status") == status(1)


def test_certificate_with_half_a_character_is_refused_before_it_breaks_what_honest_sites_pass_on(boards):
    """A PEM file may have anything after its end. A string that has no bytes would fail at every reader of the key, and
    end the streams between honest sites, over which the announcements of that site come."""
    odd = {"pem": boards["a"].of("a", "certificate")["pem"] + "\ud800"}
    number = boards["a"].entry("a", "certificate").number + 1
    boards["a"].announce("certificate", odd, number)
    boards["a"].announce("diverged", SOUND["diverged"])
    with refused("pem", error=Refused):
        pass_on(boards, "a", "b")
    pass_on(boards, "b", "c")
    assert boards["c"].of("a", "certificate") != odd


def test_honest_neighbour_may_pass_on_all_that_two_members_can_say():
    """Else it would be named, and what others say be dropped, because of these two."""
    digits = "".join(Random(0).choices("0123456789abcdef", k=1 << 18))
    prices = 0.0
    for kind, announced in KINDS.items():
        entry = Announcement("a", kind, 1 << 50, {"x": digits[: announced.at_most]}, bytes(71))
        news = json.dumps([entry.table()]).encode()
        prices += announced.per_second * (links._FRAME_BYTES + len(frames.news(news)) + len(news))
    assert 2 * prices < links._NEWS_BYTES_PER_S


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("kind", ["facts", "table"])
def test_sites_that_are_told_different_data_under_one_number_all_believe_the_same(boards, kind):
    """Else each waits for the other, and neither for the one that has told them different things."""
    first, second = SOUND[kind], SOUND[kind] | {"facts": {"samples": 9}, "table": {"fitted_by": ["b"]}}[kind]
    for body, receiver in ((first, "b"), (second, "c")):
        boards["a"]._known.pop(("a", kind), None)
        boards["a"].announce(kind, body, 5)
        pass_on(boards, "a", receiver)
    assert boards["b"].of("a", kind) != boards["c"].of("a", kind)
    pass_on(boards, "b", "c")
    pass_on(boards, "c", "b")
    assert boards["b"].of("a", kind) == boards["c"].of("a", kind)
