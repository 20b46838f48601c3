"""REPRODUCTION.md, made from the recorded results: tables with verdicts, figures, traffic, searches, time."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput
from reproduction.figures import figures, recorded
from reproduction.lines import MINIATURE, lines_of
from reproduction.paper import PROTOCOLS
from reproduction.searches import searches_of, time_of
from reproduction.verdicts import (
    LEAD,
    NEAR,
    RECORDED,
    WORST,
    Lines,
    factors,
    facts,
    number,
    orderings,
    verdict_on,
    verdicts,
)
from reproduction.wording import FIGURES, TABLES, markdown, named, short, shown

_FITTED = " The legend's power is that of loss(t) = floor + c t^-a fitted by least squares."
_BILLINGS = {"nominal": "nominal bits", "bytes": "real bytes", "published": "as the published plots bill it"}
_IN = {"nominal": "in nominal bits", "bytes": "in real bytes", "published": "as the published plots bill it"}
_DIFFERENCES = Path(__file__).with_name("differences.md")

_INTRODUCTION = f"""\
*Communication-Efficient Distributionally Robust Decentralized Learning* (Zecchin, Kountouris, Gesbert, TMLR 2022)
prints {{cells}} accuracies in its Tables 2 to 5. Each stands here beside ours, in two protocols:

- `formula`: the algorithm as the paper prints it; what the text leaves open is searched for on held-out training data.
- `published`: what the published runs did, as far as it is known. For Tables 2 and 3 no scripts are public: there the
  settings of `published` are **inferred** from the other runs; so is that DRFA draws a client at most once a round.

A verdict is about `published`: *within {NEAR:g} points* of the paper's mean, *above* or *below* it by more. Means and
standard deviations are over placements of the data on the nodes, on the test data, after the last round. Whatever needs
COOS7 was **not run**: its files have to be supplied by hand (`fairmesh data` says where), and then the same commands
run those rows.

This page is made from the files in `reproduction/results/` by `python -m reproduction page`; a test holds the two
equal."""

_OF_A_TRIAL = """\
**In miniature** (`--quick`): a few rounds over a few samples, to see that everything runs. The numbers mean nothing."""

_AGAIN = """\
```sh
python -m reproduction all --device cuda      # everything, into runs/reproduction; run it again to resume
python -m reproduction table2                 # one recipe
python -m reproduction all --quick            # everything in miniature, to see that it runs
python -m reproduction verdicts --json        # every cell, ordering and factor; --out FOLDER for your own results
python -m reproduction page                   # this page and its figures
```

Datasets are fetched from their official sources and checked by their digests; `fairmesh data` says where COOS7 goes. A
line of a result file holds the row's settings, all that its search tried, every placement's final numbers and the curve
averaged over placements."""


def _points(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "−")  # + 0.0: no negative zero


def stated(cell: dict[str, Any]) -> str:
    """The verdict in words."""
    if cell["difference"] is None:
        return cell["verdict"]
    if cell["verdict"] == "below":
        return f"**below** by {-cell['difference']:.1f}"
    if cell["verdict"] == "above":
        return f"above by {cell['difference']:.1f}"
    return f"{cell['verdict']} ({_points(cell['difference'])})"


# In short


def counts(cells: Sequence[dict]) -> str:
    kinds = (f"within {NEAR:g} points", "above", "below", "not run")
    rows = []
    for recipe in [*TABLES, ""]:
        found = Counter(cell["verdict"] for cell in cells if cell["cell"].startswith(recipe))
        rows.append([short(recipe) if recipe else "**all**", *(str(found[kind]) for kind in kinds)])
    return markdown(["cells, `published`", *kinds], rows)


def _formula_in_short(cells: Sequence[dict]) -> str:
    found = Counter(verdict_on(c["formula"]["mean"] - c["paper"]["mean"]) for c in cells if c["formula"])
    said = f"{found[f'within {NEAR:g} points']} within {NEAR:g} points, {found['above']} above, {found['below']} below"
    return f"By the same measure `formula` has {said}."


def _leads(found: Sequence[dict]) -> str:
    """How many of the leads over CHOCO-SGD are large enough, and the least."""
    measured = [o for o in found if o["measured"] is not None]
    if not measured:
        return "not run"
    least = min(measured, key=lambda o: o["measured"])
    name = named(least["ordering"].rsplit(": ", 1)[0])
    return f"{sum(o['holds'] for o in measured)} of {len(measured)} (least {least['measured']:.1f}: {name})"


def _answer(ordering: dict) -> str:
    if ordering["measured"] is None:
        return "not run"
    return f"{'yes' if ordering['holds'] else '**no**'} ({ordering['detail']})"


def _orderings(found: Sequence[dict]) -> str:
    """A row for each ordering, its answer in both protocols; the leads in Tables 2 and 3 as one row each."""
    rows: dict[str, dict[str, list[dict]]] = {}
    for o in found:
        table, text = o["ordering"].split(": ", 1)
        if o["required"] == LEAD:
            text = f"AD-GDA above CHOCO-SGD by {LEAD:g} points or more"
        rows.setdefault(f"{short(table)}: {text}", {}).setdefault(o["protocol"], []).append(o)
    return markdown(
        ["", *PROTOCOLS],
        [
            [name, *(_leads(of[p]) if of[p][0]["required"] == LEAD else _answer(of[p][0]) for p in PROTOCOLS)]
            for name, of in rows.items()
        ],
    )


# Tables


def _cells(recipe: str, cells: Sequence[dict]) -> str:
    title, words = TABLES[recipe]
    rows = [
        [named(c["cell"]), shown(c["paper"]), shown(c["formula"]), shown(c["published"]), stated(c)]
        for c in cells
        if c["cell"].startswith(f"{recipe}:")
    ]
    table = markdown(["", "paper", "ours (formula)", "ours (published)", "verdict"], rows)
    counted = sorted({c["published"]["placements"] for c in cells if c["cell"].startswith(recipe) and c["published"]})
    placements = f"Placements: {' or '.join(map(str, counted))}." if counted else "Not run."
    note = "\n\n† run with other settings than the recipe has now (see below)." if "†" in table else ""
    return f"### {title}\n\n{words} {placements}\n\n{table}{note}"


def _both_definitions(lines: Lines) -> str:
    """The worst accuracy of every larger run as the least over nodes and as the least mean of a group."""
    rows = []
    for recipe in ("table4a", "table4b", "table4c", "table5", "figure4"):
        for name in dict.fromkeys(line["row"] for line in lines.of(recipe)):
            found = [lines.line(recipe, name, protocol) for protocol in PROTOCOLS]
            values = [shown(number(line, w) | facts(line) if line else None) for line in found for w in WORST.values()]
            label = f"AD-GDA, {name}" if recipe.startswith("table4") else name
            rows.append([f"{short(recipe)}: {label}", *values])
    if not rows:
        return ""
    small = [line for recipe in ("table2", "table3") for line in lines.of(recipe)]
    apart = sum(line["final"]["worst"] != line["final"]["worst_group"] for line in small)
    same = f"they differ in {apart} of {len(small)} runs" if apart else f"they are equal in all {len(small)} runs"
    return (
        "### Worst, by both definitions\n\n"
        "The least accuracy over nodes, and the least mean over the nodes of a group (a class, a contrast, an "
        "instrument). The paper's Table 5 mixes them on CIFAR-10: AD-GDA's 39.06 is a group's mean, its rivals' 37.20 "
        "and 38.00 are minima over nodes; above, each is set beside ours by its own definition."
        + (f" In Tables 2 and 3, where every node is a class, {same}." if small else "")
        + "\n\n"
        + markdown(["run", *(f"{protocol}, worst {which}" for protocol in PROTOCOLS for which in WORST)], rows)
    )


# Figures and traffic


def _figures(lines: Lines, folder: str) -> str:
    parts = []
    present = recorded(lines)
    for name, (title, words) in FIGURES.items():
        picture = f"![{title}]({folder.rstrip('/')}/{name}.svg)" if name in present else "Not run."
        fit = _FITTED if name.startswith(("figure2", "figure3")) else ""
        parts.append(f"### {title}\n\n{words}{fit}\n\n{picture}{_instruments(lines) if name == 'figure1' else ''}")
    return "\n\n".join(parts)


def _instruments(lines: Lines) -> str:
    """Figure 1's last round in numbers."""
    found = lines.of("figure1")
    if not found:
        return ""
    groups = list(found[0]["final"]["groups"])
    rows = [
        [f"{named(line['row'])}, {line['protocol']}"]
        + [shown(number(line, name)) for name in (*groups, "mean_of_groups")]
        for line in found
    ]
    return "\n\n" + markdown(["", *groups, "half and half"], rows)


def _saved(factor: dict | None) -> str:
    """What either sends and their ratio."""
    if factor is None or factor["factor"] is None:
        return "–"
    unit = "GB" if factor["billing"] == "bytes" else "Gbit"
    return f"{factor['ours'] / 1e9:.3g} of {factor['theirs'] / 1e9:.3g} {unit}: {factor['factor']:.1f}x"


def _traffic(found: Sequence[dict]) -> str:
    kinds: dict[tuple[str, ...], dict[str, dict]] = {}
    for f in found:
        if f["factor"] is not None:
            kinds.setdefault((f["setup"], f["rival"], f["protocol"], f["worst"]), {})[f["billing"]] = f
    rows = [
        [f"{setup}, {rival}", protocol, which, f"{next(iter(by.values()))['level']:.1f} %"]
        + [_saved(by.get(billing)) for billing in _BILLINGS]
        + [f"{next(iter(by.values()))['required']:g}x"]
        for (setup, rival, protocol, which), by in kinds.items()
    ]
    header = ["against", "protocol", "worst", "level", *_BILLINGS.values(), "paper"]
    return (
        "What the busiest node sends on the way to the lower of the two final worst accuracies (curves averaged over "
        "placements, straight lines between measured rounds): AD-GDA in 4 bits, of its rival, and how many times less "
        "that is. For DRFA the busiest node is the server. Real bytes are those of encoded messages, headers included. "
        "The published plots bill DRFA for model and snapshot of half the clients; our nominal bits are what the "
        "server sends: the model to the clients drawn, the averaged snapshot to those probed (half of them; everyone "
        "in `published`).\n\n" + (markdown(header, rows) if rows else "Not run.")
    )


def _savings_in_short(found: Sequence[dict]) -> str:
    asked = [f for f in found if f["protocol"] == "published" and f["worst"] == "node" and f["factor"] is not None]
    sentences = []
    for setup, rival in dict.fromkeys((f["setup"], f["rival"]) for f in asked):
        mine = {f["billing"]: f for f in asked if (f["setup"], f["rival"]) == (setup, rival)}
        required = next(iter(mine.values()))["required"]
        counted = ", ".join(f"{f['factor']:.1f}x {_IN[billing]}" for billing, f in mine.items())
        short = [f"{_IN[b]} ({f['factor'] / required:.0%} of it)" for b, f in mine.items() if not f["holds"]]
        missed = f" **Missed** {' and '.join(short)}." if short else ""
        sentences.append(f"- {setup}, against {rival}: {counted}; the paper says {required:g}x.{missed}")
    return "\n".join(sentences) or "Not run."


def _theory(results: Path) -> str:
    lines = lines_of(results, "theory")
    if not lines:
        return ""
    from reproduction.theory import theory_sentences

    return f"## The theorems\n\n{theory_sentences(lines)}"


def page(results: Path = RECORDED, figures_folder: str = "docs/reproduction") -> str:
    """The page as Markdown; `figures_folder` is where its pictures lie, as seen from the page."""
    lines, cells = Lines(results), verdicts(results)
    ordered, saved = orderings(results), factors(results)
    sections = [
        "# The paper's experiments, run again",
        _OF_A_TRIAL if (results / MINIATURE).exists() else "",
        _INTRODUCTION.format(cells=len(cells)),
        f"## In short\n\n{counts(cells)}\n\n{_formula_in_short(cells)}",
        f"The paper's orderings:\n\n{_orderings(ordered)}",
        f"Traffic saved by AD-GDA in 4 bits, `published`, worst node:\n\n{_savings_in_short(saved)}",
        "## Tables",
        *(_cells(recipe, cells) for recipe in TABLES),
        _both_definitions(lines),
        f"## Figures\n\n{_figures(lines, figures_folder)}",
        f"## Traffic saved\n\n{_traffic(saved)}",
        _theory(results),
        "## What was searched\n\nCandidates are judged by their worst group's accuracy on a fifth of the training data "
        "held out; what was chosen is then trained on all of it. A candidate of which a seed then diverges is passed "
        "over for the next best. * marks a value at the end of its range: a larger range might hold a better one. "
        "The result files hold every candidate's accuracy.",
        searches_of(lines),
        f"## Time\n\n{time_of(results, lines)}",
        f"## Where we differ and why\n\n{_DIFFERENCES.read_text(encoding='utf-8').strip()}",
        f"## How to run it again\n\n{_AGAIN}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def write(results: Path, page_path: Path, figures_folder: Path) -> list[Path]:
    """Writes the page and its pictures; returns the paths written."""
    try:
        relative = figures_folder.resolve().relative_to(page_path.resolve().parent)
    except ValueError as error:
        raise BadInput(f"the figures' folder {figures_folder} must lie beside or below the page {page_path}") from error
    texts = {figures_folder / f"{name}.svg": text for name, text in figures(results).items()}
    texts[page_path] = page(results, relative.as_posix())
    try:
        figures_folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write the page: {error}") from error
    return list(texts)
