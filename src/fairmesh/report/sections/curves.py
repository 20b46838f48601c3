"""How the run went: the worst site, the mean and each site against rounds, and the worst site against traffic."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fairmesh.report import charts
from fairmesh.report.elements import COMPACT, figure, note, pictures
from fairmesh.report.runs import SHOWN, Run
from fairmesh.report.sections import View

PLACE = 40
_WORST, _MEAN = "worst site", "mean over sites"
_SENT = "sent by the busiest node, MB"


def shown(view: View) -> Iterable[str]:
    if not view.alone:  # the page has the curves of all runs
        return
    label, variants = view.card["label"], view.variants
    if len(variants) == 1:
        yield f"<h3>Curves</h3>{_of_one(variants[0])}"
        return
    best = [replace(variant, label=variant.label.removeprefix(f"{label}: ")) for variant in variants[:SHOWN]]
    yield f"<h3>Curves</h3>{curves(best)}"
    if len(variants) > SHOWN:
        yield note(f"Curves of the {SHOWN} best of {len(variants)} variants; the table above has all.")


def _of_one(run: Run) -> str:
    """Returns pictures of one run: the worst site, the mean and every site against rounds, and the first two against
    traffic."""
    drawn = [_line(run, "mean", "rounds", _MEAN, style=1), _line(run, "worst", "rounds", _WORST)]
    rounds, sites = run.curves_of_sites()
    names = run.summary["sites"]
    faint = [charts.Line(str(name), rounds, _scaled(run, sites[i]), faint=True) for i, name in enumerate(names)]
    faint = faint if len(faint) <= COMPACT else []
    unit = run.unit()
    said = f"The {unit.metric} against rounds: the worst site, the mean{' and each site' if faint else ''}."
    made = [figure(charts.curves([*faint, *drawn], "rounds", unit.label, said, "each site"), said)]
    if run.summary["bytes_busiest_node"]:
        lines = [_line(run, what, "bytes_busiest_node", *look) for what, look in _LOOKS.items()]
        said = f"The {unit.metric} against what the busiest node sent."
        made.append(figure(charts.curves(lines, _SENT, unit.label, said), said))
    return pictures(made) + note(_bands([run]))


_LOOKS = {"mean": (_MEAN, 1), "worst": (_WORST, 0)}


def curves(runs: Sequence[Run]) -> str:
    """Returns pictures of the worst site and the mean against rounds, and of the worst against traffic, for several
    runs."""
    drawn, left, unit = list(runs)[:SHOWN], len(runs) - SHOWN, runs[0].unit()
    wanted = [("worst", "rounds"), ("mean", "rounds")]
    if any(run.summary["bytes_busiest_node"] for run in drawn):
        wanted.append(("worst", "bytes_busiest_node"))
    said = {"worst": "Worst site", "mean": "Mean over sites"}
    axes = {"rounds": ("against rounds", "rounds"), "bytes_busiest_node": ("against what the busiest node sent", _SENT)}
    made = []
    for what, x in wanted:
        title = f"{said[what]}, {unit.metric} {axes[x][0]}."
        sending = [(k, run) for k, run in enumerate(drawn) if x == "rounds" or run.summary[x]]
        lines = [_line(run, what, x, run.label, k) for k, run in sending]
        made.append(figure(charts.curves(lines, axes[x][1], unit.label, title), title))
    return pictures(made) + note(_bands(drawn) + (f" {left} more runs are in the table only." if left > 0 else ""))


def _line(run: Run, what: str, against: str, label: str, style: int = 0) -> charts.Line:
    x, mean, low, high = run.curve(what, against)
    ends = [_scaled(run, of) for of in (low, high)] if len(run.alive) > 1 else [(), ()]
    return charts.Line(label, x, _scaled(run, mean), *ends, style=style)


def _scaled(run: Run, values: Sequence[float]) -> list[float]:
    return [run.unit().scale * value for value in values]


def _bands(runs: Sequence[Run]) -> str:
    bands = sorted({run.spread_by() for run in runs if run.spread_by()})
    if not bands:
        return "There is one replica, so lines have no band."
    return f"Lines are means over {' or '.join(bands)}; bands span the lowest and the highest of them."
