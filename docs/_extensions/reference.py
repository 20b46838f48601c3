"""Reference pages from the code itself: the API from docstrings, the commands from typer, the errors from `raise`.

A page holds `<!-- generated: commands -->` or `<!-- generated: errors -->` where the text belongs. The API has one page
per namespace, in docs/reference/api (which git ignores).
"""

import ast
import dataclasses
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import typer
from repository import DOCS, ROOT, write_folder
from sphinx.application import Sphinx

import fairmesh
from fairmesh.cli.main import app as command_line

SOURCE = ROOT / "src" / "fairmesh"
API = DOCS / "reference" / "api"


# The API.


def namespaces() -> dict[str, ModuleType]:
    """Returns the public modules by the name under which users find them."""
    return {name: thing for name in fairmesh.__all__ if inspect.ismodule(thing := getattr(fairmesh, name))}


def summary(thing: object) -> str:
    """Returns the first sentence of a docstring in one line."""
    first = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", first)[0]


def api_pages() -> dict[str, str]:
    """Returns the pages of the API as reStructuredText, by file name."""
    shown: dict[int, str] = {}  # the object -> the name that it is documented under
    pages = {}
    for prefix, module in {"fairmesh": fairmesh, **{f"fairmesh.{n}": m for n, m in namespaces().items()}}.items():
        short = prefix.replace("fairmesh", "fm", 1)
        entries, rows = [], []
        for name in sorted(module.__all__, key=str.lower):
            thing = getattr(module, name)
            if inspect.ismodule(thing) or name.startswith("__"):
                continue
            full = f"{prefix}.{name}"
            if id(thing) not in shown:
                shown[id(thing)] = full
                entries.append(_entry(full, thing))
            rows.append((f":py:obj:`{name} <{shown[id(thing)]}>`", summary(thing)))
        about = _about(prefix, module)
        page = [short, "=" * len(short), "", f".. py:module:: {prefix}", "", f"{about[0].upper()}{about[1:]}.", ""]
        page += _table(rows)
        if prefix == "fairmesh":
            modules = [(f":doc:`fm.{n} <{n}>`", _about(f"fairmesh.{n}", m)) for n, m in sorted(namespaces().items())]
            page += ["Its modules are the other pages of the API:", "", *_table(modules)]
        pages[f"{prefix.rpartition('.')[2]}.rst"] = "\n".join([*page, *entries])
    return pages


def _about(prefix: str, module: ModuleType) -> str:
    """Returns what the package's docstring says about a namespace."""
    if prefix == "fairmesh":
        return "the everyday names"
    name = prefix.removeprefix("fairmesh.")
    found = re.search(rf"^\s*fm\.{name} +(.+(?:\n {{10,}}.+)*)", fairmesh.__doc__ or "", re.M)
    return " ".join(found[1].split()) if found else summary(module).rstrip(".")


def _table(rows: list[tuple[str, str]]) -> list[str]:
    lines = [".. list-table::", "   :widths: 30 70", ""]
    for name, text in rows:
        lines += [f"   * - {name}", f"     - {text}"]
    return [*lines, ""]


def _entry(full: str, thing: object) -> str:
    name = full.rpartition(".")[2]
    kind = "class" if inspect.isclass(thing) else "function" if inspect.isroutine(thing) else "data"
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        kind = "exception"
    lines = ["", name, "-" * len(name), "", f".. auto{kind}:: {full}"]
    return "\n".join([*lines, "   :members:" if kind in ("class", "exception") else "", ""])


def _docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Sets formulas, which docstrings indent, as they are written."""
    changed: list[str] = []
    paragraph, after_blank = "", False  # the line of text before, and whether a blank one is in between
    for line in lines:
        starts_block = line.startswith("    ") and after_blank and paragraph and not paragraph.startswith(" ")
        if starts_block and not _SECTION.match(paragraph):
            changed += [".. code-block:: text", ""]
        changed.append(line)
        after_blank = not line.strip()
        paragraph = line if line.strip() else paragraph
    lines[:] = changed


def _is_left_out(app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object) -> bool | None:
    """Leaves out the fields of NamedTuples, which Python documents by their number; Args explain them."""
    return True if type(thing).__name__ == "_tuplegetter" else None


_SECTION = re.compile(r"[A-Z][a-z]+:$")


def _signature(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Shows the defaults of dataclasses that are made by a function."""
    if signature and dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            if field.default_factory is not dataclasses.MISSING:
                signature = signature.replace(f"{field.name}=<factory>", f"{field.name}={field.default_factory()!r}")
    return signature, returned


# The commands.


def commands() -> str:
    """Returns what `--help` says of every command, as Markdown."""
    return "\n".join(_command(typer.main.get_command(command_line), "fairmesh"))


def _command(command: Any, path: str) -> Iterator[str]:
    """Yields the lines of a command and of those below it."""
    context = command.context_class(command, info_name=path)
    yield f"{'#' * (1 + len(path.split()))} {path}\n"
    yield f"{_markdown(command.help or '')}\n"
    yield f"```text\n{path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    for parameter in command.params:
        if record := parameter.get_help_record(context):  # none for hidden ones
            yield f"- **`{record[0].strip()}`**: {_markdown(record[1])}"
    yield ""
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            yield from _command(command.get_command(context, name), f"{path} {name}")


def _markdown(text: str) -> str:
    """Returns help text with its line breaks joined, paragraphs kept, and no character that Markdown would take."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text.replace("\b\n", "")))
    return "\n\n".join(re.sub(r"([*_<\[])", r"\\\1", " ".join(p.split())) for p in paragraphs)


# The errors.


def errors() -> str:
    """Returns the messages of all errors that fairmesh raises on purpose, by the part that raises them."""
    calls, bases = [], {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {b.id if isinstance(b, ast.Name) else getattr(b, "attr", "") for b in node.bases}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                calls.append((path.relative_to(SOURCE).parts[0].removesuffix(".py"), node.func.id, node.args[0]))
    kinds = {"FairmeshError"}
    while more := {name for name, parents in bases.items() if kinds & parents} - kinds:
        kinds |= more
    found: dict[str, set[str]] = defaultdict(set)
    for part, kind, argument in calls:
        message = _message(argument) if kind in kinds else ""
        if len(re.sub(r"\W|…", "", message)) > 12:  # a message that is only a placeholder says nothing
            found[part].add(message)
    lines = []
    for part, messages in sorted(found.items()):
        lines += [f"### From `{part}`\n", *(f"- {_quoted(m)}" for m in sorted(messages, key=_sorting)), ""]
    return "\n".join(lines)


def _message(node: ast.expr) -> str:
    """Returns the text of a message; what is known only when it is raised is shown as three dots."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_message(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _message(left) + _message(right)
        case _:
            return "…"


def _quoted(message: str) -> str:
    text = " ".join(message.split()).replace("……", "…")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _sorting(message: str) -> str:
    return message.lstrip("…`'\" :").lower()


GENERATED = {"commands": commands, "errors": errors}
_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.M)


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = _MARK.sub(lambda match: GENERATED[match[1]](), source[0])


def _write_api(app: Sphinx) -> None:
    write_folder(API, {API / name: text.encode() for name, text in api_pages().items()})


def _always(app: Sphinx, env: object, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Returns the pages that depend on the code, which Sphinx does not watch."""
    return [name for name in env.found_docs if name.startswith("reference/")]  # type: ignore[attr-defined]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", _write_api)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", _is_left_out)
    app.connect("env-get-outdated", _always)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
