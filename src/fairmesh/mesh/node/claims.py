"""What other sites say: that this one has lost its state, that they refuse its numbers, or that their own diverged.
They may lie or be broken, so these are claims. They are logged and shown next to what this node sees itself. They end
nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

HOW_TO_RESTORE = (
    "To restore this site from its neighbours, stop its node, run `fairmesh mesh restore` with its name here and at "
    "all other sites, then start this node again"
)


def made(status: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Returns who claims what about this site, and whether it is seen to be so."""
    seen = "seen" if is_behind(status) else "not seen"
    return {("state lost", by, seen) for by in _state_lost(status)} | {("refused", by) for by in _refused(status)}


def sentences(status: Mapping[str, Any]) -> list[str]:
    """Returns the claims about this site in a status, each with what this node can say about it."""
    lost, refused = _state_lost(status), _refused(status)
    found = [_of_a_lost_state(lost, status)] if lost else []
    return [*found, _of_refused_numbers(refused, status)] if refused else found


def diverged(claim: Mapping[str, Any]) -> str:
    """Returns in words that another site says that it has diverged, and what to do."""
    by, kept = claim["by"], ", ".join(map(str, claim["kept"])) or "none"
    return (
        f"{by} says that its numbers diverged between rounds {claim['since']} and {claim['round']}: it has "
        f'"{claim["what"]}". This is what {by} says, and ends no other node. If it is so, {by} sends nothing until '
        f"somebody acts there, and the run waits. Let {by} compare the units of its data with those of the others. To "
        "go on without it, vote it out at all other sites (`fairmesh mesh remove`), and soon after that go back to an "
        f"earlier round (`fairmesh mesh rewind`; kept here: {kept}). Nodes that wait need not be started again for that"
    )


def _state_lost(status: Mapping[str, Any]) -> dict[str, str]:
    return {claim["by"]: claim["reason"] for claim in status.get("state_lost", ())}


def _refused(status: Mapping[str, Any]) -> dict[str, str]:
    """Returns the reasons of those who refuse messages of this site, but for those who say that its state is lost."""
    about_this_site = {one["by"]: one["reason"] for one in status["refusing"] if one["site"] == status["site"]}
    return {by: reason for by, reason in about_this_site.items() if by not in _state_lost(status)}


def is_behind(status: Mapping[str, Any]) -> bool:
    """Returns whether most other sites say that they are further than they can be, if the state here is the newest that
    this site had. Neighbours are at most one round apart, so no site is further ahead than there are sites."""
    rounds = _rounds_of_others(status)
    ahead = [done for done in rounds if done > status["round"] + len(status["sites"])]
    return 2 * len(ahead) > len(status["sites"]) - 1


def _of_a_lost_state(reasons: Mapping[str, str], status: Mapping[str, Any]) -> str:
    said = f"{_who(reasons, status, 'say', 'says')} that this site has lost its state ({_first(reasons)})"
    rounds = _rounds_of_others(status)
    others = f"the others say {min(rounds)} to {max(rounds)}" if rounds else "the others have not said theirs"
    seen = f"this node is in round {status['round']}, and {others}"
    if is_behind(status):
        return (
            f"{said}. This fits what most sites announce: {seen}. So the state here seems to be older than what this "
            f"site has sent. Stop the node, and put back the newest state from a backup. If there is none: "
            f"{HOW_TO_RESTORE}"
        )
    return (
        f"{said}. This node does not see that: {seen}. If nobody has emptied or replaced its state folder, keep it as "
        f"it is, let the node wait, and ask {_names(reasons)}. If somebody has: stop the node, and put back the newest "
        f"state. {HOW_TO_RESTORE}"
    )


def _of_refused_numbers(reasons: Mapping[str, str], status: Mapping[str, Any]) -> str:
    return (
        f"{_who(reasons, status, 'refuse', 'refuses')} this site's messages ({_first(reasons)}). This is what "
        f"{_names(reasons)} {'say' if len(reasons) > 1 else 'says'}; this node has found nothing wrong with its own "
        "model, and waits. Compare the units of this site's data with those of the other sites"
    )


def _who(reasons: Mapping[str, str], status: Mapping[str, Any], several: str, one: str) -> str:
    verb = several if len(reasons) > 1 else one
    neighbours = [name for name in reasons if name in status["edges"]]
    return f"{_names(reasons)} ({len(neighbours)} of {len(status['edges'])} neighbours) {verb}"


def _names(reasons: Mapping[str, str]) -> str:
    *most, last = sorted(reasons)
    return f"{', '.join(most)} and {last}" if most else last


def _first(reasons: Mapping[str, str]) -> str:
    return f'"{reasons[min(reasons)]}"'


def _rounds_of_others(status: Mapping[str, Any]) -> Sequence[int]:
    others = [reported for site, reported in status["sites"].items() if reported and site != status["site"]]
    return [reported["round"] for reported in others if reported["round"] <= status["rounds"]]
