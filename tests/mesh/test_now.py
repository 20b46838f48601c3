"""The sentence on what to know of a node and what to do now."""

import re

import pytest

from fairmesh.mesh.node import life
from fairmesh.mesh.node.now import ACT, FINE, LOOK, further, now
from fairmesh.mesh.node.oversight import Repetition
from tests.mesh.statuses import NAMES, NOW, seen, told, waiting
from tests.refusals import missing_from

ENDED = {"running": False}
CUT = {"connected": False, "last_seen": NOW - 720, "bytes_out": 1, "bytes_in": 1}
WORKS = told("north", activity="local training of round 7 at north since 2030-03-17 17:00:00")
LOST = {"by": "north", "reason": "round 3 after round 1840", "since": NOW - 9}
REFUSED = {"by": "north", "site": "west", "reason": "large", "since": NOW, "step": 1, "digest": "d", "sent": None}
DIVERGED = {"by": "south", "since": 1800, "round": 1840, "what": "nan", "kept": [1500], "generation": 1}
KEY = {"north": {"fingerprint": "aa", "unconfirmed": "bb"}}


def _edges(**cut) -> dict:
    return seen()["edges"] | cut


@pytest.mark.parametrize(
    ("status", "urgency", "words"),
    [
        (seen(), FINE, ["round 1,840 of 4,000", "about 25 minutes left", "worst site north, 71.0 % by its own word"]),
        (seen(higher_is_better=False), FINE, ["worst site west, 84.0 %"]),
        (seen(seconds_left=None, rounds_per_s=None, sites={n: {} for n in NAMES}), FINE, ["round 1,840 of 4,000"]),
        (
            waiting("north", edges=_edges(north=CUT)),
            ACT,
            ["north has been unreachable for 12 minutes", "nothing is lost"],
        ),
        (
            waiting("north", seconds=9, edges=_edges(north=CUT)),
            LOOK,
            ["unreachable for 9 seconds; nothing is lost; if this lasts, call its operator"],
        ),
        (
            waiting("north", edges=_edges(north=CUT, south=CUT)),
            ACT,
            ["north and south have been unreachable for 12 minutes; nothing is lost; call their operators"],
        ),
        (
            waiting("north", edges=_edges(north=CUT, south=CUT | {"last_seen": NOW - 2})),
            ACT,
            ["north has been unreachable for 12 minutes; nothing is lost; call its operator"],
        ),
        (waiting("north", "east"), ACT, ["waited for east for 12 minutes", "waits for north, which waits for east"]),
        (
            waiting("north", "east", sites=seen()["sites"] | {"east": told("east", heard_s_ago=730.0)}),
            ACT,
            ["east has been unreachable for 12 minutes", "this node waits for north", "call its operator"],
        ),
        (waiting("north", "east", sites=seen()["sites"] | {"east": {}}), ACT, ["east has been unreachable"]),
        (waiting("north", sites=seen()["sites"] | {"north": WORKS}), FINE, ["north", "says that it is local training"]),
        (waiting("north", seconds=6), LOOK, ["waited for north for 6 seconds", "is there and says", "if this lasts"]),
        (waiting("north", unconfirmed_wait="north says A, which denies it"), ACT, ["north says A", "both of these"]),
        (waiting("south", diverged=[DIVERGED]), ACT, ["according to south", "diverged", "vote"]),
        (waiting("north", refusing=[REFUSED]), ACT, ["messages are refused by north"]),
        (seen(refusing=[REFUSED], diverged=[DIVERGED]), FINE, ["round 1,840"]),  # claims that stop nothing
        (waiting("north", state_lost=[LOST]), ACT, ["according to north", "lost its state"]),
        (seen(keys=KEY), ACT, ['fairmesh mesh trust a/site.toml north "bb"']),
        (seen(certificate_days=-1.0), ACT, ["certificate has ended"]),
        (seen(time=NOW - 600), ACT, ["written nothing for 10 minutes"]),
        (seen(**ENDED, activity="stopped", time=NOW - 600), ACT, ["10 minutes ago", "fairmesh node a/site.toml"]),
        (
            seen(**ENDED, activity="stopped", ended={"reason": "stopped after round 9", "diverged": False}),
            ACT,
            ["was stopped in round 1,840", "nothing is lost", "fairmesh node a/site.toml"],
        ),
        (
            seen(**ENDED, activity="stopped", ended={"reason": "aborted", "diverged": False}, engine="nvflare"),
            ACT,
            ["was stopped in round 1,840", "nothing is lost; submit its job again"],
        ),
        (
            seen(**ENDED, activity="stopped", ended={"reason": "compare the units", "diverged": True}),
            ACT,
            ["diverged", "compare the units"],
        ),
        (seen(**ENDED, activity=life.described(life.NOT_RUNNING)), ACT, ["killed or has failed", "look at its log"]),
        (
            {"time": NOW - 5, "running": True, "activity": life.described(life.STARTING)},
            FINE,
            ["5 seconds ago", "imports"],
        ),
        (
            seen(activity=life.ON_DATA, unaccepted=["east"], missing={"sites": ["west"], "seconds": 5.0}),
            ACT,
            ["accepts the data of east", "fairmesh mesh accept a/site.toml east"],
        ),
        (
            seen(
                activity=life.ON_DATA,
                sites=seen()["sites"] | {"east": {}},
                missing={"sites": ["east"], "seconds": 300.0},
            ),
            ACT,
            ["east has not been heard of for 5 minutes; ask its operator whether its node runs"],
        ),
        (
            seen(activity=life.VOTING, votes={"remove east": ["west"]}, missing={"sites": ["south"], "seconds": 4.0}),
            LOOK,
            ["this site has voted to remove east", "south"],
        ),
        (seen(activity=life.COLLECTING, missing={"sites": ["east"], "seconds": 4.0}), FINE, ["all 4,000", "east"]),
        (seen(activity=life.COLLECTING, missing={"sites": ["east"], "seconds": 900.0}), ACT, ["15 minutes"]),
        (
            seen(
                activity=life.ON_DATA,
                sites=seen()["sites"] | {"east": {}, "south": {}},
                missing={"sites": ["south", "east"], "seconds": 9.0},
            ),
            LOOK,
            ["south and east have not been heard of for 9 seconds; if this lasts, ask their operators whether their"],
        ),
        (
            seen(
                activity=life.COMPARED,
                sites=seen()["sites"] | {"south": told("south", heard_s_ago=840.0)},
                edges=_edges(south=CUT),
                missing={"sites": ["south"], "seconds": 100.0},
            ),
            ACT,
            ["south has been unreachable for 14 minutes; nothing is lost; call its operator"],
        ),
        (
            seen(
                activity=life.COMPARED,
                sites=seen()["sites"] | {"south": told("south", activity=life.COMPARING)},
                missing={"sites": ["south"], "seconds": 900.0},
            ),
            FINE,
            ["waited for south for 15 minutes", "comparing with this site alone; nothing to do"],
        ),
        (
            seen(
                activity=life.described(life.COMPARING, "4,832 of 20,000 rounds"),
                phase={"what": life.COMPARING, "done": 4832, "of": 20_000},
            ),
            FINE,
            ["this site trains a model alone, to compare: 4,832 of 20,000 rounds; let it run"],
        ),
        (
            waiting("north", sites=seen()["sites"] | {"north": told("north", round=900, repeats_s_ago=2.0)}),
            FINE,
            ["north is back and repeats rounds: round 900 of the 1,840", "nothing to do"],
        ),
        (
            waiting("north", sites=seen()["sites"] | {"north": told("north", round=900, repeats_s_ago=200.0)}),
            ACT,
            ["north is there and says", "ask its operator"],
        ),
    ],
)
@pytest.mark.quick_cases("all")
def test_sentence_says_what_is_and_what_to_do(status, urgency, words):
    said = now(status, NOW, "a/site.toml")
    assert missing_from(said.sentence, *words) == []
    assert said.urgency == urgency, said.sentence


@pytest.mark.parametrize("state", life.STATES)
@pytest.mark.quick_cases("all")
def test_every_state_has_a_sentence_of_its_own_whoever_is_missing(state):
    running = state not in (life.STOPPED, life.NOT_RUNNING)
    activity = {"activity": life.described(state), "running": running}
    others = {now(seen(activity=life.described(other)), NOW).sentence for other in life.STATES if other != state}
    for missing in (None, {"sites": ["east"], "seconds": 3.0}, {"sites": ["the others"], "seconds": 3e9}):
        said = now(seen(**activity, missing=missing), NOW)
        assert said.urgency in (FINE, LOOK, ACT)
        assert said.sentence not in others or state == life.LOCAL_TRAINING
        assert "  " not in said.sentence
    assert (now(seen(**activity), NOW).urgency == ACT) == (state in MUST_ACT)


MUST_ACT = (life.STOPPED, life.NOT_RUNNING, life.SLOW_DISK, life.DIVERGED, life.LOST)


@pytest.mark.parametrize("wrong", [-1e9, -3600.0, 3600.0, 1e9, 1e300])
@pytest.mark.quick_cases("all")
def test_wrong_clock_at_a_site_makes_no_time_negative_or_long(wrong):
    east = told("east", time=NOW + wrong, waiting_for={"south": NOW + wrong - 5})
    for status in (seen(), waiting("north", "east"), waiting("north", edges=_edges(north=CUT | {"last_seen": wrong}))):
        status["sites"] = status["sites"] | {"east": east}
        said = " ".join([now(status, NOW).sentence, *further(status, "a/site.toml")])
        assert not re.search(r"-\d", said), said
        assert not re.search(r"day|year|hour", said), said


@pytest.mark.parametrize("age", [-1e9, -5.0])
def test_own_clock_that_was_set_back_makes_no_time_negative(age):
    for status in (seen(), waiting("north"), seen(**ENDED, activity="stopped")):
        assert "-" not in now(status, NOW + age).sentence


def test_site_repeats_rounds_while_it_gets_on_below_the_highest_that_it_has_announced():
    repetition = Repetition()
    assert [repetition.grew_s_ago(done) for done in (7, 9, 9, 3, 3)] == [None] * 5
    assert repetition.grew_s_ago(4) < 60
    repetition._grew_at -= 100
    assert repetition.grew_s_ago(4) >= 100
    assert [repetition.grew_s_ago(done) for done in (9, 10)] == [None] * 2


def test_what_further_is_said_has_claims_votes_keys_and_certificates_with_what_to_do():
    status = waiting("north", "east", votes={"remove east": ["south", "north"]}, certificate_days=3.2, keys=KEY)
    status |= {"versions": {"north": "2"}, "clocks": {"north": 300.0}, "unusual": {"east": ["its mean is far"]}}
    status |= {"heavy": {"north": {"weight": 0.8, "prior": 0.25, "since": 12, "round": 900}}, "diverged": [DIVERGED]}
    said = " | ".join(further(status, "a/site.toml"))
    words = [
        "votes to remove east: north, south",
        "ends in 3 days",
        "mesh trust",
        "2 at north",
        "clock",
        "its mean is far",
    ]
    assert missing_from(said, *words, "80% of the weight", "south says", "look at east first") == []
