"""What other sites say: that this one has lost its state, that they refuse its numbers, or that their own diverged.
They may lie or be broken, so these are claims. They are logged and shown next to what this node sees itself. They end
nothing."""

from collections.abc import Mapping
from typing import Any

CONTRADICTIONS = "contradictions.jsonl"  # pairs of signed announcements that contradict each other

HOW_TO_RESTORE = (
    "To restore this site from its neighbours, stop its node, run `fairmesh mesh restore` with its name here and at "
    "all other sites, then start this node again"
)
# Of a file in the state folder that nothing here can replace. An empty folder is no way: the others refuse it.
PUT_BACK = f"put it back from a backup of the state folder. {HOW_TO_RESTORE}"


def sentences(status: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
    """Returns the claims about this site in a status, each with what this node can say about it. The keys say what is
    claimed, by whom, and whether it is seen to be so."""
    lost = {claim["by"]: claim["reason"] for claim in status.get("state_lost", ())}
    about_this_site = [claim for claim in status["refusing"] if claim["site"] == status["site"]]
    refused = {claim["by"]: claim for claim in about_this_site if claim["by"] not in lost}
    behind, claimed = is_behind(status), dict[tuple[str, ...], str]()
    if lost:
        rounds = _rounds_of_others(status)
        others = f"the others say {min(rounds)} to {max(rounds)}" if rounds else "the others have not said theirs"
        where = f"this node is in round {status['round']}, and {others}"
        advice = (
            f"This node does not see that: {where}. If nobody has emptied or replaced its state folder, keep it as it "
            f"is, let the node wait, and ask {', '.join(sorted(lost))}. If somebody has: stop the node, and put back "
            "the newest state"
        )
        if behind:
            advice = (
                f"This fits what most sites announce: {where}. So the state here seems to be older than what this site "
                "has sent. Stop the node, and put back the newest state from a backup, if there is one"
            )
        claim = _claim_of(lost, status, "this site has lost its state")
        claimed["state lost", *sorted(lost), str(behind)] = f"{claim}. {advice}. {HOW_TO_RESTORE}"
    for sent in (True, False):
        reasons = {by: claim["reason"] for by, claim in refused.items() if (claim["sent"] is True) == sent}
        if reasons:
            claim, whom = _claim_of(reasons, status, "they refuse this site's messages"), ", ".join(sorted(reasons))
            seen = (
                "This site has sent that message. Its node has found nothing wrong with its own model, and waits. If "
                f"others have taken the same message, which their status says, ask {whom}. Else compare the units of "
                "this site's data with those of the other sites"
                if sent
                else "They name no message that this site has sent, so this may not be true. Its node has found "
                f"nothing wrong with its own model, and waits. Ask {whom}"
            )
            claimed["refused", *sorted(reasons), str(sent)] = f"{claim}. {seen}"
    return claimed


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


def refused(claim: Mapping[str, Any]) -> str:
    """Returns what the other end says about a refusal of its message, and whom to ask."""
    if claim["sent"] is None:
        return f"{claim['site']} has not said" if claim["digest"] else f"names no message: ask {claim['by']}"
    if claim["sent"] and claim.get("taken_here"):
        return f"{claim['site']} has sent it, and this site has taken the same message: ask {claim['by']} too"
    return f"{claim['site']} has sent it" if claim["sent"] else f"{claim['site']} denies it: ask {claim['by']} too"


def contradicted(claim: Mapping[str, Any], own: str) -> str:
    """Returns in words that a site has sent or signed two different things, by whom this is said, and what to do.

    Args:
        claim: What a node or another site has found, as the status has it.
        own: This site.
    """
    by, site = claim["by"], claim["site"]
    rounds, kept = f"rounds {claim['since']} and {claim['round']}", ", ".join(map(str, claim["kept"])) or "none"
    if by == own:
        fact = f"{site} has sent this site other messages than it has signed, between {rounds}"
        proof = "Its signature and the messages in this site's journal show it to this site alone"
        if claim["both"]:
            fact = f"{site} has signed two different things about its messages or its kept models, between {rounds}"
            proof = f"Its two signatures, in {CONTRADICTIONS} in this site's state folder, prove it to everybody"
        return (
            f"{fact}: it is broken, or it lies. {proof}. The run goes on with its messages. To go on without it, vote "
            "it out at all other sites (`fairmesh mesh remove`), and then go back to a round before that (`fairmesh "
            f"mesh rewind`; kept here: {kept})"
        )
    said = f"{by} says that {site} has signed two different things about its messages or its kept models"
    if not claim["both"]:
        said = f"{by} says that {site} sent it other messages than {site} has signed"
    said = f"{said}, between {rounds}. This is what {by} says"
    if site == own:
        return f"{said}. This node sends all neighbours the same messages: ask {by}, and compare the logs of both sites"
    if claim["agrees_here"] and not claim["both"]:  # who has signed two things has told some sites one, some the other
        said = f"{said}; this site got what {site} has signed"
    if claim["signed_here"] not in (None, claim["signed"]) and not claim["both"]:
        said = f"{said}; {by} quotes another hash than {site} has told this site: one of them lies"
    return f"{said}. One of the two is broken, or lies: ask both before anybody is voted out"


def unsigned(site: str) -> str:
    """Returns in words that what a site sends cannot be compared."""
    return (
        f"{site} signs no hash of its messages, so that nobody can see whether it sends all neighbours the same: its "
        "node has lost the hash with its disk, or hides something; ask it"
    )


def is_behind(status: Mapping[str, Any]) -> bool:
    """Returns whether most other sites say that they are further than they can be, if the state here is the newest that
    this site had. Neighbours are at most one round apart, so no site is further ahead than there are sites."""
    ahead = [done for done in _rounds_of_others(status) if done > status["round"] + len(status["sites"])]
    return 2 * len(ahead) > len(status["sites"]) - 1


def _claim_of(reasons: Mapping[str, str], status: Mapping[str, Any], what: str) -> str:
    edges = status["edges"]
    neighbours = f"{len(reasons.keys() & edges.keys())} of {len(edges)} neighbours"
    return f'{", ".join(sorted(reasons))} ({neighbours}) claim: {what} ("{reasons[min(reasons)]}")'


def _rounds_of_others(status: Mapping[str, Any]) -> list[int]:
    others = [reported for site, reported in status["sites"].items() if reported and site != status["site"]]
    return [reported["round"] for reported in others if reported["round"] <= status["rounds"]]
