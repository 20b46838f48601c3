"""Executes the tutorials, which are notebooks, and writes their outputs into them: `make tutorials`.

    python docs/tutorials/execute.py [NAME ...] [--short]

A notebook runs in an empty folder. The cell with the tag "parameters" says how long runs are;
its metadata `short` has other values, with which tests run all tutorials in seconds. A digest of the code that made the
outputs is kept in the notebook's metadata, so that a test can tell when they are of another code.
"""

import argparse
import ast
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # colours of a terminal


def tutorials() -> list[Path]:
    """Returns the notebooks in their order."""
    return sorted(FOLDER.glob("*.ipynb"))


def code_of(notebook: Any) -> list[Any]:
    """Returns the code cells."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest_of(notebook: Any) -> str:
    """Returns a digest of what the code does: comments and formatting do not change it."""
    transform = TransformerManager().transform_cell
    parsed = [ast.dump(ast.parse(transform(cell.source))) for cell in code_of(notebook)]
    return hashlib.sha256("\n".join(parsed).encode()).hexdigest()[:16]


def kinds_of(cell: Any) -> set[str]:
    """Returns what kinds of outputs a cell has: "stdout", "stderr", "text/plain", "image/png", ..."""
    found: set[str] = set()
    for output in cell.outputs:
        found |= {output.name} if output.output_type == "stream" else set(output.get("data", {}))
    return found


@contextmanager
def kernel() -> Iterator[KernelManager]:
    """Starts a kernel, whose `!` finds the commands of this environment."""
    manager = KernelManager(kernel_name="python3")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    manager.start_kernel(env=os.environ | {"PATH": path}, stderr=subprocess.DEVNULL)
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


def executed(path: Path, manager: KernelManager, short: bool = False) -> Any:
    """Returns a notebook with the outputs of this run.

    Args:
        path: The notebook.
        manager: The kernel. Names that another notebook left there are deleted.
        short: Whether to run with the short parameters.

    Raises:
        CellExecutionError: A cell raised an error.
    """
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    if short:
        for cell in notebook.cells:
            values = cell.metadata.get("short", {})
            cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
    with tempfile.TemporaryDirectory() as folder:
        first = nbformat.v4.new_code_cell(f"import os\nos.chdir({folder!r})\n%reset -f")
        notebook.cells.insert(0, first)
        client = NotebookClient(notebook, km=manager, timeout=600, coalesce_streams=True)
        try:
            client.execute()
        finally:
            if client.kc is not None:
                client.kc.stop_channels()
        notebook.cells.remove(first)
    for cell, source in zip(notebook.cells, sources):
        cell.source = source
    for number, cell in enumerate(code_of(notebook), start=1):
        cell.execution_count = number
        cell.metadata.pop("execution", None)
        cell.outputs = [_cleaned(output, number) for output in cell.outputs]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "fairmesh": {"executed": digest_of(notebook)},
    }
    return notebook


def _cleaned(output: Any, number: int) -> Any:
    """Returns an output without colours of a terminal and without times of a kernel."""
    if output.output_type == "stream":
        output.text = _ESCAPES.sub("", output.text)
    if "execution_count" in output:
        output.execution_count = number
    if "image/png" in output.get("data", {}):  # the text in its place names an address in memory
        output.data.pop("text/plain", None)
        output.metadata = {}
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="which tutorials, such as 1-first-run; all by default")
    parser.add_argument("--short", action="store_true", help="run with the short parameters and write nothing")
    asked = parser.parse_args()
    for path in tutorials():
        if asked.names and path.stem not in asked.names:
            continue
        start = time.perf_counter()
        with kernel() as manager:
            notebook = executed(path, manager, asked.short)
        if not asked.short:
            nbformat.write(notebook, path)
        print(f"{path.stem}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
