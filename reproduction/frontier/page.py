"""Fills the tables of reproduction/frontier.md and draws its figure, from the recorded results."""

import re
from pathlib import Path
from statistics import fmean, stdev

from reproduction.frontier.claims import (
    LEVELS,
    WORST,
    bits_a_parameter,
    bytes_to,
    chosen_defaults,
    claims,
    in_words,
    lines_by_row,
)
from reproduction.frontier.recipes import CHOSEN, CIFAR, FASHION, JUDGED, SETUPS
from reproduction.lines import Line, lines_of
from reproduction.plots import canvas, svg
from reproduction.wording import markdown

_DRAWN = {
    "AD-GDA, 4 bits in blocks": "#9a3b3b",
    "CHOCO-SGD, 4 bits in blocks": "#1f6f8b",
    "DRFA": "#7a8b1f",
    "DR-DSGD": "#6b4c9a",
    "AD-GDA + tracking, momentum": "#d08a3b",
    "all and gradients at the average": "#222222",
}


OPTIMUM = "the optimum itself"


def _spread(numbers: list[float]) -> str:
    return f"{fmean(numbers):.1f} ± {stdev(numbers):.1f}" if len(numbers) > 1 else f"{fmean(numbers):.1f}"


def _megabytes(sent: float | None) -> str:
    return "never" if sent is None else f"{sent / 1e6:.2f}"


def ablation(results: Path, setup: str) -> str:
    """Returns every row of a setup: accuracies in percent with their spread, megabytes sent by the busiest node."""
    rows = []
    for name, line in lines_by_row(results, "frontier_ablation").items():
        if name.startswith(f"{setup}: "):
            final, sent = line["final"], line["curve"]["bytes_busiest_node"][-1]
            rows.append(
                [
                    name.removeprefix(f"{setup}: "),
                    _spread(final[WORST[setup]]),
                    _spread(final["mean"]),
                    _megabytes(sent),
                    _megabytes(bytes_to(line, LEVELS[setup], WORST[setup])),
                ]
            )
    return markdown(["run", "worst", "mean", "MB in total", f"MB until {LEVELS[setup]} %"], rows)


def best(results: Path) -> str:
    """Returns the long runs for accuracy and the short ones for bytes."""
    rows = []
    for name, line in lines_by_row(results, "frontier_best").items():
        setup = name.split(": ")[0]
        reached = bytes_to(line, LEVELS[setup], WORST[setup])
        rows.append(
            [
                name,
                str(line["curve"]["round"][-1]),
                _spread(line["final"][WORST[setup]]),
                _spread(line["final"]["mean"]),
                "never" if reached is None else f"{bits_a_parameter(line, reached):,.0f}",
                f"{bits_a_parameter(line, line['curve']['bytes_busiest_node'][-1]):,.0f}",
            ]
        )
    return markdown(["run", "rounds", "worst", "mean", "bits until the paper's level", "bits in total"], rows)


def defaults(results: Path) -> str:
    """Returns the problems on which the defaults are judged, with the points by which they are behind tuned runs."""
    lines, rows = lines_by_row(results, "frontier_defaults"), []
    for name in JUDGED:
        default, tuned = (lines.get(f"{name}: {kind}") for kind in ("default", "tuned"))
        if default is not None and tuned is not None:
            worst = [line["final"]["worst_group"] for line in (default, tuned)]
            rows.append([name, *map(_spread, worst), f"{fmean(worst[1]) - fmean(worst[0]):.1f}", _numbers(tuned)])
    return markdown(["problem", "default", "tuned", "points behind", "tuned: step, beta1, annealing, alpha"], rows)


def _numbers(line: Line) -> str:
    return ", ".join(f"{value:g}" for value in line["search"]["chosen"].values())


def choice(results: Path) -> str:
    """Returns the ten candidates that are least behind; the first is the default."""
    _, candidates = chosen_defaults(results)
    problems = list(lines_by_row(results, "frontier_choice"))
    rows = [
        [", ".join(f"{one[name]:g}" for name in CHOSEN), *(f"{lag:.1f}" for lag in one["behind"])]
        for one in candidates[:10]
    ]
    return markdown(["step, beta1, annealing, alpha", *problems], rows)


def duals(results: Path) -> str:
    """Returns what each weighting costs and how near it comes to the exact maximum."""
    lines = lines_of(results, "frontier_duals")
    least = {line["nodes"]: line["objective"] for line in lines if line["weighting"] == OPTIMUM}
    rows = []
    for line in lines:
        if line["weighting"] == OPTIMUM:
            rows.append(
                [f"{line['nodes']:,}", "", "*the optimum*", *[""] * 5, "0", _few(line["hardest_5_percent_loss"])]
            )
            continue
        cost = [f"{round(line[name]):,}" for name in ("dual_bytes", "dual_state_bytes")]
        ms = f"{line['ms_per_round']:.1f}" if line["ms_per_round"] < 10 else f"{line['ms_per_round']:,.0f}"
        judged = [""] * 4
        if "apart" in line:
            above = line["objective"] - least[line["nodes"]]
            judged = [
                _few(line["apart"]),
                _few(line["weights_sum"]),
                f"{above:.4f}",
                _few(line["hardest_5_percent_loss"]),
            ]
        rows.append([f"{line['nodes']:,}", line["graph"], line["weighting"], *cost, ms, *judged])
    header = ["nodes", "graph", "weighting", "bytes", "state", "ms", "apart", "sum", "above", "hardest"]
    return markdown(header, rows)


def _few(value: float) -> str:
    """Returns a number with three or four digits."""
    return f"{value:.4f}" if value < 0.01 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def claimed(results: Path) -> str:
    """Returns the claims with what was measured."""
    rows = [[*in_words(one), "holds" if one["holds"] else "**does not hold**"] for one in claims(results)]
    return markdown(["claim", "measured", "required", ""], rows)


def tables(results: Path) -> dict[str, str]:
    """Returns the tables by the names of their marks in the page."""
    return {
        "claims": claimed(results),
        "best": best(results),
        FASHION: ablation(results, FASHION),
        CIFAR: ablation(results, CIFAR),
        "defaults": defaults(results),
        "choice": choice(results),
        "duals": duals(results),
    }


def filled(text: str, results: Path) -> str:
    """Returns a page's text with the tables between its marks."""
    for name, table in tables(results).items():
        mark = f"<!-- {name} -->"
        text = re.sub(
            f"{re.escape(mark)}\n.*?{re.escape('<!-- end -->')}",
            lambda found: f"{mark}\n{table}\n<!-- end -->",  # noqa: B023
            text,
            flags=re.DOTALL,
        )
    return text


def drawn(results: Path) -> str:
    """Returns the figure of worst accuracy against the busiest node's megabytes, as SVG."""
    figure, axes = canvas(9, 3.6, 1, len(SETUPS))
    lines = lines_by_row(results, "frontier_ablation")
    for axis, setup in zip(axes[0], SETUPS):
        for name, colour in _DRAWN.items():
            line = lines.get(f"{setup}: {name}")
            if line is not None:
                curve = line["curve"]
                points = [(b / 1e6, w) for b, w in zip(curve["bytes_busiest_node"], curve[WORST[setup]]) if b > 0]
                whole = name == "all and gradients at the average"
                label = "Tracked AD-GDA" if whole else name
                axis.plot(*zip(*points), color=colour, label=label, linewidth=2 if whole else 1.2)
        axis.axhline(LEVELS[setup], color="#999999", linewidth=0.8, linestyle=":")
        axis.set_xscale("log")
        axis.set_title(setup)
        axis.set_xlabel("megabytes sent by the busiest node")
        axis.set_ylabel("worst node, %" if setup == FASHION else "worst contrast, %")
    axes[0][-1].legend(fontsize=7, frameon=False, loc="upper left", labelspacing=0.2)
    return svg(figure, "frontier")


def write(results: Path, page: Path) -> None:
    """Writes the page's tables, and the figure next to it."""
    page.write_text(filled(page.read_text(), results))
    page.with_suffix(".svg").write_text(drawn(results))
