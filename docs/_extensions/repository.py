"""Pages of the repository outside docs/, and links to them.

Pages link to other files of the repository by relative paths, so that they also work without Sphinx. For the site, the
Markdown files in `PAGES` and their pictures are copied to docs/repository (which git ignores), the examples are
collected on one page, and links lead there. A page may hold `<!-- include: FILE -->`, which is replaced by that file.
A mention of a page in running text, such as docs/howto/data.md, becomes a link.
"""

import ast
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MIRROR = "repository"
PAGES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/notes.md",
    "reproduction/README.md",
    "reproduction/clipping.md",
    "reproduction/frontier.md",
    "reproduction/sites.md",
    "reproduction/arena.md",
)
EXAMPLES = "examples"

_FENCE = re.compile(r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$", re.M | re.S)
_CODE = re.compile(r"(`+).+?\1", re.S)
_LINK = re.compile(r'(\]\(|<img src=")([^)\s"#]*)(#[^)\s"]*)?(?=[)"\s])')
_MENTION = re.compile(r"`?(?<![\w/(\[.-])((?:docs|reproduction|benchmarks)/[\w/-]+\.md)(?![\w)\]])`?")
_INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.M)


def place(path: str) -> str | None:
    """Returns the place in docs/ of a file of the repository, or None if the site does not show it.

    Args:
        path: Relative to the repository, with an anchor for a part of a page.
    """
    path, hash_sign, anchor = path.partition("#")
    if path in ("docs/README.md", "README.md"):
        return "index.md" + hash_sign + anchor
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + hash_sign + anchor
    if path.split("/")[0] == EXAMPLES:
        if (ROOT / path).is_dir():
            return f"{MIRROR}/examples.md"
        return f"{MIRROR}/examples.md#{_slug(path)}"
    if path in PAGES or Path(path).suffix in (".svg", ".png"):
        return f"{MIRROR}/{path}" + hash_sign + anchor
    return None


def _slug(path: str) -> str:
    return re.sub(r"[^\w-]", "", path.removeprefix(f"{EXAMPLES}/"))


def relinked(text: str, old: str, new: str) -> str:
    """Returns Markdown with its relative links changed for the site.

    Args:
        text: Markdown.
        old: The file in the repository that it was written for.
        new: The page, relative to docs/, that shows it.
    """

    def link(match: re.Match[str]) -> str:
        opening, target, anchor = match[1], match[2], match[3] or ""
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(old), target))
        if not (ROOT / path).exists():
            raise ExtensionError(f"{old}: there is no file {path}, to which it links")
        found = place(path + anchor)
        if found is None:
            raise ExtensionError(f"{old} links to {path}: add it to PAGES in docs/_extensions/repository.py")
        return opening + posixpath.relpath(found, posixpath.dirname(new) or ".")

    def mention(match: re.Match[str]) -> str:
        found = place(match[1]) if (ROOT / match[1]).exists() else None
        if found is None or found == new:
            return match[0]
        return f"[{title(match[1])}]({posixpath.relpath(found, posixpath.dirname(new) or '.')})"

    return _outside_code(_MENTION, mention, _outside_code(_LINK, link, text))


def _outside_code(pattern: re.Pattern[str], change: Callable[[re.Match[str]], str], text: str) -> str:
    """Returns a text in which a pattern is changed wherever it is not part of code."""
    blocks = [match.span() for match in _FENCE.finditer(text)]

    def is_kept(match: re.Match[str]) -> bool:
        return any(start <= match.start() < end for start, end in blocks + inline)

    inline: list[tuple[int, int]] = []
    inline = [m.span() for m in _CODE.finditer(text) if not is_kept(m) and not pattern.fullmatch(m[0])]
    return pattern.sub(lambda match: match[0] if is_kept(match) else change(match), text)


def title(path: str) -> str:
    """Returns the first heading of a page of the repository."""
    found = re.search(r"^# (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.M)
    return found[1] if found else path


def examples() -> str:
    """Returns a page with all examples: what each is for, and its text."""
    parts = ["# Examples\n\nThese files are in the folder `examples` of the repository.\n"]
    for path in sorted((ROOT / EXAMPLES).rglob("*")):
        if path.suffix not in (".py", ".toml") or "__pycache__" in path.parts:
            continue
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        about = ""
        if path.suffix == ".py":
            about = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
        elif head := re.match(r"((?:# ?.*\n)+)", text):
            about = re.sub(r"^# ?", "", head[1].strip(), flags=re.M)
        kind = "python" if path.suffix == ".py" else "toml"
        parts.append(f"({_slug(name)})=\n## {name.removeprefix('examples/')}\n\n{about}\n")
        parts.append(f"~~~~{{code-block}} {kind}\n{text.rstrip()}\n~~~~\n")
    return "\n".join(parts)


def write_mirror() -> None:
    """Writes docs/repository. A file that has not changed is left alone, so that its page is not built again."""
    wanted: dict[Path, bytes] = {}
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        wanted[DOCS / MIRROR / name] = relinked(text, name, f"{MIRROR}/{name}").encode()
        for match in _LINK.finditer(text):
            picture = (ROOT / name).parent / match[2]
            if picture.suffix in (".svg", ".png"):
                wanted[DOCS / MIRROR / picture.relative_to(ROOT)] = picture.read_bytes()
    wanted[DOCS / MIRROR / "examples.md"] = relinked(examples(), f"{EXAMPLES}/", f"{MIRROR}/examples.md").encode()
    write_folder(DOCS / MIRROR, wanted)


def write_folder(folder: Path, wanted: dict[Path, bytes]) -> None:
    """Makes a folder hold these files and no others, leaving alone those that are right."""
    for path in folder.rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()
    for path, content in wanted.items():
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Includes files and changes links of a page that Sphinx reads."""
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".md" or docname.startswith(f"{MIRROR}/"):
        return
    old = path.resolve().relative_to(ROOT).as_posix()

    def include(match: re.Match[str]) -> str:
        app.env.note_dependency(str(path.parent / match[1]))
        return (path.parent / match[1]).read_text(encoding="utf-8")

    source[0] = relinked(_INCLUDE.sub(include, source[0]), old, old.removeprefix("docs/"))


def _docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Makes links of pages that a docstring mentions."""

    def mention(match: re.Match[str]) -> str:
        found = place(match[1]) if (ROOT / match[1]).exists() else None
        return f":doc:`/{found.removesuffix('.md')}`" if found else match[0]

    lines[:] = _MENTION.sub(mention, "\n".join(lines)).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", lambda app: write_mirror())
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
