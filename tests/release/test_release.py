"""What a release says about itself agrees with itself: versions, Pythons, public names."""

import inspect
import re
import tomllib
from pathlib import Path

import fairmesh as fm

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_is_the_same_everywhere():
    assert "version" in PROJECT["dynamic"]  # read from fairmesh/__init__.py
    assert f"\nversion: {fm.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased"
    assert headings[1].split()[0] == fm.__version__


def test_pythons_of_classifiers_and_workflows_are_the_same():
    prefix = "Programming Language :: Python :: 3."
    named = [f"3.{one.removeprefix(prefix)}" for one in PROJECT["classifiers"] if one.startswith(prefix)]
    for workflow in ("ci.yml", "release.yml"):
        text = (ROOT / ".github/workflows" / workflow).read_text()
        for found in re.findall(r"python: \[(.*)\]", text):
            assert [one.strip(' "') for one in found.split(",")] == named, workflow
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_workflows_hold_no_secret():
    for path in (ROOT / ".github/workflows").iterdir():
        assert "secrets." not in path.read_text(), path.name


def test_workflows_name_actions_by_commit():
    for path in (ROOT / ".github/workflows").iterdir():
        used = re.findall(r"uses: (.*)", path.read_text())
        assert used
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one) for one in used), used


def test_locked_versions_are_those_of_the_constraints_and_cover_what_a_node_imports():
    text = (ROOT / "constraints-mesh.txt").read_text()
    entries = [entry for entry in re.split(r"\n(?=[a-z])", text) if not entry.startswith("#")]
    locked = dict(entry.split(" ")[0].split("==") for entry in entries)
    assert all("--hash=sha256:" in entry for entry in entries)
    known = dict(line.lower().replace("_", "-").split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert {name: known[name] for name in locked} == locked
    needed = {re.split("[<>=]", one)[0] for one in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["mesh"]}
    assert needed - {"torch"} <= locked.keys()
    assert "://" not in text


def test_stability_page_lists_the_public_names():
    page = (ROOT / "docs/reference/stability.md").read_text()
    listed = page.split("<!-- names -->")[1].split("<!-- /names -->")[0]
    names, spaces = (re.findall(r"`(\w+)`", part) for part in listed.split("Namespaces, with"))
    modules = [name for name in fm.__all__ if inspect.ismodule(getattr(fm, name))]
    assert names == [name for name in fm.__all__ if name not in modules]
    assert [one for one in spaces if one != "__all__"] == modules


def test_extras_are_those_that_errors_name():
    from fairmesh.errors import _EXTRAS

    assert set(_EXTRAS) <= set(PROJECT["optional-dependencies"])
