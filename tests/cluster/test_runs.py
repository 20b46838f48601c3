"""A run over ranks leaves what a simulation leaves, goes on wherever it was begun, and fails with one voice."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fairmesh.storage.run_folder import CHECKPOINT
from tests.cluster.runs import CASES, PART, ends, trained


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, inner in enumerate(value) for k, v in flat(inner, f"{path}[{i}]").items()}
    return {path: value}


def alike(one: Any, other: Any) -> None:
    """The same names and numbers, fractions to 1e-10, whole numbers (bytes) exactly."""
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, float):
            assert value == pytest.approx(other[name], rel=0, abs=1e-10), name
        else:
            assert value == other[name], name


def left(folder) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    del summary["seconds"]
    return {
        "metrics": [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        "models": {
            path.name: {name: tensor.flatten().tolist() for name, tensor in load_file(path).items()}
            for path in folder.glob("model*.safetensors")
        },
        "summary": summary,
    }


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Of each case what a simulation leaves and returns."""
    folder = tmp_path_factory.mktemp("simulated")
    found = {case: ends(trained(case, folder / case)) for case in CASES}
    return {case: (left(folder / case), result) for case, result in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_run_over_ranks_leaves_what_a_simulation_leaves(simulated, clustered, case):
    alike(left(clustered / f"{case} on ranks"), simulated[case][0])


@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_the_averages_over_all_nodes(simulated, clustered, case):
    for rank in range(3):
        there = torch.load(clustered / f"first-{rank}.pt")[case]
        for name, tensor in simulated[case][1].items():
            assert float((there[name] - tensor).abs().max()) < 1e-10, name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("begun", ["begun", "simulated"], ids=["by three ranks, on two", "in memory, on three ranks"])
def test_a_run_goes_on_at_another_number_of_ranks_than_it_was_begun(simulated, clustered, case, begun):
    alike(left(clustered / f"{case} {begun}"), simulated[case][0])


@pytest.mark.parametrize("case", CASES)
def test_a_run_begun_over_ranks_goes_on_in_memory_and_then_needs_one_file(simulated, clustered, tmp_path, case):
    folder = tmp_path / "run"
    shutil.copytree(clustered / f"{case} alone", folder)
    assert len(list(folder.glob("checkpoint*"))) == 3
    trained(case, folder, resume=True)
    alike(left(folder), simulated[case][0])
    assert [path.name for path in folder.glob("checkpoint*")] == [CHECKPOINT]


def test_resumed_on_as_many_ranks_it_ends_bit_identical(clustered):
    one, other = clustered / "ad-gda on ranks", clustered / "ad-gda continued"
    assert left(one) == left(other)
    for path in one.glob("checkpoint*"):
        here, there = load_file(path), load_file(other / path.name)
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in here)


def test_only_the_newest_checkpoint_is_kept_one_file_a_rank(clustered):
    names = {path.name for path in (clustered / "ad-gda on ranks").glob("checkpoint*")}
    assert names == {CHECKPOINT, "checkpoint-30-1.safetensors", "checkpoint-30-2.safetensors"}


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("diverged", "Diverged", "exploded model"),
        ("metric", "BadInput", "metric 'mine' failed"),
        ("memory", "BadInput", "only 1 of 4 replicas fit at once"),
        ("folder", "BadInput", "is not empty; resume it"),
        ("option", "BadInput", "have no models of their own"),
    ],
)
def test_what_one_rank_refuses_all_refuse_and_the_first_tells(clustered, what, kind, words):
    found = [torch.load(clustered / f"first-{rank}.pt")["refusals"][what] for rank in range(3)]
    assert {(kind_, text) for kind_, text, _ in found} == {(kind, found[0][1])}
    assert words in found[0][1]
    assert [told for _, _, told in found] == [False, True, True]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("cut short", "is damaged"),
        ("missing", "is missing"),
        ("of another round", "is not the one that"),
    ],
)
def test_a_damaged_or_missing_shard_is_refused_by_name(clustered, what, words):
    for rank in range(2):
        kind, text, _ = torch.load(clustered / f"second-{rank}.pt")[what]
        assert kind == "CheckpointError"
        assert f"{what}/checkpoint-{PART}-2.safetensors {words}" in text
