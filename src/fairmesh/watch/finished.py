"""What only the report knows of a finished run: comparisons, intervals and conclusions.

To know it takes the libraries that compute, which a page that runs for weeks should not hold in memory. So a process
of its own reads the run, and ends: `python -m fairmesh.watch.finished FOLDER` prints a JSON object."""

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairmesh.metrics.units import Unit, defined
from fairmesh.storage.occupied import SUMMARY
from fairmesh.watch.view import Edge, Estimate, Privacy, Traffic, Variant, Verdict, View

if TYPE_CHECKING:
    from fairmesh.report.runs import Run

_PATIENCE_S = 120.0
_BEING_READ = "the report of this run is being read; comparisons and intervals come in a moment"
_OF_OWN_MODELS = "Values are those of the models that the sites are given; the report has the common model too."


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
            return replace(view, says=(*view.says, _BEING_READ), pending=True)
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
    fits = len(told["sites"]) == len(view.sites)  # else the summary was replaced after the view was made
    names = [variant["name"] for variant in told["variants"]]
    variants = tuple(
        _variant(one, told["variants"][names.index(one.name)]) for one in view.variants if one.name in names
    )
    curves = next((one.curves for one in variants if one.shown), view.curves)
    traffic = view.traffic or Traffic("the busiest site")
    return replace(
        view,
        sentence=told["sentence"],
        urgency=told["urgency"],
        says=tuple(told["says"]),
        notes=tuple(dict.fromkeys((*told["notes"], *view.notes))),
        sites=sites if fits else view.sites,
        advice=told["advice"],
        order=tuple(worst) if fits else view.order,
        worst_site=(worst[0] if worst and sites[worst[0]].value else None) if fits else view.worst_site,
        worst=_estimate(told["worst"]),
        mean=_estimate(told["mean"]),
        edges=(tuple(Edge((i, j)) for i, j in told["edges"]) if fits else ()) or view.edges,
        server=told["server"],
        variants=variants,
        curves=curves if len(curves.sites) in (0, len(view.sites)) else replace(curves, sites=()),
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
    from fairmesh.report.runs import Run
    from fairmesh.storage.run_folder import read_summary

    summary = read_summary(folder)
    records = [{**record, "round": summary["rounds"]} for record in summary["final"]]
    return told_of(Run(folder.name, summary, records, folder))


def told_of(run: "Run") -> dict[str, Any]:
    """Returns what the report says of a finished run, as `told_by_report` does.

    Args:
        run: The run; of its records, those of the last round are enough.
    """
    from fairmesh.report.contents import card
    from fairmesh.report.runs import ranked
    from fairmesh.report.sentences import privacy_sentences, unit_of

    found, (variants, _) = card(run), ranked(run)
    unit, graph = unit_of(found), found["graph"] or {"name": "", "edges": []}
    privacy, models, sites = found["privacy"], found["site_models"], _told_sites(found, unit)
    stopped = f" ({found['stopped_early']})" if found.get("stopped_early") else ""
    return {
        "sentence": f"finished after {found['rounds']:,} rounds{stopped}; {_begun(found['conclusion'])}",
        "urgency": "look" if found["diverged"] else "fine",
        "says": [*found["headline"], *found["hints"]],
        "advice": found["advice"],
        "notes": [
            *([f"{found['sweep']['choice']}."] if found["sweep"] else []),
            *found["notes"],
            *([_OF_OWN_MODELS] if models else []),
        ],
        "sites": sites,
        "worst_first": found["given_worst_first"],
        "worst": sites[found["given_worst_first"][0]]["value"],
        "mean": _mean_over_models(found) if models else _mean_over_sites(found),
        "edges": [] if graph.get("placed") else graph["edges"],
        "server": graph["name"] == "server",
        "variants": [_told_variant(one, one is variants[0]) for one in variants] if len(variants) > 1 else [],
        "privacy": privacy
        and {key: privacy[key] for key in ("epsilon", "budget", "delta", "unit")}
        | {"sentences": privacy_sentences(privacy)},
        "bytes": (found["traffic"]["bytes_busiest_node"], found["traffic"]["bytes_total"]),
    }


def _told_sites(found: Mapping[str, Any], unit: Unit) -> list[dict[str, Any]]:
    """Returns what the report says of each site."""
    from fairmesh.report.sentences import unit_of

    privacy, models = found["privacy"], {model["name"]: model for model in found["site_models"]}
    epsilons = privacy.get("epsilons") or []
    compared = Counter(kind for one in found["site_models"] or found["sites"] for kind in one["versus"])
    sites = [
        _with_common_model(site, unit, compared)
        if site["name"] not in models
        else _with_own_model(site, models[site["name"]], unit_of(found, found["site_models_judged_by"]), compared)
        for site in found["sites"]
    ]
    for i, site in enumerate(found["sites"]):
        of_network = privacy.get("sites", {}).get(site["name"])
        sites[i] |= {
            "rows": site["n"],
            "weight": site["weight"],
            "fixed": (site["references"].get("average"), None),
            "epsilon": epsilons[i] if i < len(epsilons) else of_network,
        }
    return sites


def _told_variant(variant: "Run", shown: bool) -> dict[str, Any]:
    """Returns what the report says of an algorithm of a sweep."""
    from fairmesh.report.runs import estimates_of

    changes, found = variant.summary["variants"][0]["changes"], estimates_of(variant)
    return {
        "name": ", ".join(f"{key} = {value}" for key, value in changes.items()),
        "worst": (found["worst"][0], None),  # its interval is not that of the site, which the page has
        "mean": (found["mean"][0], None),
        "diverged": len(variant.summary["diverged"]),
        "shown": shown,
    }


def _with_common_model(site: Mapping[str, Any], unit: Unit, compared: Mapping[str, int]) -> dict[str, Any]:
    """Returns how good the common model is at a site, as the report says it."""
    return {
        "value": (site["metrics"][unit.metric], site["interval"]),
        "alone": (site["references"].get("local"), None),
        "verdicts": _verdicts(site["versus"], unit, compared),
        "uses": "",
    }


def _with_own_model(
    site: Mapping[str, Any], model: Mapping[str, Any], judged_by: Unit, compared: Mapping[str, int]
) -> dict[str, Any]:
    """Returns how good the model is that a site is given, as the report says it."""
    from fairmesh.report.tables import mostly

    return {
        "value": (model["personal"], model["interval"]),
        "alone": (site["references"].get("local", model["local"]), None),
        "verdicts": _verdicts(model["versus"], judged_by, compared),
        "uses": mostly(model),
    }


def _verdicts(versus: Mapping[str, Any], unit: Unit, compared: Mapping[str, int]) -> list[dict[str, str]]:
    """Returns how a model differs from others at a site, training alone first; `compared` counts the sites by model."""
    from fairmesh.evidence.verdicts import verdict_in_words
    from fairmesh.report.sentences import ALONE, REFERENCES

    names = REFERENCES | {"common": "the common model"}
    return [
        {
            "against": names.get(kind, kind),
            "verdict": difference["verdict"],
            "text": verdict_in_words(difference, unit, names.get(kind, kind), compared[kind]),
        }
        for kind, difference in sorted(versus.items(), key=lambda item: item[0] != ALONE)
        if all(map(defined, difference.get("interval", ())))
    ]


def _mean_over_sites(found: Mapping[str, Any]) -> tuple[float, Sequence[float] | None]:
    """Returns the mean of the sites with the common model, with its interval."""
    known = found["intervals"].get("mean")
    return (known["value"], known["interval"]) if known else (found["over_sites"]["mean"], None)


def _mean_over_models(found: Mapping[str, Any]) -> tuple[float | None, Sequence[float] | None]:
    """Returns the mean of the sites with the models that they are given, with its interval."""
    known = found["site_models_over"].get("mean")
    if known and found["site_models_judged_by"] == found["metric"]:
        return known["value"], known["interval"]
    values = [model["personal"] for model in found["site_models"] if defined(model["personal"])]
    return sum(values) / len(values) if values else None, None


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
