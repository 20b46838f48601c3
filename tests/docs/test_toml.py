"""Files on pages: fairmesh's own readers accept every block of TOML."""

import dataclasses
import tomllib
from typing import Any

import pytest

import fairmesh as fm
from fairmesh.config.tables import from_table, settings
from fairmesh.experiment import experiment_from
from fairmesh.mesh.enrol.roster import SiteFile
from tests.docs.pages import ROOT, Block, blocks

# What a block may be a part of, with what the rest of the file says.
_PARTS: list[tuple[type, dict[str, Any]]] = [
    (fm.data.Table, {"file": "patients.csv", "target": "outcome", "site": "hospital"}),
]


def read(block: Block) -> None:
    """Reads a block as fairmesh reads the file that it is part of."""
    table = tomllib.loads(block.text)
    if set(table) <= {field.name for field in dataclasses.fields(fm.Experiment)}:
        experiment_from(_completed(table), ROOT / "examples")
        return
    if set(table) <= set(settings(SiteFile)):
        SiteFile.of("site.toml", {"name": "north", **table})
        return
    for kind, others in _PARTS:
        if set(table) <= set(settings(kind)):
            from_table(kind, {**others, **table}, str(block))
            return
    raise fm.BadInput(f"no file has all of the keys {sorted(table)}")


def _completed(table: dict[str, Any]) -> dict[str, Any]:
    """Returns a table with what an experiment needs besides."""
    by_contract = "contract" in table
    data = table.get("data", {"name": "table", "file": "patients.csv"} if by_contract else "digits")
    if isinstance(data, dict) and data["name"] == "table":
        data = {**({} if by_contract else {"target": "outcome"}), "site": "hospital", **data}
    if _is_own(table.get("algorithm")):
        table = {key: value for key, value in table.items() if key not in ("algorithm", "sweep")}
    return _without_own({**table, "data": data})


def _without_own(value: Any) -> Any:
    """Returns a table without the classes and functions that its page defines; the tests of that page read those."""
    if isinstance(value, list):
        return [_without_own(item) for item in value if not _is_own(item)]
    if isinstance(value, dict):
        return {key: _without_own(item) for key, item in value.items() if not _is_own(item)}
    return value


def _is_own(value: Any) -> bool:
    return isinstance(value, dict) and any("mine.py:" in str(value.get(key, "")) for key in ("path", "function"))


def test_files_on_pages_are_accepted():
    found = blocks("toml")
    assert len(found) > 20
    wrong = []
    for block in found:
        try:
            read(block)
        except (fm.BadInput, tomllib.TOMLDecodeError) as error:
            wrong.append(f"{block}: {error}")
    assert wrong == []


@pytest.mark.slow
def test_file_of_coming_from_decentralizepy_trains(tmp_path):
    page = ROOT / "docs" / "start" / "coming-from-decentralizepy.md"
    (block,) = [block for block in blocks("toml") if block.page == page]
    (tmp_path / "choco.toml").write_text(block.text)
    digits = fm.data.Digits(nodes=16)  # instead of CIFAR-10, which would have to be downloaded
    result = fm.run(fm.load_experiment(tmp_path / "choco.toml", data=digits, model=fm.models.Logistic(), rounds=20))
    assert result.rounds == 20


def test_a_wrong_key_is_noticed():
    for text in ("[algorithm]\nname = 'tracked-ad-gda'\nconsensus_stepp = 0.5", "[options]\nmeasure_evry = 3", "a = 1"):
        try:
            read(Block(ROOT / "README.md", 1, "toml", text))
        except fm.BadInput:
            continue
        raise AssertionError(text)
