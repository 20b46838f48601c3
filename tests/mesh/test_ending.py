"""A result is confirmed when all sites have announced the same one, and their own metrics as it has them."""

import json
from types import SimpleNamespace

import pytest

from fairmesh.mesh.node.ending import Announced, result_digest
from tests.refusals import missing_from

NAMES = ("a", "b", "c")
ACCURACIES, LOSSES = [0.9, 0.8, 0.7], [0.1, 1 / 3, None]  # a loss that is not finite is null


class Board:
    """A bulletin that keeps what sites announce."""

    def __init__(self):
        self.said = {}

    def announce(self, kind, body, number):
        self.said[self.who] = json.loads(json.dumps(body))

    def of_all(self, kind):
        return self.said


def member(name, generation=1):
    mesh = SimpleNamespace(generation=generation, present=[SimpleNamespace(name=one) for one in NAMES])
    return SimpleNamespace(name=name, mesh=mesh)


def written(folder, accuracies=ACCURACIES, model=b"model"):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(model)
    (folder / "model-time-average.safetensors").write_bytes(b"average")
    record = {"round": 7, "accuracy": {"worst": 0.7, "sites": accuracies}, "loss": {"sites": LOSSES}, "bytes_total": 1}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return folder


@pytest.fixture
def results(tmp_path):
    """The announced results of three sites that agree."""
    return {name: Announced.read(written(tmp_path / name), member(name)) for name in NAMES}


def announced(results, **others):
    board = Board()
    for name, result in (results | others).items():
        board.who = name
        result.announce(board, member(name))
    return board


def test_result_that_all_sites_announced_is_confirmed(results):
    board = announced(results)
    assert [results[name].compared(board, member(name)) for name in NAMES] == 3 * [([], {})]


def test_sites_that_have_announced_nothing_yet_are_named(results):
    board = announced(results)
    del board.said["b"]
    board.said["c"]["generation"] = 0  # of the mesh before a site left
    assert results["a"].compared(board, member("a")) == (["b", "c"], {})


def test_another_model_at_one_site_is_named_by_all(results, tmp_path):
    other = Announced.read(written(tmp_path / "other", model=b"another"), member("c"))
    board = announced(results, c=other)
    silent, apart = results["a"].compared(board, member("a"))
    assert (silent, list(apart)) == ([], ["c"])
    assert missing_from(apart["c"], "digest", other.digest[:16], results["a"].digest[:16]) == []
    assert list(other.compared(board, member("c"))[1]) == ["a", "b"]


def test_forged_accuracy_of_a_third_site_is_named(results, tmp_path):
    """The root gives everybody but b a sum in which b is worse than it is."""
    forged = {name: Announced.read(written(tmp_path / f"f-{name}", [0.9, 0.1, 0.7]), member(name)) for name in "ac"}
    _, apart = forged["a"].compared(announced(results, **forged), member("a"))
    assert list(apart) == ["b"]
    assert missing_from(apart["b"], "accuracy", "0.8", "0.1", "digest") == []


def test_digest_covers_models_and_numbers(tmp_path):
    folder = written(tmp_path / "result")
    before = result_digest(folder)
    for file in ("model.safetensors", "model-time-average.safetensors", "metrics.jsonl"):
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content + b" ")
        assert result_digest(folder) != before
        (folder / file).write_bytes(content)
    assert result_digest(folder) == before
