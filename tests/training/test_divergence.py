"""A run that diverges stops, names node, rounds and step size, and keeps its last good checkpoint."""

import json
import math
import re

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F

import fairmesh as fm
from fairmesh.storage.run_folder import CHECKPOINT
from tests.refusals import missing_from, refused
from tests.toys import FEATURES, problem

REGRESSION = fm.Problem(
    nn.Linear(FEATURES, 1),
    [
        fm.Site((torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(i)), torch.ones(20, 1)), name=name)
        for i, name in enumerate(["Lyon", "Oslo", "Rome"])
    ],
    loss=F.mse_loss,
    sampling=fm.Sampling(order="full"),
)
HUGE = fm.algorithms.DSGD(primal_step=20.0)  # grows some tenfold a round


def test_huge_step_stops_the_run_with_rounds_node_quantity_and_what_to_lower(tmp_path):
    with pytest.raises(fm.errors.Diverged) as caught:
        fm.train(REGRESSION, fm.Ring(), HUGE, 400, measure_every=1, checkpoint_every=2, out=tmp_path / "run")
    message = str(caught.value)
    before, done, *_, kept = map(int, re.findall(r"\d+", message))
    assert (done, kept) == (before + 1, before // 2 * 2)
    assert any(f"node {i} ({name})" in message for i, name in enumerate(["Lyon", "Oslo", "Rome"]))
    assert missing_from(message, "exploded", "norm", "primal_step", 20, "checkpoint") == []


def test_last_good_checkpoint_is_sound_and_can_be_resumed_from(tmp_path):
    with pytest.raises(fm.errors.Diverged) as caught:
        fm.train(REGRESSION, fm.Ring(), HUGE, 400, measure_every=1, checkpoint_every=2, out=tmp_path / "run")
    kept = int(re.findall(r"\d+", str(caught.value))[-1])
    with safe_open(tmp_path / "run" / CHECKPOINT, framework="pt") as file:
        assert file.metadata()["round"] == str(kept)
        assert all(torch.isfinite(file.get_tensor(name)).all() for name in file.keys())  # noqa: SIM118
    with pytest.warns(UserWarning, match="constant answer"):  # it has diverged, though its numbers are finite
        result = fm.train(REGRESSION, fm.Ring(), HUGE, kept, measure_every=1, out=tmp_path / "run", resume=True)
    assert result.above_constant == [0]
    assert math.isfinite(result.final[0]["loss"]["worst"])
    assert result.final[0]["round"] == kept


def test_divergence_between_measurements_is_not_checkpointed(tmp_path):
    with refused("checkpoint", "round 0", error=fm.errors.Diverged):
        fm.train(REGRESSION, fm.Ring(), HUGE, 400, measure_every=400, checkpoint_every=30, out=tmp_path / "run")
    with safe_open(tmp_path / "run" / CHECKPOINT, framework="pt") as file:
        assert file.metadata()["round"] == "0"


def test_run_without_a_folder_diverges_with_the_same_words_and_no_checkpoint():
    with refused("node", "primal_step", 20, error=fm.errors.Diverged) as caught:
        fm.train(REGRESSION, fm.Ring(), HUGE, 400, measure_every=1)
    assert "checkpoint" not in str(caught.value)


def test_divergence_stops_early_though_measurements_are_rare():
    seen = []
    with refused("rounds 0", 50, error=fm.errors.Diverged):
        fm.train(
            REGRESSION, fm.Ring(), HUGE, 5000, measure_every=5000, observers=[lambda done, state: seen.append(done)]
        )
    assert max(seen) == 49


def test_non_finite_model_is_called_so():
    with refused("non-finite", "norm nan", error=fm.errors.Diverged):
        fm.train(REGRESSION, fm.Ring(), fm.algorithms.DSGD(primal_step=1e18), 50, measure_every=50)


def test_compressed_algorithms_are_told_to_lower_the_rate_with_their_delta():
    compressor = fm.compressors.TopK(0.5)
    algorithm = fm.ADGDA(primal_step=1e4, dual_step=0.01, consensus_step=0.7, compressor=compressor)
    with pytest.raises(fm.errors.Diverged) as caught:
        fm.train(REGRESSION, fm.Ring(), algorithm, 100)
    message = str(caught.value)
    assert missing_from(message, "primal_step", 10000, "dual_step", 0.01, "consensus_step", 0.7) == []
    assert f"delta = {compressor.delta(7):.3g}" in message


def test_diverged_replica_is_named_by_number_and_seed():
    pair = [fm.algorithms.DSGD(primal_step=step) for step in (0.05, 20.0)]
    with refused("replica 1", "seed 4", "node", error=fm.errors.Diverged):
        fm.train(REGRESSION, fm.Ring(), pair, 60, seeds=(4,), measure_every=5)


def test_marking_lets_the_others_go_on_and_reports_which_diverged(tmp_path):
    steps = [fm.algorithms.DSGD(primal_step=step) for step in (0.05, 20.0, 0.1)]
    marked = fm.train(
        REGRESSION, fm.Ring(), steps, 60, measure_every=20, on_divergence="mark", dtype="float64", out=tmp_path / "run"
    )
    assert marked.diverged == [1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["diverged"] == [1]
    for r in (0, 2):
        alone = fm.train(REGRESSION, fm.Ring(), steps[r], 60, measure_every=20, dtype="float64")
        assert torch.allclose(marked.row()[r], alone.row()[0], rtol=0, atol=1e-12)
        assert marked.final[r]["loss"]["worst"] == pytest.approx(alone.final[0]["loss"]["worst"], rel=1e-10)


def test_sound_run_marks_nobody():
    assert fm.train(problem(3), fm.Ring(), fm.algorithms.DSGD(), 3, on_divergence="mark").diverged == []


def test_large_but_steady_model_is_no_divergence():
    big = nn.Linear(FEATURES, 1)
    nn.init.constant_(big.weight, 3e6)
    made = fm.Problem(big, list(REGRESSION.sites), loss=F.mse_loss, sampling=fm.Sampling(order="full"))
    assert fm.train(made, fm.Ring(), fm.algorithms.DSGD(primal_step=0.01), 3, measure_every=1).rounds == 3


def test_model_that_starts_from_zero_may_grow():
    zero = nn.Linear(FEATURES, 1)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    made = fm.Problem(zero, list(REGRESSION.sites), loss=F.mse_loss, sampling=fm.Sampling(order="full"))
    assert fm.train(made, fm.Ring(), fm.algorithms.DSGD(primal_step=0.01), 3, measure_every=1).row().norm() > 0


@pytest.mark.parametrize(("bits", "nodes"), [(4, 8), (8, 20)], ids=["few counters", "many counters"])
@pytest.mark.quick_cases(1)
def test_replica_beside_one_that_turns_into_nan_gives_the_bits_it_gives_alone(bits, nodes):
    generator = torch.Generator().manual_seed(0)
    sites = [fm.Site((torch.randn(5, 6, generator=generator), torch.arange(5) % 3)) for _ in range(nodes)]
    problem = fm.Problem(torch.nn.Linear(6, 3), sites, sampling=fm.Sampling(3))
    algorithms = [
        fm.ChocoSGD(step, consensus_step=0.3, compressor=fm.compressors.Quantize(bits)) for step in (0.1, 1e38)
    ]
    both = fm.train(problem, fm.Ring(), algorithms, 40, on_divergence="mark")
    assert both.diverged == [1]
    assert not both.row()[1].isfinite().all()
    alone = fm.train(problem, fm.Ring(), algorithms[0], 40)
    assert torch.equal(both.row()[0], alone.row()[0])
    assert both.final[0]["bytes_total"] == alone.final[0]["bytes_total"]
