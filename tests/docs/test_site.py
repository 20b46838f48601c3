"""The documentation site: what its extensions make of pages and code, and that it builds without a warning."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairmesh as fm
from tests.api.public import public_objects
from tests.docs.pages import ROOT, pages, text_of

sys.path.insert(0, str(ROOT / "docs" / "_extensions"))
import reference
import repository


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        ("[a](../../reproduction/sites.md#x)", "docs/x/a.md", "x/a.md", "(../repository/reproduction/sites.md#x)"),
        ("[a](../docs/howto/data.md)", "reproduction/a.md", "repository/reproduction/a.md", "(../../howto/data.md)"),
        ("[a](../examples/rivals.py)", "docs/a.md", "a.md", "(repository/examples.md#rivalspy)"),
        ("see docs/howto/data.md.", "docs/howto/a.md", "howto/a.md", "see [Data](data.md)."),
        ("see `docs/howto/data.md`", "docs/howto/a.md", "howto/a.md", "see [Data](data.md)"),
        ("`fairmesh keys > docs/howto/data.md`", "docs/a.md", "a.md", "keys > docs/howto/data.md`"),
        ("```sh\nsee docs/howto/data.md\n```", "docs/a.md", "a.md", "see docs/howto/data.md"),
        ("[a](https://example.org/docs/howto/data.md)", "docs/a.md", "a.md", "(https://example.org/docs/howto/data.md)"),
    ],
)  # fmt: skip
@pytest.mark.quick_cases(20)
def test_links_lead_to_where_the_site_shows_a_file(text, old, new, expected):
    assert expected in repository.relinked(text, old, new)


def test_a_link_to_a_file_that_is_not_there_is_refused():
    with pytest.raises(repository.ExtensionError, match=r"gone\.md"):
        repository.relinked("[a](gone.md)", "docs/a.md", "a.md")


SHOWN = [
    name for page in pages() if repository.place(name := page.relative_to(ROOT).as_posix()) and name != "README.md"
]


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.quick_cases("all")
def test_site_shows_every_file_that_its_pages_link_to(name):
    repository.relinked(text_of(ROOT / name), name, repository.place(name))


def test_api_pages_document_every_public_name_once():
    text = "\n".join(reference.api_pages().values())
    shown = re.findall(r"^\.\. auto(?:class|function|exception|data):: (\S+)$", text, re.M)
    assert len(shown) == len(set(shown))
    missing = {name.replace("fm", "fairmesh", 1) for name in public_objects()} - set(shown)
    assert missing == set()


def test_commands_page_has_every_command_with_its_options():
    text = reference.commands()
    assert [name for name in ("fairmesh data check", "fairmesh mesh show", "fairmesh launch") if name not in text] == []
    run = text.split("### fairmesh run\n")[1].split("\n### ")[0]
    assert [option for option in ("--set", "--with-references", "--resume", "default: 300") if option not in run] == []


@pytest.mark.slow
def test_errors_page_shows_messages_as_they_are_raised():
    text = reference.errors()
    with pytest.raises(fm.BadInput) as error:
        fm.regularizers.Capped(inner=fm.regularizers.Custom(lambda weights, prior: weights.sum()))
    assert str(error.value).replace("Custom", "…") in text
    assert text.count("\n- ") > 400


@pytest.mark.slow
def test_pictures_of_concepts_are_those_that_their_script_draws(monkeypatch):
    folder = ROOT / "docs" / "pictures"
    monkeypatch.syspath_prepend(folder)
    concepts = importlib.import_module("concepts")
    for name in concepts.DRAWINGS:
        committed = (folder / f"{name}.svg").read_text(encoding="utf-8")
        assert _words(concepts.drawn(name)) == _words(committed), "draw again: python docs/pictures/concepts.py"


def _words(picture: str) -> list[str]:
    """Returns the texts in a picture; coordinates differ in the last digit between machines."""
    return re.findall(r"<text[^>]*>([^<]*)<", picture)


@pytest.mark.slow
def test_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    built = tmp_path / "html"
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", str(built)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (built / "index.html").exists()
    for page in pages():
        if page.is_relative_to(ROOT / "docs") and page.name != "README.md":
            assert (built / page.relative_to(ROOT / "docs")).with_suffix(".html").exists()
    assert [place for path in built.rglob("*") for place in loaded_from_elsewhere(path)] == []
    index = json.loads((built / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    assert any("TrackedADGDA" in str(entry) for entry in index["objects"].values())


def loaded_from_elsewhere(path: Path) -> list[str]:
    """Returns what a file of the site makes a browser load from the network."""
    if path.suffix not in (".html", ".css"):
        return []
    elsewhere = r"""["']?(?:https?:)?//[^"')]+"""
    pattern = rf"<(?!a\b)\w+[^>]+(?:src|href)={elsewhere}|url\({elsewhere}|@import[^;]+{elsewhere}"
    return [f"{path.name}: {found}" for found in re.findall(pattern, path.read_text(encoding="utf-8"))]
