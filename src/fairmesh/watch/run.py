"""Views of a run's folder: of a simulation, a sweep or a cluster run, in progress, ended early or finished."""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairmesh.config.overrides import read_toml
from fairmesh.errors import BadInput, duration
from fairmesh.metrics.units import Unit
from fairmesh.storage import run_status
from fairmesh.storage.occupied import CHECKPOINT, DIVERGED, EXPERIMENT, METRICS, STATUS, SUMMARY
from fairmesh.storage.run_status import RUNNING, read_run_status, version_of_status
from fairmesh.watch.finished import Finished
from fairmesh.watch.now import DIED, FINISHED, GONE, UNSEEN, Now, Worst, is_quiet, left_s, now, rate_now
from fairmesh.watch.records import Records, mean_of
from fairmesh.watch.view import Edge, Estimate, Kind, Line, Phase, Privacy, Site, SiteState, Traffic, Variant, View

_ENDED: dict[str, Any] = {"round": 0, "rounds_per_s": None, "phase": None, "alive": False, "log": [], "server": False}
_ENDED |= {"edges": [], "privacy": None, "measured": {"round": -1, "sites": []}, "share": False, "unit": ""}


class RunSource:
    """What is known of a run, by its folder, which may be written, resumed, moved away or ended meanwhile.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path):
        self._folder, self._records, self._finished = folder, Records(folder), Finished(folder)
        self._last: View | None = None
        refuse_other_version(folder)

    def view(self, wait: bool = False) -> View:
        """Returns what is known now. It reads only what is new, and never fails for what a run does to its folder.

        Args:
            wait: Whether to wait for what the report says of a finished run. Default: False.
        """
        at = time.time()
        if not self._folder.is_dir():
            return self._gone(at)
        status = read_run_status(self._folder, at)
        summary = {} if status else _summary(self._folder)
        facts = status or (_facts_of(summary) if summary else _nothing(self._folder))
        variants = [list(one["replicas"]) for one in facts["variants"]]
        self._records.read(facts["metric"], variants)
        self._last = self._shown(facts, at)
        if summary:
            self._last = self._finished.added_to(self._last, wait)
            if wait and read_run_status(self._folder, time.time()):  # its references have begun meanwhile
                return self.view()
        return self._last

    def _gone(self, at: float) -> View:
        """Returns the last view of a folder that is not there any more."""
        said = f"the folder {self._folder} has been moved or removed; this is what was known of its run"
        before = self._last or View("run", self._folder.name, GONE, said, "look", at, None)
        return replace(before, state=GONE, sentence=said, urgency="look", seen_at=at, live=False, seconds_left=None)

    def _shown(self, facts: Mapping[str, Any], at: float) -> View:
        metric = Unit(facts["metric"], facts["share"], facts["unit"]) if facts["metric"] else None
        variants = self._variants(facts)
        k = next((k for k, one in enumerate(variants) if one.shown), 0)
        replicas = facts["variants"][k]["replicas"] if facts["variants"] else []
        sites = self._sites(facts, replicas)
        values, first = _worst_first(sites, facts["higher_is_better"])
        worst = sites[first[0]] if first else None
        done = max(facts["round"], max((record["round"] for record in self._records.newest), default=0))
        facts = {**facts, "round": facts["round"] or min(done, facts["rounds"] or done)}
        said = _said(self._folder, facts, at, worst, metric)
        curves, quiet = variants[k].curves if variants else self._records.curves, is_quiet(facts, at)
        kind: Kind = "sweep" if len(facts["variants"]) > 1 else "run"
        return View(
            kind=kind,
            title=self._folder.resolve().name,
            state=said.state,
            sentence=said.sentence,
            urgency=said.urgency,
            seen_at=at,
            news_at=facts["time"],
            live=bool(facts["alive"]),
            algorithm=facts["algorithm"],
            round=facts["round"],
            rounds=facts["rounds"],
            rounds_per_s=rate_now(facts, at),
            quiet=quiet,
            seconds_left=left_s(facts, at),
            phase=_phase(facts["phase"]),
            metric=metric,
            higher_is_better=facts["higher_is_better"],
            judged_on=facts["judged_on"],
            sites=sites,
            order=(*first, *(i for i in range(len(sites)) if i not in values)),
            worst=worst.value if worst else None,
            worst_site=first[0] if first else None,
            mean=Estimate(sum(values.values()) / len(values)) if values else None,
            edges=_edges(facts, len(sites)),
            server=facts["server"],
            curves=curves if len(curves.sites) in (0, len(sites)) else replace(curves, sites=()),
            variants=variants if kind == "sweep" else (),
            replicas=max(1, len(replicas)),
            privacy=self._privacy(facts, replicas),
            traffic=self._traffic(replicas, rate_now(facts, at)),
            log=tuple(Line(str(one["time"]), "info", str(one["text"])) for one in facts["log"]),
            says=_to_resume(self._folder, facts, said.state),
            notes=_notes(facts, self._records.newest, len(replicas)),
        )

    def _sites(self, facts: Mapping[str, Any], replicas: Sequence[int]) -> tuple[Site, ...]:
        names, metric = facts["sites"], facts["metric"]
        values = _means(self._records.values("sites", replicas, metric), len(names)) if metric else [None] * len(names)
        weights = _means(self._records.values("lambda", replicas), len(names))
        done = max((record["round"] for record in self._records.newest), default=None)
        estimates = [_estimate(value) for value in values]
        measured = facts["measured"]["sites"]  # up to a second older than the records, but with intervals
        if len(measured) == len(names):
            done = facts["measured"]["round"]
            estimates = [
                Estimate(one[0], (one[1], one[2])) if one and None not in one else estimate
                for one, estimate in zip(measured, estimates)
            ]
        state = "at work" if facts["alive"] else _ENDS.get(facts["state"], "stopped")
        state = "unknown" if facts["alive"] is None else state
        return tuple(
            Site(
                str(name),
                state=state,
                round=facts["round"] or done,
                value=estimate,
                value_round=None if estimate is None else done,
                rows=rows,
                weight=weight,
                prior=prior,
            )
            for name, estimate, rows, weight, prior in zip(names, estimates, facts["rows"], weights, facts["prior"])
        )

    def _variants(self, facts: Mapping[str, Any]) -> tuple[Variant, ...]:
        """Returns the algorithms of a sweep; the best so far at the worst site is shown."""
        if len(facts["variants"]) < 2:
            return ()
        found, sign = [], 1 if facts["higher_is_better"] else -1
        for one, curves in zip(facts["variants"], self._records.of_variants):
            name = ", ".join(f"{key} = {value}" for key, value in one["changes"].items())
            of = one["replicas"]
            sites = _means(self._records.values("sites", of, facts["metric"]), len(facts["sites"]))
            worst = min((value for value in sites if value is not None), key=lambda v: sign * v, default=None)
            mean = mean_of(self._records.values("mean", of, facts["metric"]))
            found.append(Variant(name, curves, _estimate(worst), _estimate(mean), replicas=len(of)))
        known = [k for k, one in enumerate(found) if one.worst]
        best = max(known, key=lambda k: sign * found[k].worst.value, default=0)  # type: ignore[union-attr]
        return tuple(replace(one, shown=k == best) for k, one in enumerate(found))

    def _privacy(self, facts: Mapping[str, Any], replicas: Sequence[int]) -> Privacy | None:
        privacy = facts["privacy"]
        if not privacy:
            return None
        spent = max(self._records.values("epsilon", replicas), default=None)
        return Privacy(spent, privacy["budget"], privacy["delta"], privacy["unit"])

    def _traffic(self, replicas: Sequence[int], rate: float | None) -> Traffic | None:
        sent, total = (max(self._records.values(f"bytes_{of}", replicas), default=None) for of in _OF_BYTES)
        if sent is None:
            return None
        done = self._records.newest[0]["round"]
        return Traffic("the busiest site", sent, total=total, per_s=sent / done * rate if rate and done else None)


_OF_BYTES = ("busiest_node", "total")
_ENDS: dict[str, SiteState] = {FINISHED: "ended", RUNNING: "died", run_status.DIVERGED: "diverged", "": "unknown"}


def refuse_other_version(folder: Path) -> None:
    """Refuses a folder whose summary another version has written."""
    path = folder / SUMMARY
    if path.exists() and not _summary(folder):
        raise BadInput(f"{path} was not written by this version of fairmesh, or is damaged; run the experiment again")


def _summary(folder: Path) -> dict[str, Any]:
    """Returns the summary of a finished run; {} if there is none, or none of this version."""
    try:
        summary = json.loads((folder / SUMMARY).read_bytes())
        known = isinstance(summary, dict) and {"variants", "sites", "metrics", "final"} <= summary.keys()
        return summary | {"written": (folder / SUMMARY).stat().st_mtime} if known else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _facts_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what status.json would say of a finished run."""
    table = summary["metrics"][summary["metric"]]
    support = summary.get("support") or [None] * len(summary["sites"])
    return _ENDED | {
        "state": FINISHED,
        "time": summary["written"],
        "round": summary["rounds"],
        "rounds": summary.get("planned_rounds") or summary["rounds"],
        "algorithm": summary["algorithm"],
        "metric": summary["metric"],
        "share": table["share"],
        "unit": table.get("unit") or "",
        "higher_is_better": summary["higher_is_better"],
        "judged_on": summary["judged_on"],
        "sites": summary["sites"],
        "rows": [one.get("n") if isinstance(one, dict) else None for one in support],
        "prior": summary["prior"],
        "variants": summary["variants"],
    }


def _nothing(folder: Path) -> dict[str, Any]:
    """Returns what is said of a folder of which nothing says how the run is."""
    try:
        written = max((folder / name).stat().st_mtime for name in (METRICS, DIVERGED) if (folder / name).exists())
    except (OSError, ValueError):
        written = None
    nothing = {"algorithm": "", "metric": "", "higher_is_better": True, "judged_on": "test", "rounds": 0}
    return _ENDED | nothing | {"state": "", "time": written, "sites": [], "rows": [], "prior": [], "variants": []}


def _said(folder: Path, facts: Mapping[str, Any], at: float, worst: Site | None, metric: Unit | None) -> Now:
    the_worst = Worst(worst.name, worst.value, metric) if worst and worst.value and metric else None
    if facts["state"] == FINISHED:
        return Now(FINISHED, f"finished after {facts['round']:,} rounds{the_worst or ''}", "fine")
    if not facts["state"]:
        age = "" if facts["time"] is None else f"; it has written nothing for {duration(at - facts['time'])}"
        why = _why_unknown(folder)
        return Now(UNSEEN, f"this folder does not say how its run is, since {why}{age}", "look")
    return now(facts, at, worst=the_worst, saved=(folder / CHECKPOINT).exists())


def _to_resume(folder: Path, facts: Mapping[str, Any], state: str) -> tuple[str, ...]:
    """Returns the command that continues a run by the settings in its folder. There is none for a run that goes on or
    has no checkpoint, nor for one that was started in Python, whose settings do not name its data."""
    ended = facts["alive"] is False and state in (DIED, run_status.STOPPED, run_status.FAILED)
    try:
        if ended and (folder / CHECKPOINT).exists() and "data" in read_toml(folder / EXPERIMENT):
            command = ["fairmesh", "run", str(folder / EXPERIMENT), "--out", str(folder), "--resume"]
            return (f"to continue it, in the folder where it was started: {shlex.join(command)}",)
    except BadInput:  # a damaged file, by which it cannot be continued
        pass
    return ()


def _why_unknown(folder: Path) -> str:
    """Returns why the status of a run says nothing, and what to do about it."""
    if not (folder / STATUS).exists():
        return f"it has no {STATUS}"
    version = version_of_status(folder)
    if version is None:
        return f"its {STATUS} is damaged"
    return f"version {version} of fairmesh has written its {STATUS}, which this version cannot read: watch it with that"


def _worst_first(sites: Sequence[Site], higher_is_better: bool) -> tuple[dict[int, float], list[int]]:
    """Returns the values of the sites that have one, by their numbers, and these numbers, those of the worst first."""
    values = {i: site.value.value for i, site in enumerate(sites) if site.value}
    return values, sorted(values, key=values.__getitem__, reverse=not higher_is_better)


def _edges(facts: Mapping[str, Any], sites: int) -> tuple[Edge, ...]:
    return tuple(Edge((i, j)) for i, j in facts["edges"] if max(i, j) < sites)


def _estimate(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value)


def _phase(phase: Mapping[str, Any] | None) -> Phase | None:
    if not phase:
        return None
    return Phase(phase["name"], phase["done"], phase["of"]) if phase["of"] else Phase(phase["name"])


def _means(rows: Sequence[Any], sites: int) -> list[float | None]:
    """Returns the mean over replicas of a list with a number of every site."""
    rows = [row for row in rows if isinstance(row, list) and len(row) == sites]
    return [mean_of(column) for column in zip(*rows)] if rows else [None] * sites


def _notes(facts: Mapping[str, Any], newest: Sequence[Mapping[str, Any]], replicas: int) -> tuple[str, ...]:
    found = [f"Numbers are means over {replicas} replicas."] if replicas > 1 else []
    if len(facts["variants"]) > 1 and facts["state"] != FINISHED:  # then the report says it
        chosen = f"it is chosen on {facts['judged_on']} data, so its numbers are too good"
        found.append(f"The sites are shown for the variant that is best at the worst site so far; {chosen}.")
    if facts["judged_on"] == "train":
        found.append("No site has test data, so every site is judged on its training data: these numbers are too good.")
    if facts["alive"] and any(facts["measured"]["sites"]):
        found.append("Intervals are of each site's test rows alone; at the end they are those of the report.")
    if any(record.get("models") == "own" for record in newest):
        found.append("On the way, each site measures its own model on its own data.")
    return tuple(found)
