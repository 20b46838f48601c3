"""Titles of tables and figures, and the format of cells and rows on the page."""

from collections.abc import Sequence
from typing import Any

TABLES = {
    "table2": (
        "Table 2: compression",
        "Worst-node accuracy in %, Fashion-MNIST, ten nodes on a ring with one class each.",
    ),
    "table3": ("Table 3: networks", "Worst-node accuracy in %, ten nodes; `2D torus` is the lattice i ± 1, i ± 2."),
    "table4a": ("Table 4a: regularization, Fashion-MNIST", "Accuracy in %, 50 nodes, no compression."),
    "table4b": ("Table 4b: regularization, COOS7", "Accuracy in % by microscope, 10 nodes, no compression."),
    "table4c": ("Table 4c: regularization, CIFAR-10", "Accuracy in % by contrast, 20 nodes, no compression."),
    "table5": ("Table 5: robust algorithms", "Worst accuracy in %; AD-GDA is Table 4's run at alpha = 0.01."),
}
FIGURES = {
    "figure1": (
        "Figure 1: two of ten nodes use another instrument",
        "CIFAR-10 with 4-bit messages; the images of two nodes pass through a second camera. This setup replaces the "
        "paper's two microscopes (COOS7), whose data has to be supplied by hand. It is not compared with any number of "
        "the paper.",
    ),
    "figure2a": ("Figure 2a: convergence under quantization", "AD-GDA at a fixed step of 0.1, logistic model, ring."),
    "figure2b": ("Figure 2b: convergence under sparsification", "AD-GDA at a fixed step of 0.1, logistic model, ring."),
    "figure3": (
        "Figure 3: convergence over networks",
        "AD-GDA at a fixed step of 0.1, logistic model, 4-bit messages.",
    ),
    "figure4": (
        "Figure 4: accuracy against traffic",
        "AD-GDA and CHOCO-SGD send 4 bits per parameter, their rivals 32.",
    ),
}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def shown(value: dict[str, Any] | None) -> str:
    """Returns a mean and its standard deviation as the tables print them."""
    if value is None:
        return "–"
    spread = "" if value["std"] is None else f" ± {value['std']:.2f}"
    diverged = f" ({value['diverged']} of {value['placements']} diverged)" if value.get("diverged") else ""
    other = " †" if value.get("as_its_recipe") is False else ""
    return f"{value['mean']:.2f}{spread}{diverged}{other}"


def named(text: str) -> str:
    """Returns the name of a cell or row as the page shows it."""
    return text.split(": ", 1)[-1].replace("fc, ", "fully connected, ")


def short(recipe: str) -> str:
    """Returns 'Table 2' for 'table2'."""
    return {**TABLES, **FIGURES}[recipe][0].split(":")[0]
