"""`fairmesh report`, `compare` and `topology`: show runs and graphs as tables, pictures and pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairmesh.cli.terminal import (
    Json,
    Overwrite,
    draw,
    existing,
    few,
    print_json,
    put,
    refuse_existing,
    say,
    show,
    show_rows,
    show_table,
)
from fairmesh.errors import BadInput
from fairmesh.storage.files import write_atomically

if TYPE_CHECKING:
    from fairmesh.report.runs import Run

_STANDARD_OUTPUT = Path("-")
_OF_A_NODE = ("result", "progress")  # in its state folder


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs.", callback=existing)],
    plot: Annotated[
        Path | None,
        typer.Option(help="Where to write the picture, as .pdf, .svg or .png; compare.png if no file is asked for."),
    ] = None,
    latex: Annotated[
        Path | None, typer.Option(help="Write the table as LaTeX (booktabs); - for standard output.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the numbers as CSV, a line for each; - for standard output.")
    ] = None,
    sites: Annotated[bool, typer.Option("--sites", help="Also compare the runs site by site.")] = False,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Compare runs in one table and one plot, and say which differences are clear.

    Each run is compared with the first one, row by row where both answered the same test rows. Of a sweep with many
    variants the best few are shown. The plot shows the worst site and the mean against rounds and traffic. In LaTeX the
    best is bold only where it is clearly better than every other run."""
    from fairmesh.report.comparison import compared
    from fairmesh.report.paper_tables import as_csv, as_latex
    from fairmesh.report.plots import curves
    from fairmesh.report.runs import caption_of, rows_of, unequal_choices
    from fairmesh.report.style import save_figure
    from fairmesh.report.text import Table

    printed = _on_standard_output({"--latex": latex, "--csv": csv}, json_, overwrite)
    runs = _loaded(folders)
    found = compared(runs)
    notes = [*found.choices, *unequal_choices(runs)]
    drawn = None
    if plot or not (latex or csv):
        picture: Callable[[Path], None] = lambda path: save_figure(curves(found.shown, notes=notes), path)  # noqa: E731
        drawn = draw(picture, plot, Path("compare.png"), overwrite)
    for path, as_text in ((latex, as_latex), (csv, as_csv)):
        if path == _STANDARD_OUTPUT:
            print(as_text(found, sites), end="", flush=True)
        elif path:
            write_atomically(path, as_text(found, sites).encode())
    if json_:
        print_json(found.as_json() | {"plot": str(drawn) if drawn else None})
        return
    if not printed:
        show_rows(rows_of(found.shown))
        show(Table(found.table(), "Differences"))
    if sites and not printed:
        show_table(few(found.by_site(), found.by_concern()), "Site by site")
    warnings = [f"warning: {text}" for text in found.warnings]
    of_runs = [f"{run.label}: {note}" for run in found.shown for note in run.notes()]
    for line in (caption_of(found.shown), *found.by_chance(), *found.choices, *found.left_out, *warnings, *of_runs):
        show(line)
    for what, path in (("picture", drawn), ("LaTeX", latex), ("CSV", csv)):
        if path and path != _STANDARD_OUTPUT:
            say(f"{what}: {path}")


def _on_standard_output(files: Mapping[str, Path | None], json_: bool, overwrite: bool) -> bool:
    """Returns whether one of some files is standard output. Refuses two of them there, and files that exist."""
    printed = [f"{option} -" for option, path in files.items() if path == _STANDARD_OUTPUT]
    if len(printed) + json_ > 1:
        asked = " and ".join(printed + ["--json"] * json_)
        raise BadInput(f"{asked} all go to standard output; write all but one to a file")
    for option, path in files.items():
        if path and path != _STANDARD_OUTPUT:
            refuse_existing(path, option, overwrite)
    return bool(printed)


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or of sites or their nodes' states.", callback=existing)
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; that of the run by default, of several runs this one.")
    ] = None,
    json_: Json = False,
) -> None:
    """Write a report of a run, or of several side by side.

    The page, report.html, says what the run brought each site, with tables, curves, the network and where the model
    comes from. report.json has the same as numbers, and model-card.md describes the model. Of a node it shows the
    result or, while it runs, the rounds so far; the node is not disturbed."""
    from fairmesh.report.writing import write_report

    found = [_shown_of(folder) for folder in folders]
    runs = _loaded(found)
    title = f"Run {runs[0].label}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.label for run in runs)}"
    written = write_report(runs, out or (found[0] if len(found) == 1 else Path()), title)
    if json_:
        print_json({name: path and str(path) for name, path in written._asdict().items()})
        return
    for path in written:
        if path:
            put(f"written: {path}")


def _loaded(folders: Sequence[Path]) -> "list[Run]":
    """Returns the runs of folders, labelled by their names or, if these repeat, by their paths."""
    from fairmesh.report.runs import Run

    names = [_name_of(folder.resolve()) for folder in folders]
    runs = [replace(Run.from_folder(folder), label=name) for folder, name in zip(folders, names)]
    clear = len(set(names)) == len(names)
    return runs if clear else [replace(run, label=str(folder)) for run, folder in zip(runs, folders)]


def _name_of(folder: Path) -> str:
    """Returns the name of a run's folder, or that of the site if it is within the state of its node."""
    return folder.parents[1].name if folder.parent.name == "state" and folder.name in _OF_A_NODE else folder.name


def _shown_of(folder: Path) -> Path:
    """Returns the run's folder, given itself, a node's state folder, a site's folder or its site.toml."""
    from fairmesh.storage.run_folder import METRICS

    base = folder.parent if folder.is_file() else folder
    inside = ("", *_OF_A_NODE, *(f"state/{name}" for name in _OF_A_NODE))
    return next((base / name for name in inside if (base / name / METRICS).exists()), base)


def topology(
    name: Annotated[
        str, typer.Argument(help="ring, circulant, complete, star, torus, ...; or default: what a run of --rounds has.")
    ],
    nodes: Annotated[int, typer.Option(help="Number of nodes.", min=1)],
    rounds: Annotated[int, typer.Option(help="With default: rounds of the run.", min=1)] = 600,
    set_: Annotated[list[str], typer.Option("--set", help="key=value of the topology, e.g. offsets=[1,2].")] = [],  # noqa: B006
    delta: Annotated[float, typer.Option(help="A compressor's delta, for the theorems' gamma.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Where to write the picture; NAME-N.png by default.")] = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Draw a graph and show its spectral gap.

    Also prints beta, and the consensus step size gamma of the theorems."""
    from fairmesh.config.overrides import overridden
    from fairmesh.config.tables import from_table
    from fairmesh.report.plots import draw_graph
    from fairmesh.topology.graphs import Topology
    from fairmesh.topology.mixing import union_of
    from fairmesh.training.agreement import in_a_file
    from fairmesh.training.defaults import DEFAULT_ALGORITHM
    from fairmesh.training.graph_choice import default_topology

    if name == "default":
        chosen = default_topology(nodes, rounds, DEFAULT_ALGORITHM)
        say(f"without a topology, {nodes} sites and {rounds:,} rounds have topology = {in_a_file(chosen)}")
    else:
        chosen = from_table(Topology, overridden({"name": name}, set_), "topology")
    cycle = chosen.build(nodes)
    mixing = union_of(cycle)
    facts = {
        "topology": name,
        "nodes": nodes,
        "edges": int(mixing.degrees.sum()) // 2,
        "degree": [int(mixing.degrees.min()), int(mixing.degrees.max())],
        "rho": mixing.gap,
        "beta": mixing.beta,
        "delta": delta,
        "gamma": mixing.consensus_step_of_theorem(delta),
    }
    title = f"{name}, {nodes} nodes, ρ = {mixing.gap:.3g}"
    path = draw(lambda path: draw_graph(mixing, title, path), plot, Path(f"{name}-{nodes}.png"), overwrite)
    if json_:
        print_json(facts | {"plot": str(path) if path else None})
        return
    if len(cycle) > 1:
        say(f"a schedule of {len(cycle)} graphs; the numbers are for the mean of their matrices")
    show_table(
        [["", name]]
        + [[key, f"{value:.4g}" if isinstance(value, float) else str(value)] for key, value in facts.items()]
    )
    if path:
        say(f"picture: {path}")
