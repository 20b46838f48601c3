"""A batch of replicas gives what each gives alone; time averages, kept iterates and saved runs are per replica."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch

import fairmesh as fm
from fairmesh.networks.roles import StateView
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import random_placement, replicas_of
from tests import toys
from tests.contracts.battery import same_bits, state_bits
from tests.pairwise import case, some_quick
from tests.refusals import refused

every_algorithm = pytest.mark.parametrize("algorithm", toys.ALGORITHMS.values(), ids=toys.ALGORITHMS)
some_algorithms = some_quick("algorithm", toys.ALGORITHMS, "ad-gda", "drfa", "tracked")


@pytest.fixture(scope="module")
def problem() -> fm.Problem:
    return toys.problem()


@pytest.mark.parametrize("inner", ["chi-square", "kl", "none", "own-coordinate"])
def test_replicas_may_differ_in_the_cap_on_weights_and_in_that_on_losses(problem, inner):
    algorithms = [
        fm.ADGDA(1.0, 0.2, 0.4, regularizer=fm.regularizers.Capped(level, toys.REGULARIZERS[inner]), loss_cap=cap)
        for level, cap in ((0.3, 1.5), (0.9, 0.8))
    ]
    batch = fm.train(problem, fm.Ring(), algorithms, 6, dtype="float64")
    for r, algorithm in enumerate(algorithms):
        alone = fm.train(problem, fm.Ring(), algorithm, 6, dtype="float64")
        assert float((batch.state.algorithm.duals[r] - alone.state.algorithm.duals[0]).abs().max()) < 1e-12
    assert float((batch.state.algorithm.duals[0] - batch.state.algorithm.duals[1]).abs().max()) > 1e-4


def test_placement_moves_data_and_not_random_streams(problem):
    """Node i of a placement draws for identity i, on the data of site placement[i]."""
    placement = random_placement(4, 8)
    moved = dataclasses.replace(problem, sites=[problem.sites[i] for i in placement])
    for name in ("ad-gda", "drfa"):
        one = fm.train(problem, fm.Ring(), toys.ALGORITHMS[name], 5, placements=[placement], dtype="float64")
        other = fm.train(moved, fm.Ring(), toys.ALGORITHMS[name], 5, dtype="float64")
        assert same_bits(state_bits(one.state.algorithm), state_bits(other.state.algorithm))


def test_replicas_that_differ_in_participation_are_refused(problem):
    with refused("participation"):
        fm.train(problem, fm.Ring(), [fm.algorithms.DRFA(participation=0.5), fm.algorithms.DRFA(participation=0.25)], 2)


# Time averages -------------------------------------------------------------------------------------------------------


def _history(training: Training, rounds: int):
    """The states before rounds 0 .. T - 1, and the last."""
    states = [state for _, state in training.states(training.initial(), 0, rounds)]
    assert len(states) == rounds + 1
    return states[:-1], states[-1]


@some_algorithms
def test_time_averages_are_the_means_over_rounds_zero_to_t_minus_one(problem, algorithm):
    training = Training(problem, fm.Ring(), replicas_of([algorithm], (0, 1), None, 8), Options(dtype="float64"))
    past, last = _history(training, 9)
    models = torch.stack([state.algorithm.models.mean(dim=-2) for state in past])
    assert float((last.average_model - models.mean(dim=0)).abs().max()) < 1e-14
    shifted = torch.cat([models[1:], last.algorithm.models.mean(dim=-2)[None]]).mean(dim=0)  # t = 1 .. T
    assert float((last.average_model - shifted).abs().max()) > 1e-4
    view = StateView(last.algorithm)
    if view.duals(last.algorithm) is not None:
        duals = torch.stack([view.duals(state.algorithm).mean(dim=-2) for state in past])
        assert float((last.average_dual - duals.mean(dim=0)).abs().max()) < 1e-14
    else:
        assert last.average_dual is None


# Saved and resumed ---------------------------------------------------------------------------------------------------

SAVED = {"measure_every": 3, "checkpoint_every": 4, "keep_best": True, "seeds": (0, 1)}


@pytest.fixture(scope="module")
def validated() -> fm.Problem:
    made = toys.sites()
    return toys.problem(sites=[dataclasses.replace(site, validation=site.test) for site in made])


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(("model", "metrics"))}


OF_EACH_KIND = {  # every kind of state, and every weighting
    "ad-gda published", "ad-gda compressed duals", "choco-sgd", "dr-dsgd", "tracked", "tracked ascent",
    "tracked maximum", "tracked local", "drfa", "afl",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        *(case(name, "ring", quick=name in OF_EACH_KIND) for name in toys.ALGORITHMS),
        case("ad-gda", "changing"),
        case("dsgd", "changing", quick=False),
    ],
)
@pytest.mark.quick_cases(2)
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(validated, name, topology, tmp_path):
    algorithm, topology = toys.ALGORITHMS[name], toys.TOPOLOGIES[topology]
    whole = fm.train(validated, topology, algorithm, 12, out=tmp_path / "whole", **SAVED)

    fm.train(validated, topology, algorithm, 6, out=tmp_path / "extended", **SAVED)
    extended = fm.train(validated, topology, algorithm, 12, out=tmp_path / "extended", resume=True, **SAVED)

    def stop_once(done: int, _) -> None:
        if done == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with refused("5", "12", error=fm.errors.Interrupted):
        stopped = {"out": tmp_path / "stopped", "observers": [stop_once], "handle_signals": True}
        fm.train(validated, topology, algorithm, 12, **stopped, **SAVED)
    resumed = fm.train(validated, topology, algorithm, 12, out=tmp_path / "stopped", resume=True, **SAVED)

    for result, name in ((extended, "extended"), (resumed, "stopped")):
        assert same_bits(state_bits(result.state), state_bits(whole.state))
        assert result.records == whole.records
        assert _files(tmp_path / name) == _files(tmp_path / "whole")
    assert {"metrics.jsonl", "model.safetensors", "model-best.safetensors"} <= set(_files(tmp_path / "whole"))


def test_resumed_run_does_not_start_over(validated, tmp_path):
    seen: list[int] = []
    fm.train(validated, fm.Ring(), toys.ALGORITHMS["ad-gda"], 6, out=tmp_path, **SAVED)
    fm.train(
        validated,
        fm.Ring(),
        toys.ALGORITHMS["ad-gda"],
        12,
        out=tmp_path,
        resume=True,
        observers=[lambda done, _: seen.append(done)],
        **SAVED,
    )
    assert seen == list(range(6, 13))


def test_placements_by_seed_give_every_seed_one_of_its_own():
    replicas = replicas_of([fm.algorithms.DSGD(), fm.algorithms.DSGD(0.2)], [0, 3], "by-seed", 8)
    assert [replica.seed for replica in replicas] == [0, 3, 0, 3]
    assert [replica.placement for replica in replicas] == [random_placement(k, 8) for k in (0, 3)] * 2
    assert replicas[0].placement != replicas[1].placement
