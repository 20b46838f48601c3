"""`fairmesh demo` and `fairmesh run`: train, and show the result."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairmesh.cli.cluster import folder_of, loaded_on
from fairmesh.cli.progress import progress
from fairmesh.cli.tables import (
    Numbers,
    SiteColumn,
    TableOptions,
    Target,
    Time,
    Unit,
    Without,
    as_options,
    few_of_each,
    is_table,
)
from fairmesh.cli.terminal import (
    Json,
    Track,
    console,
    print_json,
    readable_toml,
    say,
    show,
    show_table,
    without_garbage_collection,
)
from fairmesh.errors import BadInput
from fairmesh.storage.occupied import refuse_unusable, set_aside

if TYPE_CHECKING:
    from fairmesh.experiment import Experiment


def demo(
    out: Annotated[Path, typer.Option(help="Folder for runs, plots and report.html; a new one is created.")] = Path(
        "fairmesh-demo"
    ),
    seed: Annotated[int, typer.Option(help="Which splits of the digits; it also seeds the batches.")] = 0,
    json_: Json = False,
) -> None:
    """Train ten sites, six of them small and with another scanner.

    Compares training alone, four ways of training together, what each brings the worst site, and which model each site
    should use. Takes about half a minute on two cores."""
    with without_garbage_collection():
        from fairmesh.cli.demo import NOTE
        from fairmesh.cli.demo import demo as run_demo
        from fairmesh.report.runs import rows_of, site_table, worst_sites

    folder = _fresh(out)
    if not json_:
        console().print(
            "Ten sites hold handwritten digits. Six of them are small, and their scanner shifts images by a pixel.\n"
            "They train a logistic model: each alone, or one together over a ring with compressed messages.\n"
        )
    with progress(json_) as watcher:
        outcome = run_demo(seed, folder, watcher)
    if json_:
        report = str(outcome.report) if outcome.report else None
        print_json(outcome.as_json() | {"folder": str(folder), "report": report})
        return
    runs = list(outcome.runs.values())
    show_table(site_table(runs), "Accuracy site by site", worst_sites(runs))
    show_table(rows_of(runs), "Overall")
    missing = f" There is no methods.png, since {outcome.without_picture}" if outcome.without_picture else ""
    written = f"The full page: {outcome.report}.{missing}"
    sites, first = "\n".join(outcome.sentences()), "\n".join(outcome.headline())
    shown = f"{NOTE}\n\nThe common model of fairmesh's default:\n{sites}\n\n{outcome.sentence}"
    console().print(f"\n{shown}\n\nWhat fairmesh says of its default:\n{first}\n\n{written}", markup=False)


def _fresh(out: Path) -> Path:
    """Returns the folder, or a numbered one if it is not empty, so that the demo can be run twice."""
    out = out if out.name else out.resolve()
    candidates = [out, *(out.with_name(f"{out.name}-{k}") for k in range(2, 1000))]
    return next(path for path in candidates if not path.exists() or (path.is_dir() and not any(path.iterdir())))


def _readable(path: Path) -> Path:
    """Refuses a file that cannot be read, before anything is imported."""
    return path if is_table(path) else readable_toml(path)


def run(
    experiment: Annotated[
        Path,
        typer.Argument(
            help="An experiment file (TOML), or a table (.csv, .parquet, a folder or a pattern of one file per site) "
            "with --target, to train with all defaults.",
            callback=_readable,
        ),
    ],
    target: Target = "",
    site: SiteColumn = "",
    numbers: Numbers = False,
    without: Without = [],  # noqa: B006
    unit: Unit = "",
    time: Time = "",
    set_: Annotated[
        list[str], typer.Option("--set", help="key=value, e.g. algorithm.consensus_step=0.5; may be repeated.")
    ] = [],  # noqa: B006
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of the datasets, instead of $FAIRMESH_DATA.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Train N seeds, 0 to N - 1, as one batch.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/<name of the file> by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the folder's checkpoint.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Set a run in this folder aside, as FOLDER-old, and start again.")
    ] = False,
    with_references: Annotated[
        bool,
        typer.Option(
            "--with-references",
            help="Compare with each site alone, the average model, all data in one place, the fine-tuned model, and a "
            "constant answer.",
        ),
    ] = False,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Train once more without each site, and judge the model there.")
    ] = False,
    track: Track = [],  # noqa: B006
    network: Annotated[
        str, typer.Option(help="memory: all nodes here; cluster: one rank that torchrun starts.")
    ] = "memory",
    timeout: Annotated[float, typer.Option(help="Seconds after which a silent rank of a cluster is lost.")] = 300.0,
    json_: Json = False,
) -> None:
    """Train the experiment in a TOML file, or on a table with all defaults.

    Writes metrics, summary, model and checkpoint to the run's folder. A table is checked first, as by `fairmesh data
    check`; the run's folder then has an experiment file to go on with."""
    _refuse_flags(seeds, resume, overwrite)
    options = TableOptions(experiment, target, site, numbers, without, unit, time)
    if not is_table(experiment) and any((target, site, numbers, without, unit, time)):
        raise BadInput("--target, --site, --unit and the like are about a table; a file says them in [data]")
    folder = folder_of(experiment, out)
    if network == "memory":  # a rank may have been started again, in the folder of its run
        refuse_unusable(folder, resume=resume, overwrite=overwrite)
    use_data(data)

    from fairmesh.cli.comparing import Comparing
    from fairmesh.experiment import load_experiment
    from fairmesh.experiment import run as run_experiment
    from fairmesh.report.runs import Run
    from fairmesh.report.text import run_in_words
    from fairmesh.trackers import trackers_of
    from fairmesh.training.observers import Progress

    trackers = trackers_of(track)
    comparing = Comparing.of(with_references, leave_one_out, folder, resume)
    assignments = _assignments(set_, device, seeds)
    made: dict[str, Any] = {}

    def load() -> "Experiment":
        if not is_table(experiment):
            return load_experiment(experiment, assignments)
        loaded, made["file"], made["findings"] = options.experiment(assignments)
        return loaded

    with loaded_on(network, timeout, load) as (loaded, process_group):
        comparing.check_experiment(loaded)
        silent = process_group is not None and not process_group.is_leader
        tell = None if json_ or silent else say
        findings = [f for f in made.get("findings", ()) if f.what != "division of rows"]  # which the run says itself
        for line in few_of_each(findings, "fairmesh data check ... --json") if tell else ():
            say(as_options(line))
        if overwrite and not silent and (aside := set_aside(folder)):
            say(f"the run that was in {folder} is now in {aside}")
        with progress(json_ or silent) as watcher, _memory_reused(loaded):
            result = run_experiment(
                loaded,
                out=folder,
                resume=resume,
                observers=[Progress(watcher(folder.name, loaded.rounds)), *trackers],
                announce=tell,
                handle_signals=True,
                process_group=process_group,
                check=comparing.check_problem,
            )
    if silent:  # of a cluster, the first rank alone trains what follows
        return
    if made:
        _write_file(folder / f"{folder.resolve().name}.toml", made["file"], tell)
    with _memory_reused(loaded):
        compared = comparing.add_to(result, loaded, folder, resume, tell)
    summary = Run.from_result(result, folder.resolve().name)
    if json_:
        print_json(summary.summary | compared.as_json() | {"folder": str(folder)})
        return
    for part in run_in_words(summary, result, folder, *compared, data_is_here=process_group is None):
        show(part)


def _write_file(path: Path, table: dict[str, Any], tell: Callable[[str], None] | None) -> None:
    """Writes the experiment file of a run that had none."""
    import tomli_w

    from fairmesh.storage.files import write_atomically

    content = "# What is not written here keeps its default; `fairmesh keys` lists all settings.\n\n" + tomli_w.dumps(
        table
    )
    write_atomically(path, content.encode())
    if tell:
        tell(f"this run as an experiment file, to change and go on with: {path}")


def _refuse_flags(seeds: int | None, resume: bool, overwrite: bool) -> None:
    """Refuses flags that do not go together, before anything is imported."""
    if seeds is not None and seeds < 1:
        raise BadInput(f"--seeds must be >= 1, got {seeds}")
    if resume and overwrite:
        raise BadInput("--resume continues the run in the folder, and --overwrite starts another; give one of them")


def _assignments(set_: list[str], device: str | None, seeds: int | None) -> list[str]:
    """Returns the settings of the command line, as --set has them."""
    more = {"options.device": device, "seeds": list(range(seeds or 0))}
    return [*set_, *(f"{key}={value}" for key, value in more.items() if value)]


@contextmanager
def _memory_reused(experiment: "Experiment") -> Iterator[None]:
    """Lets the process keep the memory that it frees on a CPU meanwhile; no other code runs here."""
    from fairmesh.numerics import malloc

    with malloc.reused() if experiment.options.device == "cpu" else nullcontext():
        yield


def use_data(folder: Path | None) -> None:
    """Sets $FAIRMESH_DATA to the folder of --data."""
    if not folder:
        return
    if not folder.is_dir():
        raise BadInput(f"--data {folder}: no such folder")
    os.environ["FAIRMESH_DATA"] = str(folder)
