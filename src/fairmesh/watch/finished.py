"""What only the report knows of a finished run: comparisons, intervals and conclusions.

To know it takes the libraries that compute, which a page that runs for weeks should not hold in memory. So a process
of its own reads the run, and ends: `python -m fairmesh.watch.finished FOLDER` prints a JSON object."""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairmesh.storage.occupied import SUMMARY
from fairmesh.watch.view import Edge, Estimate, Privacy, Traffic, Variant, Verdict, View

_PATIENCE_S = 120.0


class Finished:
    """Adds to a view what the report says of a run, which is asked once.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._of: tuple[float, int] = (0.0, 0)  # the summary that the answer is about, by time and length
        self._told: dict[str, Any] = {}
        self._asking: threading.Thread | None = None

    def added_to(self, view: View, wait: bool) -> View:
        """Returns the view with what the report says, as soon as that is known.

        Args:
            view: What is known without it.
            wait: Whether to wait for it.
        """
        try:
            state = (self._folder / SUMMARY).stat()
        except OSError:
            return view
        if self._of != (state.st_mtime, state.st_size):
            self._of, self._told = (state.st_mtime, state.st_size), {}
            self._asking = threading.Thread(target=self._ask, args=(self._of,), name="report", daemon=True)
            self._asking.start()
        if wait and self._asking:
            self._asking.join()
        told = self._told
        if not told:
            return view
        if "why_not" in told:
            return replace(view, notes=(*view.notes, f"The report cannot read this run: {told['why_not']}"))
        return _with(view, told)

    def _ask(self, of: tuple[float, int]) -> None:
        told = asked(self._folder)
        if self._of == of:
            self._told = told


def asked(folder: Path) -> dict[str, Any]:
    """Returns what the report says of a run; `why_not` if it cannot say it."""
    command = [sys.executable, "-m", "fairmesh.watch.finished", str(folder.resolve())]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        return json.loads(ended.stdout) if ended.returncode == 0 else {"why_not": _last_line(ended.stderr)}
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"why_not": f"{type(error).__name__}: {error}"}


def _last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "it says nothing")[:300]


def _with(view: View, told: Mapping[str, Any]) -> View:
    sites = tuple(
        replace(
            site,
            value=_estimate(one["value"]) or site.value,
            rows=one["rows"],
            weight=one["weight"],
            alone=_estimate(one["alone"]),
            fixed=_estimate(one["fixed"]),
            verdicts=tuple(Verdict(**verdict) for verdict in one["verdicts"]),
            uses=one["uses"],
            epsilon=one["epsilon"],
        )
        for site, one in zip(view.sites, told["sites"])
    )
    worst, privacy = told["worst_first"], told["privacy"]
    names = [variant["name"] for variant in told["variants"]]
    variants = tuple(
        _variant(one, told["variants"][names.index(one.name)]) for one in view.variants if one.name in names
    )
    traffic = view.traffic or Traffic("the busiest site")
    return replace(
        view,
        sentence=told["sentence"],
        urgency=told["urgency"],
        says=tuple(told["says"]),
        notes=tuple(dict.fromkeys((*told["notes"], *view.notes))),
        sites=sites if len(told["sites"]) == len(view.sites) else view.sites,
        order=tuple(worst),
        worst_site=worst[0] if worst and sites[worst[0]].value else None,
        worst=_estimate(told["worst"]),
        mean=_estimate(told["mean"]),
        edges=tuple(Edge((i, j)) for i, j in told["edges"]) or view.edges,
        server=told["server"],
        variants=variants,
        privacy=Privacy(**privacy | {"sentences": tuple(privacy["sentences"])}) if privacy else None,
        traffic=replace(traffic, sent=told["bytes"][0], total=told["bytes"][1]),
    )


def _estimate(told: Sequence[Any] | None) -> Estimate | None:
    if told is None or told[0] is None:
        return None
    return Estimate(told[0], tuple(told[1]) if told[1] else None)


def _variant(variant: Variant, told: Mapping[str, Any]) -> Variant:
    worst, mean = (_estimate(told[what]) or getattr(variant, what) for what in ("worst", "mean"))
    return replace(variant, worst=worst, mean=mean, diverged=told["diverged"], shown=told["shown"])


def told_by_report(folder: Path) -> dict[str, Any]:
    """Returns what the report says of a finished run, as plain data. Estimates are pairs of a value and an interval."""
    from fairmesh.evidence.verdicts import verdict_in_words
    from fairmesh.report.contents import card
    from fairmesh.report.runs import Run, ranked
    from fairmesh.report.sentences import REFERENCES, privacy_sentences, unit_of
    from fairmesh.storage.run_folder import read_summary

    summary = read_summary(folder)
    run = Run(folder.name, summary, [{**record, "round": summary["rounds"]} for record in summary["final"]], folder)
    found, (variants, _) = card(run), ranked(run)
    unit, intervals, graph = unit_of(found), found["intervals"], found["graph"] or {"name": "", "edges": []}
    privacy, models = found["privacy"], {model["name"]: model for model in found["site_models"]}
    epsilons = privacy.get("epsilons") or []
    sites = [
        {
            "value": (site["metrics"][found["metric"]], site["interval"]),
            "rows": site["n"],
            "weight": site["weight"],
            "alone": (site["references"].get("local", models.get(site["name"], {}).get("local")), None),
            "fixed": (site["references"].get("average"), None),
            "verdicts": [
                {
                    "against": REFERENCES.get(kind) or kind,
                    "verdict": difference["verdict"],
                    "text": verdict_in_words(difference, unit, REFERENCES.get(kind) or kind),
                }
                for kind, difference in site["versus"].items()
            ],
            "uses": models.get(site["name"], {}).get("sentence", ""),
            "epsilon": epsilons[i] if i < len(epsilons) else privacy.get("sites", {}).get(site["name"]),
        }
        for i, site in enumerate(found["sites"])
    ]
    worst, mean = (
        (intervals[what]["value"], intervals[what]["interval"])
        if what in intervals
        else (found["over_sites"][what], None)
        for what in ("worst", "mean")
    )
    stopped = f" ({found['stopped_early']})" if found.get("stopped_early") else ""
    return {
        "sentence": f"finished after {found['rounds']:,} rounds{stopped}; {_begun(found['conclusion'])}",
        "urgency": "look" if found["diverged"] else "fine",
        "says": [*found["headline"], *found["hints"]],
        "notes": found["notes"],
        "sites": sites,
        "worst_first": found["worst_first"],
        "worst": worst,
        "mean": mean,
        "edges": [] if graph.get("placed") else graph["edges"],
        "server": graph["name"] == "server",
        "variants": [
            {
                "name": ", ".join(f"{key} = {value}" for key, value in one.summary["variants"][0]["changes"].items()),
                "worst": (one.over_sites("worst"), None),
                "mean": (one.over_sites("mean"), None),
                "diverged": len(one.summary["diverged"]),
                "shown": one is variants[0],
            }
            for one in variants
        ]
        if len(variants) > 1
        else [],
        "privacy": privacy
        and {key: privacy[key] for key in ("epsilon", "budget", "delta", "unit")}
        | {"sentences": privacy_sentences(privacy)},
        "bytes": (found["traffic"]["bytes_busiest_node"], found["traffic"]["bytes_total"]),
    }


def _begun(sentence: str) -> str:
    """Returns a sentence as a part of another one."""
    return f"{sentence[:1].lower()}{sentence[1:].rstrip('.')}"


if __name__ == "__main__":
    from fairmesh.errors import FairmeshError
    from fairmesh.storage.strict_json import as_json

    try:
        print(as_json(told_by_report(Path(sys.argv[1]))))
    except FairmeshError as error:
        sys.exit(str(error))
