"""Which of several runs is better, how sure that is, and what makes them hard to compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.evidence.verdicts import Comparison, verdict_in_words, versus
from fairmesh.report.answers import answers_of, why_unreadable
from fairmesh.report.runs import SHOWN, Run, best_few, check_comparable, choices_in_words, unequal_choices


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
                told = [verdict_in_words(one.table(), first.unit()) for one in (found.worst, found.mean)]
                counts = ", ".join(str(found.count(kind)) for kind in ("better", "worse", "unclear"))
                rows.append([other.label, first.label, *told, counts, "yes" if found.paired else "no"])
        return [header, *rows] if rows else []

    def by_site(self) -> list[list[str]]:
        """Returns a header and one row per site: its samples, each run's metric with its interval, and the verdicts on
        the others against the first."""
        first, *others = self.shown
        unit, names = first.unit(), [str(name) for name in first.summary["sites"]]
        counts = {site["name"]: site["n"] for run in reversed(self.shown) for site in run.evidence.get("sites", [])}
        columns = [["site", *names], ["samples", *(str(counts.get(name, "-")) for name in names)]]
        for run in self.shown:
            known = {site["name"]: site for site in run.evidence.get("sites", [])}
            sites = [known.get(name, {"value": value, "interval": None}) for name, value in zip(names, run.by_site())]
            shown = [unit.with_interval(site["value"], site["interval"]) for site in sites]
            missing = "not measured" if run.alive else "diverged"
            cells = [cell if run.alive and run.is_measured(i) else missing for i, cell in enumerate(shown)]
            columns.append([run.label, *cells])
        for other in others:
            if found := self.verdicts.get((other.label, first.label)):
                at_sites = [verdict_in_words(site.table(), unit) for site in found.at_sites]
                columns.append([f"{other.label} against {first.label}", *at_sites])
        return [list(row) for row in zip(*columns)]

    def by_concern(self) -> list[int]:
        """Returns the sites in the order in which they matter: those where another run is worse than the first, those
        where one is better, then the first run's worst first."""
        first, *others = self.shown
        compared = [self.verdicts[key] for other in others if (key := (other.label, first.label)) in self.verdicts]
        of_sites = [{found.at_sites[i].verdict for found in compared} for i in range(len(first.summary["sites"]))]
        return sorted(first.worst_first(), key=lambda i: ("worse" not in of_sites[i], "better" not in of_sites[i]))

    def by_chance(self) -> list[str]:
        """Returns against which runs more sites look different by themselves than remain, in sentences."""
        first, *others = self.shown
        pairs = [(other.label, first.label) for other in others if (other.label, first.label) in self.verdicts]
        said = {pair: self.verdicts[pair].chance() for pair in pairs}
        return [f"{run} against {other}: {chance}" for (run, other), chance in said.items() if chance]

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
    verdicts, troubles = _verdicts(shown)
    warnings += troubles
    for (label, first), found in verdicts.items():
        if first == shown[0].label and not found.paired:
            count = sum(not at.paired for at in found.at_sites)
            warnings.append(
                f"{label} and {first} answered different test rows at {count} of {len(found.sites)} sites. There, "
                "verdicts follow from two separate intervals and are less sharp"
            )
    every = [variant for run in runs for variant in run.variants()]
    left_out = [text for _, text in few if text]
    return ComparedRuns(every, shown, left_out, choices_in_words(runs), warnings, verdicts)


def _verdicts(runs: Sequence[Run]) -> tuple[dict[tuple[str, str], Comparison], list[str]]:
    """Returns how each run differs from each before it, by their labels, and why there is no verdict on others."""
    answers = {run.label: answers_of(run) for run in runs}
    troubles = [
        f"there is no verdict on {run.label}: {why_unreadable(run) or 'it keeps no answers; train it again'}"
        for run in runs
        if run.alive and not answers[run.label]
    ]
    verdicts = {}
    for first, other in combinations(runs, 2):
        a, b = answers[first.label], answers[other.label]
        if a and b:
            try:
                verdicts[other.label, first.label] = versus(b, a, first.metric)
            except BadInput as error:  # a metric of the user's own, whose function the folders do not have
                troubles.append(f"{first.label} and {other.label}: no verdict, since {error}")
    return verdicts, troubles


def differences(a: Run, b: Run) -> list[str]:
    """Returns what two runs differ in beyond the algorithm, so that a difference may have another reason."""
    mine, theirs = _facts(a), _facts(b)
    common = [what for what in mine if what in theirs]
    told = [f"{what}: {mine[what]} and {theirs[what]}" for what in common if mine[what] != theirs[what]]
    if not told and (digests := [_digests(a), _digests(b)])[0] != digests[1] and all(digests):
        told = ["the rows that their sites hold, by the digests of the data"]
    return [f"{a.label} and {b.label} differ in {one}; a difference may come from that" for one in told]


def _facts(run: Run) -> dict[str, Any]:
    """Returns how long a run trained, and on how much data."""
    data, found = _data(run), {"rounds": run.summary["rounds"]}
    found |= {"splits of the data": data["splits"]} if "splits" in data else {}
    private = run.summary.get("privacy")
    found["privacy"] = f"epsilon {private['epsilon']:.3g} per {private['unit']}" if private else "none"
    for what in ("train", "validation", "test"):
        if counts := [site[what] for site in data.get("sites", []) if what in site]:
            found[f"{what} samples by site"] = ", ".join(map(str, counts)) if len(counts) <= 12 else sum(counts)
    return found


def _digests(run: Run) -> list[str]:
    return [site["digest"] for site in _data(run).get("sites", []) if site.get("digest")]


def _data(run: Run) -> Mapping[str, Any]:
    return (run.summary.get("provenance") or {}).get("data", {})
