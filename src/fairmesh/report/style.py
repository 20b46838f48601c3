"""How pictures look, and the one place of the package that loads matplotlib."""

import functools
import io
import os
from typing import Any

from fairmesh.errors import optional, refusing

COLOURS = ("#1961c4", "#f86710", "#597e3e", "#de4aa1", "#ae5712", "#4f97dd", "#c87f79", "#aa51fd")
"""Colours that people who are colour-blind can tell apart. They have a contrast of 3 to white and to the report's dark
paper, and the first four differ in lightness, so that they stay apart in grey (tests/report/test_style.py)."""
STYLES = {"this run": 0, "its model": 0, "alone": 1, "common model": 2, "fixed weights": 3}
"""The number of the colour and the marker of each model next to which sites are shown, the same in all pictures."""
MARKERS = "osD^vP*X"  # so that pictures can be read in grey


def loaded_matplotlib() -> Any:
    """Returns matplotlib. To load it takes half a second.

    Raises:
        MissingPackage: It is not installed.
    """
    with optional("plot"):
        import matplotlib.figure
        import matplotlib.lines
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


def save_figure(figure: Any, path: str | os.PathLike | None, dpi: int = 200) -> Any:
    """Writes a figure; the ending of the path gives the format. In .pdf and .svg text is text, and the same figure is
    the same file. Without a path it returns the figure, so that a notebook shows it."""
    if path is None:
        return figure
    dated = {"pdf": "CreationDate", "svg": "Date"}.get(os.fspath(path).lower().rpartition(".")[2])
    rules = {"svg.fonttype": "none", "pdf.fonttype": 42, "ps.fonttype": 42, "svg.hashsalt": "fairmesh"}
    with refusing(f"cannot write the picture {path}", OSError, ValueError), loaded_matplotlib().rc_context(rules):
        return figure.savefig(path, dpi=dpi, metadata={dated: None} if dated else None)
