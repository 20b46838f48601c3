"""The five questions that whoever looks at a run has, with their answers in words."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from fairmesh.errors import counted, duration, listed
from fairmesh.watch.view import Site, View, Wait

Tone = Literal["", "good", "look", "bad"]
_SHORT_S = 20.0  # waits that are part of every round
_NAMED = 4


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


def in_bytes(count: float) -> str:
    """Returns a number of bytes in words, such as "18.2 MB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:,.0f} {unit}"
    return counted(int(count), "byte")


def long_waits(view: View) -> list[Wait]:
    """Returns who waits for longer than sites wait in every round, the longest first."""
    return sorted((wait for wait in view.waits if wait.seconds >= _SHORT_S), key=lambda wait: -wait.seconds)


def _running(view: View) -> Answer:
    question = "Is it running?"
    of = f" of {view.rounds:,}" if view.rounds else ""
    at = f"round {view.round:,}{of}"
    if not view.live:
        failed = view.state not in ("finished", "ended")
        return Answer(question, f"No: {view.state}", f"{at} done" if view.round else "", "bad" if failed else "good")
    speed = f"{view.rounds_per_s:.3g} rounds per second" if view.rounds_per_s else ""
    left = f"about {duration(view.seconds_left)} left" if view.seconds_left is not None else ""
    if view.phase:
        done = f", {view.phase.done:,} of {view.phase.of:,}" if view.phase.of and view.phase.done is not None else ""
        at = f"{view.phase.name}{done}; {at}"
    detail = ", ".join(filter(None, (at, speed, left)))
    if len(view.chain) > 1 or view.urgency == "act":
        return Answer(
            question, "Yes, but it does not go on" if view.urgency == "act" else "Yes, but it waits", detail, "look"
        )
    return Answer(question, f"Yes: {view.state}", detail, "good")


def _held_up(view: View) -> Answer:
    question, sites = "Who holds it up?", view.sites
    if not view.live:
        return Answer(question, "Nobody", "Nothing runs.")
    if len(view.chain) > 1:
        last = sites[view.chain[-1]]
        by = " waits for ".join(sites[i].name for i in view.chain[:2])
        by += "".join(f", which waits for {sites[i].name}" for i in view.chain[2:])
        since = [wait.seconds for wait in view.waits if (wait.site, wait.awaited) == tuple(view.chain[:2])]
        return Answer(question, last.name, by + (f", since {duration(since[0])}" if since else ""), _tone(last))
    if waits := long_waits(view):
        awaited = list(dict.fromkeys(sites[wait.awaited].name for wait in waits))
        longest = waits[0]
        said = f"{sites[longest.site].name} {'waits' if longest.seen else 'says that it waits'} since"
        return Answer(question, listed(awaited, _NAMED), f"{said} {duration(longest.seconds)}", "look")
    quiet = [site.name for site in sites if site.state in ("silent", "unreachable")]
    if quiet:
        return Answer(question, "Nobody yet", f"Not heard of: {listed(quiet, _NAMED)}", "look")
    return Answer(question, "Nobody", "No site waits for long." if view.kind == "node" else "", "good")


def _tone(site: Site) -> Tone:
    return "bad" if site.state in ("unreachable", "silent", "diverged") else "look"


def _worth(view: View) -> Answer:
    own = next((site for site in view.sites if site.own), None)
    if own is not None:
        return _worth_here("Is it worth it for us?", view, own)
    question = "Is it worth it for the sites?"
    for against in ("alone", "fixed weights"):
        found = {
            site.name: verdict.verdict for site in view.sites for verdict in site.verdicts if verdict.against == against
        }
        if found:
            of = {kind: [name for name, verdict in found.items() if verdict == kind] for kind in ("better", "worse")}
            answer = f"Better than {against} at {len(of['better'])} of {counted(len(found), 'site')}"
            if of["worse"]:
                return Answer(question, answer, f"Worse at {listed(of['worse'], _NAMED)}.", "look")
            return Answer(question, answer, "", "good" if of["better"] else "")
    if view.metric is None or view.worst is None:
        return Answer(question, "Not known yet", "No site has measured the model.")
    worst = "" if view.worst_site is None else f" at {view.sites[view.worst_site].name}"
    mean = "" if view.mean is None else f"; mean {view.metric.shown(view.mean.value)}"
    return Answer(
        question,
        "Not known yet",
        f"Worst{worst}: {view.metric.with_interval(view.worst.value, view.worst.interval)}{mean}",
    )


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
    answer = {"better": "Yes", "worse": "No", "unclear": "No clear difference"}[first.verdict]
    return Answer(question, f"{answer}: {first.text}", "; ".join(more), tone.get(first.verdict, ""))


def _to_do(view: View) -> Answer:
    question, first = "What should I do now?", next(iter(view.says), "")
    if view.urgency == "act":
        return Answer(question, "Act now", view.sentence, "bad")
    if view.urgency == "look":
        return Answer(question, "Keep an eye on it", first if first != view.sentence else "", "look")
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
