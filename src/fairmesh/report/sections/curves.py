"""How the run went: the worst site and the mean against rounds and traffic."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fairmesh.report import plots
from fairmesh.report.elements import figure, note, pictures
from fairmesh.report.runs import SHOWN, Run
from fairmesh.report.sections import View

PLACE = 40


def shown(view: View) -> Iterable[str]:
    if not view.alone:  # the page has the curves of all runs
        return
    label, variants = view.card["label"], view.variants
    best = [replace(variant, label=variant.label.removeprefix(f"{label}: ")) for variant in variants[:SHOWN]]
    yield f"<h3>Curves</h3>{curves(best)}"
    if len(variants) > SHOWN:
        yield note(f"Curves of the {SHOWN} best of {len(variants)} variants; the table above has all.")


def curves(runs: Sequence[Run]) -> str:
    """Returns pictures of the worst site and the mean against rounds, and of the worst against traffic."""
    drawn, left = list(runs)[:SHOWN], len(runs) - SHOWN
    wanted = [("worst", "rounds"), ("mean", "rounds")]
    if any(run.summary["bytes_busiest_node"] for run in drawn):
        wanted.append(("worst", "bytes_busiest_node"))
    said = {"worst": "Worst site", "mean": "Mean over sites"}
    axes = {"rounds": "against rounds", "bytes_busiest_node": "against what the busiest node sent"}
    made = [
        figure(plots.curve(drawn, what, x), f"{said[what]}, {runs[0].metric} {axes[x]}", f"{said[what]} {axes[x]}.")
        for what, x in wanted
    ]
    bands = sorted({run.spread_by() for run in drawn if run.spread_by()})
    text = "There is one replica, so lines have no band."
    if bands:
        text = f"Lines are means over {' or '.join(bands)}; bands span the lowest and the highest of them."
    return pictures(made) + note(text + (f" {left} more runs are in the table only." if left > 0 else ""))
