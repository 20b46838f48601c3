"""What a report says, as JSON: the page and the model card are two ways to show it."""

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import fairmesh
from fairmesh.algorithms.base import Algorithm
from fairmesh.config.registry import FAMILIES
from fairmesh.config.tables import from_table
from fairmesh.config.trusted import import_paths
from fairmesh.errors import BadInput
from fairmesh.evidence.intervals import LEVEL
from fairmesh.metrics.units import defined
from fairmesh.report.answers import why_unreadable
from fairmesh.report.first_sentences import advice_of, conclusion_of, headline_of
from fairmesh.report.runs import Run, links_of, ranked
from fairmesh.report.sections import Json, told_by_sections
from fairmesh.report.sentences import REFERENCES, hints, network_sentence, site_model_sentence, site_sentence
from fairmesh.storage.run_folder import PREPROCESSING
from fairmesh.topology.graphs import Topology
from fairmesh.topology.mixing import union_of


def contents(runs: Sequence[Run], title: str) -> Json:
    """Returns all that a report says of one run or several."""
    return {
        "title": title,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "fairmesh": fairmesh.__version__,
        "runs": [card(run) for run in runs],
    }


def card(run: Run) -> Json:
    """Returns all that a report says of a run; of a sweep, all that it says of its best variant, and the ranking."""
    variants, _ = ranked(run)
    chosen = variants[0]
    summary = chosen.summary
    found: Json = {
        "label": run.label,
        "folder": str(run.folder) if run.folder else None,
        "algorithm": summary["algorithm"],
        "changes": summary["variants"][0]["changes"] if len(variants) > 1 else {},
        "metric": chosen.metric,
        "metrics": {name: _metric(chosen, name) for name in chosen.metrics},
        "tail": f"{100 * summary['cvar_level']:.3g} %",  # of the sites, which CVaR is a mean over
        "classes": summary["model"].get("classes", []),
        "higher_is_better": chosen.higher_is_better,
        "judged_on": summary["judged_on"],
        "judged_by": summary.get("judged_by", "average model"),
        "rounds": summary["rounds"],
        "planned_rounds": summary.get("planned_rounds"),
        "replicas": summary["replicas"],
        "spread_by": chosen.spread_by(),
        "diverged": len(summary["diverged"]),
        "over_sites": {what: chosen.over_sites(what) for what in ("worst", "mean", "best", "gap")},
        "intervals": _intervals(chosen),
        "conclusion": conclusion_of(summary),
        "advice": advice_of(summary),
        "headline": headline_of(summary),
        "handed_out": summary.get("handed_out"),
        "sites": _sites(chosen),
        "worst_first": chosen.worst_first(),
        "graph": _graph(chosen),
        "parameters": summary["parameters"],
        "traffic": {name: summary[name] for name in ("bytes_busiest_node", "bytes_total", "nominal_bits_busiest")}
        | {"on_the_wire": run.wire_traffic()},
        "notes": [*chosen.notes(), *_failures(chosen)],
        "provenance": summary.get("provenance"),
        "files": _files(chosen),
        "settings": run.settings_text(),
    }
    found = dict(**found, **told_by_sections(run, chosen))  # an error if a section takes a key that is taken
    for site in found["sites"]:
        site["sentence"] = site_sentence(site, found)
    for model in found["site_models"]:
        model["sentence"] = site_model_sentence(model, found)
    found["given_worst_first"] = _given_worst_first(found)
    return found | {"sentence": network_sentence(found), "hints": hints(found)}


def _given_worst_first(found: Json) -> list[int]:
    """Returns the numbers of the sites, the worst first by the models that they are given."""
    values = {model["name"]: model["personal"] for model in found["site_models"]}
    if not values:
        return found["worst_first"]
    names, sign = [site["name"] for site in found["sites"]], 1 if found["higher_is_better"] else -1

    def key(i: int) -> tuple[bool, bool, float]:
        value = values.get(names[i])
        known = defined(value)
        return names[i] != found["site_models_worst"], not known, sign * value if known else 0.0

    return sorted(found["worst_first"], key=key)


def _metric(run: Run, name: str) -> Json:
    """Returns how a metric is read, and what is said of all sites by it."""
    numbers = {what: run.over_sites(what, metric=name) for what in ("worst", "mean", "best", "gap")}
    table = run.summary["metrics"][name]
    if not run.summary["diverged"]:  # these are measured without regard to replicas that diverged
        numbers |= {key: table[key] for key in ("worst_share", "cvar", "std", "jain")}
    return {key: table[key] for key in ("share", "unit", "higher_is_better") if key in table} | numbers


def _intervals(run: Run) -> Json:
    """Returns the intervals of the worst site and of the mean over sites, where they are known."""
    known = run.evidence
    return {"level": LEVEL} | {key: known[key] for key in ("level", "covers", "worst", "mean") if known.get(key)}


def _sites(run: Run) -> list[Json]:
    """Returns what is known of each site, in the order of the sites."""
    summary = run.summary
    names = [str(name) for name in summary["sites"]]
    evidence = {one["name"]: one for one in run.evidence.get("sites", [])}
    support = summary.get("support") or [{}] * len(names)  # None for a site that is not measured
    weights, compared = run.weights(), references(run)
    values = {metric: run.by_site(metric) for metric in run.metrics}
    versus = _versus(evidence)
    found = []
    for i, name in enumerate(names):
        known, counted = evidence.get(name, {}), support[i] if isinstance(support[i], dict) else {"n": 0}
        n = next((count for count in (known.get("n"), counted.get("n")) if defined(count)), None)
        found.append(
            {
                "name": name,
                "group": str(summary["groups"][i]),
                "n": n,
                "units": known.get("units"),  # of which the samples are, such as patients
                "n_at_least": bool(known.get("n_at_least")),  # counts below five do not travel between organisations
                "support": counted.get("classes"),
                "measured": n != 0 and run.is_measured(i),
                "metrics": {metric: column[i] for metric, column in values.items()},
                "interval": _known(known.get("interval")),
                "weight": weights[i] if weights else None,
                "prior": summary["prior"][i],
                "references": {kind: column[i] for kind, column in compared.items()},
                "why_not_compared": known.get("why_not"),
                "versus": {kind: by_site[name] for kind, by_site in versus.items() if name in by_site},
            }
        )
    return found


def _known(interval: Any) -> list[float] | None:
    """Returns an interval, or None if it is not defined."""
    return interval if isinstance(interval, list) and all(map(defined, interval)) else None


def _versus(evidence: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """Returns how each site differs from each model that it is compared with: by model, then by site."""
    by_model: dict[str, dict[str, Json]] = {}
    for name, known in evidence.items():
        for kind, difference in known.get("versus", {}).items():
            by_model.setdefault("average" if kind == "fixed weights" else kind, {})[name] = difference
    return {
        kind: {site: one for site, one in sites.items() if "interval" not in one or _known(one["interval"])}
        for kind, sites in by_model.items()
    }


def _failures(run: Run) -> list[str]:
    """Returns which references and answers to test rows have no numbers, and why."""
    tables = run.summary.get("references", {})
    reasons = {
        kind: table.get("failed") or ("it diverged" if table.get("diverged") else "") for kind, table in tables.items()
    }
    said = [f"There is no comparison with {REFERENCES.get(kind, kind)}: {why}" for kind, why in reasons.items() if why]
    unreadable = why_unreadable(run)
    return [*said, f"There is no calibration: {unreadable}"] if unreadable else said


def references(run: Run) -> dict[str, list[float]]:
    """Returns the primary metric at every site, for each model that the run is compared with."""
    found = {}
    if "weights" in run.summary:
        fixed = run.summary["weights"]["sites"]
        found["average"] = [fixed[str(name)]["fixed"] for name in run.summary["sites"]]
    for kind, table in run.summary.get("references", {}).items():
        if "sites" in table and not table["diverged"]:
            found[kind] = table["sites"]
    return found


def _graph(run: Run) -> Json | None:
    """Returns who talks to whom, by the numbers of the sites; None if it is not known. It does not import the code of a
    topology of the user's own."""
    settings, n = tomllib.loads(run.settings_text()), len(run.summary["sites"])
    table = settings.get("topology", {})
    kind = FAMILIES[Algorithm].get(run.summary["algorithm"])
    if kind is not None and getattr(kind, "needs_server", False):
        return {"name": "server", "edges": [], "placed": False}
    if "name" not in table or import_paths(table):
        return None
    try:
        mixing = union_of(from_table(Topology, table, "topology").build(n))
    except BadInput:  # sites have left, or it was written by another version
        return None
    return {
        "name": table["name"],
        "edges": links_of(mixing),
        "spectral_gap": mixing.gap,
        "placed": settings.get("placements") is not None,  # then node i does not have the data of site i
    }


_HELD = {
    "final": "the model of the last round",
    "best": "the model of the best round ({round})",
    "time-average": "the average of the models of all rounds",
}


def _files(run: Run) -> list[Json]:
    """Returns the run's files with models, or those of a variant, with what they hold and their digests."""
    if run.folder is None:
        return []
    replicas = {record["replica"] for record in run.summary["final"]}
    held: dict[str, str] = {}
    for entry in run.summary.get("models", []):
        if entry["replica"] in replicas:
            held[entry["file"]] = _HELD[entry["which"]].format(**entry)
            if len(replicas) > 1:
                held[entry["file"]] += "".join(f", {key} {entry[key]}" for key in ("seed", "split") if key in entry)
    for path in sorted(run.folder.glob("personal-*.safetensors")):
        site, _, replica = path.stem.removeprefix("personal-").partition("-")
        if int(replica or 0) in replicas:
            of = f", replica {int(replica or 0)}" if len(replicas) > 1 else ""
            held[path.name] = f"the own model of {run.summary['sites'][int(site)]}{of}"
    held[PREPROCESSING] = "how columns become inputs; it belongs to every model"
    return [
        {"name": name, "holds": holds, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, holds in held.items()
        if (run.folder / name).exists()
        for content in [(run.folder / name).read_bytes()]
    ]
