"""The numbers in a record equal their definitions, recomputed here from the models in plain torch."""

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

import fairmesh as fm
from fairmesh.problems.evaluator import Evaluator
from fairmesh.training.best_round import RoundScores
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests.late import late
from tests.toys import CLASSES, problem, sites, small_model

sk = late("sklearn.metrics")

ALGORITHM = fm.ADGDA(primal_step=2.0, dual_step=0.1, consensus_step=0.4, compressor=fm.compressors.Quantize(bits=4))


def outputs_of(made: fm.Problem, row: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return functional_call(small_model().to(row.dtype), made.flat_model.parameters_of(row), (inputs.to(row.dtype),))


def accuracy_of(made: fm.Problem, row: torch.Tensor, samples) -> float:
    samples = fm.data.Samples.of(samples, "samples")
    return float((outputs_of(made, row, samples.inputs).argmax(dim=1) == samples.targets).double().mean())


def loss_of(made: fm.Problem, row: torch.Tensor, samples) -> float:
    samples = fm.data.Samples.of(samples, "samples")
    return float(F.cross_entropy(outputs_of(made, row, samples.inputs), samples.targets).detach())


def test_record_holds_every_sites_accuracy_and_loss_of_the_network_average():
    made = problem(5)
    result = fm.train(made, fm.Ring(), ALGORITHM, 7, measure_every=3, dtype="float64")
    assert [record["round"] for record in result.records] == [0, 3, 6, 7]
    row = result.state.algorithm.models.mean(dim=1)[0]
    assert torch.equal(result.row()[0], row)
    accuracies = [accuracy_of(made, row, site.test) for site in made.sites]
    losses = [loss_of(made, row, site.test) for site in made.sites]
    record = result.final[0]
    assert record["accuracy"]["sites"] == pytest.approx(accuracies, abs=1e-15)
    assert record["loss"]["sites"] == pytest.approx(losses, rel=1e-12)
    assert record["accuracy"]["worst"] == min(accuracies)
    assert record["accuracy"]["best"] == max(accuracies)
    assert record["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 5)
    assert record["accuracy"]["gap"] == pytest.approx(max(accuracies) - min(accuracies))
    assert record["loss"]["worst"] == pytest.approx(max(losses), rel=1e-12)
    assert record["loss"]["best"] == pytest.approx(min(losses), rel=1e-12)
    assert record["loss"]["gap"] == pytest.approx(max(losses) - min(losses), rel=1e-12)
    assert result.worst == record["accuracy"]["worst"]


def test_group_means_and_the_worst_group_are_those_of_their_sites():
    given = [fm.Site(s.train, s.test, group=g) for s, g in zip(sites(5), ["mri", "ct", "mri", "ct", "xray"])]
    result = fm.train(problem(5, sites=given), fm.Ring(), ALGORITHM, 4, measure_every=4)
    for metric, pick in (("accuracy", min), ("loss", max)):
        entry = result.final[0][metric]
        a, b, c, d, e = entry["sites"]
        groups = {"mri": (a + c) / 2, "ct": (b + d) / 2, "xray": e}
        assert entry["groups"] == pytest.approx(groups)
        assert entry["worst_group"] == pytest.approx(pick(groups.values()))
        assert result.values("worst_group", metric) == [entry["worst_group"]]


def test_site_without_a_group_is_its_own():
    given = [fm.Site(s.train, s.test, name="Lyon" if i == 1 else None) for i, s in enumerate(sites(3))]
    entry = fm.train(problem(3, sites=given), fm.Ring(), ALGORITHM, 1).final[0]["accuracy"]
    assert entry["groups"] == dict(zip(["node 0", "Lyon", "node 2"], entry["sites"]))


def test_shared_test_set_is_measured_once_and_is_equal_for_all():
    calls = []

    def counted(outputs, targets):
        calls.append(len(targets))
        return 0.5

    given = [fm.Site(s.train) for s in sites(6)]
    made = problem(6, sites=given, test=sites(1)[0].test, metrics={"half": counted})
    record = fm.train(made, fm.Ring(), ALGORITHM, 1, measure_every=5).final[0]
    assert calls == [10, 10]  # rounds 0 and 1, each once for six sites
    assert len(record["accuracy"]["sites"]) == 6
    assert len(set(record["accuracy"]["sites"])) == len(set(record["loss"]["sites"])) == 1


def test_sites_without_test_data_are_judged_on_their_training_data():
    made = problem(3, sites=[fm.Site(s.train) for s in sites(3)])
    result = fm.train(made, fm.Ring(), ALGORITHM, 2, dtype="float64")
    expected = [loss_of(made, result.row()[0], (s.train.inputs, s.train.targets)) for s in made.sites]
    assert result.final[0]["loss"]["sites"] == pytest.approx(expected, rel=1e-12)


def auc(outputs, targets):
    return sk.roc_auc_score(targets, outputs.softmax(dim=1), multi_class="ovr", labels=range(CLASSES))


def f1(outputs, targets):
    return sk.f1_score(targets, outputs.argmax(dim=1), average="macro", labels=range(CLASSES), zero_division=0.0)


def rich_sites(n: int = 3) -> list[fm.Site]:
    """Sites whose test sets hold every class."""
    given = sites(n, sizes=(60,) * n)
    return [fm.Site(s.train, test=s.train) for s in given]


def test_user_metrics_stand_in_the_records_beside_accuracy():
    made = problem(3, sites=rich_sites(), metrics={"auc": auc, "f1": f1})
    result = fm.train(made, fm.Ring(), ALGORITHM, 4, measure_every=4, own_models=True, dtype="float64")
    record, row = result.final[0], result.row()[0]
    for name, function in (("auc", auc), ("f1", f1)):
        expected = [function(outputs_of(made, row, s.test.inputs).detach(), s.test.targets) for s in made.sites]
        assert record[name]["sites"] == pytest.approx(expected, rel=1e-12)
        assert record[name]["worst"] == pytest.approx(min(expected))
        assert len(record["own_models"][name]["sites"]) == 3
    assert made.primary == "accuracy"


def test_users_accuracy_takes_the_place_of_ours_and_names_the_worst_site():
    made = problem(3, metrics={"accuracy": lambda outputs, targets: 0.25})
    result = fm.train(made, fm.Ring(), ALGORITHM, 1)
    assert result.final[0]["accuracy"]["sites"] == [0.25] * 3
    assert result.worst == 0.25


def test_large_sets_are_measured_in_pieces_that_add_up(monkeypatch):
    whole = fm.train(problem(3, sites=rich_sites(), metrics={"f1": f1}), fm.Ring(), ALGORITHM, 2, dtype="float64")
    monkeypatch.setattr("fairmesh.problems.evaluator._FLOATS_AT_ONCE", 50)  # eight samples of six features
    pieces = fm.train(problem(3, sites=rich_sites(), metrics={"f1": f1}), fm.Ring(), ALGORITHM, 2, dtype="float64")
    for metric in ("accuracy", "loss", "f1"):
        assert pieces.final[0][metric]["sites"] == pytest.approx(whole.final[0][metric]["sites"], rel=1e-12)


def test_own_models_judged_together_have_the_numbers_of_each_on_its_set_alone():
    sizes = (9, 12, 3, 15, 2, 14)  # four and two of them are alike, and are padded
    held = [(torch.randn(size, 4), torch.arange(size) % 3) for size in sizes]
    made = fm.Problem(torch.nn.Linear(4, 3), [fm.Site(held[0], test=test) for test in held]).prepared
    judge = Evaluator(made, "test", "cpu", torch.float64)
    placements = torch.stack([torch.randperm(len(sizes)) for _ in range(2)])
    assert sorted(map(len, judge._judged_together(placements))) == [2, 4]
    models = torch.randn(2, len(sizes), made.flat_model.dim, dtype=torch.float64)
    found = judge.of_own_models(models, placements)
    for r in range(2):
        each = [judge.of_sites(models[r, node, None]) for node in range(len(sizes))]
        for name in ("accuracy", "loss"):
            wanted = [float(each[node][name][0, site]) for node, site in enumerate(placements[r].tolist())]
            assert found[name][r].tolist() == pytest.approx(wanted, abs=1e-12)
    models[0, 1] = torch.nan
    assert judge.of_own_models(models, placements)["loss"].isnan().sum() == 1


def test_own_models_are_each_nodes_row_on_its_own_sites_data():
    made = problem(5)
    result = fm.train(made, fm.Ring(), ALGORITHM, 5, own_models=True, dtype="float64")
    models = result.state.algorithm.models[0]
    own = result.final[0]["own_models"]
    assert own["accuracy"]["sites"] == [accuracy_of(made, models[i], s.test) for i, s in enumerate(made.sites)]
    losses = [loss_of(made, models[i], s.test) for i, s in enumerate(made.sites)]
    assert own["loss"]["sites"] == pytest.approx(losses, rel=1e-12)
    assert own["loss"]["worst"] == pytest.approx(max(losses), rel=1e-12)
    assert own["loss"]["sites"] != result.final[0]["loss"]["sites"]


PLACEMENT = (2, 0, 3, 1)  # node 0 holds site 2


def test_metrics_own_models_and_lambda_stay_in_the_order_of_sites_wherever_they_are_placed():
    made = problem(4, sites=sites(4, sizes=(8, 16, 24, 32)))
    result = fm.train(
        made,
        fm.Ring(),
        ALGORITHM,
        5,
        placements=[PLACEMENT, range(4)],
        own_models=True,
        measure_every=5,
        dtype="float64",
    )
    assert result.records[0]["lambda"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    record, models = result.final[0], result.state.algorithm.models[0]
    row, weights = models.mean(dim=0), result.weights()[0]
    for node, site in enumerate(PLACEMENT):
        samples = made.sites[site].test
        assert record["loss"]["sites"][site] == pytest.approx(loss_of(made, row, samples), rel=1e-12)
        assert record["own_models"]["loss"]["sites"][site] == pytest.approx(
            loss_of(made, models[node], samples), rel=1e-12
        )
        assert record["lambda"][site] == pytest.approx(float(weights[node]), rel=1e-12)


def test_random_placements_are_permutations_the_same_in_every_experiment():
    first, second = (replicas_of([fm.algorithms.DSGD()], (0,), count, 7) for count in (3, 2))
    assert [r.placement for r in first][:2] == [r.placement for r in second]
    assert all(sorted(r.placement) == list(range(7)) for r in first)
    assert len({r.placement for r in first}) == 3


def test_consensus_errors_are_mean_squared_distances_to_the_average_and_lambda_is_that_of_the_duals():
    result = fm.train(problem(4), fm.Ring(), ALGORITHM, 5, dtype="float64", seeds=(0, 1))
    for r, record in enumerate(result.final):
        for name, rows in (("models", result.state.algorithm.models[r]), ("duals", result.state.algorithm.duals[r])):
            centre = rows.mean(dim=0)
            expected = sum(float((row - centre).square().sum()) for row in rows) / 4
            assert record[f"consensus_{name}"] == pytest.approx(expected, rel=1e-10)
            assert expected > 0
        assert record["lambda"] == pytest.approx(result.state.algorithm.duals[r].mean(dim=0).tolist(), rel=1e-12)
        assert sum(record["lambda"]) == pytest.approx(1.0)
    assert fm.train(problem(4), fm.Ring(), ALGORITHM, 1, measure_every=1).records[0]["consensus_models"] == 0.0


DIM = 6 * 5 + 5 + 5 * 3 + 3
NOMINAL = {  # bits a round of the busiest node or server, and of all, on eight nodes
    "ad-gda, ring": (ALGORITHM, fm.Ring(), 2 * (4 * DIM + 32 * 8), 16 * (4 * DIM + 32 * 8)),
    "choco, star": (
        fm.ChocoSGD(compressor=fm.compressors.Quantize(bits=4)),
        fm.topologies.Star(),
        7 * 4 * DIM,
        14 * 4 * DIM,
    ),
    "dsgd, complete": (fm.algorithms.DSGD(), fm.topologies.Complete(), 7 * 32 * DIM, 56 * 32 * DIM),
    "afl": (fm.algorithms.AFL(), fm.Ring(), 8 * 32 * DIM, 8 * 32 * DIM + 8 * (32 * DIM + 32)),
}


@pytest.mark.parametrize("case", NOMINAL)
def test_nominal_bits_are_the_papers_billing_times_the_rounds(case):
    algorithm, topology, busiest, total = NOMINAL[case]
    records = fm.train(problem(8), topology, algorithm, 3, measure_every=1).records
    assert [record["nominal_bits_busiest"] for record in records] == [busiest * t for t in range(4)]
    assert [record["nominal_bits_total"] for record in records] == [total * t for t in range(4)]


@pytest.mark.parametrize(("best_by", "over_sites"), [("worst", min), ("mean", lambda values: sum(values) / 4)])
def test_best_round_by_the_sites_validation_is_kept(monkeypatch, best_by, over_sites):
    monkeypatch.setattr(RoundScores, "smoothing", 0.0)
    given = [fm.Site(s.train, test=s.test, validation=s.test) for s in sites(4)]
    made = problem(4, sites=given)
    algorithm = fm.algorithms.DSGD(fm.schedules.Geometric(8.0, 0.9))  # large steps, so that accuracy comes and goes
    keep = {"keep_best": True, "best_by": best_by}
    result = fm.train(made, fm.Ring(), algorithm, 12, measure_every=2, dtype="float64", seeds=(0, 2), **keep)
    models = Training(made, fm.Ring(), result.replicas, Options(dtype="float64"))
    averages = {done: s.algorithm.models.mean(dim=-2) for done, s in models.states(models.initial(), 0, 12)}
    for r in range(2):
        at = {t: [accuracy_of(made, averages[t][r], s.validation) for s in made.sites] for t in range(0, 13, 2)}
        scores = {t: over_sites(values) for t, values in at.items()}
        best = max(scores, key=lambda t: (round(scores[t], 12), t))
        assert int(result.state.best.round[r]) == best
        assert float(result.state.best.score[r]) == pytest.approx(scores[best])
        assert torch.equal(result.row("best")[r], averages[best][r])
        recorded = [rec["validation"]["accuracy"][best_by] for rec in result.records if rec["replica"] == r]
        assert recorded == pytest.approx(list(scores.values()))
    assert 0 < int(result.state.best.round.min()) < 12  # else the last round would do as well


@pytest.mark.filterwarnings("ignore:clearly worse than")  # targets are noise
def test_best_round_of_numbers_has_the_least_worst_error(monkeypatch):
    monkeypatch.setattr(RoundScores, "smoothing", 0.0)
    inputs = torch.linspace(-1, 1, 40).reshape(20, 2)
    targets = inputs.sum(dim=1, keepdim=True)
    made = fm.Problem(
        torch.nn.Linear(2, 1), [fm.Site((inputs, targets))] * 2, loss=F.mse_loss, validation=(inputs, targets)
    )
    step = fm.algorithms.DSGD(primal_step=fm.schedules.Geometric(4.0, 0.8))
    result = fm.train(made, fm.Ring(), step, 10, measure_every=1, keep_best=True)
    errors = [record["validation"]["rmse"]["worst"] for record in result.records]
    assert int(result.state.best.round) == errors.index(min(errors))
    assert -float(result.state.best.score) == pytest.approx(min(errors))
