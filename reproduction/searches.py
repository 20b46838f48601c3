"""The page's sections on searches and running times."""

from collections.abc import Sequence
from pathlib import Path

from reproduction.lines import Line, lines_of
from reproduction.paper import PROTOCOLS
from reproduction.recipes import RECIPES
from reproduction.verdicts import Lines
from reproduction.wording import markdown, named, short

_SYMBOLS = {"consensus_step": "γ", "regularizer.strength": "α", "dual_step.value": "η_λ", "primal_step.start": "η_θ"}


def _chosen(line: Line | None) -> str:
    if line is None:
        return "–"
    search = line["search"]
    if "as" in search:
        return f"as {named(search['as'])}"
    picked = [
        f"{_SYMBOLS.get(name, name)} {value:g}{'*' * _at_an_end(name, value, search['over'].get(name, []))}"
        for name, value in search["chosen"].items()
    ]
    over = f"; passed over: {len(search['passed_over'])}" if search.get("passed_over") else ""
    return ", ".join(picked) + over if picked else "nothing searched"


def _at_an_end(name: str, value: float, tried: Sequence[float]) -> bool:
    """Returns whether a wider range might contain a better value. A consensus step cannot exceed 1."""
    ends = {min(tried), max(tried)} if len(tried) > 1 else set()
    return value in ends - ({1.0} if name == "consensus_step" else set())


def searches_of(lines: Lines) -> str:
    """Returns one folded table per recipe with the values chosen."""
    parts = []
    for recipe in RECIPES:
        found = lines.of(recipe)
        if not any(line["search"].get("over") for line in found):
            continue
        grids: dict[str, set[float]] = {}
        for line in found:
            for name, values in line["search"].get("over", {}).items():
                grids.setdefault(name, set()).update(values)
        over = "; ".join(
            f"{_SYMBOLS.get(name, name)}: {', '.join(f'{v:g}' for v in sorted(values))}"
            for name, values in grids.items()
        )
        names = dict.fromkeys(line["row"] for line in found)
        rows = [[named(name), *(_chosen(lines.line(recipe, name, p)) for p in PROTOCOLS)] for name in names]
        table = markdown(["row", *PROTOCOLS], rows)
        parts.append(
            f"<details><summary>{short(recipe)}. Values tried in any row: {over}</summary>\n\n{table}\n\n</details>"
        )
    return "\n\n".join(parts) or "Nothing was searched."


def time_of(results: Path, lines: Lines) -> str:
    """Returns the wall-clock time and the time summed by recipe."""
    rows, total = [], 0.0
    for recipe in RECIPES:
        found = lines.of(recipe)
        if found:
            seconds = sum(line["seconds"] for line in found)
            total += seconds
            runs = sum(len(line["seeds"]) for line in found)
            machines = ", ".join(sorted({line["machine"] for line in found}))
            rows.append([recipe, str(len(found)), str(runs), f"{seconds / 60:.1f}", machines])
    if not rows:
        return "Nothing was run."
    rows.append(["**all**", *(str(sum(int(row[k]) for row in rows)) for k in (1, 2)), f"**{total / 60:.1f}**", ""])
    table = markdown(["recipe", "rows", "runs", "minutes, searches included", "machine"], rows)
    return (
        f"{_sittings(results)}The table sums over rows. Rows that run at the same time (`--jobs`) overlap, and each of "
        f"them takes longer.\n\n{table}"
    )


def _sittings(results: Path) -> str:
    """Returns how long the runs took by the clock."""
    found = lines_of(results, "sittings")
    if not found:
        return ""
    goes = "; ".join(
        f"{one['runs']} batched runs in {one['minutes']:.1f} min ({one['jobs']} at a time, {one['machine']})"
        for one in found
    )
    return f"The runs took **{sum(one['minutes'] for one in found):.1f} minutes** by the clock: {goes}.\n\n"
