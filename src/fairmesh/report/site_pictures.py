"""A picture of which site holds which classes."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from fairmesh.data.site import Site
from fairmesh.data.summary import site_summaries
from fairmesh.errors import optional
from fairmesh.report.style import COLOURS, new_figure, save_figure


def picture(sites: Sequence[Site], path: str | os.PathLike | None = None, title: str = "") -> Any:
    """Draws how many samples of each class every site holds.

    Nodes run across and classes down. The area of a dot, or the shade of a cell if there are many nodes, is the number
    of samples. The bars above show each node's number of samples, and colours the groups.

    Args:
        sites: The sites, such as `fm.data.Digits().sites()`.
        path: The picture to write; its suffix gives the format, such as .png, .svg or .pdf. None to write nothing.
            Default: None.
        title: The title of the picture. Default: "".

    Returns:
        Without a path the figure, which a notebook shows; else None.

    Raises:
        BadInput: There is no site, or the picture cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> import fairmesh as fm
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fm.report.picture(fm.data.Digits(nodes=4).sites(), f"{folder}/sites.png")
        ...     pathlib.Path(folder, "sites.png").exists()
        True
    """
    held = site_summaries(sites)
    with optional("plot"):
        from matplotlib.lines import Line2D

    n, kinds = len(held), len(held[0].classes)
    cell = min(0.34, max(0.11, 11.0 / n))  # inches
    row = min(max(cell, 0.2) if kinds <= 12 else 0.2, 8.0 / max(1, kinds))
    width, below = max(4.0, n * cell + 1.2), max(row * kinds, 0.3)
    groups = list(dict.fromkeys(one.group for one in held))
    coloured = 1 < len(groups) <= len(COLOURS) and len(groups) < n  # more colours would look alike
    colours = [COLOURS[groups.index(one.group)] if coloured else COLOURS[0] for one in held]
    figure, (above, grid) = new_figure(
        width, below + 1.9 + 0.2 * coloured, rows=2, font=8, height_ratios=(0.8, below), sharex=True
    )
    above.bar(range(n), [one.train for one in held], 0.8, color=colours)
    above.set_ylabel("samples")
    above.set_ylim(0)
    if kinds:
        _draw_classes(grid, np.array([one.classes for one in held]), colours, cell, row)
    else:
        grid.set_yticks([])
        grid.text(0.5, 0.5, "targets are numbers, not classes", transform=grid.transAxes, ha="center", va="center")
    grid.set_xlim(-0.7, n - 0.3)
    grid.set_xticks(range(0, n, 1 if n <= 30 else 5 if n <= 100 else max(10, n // 20)))
    grid.set_xlabel("node")
    if n <= 12 and all(len(one.name) <= 10 and not one.name.startswith("site ") for one in held):
        grid.set_xticks(range(n), [one.name for one in held], rotation=35 * (n > 4))
    grid.set_axisbelow(True)
    grid.grid(alpha=0.2)
    if coloured:
        marks = [Line2D([], [], marker="s", ls="", color=COLOURS[k]) for k in range(len(groups))]
        figure.legend(
            marks, groups, loc="outside lower center", ncols=min(len(groups), max(1, int(width / 1.4))), frameon=False
        )
    if title:
        figure.suptitle(title, fontsize=9)
    return save_figure(figure, path, dpi=110)


def _draw_classes(axis: Any, counts: np.ndarray, colours: Sequence[str], cell: float, row: float) -> None:
    """Draws the samples of each site and class (sites, classes): shades where cells are narrow, else dots."""
    from matplotlib.colors import to_rgba

    n, kinds = counts.shape
    if cell < 0.2:
        shades = np.array([to_rgba(colour) for colour in colours])[None].repeat(kinds, 0)
        shades[..., 3] = np.where(counts.T > 0, 0.06 + 0.94 * np.sqrt(counts.T / counts.max()), 0)
        axis.imshow(shades, aspect="auto", interpolation="nearest", extent=(-0.5, n - 0.5, kinds - 0.5, -0.5))
    else:
        x, y = counts.nonzero()
        area = (0.92 * 72 * min(cell, row)) ** 2 * counts[x, y] / counts.max()
        axis.scatter(x, y, np.maximum(area, 0.6), color=[colours[int(i)] for i in x], linewidths=0)
    axis.set_ylim(kinds - 0.4, -0.6)
    axis.set_yticks(range(0, kinds, max(1, kinds // 20)))
    axis.set_ylabel("class")
