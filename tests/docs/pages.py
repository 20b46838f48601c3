"""The pages of the repository, their headings, links and blocks of code."""

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(?:\{code-cell\})?[ ]*(\S*)[^\n]*\n(.*?)^\1\2[ ]*$", re.M | re.S)
_INDENTED = re.compile(r"(?<=\n\n)((?:    [^\n]+\n)+)")
_LINK = re.compile(r'(?:\]\(|<img src=")([^)\s"]*)')
_INLINE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)


class Block(NamedTuple):
    """A block of code on a page."""

    page: Path
    line: int
    kind: str  # such as "python"; "indented" for one without a name
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def pages() -> list[Path]:
    """Returns all Markdown files that git knows or would add."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in sorted(set(found)) if name and (ROOT / name).exists()]


@cache
def text_of(page: Path) -> str:
    """Returns a page's text."""
    return page.read_text(encoding="utf-8")


@cache
def prose_of(page: Path) -> str:
    """Returns a page's text without its blocks of code, as many lines long."""
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text_of(page))


def blocks(*kinds: str) -> list[Block]:
    """Returns the blocks of these kinds on all pages, in their order."""
    found = []
    for page in pages():
        text, prose = text_of(page), prose_of(page)
        of_page = [(m.start(), text[: m.start()].count("\n") + 2, m[3], m[4]) for m in _FENCE.finditer(text)]
        for m in _INDENTED.finditer(prose):
            line = prose[: m.start()].count("\n") + 1
            if not re.search(r"^(?:[-*]|\d+\.) ", prose[: m.start()].rsplit("\n\n", 2)[-2], re.M):  # not in a list
                of_page.append((m.start(), line, "indented", re.sub(r"^    ", "", m[1], flags=re.M)))
        found += [Block(page, line, kind, code) for _, line, kind, code in sorted(of_page) if kind in kinds]
    return found


def links(page: Path) -> list[str]:
    """Returns what a page links to, pictures included."""
    return _LINK.findall(_INLINE.sub("", prose_of(page)))


def code_spans(page: Path) -> list[str]:
    """Returns the code in a page's running text."""
    return [" ".join(match[2].split()) for match in _INLINE.finditer(prose_of(page))]


@cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and MyST make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?)(?: #*)?$", prose_of(page), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        repeated = (f"{slug}-{k}" for k in range(1, 1000))
        found.add(slug if slug not in found else next(name for name in repeated if name not in found))
    return found
