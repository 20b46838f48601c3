"""The public names: which there are, that checkers and run time agree on them, and that importing them is lazy."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import fairmesh as fm
from tests.api.public import NAMESPACES

HEAVY = ("torch", "numpy", "scipy", "networkx", "matplotlib", "sklearn", "rich")


def seen_by_checkers():
    """Returns what fairmesh/__init__.py imports under TYPE_CHECKING, as {name: module}."""
    found = {}
    for node in ast.parse(Path(fm.__file__).read_text()).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for line in (inner for inner in node.body if isinstance(inner, ast.ImportFrom)):
                found |= {alias.asname or alias.name: (line.module, alias.name) for alias in line.names}
    return found


def imported_by(code):
    """Runs code in a new process and returns the heavy modules that it imported. The code may exit."""
    code = f"import atexit, sys\natexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules]))\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_checkers_and_run_time_see_the_same_names():
    seen = seen_by_checkers()
    assert sorted(seen) == sorted(set(fm.__all__) - {"__version__"})
    for name, (module, original) in seen.items():
        thing = getattr(fm, name)
        if inspect.ismodule(thing):
            assert thing.__name__ == f"{module}.{original}"
        else:
            assert thing is getattr(sys.modules[module], original)


def test_dir_lists_the_public_names_and_no_others():
    assert dir(fm) == sorted(fm.__all__)


def test_top_level_stays_small():
    assert len(fm.__all__) - len(NAMESPACES) <= 26


def test_import_and_dir_are_light():
    assert imported_by("import fairmesh\ndir(fairmesh)") == []


def test_help_is_light():
    assert imported_by("from fairmesh.cli.main import app\napp(['--help'])") == []
