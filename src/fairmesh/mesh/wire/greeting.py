"""What two neighbours tell each other first, how a site compares it with its own, and what their clocks say."""

import json
from collections.abc import Mapping
from typing import Any

import fairmesh
from fairmesh.compression import VERSION as CODEC
from fairmesh.mesh.enrol.roster import Mesh
from fairmesh.mesh.wire.frames import Refused

# Sites may run different versions of fairmesh, and upgrade during a run, as long as this number is the same. It changes
# only with what a run in progress could not survive: other numbers from the same messages (also by another default
# value), other messages or announcements, or other checkpoints. A new field whose default keeps the numbers does not.
COMPATIBILITY = 8
_COMPATIBILITY = "compatibility number of fairmesh"
APART_S = 300.0  # seconds that do no harm: certificates begin that much in the past


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Returns the agreed fields in which two sites differ, in words."""

    def shown(table: Mapping[str, Any], key: str) -> str:
        return json.dumps(table[key]) if key in table else "the default"

    keys = [*here, *(key for key in there if key not in here)]
    unlike = [key for key in keys if (key in here) != (key in there) or here[key] != there[key]]
    return [f"{key}: {shown(here, key)} here, {shown(there, key)} there" for key in unlike]


def greeting(name: str, agreed: Mapping[str, Any], mesh: Mesh, files: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a site sends a neighbour first: who it is, and all that both must agree on: the experiment's fields
    (`enrol.agreement.agreed`) and the digests of the manifest's files."""
    versions = {_COMPATIBILITY: COMPATIBILITY, "codec version": CODEC, "mesh name": mesh.name}
    return {
        "site": name,
        "version": fairmesh.__version__,  # for people
        "generation": mesh.generation,
        "agreed": {**versions, **agreed} | {f"file {file}": digest for file, digest in files.items()},
        "members": {member.name: list(member.neighbours) for member in mesh.members},
    }


def refuse_unlike(mine: Mapping[str, Any], name: str, theirs: Mapping[str, Any]) -> None:
    """Refuses the greeting of neighbour `name` if it is from another site or for another experiment, and names the
    fields that differ."""
    if theirs.get("site") != name:
        raise Refused(f"it greets as {theirs.get('site')!r} with the certificate of {name}")
    fields = theirs.get("agreed")
    if not isinstance(fields, dict):
        raise Refused("the greeting does not say which experiment it is")
    if fields.get(_COMPATIBILITY) != mine["agreed"][_COMPATIBILITY]:
        raise Refused(
            f"fairmesh {version_in(theirs)} there and {version_in(mine)} here cannot work together: their "
            f"compatibility numbers are {json.dumps(fields.get(_COMPATIBILITY))[:20]} and {COMPATIBILITY}; install the "
            "same version at both sites"
        )
    unlike = differences(mine["agreed"], fields)
    members, there = mine["members"], theirs.get("members")
    if not isinstance(there, dict) or list(there) != list(members):
        unlike.append(f"sites: {list(members)} here, {list(there) if isinstance(there, dict) else there} there")
    else:
        unlike += [f"neighbours of {m}: {members[m]} here, {there[m]} there" for m in members if members[m] != there[m]]
    if unlike:
        raise Refused(f"another experiment: {'; '.join(unlike[:4])}")


def version_in(greeting: Mapping[str, Any]) -> str:
    """Returns the version of fairmesh that a greeting tells, as text that can be shown."""
    version = greeting.get("version")
    return "".join(c for c in version[:30] if c.isprintable()) if isinstance(version, str) else "of an unknown version"


def seconds_ahead(greeting: Mapping[str, Any], now: float) -> float:
    """Returns by how many seconds the clock in a neighbour's greeting is ahead of this one; 0 if it states none."""
    clock = greeting.get("clock")
    return float(clock) - now if isinstance(clock, int | float) and abs(clock) < 1e15 else 0.0


def apart_in_words(ahead: float) -> str:
    """Returns a difference of clocks for people."""
    size = abs(ahead)
    amount = (
        f"{size:.0f} s" if size < 600 else f"{size / 60:.0f} minutes" if size < 7200 else f"{size / 3600:.0f} hours"
    )
    return f"{amount} {'ahead of' if ahead > 0 else 'behind'} this one"


def clock_advice(apart: Mapping[str, float], neighbours: int) -> list[str]:
    """Returns what to say about neighbours whose clocks differ from this one.

    Args:
        apart: By how many seconds the clocks of these neighbours are ahead.
        neighbours: How many neighbours there are.
    """
    amounts = {name: apart_in_words(ahead) for name, ahead in apart.items()}
    same_way = len({ahead > 0 for ahead in apart.values()}) == 1
    if neighbours > 1 and len(apart) == neighbours and same_way:
        said = "; ".join(f"that of {name} is {amount}" for name, amount in amounts.items())
        return [f"this site's clock differs from those of all its neighbours ({said}): set it, and restart this node"]
    return [f"the clock of {name} is {amount}: set the one that is wrong" for name, amount in amounts.items()]
