"""Runs, finished or in progress, and their numbers as rows of tables."""

import json
import math
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput, listed
from fairmesh.metrics.units import Unit, defined
from fairmesh.storage.occupied import PERSONAL
from fairmesh.storage.run_folder import EXPERIMENT, SUMMARY, TRAFFIC, read_records, read_summary
from fairmesh.storage.strict_json import with_nan
from fairmesh.topology.mixing import Mixing
from fairmesh.training.best_round import decided_in_words
from fairmesh.training.result import Result
from fairmesh.training.summary import by_own_models, summary_of

SITES_SHOWN = 10  # on a terminal, if there are more than twelve
SHOWN = 5  # runs or variants in one picture; more cannot be told apart


@dataclass(frozen=True)
class Run:
    """A run, finished or in progress, from a folder or from memory."""

    label: str
    summary: dict[str, Any]
    records: list[dict[str, Any]]
    folder: Path | None = None
    variant: int = 0  # its number among the algorithms of a sweep

    @staticmethod
    def from_folder(folder: str | os.PathLike) -> "Run":
        summary = read_summary(folder)
        records = read_records(folder, ragged="planned_rounds" in summary)
        return Run(Path(folder).resolve().name, summary, _as_judged(records, summary), Path(folder))

    @staticmethod
    def from_result(result: Result, label: str | None = None) -> "Run":
        summary = summary_of(result)
        return Run(label or summary["algorithm"], summary, _as_judged(result.records, summary))

    def variants(self) -> "list[Run]":
        """Returns one run per algorithm of a sweep; the run itself if there is only one."""
        found = self.summary["variants"]
        if len(found) == 1:
            return [self]
        runs = []
        for k, variant in enumerate(found):
            label = ", ".join(f"{key} {value}" for key, value in variant["changes"].items())
            more = {"evidence": None} | variant | {"variants": [variant]}  # the run has the evidence of the chosen one
            if self.summary.get("chosen") not in variant["replicas"]:
                more["site_models_evidence"] = {}
            run = replace(self, label=f"{self.label}: {label}", variant=k)
            runs.append(run.of_replicas(variant["replicas"], more))
        return runs

    def of_replicas(self, replicas: Collection[int], more: dict[str, Any]) -> "Run":
        """Returns the run with some of its replicas only, and with what else its summary says of them."""
        lost = [r for r in self.summary["diverged"] if r in replicas]
        above = [r for r in self.summary.get("above_constant", []) if r in replicas]
        summary = self.summary | more | {"replicas": len(replicas), "diverged": lost, "above_constant": above}
        for key in {"final", "personal"} & summary.keys():
            summary[key] = [entry for entry in summary[key] if entry["replica"] in replicas]
        return replace(self, summary=summary, records=[one for one in self.records if one["replica"] in replicas])

    def wire_traffic(self) -> dict[str, Any] | None:
        """Returns what went over the connections of the site of a mesh whose result this is; None of other runs."""
        path = self.folder.parent / TRAFFIC if self.folder else None
        try:
            told = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
            counts = {
                f"{of}_{way}": int(told[f"{of}_{way}"]) for of in ("payload", "overhead") for way in ("out", "in")
            }
            return {"site": str(told["site"])} | counts
        except (OSError, ValueError, KeyError, TypeError):  # it only informs
            return None

    def personal(self) -> list[dict[str, Any]]:
        """Returns the sites' own models by replica; of a mesh, that of the site whose folder this is."""
        found = self.summary.get("personal")
        if found or self.folder is None:
            return found or []
        try:
            own = with_nan(json.loads((self.folder.parent / PERSONAL / SUMMARY).read_text(encoding="utf-8")))
            return [{"method": own["method"], "replica": 0, "sites": [own]}]
        except (OSError, ValueError, KeyError, TypeError):  # a run of another kind
            return []

    def settings_text(self) -> str:
        """Returns the experiment's settings as TOML; "" if there is no folder that has them."""
        path = self.folder / EXPERIMENT if self.folder else None
        return path.read_text(encoding="utf-8") if path and path.exists() else ""

    @property
    def alive(self) -> list[dict[str, Any]]:
        """Returns the last record of each replica that did not diverge."""
        lost = set(self.summary["diverged"])
        return [record for record in self.summary["final"] if record["replica"] not in lost]

    @property
    def metrics(self) -> list[str]:
        """Returns the measured metrics, the primary one first."""
        found = [
            name for name, value in self.summary["final"][0].items() if isinstance(value, dict) and "sites" in value
        ]
        return [self.metric, *(name for name in found if name != self.metric)]

    def over_sites(self, what: str, split: str = "test", metric: str | None = None) -> float:
        """Returns a metric's worst, mean, best or gap over sites, averaged over the replicas that did not diverge.

        Args:
            what: "worst", "mean", "best" or "gap".
            split: "test" for what the run is judged on, or "validation"; NaN if there is none.
            metric: The metric; None for the primary one.
        """
        metric = metric or self.metric
        if split != "test":
            return mean_of([record[split][metric][what] for record in self.alive if metric in record.get(split, {})])
        return mean_of([self._over_sites_of(record, what, metric) for record in self.alive if metric in record])

    def _over_sites_of(self, record: Mapping[str, Any], what: str, metric: str) -> float:
        """Returns what a record says over the sites, of which those with too few test rows cannot be the worst one."""
        table, few = record[metric], self._few_rows
        values = [value for i, value in enumerate(table.get("sites", ())) if i not in few and not math.isnan(value)]
        if what not in ("worst", "gap") or not few or not values:
            return table[what]
        worst = min(values) if self.summary["metrics"][metric]["higher_is_better"] else max(values)
        return worst if what == "worst" else abs(table["best"] - worst)

    @property
    def _few_rows(self) -> set[int]:
        """Returns the numbers of the sites with too few test rows to be the worst one."""
        return {i for i, site in enumerate(self.evidence.get("sites", ())) if site.get("few_rows")}

    def spread_by(self) -> str:
        """Returns what the replicas differ in, such as "5 splits"; nothing if there is only one."""
        final = self.summary["final"]
        counts = {key: len({record.get(key, 0) for record in final}) for key in ("split", "seed")}
        by = " and ".join(f"{count} {key}s" for key, count in counts.items() if count > 1)
        if math.prod(counts.values()) == len(final):
            return by
        return f"{len(final)} replicas" + (f" ({by})" if by else "")

    @property
    def evidence(self) -> dict[str, Any]:
        """Returns the intervals in the summary; nothing if it has none, or those of another metric."""
        found = self.summary.get("evidence") or {}
        return found if found.get("metric") == self.metric else {}

    @property
    def higher_is_better(self) -> bool:
        """Returns whether a larger value of the metric is better."""
        return self.summary["higher_is_better"]

    @property
    def metric(self) -> str:
        return self.summary["metric"]

    def unit(self, metric: str | None = None) -> Unit:
        """Returns how values of a metric are shown; None for the primary one."""
        metric = metric or self.metric
        return Unit.of(metric, self.summary["metrics"][metric])

    def curve(self, what: str, against: str) -> tuple[list[float], list[float], list[float], list[float]]:
        """Returns x, and the mean, lowest and highest over replicas of worst, mean, ... at each measured round. A value
        that is not defined, or not finite, is left out."""
        points: dict[int, list[dict]] = {}
        for record in self.records:
            if math.isfinite(self._over_sites_of(record, what, self.metric)):
                points.setdefault(record["round"], []).append(record)
        rounds = sorted(points)
        xs = list(map(float, rounds))
        if against != "rounds":
            xs = [max(record[against] for record in points[k]) / PER_MB[against] for k in rounds]
        values = [[self._over_sites_of(record, what, self.metric) for record in points[k]] for k in rounds]
        return xs, [sum(row) / len(row) for row in values], list(map(min, values)), list(map(max, values))

    def curves_of_sites(self) -> tuple[list[float], list[list[float]]]:
        """Returns the measured rounds, and for each site the mean of the metric over replicas in each of them."""
        points: dict[int, list[list[float]]] = {}
        for record in self.records:
            points.setdefault(record["round"], []).append(record[self.metric]["sites"])
        rounds = sorted(points)
        by_round = [[mean_of(column) for column in zip(*points[k])] for k in rounds]
        return list(map(float, rounds)), [list(column) for column in zip(*by_round)]

    def by_site(self, metric: str | None = None) -> list[float]:
        """Returns the final metric of every site, averaged over replicas that did not diverge and in which it is
        defined; NaN if there is none."""
        rows = [record[metric or self.metric]["sites"] for record in self.alive]
        return [mean_of(column) for column in zip(*rows)] if rows else [math.nan] * len(self.summary["sites"])

    def worst_first(self) -> list[int]:
        """Returns the numbers of the sites, the worst first. Those with too few test rows to be the worst come later,
        and those without a value last."""
        few = self._few_rows
        sign, values = 1 if self.higher_is_better else -1, self.by_site()
        return sorted(range(len(values)), key=lambda i: (math.isnan(values[i]), i in few, sign * values[i]))

    def worse_off_first(self) -> list[int]:
        """Returns the numbers of the sites in the order in which they matter: those that are worse than alone, then the
        worst first."""
        versus = [site.get("versus", {}).get("local") or {} for site in self.evidence.get("sites", ())]
        worse = {i for i, difference in enumerate(versus) if difference.get("verdict") == "worse"}
        return sorted(self.worst_first(), key=lambda i: i not in worse)

    def is_measured(self, i: int) -> bool:
        """Returns whether site i has data to be judged by; it is taken to, while a run is in progress."""
        support = self.summary.get("support")
        return not isinstance(support, list) or isinstance(support[i], dict)

    def weights(self) -> list[float] | None:
        """Returns the final lambda of every site, averaged over replicas that did not diverge."""
        rows = [record["lambda"] for record in self.alive if "lambda" in record]
        return [sum(column) / len(rows) for column in zip(*rows)] if rows else None

    def notes(self) -> list[str]:
        """Returns what a reader must know about the numbers."""
        s, found = self.summary, [*self.summary.get("notes", []), *self.evidence.get("notes", [])]
        if s["judged_on"] == "train":
            found.append(
                "No site has test data, so every site is judged on its training data: these numbers are too good."
            )
        idle = [str(name) for i, name in enumerate(s["sites"]) if not self.is_measured(i)]
        if idle:
            names = listed(idle, SITES_SHOWN)
            found.append(f"Trained but not measured, for lack of {s['judged_on']} data: {names}.")
        if "planned_rounds" in s:
            found.append(f"The run has {s['planned_rounds']} rounds; this is what all sites had measured so far.")
        if any(record.get("models") == "own" for record in self.records):
            last = "" if "planned_rounds" in s else " Only the last record is of their average."
            how = f"measured its own model on its own {s['judged_on']} data"
            if s.get("privacy"):
                how = "told the noised loss of its own model on the training units that it drew"
            found.append(f"On the way, each site {how}.{last}")
        if "best_chosen_on" in s:
            same = s["best_chosen_on"] == s["judged_on"]
            (best,) = s["best_round"]
            found.append(
                f"model-best.safetensors is of round {best}, the best by the {s['best_by']} {self.metric} on the "
                f"{s['best_chosen_on']} data of the sites."
                + (" Its metrics are on the same data that it was chosen by, so they are too good." if same else "")
                + f" model.safetensors is of the last round. {decided_in_words(s['best_decided'])}"
            )
        return found + self.contradictions()

    def contradictions(self) -> list[str]:
        """Returns which sites of a mesh say that others have sent or signed two different things, in sentences."""
        unsigned = self.summary.get("unsigned", ())
        said = [
            f"{site} has not always signed a hash of its messages, so they could not be compared." for site in unsigned
        ]
        for claim in self.summary.get("contradicted", ()):
            by, site, rounds = claim["by"], claim["site"], f"between rounds {claim['since']} and {claim['round']}"
            what = f"sent it other messages than {site} has signed"
            what = "has signed two different things about its messages or its kept models" if claim["both"] else what
            said.append(f"{by} says that {site} {what}, {rounds}: one of the two is broken, or lies.")
        return said


def mean_of(values: Sequence[float]) -> float:
    """Returns the mean of the values that are defined; NaN if there is none."""
    found = [value for value in values if not math.isnan(value)]
    return sum(found) / len(found) if found else math.nan


def rows_of(runs: Sequence[Run]) -> list[list[str]]:
    """Returns a header and one row per run. Numbers leave out replicas that diverged, and `caption_of` says what
    the intervals cover."""
    header = ["run", "algorithm", f"worst {runs[0].metric}", "mean", "best", "gap", "rounds", "busiest node sent"]
    rows = []
    for run in runs:
        sent = [f"{run.summary[what] / PER_MB[what]:.3g} MB" for what in ("bytes_busiest_node", "nominal_bits_busiest")]
        rows.append([run.label, run.summary["algorithm"], *_numbers(run), str(run.summary["rounds"]), *sent])
    return [[*header, "nominal"], *rows]


def estimates_of(run: Run, metric: str | None = None) -> dict[str, tuple[float, Sequence[float] | None]]:
    """Returns the worst site, the mean, the best and the gap, each with its interval where it is known.

    Args:
        run: The run, of which a replica is left.
        metric: The metric; None for the primary one, the only one that has intervals. Default: None.
    """
    known = run.evidence if metric in (None, run.metric) else {}
    best, gap = (run.over_sites(what, metric=metric) for what in ("best", "gap"))
    if known:
        values = [site["value"] for site in known["sites"] if defined(site["value"])]
        best = (max if run.higher_is_better else min)(values, default=math.nan)
        gap = abs(best - known["worst"]["value"])
    found: dict[str, tuple[float, Sequence[float] | None]] = {}
    for what in ("worst", "mean"):
        one = known.get(what) or {"value": run.over_sites(what, metric=metric), "interval": None}
        found[what] = one["value"], one["interval"]
    return found | {"best": (best, None), "gap": (gap, None)}


def _numbers(run: Run) -> list[str]:
    """Returns the worst site, the mean, the best and the gap, with intervals where they are known."""
    unit, lost = run.unit(), len(run.summary["diverged"])
    if not run.alive:
        return ["diverged"] * 4
    found = estimates_of(run)
    worst, mean = (unit.with_interval(*found[what]) for what in ("worst", "mean"))
    worst += f", {lost} of {run.summary['replicas']} diverged" if lost else ""
    above = len(run.summary.get("above_constant", []))
    worst += f", {above} of {run.summary['replicas']} diverged: far above a constant answer" if above else ""
    return [worst, mean, unit.shown(found["best"][0]), unit.gap(found["gap"][0])]


def caption_of(runs: Sequence[Run]) -> str:
    """Returns what the intervals of a table of runs cover; nothing if they have none."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        if run.alive and run.evidence:
            covers = f"{run.summary['judged_on']} {run.evidence['covers']}"  # which begins with samples or units
            by = f" (means over {run.spread_by()})" if run.spread_by() else ""
            text = f"{100 * run.evidence['level']:.0f} % intervals over {covers}{by}"
            labels.setdefault(text, []).append(run.label)
    texts = labels if len(labels) == 1 else [f"{text}: {', '.join(of)}" for text, of in labels.items()]
    return f"In brackets: {'; '.join(texts)}." if labels else ""


def check_comparable(runs: Sequence[Run]) -> None:
    """Refuses runs that cannot be shown in one table."""
    if not runs:
        raise BadInput("no run to show")
    for run in runs[1:]:
        for what in ("metric", "nodes", "sites", "judged_on"):
            here, there = run.summary[what], runs[0].summary[what]
            if here != there:
                said = {"judged_on": "the data that sites are judged on"}.get(what, what)
                raise BadInput(f"{run.label} and {runs[0].label} cannot be compared: {said} is {here!r} and {there!r}")


def ranked(run: Run) -> tuple[list[Run], str]:
    """Returns the variants of a run and what they are ranked on: "validation", or else what they are judged on. First
    comes the one whose models the run gives to its user, then the best at the worst site (of equals, on average), and
    those that diverged last. Of a private run they keep their order, and are ranked on nothing: ""."""
    variants = run.variants()
    if run.summary.get("privacy"):  # metrics have no noise, so that an order by them would tell of rows
        return variants, ""
    validated = all(math.isfinite(one.over_sites("worst", "validation")) for one in variants if one.alive)
    split, sign = "validation" if validated else "test", -1 if run.higher_is_better else 1
    chosen = run.summary.get("chosen")

    def key(variant: Run) -> tuple[bool, bool, float, float]:
        worst, mean = (variant.over_sites(what, split) for what in ("worst", "mean"))
        known = variant.evidence.get("worst", {}).get("value")
        if split == "test" and defined(known):
            worst = known  # a site with a few test rows is the worst of every variant, and tells none from another
        given = any(record["replica"] == chosen for record in variant.summary["final"])
        by_worst, by_mean = (sign * value if math.isfinite(value) else math.inf for value in (worst, mean))
        return not given, math.isnan(worst), by_worst, by_mean

    return sorted(variants, key=key), "validation" if validated else run.summary["judged_on"]


def chosen_of(run: Run) -> Run:
    """Returns the variant of a sweep that tables and pictures show; the run itself if it is no sweep."""
    return ranked(run)[0][0]


def choices_in_words(runs: Sequence[Run]) -> list[str]:
    """Returns how the shown variant of each sweep was chosen: among how many, on which data, and whether one of its
    numbers is at an end of those that were tried."""
    said = []
    for run in runs:
        variants, ranked_on = ranked(run)
        if len(variants) == 1:
            continue
        tried = [variant.summary["variants"][0]["changes"] for variant in variants]
        settings = ", ".join(f"{key} {value}" for key, value in tried[0].items())
        if not ranked_on:
            said.append(
                f"{run.label}: {settings} is the first of {len(variants)} candidates, and is shown; a private run is "
                "not chosen by metrics, which have no noise"
            )
            continue
        text = f"{run.label}: {settings} is the best of {len(variants)} candidates on {ranked_on} data"
        text += "" if ranked_on == "validation" else ", so its numbers are too good"
        for key, value in tried[0].items():
            values = {changes[key] for changes in tried if isinstance(changes[key], int | float)}
            if len(values) > 1 and value in (end := {min(values): "smallest", max(values): "largest"}):
                other = "larger" if end[value] == "largest" else "smaller"
                text += f"; {key} {value} is the {end[value]} that was tried, and {other} ones may be better"
        said.append(text)
    return said


def unequal_choices(runs: Sequence[Run]) -> list[str]:
    """Returns that runs were chosen among unequal numbers of candidates, in at most one sentence."""
    counts = {run.label: len(run.summary["variants"]) for run in runs}
    if len(set(counts.values())) < 2:
        return []
    told = ", ".join(f"{label} {count}" for label, count in counts.items())
    return [f"the runs had unequal numbers of candidates to choose from ({told}); a difference may come from that"]


def best_few(run: Run, most: int = SHOWN) -> tuple[list[Run], str]:
    """Returns the variants of a run that tables and pictures show, the best first, and what they leave out, in words.

    Args:
        run: The run, which may be a sweep.
        most: How many are shown.
    """
    variants, ranked_on = ranked(run)
    left_out = (
        f"{run.label}: only the best {most} of {len(variants)} variants by the worst site on {ranked_on} data; "
        f"{len(variants) - most} others are in summary.json"
    )
    return variants[:most], left_out if len(variants) > most else ""


def worst_sites(runs: Sequence[Run]) -> set[int]:
    """Returns the sites that are worst in any of the runs."""
    return {i for run in runs if defined(run.by_site()[i := run.worst_first()[0]])}


def few_sites(run: Run) -> list[int]:
    """Returns the sites that tables on a terminal show, in their order; of many, the ten that matter most."""
    n = len(run.summary["sites"])
    return run.worse_off_first()[:SITES_SHOWN] if n > SITES_SHOWN + 2 else list(range(n))


def few_rows(table: list[list[str]], run: Run) -> list[list[str]]:
    """Returns a table of sites; of many, with the rows of those that matter most, and how many more there are."""
    names = [str(name) for name in run.summary["sites"]]
    first = [names[i] for i in few_sites(run)]
    rows = [row for row in table[1:] if row[0] in first]
    return table[:1] + with_count(sorted(rows, key=lambda row: first.index(row[0])), run)


def with_count(rows: list[list[str]], run: Run) -> list[list[str]]:
    """Returns the rows of `few_sites`, and one that says how many more sites there are."""
    more = len(run.summary["sites"]) - len(few_sites(run))
    return [*rows, [f"... and {more} more, in the report", *[""] * (len(rows[0]) - 1)]] if more and rows else rows


def few_sentences(sentences: Sequence[str], verdicts: Sequence[str]) -> list[str]:
    """Returns sentences about sites; of many, those of sites with a verdict, first the bad ones, ten at most."""
    if len(sentences) <= SITES_SHOWN + 2:
        return list(sentences)
    ranks = ["worse", "hurt", "better", "helped"]
    said = sorted((ranks.index(verdict), i) for i, verdict in enumerate(verdicts) if verdict in ranks)
    more = f"... and {len(said) - SITES_SHOWN} more, which are in the report and in summary.json"
    return [*(sentences[i] for _, i in said[:SITES_SHOWN]), *([more] if len(said) > SITES_SHOWN else [])]


def worst_in_words(run: Run, most: int = 3) -> str:
    """Returns the sites at which a run does worst, the worst first, with their values; nothing if none is known."""
    unit, names, values = run.unit(), run.summary["sites"], run.by_site()
    known = [i for i in run.worst_first() if not math.isnan(values[i])]
    shown = ", ".join(f"{names[i]} ({unit.shown(values[i])})" for i in known[:most])
    return f"{run.label}: the worst sites by {run.metric} are {shown}" if shown else ""


def site_table(runs: Sequence[Run]) -> list[list[str]]:
    """Returns a header and one row per site: its name and each run's final metric."""
    names = [str(name) for name in runs[0].summary["sites"]]
    columns = [
        [run.unit().shown(value) if run.is_measured(i) else "not measured" for i, value in enumerate(run.by_site())]
        for run in runs
    ]
    return [["site", *(run.label for run in runs)], *map(list, zip(names, *columns))]


def _as_judged(records: list[dict[str, Any]], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the records with the metrics of the models that the sites are judged by."""
    return [by_own_models(one) for one in records] if summary.get("judged_by") == "own models" else records


_TRACE = 0.005  # of a model, which tables leave out
_MARKS = {"better": "▲ ", "worse": "▼ "}


def site_models(run: Run) -> list[dict[str, Any]]:
    """Returns the model of each site: its metric next to those of the common model and of training alone, averaged over
    replicas; its interval; how it differs from both; what it is made of; and notes. Nothing without a personalization.
    """
    evidence = {one["name"]: one for one in run.summary.get("site_models_evidence", {}).get("sites", [])}
    found = []
    for sites in zip(*(of_replica["sites"] for of_replica in run.personal())):
        name, made_of = sites[0]["name"], dict.fromkeys(key for site in sites for key in site["weights"])
        found.append(
            {"name": name}
            | {
                model: statistics.fmean((site["test"] or site["held_out"])[model][run.metric] for site in sites)
                for model in ("common", "local", "personal")
            }
            | {
                "interval": evidence.get(name, {}).get("interval"),
                "versus": evidence.get(name, {}).get("versus", {}),
                "shares": {k: statistics.fmean(site["shares"][k] for site in sites) for k in sites[0]["shares"]},
                "weights": {k: statistics.fmean(site["weights"].get(k, 0.0) for site in sites) for k in made_of},
                "notes": list(dict.fromkeys(site["note"] for site in sites if "note" in site)),
            }
        )
    return found


def personal_table(run: Run) -> list[list[str]]:
    """Returns a header and one row per site: the metric of the common model, of the site's model alone and of its own
    model, and what it should use. The remark on the common model and on the one alone is how the site's own model
    differs from it. Nothing if the run has no personalization."""
    found, unit = site_models(run), run.unit()
    judged_by = run.summary.get("site_models_evidence", {}).get("metric", run.metric)
    of_differences = unit if judged_by == run.metric else Unit.of(judged_by, run.summary["metrics"][judged_by])

    def compared(site: Mapping[str, Any], model: str) -> str:
        interval = site["versus"].get(model, {}).get("interval") or [math.nan]
        if site["shares"].get(model) == 1 or not all(map(defined, interval)):
            return unit.shown(site[model])
        of = "" if of_differences is unit else f" {of_differences.of_differences}"
        mark = _MARKS.get(site["versus"][model]["verdict"], "")
        return f"{unit.shown(site[model])}\n{mark}{of_differences.difference(interval)}{of}"

    rows = []
    for site in found:
        parts = sorted(((share, kind) for kind, share in site["shares"].items() if share >= _TRACE), reverse=True)
        uses = ", ".join(f"{kind} ({100 * share:.0f} %)" if len(parts) > 1 else kind for share, kind in parts)
        own = unit.shown(site["personal"])
        rows.append([site["name"], *(compared(site, model) for model in ("common", "local")), own, uses])
    return [["site", "common model", "alone", "its model", "should use"], *rows] if rows else []


def personal_caption(run: Run) -> str:
    """Returns what a reader of the sites' own models must know; nothing if the run has no personalization."""
    found = run.summary.get("site_models_evidence")
    if not found:
        return ""
    return (
        f"The numbers next to the common model and to alone say how a site's own model differs from them on "
        f"{found['judged_on']} rows ({100 * found['level']:.0f} % interval; ▲ better, ▼ worse, else unclear; adjusted "
        "for the number of sites). A model is common, adapted from the common one, or own: of the site's rows alone."
    )


def subgroup_table(run: Run) -> list[list[str]]:
    """Returns a header and one row per site and subgroup: its samples, its metric and its weight, in the first replica.
    Nothing if the run has no subgroups."""
    found, metric = run.summary.get("subgroups"), run.metric
    if not found:
        return []
    rows = []
    for group in found:
        weight = "-" if group["weight"] is None else f"{group['weight']:.2f}"
        value = run.unit().shown(group["metrics"][metric])
        rows.append([group["site"], group["subgroup"], str(group["rows"]), value, weight])
    return [["site", "subgroup", "samples", metric, "weight"], *rows]


def models_in_words(summary: Mapping[str, Any]) -> str:
    """Returns which of a sweep's algorithms the model files hold; nothing if there is one algorithm only."""
    if len(summary["variants"]) < 2:
        return ""
    final = [entry for entry in summary["models"] if entry["which"] == "final"]
    chosen = next((entry for entry in final if entry["file"] == "model.safetensors"), None)
    if chosen is None:
        why = "only validation data could say which settings are best"
        if summary.get("privacy"):
            why = "a choice by metrics would tell of the rows that they are measured on, which have no noise"
        return (
            f"model files are numbered by replica, {final[0]['file']} to {final[-1]['file']}, and summary.json says "
            f"which settings each has. No model.safetensors is written, since {why}"
        )
    settings = ", ".join(f"{key} = {value}" for key, value in chosen["variant"].items())
    return f"model.safetensors has {settings} (replica {chosen['replica']}), the best on the sites' validation data"


def links_of(mixing: Mixing) -> list[list[int]]:
    """Returns the pairs of nodes that talk to each other."""
    return sorted([int(i), int(j)] for i, j in zip(*mixing.matrix.nonzero()) if i < j)


PER_MB = {"nominal_bits_busiest": 8e6, "bytes_busiest_node": 1e6}
