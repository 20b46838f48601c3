"""The command line. Heavy imports wait until a command needs them."""

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fairmesh.cli_cluster import launch, leave, loaded_on, stop_where_ended
from fairmesh.cli_data import data
from fairmesh.cli_mesh import mesh
from fairmesh.cli_node import node, status
from fairmesh.cli_reproduce import reproduce, use_data
from fairmesh.errors import FairmeshError
from fairmesh.terminal import Json, console, print_json, say, show_rows, show_table

app = typer.Typer(
    help="One model that works for every site: robust decentralized learning with compressed messages, no server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The console script: errors raised on purpose are shown as one line, without a traceback."""
    stop_where_ended()
    try:
        app()
    except FairmeshError as error:
        leave(error)


@contextmanager
def _progress(quiet: bool):
    """Gives a watcher for each run: live bars on a terminal, a line at each tenth elsewhere, nothing when quiet."""
    if quiet:
        yield lambda name, rounds: None
        return
    if not sys.stderr.isatty():
        yield _plain_progress
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[status]}"),
    )  # fmt: skip
    with Progress(*columns, console=console(stderr=True)) as bars:

        def watcher(name: str, rounds: int) -> Callable[[int, list[dict]], None]:
            task = bars.add_task(name, total=rounds, status="")
            status, shown = [""], [0.0]

            def watch(done: int, records: list[dict]) -> None:
                if not records and time.monotonic() - shown[0] < 0.1:  # rounds may be quicker than a bar is drawn
                    return
                status[0], shown[0] = _status(records) if records else status[0], time.monotonic()
                bars.update(task, completed=done, status=status[0])

            return watch

        yield watcher


def _plain_progress(name: str, rounds: int) -> Callable[[int, list[dict]], None]:
    started, tenth = time.monotonic(), max(1, rounds // 10)
    said = [-1]

    def watch(done: int, records: list[dict]) -> None:
        if records and (done // tenth > said[0] or done == rounds):
            said[0] = done // tenth
            say(f"{name}: round {done}/{rounds}, {time.monotonic() - started:.1f} s, {_status(records)}")

    return watch


def _status(records: list[dict]) -> str:
    metric = "accuracy" if "accuracy" in records[0] else "loss"
    worst, mean = (sum(record[metric][what] for record in records) / len(records) for what in ("worst", "mean"))
    if metric == "loss":
        return f"worst site's loss {worst:.4g}, mean {mean:.4g}"
    return f"worst site {100 * worst:.1f} %, mean {100 * mean:.1f} %"


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for runs, plots and report.html; made new.")] = Path(
        "fairmesh-demo"
    ),
    seed: Annotated[int, typer.Option(help="Deals the digits and draws the batches.")] = 0,
    json_: Json = False,
) -> None:
    """Ten sites, two with another scanner: trains CHOCO-SGD and AD-GDA on digits and shows who is left behind."""
    from fairmesh.demo import ROUNDS
    from fairmesh.demo import demo as run_demo
    from fairmesh.report import rows_of, site_table, worst_sites

    folder = _fresh(out)
    if not json_:
        console().print(
            "Ten sites hold scikit-learn's digits; sites 8 and 9 use a scanner that stores images mirrored.\n"
            "They train one logistic model over a ring with 4-bit messages, first for the average (CHOCO-SGD),\n"
            "then for the worst mixture of sites (AD-GDA).\n"
        )
    with _progress(json_) as watcher:
        outcome = run_demo(seed, folder, lambda name: watcher(name, ROUNDS))
    if json_:
        print_json(outcome.as_json() | {"folder": str(folder)})
        return
    sites = site_table(outcome.runs)
    show_table(sites, "Accuracy site by site", worst_sites(outcome.runs))
    rows = rows_of(outcome.runs)
    show_table([list(rows[0])[1:], *(list(row.values())[1:] for row in rows)], "Overall")
    console().print(f"\n{outcome.sentence}\n\nPlots and the full page: {folder / 'report.html'}")


def _fresh(out: Path) -> Path:
    """The folder, or one numbered after it where it is taken: a demo can be run twice."""
    out = out if out.name else out.resolve()
    candidates = [out, *(out.with_name(f"{out.name}-{k}") for k in range(2, 1000))]
    return next(path for path in candidates if not path.exists() or (path.is_dir() and not any(path.iterdir())))


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(help="An experiment file (TOML).")],
    set_: Annotated[list[str], typer.Option("--set", help="key=value, e.g. algorithm.rate=0.5; may be repeated.")] = [],  # noqa: B006
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of the datasets, in place of $FAIRMESH_DATA.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Train N seeds, 0 to N - 1, in one batched run.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/<name of the file> by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the folder's checkpoint.")] = False,
    network: Annotated[
        str, typer.Option(help="memory: all nodes here; cluster: one rank that torchrun starts.")
    ] = "memory",
    timeout: Annotated[float, typer.Option(help="Seconds until a silent rank of a cluster counts as lost.")] = 300.0,
    json_: Json = False,
) -> None:
    """Trains an experiment file; its folder holds metrics, summary, model and checkpoint."""
    from fairmesh.errors import BadInput
    from fairmesh.experiment import load_experiment
    from fairmesh.experiment import run as run_experiment
    from fairmesh.report import Run, rows_of

    if seeds is not None and seeds < 1:
        raise BadInput(f"--seeds must be >= 1, got {seeds}")
    use_data(data)
    assignments = [*set_, *([f"options.device={device}"] if device else [])]
    assignments += [f"seeds={list(range(seeds))}"] if seeds else []
    folder = out or Path("runs") / experiment.stem
    with loaded_on(network, timeout, lambda: load_experiment(experiment, assignments)) as (loaded, hosts):
        silent = hosts is not None and not hosts.first
        with _progress(json_ or silent) as watcher:
            watch = watcher(experiment.stem, loaded.rounds)
            announce = None if json_ or silent else say
            result = run_experiment(loaded, out=folder, resume=resume, watch=watch, announce=announce, hosts=hosts)
    if silent:
        return
    summary = Run.from_folder(folder)
    if json_:
        print_json(summary.summary | {"folder": str(folder)})
        return
    show_rows(rows_of(summary.variants()))
    if result.diverged:
        say(f"diverged replicas: {result.diverged}")
    say(f"written to {folder}; look at it with: fairmesh report {folder}")


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("compare.png"),
    json_: Json = False,
) -> None:
    """One table and one plot of several runs: worst-site accuracy against rounds and against traffic."""
    from fairmesh.report import Run, check_comparable, rows_of
    from fairmesh.report import plot as draw

    names = [folder.resolve().name for folder in folders]
    clear = len(set(names)) == len(names)
    loaded = [Run.from_folder(folder) for folder in folders]
    loaded = loaded if clear else [replace(run, label=str(folder)) for run, folder in zip(loaded, folders)]
    runs = [variant for run in loaded for variant in run.variants()]
    check_comparable(runs)
    draw(runs, plot)
    if json_:
        print_json({"runs": {run.label: run.summary for run in runs}, "plot": str(plot)})
        return
    show_rows(rows_of(runs))
    say(f"picture: {plot}")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    json_: Json = False,
) -> None:
    """Writes report.html into a run's folder: table, curves, every site and its weight, settings."""
    from fairmesh.report import Run, page
    from fairmesh.runfolder import EXPERIMENT

    finished = Run.from_folder(folder)
    settings = folder / EXPERIMENT
    text = settings.read_text(encoding="utf-8") if settings.exists() else ""
    path = folder / "report.html"
    path.write_text(page(finished.variants(), f"Run {finished.label}", settings=text), encoding="utf-8")
    if json_:
        print_json({"report": str(path)})
        return
    print(f"written: {path}")


bench = typer.Typer(help="Measurements of fairmesh itself.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")
app.add_typer(mesh, name="mesh")


@bench.command("codec")
def bench_codec(
    device: Annotated[str, typer.Option(help="Where the cost of counting is measured: cpu or cuda.")] = "cpu",
    json_: Json = False,
) -> None:
    """Bytes of real training messages against their entropy and the paper's billing, and the codec's speed."""
    from dataclasses import asdict

    from fairmesh.bench.codec import codec_cases, counting_cost

    rows = [
        ["message", "parameters", "bytes", "over entropy", "bits a parameter", "the paper bills", "encode", "decode"]
    ]
    cases = []
    for case in codec_cases():
        cases.append(asdict(case))
        row = [
            case.case, f"{case.dim:,}", f"{case.bytes:,}", f"{100 * (case.bytes / case.entropy_bytes - 1):.1f} %",
            f"{8 * case.bytes / case.dim:.2f}", f"{8 * case.nominal_bytes / case.dim:.2f}",
            f"{case.encode_ms:.2f} ms", f"{case.decode_ms:.2f} ms",
        ]  # fmt: skip
        rows.append(row)
        if not json_:
            say(f"{row[0]}: {row[2]} bytes, {row[4]} bits a parameter")
    counting = counting_cost(device)
    if json_:
        print_json({"cases": cases, "counting": counting})
        return
    show_table(rows)
    print(f"counting bytes slows a simulated round by {100 * counting['slowdown']:.1f} % on {device}")


@bench.command("rounds")
def bench_rounds(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    case: Annotated[list[str], typer.Option(help="Only this case; may be repeated. Also logistic-1000, -10000.")] = [],  # noqa: B006
    replicas: Annotated[list[int], typer.Option(help="How many at once; may be repeated.")] = [],  # noqa: B006
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time of each case goes instead.")] = False,
    json_: Json = False,
) -> None:
    """Time of a simulated round: its spread, the machine's floor, and a plain per-node loop of the same round."""
    from dataclasses import asdict

    from fairmesh.bench.rounds import SETTINGS, timings
    from fairmesh.bench.rounds import profile as profiled

    if profile:
        for name in case or SETTINGS:
            table = profiled(device, name, replicas[0] if replicas else 1)
            rows = [[key[:80], f"{ms:.4f}", f"{calls:.1f}"] for key, ms, calls in table[:25]]
            show_table([[f"{name} on {device}", "ms a round", "calls"], *rows])
        return
    rows = [["case", "replicas", "ms a round", "8 in 10 between", "a replica", "floor", "over floor", "loop", "faster"]]
    found = []
    for timing in timings(device, case or None, replicas or None):
        found.append(asdict(timing))
        loop = "" if timing.loop_ms is None else f"{timing.loop_ms:.3g} ms"
        faster = "" if timing.speedup_over_loop is None else f"{timing.speedup_over_loop:.1f} x"
        spread = f"{timing.ms_low:.4g}-{timing.ms_high:.4g}"
        row = [
            timing.case, str(timing.replicas), f"{timing.ms_per_round:.4g}", spread, f"{timing.ms_per_replica:.4g}",
            f"{timing.floor_ms:.3g}", f"{timing.over_floor:.2f}", loop, faster,
        ]  # fmt: skip
        rows.append(row)
        if not json_:
            say(f"{row[0]}, {row[1]} replicas: {row[2]} ms a round")
    if json_:
        print_json({"device": device, "cases": found})
        return
    show_table(rows)


@bench.command("peers")
def bench_peers(
    nodes: Annotated[int, typer.Option(min=2, help="How many, on a ring over the loopback interface.")] = 8,
    parameters: Annotated[int, typer.Option(min=1, help="Of the model whose 4-bit message travels.")] = 20_000,
    steps: Annotated[int, typer.Option(min=10)] = 500,
    json_: Json = False,
) -> None:
    """The network's part of a round between organisations: logged, sent over mutual TLS, waited for, logged again."""
    from dataclasses import asdict

    from fairmesh.bench.peers import network_cost

    cost = asdict(network_cost(nodes, parameters, steps))
    if json_:
        print_json(cost)
        return
    show_table([["", "network"], *([key.replace("_", " "), f"{value:,.4g}"] for key, value in cost.items())])


app.command()(reproduce)
app.command()(node)
app.command()(status)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(launch)


@app.command()
def topology(
    name: Annotated[str, typer.Argument(help="ring, circulant, complete, star, torus, ...")],
    nodes: Annotated[int, typer.Option(help="How many nodes.")],
    set_: Annotated[list[str], typer.Option("--set", help="key=value of the topology, e.g. offsets=[1,2].")] = [],  # noqa: B006
    delta: Annotated[float, typer.Option(help="A compressor's delta, for the theorems' gamma.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Where the picture goes; NAME-N.png by default.")] = None,
    json_: Json = False,
) -> None:
    """A graph's picture, its spectral gap rho, beta, and the consensus step size gamma of the theorems."""
    from fairmesh.experiment import topology_from
    from fairmesh.mixing import union_of
    from fairmesh.report import draw_graph

    chosen = topology_from(name, set_)
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
        "gamma": mixing.consensus_rate(delta),
    }
    path = plot or Path(f"{name}-{nodes}.png")
    draw_graph(mixing, f"{name}, {nodes} nodes, ρ = {mixing.gap:.3g}", path)
    if json_:
        print_json(facts | {"plot": str(path)})
        return
    if len(cycle) > 1:
        say(f"a schedule of {len(cycle)} graphs; the numbers are those of their mean")
    show_table(
        [["", name]]
        + [[key, f"{value:.4g}" if isinstance(value, float) else str(value)] for key, value in facts.items()]
    )
    say(f"picture: {path}")
