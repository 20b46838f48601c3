"""How pictures look, and the one place of the package that loads matplotlib."""

import functools
import html
import io
import os
import re
from typing import Any

from fairmesh.errors import optional, refusing

COLOURS = ("#1961c4", "#f86710", "#597e3e", "#de4aa1", "#ae5712", "#4f97dd", "#c87f79", "#aa51fd")
"""Colours that people who are colour-blind can tell apart. They have a contrast of 3 to white and to the report's dark
paper, and the first four differ in lightness, so that they stay apart in grey (tests/report/test_style.py)."""
MARKERS = "osD^vP*X"  # so that pictures can be read in grey

_FRAME = "#808080"  # lines that are visible on white and on black


def loaded_matplotlib() -> Any:
    """Returns matplotlib. To load it takes half a second.

    Raises:
        MissingPackage: It is not installed.
    """
    with optional("plot"):
        import matplotlib.figure
    return matplotlib


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, font: float = 9, **grid: Any) -> Any:
    """Returns a figure of this size in inches and the array of its axes; `grid` goes to `Figure.subplots`.

    The figure is not one of pyplot's, so the backend of a user's own plots stays as it is."""
    matplotlib = loaded_matplotlib()
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": font}):
        figure = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
        figure._repr_png_ = functools.partial(_png, figure)  # a notebook shows a figure that is the value of a cell
        axes = figure.subplots(rows, columns, squeeze=False, **grid)
    return figure, axes.ravel()


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def plain(text: object) -> str:
    """Returns a text in which matplotlib finds no formula."""
    return str(text).replace("$", r"\$")


def save_figure(figure: Any, path: str | os.PathLike | None, dpi: int = 150) -> Any:
    """Writes a figure; the ending of the path gives the format. Without a path it returns the figure, so that a
    notebook shows it."""
    if path is None:
        return figure
    with refusing(f"cannot write the picture {path}", OSError, ValueError):
        return figure.savefig(path, dpi=dpi)


def svg(figure: Any, description: str) -> str:
    """Returns a figure as an <svg> element for a page: its text is text, so that the page can set its colour and a
    screen reader can read it, and its background is the page's.

    Args:
        figure: The figure.
        description: What the picture shows, for readers who do not see it. It also keeps the ids of several figures
            on one page apart.
    """
    matplotlib = loaded_matplotlib()
    for axis in figure.axes:
        axis.tick_params(color=_FRAME)
        for spine in axis.spines.values():
            spine.set_color(_FRAME)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": description, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r'(<g) id="[^"]*"', r"\1", text)  # nothing refers to groups, and their ids repeat on the page
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(description)}" ', 1)
