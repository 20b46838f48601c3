"""What to know of a node and what to do now, in one sentence, from its status alone; then what else there is to say.

What other sites tell are claims: the sentences say whose. Waits are counted by a clock that nobody sets, and how old a
report is by when it arrived here, so that a wrong clock at one site changes no number."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairmesh.errors import duration, listed, named
from fairmesh.mesh.node import claims, life
from fairmesh.mesh.wire import greeting
from fairmesh.metrics.units import Unit
from fairmesh.training.rounds_per_second import left_in_words

FINE, LOOK, ACT = "fine", "look", "act"
HANGS_S = 30.0  # without a new status
_SILENT_S, _SILENT_S_PER_SITE = 60.0, 0.2  # without a report, or twice as long as the site said it might be quiet
_LONG_S = 120.0  # of a wait, from which somebody should act
_NAMED = 4  # sites in the sentence at most
_CERTIFICATE_DAYS = 14.0


class Now(NamedTuple):
    """What to know and to do now, and whether somebody must do something: "fine", "look" or "act"."""

    sentence: str
    urgency: str


def now(seen: Mapping[str, Any], at: float, site: Path | str = "SITE") -> Now:
    """Returns what to know and to do now.

    Args:
        seen: A status as `live_status` returns it.
        at: What time it is, in seconds since the epoch.
        site: The site's file, for the commands that the sentence names. Default: "SITE".
    """
    age, state = age_of(seen, at), life.state_in(seen["activity"])
    if "sites" not in seen:
        return Now(f"this node was started {duration(age)} ago: {life.STATES[life.STARTING].means}", FINE)
    if state == life.FINISHED:
        return Now(f"finished after {seen['rounds']:,} rounds; every site has the result", FINE)
    if not seen["running"]:
        return _ended(seen, age, site)
    if state == life.STARTING:
        where = f"in round {seen['round']:,} of {seen['rounds']:,}"
        return Now(f"this node is starting: {life.STATES[life.STARTING].means}; before, it was {where}", FINE)
    if age >= HANGS_S:
        said = f"its process runs, but has written nothing for {duration(age)}"
        return Now(f"{said}: it hangs, its disk is full, or this machine's clock was set", ACT)
    for look in (_disk, _diverged_here, _keys, _lost, _claimed):
        if said := look(seen, site):
            return Now(said, ACT)
    return _IN_STATE.get(state, _at_other_work)(seen, age, site)


def age_of(seen: Mapping[str, Any], at: float) -> float:
    """Returns how many seconds old a status is; 0 if its time is to come, by a clock that was set."""
    return max(0.0, at - seen["time"])


def is_silent(told: Mapping[str, Any], sites: int) -> bool:
    """Returns whether a site's last report is older than it can be while its node runs.

    Args:
        told: What a status has of the site.
        sites: How many sites there are.
    """
    return told["heard_s_ago"] > max(_SILENT_S, 2 * told["again_s"]) + _SILENT_S_PER_SITE * sites


def unit_of(seen: Mapping[str, Any]) -> Unit:
    """Returns how the metric of a status is shown."""
    unit = seen.get("unit") or {"share": False}
    return Unit.of(str(seen["metric_name"]), unit)


def worst_site(seen: Mapping[str, Any]) -> str | None:
    """Returns the site whose newest metric is the worst; None if no site has told one."""
    values = {name: told["metric"] for name, told in seen["sites"].items() if told and told.get("metric") is not None}
    choose = min if seen.get("higher_is_better", True) else max
    return choose(values, key=values.__getitem__, default=None)


# The sentence


def _ended(seen: Mapping[str, Any], age: float, site: Path | str) -> Now:
    """Says of a node that has ended early how, and what to do."""
    ended, where = seen.get("ended"), f"in round {seen['round']:,} of {seen['rounds']:,}, {duration(age)} ago"
    again = "submit its job again" if seen.get("engine") else f"start it again: fairmesh node {site}"
    if life.state_in(seen["activity"]) == life.NOT_RUNNING or not ended:
        return Now(f"this node is not running: it was killed or has failed {where}; look at its log, and {again}", ACT)
    if ended["diverged"]:
        return Now(f"this node has ended {where}, since its numbers have diverged: {ended['reason']}", ACT)
    return Now(f"this node was stopped {where}; nothing is lost; {again}", ACT)


def _disk(seen: Mapping[str, Any], site: Path | str) -> str:
    slow = life.state_in(seen["activity"]) == life.SLOW_DISK
    return "this node waits for its disk, which does not answer: check it; nothing is lost" if slow else ""


def _diverged_here(seen: Mapping[str, Any], site: Path | str) -> str:
    if life.state_in(seen["activity"]) != life.DIVERGED:
        return ""
    return "the numbers of this site have diverged: its node tells the others, and then ends with what to do"


def _keys(seen: Mapping[str, Any], site: Path | str) -> str:
    for name, key in seen["keys"].items():
        if key["unconfirmed"]:
            return _new_key(name, key, site)
    ended = seen["certificate_days"] < 0
    return "this site's certificate has ended, so that nobody talks to it: renew it" if ended else ""


def _new_key(name: str, key: Mapping[str, Any], site: Path | str) -> str:
    return (
        f"{name} has a new key, {key['unconfirmed']}, instead of {key['fingerprint']}: let {name} read it out, "
        f'then run: fairmesh mesh trust {site} {name} "{key["unconfirmed"]}"'
    )


def _lost(seen: Mapping[str, Any], site: Path | str) -> str:
    if life.state_in(seen["activity"]) != life.LOST:
        return ""
    return (
        "this site has lost its state, and waits until all others vote to restore it: let each of them run fairmesh "
        f"mesh restore with the name {seen['site']}"
    )


def _claimed(seen: Mapping[str, Any], site: Path | str) -> str:
    """Says in short what others claim about this site, or about themselves, that stops the run."""
    lost = sorted({claim["by"] for claim in seen["state_lost"]})
    if lost:
        what = f"according to {listed(lost, _NAMED)}, this site has lost its state"
        return f"{what}: leave the state folder as it is, and read what else is said about it"
    refusing = sorted({claim["by"] for claim in seen["refusing"] if claim["site"] == seen["site"] != claim["by"]})
    if refusing and seen["paused_for"]:
        return f"this site's messages are refused by {listed(refusing, _NAMED)}, and the run waits: ask there why"
    diverged = [claim["by"] for claim in seen["diverged"]]
    if diverged and seen["paused_for"]:
        return (
            f"according to {listed(diverged, _NAMED)}, the numbers there have diverged; the run waits until somebody "
            "acts there, or all others vote to go on without it"
        )
    return ""


def _on_data(seen: Mapping[str, Any], age: float, site: Path | str) -> Now:
    if seen["unaccepted"]:
        names, first = listed(seen["unaccepted"], _NAMED), seen["unaccepted"][0]
        accept = f"fairmesh mesh accept {site} {first}"
        return Now(f"this node waits until somebody here accepts the data of {names}; if it is right: {accept}", ACT)
    if any(not seen["sites"].get(name) for name in _missing(seen)):
        return _for_missing(seen, age, "the run begins when all sites are there")
    return _at_other_work(seen, age, site)


def _in_rounds(seen: Mapping[str, Any], age: float, site: Path | str) -> Now:
    if seen["unconfirmed_wait"] and seen["paused_for"]:
        waited = f"{seen['unconfirmed_wait']}; this run has waited for {_waited(seen, age)}"
        return _lasting(waited, _waited_s(seen, age), "look at both of these sites, and at their connection")
    if seen["paused_for"]:
        return _paused(seen, age)
    state, done = life.state_in(seen["activity"]), f"round {seen['round']:,} of {seen['rounds']:,}"
    if state == life.LOCAL_TRAINING:
        done = f"{seen['activity']}; {done}"
    left = seen["seconds_left"]
    done += "" if left is None else f", {left_in_words(left - age)}"
    return Now(f"{done}{_worst(seen)}", FINE)


def _worst(seen: Mapping[str, Any]) -> str:
    """Returns which site is the worst, and whether that is its own word; "" if no site has measured."""
    name = worst_site(seen)
    if name is None:
        return ""
    told, claimed = seen["sites"][name], "" if name == seen["site"] else " by its own word"
    return f"; worst {named(name)}, {unit_of(seen).with_interval(told['metric'], told.get('interval'))}{claimed}"


def _paused(seen: Mapping[str, Any], age: float) -> Now:
    """Says for whom the run waits, and why, as far as it is known here."""
    chain = seen["waiting_chain"]
    last, told = chain[-1], seen["sites"].get(chain[-1]) or {}
    lasting = paused_s(seen) + age
    through = f"; this node waits for {', which waits for '.join(chain[1:])}" if len(chain) > 2 else ""
    activity = told.get("activity", "")
    if is_away(last, seen):
        if last not in seen["edges"] and told:
            lasting = max(lasting, told["heard_s_ago"] + age)
        others = [name for name in seen["sites"] if name not in (last, seen["site"]) and is_away(name, seen)]
        away = [last, *(name for name in others if _away_s(name, seen) + age >= lasting / 2)]
        how = f"{_all(away)} {_have(away)} been unreachable for {duration(lasting)}{through}"
        return _lasting(f"{how}; nothing is lost", lasting, f"call {_operators(away)}")
    state = life.state_in(activity)
    if state and life.STATES[state].may_take_long:
        return Now(f"this run waits for {last}, which says that it is {activity}{through}; nothing to do", FINE)
    if _repeats(last, seen):
        done = f"round {told['round']:,} of the {seen['round']:,} that are done here"
        return Now(f"{last} is back and repeats rounds: {done}{through}; nothing to do", FINE)
    says = f"is there and says that it is {activity}" if activity else "is there"
    how = f"this run has waited for {last} for {duration(lasting)}{through}; {last} {says}"
    return _lasting(f"{how}; nothing is lost", lasting, "ask its operator")


def paused_s(seen: Mapping[str, Any]) -> float:
    """Returns for how many seconds this node has waited for the first site of its chain."""
    since = seen["waiting_for"].get(seen["paused_for"][0], seen["time"]) if seen["paused_for"] else seen["time"]
    return max(0.0, seen["time"] - since)


def _voting(seen: Mapping[str, Any], age: float, site: Path | str) -> Now:
    own = [decision for decision, voters in seen["votes"].items() if seen["site"] in voters]
    what = f"this site has voted to {own[0]}" if own else "this site has voted"
    whom = _all(_missing(seen) or ["the others"])
    waited = f"the run has waited for the same vote of {whom} for {_waited(seen, age)}"
    return _lasting(f"{what}; {waited}", _waited_s(seen, age), "ask there")


def _deciding(seen: Mapping[str, Any], age: float, site: Path | str) -> Now:
    missing = _missing(seen)
    if not missing:
        return Now("the sites have voted, and their nodes carry it out; nothing to do", FINE)
    waited = f"their nodes have waited for {_all(missing)} for {_waited(seen, age)}"
    return _lasting(f"the sites have voted; {waited}", _waited_s(seen, age), short=FINE)


def _at_the_end(seen: Mapping[str, Any], age: float, site: Path | str) -> Now:
    done = f"all {seen['rounds']:,} rounds are done"
    if _missing(seen):
        return _for_missing(seen, age, done)
    phase = seen["phase"]
    doing = f"this node is {seen['activity']}"
    if phase and phase["what"] == life.COMPARING:
        doing = f"this site trains a model alone, to compare: {phase['done']:,} of {phase['of']:,} rounds"
    return Now(f"{done}; {doing}; let it run until it has finished", FINE)


def _at_other_work(seen: Mapping[str, Any], age: float, site: Path | str) -> Now:
    if _missing(seen):
        return _for_missing(seen, age, f"this node is {seen['activity']}")
    return Now(f"this node is {seen['activity']}; nothing to do", FINE)


def _missing(seen: Mapping[str, Any]) -> Sequence[str]:
    return (seen.get("missing") or {"sites": ()})["sites"]


def _for_missing(seen: Mapping[str, Any], age: float, what: str) -> Now:
    """Says whose announcements this node waits for, and why they do not come, as far as it is known here."""
    missing = _missing(seen)
    never = [name for name in missing if name in seen["sites"] and not seen["sites"][name]]
    silent = [name for name in missing if name not in never and is_away(name, seen)]
    if not never and not silent:
        return _for_present(seen, age, what)
    parts, lasting = [what], _waited_s(seen, age)
    if never:
        parts.append(f"{_all(never)} {_have(never)} not been heard of for {duration(lasting)}")
    if silent:
        longest = max(seen["sites"][name]["heard_s_ago"] for name in silent) + age
        parts += [f"{_all(silent)} {_have(silent)} been unreachable for {duration(longest)}", "nothing is lost"]
        lasting = max(lasting, longest)
    nodes = "its node runs" if len(never) == 1 else "their nodes run"
    operators = _operators([*never, *silent])
    return _lasting("; ".join(parts), lasting, f"call {operators}" if silent else f"ask {operators} whether {nodes}")


def _for_present(seen: Mapping[str, Any], age: float, what: str) -> Now:
    """Says for which sites this node waits that are there. Some of their work takes long."""
    missing = _missing(seen)
    states = [life.state_in((seen["sites"].get(name) or {}).get("activity", "")) for name in missing]
    said = f"{what}; this node has waited for {_all(missing)} for {_waited(seen, age)}"
    if all(state and life.STATES[state].may_take_long for state in states):
        whose = "which says" if len(missing) == 1 else "which say"
        return Now(f"{said}, {whose} that this takes long: {_all(list(dict.fromkeys(states)))}; nothing to do", FINE)
    return _lasting(said, _waited_s(seen, age), short=FINE)


def is_away(name: str, seen: Mapping[str, Any]) -> bool:
    """Returns whether a site is not there, as far as it is seen here: a neighbour that is not connected, or another
    site that is silent or was never heard of.

    Args:
        name: The site. One that is not of the mesh, such as "the others", is not away.
        seen: A status as `live_status` returns it.
    """
    if name in seen["edges"]:
        return not seen["edges"][name]["connected"]
    told = seen["sites"].get(name)
    return name in seen["sites"] and (not told or is_silent(told, len(seen["sites"])))


def _away_s(name: str, seen: Mapping[str, Any]) -> float:
    """Returns for how many seconds a site that is away had not been there when a status was written."""
    told, last_seen = seen["sites"].get(name), seen["edges"].get(name, {}).get("last_seen")
    if last_seen is not None:
        return seen["time"] - last_seen
    return told["heard_s_ago"] if told else math.inf


def _repeats(name: str, seen: Mapping[str, Any]) -> bool:
    """Returns whether a site is further behind than a site that waits can be, since its node was started again, and
    gets on with rounds that it had done before, as far as it says."""
    told, apart = seen["sites"].get(name) or {}, 1 if name in seen["edges"] else len(seen["sites"])
    grew = told.get("repeats_s_ago")
    return grew is not None and grew < 2 * told["again_s"] + HANGS_S and told["round"] < seen["round"] - apart


def _all(names: Sequence[str]) -> str:
    """Returns some names in a sentence, of many the first few."""
    if len(names) > _NAMED:
        return listed(names, _NAMED)
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _operators(names: Sequence[str]) -> str:
    return "its operator" if len(names) == 1 else "their operators"


def _waited_s(seen: Mapping[str, Any], age: float) -> float:
    """Returns for how many seconds this node has waited for what is missing, or in the rounds."""
    missing = seen.get("missing")
    return age + (missing["seconds"] if missing else paused_s(seen))


def _waited(seen: Mapping[str, Any], age: float) -> str:
    return duration(_waited_s(seen, age))


def _lasting(sentence: str, seconds: float, advice: str = "", short: str = LOOK) -> Now:
    """Says something about a wait. Once it is long, somebody should do what is advised."""
    long = seconds >= _LONG_S
    asked = advice if long or not advice else f"if this lasts, {advice}"
    return Now("; ".join(filter(None, (sentence, asked))), ACT if long else short)


_IN_STATE: dict[str, Callable[[Mapping[str, Any], float, Path | str], Now]] = {
    life.ON_DATA: _on_data,
    life.TRAINING: _in_rounds,
    life.LOCAL_TRAINING: _in_rounds,
    life.VOTING: _voting,
    life.DECIDING: _deciding,
    **dict.fromkeys(
        (life.COLLECTING, life.SUMMING, life.CONFIRMING, life.COMPARING, life.COMPARED, life.CHOOSING, life.ENDING),
        _at_the_end,
    ),
}


# What else there is to say


def further(seen: Mapping[str, Any], site: Path | str) -> Iterator[str]:
    """Yields what a status says besides its sentence and tables, with what to do about it.

    Args:
        seen: A status as `live_status` returns it, of a node that has begun.
        site: The site's file, for the commands that the sentences name.
    """
    yield from claims.sentences(seen).values()
    yield from few_of_a_kind([claims.diverged(claim) for claim in seen["diverged"]])
    yield from few_of_a_kind([claims.contradicted(claim, seen["site"]) for claim in seen["contradicted"]])
    yield from few_of_a_kind([claims.unsigned(claim) for claim in seen["unsigned"]])
    others = [f"{version} at {name}" for name, version in seen["versions"].items() if version != seen["version"]]
    if others:
        yield f"versions of fairmesh differ, and are compatible: {seen['version']} here, {listed(others)}"
    yield from greeting.clock_advice(seen["clocks"], len(seen["edges"]))
    if 0 <= seen["certificate_days"] < _CERTIFICATE_DAYS:
        yield f"this site's certificate ends in {seen['certificate_days']:.0f} days: renew it"
    yield from _about_sites(seen, site)
    yield from (f"votes to {decision}: {listed(sorted(voters), 10)}" for decision, voters in seen["votes"].items())
    if seen["paused_for"] and len(seen["waiting_chain"]) > 2:
        chain = " waits for ".join([seen["waiting_chain"][0], ", which waits for ".join(seen["waiting_chain"][1:])])
        yield f"{chain}: look at {seen['waiting_chain'][-1]} first"
    if seen["unconfirmed_wait"]:
        yield f"{seen['unconfirmed_wait']}: look at both of these sites, and at the connection between them"


def few_of_a_kind(sentences: Sequence[str]) -> list[str]:
    """Returns sentences of one kind about sites; of more than a dozen, ten and how many more there are."""
    if len(sentences) <= 12:
        return list(sentences)
    return [*sentences[:10], f"... and {len(sentences) - 10} more like this; fairmesh status --json has all"]


def _about_sites(seen: Mapping[str, Any], site: Path | str) -> Iterator[str]:
    """Yields what a status says about keys, data and weights of single sites, with what to do about it."""
    yield from (_new_key(name, key, site) for name, key in seen["keys"].items() if key["unconfirmed"])
    yield from few_of_a_kind([f"{name}: {'; '.join(reasons)}" for name, reasons in seen["ignored"].items()])
    whose = {name: "this site's data" if name == seen["site"] else f"the data of {name}" for name in seen["unusual"]}
    unusual = "{} looks different from that of the other sites: {}"
    yield from few_of_a_kind([unusual.format(whose[name], "; ".join(why)) for name, why in seen["unusual"].items()])
    for name in seen["unaccepted"]:
        yield f"this node waits; if the data of {name} is right, accept it: fairmesh mesh accept {site} {name}"
    for name, heavy in seen["heavy"].items():
        yield (
            f"{name} has {heavy['weight']:.0%} of the weight since round {heavy['since']}, and {heavy['prior']:.0%} "
            "before training: it is hard to learn, or its data is broken; ask it to check its data"
        )
