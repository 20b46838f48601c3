"""`python -m reproduction`: runs the paper's experiments again and writes the pages that report them."""

import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fairmesh.cli.cluster import leave
from fairmesh.cli.run import use_data
from fairmesh.cli.terminal import Json, print_json, say, show_table
from fairmesh.errors import BadInput, FairmeshError, Interrupted

HERE = Path(__file__).parent
PAGE, FIGURES_FOLDER = "README.md", "figures"  # next to the results
TABLES = ("table2", "table3", "table4a", "table4b", "table4c", "table5")
FIGURES = ("figure1", "figure2", "figure3", "figure4")
_ANSWERS = {True: "holds", False: "does not hold", None: "not known"}
_RESUME = "the same command resumes where it stopped"
_BENCHES = ("sites", "arena")
_OTHERS = ("all", "theory", "verdicts", "page", "frontier", *_BENCHES)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def reproduce(
    what: Annotated[
        list[str],
        typer.Argument(
            help=f"all, theory, verdicts, page, frontier, sites, arena, or some of {', '.join((*TABLES, *FIGURES))}."
        ),
    ],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    data: Annotated[Path | None, typer.Option(help="Folder of the datasets, instead of $FAIRMESH_DATA.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results, figures and README.md; rows recorded there are not run again. "
            "By default runs/reproduction.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes that share the device: by default 4 on a GPU, else 1."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run everything in miniature, to see that it works.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="With frontier, sites or arena: show the recorded results and run nothing.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="With sites or arena: a problem to run; repeatable.")] = None,
    half: Annotated[
        str | None,
        typer.Option(
            help="With sites: the problems of one half, development or held-back, or twins. With arena: bench, twins, "
            "or the natural sets of one half."
        ),
    ] = None,
    methods: Annotated[list[str] | None, typer.Option(help="With sites or arena: a method; repeatable.")] = None,
    untuned: Annotated[bool, typer.Option("--untuned", help="With sites or arena: run no tuned methods.")] = False,
    first_split: Annotated[
        int | None,
        typer.Option(min=0, help="With sites: run five splits from this one on."),
    ] = None,
    packages: Annotated[
        Path | None,
        typer.Option(help="With arena: folder of unpacked registry packages, instead of $FAIRMESH_PACKAGES."),
    ] = None,
    json_: Json = False,
) -> None:
    """Run the paper's experiments again. You can stop at any time: the same command resumes where it stopped.

    `frontier` runs the experiments on Tracked AD-GDA, which go beyond the paper (reproduction/frontier.md).

    `sites` runs the bench of site problems: what robust weights gain at the worst site, and when they cannot.

    `arena` runs own and published methods on these problems and on natural sites (reproduction/arena.md).

    `verdicts` compares the recorded results with the paper's numbers. `page` writes reproduction/README.md from them.
    Both read reproduction/results unless --out names another folder."""
    known = (*_OTHERS, *TABLES, *FIGURES)
    for name in what:
        if name not in known:
            raise BadInput(f"there is no recipe {name!r}; choose from {', '.join(known)}")
    alone = [name for name in what if name in _OTHERS]
    if alone and len(what) > 1:
        raise BadInput(f"{alone[0]!r} cannot be combined with other recipes, got {' '.join(what)}")
    if what[0] not in _BENCHES and (only or half or methods or untuned):
        raise BadInput(f"--only, --half, --methods and --untuned work only with sites and arena, got {' '.join(what)}")
    if what != ["sites"] and first_split is not None:
        raise BadInput(f"--first-split works only with sites, got {' '.join(what)}")
    if what != ["arena"] and packages:
        raise BadInput(f"--packages works only with arena, got {' '.join(what)}")
    use_data(data)
    if what[0] in _BENCHES:
        if packages:
            from reproduction.arena.packages import use_packages

            use_packages(packages)
        return _bench(what[0], out, device, jobs, quick, show, json_, only, half, methods, untuned, first_split)
    if what == ["verdicts"]:
        return _verdicts(out, json_)
    if what == ["page"]:
        return _page(out)
    if show:
        if what != ["frontier"]:
            raise BadInput(
                f"--show works only with frontier, sites and arena, got {' '.join(what)}; for the paper's numbers use "
                "verdicts"
            )
        return _claims(out, json_)
    folder = out or Path("runs") / ("reproduction-quick" if quick else "reproduction")
    _keep_apart(folder / "results", quick)
    if what == ["theory"]:
        return _theory(folder / "results", quick, json_)
    if what == ["frontier"]:
        return _frontier(folder, device, jobs, quick, json_)
    recipes = [*TABLES, *FIGURES] if what == ["all"] else what
    failed = None
    with _with_theory(folder / "results", quick, device, wanted=what == ["all"]):
        try:
            _run(recipes, folder, device, jobs, quick, json_)
        except Interrupted:
            raise
        except KeyboardInterrupt:
            say(f"stopped; {_RESUME}")
            raise typer.Exit(130) from None
        except FairmeshError as error:  # the page still shows the rows that succeeded
            failed = error
    if (folder / "results").is_dir():
        _page(folder, quiet=json_)
    if failed:
        raise failed
    if json_:
        _verdicts(folder, True)
    return None


def _keep_apart(results: Path, quick: bool) -> None:
    """Refuses to mix results in miniature with real ones in one folder."""
    from reproduction.lines import MINIATURE

    marked, begun = (results / MINIATURE).exists(), results.is_dir() and any(results.glob("*.jsonl"))
    if begun and marked != quick:
        kind = "results in miniature" if marked else "results of full runs"
        raise BadInput(f"{results} already holds {kind}; choose another folder with --out")
    if quick:
        results.mkdir(parents=True, exist_ok=True)
        (results / MINIATURE).touch()


@contextmanager
def _with_theory(results: Path, quick: bool, device: str, wanted: bool) -> Iterator[None]:
    """With `all`, checks the theorems too unless that is recorded: on the CPU while a GPU works, else afterwards."""
    from reproduction.lines import write_lines
    from reproduction.theory import theory

    path = results / "theory.jsonl"
    if not wanted or path.exists():
        yield
        return
    if device == "cpu":
        yield
        write_lines(results, "theory", theory(quick, announce=say))
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        checked = pool.submit(theory, quick)
        yield
        write_lines(results, "theory", checked.result())


def _results(out: Path | None) -> Path:
    from reproduction.verdicts import RECORDED

    if out is None:
        return RECORDED
    if not (out / "results").is_dir():
        raise BadInput(f"{out} has no folder 'results'; `python -m reproduction all --out {out}` creates it")
    return out / "results"


def _run(recipes: list[str], folder: Path, device: str, jobs: int | None, quick: bool, quiet: bool) -> None:
    from fairmesh.training.options import device_of
    from reproduction.recipes import miniature
    from reproduction.running import reproduce as run

    on_cpu = device_of(device).type == "cpu"
    started = time.monotonic()
    left_out = run(
        recipes,
        folder / "results",
        device,
        jobs=jobs or (1 if on_cpu else 4),
        work=folder / "in-progress" if on_cpu and not quick else None,
        change=miniature if quick else lambda row: row,
        say=(lambda text: None) if quiet else say,
    )
    if not quiet:
        say(f"done in {(time.monotonic() - started) / 60:.1f} min")
        for reason in dict.fromkeys(left_out.values()):
            say(f"{list(left_out.values()).count(reason)} rows not run: {reason}")


def _frontier(folder: Path, device: str, jobs: int | None, quick: bool, json_: bool) -> None:
    """Runs the rows that share the device, then the studies that use one process on the CPU, then shows the claims."""
    from reproduction.frontier import duals, lies
    from reproduction.frontier.recipes import FRONTIER
    from reproduction.lines import write_lines

    _run(list(FRONTIER), folder, device, jobs, quick, json_)
    for name, lines in {"frontier_duals": duals.lines, "frontier_lies": lies.lines}.items():
        if not (folder / "results" / f"{name}.jsonl").exists():  # each is recorded as a whole
            try:
                made = lines(say=(lambda text: None) if json_ else say, miniature=quick)
            except BadInput as error:  # its data is missing
                say(f"{name} not run: {error}")
            else:
                write_lines(folder / "results", name, made)
    _claims(folder, json_)


def _bench(
    bench: str,
    out: Path | None,
    device: str,
    jobs: int | None,
    quick: bool,
    show: bool,
    json_: bool,
    only: list[str] | None,
    half: str | None,
    methods: list[str] | None,
    untuned: bool,
    first_split: int | None,
) -> None:
    """Runs the missing splits of a bench unless only recorded ones are to be shown, then prints its tables."""
    from fairmesh.training.options import device_of
    from reproduction.arena import problems as arena
    from reproduction.sites import running
    from reproduction.sites.running import known_methods, known_problems, run

    tables = _arena_tables if bench == "arena" else _sites_tables
    problems, chosen = known_problems(only, half, bench), known_methods(methods, bench)
    if show:
        return tables(_results(out) / bench, problems, chosen, json_)
    results = (out or Path("runs") / ("reproduction-quick" if quick else "reproduction")) / "results" / bench
    scales = arena if bench == "arena" else running
    on_cpu = device_of(device).type == "cpu"
    _keep_apart(results, quick)
    try:
        left_out = run(
            problems,
            chosen,
            results,
            dataclasses.replace(scales.QUICK if quick else scales.FULL, first_split=first_split),
            device,
            jobs=jobs or (1 if on_cpu else 4),
            tunings=("untuned",) if untuned else ("untuned", "tuned"),
            bench=bench,
            say=(lambda text: None) if json_ else say,
        )
    except KeyboardInterrupt:
        say(f"stopped; {_RESUME}")
        raise typer.Exit(130) from None
    for name, reason in left_out.items():
        say(f"{name} not run: {reason}")
    return tables(results, problems, chosen, json_)


def _sites_tables(results: Path, problems: list[str], methods: list[str], json_: bool) -> None:
    from reproduction.sites import table
    from reproduction.sites.problems import PROBLEMS
    from reproduction.sites.running import rows_of

    found = {name: rows for name in problems if (rows := rows_of(results, name))}
    tables = {
        name: [line for line in table.table(table.book_of(rows)) if line["method"] in methods]
        for name, rows in found.items()
    }
    summaries = [table.summary(name, rows, tuning) for tuning in ("untuned", "tuned") for name, rows in found.items()]
    if json_:
        print_json(table.as_plain({"problems": tables, "summary": summaries}))
        return
    for name, lines in tables.items():
        print(f"{name} ({PROBLEMS[name].half}, {PROBLEMS[name].kind}): {PROBLEMS[name].difference}")
        show_table(table.table_in_words(lines))
        print()
    show_table(table.summary_in_words(summaries))


def _arena_tables(results: Path, problems: list[str], methods: list[str], json_: bool) -> None:
    from reproduction.arena import goals, table
    from reproduction.arena.problems import PROBLEMS
    from reproduction.sites.running import rows_of
    from reproduction.sites.table import as_plain

    found = {name: rows for name in problems if (rows := rows_of(results, name))}
    shown = {*methods, *([table.SITES_MODEL] if table.DEFAULT in methods else [])}
    tables = {name: [line for line in table.table(rows) if line["method"] in shown] for name, rows in found.items()}
    compared = [line for tuning in ("untuned", "tuned") for line in table.comparisons(found, tuning)]
    reached = goals.goals(found)
    if json_:
        print_json(as_plain({"problems": tables, "comparisons": compared, "goals": reached}))
        return
    for name, lines in tables.items():
        print(f"{name} ({PROBLEMS[name].half}, {PROBLEMS[name].metric} in %): {PROBLEMS[name].difference}")
        show_table(table.table_in_words(lines))
        print()
    for rows in (table.comparisons_in_words(compared), *goals.goals_in_words(reached)):
        show_table(rows)
        print()


def _claims(out: Path | None, json_: bool) -> None:
    from reproduction.frontier.claims import claims, in_words

    found = claims(_results(out))
    if json_:
        print_json({"claims": found})
        return
    rows = [[*in_words(one), _ANSWERS[one["holds"]]] for one in found]
    show_table([["claim", "measured", "required", ""], *rows])


def _theory(results: Path, quick: bool, json_: bool) -> None:
    from reproduction.lines import write_lines
    from reproduction.theory import theory, theory_sentences

    lines = theory(quick, announce=None if json_ else say)
    write_lines(results, "theory", lines)
    if json_:
        print_json({"checks": lines})
    else:
        print(theory_sentences(lines))


def _verdicts(out: Path | None, json_: bool) -> None:
    from reproduction.verdicts import factors, orderings, verdicts
    from reproduction.wording import shown

    results = _results(out)
    cells = verdicts(results)
    if json_:
        print_json({"cells": cells, "orderings": orderings(results), "factors": factors(results)})
        return

    show_table(
        [["cell", "paper", "formula", "published", "verdict"]]
        + [[c["cell"], shown(c["paper"]), shown(c["formula"]), shown(c["published"]), c["verdict"]] for c in cells]
    )
    for one in orderings(results):
        print(f"{one['protocol']}: {one['ordering']}: {_ANSWERS[one['holds']]}")


def _page(out: Path | None, quiet: bool = False) -> None:
    """Writes README.md and figures/ next to the results; for the recorded ones also the other pages."""
    from reproduction.page import write

    folder = out or HERE
    write(_results(out), folder / PAGE, folder / FIGURES_FOLDER)
    if out is None:
        from reproduction.frontier.page import write as write_frontier

        write_frontier(_results(out), HERE / "frontier.md")
        if (_results(out) / "sites").is_dir():
            from reproduction.sites.page import write as write_sites

            write_sites(_results(out) / "sites", HERE / "sites.md")
        from reproduction.arena.page import write as write_arena

        write_arena(_results(out) / "arena", HERE / "arena.md")
    if not quiet:
        say(f"written: {folder / PAGE}")


def main() -> None:
    """Shows errors raised on purpose as one line, without a traceback."""
    try:
        app()
    except Interrupted as error:
        say(f"{error}; {_RESUME}")
        sys.exit(130)
    except FairmeshError as error:
        leave(error)


if __name__ == "__main__":
    main()
