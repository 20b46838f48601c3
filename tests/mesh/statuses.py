"""Statuses of a node of a mesh of four sites on a ring, as `live_status` returns them."""

from typing import Any

from fairmesh.mesh.node import life

NOW = 1_900_000_000.0
NAMES = ("west", "north", "east", "south")


def told(name: str, **changes: Any) -> dict[str, Any]:
    """What a status has of a site."""
    value = {"west": 0.84, "north": 0.71, "east": 0.8, "south": 0.82}[name]
    return {
        "heard_s_ago": 3.0,
        "round": 1840,
        "rounds_sent": 1840,
        "activity": life.TRAINING,
        "metric": value,
        "metric_round": 1800,
        "weight": 0.25,
        "waiting_for": {},
        "bytes_out": 1000,
        "wire_out": 1200,
        "time": NOW - 3.0,
        "again_s": 15.0,
    } | changes


def seen(**changes: Any) -> dict[str, Any]:
    """The status of west."""
    edge = {"connected": True, "last_seen": NOW, "unacknowledged": 0, "bytes_out": 500, "bytes_in": 490}
    edge |= {"messages_out": 9, "messages_in": 9, "overhead_out": 30, "overhead_in": 30, "wire_out": 530}
    return {
        "time": NOW,
        "mesh": "oncology",
        "generation": 1,
        "removed": [],
        "graph": [["west", "north"], ["north", "east"], ["east", "south"], ["south", "west"]],
        "site": "west",
        "version": "1",
        "versions": {},
        "clocks": {},
        "round": 1840,
        "rounds": 4000,
        "rounds_sent": 1840,
        "activity": life.TRAINING,
        "running": True,
        "phase": None,
        "missing": None,
        "ended": None,
        "metric_name": "accuracy",
        "unit": {"share": True, "unit": ""},
        "higher_is_better": True,
        "metric": 0.84,
        "metric_round": 1800,
        "weight": 0.25,
        "privacy": None,
        "lambda": {"round": 1800, "sites": dict.fromkeys(NAMES, 0.25)},
        "prior": dict.fromkeys(NAMES, 0.25),
        "unusual": {},
        "unaccepted": [],
        "heavy": {},
        "waiting_for": {},
        "waiting_chain": ["west"],
        "unconfirmed_wait": "",
        "paused_for": [],
        "rounds_per_s": 1.44,
        "seconds_left": 1500.0,
        "bytes_out": 1000,
        "wire_out": 1200,
        "edges": {"north": edge, "south": edge},
        "refusing": [],
        "ignored": {},
        "state_lost": [],
        "diverged": [],
        "contradicted": [],
        "unsigned": [],
        "votes": {},
        "keys": {},
        "certificate_days": 300.0,
        "worst": 0.71,
        "mean": 0.79,
        "uses": "",
        "sites": {name: told(name) for name in NAMES},
    } | changes


def waiting(*chain: str, seconds: float = 720.0, **changes: Any) -> dict[str, Any]:
    """The status of west while it waits for a site, which may wait for another one."""
    since = {chain[0]: NOW - seconds}
    waits = {"waiting_for": since, "waiting_chain": ["west", *chain], "paused_for": list(chain), "seconds_left": None}
    return seen(**waits) | changes
