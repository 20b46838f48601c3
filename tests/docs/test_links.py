"""Links between pages lead somewhere, without Sphinx too; addresses of other sites are well formed."""

import re
from pathlib import Path
from urllib.parse import urlsplit

from tests.docs.pages import ROOT, anchors, links, pages, text_of

HERE = Path(__file__).parent  # whose tests also name pages that do not exist


def test_links_lead_to_files_and_headings_that_exist():
    wrong = []
    for page in pages():
        for link in links(page):
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert wrong == []


def test_addresses_of_other_sites_are_well_formed():
    found = [(page, link) for page in pages() for link in links(page) if re.match(r"[a-z]+:", link)]
    assert found
    for page, link in found:
        parts = urlsplit(link)
        assert parts.scheme in ("https", "mailto"), f"{page}: {link}"
        assert parts.scheme == "mailto" or re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), f"{page}: {link}"


def test_pages_that_code_and_pages_mention_exist():
    mention = re.compile(r"(?<![\w./-])(?:docs|reproduction|benchmarks)/[\w/-]+\.md\b")
    folders = ("src", "tests", "examples", "reproduction", "benchmarks")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.parent != HERE]
    wrong = []
    for path in [*sources, *pages()]:
        text = text_of(path)
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in mention.findall(text) if not (ROOT / name).exists()]
    assert wrong == []


def test_pages_that_messages_name_by_their_titles_exist():
    named = (  # an installed package has no docs/ folder, so messages give titles
        "How to choose", "How sure a result is", "On a cluster", "Security of a mesh", "When robust weights help",
        "Your own training code as a node",
    )  # fmt: skip
    titles = [text_of(page).partition("\n")[0].removeprefix("# ") for page in pages()]
    assert [name for name in named if not any(title.startswith(name) for title in titles)] == []


def test_every_page_of_the_documentation_is_listed_on_its_front_page():
    front = ROOT / "docs" / "README.md"
    listed = {(front.parent / link.partition("#")[0]).resolve() for link in links(front)}
    pages_of_docs = {
        page for page in pages() if page.parent.parent == ROOT / "docs" and page.parent.name != "tutorials"
    }
    assert sorted(map(str, pages_of_docs - listed)) == []


def test_paths_in_the_table_of_where_to_add_what_exist():
    table = text_of(ROOT / "CONTRIBUTING.md").partition("## Where would I ...?")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w./-]+(?:/|\.py|\.md))`", table))
    assert "problems/learning.py" in named
    outside = ("src/", "docs/", "tests/", "examples/", "reproduction/", "benchmarks/")
    roots = {name: ROOT if name.startswith(outside) else ROOT / "src" / "fairmesh" for name in named}
    assert [name for name in sorted(named) if not (roots[name] / name).exists()] == []
