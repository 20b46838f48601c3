"""The elements of a page: paragraphs, lists, tables and pictures. Text is escaped, whoever wrote it."""

import html
from collections.abc import Collection, Iterable, Sequence

ROWS, UNFOLDED = 24, 12  # rows of a table; of more than the first number, all but so many are folded
COMPACT = 60  # rows of a compact table, of which none is folded


def escaped(value: object) -> str:
    return html.escape(str(value))


def lead(text: str) -> str:
    return f'<p class="lead">{escaped(text)}</p>'


def note(text: str) -> str:
    return f'<p class="note">{escaped(text)}</p>' if text else ""


def folded(summary: str, body: str, again: bool = False) -> str:
    """Returns what is folded behind a summary. On paper it is open, unless it says `again` what stands before it."""
    kind = ' class="again"' if again else ""
    return f"<details{kind}><summary>{escaped(summary)}</summary>{body}</details>"


def items(said: Iterable[Sequence[str]]) -> str:
    """Returns a list of names and what is said of them, with their verdict as a third item if there is one."""
    found = []
    for name, text, *verdict in said:
        kind = f" class={verdict[0]}" if verdict and verdict[0] in ("better", "worse") else ""
        found.append(f"<li><b{kind}>{escaped(name)}</b>: {escaped(text)}</li>")
    return f'<ul class="sites">{"".join(found)}</ul>'


def labelled(title: str) -> str:
    """Returns the attribute of a cell by which it says the name of its column, where a row is a paragraph."""
    return f' data-label="{escaped(title.partition(chr(10))[0])}"'


def _cell(text: object) -> str:
    """Returns a cell. Lines after the first are a remark, coloured by the mark of a verdict."""
    value, *remark = map(escaped, str(text).split("\n"))
    if not remark:
        return value
    kind = {"▲": " class=better", "▼": " class=worse"}.get(remark[0][:1], "")
    return f"{value} <small{kind}>{'<br>'.join(remark)}</small>"


def table(
    rows: Sequence[Sequence[str]],
    marked: Iterable[int] = (),
    fold: int = ROWS,
    texts: Collection[int] = (),
    compact: bool = False,
    cards: bool = False,
) -> str:
    """Returns a table whose first row and first column are headers. Rows after the first `fold` are folded.

    Args:
        rows: The header, and the rows.
        marked: The numbers of rows to mark.
        fold: How many rows are always visible. Default: 24.
        texts: The numbers of columns with words, which begin at the left, as the first one does. Default: ().
        compact: Whether rows have one line each: remarks are beside their values, and not below. Default: False.
        cards: Whether a row is a paragraph on a phone, where each cell says the name of its column. Default: False.
    """
    marked = set(marked)
    left = [' class="text"' if i in texts else "" for i in range(len(rows[0]))]
    header = "".join(f'<th scope="col"{side}>{_cell(cell)}</th>' for side, cell in zip(left, rows[0]))
    if cards:
        left = [f"{side}{labelled(title)}" for side, title in zip(left, rows[0])]
    body = [
        f'<tr{" class=low" if i in marked else ""}><th scope="row">{_cell(row[0])}</th>'
        + "".join(f"<td{side}>{_cell(cell)}</td>" for side, cell in zip(left[1:], row[1:]))
        + "</tr>"
        for i, row in enumerate(rows[1:])
    ]
    kinds = " ".join(["compact"] * compact + ["cards"] * cards)
    kind = f' class="{kinds}"' if kinds else ""

    def part(lines: Sequence[str]) -> str:
        inside = f"<table{kind}><thead><tr>{header}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        return f'<div class="scroll" role="region" aria-label="table" tabindex="0">{inside}</div>'

    if len(body) <= fold:
        return part(body)
    fold = fold if compact else min(fold, UNFOLDED)
    return part(body[:fold]) + folded(f"{len(body) - fold} more rows", part(body[fold:]))


def figure(chart: str, caption: str) -> str:
    """Returns a chart (`charts.py`) with its caption."""
    return f"<figure>{chart}<figcaption>{escaped(caption)}</figcaption></figure>"


def pictures(figures: Iterable[str]) -> str:
    return f'<div class="pictures">{"".join(figures)}</div>'
