"""`python -m benchmarks`: measures fairmesh's own speed and message sizes, from a checkout."""

import json
from typing import Annotated

import typer

from fairmesh.cli.cluster import leave
from fairmesh.cli.terminal import Json, print_json, say, show_table
from fairmesh.errors import FairmeshError

app = typer.Typer(
    help="Measure fairmesh's own speed and message sizes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("references")
def bench_references(
    rounds: Annotated[int, typer.Option(help="Rounds of the run.")] = 400,
    splits: Annotated[int, typer.Option(help="Splits of the data, in one batch.")] = 4,
    json_: Json = False,
) -> None:
    """Compare the time of all reference models with that of the run, on the sites of the demo."""
    from benchmarks.references import cost_of_references

    cost = cost_of_references(rounds, splits)
    if json_:
        print_json(vars(cost) | {"ratio": cost.ratio})
        return
    show_table(
        [
            ["", "seconds of processor time"],
            ["the run", f"{cost.main:.1f}"],
            ["all references", f"{cost.references:.1f}"],
            ["ratio", f"{cost.ratio:.2f}"],
        ]
    )


@app.command("private")
def bench_private(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be given several times.")] = None,
    fuse: Annotated[bool, typer.Option(help="On a GPU, fuse operations, as long runs do.")] = False,
    json_: Json = False,
) -> None:
    """Time a round of a private run next to a plain one."""
    from dataclasses import asdict

    from benchmarks.private import timings

    rows = list(timings(device, case, fuse))
    if json_:
        print_json([asdict(row) for row in rows])
        return
    table = [[r.case, str(r.units), f"{r.plain_ms:.3g}", f"{r.private_ms:.3g}", f"{r.ratio:.2f}"] for r in rows]
    show_table([["case", "units", "ms, plain", "ms, private", "ratio"], *table])


@app.command("codec")
def bench_codec(
    device: Annotated[str, typer.Option(help="Where to time the counting of bytes: cpu or cuda.")] = "cpu",
    json_: Json = False,
) -> None:
    """Compare the bytes of real training messages with their entropy and with the paper's count; time the codec."""
    from dataclasses import asdict

    from benchmarks.codec import codec_cases, counting_cost

    rows = [
        ["message", "parameters", "bytes", "over entropy", "bits per parameter", "paper counts", "encode", "decode"]
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
            say(f"{row[0]}: {row[2]} bytes, {row[4]} bits per parameter")
    counting = counting_cost(device)
    if json_:
        print_json({"cases": cases, "counting": counting})
        return
    show_table(rows)
    print(f"counting bytes slows a simulated round by {100 * counting['slowdown']:.1f} % on {device}")


@app.command("size")
def size(json_: Json = False) -> None:
    """Count lines, code lines, tests of None, and long and complex functions."""
    from benchmarks.size import sizes

    found = sizes()
    if json_:
        print_json(found)
        return
    rows = [[folder, *(f"{count:,}" for count in counts.values())] for folder, counts in found.pop("folders").items()]
    show_table([["folder", "files", "lines", "code lines"], *rows])
    for name, value in found.items():
        say(f"{name.replace('_', ' ')}: {', '.join(value) if isinstance(value, list) else value}")


@app.command("rounds")
def bench_rounds(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    case: Annotated[list[str], typer.Option(help="Only this case (repeatable); also logistic-1000, -10000.")] = [],  # noqa: B006
    replicas: Annotated[list[int], typer.Option(help="Replicas trained at once (repeatable).")] = [],  # noqa: B006
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time goes instead.")] = False,
    json_: Json = False,
) -> None:
    """Time a simulated round, and compare it with the machine's floor and with a plain per-node loop."""
    from dataclasses import asdict

    from benchmarks.rounds import SETTINGS, timings
    from benchmarks.rounds import profile as profiled

    if profile:
        for name in case or SETTINGS:
            table = profiled(device, name, replicas[0] if replicas else 1)
            rows = [[key[:80], f"{ms:.4f}", f"{calls:.1f}"] for key, ms, calls in table[:25]]
            show_table([[f"{name} on {device}", "ms per round", "calls"], *rows])
        return
    rows = [
        ["case", "replicas", "ms per round", "10 % to 90 %", "per replica", "floor", "over floor", "loop", "faster"]
    ]
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
            say(f"{row[0]}, {row[1]} replicas: {row[2]} ms per round")
    if json_:
        print_json({"device": device, "cases": found})
        return
    show_table(rows)


@app.command("models")
def bench_models(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    case: Annotated[list[str], typer.Option(help="Only this case (repeatable).")] = [],  # noqa: B006
    precision: Annotated[list[str], typer.Option(help="float32, tf32 or bf16 (repeatable).")] = [],  # noqa: B006
    algorithm: Annotated[list[str], typer.Option(help="ad-gda or tracked-ad-gda (repeatable).")] = [],  # noqa: B006
    fuse: Annotated[bool, typer.Option("--fuse", help="Compile the algorithm's part of a round, on a GPU.")] = False,
    json_: Json = False,
) -> None:
    """Time rounds of a ResNet-18 and a vision transformer: the first one, later ones, and their memory."""
    from dataclasses import asdict

    from benchmarks.real_models import timings

    rows = [["case", "algorithm", "precision", "first round", "ms per round", "10 % to 90 %", "copies", "over loop"]]
    found = []
    for one in timings(device, case, precision, algorithm, fuse):
        found.append(asdict(one))
        rows.append(
            [
                one.case, one.algorithm, one.precision, f"{one.first_round_s:.1f} s", f"{one.ms_per_round:.4g}",
                f"{one.ms_low:.4g}-{one.ms_high:.4g}", "" if one.copies is None else f"{one.copies:.1f}",
                "" if one.over_loop is None else f"{one.over_loop:.2f}",
            ]
        )  # fmt: skip
        if not json_:
            say(f"{', '.join(rows[-1][:3])}: {rows[-1][4]} ms per round")
    if json_:
        print_json({"device": device, "fused": fuse, "cases": found})
        return
    show_table(rows)


@app.command("loops")
def bench_loops(
    case: Annotated[list[str], typer.Option(help="Only this case (repeatable).")] = [],  # noqa: B006
    tune_malloc: Annotated[bool, typer.Option(help="Keep freed memory in the process, for both.")] = True,
    json_: Json = False,
) -> None:
    """Compare the CPU time of DSGD's rounds with that of a plain loop over nodes, for every model, on one thread."""
    from dataclasses import asdict

    from benchmarks.plain_sgd import timings

    rows = [["case", "models at once", "problem", "first round", "ms per round", "loop", "over loop"]]
    found = []
    for one in timings(case, tune_malloc):
        found.append(asdict(one))
        rows.append(
            [
                one.case, one.at_once, f"{one.problem_s:.1f} s", f"{one.first_round_s:.1f} s",
                f"{one.ms_per_round:.4g}", f"{one.loop_ms:.4g}", f"{one.ratio:.2f}",
            ]
        )  # fmt: skip
        if not json_:
            say(f"{one.case}: {one.ratio:.2f} times the loop's time")
    if json_:
        print_json({"tune_malloc": tune_malloc, "cases": found})
        return
    show_table(rows)


@app.command("memory")
def bench_memory(
    case: Annotated[list[str], typer.Option(help="Only this case (repeatable).")] = [],  # noqa: B006
    json_: Json = False,
) -> None:
    """Compare the memory that runs announce with what they take, on a CPU. Takes some minutes."""
    from dataclasses import asdict

    from benchmarks.memory import uses

    rows, found = [["case", "freed memory kept", "announced", "measured", "announced / measured"]], []
    for use in uses(case):
        found.append(asdict(use))
        rows.append(
            [
                use.case, "yes" if use.tuned else "no", f"{use.announced_gib:.2f} GiB", f"{use.measured_gib:.2f} GiB",
                f"{use.ratio:.2f}",
            ]
        )  # fmt: skip
        if not json_:
            say(", ".join(rows[-1]))
    if json_:
        print_json({"cases": found})
        return
    show_table(rows)


@app.command("growth")
def bench_growth(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    record: Annotated[
        bool, typer.Option("--record", help="Also write benchmarks/results/growth-DEVICE.json and its plot in docs.")
    ] = False,
    json_: Json = False,
) -> None:
    """Time a round as nodes, parameters, batch size and replicas grow, one at a time. Takes some minutes."""
    from benchmarks import growth

    found = {}
    for axis, curve in growth.curves(device):
        found[axis] = curve
        if not json_:
            say(f"{axis}: " + ", ".join(f"{value}: {ms:.3g} ms" for value, ms in curve))
    for path in growth.record(found, device) if record else []:
        say(f"written: {path}")
    if json_:
        print_json({"device": device, "base": growth.BASE, "milliseconds": found})
        return
    rows = [[axis, str(value), f"{ms:.4g}"] for axis, curve in found.items() for value, ms in curve]
    show_table([["varied", "value", "ms per round"], *rows])


@app.command("peers")
def bench_peers(
    nodes: Annotated[int, typer.Option(min=2, help="Nodes on a ring over the loopback interface.")] = 8,
    parameters: Annotated[int, typer.Option(min=1, help="Parameters of the model sent in 4-bit messages.")] = 20_000,
    steps: Annotated[int, typer.Option(min=10, help="Rounds to measure.")] = 500,
    json_: Json = False,
) -> None:
    """Time the network's part of a round between organisations: log, send over mutual TLS, wait, log again."""
    from dataclasses import asdict

    from benchmarks.peers import network_cost

    cost = asdict(network_cost(nodes, parameters, steps))
    if json_:
        print_json(cost)
        return
    show_table([["", "network"], *([key.replace("_", " "), f"{value:,.4g}"] for key, value in cost.items())])


@app.command("wan")
def bench_wan(
    nodes: Annotated[list[int], typer.Option(help="Only so many nodes (repeatable): 3 or 5.")] = [],  # noqa: B006
    message: Annotated[list[str], typer.Option(help="Only messages of this size (repeatable).")] = [],  # noqa: B006
    every: Annotated[bool, typer.Option("--all", help="Also 5 nodes with large messages.")] = False,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure each case.")] = 6.0,
    idle: Annotated[float, typer.Option(min=0, help="How long to measure nodes that wait; 0 for not at all.")] = 60.0,
    write: Annotated[str, typer.Option(help="Also record the table under this name.")] = "",
    json_: Json = False,
) -> None:
    """Time rounds between network namespaces with 0 to 400 ms of delay, and count the bytes on the wire."""
    from benchmarks import wan

    reason = wan.why_not()
    if reason:
        raise FairmeshError(f"this needs network namespaces with a TUN device, and so root and Linux: {reason}")
    cases = [(n, m) for n in (3, 5) for m in wan.SIZES if every or nodes or message or n == 3 or m == "0.2 kB"]
    cases = [(n, m) for n, m in cases if (not nodes or n in nodes) and (not message or m in message)]
    found, waiting = [], []
    for k, (n, m) in enumerate(cases):
        costs, rest = wan.costs(n, m, seconds, idle if k == 0 else 0)
        found, waiting = found + costs, waiting + ([rest] if rest else [])
        if not json_:
            say(f"{n} nodes, {m}: " + ", ".join(f"{c.ms_per_round:.4g} ms at {c.rtt_ms} ms" for c in costs))
    table = wan.as_table(found, waiting)
    if write:
        wan.record(write, table)
    if json_:
        print_json(table)
        return
    rows = [["nodes", "message", "RTT, ms", "rounds/s", "ms per round", "payload, B", "on the wire, B", "counted, B"]]
    for cost in found:
        numbers = cost.rounds_per_s, cost.ms_per_round, cost.payload_bytes, cost.wire_bytes, cost.claimed_bytes
        rows.append([str(cost.nodes), cost.message, str(cost.rtt_ms), *(f"{number:,.4g}" for number in numbers)])
    show_table(rows)
    for case, slope in table["slope"].items():
        say(f"{case}: {slope} round trips per round")
    for rest in waiting:
        say(f"waiting, {rest.nodes} nodes: {rest.bytes_per_s:.0f} bytes per second over an edge")


@app.command("watch")
def bench_watch(
    seconds: Annotated[float, typer.Option(min=1, help="How long to watch.")] = 600.0,
    records: Annotated[int, typer.Option(min=10, help="Records that the run has at the start.")] = 100_000,
    write: Annotated[bool, typer.Option("--write", help="Also record the numbers.")] = False,
    json_: Json = False,
) -> None:
    """Measure what a live page in a browser costs a run of 200 sites, and what memory it takes."""
    from benchmarks import watch

    found = watch.as_table(watch.cost(seconds, records)) | {"records": records}
    if write:
        watch.RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    if json_:
        print_json(found)
        return
    memory = {name: found.pop(name) for name in ("command_mb", "page_mb", "browser_mb")}
    rows = [[name, str(value)] for name, value in found.items()]
    rows += [
        [name, f"{of[0]:.0f} at first, {of[-1]:.0f} at last, {max(of):.0f} at most"] for name, of in memory.items()
    ]
    show_table([["", "measured"], *rows])


@app.command("engines")
def bench_engines(
    engine: Annotated[list[str], typer.Option(help="Only this engine (repeatable), such as 'Flower, FedAvg'.")] = [],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="How often to measure each.")] = 2,
    nvflare_python: Annotated[str, typer.Option(help="The Python of an environment with NVFlare.")] = "",
    flower_python: Annotated[str, typer.Option(help="The Python of an environment with Flower and torch.")] = "",
    record: Annotated[bool, typer.Option("--record", help="Also write benchmarks/results/engines-cpu.json.")] = False,
    json_: Json = False,
) -> None:
    """Run one job on fairmesh, NVFlare, Flower and in a plain loop: processor time, bytes, and accuracy.

    An engine that is not installed is skipped. Takes about a quarter of an hour per repetition on two cores."""
    from benchmarks.engines import table

    found = []
    for one in table.costs(engine, {"nvflare": nvflare_python, "flower": flower_python}, repeats):
        found.append(one)
        if isinstance(one, table.Skipped):
            say(f"{one.engine}: skipped, since {one.reason}; {one.install}")
        elif not json_:
            say(f"{one.engine}: {one.cpu_ms:.3g} ms per round")
    if record:
        table.record(found, repeats)
    if json_:
        print_json(table.as_table(found, repeats))
        return
    rows = [
        [
            cost.engine, cost.graph, f"{cost.cpu_ms:.3g}", f"{cost.cpu_ms_low:.3g}-{cost.cpu_ms_high:.3g}",
            f"{cost.message_bytes:,.0f}", "" if cost.network_bytes is None else f"{cost.network_bytes:,.0f}",
            f"{cost.worst:.1%}", f"{cost.mean:.1%}",
        ]
        for cost in found
        if isinstance(cost, table.Cost)
    ]  # fmt: skip
    head = [
        "engine",
        "graph",
        "CPU, ms per round",
        "lowest to highest",
        "models, B",
        "network, B",
        "worst site",
        "mean",
    ]
    show_table([head, *rows])


def main() -> None:
    """Shows errors raised on purpose as one line, without a traceback."""
    try:
        app()
    except FairmeshError as error:
        leave(error)


if __name__ == "__main__":
    main()
