"""How pictures look, and the one place of the package that loads matplotlib."""

import io
import os
from typing import Any

from fairmesh.errors import BadInput, optional


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, font: float = 9, **grid: Any) -> Any:
    """Returns a figure of this size in inches and the array of its axes; `grid` goes to `pyplot.subplots`."""
    with optional("plot"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": font}):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **grid
        )
    pyplot.close(figure)
    return figure, axes.ravel()


def save_figure(figure: Any, path: str | os.PathLike, dpi: int = 150) -> None:
    """Writes a figure; the ending of the path gives the format."""
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot write the picture {path}: {error}") from error


def svg(figure: Any, salt: str) -> str:
    """Returns a figure as an <svg> element. The salt keeps the ids of several figures on one page apart."""
    with optional("plot"):
        import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
