"""Tables on the command line, without an experiment file: which paths are tables, and a run with all defaults."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairmesh.errors import BadInput

if TYPE_CHECKING:
    from fairmesh.data.check import Finding
    from fairmesh.data.datasets import Data
    from fairmesh.experiment import Experiment

_OF_A_KIND = 4  # findings that are printed
_STOPPING = (
    "leak",
    "unusable",
    "unusable column",
    "numbers as labels",
)  # findings with which a table is not trained on
_IDENTIFIERS = ("identifier", "units divided")

Target = Annotated[str, typer.Option(help="Of a table: the column to predict.")]
SiteColumn = Annotated[str, typer.Option("--site", help="Of a table: the column that names the site.")]
Numbers = Annotated[bool, typer.Option("--numbers", help="The target is a number, not a label.")]
Unit = Annotated[str, typer.Option(help="Of a table: the column that says what a row belongs to, such as its patient.")]
Time = Annotated[str, typer.Option(help="Of a table: the column with the time of a row.")]
Without = Annotated[
    list[str], typer.Option(metavar="COLUMN", help="A column that is no input, such as an identifier; repeatable.")
]


def is_pattern(path: Path) -> bool:
    """Returns whether a path stands for several files."""
    return "*" in str(path) or "?" in str(path)


def is_table(path: Path) -> bool:
    """Returns whether a path is that of a table, or of a folder or a pattern of one table per site."""
    if path.is_dir():
        return any(file.suffix.lower() in (".csv", ".parquet") for file in path.iterdir())
    return is_pattern(path) or path.suffix.lower() in (".csv", ".parquet")


@dataclass(frozen=True)
class TableOptions:
    """A table as options of a command describe it.

    Args:
        path: The file, folder or pattern.
        target: The column to predict.
        site: The column that names the site; "" for none. Default: "".
        numbers: Whether the target is a number. Default: False.
        without: Columns that are no inputs. Default: ().
        unit: The column that says what a row belongs to; "" for none. Default: "".
        time: The column with the time of a row; "" for none. Default: "".
    """

    path: Path
    target: str
    site: str = ""
    numbers: bool = False
    without: Sequence[str] = ()
    unit: str = ""
    time: str = ""

    def settings(self) -> dict[str, Any]:
        """Returns the [data] section."""
        if not self.target:
            raise BadInput(f"{self.path}: name the column to predict with --target")
        given = {"name": "table", "file": str(self.path), "target": self.target}
        given |= {key: name for key in ("site", "unit", "time") if (name := getattr(self, key))}
        given |= {"predict": "numbers"} if self.numbers else {}
        return given | ({"exclude": list(self.without)} if self.without else {})

    def experiment(self, assignments: Sequence[str]) -> tuple["Experiment", dict[str, Any], list["Finding"]]:
        """Returns the experiment that trains on the table with all defaults, what a file says about it, and what looks
        wrong with the table.

        Raises:
            BadInput: A column is an identifier, tells the target or cannot be used; the message says what to do.
        """
        from fairmesh.config.overrides import overridden
        from fairmesh.experiment import experiment_from

        settings = self.settings()
        if not self.site and not is_pattern(self.path) and not self.path.is_dir():
            raise BadInput(
                f"{self.path}: name the column of the sites with --site, or give one file per site: a folder, or a "
                "pattern in quotes such as 'hospitals/*.csv'"
            )
        table = overridden({"data": settings}, assignments)
        experiment = experiment_from(table, Path.cwd())
        findings = found_in(experiment.known_data(), experiment)[0]
        settled = table["data"].get("inputs", ()) or table["data"].get("exclude", ())  # columns that were thought of
        wrong = [f for f in findings if f.what in _STOPPING or (f.what in _IDENTIFIERS and f.column not in settled)]
        if wrong:
            said = " | ".join(as_options(finding.sentence) for finding in wrong[:_OF_A_KIND])
            more = f" (and {len(wrong) - _OF_A_KIND} more; fairmesh data check shows them)"
            raise BadInput(said + (more if len(wrong) > _OF_A_KIND else ""))
        return experiment, table, findings


def as_options(sentence: str) -> str:
    """Returns an advice about settings of a file as one about options of the command line."""
    sentence = re.sub(r'unit = "(.*?)"', lambda name: f"--unit {shlex.quote(name[1])}", sentence)
    sentence = re.sub(r'exclude = \["(.*?)"\]', lambda name: f"--without {shlex.quote(name[1])}", sentence)
    sentence = sentence.replace('predict = "numbers"', "--numbers")
    return re.sub(
        r"(types|missing_values) = ({.*?})", lambda s: "--set " + shlex.quote(f"data.{s[1]}={s[2]}"), sentence
    )


def found_in(data: "Data", experiment: "Experiment | None" = None) -> tuple[list["Finding"], int]:
    """Returns what looks wrong with data, and the number of its sites."""
    from fairmesh.data.check import Finding, check_sites, check_table, check_units
    from fairmesh.data.datasets import Table
    from fairmesh.data.site_tables import without_values
    from fairmesh.data.units import noticed, warn_of_spanning, with_units
    from fairmesh.mesh.node.site_statistics import unusual_sites

    inner = data.innermost
    findings = list(check_table(inner)) if isinstance(inner, Table) else []
    if isinstance(data, Table) and not data.inputs:  # the rest is looked at without them
        unfit = (f.column for f in findings if f.column and (not experiment or f.severity == "error"))
        data = replace(data, exclude=(*data.exclude, *unfit))
    said: list[str] = []
    try:
        with noticed(said):
            sites = with_units(experiment.sites(data) if experiment else data.sites())
            warn_of_spanning(sites)
    except BadInput as error:
        if not any(finding.severity == "error" for finding in findings):
            findings.append(Finding("error", "unusable", str(error)))
        return findings, 0
    findings += [Finding("warning", "division of rows", sentence) for sentence in said]
    if isinstance(inner, Table):
        others = (inner.target, inner.site, inner.subgroup, inner.time)
        columns = {name: values for name, values in inner.read().items() if name not in others}
        findings += check_units(columns, sites, data.exclude if isinstance(data, Table) else ())
    findings += check_sites(sites)
    empty = {(site, column) for column, names in without_values(sites).items() for site in names}
    for name, reasons in unusual_sites(sites).items():
        told = [reason for reason in reasons if (name, reason.partition(":")[0]) not in empty]  # said above
        findings += [Finding("warning", "looks different", f"{name} looks different: {reason}") for reason in told]
    return findings, len(sites)


def few_of_each(findings: Sequence["Finding"], all_of_them: str = "--json") -> Iterator[str]:
    """Yields what to print: of each kind the first few, the last of them with how many more there are. Errors first."""
    kinds: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.severity != "error"):
        kinds.setdefault((finding.severity, finding.what), []).append(finding)
    for alike in kinds.values():
        shown = alike if len(alike) <= _OF_A_KIND + 1 else alike[:_OF_A_KIND]
        more = len(alike) - len(shown)
        note = f" (and {more} more like this; {all_of_them} has all)" if more else ""
        yield from (f"{finding.severity}: {finding.sentence}" for finding in shown[:-1])
        yield f"{shown[-1].severity}: {shown[-1].sentence}{note}"
