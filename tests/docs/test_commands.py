"""Commands on pages: they exist, and so do the options and files that they show."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

import benchmarks.__main__
import fairmesh.cli.main
import reproduction.__main__
from tests.docs.pages import ROOT, blocks, code_spans, pages

APPS = {
    "fairmesh": fairmesh.cli.main.app,
    "python -m fairmesh": fairmesh.cli.main.app,
    "python -m reproduction": reproduction.__main__.app,
    "python -m benchmarks": benchmarks.__main__.app,
}
AGAIN = {"--resume", "--overwrite"}  # with these, a run may have the folder of another
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
_BEFORE = re.compile(r"^((\w+=\S*|export) +)*(\S*/bin/)?(?=fairmesh |python |pytest |make )")


def commands() -> Iterator[tuple[str, str]]:
    """Yields the command lines of all pages, each with its place: those in blocks and those in running text."""
    for block in blocks("sh", "bash", "console", "indented"):
        for line in block.text.replace("\\\n", " ").splitlines():
            yield str(block), line.strip().removeprefix("$ ")
    for page in pages():
        for code in code_spans(page):
            if page.name != "CHANGELOG.md" and " " in code and "..." not in code and "|" not in code:
                yield str(page.relative_to(ROOT)), code


def problem_with(line: str) -> str | None:
    """Returns what is wrong with a command line, or None. Nothing is run, and other programs are taken to be right."""
    line = re.split(r"\s(?:[>|&;]|2>)", _BEFORE.sub("", line), maxsplit=1)[0]
    if line.count("'") % 2 or line.count('"') % 2:
        return None  # a part of a text that goes on
    words = shlex.split(line, comments=True)
    for name, app in APPS.items():
        if line.startswith(f"{name} "):
            return _refusal(_command(app), words[len(name.split()) :])
    match words:
        case ["make", target, *_] if "=" not in target and target not in TARGETS:
            return f"the Makefile has no {target}"
        case ["pytest" | "python", *rest]:
            paths = [w.partition("::")[0] for w in rest if w.endswith((".py", "/")) or w.startswith("tests/")]
            gone = [path for path in paths if "/" in path and not (ROOT / path).exists()]
            return f"no file {gone[0]}" if gone else None
    return None


@cache
def _command(app: typer.Typer) -> Any:
    return typer.main.get_command(app)


def _refusal(command: Any, words: list[str]) -> str | None:
    """Returns why a command has no such member or option."""
    path: list[str] = []
    while hasattr(command, "list_commands"):
        if not words or words[0].startswith("-") or not words[0].islower():
            return None
        context = command.context_class(command, info_name=" ".join(path))
        path, command, words = [*path, words[0]], command.get_command(context, words[0]), words[1:]
        if command is None:
            return f"no command {' '.join(path)}"
    known = {"-h", "--help"} | _options(command)
    if path == ["launch"]:  # hands the options of `run` on
        known |= _options(_command(APPS["fairmesh"]).commands["run"])
    given = [word.partition("=")[0] for word in words if re.fullmatch(r"--?[a-zA-Z][\w-]*(=.*)?", word)]
    unknown = [option for option in given if option not in known]
    return f"{' '.join(path)} has no {unknown[0]}" if unknown else None


def _options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}


def test_commands_on_pages_exist_with_their_options():
    found = list(commands())
    assert sum(line.startswith("fairmesh ") for _, line in found) > 100
    assert [f"{place}: {line}: {why}" for place, line in found if (why := problem_with(line))] == []


def test_runs_on_a_page_do_not_share_a_folder():
    """Such a line would be refused where the reader has typed the first."""
    shared, seen = [], set()
    for block in blocks("sh", "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["fairmesh"] and words[1:2] in (["run"], ["launch"]) and not {*words} & AGAIN:
                named = [words[k + 1] for k, word in enumerate(words) if word == "--out"]
                folder = (block.page, *(named or [Path(words[2]).stem]))
                shared += [f"{block}: {line}"] if folder in seen else []
                seen.add(folder)
    assert len(seen) > 10
    assert shared == []


def test_a_wrong_command_is_noticed():
    assert "--reference" in (problem_with("fairmesh run x.toml --reference") or "")
    assert "frobnicate" in (problem_with("fairmesh frobnicate x") or "")
    assert "--nodez" in (problem_with("A=1 .venv/bin/fairmesh data show mnist --nodez 3 > log") or "")
    assert "--sett" in (problem_with("fairmesh launch x.toml --processes 2 --resume --sett rounds=3") or "")
    assert "nowhere" in (problem_with("pytest tests/nowhere.py") or "")
    assert "doc" in (problem_with("make doc") or "")
