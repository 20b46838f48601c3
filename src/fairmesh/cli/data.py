"""`fairmesh data`: list datasets, fetch and check their official files, and show how sites would share them."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairmesh.cli.tables import (
    Numbers,
    SiteColumn,
    TableOptions,
    Target,
    Time,
    Unit,
    Without,
    few_of_each,
    found_in,
    is_pattern,
    is_table,
)
from fairmesh.cli.terminal import Json, Overwrite, draw, few, print_json, say, show_table
from fairmesh.errors import BadInput, counted

if TYPE_CHECKING:
    from fairmesh.data.datasets import Data
    from fairmesh.experiment import Experiment

data = typer.Typer(help="List, fetch, check and show datasets.")

Folder = Annotated[
    Path | None, typer.Option("--data", help="The folder of the datasets, instead of $FAIRMESH_DATA and the cache.")
]


@data.callback(invoke_without_command=True)
def listing(context: typer.Context, folder: Folder = None, json_: Json = False) -> None:
    """List, fetch, check and show datasets.

    Without a command: list the published datasets, where they were found, their size, licence and source."""
    if context.invoked_subcommand:
        return
    from fairmesh.data.datasets.sources import SOURCES, inventory, places

    rows = {name: inventory(source, folder) for name, source in SOURCES.items()}
    if json_:
        print_json({"datasets": list(rows.values())})
        return
    table = [["dataset", "found in", "size", "licence", "source"]]
    for name, row in rows.items():
        size = row["bytes"] or row["bytes_unpacked"]
        shown = f"{size / 1e6:.1f} MB" if size else ""
        table.append([name, row["found"] or "missing", shown, row["licence"], row["source"]])
    show_table(table)
    missing = [SOURCES[name] for name, row in rows.items() if not row["found"]]
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
        str,
        typer.Argument(
            help="An experiment file, a table, a folder of tables or images, a pattern of tables, or a dataset; by "
            "default all datasets."
        ),
    ] = "",
    target: Target = "",
    site: SiteColumn = "",
    numbers: Numbers = False,
    unit: Unit = "",
    time: Time = "",
    folder: Folder = None,
    json_: Json = False,
) -> None:
    """Say what looks wrong with data, or check official files.

    Of an experiment file, a table or a folder of images: duplicates within and across training rows, test rows and
    sites; rows of one patient in training and test rows; columns that are constant, identifiers, or tell the target;
    what differs between sites, such as units of measurement; single classes, rare classes and small test sets. Exits
    with 1 if results would mislead.

    Of a published dataset: checks the files against their checksums. Exits with 1 if one is damaged or missing."""
    path = Path(what)
    if not what or not (path.exists() or path.suffix):
        _check_files(what, folder, json_)
        return
    if not path.exists() and not is_pattern(path):
        raise BadInput(f"there is no file {path}")
    experiment, made = _data_of(TableOptions(path, target, site, numbers, unit=unit, time=time))
    findings, sites = found_in(made, experiment)
    wrong = sum(finding.severity == "error" for finding in findings)
    if json_:
        print_json({"checked": what, "sites": sites, "findings": list(map(asdict, findings)), "errors": wrong})
    else:
        for line in few_of_each(findings):
            say(line)
        counts = " and ".join(map(counted, (wrong, len(findings) - wrong), ("error", "warning")))
        among = f", {counted(sites, 'site')}" if sites else ""
        say(f"{counts if findings else 'nothing'} found in {what}{among}")
    if wrong:
        raise typer.Exit(1)


def _data_of(options: TableOptions) -> tuple["Experiment | None", "Data"]:
    """Returns an experiment and its data, or None and the data of a table or of a folder of images. Without sites, a
    table is one site."""
    from fairmesh.config.tables import from_table
    from fairmesh.data.datasets import Data, ImageFolder
    from fairmesh.experiment import load_experiment

    path = options.path
    if path.suffix == ".toml":
        if options.unit or options.time:
            raise BadInput(f"{path} says in [data] what rows belong to: write unit and time there, not as options")
        experiment = load_experiment(path)
        return experiment, experiment.known_data()
    if not is_table(path) and path.is_dir():
        return None, ImageFolder(str(path), unit=options.unit or None)
    one = not options.site and not is_pattern(path) and not path.is_dir()
    return None, from_table(Data, options.settings() | ({"partition": {"name": "even", "nodes": 1}} if one else {}))


def _check_files(name: str, folder: Path | None, json_: bool) -> None:
    """Checks official files against their checksums."""
    from fairmesh.data.datasets.download import check as verdicts
    from fairmesh.data.datasets.sources import SOURCES, found, places

    sources = [_source(name)] if name else list(SOURCES.values())
    here = [(source, place) for source in sources if (place := found(source, folder))]
    if name and not here:
        looked = ", ".join(map(str, places(sources[0], folder)))
        raise BadInput(f"{sources[0].title} was not found in {looked}; `fairmesh data fetch {name}` fetches it")
    rows = [[source.name, str(place / file), said] for source, place in here for file, said in verdicts(source, place)]
    wrong = {i for i, row in enumerate(rows) if not row[2].startswith("right")}
    if json_:
        print_json({"files": [dict(zip(("dataset", "file", "verdict"), row)) for row in rows], "damaged": len(wrong)})
    else:
        show_table([["dataset", "file", "verdict"], *rows], marked=wrong)
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
    show_table(few(table))
    if path:
        say(f"picture: {path}")


@data.command()
def contract(
    source: Annotated[
        Path, typer.Argument(help="An experiment file with [data], or a table: .csv or .parquet, or several of them.")
    ],
    target: Target = "",
    numbers: Numbers = False,
    without: Without = [],  # noqa: B006
    unit: Unit = "",
    time: Time = "",
) -> None:
    """Draft the [contract] of an experiment.

    Prints the section that this data fulfils, with ranges a little wider than seen. Correct it, add the units, and put
    it into the experiment file; every site's data is then checked by it."""
    from fairmesh.data.draft import drafted, repeated_identifiers

    experiment, made = _data_of(TableOptions(source, target, numbers=numbers, unit=unit, time=time))
    text, identifiers = drafted(made, without)
    print(text)
    for name in repeated_identifiers(made):
        say(
            f"column {name!r} looks like an identifier with several rows each. If rows with one belong together, write "
            f"--unit {shlex.quote(name)}: they are then not divided, and it is no input"
        )
    for name in identifiers:
        say(
            f"column {name!r} looks like an identifier: a different whole number in every row. If it is one, leave it "
            f"out: --without {shlex.quote(name)}"
        )
    say("all sites will see these numbers, which were computed from this data")
    if experiment is not None and experiment.privacy is not None:
        say(
            "[privacy] does not cover them: replace centers, scales, fills, ranges and categories by what is known "
            "without these rows, such as textbook values"
        )


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
    from fairmesh.config.overrides import overridden, put
    from fairmesh.config.registry import registered, registered_name
    from fairmesh.config.tables import from_table
    from fairmesh.data.datasets import Data

    fields = getattr(registered(Data).get(name), "__dataclass_fields__", {})
    table: dict[str, Any] = {"name": name}
    if partition:
        table["partition"] = {"name": partition}
    table = overridden(table, assignments)
    if folder and "folder" in fields:
        table["folder"] = str(folder)
    if nodes is not None:
        put(table, "partition.nodes" if "partition" in fields else "nodes", nodes, "--nodes")
    if "partition" in table and "partition" in fields and isinstance(table["partition"], dict):
        table["partition"].setdefault("name", registered_name(fields["partition"].default_factory()))
    return from_table(Data, table, "data")
