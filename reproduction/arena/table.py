"""The tables of the arena, from recorded rows: what each method reaches per problem, and its wins and losses.

Every number is a mean over seeds first and over splits then. Accuracies are shares; errors (RMSE) are in units of the
spread of the targets over all training rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fairmesh.evidence.intervals import Estimate as Judged
from fairmesh.evidence.intervals import quantile
from fairmesh.evidence.many import clear_among
from reproduction.arena.methods import ALONE, DEFAULT, FIXED, METHODS, MIXTURE, SITES_MODEL
from reproduction.arena.natural import TEST_SHARE
from reproduction.arena.problems import PROBLEMS
from reproduction.lines import Line
from reproduction.sites.running import rows_of
from reproduction.sites.site_problem import SiteProblem
from reproduction.sites.table import Accuracies, Estimate, worst_fifth

ENOUGH = 20  # test rows of a site that can be the worst one
MEASURES = {"worst": "worst site", "fifth": "worst fifth", "mean": "mean"}
REFERENCES = (ALONE, FIXED, MIXTURE)
_COUNTED = ("fifth", "mean")  # measures whose wins and losses are counted
COMMON, OWN = "Default's common model", "Default's own models"  # of the run that makes the sites' models
_HIDDEN = (COMMON, OWN)
_MODELS = {"personal": SITES_MODEL, "common": COMMON, "local": OWN}

Book = dict[tuple[str, str], Accuracies]  # (method, tuning) -> split -> scores (seeds, sites): more is better


def overlap(problem: SiteProblem) -> float:
    """Returns how many test rows there are per training row, where all splits divide the same rows."""
    return TEST_SHARE / (1 - TEST_SHARE) if problem.kind == "natural" else 0.0


def book_of(rows: Sequence[Line]) -> Book:
    """Returns the scores of one problem's rows, in the order of the methods. Errors are negative, so that more is
    better. A run that gives sites their models has a row for these too."""
    found: Book = {}
    for row in rows:
        problem = PROBLEMS[row["problem"]]
        sign = -1.0 if problem.lower_is_better else 1.0
        for split, outcome in row["splits"].items():
            named = {row["method"]: outcome[problem.recorded_as]}
            named |= {_MODELS[kind]: values for kind, values in outcome.get("models", {}).items() if kind in _MODELS}
            for name, values in named.items():
                scores = sign * np.array(values, dtype=float)  # null, of a diverged model, is NaN
                found.setdefault((name, row["tuning"]), {})[int(split)] = scores
    names = [*METHODS, SITES_MODEL]
    order = [(name, tuning) for name in names for tuning in ("untuned", "tuned")]
    return {key: found[key] for key in (*order, *(k for k in found if k not in order)) if key in found}


def measured(scores: Accuracies, enough: np.ndarray) -> dict[str, dict[int, float]]:
    """Returns each measure by split: of the worst site among those with `enough` test rows, of the worst fifth of all
    sites, and of all sites. No worst site if none has enough rows."""
    return {
        "worst": {s: float(a[:, enough].min(axis=1).mean()) for s, a in scores.items()} if enough.any() else {},
        "fifth": {s: float(worst_fifth(a).mean()) if np.isfinite(a).all() else math.nan for s, a in scores.items()},
        "mean": {s: float(a.mean()) for s, a in scores.items()},
    }


def enough_rows(rows: Sequence[Line]) -> np.ndarray:
    """Returns which sites of a problem have enough test rows for a worst site."""
    return np.array(rows[0]["test_rows"]) >= ENOUGH


def table(rows: Sequence[Line]) -> list[Line]:
    """Returns a line per method and tuning with every measure and the bytes of the busiest node."""
    problem, enough = PROBLEMS[rows[0]["problem"]], enough_rows(rows)
    sign = -1.0 if problem.lower_is_better else 1.0
    sent = {(row["method"], row["tuning"]): max(o.get("bytes", 0) for o in row["splits"].values()) for row in rows}
    lines = []
    for (method, tuning), scores in book_of(rows).items():
        if method in _HIDDEN:
            continue
        line: Line = {"method": method, "tuning": tuning, "splits": len(scores)}
        for name, values in measured(scores, enough).items():
            line[name] = Estimate.of([sign * v for v in values.values()], overlap(problem)) if values else None
        line["bytes"] = sent[DEFAULT if method == SITES_MODEL else method, tuning]
        lines.append(line)
    return lines


def table_in_words(lines: Sequence[Line]) -> list[list[str]]:
    """Returns one problem's table as rows of text, headed by the names of the columns."""
    rows = []
    for line in lines:
        label = line["method"] + (", tuned" if line["tuning"] == "tuned" else "")
        rows.append([label, *(_shown(line[name]) for name in MEASURES), f"{line['bytes'] / 1000:,.0f}"])
    return [["method", *MEASURES.values(), "kB sent"], *rows]


def _shown(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return estimate.shown() if math.isfinite(estimate.mean) else "diverged"


@dataclass(frozen=True)
class Change(Judged):
    """A difference between two methods over splits: its mean, the number of splits and its standard error."""

    value: float
    rows: int
    error: float

    @staticmethod
    def of(values: Sequence[float] | np.ndarray, overlap: float) -> "Change":
        values = np.asarray(values, dtype=float)
        spread = values.std(ddof=1) if len(values) > 1 and np.isfinite(values).all() else math.nan
        return Change(float(values.mean()), len(values), float(spread * math.sqrt(1 / len(values) + overlap)))

    def bound(self, tail: float, upper: bool) -> float:
        if not math.isfinite(self.value) or not math.isfinite(self.error):
            return math.nan
        return self.value + quantile(1 - tail if upper else tail, self.rows - 1) * self.error


def change(of: Accuracies, over: Accuracies, measure: str, problem: SiteProblem, enough: np.ndarray) -> Change | None:
    """Returns how much better a method is than another one in a measure, paired by split; None if that is not known."""
    return _paired(measured(of, enough)[measure], measured(over, enough)[measure], problem)


def _paired(of: dict[int, float], over: dict[int, float], problem: SiteProblem) -> Change | None:
    """Returns the difference over splits; NaN if the first method diverged, infinite if only the other one did."""
    splits = sorted(of.keys() & over.keys())
    if not splits:
        return None
    differences = [of[s] - over[s] if math.isfinite(over[s]) or math.isnan(of[s]) else math.inf for s in splits]
    return Change.of(differences, overlap(problem))


def recorded(results: Path) -> dict[str, list[Line]]:
    """Returns the recorded rows of every problem that was run."""
    return {name: rows for name in PROBLEMS if (rows := rows_of(results, name))}


def comparisons(
    found: Mapping[str, Sequence[Line]], tuning: str, methods: Sequence[str] = (*METHODS, SITES_MODEL)
) -> list[Line]:
    """Returns how often each method is better and worse than Local, Fixed and the mixture, in the worst fifth and in
    the mean. Only differences count whose interval excludes 0 after the adjustment of Benjamini and Hochberg over the
    problems; a method that diverged has lost. Methods and references are tuned, if they can be."""
    by_problem = {
        name: {key: measured(scores, enough_rows(rows)) for key, scores in book_of(rows).items()}
        for name, rows in found.items()
    }

    def change_on(problem: str, method: str, reference: str, measure: str) -> Change | None:
        of_problem = by_problem[problem]
        # Untuned, if there is nothing to tune.
        a, b = (of_problem.get((name, tuning), of_problem.get((name, "untuned"))) for name in (method, reference))
        known = method != reference and a is not None and b is not None
        return _paired(a[measure], b[measure], PROBLEMS[problem]) if known else None

    lines = []
    for method in methods:
        line: Line = {"method": method, "tuning": tuning}
        for reference in REFERENCES:
            for measure in _COUNTED:
                changes = [change_on(problem, method, reference, measure) for problem in found]
                line[f"{reference}: {measure}"] = counted([one for one in changes if one is not None])
        if any(counts["problems"] for counts in line.values() if isinstance(counts, dict)):
            lines.append(line)
    return lines


def counted(changes: Sequence[Change]) -> dict[str, int]:
    """Returns how many changes are clearly better and worse among all of them. Who diverged has lost."""
    clear = clear_among(changes).which
    return {
        "wins": sum(changes[i].value > 0 for i in clear) + sum(one.value == math.inf for one in changes),
        "losses": sum(changes[i].value < 0 for i in clear) + sum(math.isnan(one.value) for one in changes),
        "problems": len(changes),
    }


def wins_and_losses(
    found: Mapping[str, Sequence[Line]], method: str = SITES_MODEL, tuning: str = "untuned"
) -> dict[str, dict[str, dict[str, int]]]:
    """Returns how often a method is clearly better and worse than each reference, by measure:
    `{"Local": {"mean": {"wins": 20, "losses": 0, "problems": 35}, ...}, ...}`. Pages that state such counts are tested
    against it.

    Args:
        found: The rows of each problem, as `recorded` returns them.
        method: Its name. Default: "Site's model".
        tuning: "untuned" or "tuned". Default: "untuned".
    """
    (line,) = comparisons(found, tuning, [method])
    return {name: {measure: line[f"{name}: {measure}"] for measure in _COUNTED} for name in REFERENCES}


def comparisons_in_words(lines: Sequence[Line]) -> list[list[str]]:
    """Returns wins and losses as rows of text, headed by the names of the columns."""
    columns = [f"{reference}: {measure}" for reference in REFERENCES for measure in _COUNTED]
    rows = []
    for line in lines:
        cells = [line[column] for column in columns]
        words = [f"{c['wins']} : {c['losses']} of {c['problems']}" if c["problems"] else "-" for c in cells]
        method = METHODS.get(line["method"])
        tuned = line["tuning"] == "tuned" and method is not None and method.candidates
        rows.append([line["method"] + (", tuned" if tuned else ""), *words])
    return [["method", *(column.replace("fifth", "worst fifth") for column in columns)], *rows]
