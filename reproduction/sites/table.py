"""The tables of the bench, from recorded rows: what each method reaches per problem, and what the weights gained.

Every number is a mean over seeds first and over splits then; its interval is a t-interval over the splits."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from reproduction.lines import Line
from reproduction.sites.methods import ALONE, EQUAL, FIXED, METHODS, ORACLE
from reproduction.sites.problems import PROBLEMS

CONFIDENCE = 0.95
FIFTH = 0.2
WORTH_HAVING = 0.03  # a better worst site exists if oracle weights gain this much over equal weights
GAINED, MEAN_LOST, WORST_LOST = 0.5, 0.01, 0.005  # the goals: see `summary`
MEASURES = {
    "worst": "worst site",
    "fifth": "worst fifth",
    "mean": "mean",
    "better_off": "better off than alone",
    "regret": "worst regret",
}
Accuracies = dict[int, np.ndarray]  # split -> (seeds, sites)


@cache
def _quantile(freedom: int) -> float:
    return stats.t.ppf((1 + CONFIDENCE) / 2, freedom)


class Estimate(NamedTuple):
    """A mean over splits, and half of the width of its 95 % interval; None with one split."""

    mean: float
    half: float | None

    @staticmethod
    def of(values: Sequence[float] | np.ndarray, overlap: float = 0.0) -> "Estimate":
        """Returns the estimate from one value per split.

        Args:
            values: The values.
            overlap: Test rows per training row, if splits divide the same rows: their values are then correlated, and
                the interval is wider (Nadeau and Bengio, 2003). 0 if every split has rows of its own.
        """
        values = np.asarray(values, dtype=float)
        if len(values) < 2:
            return Estimate(float(values.mean()), None)
        error = values.std(ddof=1) * math.sqrt(1 / len(values) + overlap)
        return Estimate(float(values.mean()), float(_quantile(len(values) - 1) * error))

    def shown(self, signed: bool = False) -> str:
        """Returns percentage points: "86.2 ±1.3"."""
        return f"{100 * self.mean:{'+' if signed else ''}.1f}" + (
            "" if self.half is None else f" ±{100 * self.half:.1f}"
        )


def variants(row: Line, fresh: bool = False) -> list[Accuracies]:
    """Returns the accuracies of each recorded variant of a row; most rows have one. Those of the splits that the table
    shows, or of `fresh` ones, which were run after all choices were made."""
    own = PROBLEMS[row["problem"]].splits
    splits = {int(split): outcome for split, outcome in row["splits"].items() if (int(split) in own) != fresh}
    if not splits:
        return []
    count = min(len(outcome.get("variants", [0])) for outcome in splits.values())
    return [{s: np.array(o.get("variants", [o])[v]["accuracy"]) for s, o in splits.items()} for v in range(count)]


def accuracies(row: Line, fresh: bool = False) -> Accuracies:
    """Returns a row's accuracies by split. Of a row with variants, those of the variant with the best worst site."""
    return max(variants(row, fresh), key=lambda found: float(np.mean([worst(one).mean() for one in found.values()])))


def worst(accuracy: np.ndarray) -> np.ndarray:
    """Returns the worst site of each seed (seeds,)."""
    return accuracy.min(axis=1)


def worst_fifth(accuracy: np.ndarray) -> np.ndarray:
    """Returns the mean of the worst fifth of the sites of each seed, one site at least (seeds,)."""
    few = max(1, round(FIFTH * accuracy.shape[1]))
    return np.sort(accuracy, axis=1)[:, :few].mean(axis=1)


def measured(found: Accuracies, alone: Accuracies | None) -> dict[str, list[float]]:
    """Returns each measure by split, averaged over seeds. Those that need the sites' accuracies alone use the splits
    that both have."""
    numbers = {
        "worst": [float(worst(a).mean()) for a in found.values()],
        "fifth": [float(worst_fifth(a).mean()) for a in found.values()],
        "mean": [float(a.mean()) for a in found.values()],
    }
    apart = [found[split] - alone[split].mean(axis=0) for split in found if split in alone] if alone else []
    if apart:
        numbers["better_off"] = [float((d > 0).mean()) for d in apart]
        numbers["regret"] = [float(worst(d).mean()) for d in apart]
    return numbers


def worse_off(found: Accuracies, alone: Accuracies | None) -> int | None:
    """Returns the number of sites whose accuracy lies below that alone by more than its interval over the splits; None
    if there are no intervals."""
    splits = [split for split in found if split in (alone or {})]
    if alone is None or len(splits) < 2:
        return None
    apart = np.array([found[s].mean(axis=0) - alone[s].mean(axis=0) for s in splits])  # (splits, sites)
    return sum(e.mean + (e.half or 0.0) < 0 for e in map(Estimate.of, apart.T))


Book = Mapping[tuple[str, str], Accuracies]  # (method, tuning) -> accuracies


def book_of(rows: Sequence[Line], fresh: bool = False) -> dict[tuple[str, str], Accuracies]:
    """Returns the accuracies of one problem's rows, in the order of the methods. `fresh` as in `variants`."""
    found = {(row["method"], row["tuning"]): accuracies(row, fresh) for row in rows if variants(row, fresh)}
    order = [(method.name, tuning) for method in METHODS.values() for tuning in method.tunings]
    return {key: found[key] for key in (*order, *(k for k in found if k not in order)) if key in found}


def table(book: Book) -> list[Line]:
    """Returns a line per method and tuning with every measure as (mean, half of the interval)."""
    lines = []
    for (method, tuning), found in book.items():
        alone = book.get((ALONE, tuning))
        numbers = measured(found, alone)
        line: Line = {"method": method, "tuning": tuning, "splits": len(found)}
        line |= {name: Estimate.of(values) for name, values in numbers.items()}
        line["worse_off"] = worse_off(found, alone)
        if method == ALONE:  # compared with itself
            line = {key: value for key, value in line.items() if key not in ("better_off", "regret", "worse_off")}
        lines.append(line)
    return lines


def _change(of: Accuracies | None, over: Accuracies | None, measure: str) -> Estimate | None:
    """Returns the difference of a measure between two methods, paired by split."""
    splits = sorted((of or {}).keys() & (over or {}).keys())
    if not of or not over or not splits:
        return None
    a, b = (measured({s: found[s] for s in splits}, None)[measure] for found in (of, over))
    return Estimate.of(np.subtract(a, b))


def _reached(worst: Estimate, mean: Estimate, gain: Estimate) -> bool:
    """Returns whether changes against fixed weights reach the goal, given what is to be had."""
    if gain.mean >= WORTH_HAVING:
        return worst.mean >= GAINED * gain.mean and mean.mean >= -MEAN_LOST
    return worst.mean >= -WORST_LOST


def summary(problem: str, rows: Sequence[Line], tuning: str = "untuned") -> Line:
    """Returns what was to be gained on a problem, and what each robust method gained.

    What is to be had is the gain of oracle weights over equal ones at the worst site. Where it is at least 3 points, a
    method reaches its goal if it gains half of it over fixed weights and loses at most 1 point of the mean. Elsewhere
    it does if its worst site loses at most 0.5 points. The goal is `possible` if a strength of the oracle reaches it.

    Args:
        problem: the problem's name.
        rows: its recorded rows.
        tuning: "untuned" or "tuned" methods; the oracle and the equal weights are untuned."""
    book, fresh = book_of(rows), book_of(rows, fresh=True)
    equal, oracle, alone = book.get((EQUAL, "untuned")), book.get((ORACLE, "untuned")), book.get((ALONE, tuning))
    gain = _change(oracle, equal, "worst")
    possible = None
    if gain is not None:
        of_oracle = [one for row in rows if row["method"] == ORACLE for one in variants(row)]
        changes = [(_change(one, equal, "worst"), _change(one, equal, "mean")) for one in of_oracle]
        possible = any(_reached(worst, mean, gain) for worst, mean in changes if worst and mean)
    lines = []
    for name, method in METHODS.items():
        found, fixed = book.get((name, tuning)), book.get((FIXED, tuning))
        gained, mean = _change(found, fixed, "worst"), _change(found, fixed, "mean")
        if not method.robust or found is None or gained is None or mean is None:
            continue
        lines.append(
            {
                "method": name,
                "worst": gained,
                "share": gained.mean / gain.mean if gain is not None and gain.mean >= WORTH_HAVING else None,
                "mean": mean,
                "fresh": _change(fresh.get((name, tuning)), fresh.get((FIXED, tuning)), "worst"),
                "worse_off": worse_off(found, alone),
                "reached": None if gain is None else _reached(gained, mean, gain),
            }
        )
    return {
        "problem": problem,
        "half": PROBLEMS[problem].half,
        "kind": PROBLEMS[problem].kind,
        "tuning": tuning,
        "to_be_had": gain,
        "mean_of_oracle": _change(oracle, equal, "mean"),
        "possible": possible,
        "methods": lines,
    }


def table_in_words(lines: Sequence[Line]) -> list[list[str]]:
    """Returns one problem's table as rows of text, headed by the names of the columns."""

    def cell(line: Line, name: str) -> str:
        return line[name].shown(signed=name == "regret") if name in line else "-"

    rows = []
    for line in lines:
        label = line["method"] + (", tuned" if line["tuning"] == "tuned" else "")
        worse = "-" if line.get("worse_off") is None else str(line["worse_off"])
        rows.append([label, *(cell(line, name) for name in MEASURES), worse])
    return [["method", *MEASURES.values(), "sites worse off"], *rows]


def _verdict(reached: bool | None, possible: bool | None) -> str:
    if reached is None:
        return "not known"
    return "reached" if reached else "missed" if possible else "missed, by the oracle too"


def summary_in_words(lines: Sequence[Line]) -> list[list[str]]:
    """Returns summaries of problems as rows of text, headed by the names of the columns."""

    def shown(one: Estimate | None) -> str:
        return "-" if one is None else one.shown(signed=True)

    rows = []
    for line in lines:
        for one in line["methods"]:
            share = "-" if one["share"] is None else f"{100 * one['share']:.0f} %"
            rows.append(
                [
                    line["problem"],
                    one["method"] + (", tuned" if line["tuning"] == "tuned" else ""),
                    shown(line["to_be_had"]),
                    shown(line["mean_of_oracle"]),
                    shown(one["worst"]),
                    share,
                    shown(one["mean"]),
                    shown(one["fresh"]),
                    "-" if one["worse_off"] is None else str(one["worse_off"]),
                    _verdict(one["reached"], line["possible"]),
                ]
            )
    head = ["problem", "method", "oracle: worst", "oracle: mean", "worst", "share", "mean", "fresh: worst"]
    head += ["sites worse off", "goal"]
    return [head, *rows]


def as_plain(value: Any) -> Any:
    """Returns estimates as tables, for JSON."""
    if isinstance(value, Estimate):
        return value._asdict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    return [as_plain(item) for item in value] if isinstance(value, list) else value
