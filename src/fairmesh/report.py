"""Runs as people look at them: tables, plots, and a self-contained page."""

import html
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.mixing import Mixing
from fairmesh.result import Result, summary_of
from fairmesh.runfolder import read_records, read_summary

_PER_MB = {"nominal_bits_busiest": 8e6, "bytes_busiest_node": 1e6}
_AXES = {
    "rounds": "rounds",
    "bytes_busiest_node": "sent by the busiest node, MB",
    "nominal_bits_busiest": "sent by the busiest node, MB by nominal bits",
}
_COLOURS = ("#9a3b3b", "#1f6f8b", "#7a8b1f", "#6b4c9a", "#c77c2b", "#3b3b3b", "#2b8a5f", "#a0527f")


@dataclass(frozen=True)
class Run:
    """A finished run, from a folder or from memory."""

    label: str
    summary: dict[str, Any]
    records: list[dict[str, Any]]

    @staticmethod
    def from_folder(folder: str | os.PathLike) -> "Run":
        return Run(Path(folder).resolve().name, read_summary(folder), read_records(folder))

    @staticmethod
    def from_result(result: Result, label: str | None = None) -> "Run":
        summary = summary_of(result, 0.0)
        return Run(label or summary["algorithm"], summary, result.records)

    def variants(self) -> "list[Run]":
        """A run for each algorithm of a sweep; itself where there is only one."""
        found = self.summary["variants"]
        if len(found) == 1:
            return [self]
        runs = []
        for variant in found:
            mine = set(variant["replicas"])
            label = ", ".join(f"{key} {value}" for key, value in variant["changes"].items())
            records = [record for record in self.records if record["replica"] in mine]
            final = [record for record in self.summary["final"] if record["replica"] in mine]
            summary = self.summary | variant | {"replicas": len(mine), "final": final, "variants": [variant]}
            runs.append(Run(f"{self.label}: {label}", summary, records))
        return runs

    @property
    def metric(self) -> str:
        return self.summary["metric"]

    def curve(self, what: str, against: str) -> tuple[list[float], list[float], list[float], list[float]]:
        """x, and the mean, lowest and highest over replicas of worst, mean, ... at each measured round."""
        points: dict[int, list[dict]] = {}
        for record in self.records:
            points.setdefault(record["round"], []).append(record)
        xs, means, lows, highs = [], [], [], []
        for round_index in sorted(points):
            here = points[round_index]
            values = [record[self.metric][what] for record in here]
            xs.append(float(round_index) if against == "rounds" else max(r[against] for r in here) / _PER_MB[against])
            means.append(sum(values) / len(values))
            lows.append(min(values))
            highs.append(max(values))
        return xs, means, lows, highs

    def by_site(self) -> list[float]:
        """The final metric of every site, mean over replicas."""
        rows = [record[self.metric]["sites"] for record in self.summary["final"]]
        return [sum(column) / len(rows) for column in zip(*rows)]

    def weights(self) -> list[float] | None:
        """The final lambda of every site, mean over replicas."""
        rows = [record["lambda"] for record in self.summary["final"] if "lambda" in record]
        return [sum(column) / len(rows) for column in zip(*rows)] if rows else None

    def megabytes(self, what: str) -> float:
        """What the busiest node sent, as bytes really encoded or by nominal bits."""
        return self.summary[what] / _PER_MB[what]


def _shown(value: float, metric: str) -> str:
    return f"{value:.4g}" if metric == "loss" else f"{100 * value:.1f} %"


def rows_of(runs: Sequence[Run]) -> list[dict[str, str]]:
    """One row a run, ready to be shown."""
    rows = []
    for run in runs:
        s, metric = run.summary, run.metric
        spread = {
            k: f" ± {_shown(s[f'{k}_std'], metric).removesuffix(' %')}" if s["replicas"] > 1 else ""
            for k in ("worst", "mean")
        }
        rows.append(
            {
                "run": run.label,
                "algorithm": s["algorithm"],
                f"worst {metric}": _shown(s["worst"], metric) + spread["worst"],
                "mean": _shown(s["mean"], metric) + spread["mean"],
                "best": _shown(s["best"], metric),
                "gap": _shown(s["gap"], metric).replace(" %", " points"),
                "rounds": str(s["rounds"]),
                "busiest node sent": f"{run.megabytes('bytes_busiest_node'):.3g} MB",
                "nominal": f"{run.megabytes('nominal_bits_busiest'):.3g} MB",
            }
        )
    return rows


def _figure(width: float, height: float, columns: int = 1) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure, axes = pyplot.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)
    pyplot.close(figure)
    return figure, axes[0]


def curves(runs: Sequence[Run]) -> Any:
    """Worst site (solid) and mean (dashed) against rounds, real bytes and nominal bits; a band spans the replicas."""
    figure, axes = _figure(12, 3.4, 3)
    metric = runs[0].metric
    scale = 1 if metric == "loss" else 100
    for axis, against in zip(axes, _AXES):
        for k, run in enumerate(runs):
            colour = _COLOURS[k % len(_COLOURS)]
            x, mean, low, high = run.curve("worst", against)
            axis.plot(x, [scale * v for v in mean], color=colour, label=f"{run.label}: worst site")
            axis.fill_between(x, [scale * v for v in low], [scale * v for v in high], color=colour, alpha=0.15, lw=0)
            x, mean, _, _ = run.curve("mean", against)
            axis.plot(x, [scale * v for v in mean], color=colour, ls="--", lw=1, label=f"{run.label}: mean of sites")
        axis.set_xlabel(_AXES[against])
        axis.set_ylabel(metric if metric == "loss" else f"{metric}, %")
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def bars(runs: Sequence[Run], values: str = "metric") -> Any:
    """Every site's final metric, or its weight lambda, side by side."""
    sites = [str(name) for name in runs[0].summary["sites"]]
    shown = [(run, run.by_site() if values == "metric" else run.weights()) for run in runs]
    shown = [(run, numbers) for run, numbers in shown if numbers]
    figure, (axis,) = _figure(max(6.0, min(14.0, 0.55 * len(sites) + 3)), 3.2)
    metric = runs[0].metric
    scale = 100 if values == "metric" and metric != "loss" else 1
    width = 0.8 / max(1, len(shown))
    for k, (run, numbers) in enumerate(shown):
        at = [i + (k - (len(shown) - 1) / 2) * width for i in range(len(sites))]
        colour = _COLOURS[[r.label for r in runs].index(run.label) % len(_COLOURS)]
        axis.bar(at, [scale * v for v in numbers], width, color=colour, label=run.label)
    step = max(1, len(sites) // 40)
    axis.set_xticks(
        range(0, len(sites), step), [s if len(s) < 24 else s[:22] + "…" for s in sites[::step]], rotation=35, ha="right"
    )
    if values == "metric":
        axis.set_ylabel(metric if metric == "loss" else f"{metric}, %")
    else:
        axis.axhline(1 / len(sites), color="0.5", lw=0.8, ls=":")
        axis.set_ylabel("weight λ of the site")
    axis.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0)
    return figure


def draw_graph(mixing: Mixing, title: str, path: str | os.PathLike) -> None:
    """A picture of who talks to whom, nodes on a circle."""
    import networkx

    figure, (axis,) = _figure(5, 5)
    graph = networkx.from_scipy_sparse_array(mixing.matrix)
    graph.remove_edges_from(list(networkx.selfloop_edges(graph)))
    small = mixing.n <= 60
    networkx.draw_networkx(
        graph, networkx.circular_layout(graph), ax=axis, with_labels=small, node_size=260 if small else 8,
        node_color="#cfe3ea", edge_color="#1f6f8b", width=1.0 if small else 0.3, font_size=8,
    )  # fmt: skip
    axis.set_title(title, fontsize=10)
    axis.axis("off")
    _save(figure, path)


def _save(figure: Any, path: str | os.PathLike) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot write the picture {path}: {error}") from error


def _svg(figure: Any, salt: str) -> str:
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def plot(results: Result | Sequence[Result | Run] | Run, path: str | os.PathLike) -> None:
    """The curves of one or several results as a picture; the ending of the path gives the format."""
    several = [results] if isinstance(results, Result | Run) else list(results)
    runs = [r if isinstance(r, Run) else Run.from_result(r) for r in several]
    if not runs:
        raise BadInput("nothing to plot")
    _save(curves(runs), path)


def worst_sites(runs: Sequence[Run]) -> set[int]:
    """The sites that come out worst in any of the runs."""
    pick = max if runs[0].metric == "loss" else min
    return {i for run in runs for i, value in enumerate(run.by_site()) if value == pick(run.by_site())}


def site_table(runs: Sequence[Run]) -> list[list[str]]:
    """A header and one row a site: its name and each run's final metric."""
    header = ["site", *(run.label for run in runs)]
    columns = [run.by_site() for run in runs]
    names = [str(name) for name in runs[0].summary["sites"]]
    return [header, *([n, *(_shown(c[i], runs[0].metric) for c in columns)] for i, n in enumerate(names))]


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}
th,td{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right}th:first-child,td:first-child{text-align:left}
th{border-bottom:2px solid #999}tr.low td{background:#fbeeee}svg{max-width:100%;height:auto}
pre{background:#f6f6f6;padding:.7rem;overflow:auto}
.note{color:#666;font-size:13px}
"""


def _table(rows: Sequence[Sequence[str]], marked: set[int] = frozenset()) -> str:  # type: ignore[assignment]
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)

    body = "".join(f"<tr{' class=low' if i in marked else ''}>{cells(r, 'td')}</tr>" for i, r in enumerate(rows[1:]))
    return f"<table><tr>{cells(rows[0], 'th')}</tr>{body}</table>"


def check_comparable(runs: Sequence[Run]) -> None:
    """Refuses runs that cannot stand in one table."""
    if not runs:
        raise BadInput("no run to show")
    for run in runs[1:]:
        for what in ("metric", "nodes"):
            here, there = run.summary[what], runs[0].summary[what]
            if here != there:
                raise BadInput(f"{run.label} and {runs[0].label} cannot be compared: {what} is {here!r} and {there!r}")


def page(runs: Sequence[Run], title: str, sentence: str = "", settings: str = "") -> str:
    """A page with the table of runs, the curves, every site and its weight; needs nothing beside itself."""
    check_comparable(runs)
    rows = rows_of(runs)
    sites = site_table(runs)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(sentence)}</p>" if sentence else "",
        _table([list(rows[0]), *(list(row.values()) for row in rows)]),
        "<h2>On the way</h2>",
        _svg(curves(runs), "curves"),
        "<h2>Site by site</h2>",
        _svg(bars(runs), "sites"),
        _table(sites, worst_sites(runs)) if len(sites) <= 201 else "",
    ]
    if any(run.weights() for run in runs):
        parts += [
            "<h2>Where the weight went</h2>",
            _svg(bars(runs, "weights"), "weights"),
            '<p class="note">λ is how much each site counts; the dotted line is an equal share.</p>',
        ]
    if settings:
        parts += ["<h2>Settings</h2>", f"<pre>{html.escape(settings)}</pre>"]
    judged = runs[0].summary["judged_on"]
    parts.append(
        f'<p class="note">Measured on the {judged} data of each site, for the average of all nodes\' models. '
        "Traffic is in bytes of messages as they are encoded, headers included; nominal is the paper's billing: bits "
        "per parameter, without norms, signs, indices and headers.</p>"
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f"{head}<style>{_STYLE}</style>" + "<body>" + "".join(parts) + "</body></html>\n"
