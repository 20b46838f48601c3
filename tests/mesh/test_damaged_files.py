"""Damaged files of a site's own: its node goes on and says so, or ends with a sentence that names the file and a way
that works. The files are found by looking into the folders of a site, so a new one is tried as well."""

import fnmatch
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from fairmesh.errors import FairmeshError, Interrupted
from fairmesh.mesh.enrol.keys import KnownKeys, trust
from fairmesh.mesh.enrol.roster import Mesh, SiteFile
from fairmesh.mesh.node import ledger
from fairmesh.mesh.node.data_consent import unaccepted
from fairmesh.mesh.node.machine import Machines
from fairmesh.mesh.node.running import run_node
from fairmesh.mesh.node.watching import live_status
from fairmesh.storage.files import read_record, write_record
from tests.data.test_preprocessing import clinic, write
from tests.mesh import fleet
from tests.mesh.scenarios import Run, played, waits_at
from tests.refusals import missing_from, refused

NAMES, THERE = ["a", "b", "c", "d"], ["a", "b", "c"]
EXPERIMENT = """
rounds = 40
data = { name = "digits", nodes = 4 }
topology = "ring"
[options]
measure_every = 4
checkpoint_every = 5
"""
ADVICE = "way out"


def _deep(content: bytes) -> bytes:
    return b"[" * 100_000


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if content else b"\x01"


def _numbers(content: bytes) -> bytes:
    """Every number of a text becomes a huge one, which JSON allows."""
    return re.sub(rb"(?<![\w.])\d+(?![\w.])", b"9" * 400, content)


DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "empty": lambda content: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "random bytes": lambda content: random.Random(len(content)).randbytes(max(64, len(content))),
    "not UTF-8": lambda content: content[:9] + b"\xff\xfe\x80" + content[9:],
    "a list": lambda content: b"[]",
    "a table": lambda content: b"{}",
    "a number": lambda content: b"7",
    "nested": _deep,
    "huge numbers": _numbers,
    "a flipped bit": _flipped,
    "a folder": None,
}


def damage(path: Path, how: str) -> None:
    change, content = DAMAGES[how], path.read_bytes()
    path.unlink()
    if change is None:
        path.mkdir()
    else:
        path.write_bytes(change(content))


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.quick_cases("all")
def test_record_is_read_as_it_was_written_or_refused_with_its_name_and_the_advice(tmp_path, how):
    path, record = tmp_path / "record.json", {"votes": {"a": 1_700_000_000_000}, "share": 0.1, "none": None}
    assert read_record(path, ADVICE) == {}
    write_record(path, record)
    write_record(path, read_record(path, ADVICE))
    assert read_record(path, ADVICE) == record
    damage(path, how)
    with refused(path, "damaged", ADVICE):
        read_record(path, ADVICE)


def test_number_that_is_changed_in_a_record_is_noticed(tmp_path):
    write_record(tmp_path / "vote.json", {"round": 12})
    (tmp_path / "vote.json").write_text((tmp_path / "vote.json").read_text().replace("12", "13"))
    with refused("vote.json", "damaged", ADVICE):
        read_record(tmp_path / "vote.json", ADVICE)


@pytest.mark.parametrize("how", ["a table", "a flipped bit", "a folder"])
def test_damaged_memory_of_machines_counts_as_another_machine(tmp_path, how):
    Machines(tmp_path, {"torch": "1"}).begin(1, 0)
    assert Machines(tmp_path, {"torch": "1"}).difference(1, 20) is None
    damage(tmp_path / "machines.json", how)
    assert "machines.json" in (Machines(tmp_path, {"torch": "1"}).difference(1, 20) or "")


def test_damaged_confirmations_of_keys_and_data_trust_nobody_and_say_how_to_confirm_again(tmp_path):
    for name, read in (
        ("trusted.json", lambda: trust(tmp_path, "b", "ab" * 12)),
        ("accepted.json", lambda: unaccepted(tmp_path, {"b": ["age: 10 times as large"]})),
        ("status.json", lambda: live_status(tmp_path)),
        ("keys.json", lambda: KnownKeys(tmp_path, lambda *event, **fields: None)),
    ):
        (tmp_path / name).write_text("{}")
        with refused(name, "damaged"):
            read()
        (tmp_path / name).unlink()


# Every file of a site whose run was stopped


class Outcome(NamedTuple):
    """How a start of a node ended: with a sentence of its own, or waiting for its neighbours, with what it logged."""

    refusal: str
    said: str


def started(site: Path) -> Outcome:
    """Starts a node whose neighbours are down; it reads all its files before it waits for them."""
    log, refusal = io.StringIO(), ""
    try:
        run_node(site / "site.toml", patience_s=0.2, stream=log)
    except Interrupted:
        pass
    except FairmeshError as error:
        refusal = str(error)
    return Outcome(refusal, log.getvalue())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """Folders of a site of a run that was stopped: in the middle, after another site was voted out; and at the end,
    before all had their result."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    played("tests.mesh.test_damaged_files", str(folder))
    return folder


def play(folder: Path) -> None:
    with Run(folder, NAMES, EXPERIMENT) as run:
        for k, name in enumerate(NAMES):
            columns = {key: values[k::4] for key, values in clinic(480).items() if key != "where"}
            write(folder / name / "rows.csv", columns)
            fleet.settle(folder / name, data={"name": "table", "file": "rows.csv", "target": "ill"})
        run.start("a", "b", "d")
        waits = [waits_at(14, folder / "go"), waits_at(26, folder / "never")]
        run.start("c", observe=lambda point, at: [wait(point, at) for wait in waits])
        run.until(lambda: run.round("b") >= 12)
        run.crash("d")
        run.vote(*THERE, out=["d"])
        (folder / "go").touch()
        run.until(lambda: all(run.events(name, "continuing") for name in THERE))
        run.until(lambda: run.round("a") >= 22)
        for name in THERE:
            run.crash(name)
        shutil.copytree(folder / "a", folder / "middle")

        def ends(point: str, at: int) -> None:
            if point == "result written":
                os.kill(os.getpid(), 9)

        run.start("a", observe=ends)
        run.start("b", "c")
        run.dies("a")
        shutil.copytree(folder / "a", folder / "end")


# What a node only writes, or reads only when the run of an earlier generation is gone back to. Of a summary it reads
# nothing that counts, and in mesh.toml addresses may change.
ONLY_WRITTEN = (
    "*.csr", "state/lock", "state/log.jsonl", "state/status.json", "state/progress/*", "state/metrics-generation-*",
    "state/generation-1/*", "state/local/*", "state/personal/*", "state/result/experiment.toml",
    "state/result/preprocessing.json", "state/result/summary.json", "mesh.toml",
)  # fmt: skip


def files_of(site: Path) -> list[Path]:
    """All files of a site, relative to its folder; of those that differ by a number, the first and the last."""
    every: dict[str, list[Path]] = {}
    for path in sorted(path.relative_to(site) for path in site.rglob("*") if path.is_file()):
        every.setdefault(re.sub(r"[\d-]+[0-9a-f]*(?=\.)", "", str(path)), []).append(path)
    return [path for alike in every.values() for path in dict.fromkeys((alike[0], alike[-1]))]


def is_said(outcome: Outcome, path: Path) -> bool:
    """Whether a node that goes on has named the file, or its folder, in its log."""
    events = " ".join(json.dumps(event) for event in map(json.loads, outcome.said.splitlines()))
    named = (path.name, f'"{path.parent.name}"', f"/{path.parent.name}/")
    return any(part in events for part in (named[:1] if path.parent.name == "state" else named))


def take_the_way(site: Path, path: Path, intact: Path, refusal: str) -> None:
    """Does what a refusal says. Whoever has no backup takes the other way that it names."""
    file = SiteFile.read(intact / "site.toml")
    if "mesh restore" in refusal:
        mesh = Mesh.read(intact / "mesh.toml")
        present = ledger.still_in(site / "state", mesh, is_lost=True)
        ledger.wish(site / "state", present, file.name, [], None, [file.name])
    elif "vote again" in refusal:
        ledger.wish(site / "state", ledger.still_in(site / "state", Mesh.read(intact / "mesh.toml")), "a", [])
    elif "move" in refusal and "away" in refusal:
        (site / path).rename(site / f"{path.name}.away")
        if "--approve" in refusal:
            fleet.approve_at(site)
    else:  # from a backup, or from the founder
        if (site / path).is_dir():
            (site / path).rmdir()
        shutil.copy2(intact / path, site / path)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["middle", "end"])
def test_every_damaged_file_is_made_again_or_named_with_a_way_that_works(stopped, tmp_path, where):
    intact, site = stopped / where, tmp_path / "site"
    assert started(shutil.copytree(intact, tmp_path / "whole")).refusal == ""
    wrong, tried_ways = [], set[str]()
    before = files_of(stopped / "middle") if where == "end" else []
    for k, path in enumerate(path for path in files_of(intact) if path not in before):
        every = 3 if path.suffix in (".json", ".jsonl") else 5
        for how in list(DAMAGES)[k % every :: every]:
            if how == "empty" and path.name.startswith("journal-"):  # as after a power cut
                continue
            shutil.rmtree(site, ignore_errors=True)
            shutil.copytree(intact, site)
            damage(site / path, how)
            if (site / path).is_file() and (site / path).read_bytes() == (intact / path).read_bytes():
                continue
            try:
                outcome = started(site)
            except Exception as error:
                wrong.append(f"{path}, {how}: {type(error).__name__}: {error}")
                continue
            if outcome.refusal:
                named = (path.name, "data of this site", "secret of the draws")  # the last two by what they hold
                if not any(name in outcome.refusal for name in named):
                    wrong.append(f"{path}, {how}: does not name it: {outcome.refusal[:300]}")
                if str(path) not in tried_ways:
                    tried_ways.add(str(path))
                    with suppress(IsADirectoryError):
                        take_the_way(site, path, intact, outcome.refusal)
                        again = started(site).refusal
                        if again:
                            wrong.append(f"{path}, {how}: the way does not work: {outcome.refusal} / {again}")
            elif not is_said(outcome, path) and not any(fnmatch.fnmatch(str(path), form) for form in ONLY_WRITTEN):
                wrong.append(f"{path}, {how}: goes on and says nothing")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_site_whose_files_are_damaged_is_restored_by_its_neighbours_as_its_refusals_say(tmp_path):
    with Run(tmp_path, THERE, EXPERIMENT.replace("nodes = 4", "nodes = 3")) as run:
        for k, name in enumerate(THERE):
            columns = {key: values[k::3] for key, values in clinic(240).items() if key != "where"}
            write(tmp_path / name / "rows.csv", columns)
            fleet.settle(tmp_path / name, data={"name": "table", "file": "rows.csv", "target": "ill"})
        run.start("a", "b")
        run.start("c", observe=waits_at(20, tmp_path / "go"))
        run.until(lambda: run.round("c") >= 18)
        run.crash("c")
        state = tmp_path / "c" / "state"
        # Each is read before the one that is damaged already.
        for name in ("start.safetensors", "outputs.json", "preprocessing.json", "facts.json", "decisions.json"):
            damage(state / name, "cut in half")
            run.start("c")
            run.ended("c")
            said = (tmp_path / "c.log").read_text().splitlines()[-1]
            assert missing_from(said, "BadInput", name, "damaged", "backup", "fairmesh mesh restore") == [], name
        run.vote(*THERE, restored=["c"])
        (tmp_path / "go").touch()
        run.start("c")
        run.end(*THERE)
        assert run.events("c", "this site's state was restored from its neighbours")


if __name__ == "__main__":
    import sys

    play(Path(sys.argv[1]))
