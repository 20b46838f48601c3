"""`fairmesh data`: list datasets, fetch and check their official files, and show how sites would share them."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fairmesh.cli.terminal import Json, Overwrite, draw, print_json, say, show_table
from fairmesh.errors import BadInput

if TYPE_CHECKING:
    from fairmesh.data.check import Finding
    from fairmesh.experiment import Experiment

_OF_A_KIND = 4  # findings that are printed

data = typer.Typer(help="List, fetch, check and show datasets.")

Folder = Annotated[
    Path | None, typer.Option("--data", help="The folder of the datasets, instead of $FAIRMESH_DATA and the cache.")
]


@data.callback(invoke_without_command=True)
def listing(context: typer.Context, folder: Folder = None, json_: Json = False) -> None:
    """List, fetch, check and show datasets.

    Without a command: list the published datasets, where they were found, their size, licence and source."""
    if context.invoked_subcommand is not None:
        return
    from fairmesh.data.datasets.sources import SOURCES, found, paths_of, places

    rows, table, missing = [], [["dataset", "found in", "size", "licence", "source"]], []
    for source in SOURCES.values():
        place = found(source, folder)
        paths = set(paths_of(source, place)) if place else set()
        size, unpacked = (
            sum(path.stat().st_size for path in paths if path),
            sum(file.bytes or 0 for file in source.files),
        )
        rows.append(
            {
                "name": source.name,
                "title": source.title,
                "found": str(place) if place else None,
                "bytes": size or None,
                "bytes_unpacked": unpacked or None,
                "licence": source.licence,
                "source": source.home,
                "looked_in": [str(path) for path in places(source, folder)],
            }
        )
        shown = f"{(size or unpacked) / 1e6:.1f} MB" if size or unpacked else ""
        table.append([source.name, str(place or "missing"), shown, source.licence, source.home])
        missing += [] if place else [source]
    if json_:
        print_json({"datasets": rows})
        return
    show_table(table)
    if missing:
        say(f"to fetch what is missing: fairmesh data fetch {' '.join(source.name for source in missing)}")
    for source in missing:
        say(f"or put {', '.join(file.name for file in source.files)} into {places(source, folder)[0]}")


@data.command()
def fetch(
    names: Annotated[list[str], typer.Argument(help="fashion-mnist, mnist, cifar-10, coos7.")],
    folder: Annotated[
        Path | None,
        typer.Option("--data", help="Where to put them, each in a folder of its name; the cache by default."),
    ] = None,
    json_: Json = False,
) -> None:
    """Fetch the official files of datasets.

    Continues downloads that were interrupted, and verifies checksums."""
    from fairmesh.data.datasets import download

    places = {}
    for source in map(_source, names):
        progress = None if json_ else download.progress_lines(source.title)
        places[source.name] = str(download.fetch(source, folder, progress))
        if not json_:
            say(f"{source.title} is in {places[source.name]}")
    if json_:
        print_json({"fetched": places})


@data.command()
def check(
    what: Annotated[
        str | None,
        typer.Argument(help="An experiment file, a table, a folder of images, or a dataset; by default all datasets."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Of a table: the column to predict.")] = None,
    site: Annotated[str | None, typer.Option(help="Of a table: the column that names the site.")] = None,
    numbers: Annotated[bool, typer.Option("--numbers", help="The target is a number, not a label.")] = False,
    folder: Folder = None,
    json_: Json = False,
) -> None:
    """Say what looks wrong with data, or check official files.

    Of an experiment file, a table or a folder of images: duplicates within and across training rows, test rows and
    sites; columns that are constant, identifiers, or tell the target; what differs between sites, such as units; single
    classes, rare classes and small test sets. Exits with 1 if results would mislead.

    Of a published dataset: checks the files against their checksums. Exits with 1 if one is damaged or missing."""
    if what is None or (not Path(what).exists() and not Path(what).suffix):
        _check_files(what, folder, json_)
        return
    path = Path(what)
    if not path.exists():
        raise BadInput(f"there is no file {path}")
    findings, sites = _findings(path, target, site, "numbers" if numbers else "labels")
    wrong = sum(one.severity == "error" for one in findings)
    if json_:
        print_json({"checked": what, "sites": sites, "findings": [asdict(one) for one in findings], "errors": wrong})
    else:
        for one, more in _few_of_each(findings):
            say(f"{one.severity}: {one.sentence}" + (f" (and {more} more like this; --json has all)" if more else ""))
        counts = {"error": wrong, "warning": len(findings) - wrong}
        found = " and ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in counts.items())
        say(
            f"{found if findings else 'nothing'} found in {what}"
            + (f", {sites} site{'s' * (sites != 1)}" * (sites > 0))
        )
    if wrong:
        raise typer.Exit(1)


def _few_of_each(findings: Sequence["Finding"]) -> Iterator[tuple["Finding", int]]:
    """Yields what to print: of each kind the first few, the last of them with how many more there are. Errors first."""
    kinds: dict[tuple[str, str], list[Finding]] = {}
    for one in sorted(findings, key=lambda one: one.severity != "error"):
        kinds.setdefault((one.severity, one.what), []).append(one)
    for found in kinds.values():
        shown = found if len(found) <= _OF_A_KIND + 1 else found[:_OF_A_KIND]
        yield from ((one, len(found) - len(shown) if one is shown[-1] else 0) for one in shown)


def _findings(
    path: Path, target: str | None, site: str | None, predict: Literal["labels", "numbers"]
) -> tuple[list["Finding"], int]:
    """Returns what looks wrong with the data of a file or folder, and the number of its sites."""
    from fairmesh.data.check import Finding, check_sites, check_table
    from fairmesh.data.datasets import Data, ImageFolder, Table
    from fairmesh.mesh.node.site_statistics import unusual_sites

    experiment, made = (None, ImageFolder(str(path))) if path.is_dir() else _data_of(path, target, site, predict)
    inner = made
    while isinstance(inside := getattr(inner, "data", None), Data):
        inner = inside
    findings = list(check_table(inner)) if isinstance(inner, Table) else []
    if isinstance(made, Table) and not made.inputs:  # the rest is looked at without them
        found = (one.column for one in findings if one.column and (experiment is None or one.severity == "error"))
        made = replace(made, exclude=(*made.exclude, *found))
    try:
        sites = made.sites() if experiment is None else experiment.sites(made)
    except BadInput as error:
        if not any(one.severity == "error" for one in findings):
            findings.append(Finding("error", "unusable", str(error)))
        return findings, 0
    findings += check_sites(sites)
    for name, reasons in unusual_sites(sites).items():
        findings += [Finding("warning", "looks different", f"{name} looks different: {reason}") for reason in reasons]
    return findings, len(sites)


def _data_of(
    path: Path, target: str | None, site: str | None, predict: Literal["labels", "numbers"]
) -> tuple["Experiment | None", Any]:
    """Returns an experiment and its data, or None and the data of a table."""
    from fairmesh.data.check import table_of_file
    from fairmesh.experiment import load_experiment

    if path.suffix == ".toml":
        experiment = load_experiment(path)
        return experiment, experiment.known_data()
    if target is None:
        raise BadInput(f"{path}: name the column to predict with --target")
    return None, table_of_file(str(path), target, site, predict)


def _check_files(name: str | None, folder: Path | None, json_: bool) -> None:
    """Checks official files against their checksums."""
    from fairmesh.data.datasets.download import check as verdicts
    from fairmesh.data.datasets.sources import SOURCES, found, places

    sources = [_source(name)] if name else list(SOURCES.values())
    here = [(source, place) for source in sources if (place := found(source, folder))]
    if name and not here:
        looked = ", ".join(map(str, places(sources[0], folder)))
        raise BadInput(f"{sources[0].title} was not found in {looked}; `fairmesh data fetch {name}` fetches it")
    rows = [[source.name, str(place / file), said] for source, place in here for file, said in verdicts(source, place)]
    wrong = [row for row in rows if not row[2].startswith("right")]
    if json_:
        print_json({"files": [dict(zip(("dataset", "file", "verdict"), row)) for row in rows], "damaged": len(wrong)})
    else:
        show_table([["dataset", "file", "verdict"], *rows], marked={i for i, row in enumerate(rows) if row in wrong})
        say(f"{len(wrong)} of {len(rows)} files are not right" if wrong else f"{len(rows)} files, all correct")
    if wrong:
        raise typer.Exit(1)


@data.command()
def show(
    name: Annotated[str, typer.Argument(help="fashion-mnist, mnist, cifar-10, coos7, digits, image-folder, ...")],
    partition: Annotated[str | None, typer.Option(help="one-class, contrast, instrument, dirichlet, ...")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.")] = None,
    set_: Annotated[
        list[str], typer.Option("--set", help="key=value of the data, e.g. partition.seed=1 or file=rows.csv.")
    ] = [],  # noqa: B006
    folder: Folder = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where to write the picture; NAME-PARTITION.png by default.")
    ] = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Show which classes each node would have.

    Prints a table and draws a picture of nodes and classes."""
    from fairmesh.config.registry import registered_name
    from fairmesh.data.summary import site_summaries
    from fairmesh.report.site_pictures import picture

    chosen = _chosen(name, partition, nodes, set_, folder)
    sites = chosen.sites()
    kind = getattr(chosen, "partition", None)
    names = [name, *([registered_name(kind)] if kind else [])]
    title = " · ".join([*names, f"{len(sites)} nodes"])
    path = draw(lambda path: picture(sites, path, title), plot, Path("-".join(names) + ".png"), overwrite)
    rows = site_summaries(sites)
    if json_:
        drawn = str(path) if path else None
        print_json({"data": name, "nodes": len(rows), "sites": [asdict(row) for row in rows], "plot": drawn})
        return
    table = [["site", "group", "train", "test", "classes"]]
    table += [[r.name, r.group, f"{r.train:,}", f"{r.test:,}", _classes(r.classes)] for r in rows]
    show_table(table)
    if path:
        say(f"picture: {path}")


@data.command()
def contract(
    source: Annotated[Path, typer.Argument(help="An experiment file with [data], or a table: .csv or .parquet.")],
    target: Annotated[str | None, typer.Option(help="Of a table: the column to predict.")] = None,
    numbers: Annotated[bool, typer.Option("--numbers", help="The target is a number, not a label.")] = False,
    without: Annotated[
        list[str], typer.Option(metavar="COLUMN", help="A column that is no input, such as an identifier; repeatable.")
    ] = [],  # noqa: B006
) -> None:
    """Draft the [contract] of an experiment.

    Prints the section that this data fulfils, with ranges a little wider than seen. Correct it, add the units, and put
    it into the experiment file; every site's data is then checked by it."""
    from fairmesh.data.draft import drafted

    _, made = _data_of(source, target, None, "numbers" if numbers else "labels")
    text, identifiers = drafted(made, without)
    print(text)
    for name in identifiers:
        say(
            f"column {name!r} looks like an identifier: a different whole number in every row. If it is one, leave it "
            f"out: --without {shlex.quote(name)}"
        )
    say("all sites will see these numbers, which were computed from this data")


def _classes(counts: Sequence[int]) -> str:
    """Returns which classes there are: '3 of 10', or the only one."""
    held = [c for c, count in enumerate(counts) if count]
    if not counts:
        return ""
    return f"only {held[0]}" if len(held) == 1 else f"{len(held)} of {len(counts)}"


def _source(name: str) -> Any:
    from fairmesh.data.datasets.sources import SOURCES
    from fairmesh.errors import nearest

    if name not in SOURCES:
        raise BadInput(f"no published dataset is called {name!r}{nearest(name, SOURCES)}")
    return SOURCES[name]


def _chosen(
    name: str, partition: str | None, nodes: int | None, assignments: Sequence[str], folder: Path | None
) -> Any:
    """Returns the data that the options describe."""
    from fairmesh.config.overrides import assignment, put
    from fairmesh.config.registry import registered, registered_name
    from fairmesh.config.tables import from_table
    from fairmesh.data.datasets import Data

    fields = getattr(registered(Data).get(name), "__dataclass_fields__", {})
    table: dict[str, Any] = {"name": name}
    if partition:
        table["partition"] = {"name": partition}
    for text in assignments:
        put(table, *assignment(text), "--set")
    if folder and "folder" in fields:
        table["folder"] = str(folder)
    if nodes is not None:
        put(table, "partition.nodes" if "partition" in fields else "nodes", nodes, "--nodes")
    if "partition" in table and "partition" in fields and isinstance(table["partition"], dict):
        table["partition"].setdefault("name", registered_name(fields["partition"].default_factory()))
    return from_table(Data, table, "data")
