"""Training code of the user's own over ranks: it gives what a simulation gives, ranks wait for a slow one and fail with
one voice, and finished work is not repeated. `python -m tests.cluster.test_local_trainer FOLDER RANK` is a rank."""

import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fairmesh as fm
from fairmesh.networks.cluster import Ranks
from fairmesh.training import long_work
from tests.cluster.runs import start_ranks
from tests.refusals import missing_from
from tests.trainers.test_local_trainer import FAULTS, adamw, problem_of, sgd_step

TIMEOUT_S = 4.0
ROUNDS = 4
NAMES = ("site-a", "site-b", "site-c")  # a and b at rank 0, c at rank 1


def noting(file: Path, then: Any) -> Any:
    """A function that notes what it begins in a file, and then does its work."""

    def train(module, data, ctx):
        with file.open("a") as lines:
            lines.write(f"{ctx.round} {ctx.site}\n")
        return then(module, data, ctx)

    return train


def slow_at_c(module, data, ctx):
    if (ctx.round, ctx.site) == (1, "site-c"):
        time.sleep(1.5 * TIMEOUT_S)
    return sgd_step(0.3)(module, data, ctx)


def failing_at_c(fault: Any) -> Any:
    def train(module, data, ctx):
        broken = (ctx.round, ctx.site) == (0, "site-c")
        return (fault if broken else adamw)(module, data, ctx)

    return train


def trained(trainer: Any, **more: Any) -> fm.Result:
    return fm.train(problem_of(trainer), fm.Ring(), fm.ChocoSGD(1.0), rounds=ROUNDS, dtype="float64", **more)


def rank(folder: Path, number: int) -> None:
    """What one of two ranks does."""
    long_work._FIRST_S = TIMEOUT_S / 2
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    (folder / f"started-{number}").touch()
    while len(list(folder.glob("started-*"))) < 2:  # on a busy machine one may need longer than the timeout
        time.sleep(0.05)
    dist.init_process_group(
        "gloo", init_method=meeting, rank=number, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    group, told = Ranks(timeout_s=TIMEOUT_S), []
    whole = trained(slow_at_c, process_group=group, announce=told.append)
    found: dict[str, Any] = {"models": whole.state.algorithm.models, "told": " ".join(told)}
    for fault in FAULTS:
        out = folder / fault.__name__
        try:
            trained(noting(folder / "begun", failing_at_c(fault)), process_group=group, out=out)
        except fm.errors.FairmeshError as error:
            found[fault.__name__] = [type(error).__name__, str(error)]
        mended = trained(noting(folder / "begun", adamw), process_group=group, out=out, resume=True)
        found[f"{fault.__name__} mended"] = mended.state.algorithm.models
    torch.save(found, folder / f"rank-{number}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks("test_local_trainer", 2, folder)
    return folder, [torch.load(folder / f"rank-{number}.pt") for number in range(2)]


@pytest.mark.slow
def test_ranks_wait_for_a_slow_function_longer_than_the_timeout_and_say_for_whom(ranks):
    _, found = ranks
    alone = trained(sgd_step(0.3)).state.algorithm.models
    assert (torch.cat([one["models"] for one in found], dim=1) - alone).abs().max() < 1e-12
    assert missing_from(found[0]["told"], "site-c", "round 1", "since") == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_ranks_fail_with_one_voice_and_resume(ranks, fault):
    _, found = ranks
    assert found[0][fault.__name__] == found[1][fault.__name__]
    kind, text = found[0][fault.__name__]
    assert kind == "TrainerFailed"
    assert missing_from(text, "site-c", "round 0", *FAULTS[fault]) == []
    alone = trained(adamw).state.algorithm.models
    mended = torch.cat([one[f"{fault.__name__} mended"] for one in found], dim=1)
    assert (mended - alone).abs().max() < 1e-12


@pytest.mark.slow
def test_ranks_do_not_repeat_finished_work_when_another_rank_fails(ranks):
    folder, _ = ranks
    begun = Counter((folder / "begun").read_text().splitlines())
    expected = {f"{t} {site}": len(FAULTS) for t in range(ROUNDS) for site in NAMES}
    assert begun == Counter(expected) + Counter({"0 site-c": len(FAULTS)})  # only what failed is done again


if __name__ == "__main__":
    rank(Path(sys.argv[1]), int(sys.argv[2]))
