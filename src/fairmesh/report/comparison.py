"""Which of several runs is better, how sure that is, and what makes them hard to compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.evidence.outcomes import Outcomes
from fairmesh.evidence.verdicts import Comparison, versus
from fairmesh.report.answers import answers_of
from fairmesh.report.runs import SHOWN, Run, best_few, check_comparable, choices_in_words, unequal_choices
from fairmesh.report.sentences import versus as in_words


@dataclass(frozen=True)
class ComparedRuns:
    """Runs next to each other.

    Args:
        runs: All runs; of a sweep, each variant.
        shown: Those that tables and pictures show: of a sweep with many variants, the best few.
        left_out: What they do not show, in words.
        choices: How the variant of each sweep was chosen, in words.
        warnings: How runs differ beyond their algorithms, so that a difference may have another reason.
        verdicts: By two labels, how the first run differs from the second.
    """

    runs: list[Run]
    shown: list[Run]
    left_out: list[str]
    choices: list[str]
    warnings: list[str]
    verdicts: dict[tuple[str, str], Comparison] = field(repr=False)

    def table(self) -> list[list[str]]:
        """Returns a header and a row for each shown run after the first: how it differs from the first. Nothing if
        there is no verdict."""
        first, *others = self.shown
        header = ["run", "compared with", f"worst {first.metric}", "mean", "sites better, worse, unclear", "same rows"]
        rows = []
        for other in others:
            if found := self.verdicts.get((other.label, first.label)):
                told = [in_words(one.table(), first.unit()) for one in (found.worst, found.mean)]
                counts = ", ".join(str(found.count(kind)) for kind in ("better", "worse", "unclear"))
                rows.append([other.label, first.label, *told, counts, "yes" if found.paired else "no"])
        return [header, *rows] if rows else []

    def by_site(self) -> list[list[str]]:
        """Returns a header and one row per site: its samples, each run's metric with its interval, and the verdicts on
        the others against the first."""
        first, *others = self.shown
        unit, names = first.unit(), [str(name) for name in first.summary["sites"]]
        known = {run.label: {one["name"]: one for one in run.evidence.get("sites", [])} for run in self.shown}
        found = [(other, self.verdicts.get((other.label, first.label))) for other in others]
        compared = [(other, one) for other, one in found if one]
        columns = {run.label: run.by_site() for run in self.shown}
        rows = []
        for i, name in enumerate(names):
            here = [known[run.label].get(name, {}) for run in self.shown]
            cells = [
                "diverged"
                if not run.alive
                else "not measured"
                if not run.is_measured(i)
                else unit.with_interval(one.get("value", columns[run.label][i]), one.get("interval"))
                for run, one in zip(self.shown, here)
            ]
            cells += [in_words(one.at_sites[i].table(), unit) for _, one in compared]
            rows.append([name, str(next((one["n"] for one in here if "n" in one), "-")), *cells])
        verdicts = [f"{other.label} against {first.label}" for other, _ in compared]
        return [["site", "samples", *(run.label for run in self.shown), *verdicts], *rows]

    def as_json(self) -> dict[str, Any]:
        """Returns all runs, also those that are not shown, and the verdicts on every two that are."""
        return {
            "runs": {run.label: run.summary for run in self.runs},
            "shown": [run.label for run in self.shown],
            "left_out": self.left_out,
            "choices": self.choices,
            "warnings": self.warnings,
            "verdicts": [
                {"run": run, "compared_with": other} | found.table() for (run, other), found in self.verdicts.items()
            ],
        }


def compared(runs: Sequence[Run]) -> ComparedRuns:
    """Compares runs on the test rows that they kept. Of a sweep with many variants it takes the best few.

    Args:
        runs: The runs.

    Raises:
        BadInput: They have different sites or metrics, or are judged on different kinds of data.
    """
    check_comparable(runs)
    few = [best_few(run, max(1, SHOWN // len(runs))) for run in runs]
    shown = [variant for variants, _ in few for variant in variants]
    warnings = [*unequal_choices(runs), *(text for other in runs[1:] for text in differences(runs[0], other))]
    answers: dict[str, Outcomes] = {}
    for run in shown:
        found = answers_of(run)
        if found is not None:
            answers[run.label] = found
        elif run.alive:
            warnings.append(
                f"{run.label} keeps no answers to its test rows, so there is no verdict on it; train it again"
            )
    verdicts = {}
    for first, other in combinations(shown, 2):
        a, b = answers.get(first.label), answers.get(other.label)
        if a is not None and b is not None:
            try:
                verdicts[other.label, first.label] = versus(b, a, first.metric)
            except BadInput as error:  # a metric of the user's own, whose function the folders do not have
                warnings.append(f"{first.label} and {other.label}: no verdict, since {error}")
    first = shown[0].label
    apart = [one for one in shown[1:] if (one.label, first) in verdicts and not verdicts[one.label, first].paired]
    for one in apart:
        found = verdicts[one.label, first]
        count = sum(not at.paired for at in found.at_sites)
        warnings.append(
            f"{one.label} and {first} answered different test rows at {count} of {len(found.sites)} sites. There, "
            "verdicts follow from two separate intervals and are less sharp"
        )
    every = [variant for run in runs for variant in run.variants()]
    left_out = [text for _, text in few if text]
    return ComparedRuns(every, shown, left_out, choices_in_words(runs), warnings, verdicts)


def differences(a: Run, b: Run) -> list[str]:
    """Returns what two runs differ in beyond the algorithm, so that a difference may have another reason."""
    mine, theirs = _facts(a), _facts(b)
    told = [
        f"{what}: {mine[what]} and {theirs[what]}" for what in mine if what in theirs and mine[what] != theirs[what]
    ]
    if not told and (digests := [_digests(a), _digests(b)])[0] != digests[1] and all(digests):
        told = ["the rows that their sites hold, by the digests of the data"]
    return [f"{a.label} and {b.label} differ in {one}; a difference may come from that" for one in told]


def _facts(run: Run) -> dict[str, Any]:
    """Returns how long a run trained, and on how much data."""
    data, found = _data(run), {"rounds": run.summary["rounds"]}
    if "splits" in data:
        found["splits of the data"] = data["splits"]
    for what in ("train", "validation", "test"):
        if counts := [site[what] for site in data.get("sites", []) if what in site]:
            found[f"{what} samples by site"] = ", ".join(map(str, counts)) if len(counts) <= 12 else sum(counts)
    return found


def _digests(run: Run) -> list[str]:
    return [site["digest"] for site in _data(run).get("sites", []) if "digest" in site]


def _data(run: Run) -> Mapping[str, Any]:
    return (run.summary.get("provenance") or {}).get("data", {})
