"""What to know of a run and what to do now, in one sentence. That of a node is in `mesh/node/now.py`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fairmesh.errors import duration, named
from fairmesh.metrics.units import Unit
from fairmesh.storage.run_status import DIVERGED, FAILED, RUNNING, STOPPED
from fairmesh.training.rounds_per_second import left_in_words
from fairmesh.watch.view import Estimate, Urgency

PREPARING, TRAINING, FINISHED, DIED, UNSEEN, GONE = "preparing", "training", "finished", "died", "not seen", "gone"
STATES = (PREPARING, TRAINING, FINISHED, STOPPED, DIVERGED, FAILED, DIED, UNSEEN, GONE)
_QUIET_S, _ROUNDS_QUIET = 60.0, 20.0  # without news, or as long as so many rounds take
_STALE_S, _ROUNDS_STALE = 10.0, 100.0  # then neither the speed nor the time left is that of before


class Now(NamedTuple):
    """The state of a run, one of `STATES` or work outside of its rounds; a sentence; and whether somebody must act."""

    state: str
    sentence: str
    urgency: Urgency


class Worst(NamedTuple):
    """The worst site of a run so far."""

    name: str
    value: Estimate
    unit: Unit

    def __str__(self) -> str:
        return f"; worst {named(self.name)}, {self.unit.with_interval(self.value.value, self.value.interval)}"


def now(status: Mapping[str, Any], at: float, *, worst: Worst | None = None, saved: bool = False) -> Now:
    """Returns what to know of a run that has not finished, and what to do now.

    Args:
        status: What the run has written about itself, with whether its process is `alive`.
        at: What time it is, in seconds since the epoch.
        worst: The worst site so far. Default: None, nothing is measured yet.
        saved: Whether there is a checkpoint to go on from. Default: False.
    """
    age = max(0.0, at - status["time"])
    where = f"in round {status['round']:,} of {status['rounds']:,}, {duration(age)} ago"
    if _is_after(status):
        where = f"after all rounds, at “{status['phase']['name']}”, {duration(age)} ago"
    again = "continue it from its checkpoint with --resume" if saved else "start it again"
    if status["state"] == DIVERGED:
        return Now(DIVERGED, f"this run has ended {where}: {status['reason']}", "act")
    if status["state"] == STOPPED:
        return Now(STOPPED, f"this run was stopped {where}; {again}", "act")
    if status["state"] == FAILED:
        return Now(FAILED, f"this run has failed {where}: {status['reason']}; then {again}", "act")
    if status["state"] != RUNNING:
        return Now(UNSEEN, "this run was started by another version of fairmesh, which says how it is", "look")
    if status["alive"] is False:
        return Now(DIED, f"this run has died {where}: it was killed, or the machine was; {again}", "act")
    if status["alive"] is None:
        look = f"no news for {duration(age)}: look on its machine whether it runs"
        return Now(UNSEEN, f"this run is on another machine, {where.rpartition(',')[0]}; {look}", "look")
    return _running(status, at, worst)


def _is_after(status: Mapping[str, Any]) -> bool:
    """Returns whether a run that has done its rounds does what belongs to it, such as training its references."""
    return bool(status["phase"]) and status["round"] == status["rounds"]


def left_s(status: Mapping[str, Any], at: float) -> float | None:
    """Returns in how many seconds the last round is expected; None if that is not known, or if it is not running."""
    rate = rate_now(status, at)
    if not rate or status["phase"]:
        return None
    return max(0.0, (status["rounds"] - status["round"]) / rate - max(0.0, at - status["time"]))


def rate_now(status: Mapping[str, Any], at: float) -> float | None:
    """Returns how many rounds per second a run does; None if that is not known, or if it may do none now."""
    fresh = at - status["time"] <= _longest_s(status, _STALE_S, _ROUNDS_STALE)
    return status["rounds_per_s"] if status["alive"] and fresh and not is_quiet(status, at) else None


def is_quiet(status: Mapping[str, Any], at: float) -> bool:
    """Returns whether a run that does rounds has written nothing for longer than it should.

    Args:
        status: What the run has written about itself.
        at: What time it is, in seconds since the epoch.
    """
    longest = _longest_s(status, _QUIET_S, _ROUNDS_QUIET)
    return bool(status["alive"]) and not status["phase"] and at - status["time"] > longest


def _longest_s(status: Mapping[str, Any], seconds: float, rounds: float) -> float:
    """Returns a number of seconds, or the time that a number of rounds takes if that is longer."""
    rate = status["rounds_per_s"]
    return max(seconds, rounds / rate if rate else 0.0)


def _running(status: Mapping[str, Any], at: float, worst: Worst | None) -> Now:
    done, rounds, phase, age = status["round"], status["rounds"], status["phase"], max(0.0, at - status["time"])
    if phase:
        progress = f", {phase['done']:,} of {phase['of']:,} steps" if phase["of"] else ""
        before = "all rounds are done; now " if _is_after(status) else ""
        after = f"; then the {rounds:,} rounds begin" if done == 0 else ""
        return Now(phase["name"], f"{before}{phase['name']}{progress}{after}{worst or ''}", "fine")
    text, left = f"round {done:,} of {rounds:,}", left_s(status, at)
    if is_quiet(status, at):
        why = "a round takes long, or the run hangs"
        return Now(TRAINING, f"{text}; no news for {duration(age)}: {why}", "look")
    if left is not None:
        text += f", {left_in_words(left)}"
    elif status["rounds_per_s"]:
        text += f"; no news for {duration(age)}"
    return Now(TRAINING, f"{text}{worst or ''}", "fine")
