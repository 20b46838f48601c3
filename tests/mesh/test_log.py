"""The log of a node: of bounded size, and never cut without saying so."""

import io
import json
from contextlib import closing

import pytest

from fairmesh.mesh.node import watching
from fairmesh.mesh.node.watching import Log


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(watching, "_LOG_BYTES", 3000)
    with closing(Log(tmp_path, io.StringIO())) as log:
        yield log


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_small_log_has_every_line_and_no_other(small, tmp_path):
    small("info", "started", fairmesh="1")
    small("info", "measured", round=1)
    assert [line["what"] for line in _lines(tmp_path / "log.jsonl")] == ["started", "measured"]


def test_log_that_was_cut_says_so_in_its_first_line_and_repeats_what_must_last(small, tmp_path):
    small("info", "started", fairmesh="1", manifest="ab12")
    small("warning", "vote", site="b", decision="continue without c")
    for k in range(300):
        small("info", "measured", round=k)
    small("warning", "decided", decision="continue without c")
    for k in range(300):
        small("info", "measured", round=k)
    newest = _lines(tmp_path / "log.jsonl")
    assert newest[0]["what"] == "the log continues"
    assert newest[0]["file"] == "log.jsonl.1"
    oldest = _lines(tmp_path / "log.jsonl.3")
    assert f"complete since {oldest[0]['time']}" in newest[0]["reason"]
    assert [line["what"] for line in newest[1:4]] == ["started", "vote", "decided"]
    assert newest[1]["manifest"] == "ab12"
    assert all(line["repeated"] for line in newest[1:4])
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["log.jsonl", "log.jsonl.1", "log.jsonl.2", "log.jsonl.3"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4 * 3000 + 2000


def test_many_votes_neither_fill_every_file_nor_push_out_what_else_must_last(small, tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "_LASTING_AT_MOST", 5)
    small("info", "started", fairmesh="1")
    small("warning", "a site contradicts itself", site="b")
    for k in range(200):
        small("warning", "vote", site="b", decision=f"go back to round {k}")
    repeated = [line["what"] for line in _lines(tmp_path / "log.jsonl") if line.get("repeated")]
    assert repeated == ["started", "a site contradicts itself", "vote", "vote", "vote"]
