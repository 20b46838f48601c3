"""How large the code is, and where it is hard to read. Only the standard library is used.

Code lines are lines with a token of code: no docstrings, comments or blank lines. A function's complexity is 1 plus its
branches, as radon counts them: `if`, `for`, `while`, `except`, `assert`, conditional expressions, comprehensions with
their conditions, the cases of a `match`, and every `and` and `or` beyond the first operand; functions inside it count
too. An `is None` test is a comparison with None by `is` or `is not`; they are counted per 1,000 lines of all kinds."""

import ast
import importlib
import io
import tokenize
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "examples", "reproduction")
LONG, COMPLEX = 50, 20  # lines and complexity beyond which a function is counted
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.IfExp, ast.match_case)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sizes() -> dict[str, Any]:
    """Returns the figures of each folder, of the library's functions and files, and of its public names."""
    measured = {folder: _folder(ROOT / folder) for folder in FOLDERS}
    sources = {path: path.read_text(encoding="utf-8") for path in _files(ROOT / "src")}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    functions = [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", _length(node), complexity(node))
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, _DEFINITIONS)
    ]
    of_none = sum(_tests_of_none(tree) for tree in trees.values())
    largest = sorted(((text.count("\n"), str(path.relative_to(ROOT))) for path, text in sources.items()), reverse=True)
    return {
        "folders": measured,
        "is_none_per_1000": round(1000 * of_none / measured["src"]["lines"], 1),
        "functions_over_50_lines": sum(lines > LONG for _, lines, _ in functions),
        "functions_over_complexity_20": sum(found > COMPLEX for _, _, found in functions),
        "most_complex": [f"{name} ({found})" for name, _, found in sorted(functions, key=lambda f: -f[2])[:10]],
        "largest_files": [f"{name} ({lines})" for lines, name in largest[:10]],
        "public_names": _public_names(),
    }


def complexity(function: ast.AST) -> int:
    """Returns 1 plus the number of branches of a function, those of functions inside it included."""
    found = 1
    for node in ast.walk(function):
        if isinstance(node, _BRANCHES):
            found += 1
        elif isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
    return found


def code_lines(text: str) -> int:
    """Returns how many lines of a file have code."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Module, ast.ClassDef, *_DEFINITIONS)) and _docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT and token.type != tokenize.ENDMARKER:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - docstrings)


def _docstring(node: Any) -> str | None:
    return ast.get_docstring(node, clean=False)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def _folder(folder: Path) -> dict[str, int]:
    texts = [path.read_text(encoding="utf-8") for path in _files(folder)]
    return {
        "files": len(texts),
        "lines": sum(text.count("\n") for text in texts),
        "code_lines": sum(code_lines(text) for text in texts),
    }


def _length(node: Any) -> int:
    return node.end_lineno - node.lineno + 1


def _tests_of_none(tree: ast.AST) -> int:
    return sum(
        isinstance(node, ast.Compare)
        and any(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops)
        and any(isinstance(side, ast.Constant) and side.value is None for side in node.comparators)
        for node in ast.walk(tree)
    )


def _public_names() -> int:
    """Returns how many names fairmesh has at its top. Importing them imports nothing else."""
    return len(importlib.import_module("fairmesh").__all__)
