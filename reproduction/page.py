"""Writes reproduction/README.md from the recorded results: tables with verdicts, figures, traffic, searches, time."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput
from reproduction.lines import MINIATURE, lines_of
from reproduction.paper import PROTOCOLS
from reproduction.plots import drawable, figures
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

_FITTED = " The exponent in the legend comes from a least-squares fit of loss(t) = floor + c t^-a."
_BILLINGS = {"nominal": "nominal bits", "bytes": "real bytes", "published": "counted as in the published plots"}
_IN = {"nominal": "in nominal bits", "bytes": "in real bytes", "published": "counted as in the published plots"}
_DIFFERENCES = Path(__file__).with_name("differences.md")

_INTRODUCTION = f"""\
*Communication-Efficient Distributionally Robust Decentralized Learning* (Zecchin, Kountouris, Gesbert, TMLR 2022)
prints {{cells}} accuracies in its Tables 2 to 5. This page compares each of them with our own result, under two
protocols:

- `formula` runs the algorithm as the paper prints it. Settings that the text leaves open are tuned on held-out training
  data.
- `published` does what the published runs did, as far as that is known. No scripts are public for Tables 2 and 3, so
  their `published` settings are **inferred** from the other runs. It is also inferred that DRFA draws each client at
  most once per round.

Verdicts judge `published`: *within {NEAR:g} points* of the paper's mean, or *above* or *below* it by more than that.
Means and standard deviations are taken over placements of the data on the nodes, on the test data, after the last
round. The rows that need COOS7 were **not run**, because its files have to be supplied by hand. `fairmesh data` says
where to put them; the same commands then run those rows.

`python -m reproduction page` generates this page from the files in `reproduction/results/`, and a test checks that it
is up to date."""

_FRONTIER = "[frontier.md](frontier.md) reports the experiments that go beyond the paper."

MINIATURE_NOTE = """\
**In miniature** (`--quick`): a few rounds on a few samples, to check that everything runs. The numbers mean nothing."""

_AGAIN = """\
```sh
python -m reproduction all --device cuda      # everything, into runs/reproduction; run it again to resume
python -m reproduction table4a --device cuda  # one recipe
python -m reproduction all --quick            # everything in miniature, to check that it runs
python -m reproduction verdicts --json        # every cell, ordering and factor; --out FOLDER for your own results
python -m reproduction page                   # this page and its figures
```

Run these commands from the root of a checkout. Datasets are downloaded from their official sources and checked against
their digests. Each line of a result file holds the row's settings, every candidate that its search tried, the final
numbers of each placement, and the curve averaged over placements."""


def _points(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "−")  # + 0.0: no negative zero


def stated(cell: dict[str, Any]) -> str:
    """Returns a cell's verdict in words."""
    if cell["difference"] is None:
        return cell["verdict"]
    if cell["verdict"] == "below":
        return f"**below** by {-cell['difference']:.1f}"
    if cell["verdict"] == "above":
        return f"above by {cell['difference']:.1f}"
    return f"{cell['verdict']} ({_points(cell['difference'])})"


# Summary


def counts(cells: Sequence[dict]) -> str:
    """Returns a table that counts the verdicts."""
    kinds = (f"within {NEAR:g} points", "above", "below", "not run")
    rows = []
    for recipe in [*TABLES, ""]:
        found = Counter(cell["verdict"] for cell in cells if cell["cell"].startswith(recipe))
        rows.append([short(recipe) if recipe else "**all**", *(str(found[kind]) for kind in kinds)])
    return markdown(["cells, `published`", *kinds], rows)


def _formula_in_short(cells: Sequence[dict]) -> str:
    found = Counter(verdict_on(c["formula"]["mean"] - c["paper"]["mean"]) for c in cells if c["formula"])
    said = f"{found[f'within {NEAR:g} points']} within {NEAR:g} points, {found['above']} above, {found['below']} below"
    return f"Judged the same way, `formula` has {said}."


def _leads(found: Sequence[dict]) -> str:
    """Returns how many of the leads over CHOCO-SGD are large enough, and the smallest lead."""
    measured = [o for o in found if o["measured"] is not None]
    if not measured:
        return "not run"
    least = min(measured, key=lambda o: o["measured"])
    name = named(least["ordering"].rsplit(": ", 1)[0])
    return f"{sum(o['holds'] for o in measured)} of {len(measured)} (smallest {least['measured']:.1f}: {name})"


def _answer(ordering: dict) -> str:
    if ordering["measured"] is None:
        return "not run"
    return f"{'yes' if ordering['holds'] else '**no**'} ({ordering['detail']})"


def _orderings(found: Sequence[dict]) -> str:
    """Returns a table with a row per ordering and a column per protocol; the leads of a table share a row."""
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
    note = "\n\n† recorded with settings that differ from the present recipe." if "†" in table else ""
    return f"### {title}\n\n{words} {placements}\n\n{table}{note}"


def _both_definitions(lines: Lines) -> str:
    """Returns the worst accuracy of every larger run by both definitions: over nodes and over groups."""
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
        '"Worst node" is the lowest accuracy over nodes. "Worst group" is the lowest mean accuracy over the nodes of '
        "a group (a class, a contrast, an instrument). The paper's Table 5 mixes the two on CIFAR-10: AD-GDA's 39.06 "
        "is a group's mean, while 37.20 (DRFA) and 38.00 (DR-DSGD) are minima over nodes. The table above compares "
        "each of them with our result by the same definition."
        + (f" In Tables 2 and 3, where every node is a class, {same}." if small else "")
        + "\n\n"
        + markdown(["run", *(f"{protocol}, worst {which}" for protocol in PROTOCOLS for which in WORST)], rows)
    )


# Figures and traffic


def _figures(lines: Lines, folder: str) -> str:
    parts = []
    present = drawable(lines)
    for name, (title, words) in FIGURES.items():
        picture = f"![{title}]({folder.rstrip('/')}/{name}.svg)" if name in present else "Not run."
        fit = _FITTED if name.startswith(("figure2", "figure3")) else ""
        parts.append(f"### {title}\n\n{words}{fit}\n\n{picture}{_instruments(lines) if name == 'figure1' else ''}")
    return "\n\n".join(parts)


def _instruments(lines: Lines) -> str:
    """Returns the accuracies of Figure 1 after the last round."""
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
    """Returns what both algorithms send, and the ratio."""
    if factor is None or factor["factor"] is None:
        return "–"
    unit = "GB" if factor["billing"] == "bytes" else "Gbit"
    return f"{factor['ours'] / 1e9:.3g} vs. {factor['theirs'] / 1e9:.3g} {unit}: {factor['factor']:.1f}x"


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
        "The table compares AD-GDA with 4-bit messages to each rival. It shows what the busiest node of each sends "
        "until it reaches the lower of the two final worst accuracies, and how many times less AD-GDA sends. Curves "
        "are averaged over placements and interpolated linearly between measured rounds. For DRFA the busiest node "
        "is the server. Real bytes are those of the encoded messages, headers included. The published plots count, for "
        "DRFA, model and snapshot of half the clients. Our nominal bits count what the server sends: the model to the "
        "clients drawn, and the averaged snapshot to the clients probed (half of them; all of them in `published`).\n\n"
        + (markdown(header, rows) if rows else "Not run.")
    )


def _savings_in_short(found: Sequence[dict]) -> str:
    asked = [f for f in found if f["protocol"] == "published" and f["worst"] == "node" and f["factor"] is not None]
    sentences = []
    for setup, rival in dict.fromkeys((f["setup"], f["rival"]) for f in asked):
        mine = {f["billing"]: f for f in asked if (f["setup"], f["rival"]) == (setup, rival)}
        required = next(iter(mine.values()))["required"]
        counted = ", ".join(f"{f['factor']:.1f}x {_IN[billing]}" for billing, f in mine.items())
        short = [f"{_IN[b]} ({f['factor'] / required:.0%} of it)" for b, f in mine.items() if not f["holds"]]
        missed = f" **Below** the paper's factor: {' and '.join(short)}." if short else ""
        sentences.append(f"- {setup}, compared with {rival}: {counted}; the paper says {required:g}x.{missed}")
    return "\n".join(sentences) or "Not run."


def _theory(results: Path) -> str:
    lines = lines_of(results, "theory")
    if not lines:
        return ""
    from reproduction.theory import theory_sentences

    return f"## The theorems\n\n{theory_sentences(lines)}"


def page(results: Path = RECORDED, figures_folder: str = "figures") -> str:
    """Returns the page as Markdown. `figures_folder` is the path of the figures relative to the page."""
    lines, cells = Lines(results), verdicts(results)
    ordered, saved = orderings(results), factors(results)
    sections = [
        "# Reproduction of the paper's experiments",
        MINIATURE_NOTE if (results / MINIATURE).exists() else "",
        _INTRODUCTION.format(cells=len(cells)),
        _FRONTIER if results == RECORDED else "",
        f"## Summary\n\n{counts(cells)}\n\n{_formula_in_short(cells)}",
        f"The paper's orderings:\n\n{_orderings(ordered)}",
        "How many times less AD-GDA with 4-bit messages sends (`published`, worst node):\n\n"
        + _savings_in_short(saved),
        "## Tables",
        *(_cells(recipe, cells) for recipe in TABLES),
        _both_definitions(lines),
        f"## Figures\n\n{_figures(lines, figures_folder)}",
        f"## Traffic saved\n\n{_traffic(saved)}",
        _theory(results),
        "## Searches\n\nCandidates are judged by the accuracy of their worst group on a held-out fifth of the training "
        "data. The chosen candidate is then trained on all of it. If one of its seeds diverges there, the next best "
        'candidate takes its place ("passed over"). An asterisk marks a value at the end of its range: a wider range '
        "might contain a better one. The result files hold every candidate's accuracy.",
        searches_of(lines),
        f"## Time\n\n{time_of(results, lines)}",
        f"## Differences and their reasons\n\n{_DIFFERENCES.read_text(encoding='utf-8').strip()}",
        f"## Running it again\n\n{_AGAIN}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def write(results: Path, page_path: Path, figures_folder: Path) -> list[Path]:
    """Writes the page and its figures. Returns the paths written."""
    try:
        relative = figures_folder.resolve().relative_to(page_path.resolve().parent)
    except ValueError as error:
        raise BadInput(f"the folder of figures {figures_folder} must be inside {page_path.parent}") from error
    texts = {figures_folder / f"{name}.svg": text for name, text in figures(results).items()}
    texts[page_path] = page(results, relative.as_posix())
    try:
        figures_folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write the page: {error}") from error
    return list(texts)
