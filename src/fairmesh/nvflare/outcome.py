"""How a site, and a job, can end; what a site may say of itself to the server; and where the server writes it."""

from collections.abc import Collection
from typing import Any

from fairmesh.errors import FairmeshError, printable
from fairmesh.mesh.fields import count, number, text

WAITING, RUNNING = "waiting", "running"
FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"
ENDED = (FINISHED, INTERRUPTED, FAILED)
GO_ON = "All that the run has done is kept; submit the same job again to continue"
OUTCOME = "fairmesh.json"  # in the server's folder of the job
_LONGEST = 2000  # characters of a reason
_PROGRESS = {
    "activity": text(),
    "round": count(),
    "rounds": count(),
    "worst": number(),
    "mean": number(),
    "metric_name": text(),
}


def report_of(answer: Any, sites: Collection[str]) -> dict[str, Any]:
    """Returns what a site says of itself, without what it cannot mean. Raises FairmeshError if nothing is left.

    Args:
        answer: What it has answered, which may be anything.
        sites: fairmesh's names of the sites of the job, of which it may miss some.
    """
    if not isinstance(answer, dict) or answer.get("state") not in (WAITING, RUNNING, *ENDED):
        raise FairmeshError("it says nothing that the server knows")
    reason, told = answer.get("reason"), answer.get("missing")
    missing = told if isinstance(told, list) else []
    return {
        "state": answer["state"],
        "reason": printable(reason)[:_LONGEST] if isinstance(reason, str) else "",
        "missing": [name for name in sites if name in missing],
        **{name: answer[name] for name, holds in _PROGRESS.items() if name in answer and holds(answer[name])},
    }
