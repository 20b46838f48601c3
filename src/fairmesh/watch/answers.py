"""The five questions that whoever looks at a run has, with their answers in words."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from fairmesh.errors import counted, duration, in_bytes, listed
from fairmesh.mesh.node.life import STARTING
from fairmesh.training.rounds_per_second import left_in_words, rate_in_words
from fairmesh.watch.now import GONE, UNSEEN
from fairmesh.watch.view import Missing, Site, View, Wait

Tone = Literal["", "good", "look", "bad"]
_SHORT_S = 20.0  # waits that are part of every round
_NAMED = 4
_AWAY = ("silent", "unreachable")
_NOT_THERE = (*_AWAY, "unknown")
_ENDED_EARLY = ("died", "stopped", "diverged")


class Answer(NamedTuple):
    """A question, the answer in a few words, what explains it, and whether it is good news."""

    question: str
    answer: str
    detail: str = ""
    tone: Tone = ""


def answers(view: View) -> Iterator[Answer]:
    """Yields the questions and their answers, in the order in which they are asked."""
    yield _running(view)
    yield _held_up(view)
    yield _worth(view)
    yield _to_do(view)
    yield _left(view)


def wait_in_words(view: View, wait: Wait) -> str:
    """Returns who has waited for whom and how long, and whether that is only what the site says."""
    who, whom = (view.sites[i].name for i in (wait.site, wait.awaited))
    says = "" if wait.seen else "says that it "
    return f"{who} {says}has waited for {whom} for {duration(wait.seconds)}"


def long_waits(view: View) -> list[Wait]:
    """Returns who waits for longer than sites wait in every round, the longest first."""
    return sorted((wait for wait in view.waits if wait.seconds >= _SHORT_S), key=lambda wait: -wait.seconds)


def _running(view: View) -> Answer:
    question = "Is it running?"
    of = f" of {view.rounds:,}" if view.rounds else ""
    at = f"round {view.round:,}{of}"
    if not view.live:
        return _not_running(question, view, at)
    if view.quiet:
        return Answer(question, f"Perhaps: no news for {duration(view.age_s or 0.0)}", at, "look")
    speed = rate_in_words(view.rounds_per_s) if view.rounds_per_s else ""
    left = left_in_words(view.seconds_left) if view.seconds_left is not None else ""
    if view.phase:
        done = f", {view.phase.done:,} of {view.phase.of:,}" if view.phase.of and view.phase.done is not None else ""
        at = f"{view.phase.name}{done}; {at}"
    missing = _holding_up(view)
    if missing:
        at = f"for {listed([view.sites[i].name for i in missing.sites], _NAMED)}; {at}"
    detail = ", ".join(filter(None, (at, speed, left)))
    if len(view.chain) > 1 or missing or view.urgency == "act":
        return Answer(
            question, "Yes, but it does not go on" if view.urgency == "act" else "Yes, but it waits", detail, "look"
        )
    return Answer(question, f"Yes: {view.state}", detail, "good")


def _not_running(question: str, view: View, at: str) -> Answer:
    if view.state in (UNSEEN, GONE):
        return Answer(question, "Not known", f"{at} when it was seen last" if view.round else "", "look")
    failed = view.state not in ("finished", "ended")
    return Answer(question, f"No: {view.state}", f"{at} done" if view.round else "", "bad" if failed else "good")


def _held_up(view: View) -> Answer:
    question, sites = "Who holds it up?", view.sites
    if view.state in (UNSEEN, GONE):
        return Answer(question, "Not known", "", "look")
    if not view.live:
        if any(site.own and site.state in _ENDED_EARLY for site in sites):
            return Answer(question, "This site", "The others wait for it.", "bad")
        return Answer(question, "Nobody", "Nothing runs.")
    if view.kind == "node" and view.state == STARTING:
        return Answer(question, "Not known yet", "This site's node is starting.")
    if len(view.chain) > 1:
        return _at_its_end(question, view)
    if missing := _holding_up(view):
        return _missing(question, view, missing)
    if waits := long_waits(view):
        awaited = list(dict.fromkeys(sites[wait.awaited].name for wait in waits))
        return Answer(question, listed(awaited, _NAMED), wait_in_words(view, waits[0]), "look")
    away = [site.name for site in sites if site.state in _AWAY]
    if away:
        return Answer(question, "Nobody yet", f"Not heard of: {listed(away, _NAMED)}", "look")
    return Answer(question, "Nobody", "No site waits for long." if view.kind == "node" else "", "good")


def _at_its_end(question: str, view: View) -> Answer:
    """Names the site at the end of the chain of those that wait, and all others that are away as it is."""
    last = view.sites[view.chain[-1]]
    away = [site.name for site in view.sites if last.state in _NOT_THERE and site.state in _NOT_THERE]
    lasting = [wait.seconds for wait in view.waits if (wait.site, wait.awaited) == tuple(view.chain[:2])]
    names = [view.sites[i].name for i in view.chain]
    said = [f"{who} waits for {whom}" for who, whom in pairwise(names)]
    if lasting:
        said[0] = f"{names[0]} has waited for {names[1]} for {duration(lasting[0])}"
    return Answer(question, listed(dict.fromkeys([last.name, *away]), _NAMED), "; ".join(said), _tone(last))


def _holding_up(view: View) -> Missing | None:
    """Returns whom this node waits for outside the rounds, if that is not a short wait between two of its tasks."""
    missing = view.missing
    return missing if missing and (missing.seconds >= _SHORT_S or not view.round) else None


def _missing(question: str, view: View, missing: Missing) -> Answer:
    sites, lasting = [view.sites[i] for i in missing.sites], duration(missing.seconds)
    own = next((site.name for site in view.sites if site.own), "this node")
    away = [site.name for site in sites if site.state in _NOT_THERE]
    said = f"{own} has waited for {lasting}" + (f"; not heard of: {listed(away, _NAMED)}" if away else "")
    return Answer(question, listed([site.name for site in sites], _NAMED), said, "bad" if away else "look")


def _tone(site: Site) -> Tone:
    return "bad" if site.state in (*_AWAY, "diverged") else "look"


def _worth(view: View) -> Answer:
    own = next((site for site in view.sites if site.own), None)
    if own is not None:
        return _worth_here("Is it worth it for us?", view, own)
    question = "Is it worth it for the sites?"
    for against in ("alone", "fixed weights"):
        if compared := [site for site in view.sites if any(one.against == against for one in site.verdicts)]:
            return _worth_against(question, against, compared)
    if view.metric is None and view.state in (UNSEEN, GONE):
        return Answer(question, "Not known", "This folder does not say how its measurements are to be read.", "look")
    if view.metric is None or view.worst is None:
        return Answer(question, "Not known yet", "No site has measured the model.")
    worst = "" if view.worst_site is None else f" at {view.sites[view.worst_site].name}"
    mean = "" if view.mean is None else f"; mean {view.metric.shown(view.mean.value)}"
    return Answer(
        question,
        "Not known yet",
        f"Worst{worst}: {view.metric.with_interval(view.worst.value, view.worst.interval)}{mean}",
    )


def _worth_against(question: str, against: str, compared: Sequence[Site]) -> Answer:
    found = {site.name: one.verdict for site in compared for one in site.verdicts if one.against == against}
    better, worse = ([name for name, verdict in found.items() if verdict == kind] for kind in ("better", "worse"))
    sites = counted(len(found), "site")
    if not better and not worse:
        return Answer(question, f"No clear difference from {against}", f"At none of {sites}.")
    answer = f"Better than {against} at {len(better)} of {sites}"
    if worse:
        return Answer(question, answer, f"Worse at {listed(worse, _NAMED)}.", "look")
    return Answer(question, answer, "", "good")


def _worth_here(question: str, view: View, own: Site) -> Answer:
    here = "not measured yet"
    if own.value is not None and view.metric is not None:
        here = f"{view.metric.metric} here {view.metric.with_interval(own.value.value, own.value.interval)}"
        if own.alone is not None and view.metric is not None:
            here += f", alone {view.metric.shown(own.alone.value)}"
    if not own.verdicts:
        return Answer(question, "Not known yet", f"{here}; compared with alone at the end" if view.live else here)
    first, *others = own.verdicts
    tone: dict[str, Tone] = {"better": "good", "worse": "bad"}
    uses = f"model to use: {own.uses}" if own.uses else ""
    more: Sequence[str] = [*(verdict.text for verdict in others), here, *filter(None, [uses])]
    answer = {"better": "Yes: ", "worse": "No: ", "unclear": ""}[first.verdict] + first.text
    return Answer(question, f"{answer[:1].upper()}{answer[1:]}", "; ".join(more), tone.get(first.verdict, ""))


def _to_do(view: View) -> Answer:
    question, first = "What should I do now?", next(iter(view.says), "")
    if view.urgency == "act":
        return Answer(question, "Act now", view.sentence, "bad")
    if view.urgency == "look":
        return Answer(question, "Keep an eye on it", view.sentence, "look")
    if view.pending:
        return Answer(question, "Not known yet", first)
    return Answer(question, view.advice or "Nothing", first, "good")


def _left(view: View) -> Answer:
    node, traffic = view.kind == "node", view.traffic
    question = "How much has left this site?" if node else "How much leaves a site?"
    privacy = ""
    if view.privacy is not None:
        spent = "not known yet" if view.privacy.epsilon is None else f"{view.privacy.epsilon:.3g}"
        privacy = f"epsilon {spent} of {view.privacy.budget:g} spent"
    if traffic is None or traffic.sent is None:
        return Answer(question, "Not known yet", privacy)
    if node and traffic.on_the_wire is not None:
        said = f"of it {in_bytes(traffic.sent)} model messages; no rows"
        return Answer(question, in_bytes(traffic.on_the_wire), "; ".join(filter(None, (said, privacy))))
    total = f"{in_bytes(traffic.total)} of all sites together" if traffic.total is not None else ""
    said = f"model messages by {traffic.whose}; no rows"
    return Answer(question, in_bytes(traffic.sent), "; ".join(filter(None, (said, total, privacy))))
