"""The tables of `fairmesh compare` for papers: LaTeX with booktabs, and CSV with plain numbers."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from fairmesh.errors import printable
from fairmesh.metrics.units import Unit, defined
from fairmesh.report.comparison import ComparedRuns
from fairmesh.report.runs import PER_MB, Run, caption_of, estimates_of

_COLUMNS = ("run", "algorithm", "metric", "of", "site", "n", "value", "low", "high", "rounds", "bytes_busiest_node")
_CHARACTERS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\char34}",
    "[": "{[}",  # else the end of the row before would take it as an option
    "*": "{*}",
    "λ": r"$\lambda$",
    "−": "$-$",
} | {character: f"\\{character}" for character in "#$%&_"}
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # with which a cell begins that a spreadsheet would compute


def as_csv(found: ComparedRuns, sites: bool = False) -> str:
    """Returns a line for each number of the runs: the worst site and the mean with their intervals, the best site and
    the gap, of every metric. Shares are from 0 to 1, and what is not known is empty.

    Args:
        found: The runs next to each other.
        sites: Whether it also has a line for each site. Default: False.
    """
    text = io.StringIO()
    written = csv.writer(text, lineterminator="\n")
    written.writerow(_COLUMNS)
    for run in found.shown:
        common = [_cell(run.label), _cell(run.summary["algorithm"])]
        sent = [run.summary["rounds"], run.summary["bytes_busiest_node"]]
        for metric in run.metrics:
            for of, site, n, value, ends in [*_over_sites(run, metric), *(_sites(run, metric) if sites else ())]:
                low, high = ends or (None, None)
                numbers = [repr(float(number)) if defined(number) else "" for number in (value, low, high)]
                written.writerow([*common, _cell(metric), of, _cell(site), n, *numbers, *sent])
    return text.getvalue()


def _cell(text: object) -> str:
    """Returns a name as a spreadsheet shows it, and never computes it: names may come from other sites."""
    line = printable(" ".join(str(text).split()))
    return f"'{line}" if line.startswith(_FORMULAS) else line


_Row = tuple[str, str, int | str, float, Sequence[Any]]  # of what, at which site, on how many samples, value, interval


def _over_sites(run: Run, metric: str) -> Iterator[_Row]:
    worst = run.summary["sites"][run.worst_first()[0]] if metric == run.metric else ""
    for what, (value, ends) in estimates_of(run, metric).items():
        yield what, str(worst) if what == "worst" else "", "", value, ends or ()


def _sites(run: Run, metric: str) -> Iterator[_Row]:
    evidence = run.evidence.get("sites", ())
    counts = {site["name"]: site["n"] for site in evidence if defined(site["n"])}
    known = {site["name"]: site for site in evidence if metric == run.metric}
    for name, value in zip(map(str, run.summary["sites"]), run.by_site(metric)):
        site = known.get(name, {"value": value, "interval": None})
        yield "site", name, counts.get(name, ""), site["value"], site["interval"] or ()


def as_latex(found: ComparedRuns, sites: bool = False) -> str:
    """Returns the runs as a LaTeX table, for a document with the package booktabs. The best worst site and the best
    mean are bold if they are clearly better than those of all other runs.

    Args:
        found: The runs next to each other.
        sites: Whether a second table has a row for each site. Default: False.
    """
    runs, unit = found.shown, found.shown[0].unit()
    metric = escaped(unit.label)
    gap = f"Gap, {escaped(unit.of_differences)}" if unit.share else "Gap"
    header = ["Run", "Algorithm", f"Worst {metric}", "Mean", "Best", gap, "Rounds", "Sent, MB"]
    best = {what: _clearly_best(found, what) for what in ("worst", "mean")}
    rows = []
    for k, run in enumerate(runs):
        values = {what: (value, ends) for what, _, _, value, ends in _over_sites(run, run.metric)}
        cells = [_bold(_number(*values[what], unit, run), k == best.get(what)) for what in values]
        sent = run.summary["bytes_busiest_node"] / PER_MB["bytes_busiest_node"]
        rows.append([escaped(run.label), escaped(run.summary["algorithm"]), *cells, f"{run.summary['rounds']}"])
        rows[-1].append(f"{sent:.3g}")
    notes = ["needs \\usepackage{booktabs}", caption_of(runs)]
    notes += ["Bold: clearly better than every other run."] if len(runs) > 1 else []
    notes += [*found.choices, *found.left_out, *found.warnings]
    tables = [_tabular("ll" + "r" * (len(header) - 2), [header, *rows])]
    if sites:
        tables.append(_tabular("l" + "r" * len(runs), _of_sites(found, unit)))
    comments = [f"% {line}" for note in notes if note for line in printable(note).splitlines()]
    return "\n".join([*comments, *tables])


def _of_sites(found: ComparedRuns, unit: Unit) -> list[list[str]]:
    columns = [[_number(value, ends, unit, run) for *_, value, ends in _sites(run, run.metric)] for run in found.shown]
    names = [escaped(name) for name in found.shown[0].summary["sites"]]
    header = [f"Site, {escaped(unit.label)}", *(escaped(run.label) for run in found.shown)]
    for i in range(len(names)):
        best = _clearly_best(found, i)
        if best is not None:
            columns[best][i] = _bold(columns[best][i], True)
    return [header, *([name, *cells] for name, *cells in zip(names, *columns))]


def _number(value: Any, ends: Sequence[Any], unit: Unit, run: Run) -> str:
    """Returns a number with its interval, without its unit, which the header has."""
    if not run.alive:
        return "diverged"
    if not defined(value):
        return "--"
    shown = [unit.number(number).replace("-", "$-$") for number in (value, *ends) if defined(number)]
    return shown[0] if len(shown) < 3 else f"{shown[0]} ({shown[1]}--{shown[2]})"


def _bold(cell: str, best: bool) -> str:
    return f"\\textbf{{{cell}}}" if best else cell


def _clearly_best(found: ComparedRuns, what: str | int) -> int | None:
    """Returns the number of the run that is clearly better than every other one, by "worst", "mean" or at a site; None
    if there is none."""

    def beats(one: str, other: str) -> bool:
        for pair, wanted in (((one, other), "better"), ((other, one), "worse")):
            if pair in found.verdicts:
                at = found.verdicts[pair]
                difference = at.at_sites[what] if isinstance(what, int) else getattr(at, what)
                return difference.verdict == wanted
        return False

    labels = [run.label for run in found.shown]
    alone = len(labels) == 1
    best = [k for k, one in enumerate(labels) if all(beats(one, other) for other in labels if other != one)]
    return best[0] if len(best) == 1 and not alone else None


def _tabular(columns: str, rows: Sequence[Sequence[str]]) -> str:
    header, *body = [" & ".join(row) + r" \\" for row in rows]
    inside = [r"\toprule", header, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([f"\\begin{{tabular}}{{{columns}}}", *(f"  {line}" for line in inside), "\\end{tabular}", ""])


def escaped(text: object) -> str:
    """Returns text in which LaTeX finds no command: names may come from other sites."""
    return "".join(_CHARACTERS.get(character, character) for character in printable(" ".join(str(text).split())))
