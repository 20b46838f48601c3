"""One site of twenty that lies: the experiment runs, and its record says what the documents say."""

import json

import pytest

import fairmesh as fm
from fairmesh.storage.strict_json import as_json
from reproduction.frontier import lies
from reproduction.verdicts import RECORDED

RECORD = RECORDED / "frontier_lies.jsonl"
LINES = {line["row"]: line for line in map(json.loads, RECORD.read_text().splitlines())}


def mean(row: str, what: str = "worst_honest") -> float:
    return sum(LINES[row][what]) / len(LINES[row][what])


def test_a_miniature_gives_every_row_as_plain_values(monkeypatch):
    monkeypatch.setattr(lies, "DATA", {"digits": fm.data.Digits(nodes=20, split="class")})
    said: list[str] = []
    lines = lies.lines(said.append, miniature=True)
    assert json.loads(as_json(lines)) == lines
    assert [line["row"].removeprefix("digits, ") for line in lines] == [
        row.removeprefix("MNIST, ") for row in LINES if row.startswith("MNIST")
    ]
    assert said[0] == "digits, 20 nodes"
    for line in lines:
        assert len(line["worst_honest"]) == len(line["mean_honest"]) == len(line["weight_of_corrupted"]) == 1
        assert ("one lies" in line["row"]) == (line["settings"]["data"]["name"] == "corrupted")


@pytest.mark.parametrize("name", lies.DATA)
def test_one_liar_takes_most_of_the_weight_and_hurts_the_honest_and_a_cap_keeps_both_from_happening(name):
    weight = mean(f"{name}, one lies: AD-GDA", "weight_of_corrupted")
    held = mean(f"{name}, one lies: AD-GDA, capped weights", "weight_of_corrupted")
    assert weight > 0.5 > 0.2 > held
    assert mean(f"{name}, one lies: AD-GDA") < mean(f"{name}, nobody lies: AD-GDA") - 3
    assert mean(f"{name}, one lies: AD-GDA, capped weights") > mean(f"{name}, one lies: AD-GDA") + 3


@pytest.mark.parametrize("row", LINES)
def test_the_record_is_of_the_experiment_as_it_is(row):
    settings = LINES[row]["settings"]
    assert settings["rounds"] == lies.ROUNDS
    assert settings["seeds"] == list(lies.SEEDS)
    if "AD-GDA" in row:
        algorithm = settings["algorithm"]
        level = algorithm["regularizer"].get("level")
        tried = settings.get("held_out_level")
        assert level is None or level == float(max(tried, key=lambda value: tried[value]))
