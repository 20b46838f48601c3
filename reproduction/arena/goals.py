"""What the model that each site gets reaches of what was asked of it, from recorded rows of the arena.

Differences are in points of accuracy, or in percent of the reference's RMSE; positive is better."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fairmesh.evidence.intervals import LEVEL
from fairmesh.evidence.many import clear_among, excludes_zero
from reproduction.arena import table
from reproduction.arena.methods import ALONE, DEFAULT, FIXED, MIXTURE, SITES_MODEL
from reproduction.arena.problems import PROBLEMS
from reproduction.arena.table import Change
from reproduction.lines import Line
from reproduction.sites.site_problem import SiteProblem
from reproduction.sites.table import Accuracies, Estimate, worst_fifth

POINTS, OF_RMSE = 0.005, 0.01  # what may be lost: of accuracy, and of RMSE
KEPT = 0.9  # of what its own model gains, at a site that contradicts the others
SMALL = (2, 20)  # training rows of a small site


def allowed(problem: SiteProblem) -> float:
    """Returns how much may be lost, as a share."""
    return OF_RMSE if problem.lower_is_better else POINTS


def _by_split(scores: Accuracies, splits: Sequence[int]) -> np.ndarray:
    """Returns the sites' scores, averaged over seeds (splits, sites)."""
    return np.array([scores[s].mean(axis=0) for s in splits])


def better_of(common: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Returns what each site's better of two models reaches (splits, sites). Which one is better is decided by the
    other splits: on the same test rows, the better of two equal models would look better than either."""
    if len(common) < 2:
        return np.maximum(common, own)
    rest = (common.sum(axis=0) - common) - (own.sum(axis=0) - own)
    return np.where(rest >= 0, common, own)


def _on_rows_apart(rows: Sequence[Line], splits: Sequence[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns what the chosen model and each site's better of common and own reach (splits, sites), where all splits
    divide the same rows: one half of a site's units decides in all splits which is better, and the other half counts.
    None where splits draw rows of their own."""
    (row,) = (row for row in rows if row["method"] == DEFAULT)
    if "halves" not in row["splits"][str(splits[0])]:
        return None
    sign = -1.0 if PROBLEMS[row["problem"]].lower_is_better else 1.0

    def scores(kind: str) -> np.ndarray:  # (splits, halves, sites)
        return sign * np.array([row["splits"][str(s)]["halves"][kind] for s in splits], dtype=float)

    p, c, o = scores("personal"), scores("common"), scores("local")
    gain = _mean(o - c, axis=0)[::-1]  # of the half that does not count; NaN if nothing is known there
    better = np.where((gain > 0) & ~np.isnan(o), o, c)
    return _mean(p, axis=1), _mean(better, axis=1)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Returns the mean without NaN; NaN where there is nothing else."""
    known = (~np.isnan(values)).sum(axis=axis)
    return np.nansum(values, axis=axis) / np.where(known, known, np.nan)


def _relative(differences: np.ndarray, base: np.ndarray, problem: SiteProblem) -> Estimate:
    """Returns the mean difference over sites, in points or as a share of the reference's mean RMSE."""
    scale = np.abs(base).mean() if problem.lower_is_better else 1.0
    return Estimate.of(differences.mean(axis=1) / scale, table.overlap(problem))


def of_problem(rows: Sequence[Line]) -> Line:
    """Returns the goals of one problem; None for those that are not known or do not apply."""
    name, book = rows[0]["problem"], table.book_of(rows)
    problem, line = PROBLEMS[name], {"problem": rows[0]["problem"], "half": PROBLEMS[rows[0]["problem"]].half}
    line |= dict.fromkeys(("regret", "worse", "fifth", "small", "kept", "reached"))
    line["default"] = _against_fixed(book, rows)
    chosen, common = book.get((SITES_MODEL, "untuned")), book.get((DEFAULT, "untuned"))
    own = book.get((ALONE, "untuned"), book.get((table.OWN, "untuned")))
    if chosen is None or common is None or own is None:
        return line
    splits = sorted(chosen.keys() & common.keys() & own.keys())
    if not splits:
        return line
    p, c, o = (_by_split(scores, splits) for scores in (chosen, common, own))
    p_judged, better = _on_rows_apart(rows, splits) or (p, better_of(c, o))
    line["regret"] = _relative(p_judged - better, better, problem)
    line["worse"] = _worse_sites(p_judged - better, problem)
    line["fifth"] = _fifth(book, splits, problem)
    counts = np.array(rows[0]["rows"])
    small = (counts >= SMALL[0]) & (counts <= SMALL[1])
    if small.any():
        line["small"] = _relative((p - c)[:, small], c[:, small], problem)
    line["kept"] = _kept(p, c, o, rows)
    line["reached"] = _reached(line, problem)
    return line


def _worse_sites(differences: np.ndarray, problem: SiteProblem) -> Line | None:
    """Returns how many sites are significantly worse after the adjustment over sites, and by themselves."""
    if len(differences) < 2:
        return None
    changes = [Change.of(of_site, table.overlap(problem)) for of_site in differences.T]
    adjusted = [i for i in clear_among(changes).which if changes[i].value < 0]
    alone = sum(one.value < 0 and excludes_zero(one.interval()) for one in changes)
    return {"adjusted": len(adjusted), "alone": alone, "by_chance": (1 - LEVEL) / 2 * len(changes), "of": len(changes)}


def _fifth(book: table.Book, splits: Sequence[int], problem: SiteProblem) -> Estimate:
    """Returns the worst fifth of the sites' models against the best of common, own and mixture."""

    def of(scores: Accuracies) -> np.ndarray:
        return np.array([worst_fifth(scores[s]).mean() for s in splits])

    keys = ((DEFAULT, "untuned"), (ALONE, "untuned"), (MIXTURE, "untuned"))
    others = [of(book[key]) for key in keys if key in book and all(s in book[key] for s in splits)]
    best = max(others, key=lambda values: float(np.nan_to_num(values, nan=-np.inf).mean()))
    apart = (of(book[SITES_MODEL, "untuned"]) - best)[:, None]
    return _relative(apart, best, problem)


def _kept(p: np.ndarray, c: np.ndarray, o: np.ndarray, rows: Sequence[Line]) -> float | None:
    """Returns the share of what their own models gain that sites keep which contradict the others; None if there are
    none, or nothing to gain."""
    groups = rows[0].get("groups")
    if PROBLEMS[rows[0]["problem"]].kind != "concept shift" or not groups:
        return None
    other = np.array([group != groups[0] for group in groups])
    gain = float((o - c)[:, other].mean())
    return float((p - c)[:, other].mean()) / gain if gain > 0 else None


def _against_fixed(book: table.Book, rows: Sequence[Line]) -> dict[str, Change | None] | None:
    default, fixed = book.get((DEFAULT, "untuned")), book.get((FIXED, "untuned"))
    if default is None or fixed is None:
        return None
    problem, enough = PROBLEMS[rows[0]["problem"]], table.enough_rows(rows)
    return {name: table.change(default, fixed, name, problem, enough) for name in table.MEASURES}


def _reached(line: Line, problem: SiteProblem) -> dict[str, bool | None]:
    """Returns which goals a problem reaches."""
    least = -allowed(problem)

    def enough(estimate: Estimate | None) -> bool | None:
        return None if estimate is None else estimate.mean >= least

    worse = line["worse"]
    return {
        "regret": enough(line["regret"]),
        "worse": None if worse is None else worse["adjusted"] <= worse["by_chance"],
        "fifth": enough(line["fifth"]),
        "small": enough(line["small"]),
        "kept": None if line["kept"] is None else line["kept"] >= KEPT,
    }


def goals(found: Mapping[str, Sequence[Line]]) -> Line:
    """Returns the goals of every problem, and how many problems reach each of them.

    Args:
        found: The rows of each problem.
    """
    problems = [of_problem(rows) for rows in found.values()]
    counts: dict[str, list[int]] = {}
    for name in ("regret", "worse", "fifth", "small", "kept"):
        known = [line["reached"][name] for line in problems if line["reached"] and line["reached"][name] is not None]
        counts[name] = [sum(known), len(known)]
    against = [line for line in problems if line["default"]]
    for measure in table.MEASURES:
        known = [(line["problem"], change) for line in against if (change := line["default"][measure]) is not None]
        clear = clear_among([one for _, one in known]).which
        lost = [name for i, (name, one) in enumerate(known) if math.isnan(one.value) or (i in clear and one.value < 0)]
        counts[f"default, {measure}"] = [len(known) - len(lost), len(known)]
        for line in against:
            line.setdefault("default_lost", []).extend([measure] if line["problem"] in lost else [])
    return {"problems": problems, "reached": counts}


TITLES = {
    "regret": "mean regret against the better of common and own",
    "worse": "no more sites significantly worse than chance gives",
    "fifth": "worst fifth at least that of the best of common, own and mixture",
    "small": "sites of 2 to 20 rows not worse than with the common model",
    "kept": "contradicting sites keep 90 % of what their own model gains",
    "default, worst": "default not worse than fixed weights, worst site",
    "default, fifth": "default not worse than fixed weights, worst fifth",
    "default, mean": "default not worse than fixed weights, mean",
}


def goals_in_words(found: Line) -> tuple[list[list[str]], list[list[str]]]:
    """Returns a table of the goals with the number of problems that reach each, and one of the problems."""
    heads = ["problem", "regret", "sites worse", "worst fifth", "small sites", "gain kept", "default, fifth", "mean"]
    summary = [["goal", "reached"], *([TITLES[k], f"{a} of {b}"] for k, (a, b) in found["reached"].items() if b)]
    rows = [heads]
    for line in found["problems"]:
        reached = line["reached"] or {}

        def shown(name: str, text: str, reached: Mapping[str, bool | None] = reached) -> str:
            return f"{text} (missed)" if reached.get(name) is False else text

        worse = line["worse"]
        rows.append(
            [
                line["problem"],
                shown("regret", _estimate(line["regret"])),
                "-" if worse is None else shown("worse", _worse_in_words(worse)),
                shown("fifth", _estimate(line["fifth"])),
                shown("small", _estimate(line["small"])),
                "-" if line["kept"] is None else shown("kept", f"{100 * line['kept']:.0f} %"),
                *(_change(line, measure) for measure in ("fifth", "mean")),
            ]
        )
    return summary, rows


def _worse_in_words(worse: Line) -> str:
    chance = f"{worse['alone']} by themselves, {worse['by_chance']:.1f} by chance"
    return f"{worse['adjusted']} of {worse['of']} ({chance})"


def _estimate(estimate: Estimate | None) -> str:
    return "-" if estimate is None else estimate.shown(signed=True)


def _change(line: Line, measure: str) -> str:
    change = line["default"] and line["default"][measure]
    if not change:
        return "-"
    low, high = change.interval()
    half = f" ±{50 * (high - low):.1f}" if math.isfinite(high - low) else ""
    return f"{100 * change.value:+.1f}{half}" + (" (lost)" if measure in line["default_lost"] else "")
