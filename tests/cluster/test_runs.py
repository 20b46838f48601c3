"""A run over ranks leaves what a simulation leaves, goes on wherever it was begun, and fails with one voice."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.storage.run_folder import CHECKPOINT
from tests.cluster.rank import ONE_OF_EACH_KIND, check_case
from tests.cluster.runs import CASES, DAMAGED, FEW_ROUNDS, PART, ROUNDS, ends, trained
from tests.pairwise import case as case_of


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
            for kind in ("model", "site")
            for path in folder.glob(f"{kind}*.safetensors")
        },
        "summary": summary,
    }


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """What a simulation of a case leaves and returns."""
    folder = tmp_path_factory.mktemp("simulated")

    @functools.cache
    def of(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
        result = ends(trained(case, folder / case))
        return left(folder / case), result

    return of


on_two_ranks_and_three = pytest.mark.parametrize(
    "clustered", [case_of(2, id="two ranks"), case_of(3, id="three ranks", quick=False)], indirect=True
)
every_case = pytest.mark.parametrize(
    ("clustered", "case"),
    [
        case_of(2, "ad-gda", id="two ranks"),
        *(case_of(3, case, id=f"three ranks-{case}", quick=False) for case in CASES),
    ],
    indirect=["clustered"],
)


def ranks_of(clustered: Path) -> list[dict[str, Any]]:
    """What each rank found in the first step."""
    found = [torch.load(path) for path in sorted(clustered.glob("first-*.pt"))]
    assert len(found) == (2 if clustered.name == "two ranks" else 3)
    return found


@on_two_ranks_and_three
@pytest.mark.parametrize("case", ONE_OF_EACH_KIND)
def test_cluster_ends_where_the_simulator_ends(clustered, case):
    check_case(clustered, len(ranks_of(clustered)), FEW_ROUNDS, case)


@every_case
def test_cluster_run_leaves_what_a_simulation_leaves(simulated, clustered, case):
    alike(left(clustered / f"{case} on ranks"), simulated(case)[0])


@every_case
def test_cluster_run_gives_every_rank_the_averages_over_all_nodes(simulated, clustered, case):
    for there in ranks_of(clustered):
        for name, tensor in simulated(case)[1].items():
            assert float((there[case][name] - tensor).abs().max()) < 1e-10, name


@every_case
def test_cluster_run_goes_on_with_what_was_begun_in_memory(simulated, clustered, case):
    alike(left(clustered / f"{case} simulated"), simulated(case)[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_cluster_run_begun_over_three_ranks_goes_on_over_two(simulated, clustered, case):
    alike(left(clustered / f"{case} begun"), simulated(case)[0])


@every_case
def test_cluster_run_goes_on_in_memory_and_then_needs_one_file(simulated, clustered, tmp_path, case):
    folder = tmp_path / "run"
    shutil.copytree(clustered / f"{case} alone", folder)
    assert len(list(folder.glob("checkpoint*"))) == len(ranks_of(clustered))
    trained(case, folder, resume=True)
    alike(left(folder), simulated(case)[0])
    assert [path.name for path in folder.glob("checkpoint*")] == [CHECKPOINT]


@on_two_ranks_and_three
def test_cluster_run_resumed_on_as_many_ranks_ends_bit_identical(clustered):
    one, other = clustered / "ad-gda on ranks", clustered / "ad-gda continued"
    assert left(one) == left(other)
    for path in one.glob("checkpoint*"):
        here, there = load_file(path), load_file(other / path.name)
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in here)


@on_two_ranks_and_three
def test_checkpoint_of_a_cluster_is_the_newest_one_file_per_rank(clustered):
    names = {path.name for path in (clustered / "ad-gda on ranks").glob("checkpoint*")}
    others = range(1, len(ranks_of(clustered)))
    assert names == {CHECKPOINT, *(f"checkpoint-{ROUNDS}-{rank}.safetensors" for rank in others)}


@on_two_ranks_and_three
@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("diverged", "Diverged", "round"),
        ("metric", "BadInput", "'mine'"),
        ("memory", "BadInput", "1 of 4 replicas"),
        ("folder", "BadInput", "ad-gda on ranks"),
        ("option", "BadInput", "own_models"),
    ],
)
def test_refusal_of_one_rank_is_that_of_all_and_the_first_tells(clustered, what, kind, words):
    found = [rank["refusals"][what] for rank in ranks_of(clustered)]
    assert {(kind_, text) for kind_, text, _ in found} == {(kind, found[0][1])}
    assert words in found[0][1]
    assert [told for _, _, told in found] == [False] + [True] * (len(found) - 1)


@on_two_ranks_and_three
@pytest.mark.parametrize("what", DAMAGED)
def test_shard_that_is_damaged_or_missing_is_refused_by_name(clustered, what):
    shard = f"{what}/checkpoint-{PART}-{len(ranks_of(clustered)) - 1}.safetensors"
    with pytest.raises(fm.errors.CheckpointError) as refused:  # in memory
        trained("ad-gda", clustered / what, resume=True)
    assert shard in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("what", DAMAGED)
def test_shard_that_is_damaged_or_missing_is_refused_by_name_on_other_ranks(clustered, what):
    for rank in range(2):
        kind, text, _ = torch.load(clustered / f"second-{rank}.pt")[what]
        assert kind == "CheckpointError"
        assert f"{what}/checkpoint-{PART}-2.safetensors" in text
