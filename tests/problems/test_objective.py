"""Which losses the weights follow: held-out rows, references, noise. Small problems with known answers."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.comparisons.alone import AloneRun, judged_apart
from fairmesh.comparisons.reference_losses import with_references
from fairmesh.data.samples import Samples
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.problems.objective import Objective, beyond_chance, counted_losses, held_out_rows
from fairmesh.problems.oracle import Oracle
from fairmesh.problems.problem import prepare
from fairmesh.training.options import Options
from tests import toys
from tests.refusals import refused

HELD = Objective("held-out", share=0.25, rejoin=0.5, rounds=20)


def oracle_of(problem: fm.Problem) -> Oracle:
    network = MemoryNetwork(fm.Ring().build(problem.n), dtype=torch.float64)
    return Oracle(problem, network.hosted, network.identities, seeds=[0], dtype=torch.float64)


def referenced(problem: fm.Problem, rounds: int = 60) -> fm.Problem:
    network = MemoryNetwork(fm.Ring().build(problem.n))
    return with_references(prepare(problem), AloneRun(fm.Ring(), rounds, 0, Options(), network))


def mean_loss(problem: fm.Problem, samples: Samples, row: torch.Tensor) -> float:
    model = problem.flat_model.to(torch.device("cpu"), torch.float64)
    return float(problem.loss(model(row, samples.inputs.double()), samples.targets))


def test_held_out_rows_are_spread_over_the_classes_and_do_not_depend_on_the_inputs():
    labels = torch.tensor([0] * 40 + [1] * 20 + [2] * 20)
    held = held_out_rows(Samples(torch.randn(80, 3), labels), 0, Objective("held-out"))
    assert torch.bincount(labels[held]).tolist() == [8, 4, 4]
    assert torch.equal(held, held_out_rows(Samples(torch.zeros(80, 3), labels), 0, Objective("held-out")))


@pytest.mark.parametrize(("rows", "held"), [(9, 0), (10, 2), (100, 20), (3000, 600)])
def test_objective_holds_nothing_out_of_a_site_that_is_too_small(rows, held):
    assert Objective("held-out").held_out_of(rows) == held
    assert Objective().held_out_of(rows) == 0


@pytest.mark.parametrize("order", ["random", "cyclic", "full"])
def test_oracle_trains_on_held_out_rows_only_after_they_rejoin(order):
    problem = toys.problem(sampling=fm.Sampling(batch=40, order=order), objective=HELD)
    oracle = oracle_of(problem)
    apart = judged_apart(problem)
    held = {tuple(row.tolist()) for site in apart.sites for row in site.validation.inputs}
    assert len(held) == sum(round(0.25 * len(site.train)) for site in problem.sites)

    def trained_on(t: int) -> set:
        inputs, *_, last = oracle.batches.at(torch.tensor(t), 0, 1)
        weights = last if order == "full" else torch.ones(inputs.shape[:2])
        return {tuple(row.tolist()) for row, weight in zip(inputs.flatten(0, 1), weights.flatten()) if weight}

    assert not any(held & trained_on(t) for t in range(10))
    seen = set.union(*(trained_on(t) for t in range(10, 20)))
    assert len(held & seen) > 0.8 * len(held)


def test_oracle_judges_nodes_by_their_held_out_rows_and_trains_them_on_the_others_until_they_rejoin():
    full = fm.Sampling(order="full")
    problem = toys.problem(sampling=full, objective=HELD)
    oracle, apart = oracle_of(problem), dataclasses.replace(judged_apart(problem), sampling=full)
    models = oracle.initial_models()

    def gradients(of, t: int) -> torch.Tensor:
        return of.losses_and_gradients(models, torch.tensor(t), 0)[1]

    expected = [mean_loss(problem, site.validation, models[0, 0]) for site in apart.sites]
    for losses in (
        oracle.losses_and_gradients(models, torch.tensor(0), 0)[0],
        oracle.losses(models, torch.tensor(0), 0),
    ):
        assert losses.flatten().tolist() == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradients(oracle, 0), gradients(oracle_of(apart), 0), rtol=0, atol=1e-12)
    whole = oracle_of(toys.problem(sampling=full))
    torch.testing.assert_close(gradients(oracle, 10), gradients(whole, 10), rtol=0, atol=1e-12)


def test_validation_sets_judge_nodes_if_asked_to():
    sites = [dataclasses.replace(site, validation=site.test) for site in toys.sites()]
    problem = toys.problem(sites=sites, sampling=fm.Sampling(order="full"), objective=Objective("validation"))
    models = oracle_of(problem).initial_models()
    losses, _ = oracle_of(problem).losses_and_gradients(models, torch.tensor(0), 0)
    expected = [mean_loss(problem, site.validation, models[0, 0]) for site in problem.sites]
    assert losses.flatten().tolist() == pytest.approx(expected, abs=1e-12)
    with refused("judged_on", "validation"):
        oracle_of(toys.problem(objective=Objective("validation")))


@pytest.mark.parametrize(
    "name", ["ad-gda", "tracked", "tracked ascent", "tracked maximum", "afl", "drfa", "q-ffl", "term"]
)
@pytest.mark.quick_cases(3)
def test_weights_remember_the_losses_they_saw_when_the_rows_rejoin(name):
    algorithm = toys.ALGORITHMS[name]
    if name == "tracked":
        algorithm = dataclasses.replace(algorithm, weighting=fm.weighting.ShadowPrice(strength_annealing=0.0))
    seen = {}
    problem = toys.problem(objective=Objective("held-out", rejoin=0.5))

    def watch(done: int, state) -> None:
        inner = getattr(state.algorithm, "weighting", state.algorithm)
        seen[done] = getattr(inner, "losses", getattr(inner, "duals", None)).clone()

    fm.train(problem, toys.TOPOLOGIES["complete"], algorithm, 20, observers=[watch], dtype="float64")
    assert not torch.allclose(seen[5], seen[10])
    kept = [seen[t].mean(dim=-2) for t in (11, 20)]  # gossip alone does not change the average of the nodes
    torch.testing.assert_close(*kept, rtol=0, atol=1e-9)


def test_excess_is_the_loss_less_the_reference_plus_the_references_mean():
    names = [f"node {i}" for i in range(8)]
    values = dict(zip(names, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]))
    plain, compared = (
        oracle_of(toys.problem(objective=objective)) for objective in (Objective(), Objective(against=values))
    )
    models = plain.initial_models()
    difference = plain.losses(models, torch.tensor(0), 0) - compared.losses(models, torch.tensor(0), 0)
    assert difference.flatten().tolist() == pytest.approx([value - 0.35 for value in values.values()], abs=1e-12)


def test_constant_reference_is_the_entropy_of_a_site_s_labels():
    inputs, labels = torch.randn(400, 3), torch.arange(400) % 4
    sites = [fm.Site((inputs, labels)), fm.Site((inputs, labels % 2))]
    problem = fm.Problem(nn.Linear(3, 4), sites, objective=Objective("held-out", against="constant"))
    found = referenced(problem).objective.constant_losses
    assert list(found.values()) == pytest.approx([math.log(4), math.log(2)], abs=0.03)


def test_local_reference_is_what_each_site_reaches_alone():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 300, 4, generator=generator)
    labels = (inputs[..., 0] > 0).long()
    labels[1] = 1 - labels[1]  # the opposite rule, as easy to learn alone
    labels[2] = torch.randint(0, 2, (300,), generator=generator)  # noise
    sites = [fm.Site((x, y)) for x, y in zip(inputs, labels)]
    problem = fm.Problem(lambda: nn.Linear(4, 2), sites, objective=Objective("held-out", against="local"))
    first, second, noise = referenced(problem, 200).objective.local_losses.values()
    assert first < 0.25
    assert second < 0.25
    assert noise > 0.6


def test_learnable_share_follows_from_what_a_model_reaches():
    names = [f"node {i}" for i in range(8)]
    numbers = {
        "local_losses": dict(zip(names, [9.0, 0.0, *[9.0] * 6])),
        "untrained_losses": dict(zip(names, [2.0, 2.0, 1e-3, *[2.0] * 5])),
    }
    oracle = oracle_of(toys.problem(objective=Objective("held-out", rejoin=1.0, discount_noise=True, **numbers)))
    losses = torch.linspace(0.2, 1.9, 8, dtype=torch.float64).view(1, 8, 1)
    found = oracle.standard.learnable_shares(losses).flatten()
    assert float(found[1]) == 1.0  # alone it learns everything
    assert float(found[2]) == 0.0  # nothing can be learned
    torch.testing.assert_close(found[3:], ((1 - losses.flatten()[3:] / 2) / 0.5).clamp(0, 1) ** 4)


def test_counted_loss_is_the_nearest_to_the_mean_that_noise_allows():
    losses, learnable = torch.tensor([2.0, 2.0, 2.0, 0.5]), torch.tensor([1.0, 0.1, 0.8, 0.1])
    found = counted_losses(losses, learnable, torch.tensor(1.0))
    torch.testing.assert_close(found, torch.tensor([2.0, 1.0, 1.6, 0.5]))


def test_difference_counts_as_far_as_chance_does_not_explain_it():
    units, rows = torch.tensor([2.0, 2.0, 2.0, 1.0, 0.5, 2.0]), torch.tensor([1e6, 24.0, 12.0, 100.0, 1e6, 0.0])
    found = beyond_chance(units, rows)
    torch.testing.assert_close(found, torch.tensor([2.0, 1.5, 1.0, 1.0, 0.5, 1.0]), rtol=0, atol=1e-4)


def noisy_sites(seed: int = 0) -> list[fm.Site]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(6):
        inputs = torch.randn(400, 5, generator=generator)
        labels = (inputs[:, 0] + 0.3 * inputs[:, 1] > 0).long()
        if i == 5:
            labels = torch.randint(0, 2, (400,), generator=generator)
        made.append(fm.Site((inputs[:120], labels[:120]), test=(inputs[120:], labels[120:])))
    return made


@pytest.mark.slow
def test_weights_leave_a_site_of_pure_noise_only_with_the_discount():
    def share(objective: Objective) -> float:
        problem = fm.Problem(lambda: nn.Linear(5, 2), noisy_sites(), objective=objective)
        return float(fm.train(problem, fm.Ring(), fm.TrackedADGDA(), 200).weights()[0, 5])

    plain = share(Objective("held-out"))
    assert plain > 0.9  # plain robustness fails
    assert share(Objective("held-out", discount_noise=True)) < 0.3  # near its prior
    assert share(Objective("held-out", against="local")) < plain - 0.05  # the common model is still too sure there


@pytest.mark.slow
def test_weights_see_that_a_small_site_is_memorised_only_on_held_out_rows():
    """The small site follows a rule of its own in many dimensions: 30 rows are memorised and generalise badly."""
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(2, 40, generator=generator)
    sites = []
    for i, rows in enumerate((300, 300, 300, 40)):
        inputs = torch.randn(rows, 40, generator=generator)
        sites.append(fm.Site((inputs, (inputs @ truth[int(i == 3)] > 0).long())))

    def weight(objective: Objective) -> float:
        problem = fm.Problem(
            lambda: nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 2)),
            sites,
            prior=[1, 1, 1, 1],
            objective=objective,
        )
        return float(fm.train(problem, fm.Ring(), fm.TrackedADGDA(), 300).weights()[0, 3])

    assert weight(Objective("held-out")) > 0.5 > weight(Objective())


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"share": 0.0}, ["share", 0.0]),
        ({"share": 0.7}, ["share", 0.7]),
        ({"rejoin": 0.0}, ["rejoin", 0.0]),
        ({"judged_on": "tests"}, ["judged_on", "tests", "held-out"]),
        ({"against": "alone"}, ["against", "alone"]),
        ({"against": {"node 0": math.nan}}, ["objective.against", "node 0", "nan"]),
        ({"against": "local"}, ["objective.against", "held-out", "training"]),
        ({"discount_noise": True}, ["objective.discount_noise", "held-out", "training"]),
        ({"judged_on": "held-out", "discount_noise": True, "against": "local"}, ["against", "discount_noise"]),
    ],
)
def test_objective_refuses_what_cannot_be_followed(fields, names):
    with refused(*names):
        Objective(**fields)


@pytest.mark.parametrize(("names", "words"), [((), ("node 7",)), (("node 7", "Lyon"), ("Lyon", "node 7"))])
def test_objective_refuses_references_that_do_not_fit_the_sites(names, words):
    values = dict.fromkeys([*(f"node {i}" for i in range(7)), *names], 0.1)
    with refused("objective.against", *words):
        fm.train(toys.problem(objective=Objective(against=values)), fm.Ring(), fm.TrackedADGDA(), 5)


@pytest.mark.parametrize(
    "algorithm",
    [fm.ADGDA(), fm.algorithms.DRFA(), fm.TrackedADGDA(weighting=fm.weighting.ExactMaximum())],
    ids=lambda a: type(a).__name__,
)
def test_discount_of_noise_is_refused_where_nodes_do_not_know_the_mean_loss(algorithm):
    problem = toys.problem(objective=Objective("held-out", discount_noise=True))
    with refused("objective.discount_noise", type(algorithm).__name__, "tracked-ad-gda"):
        fm.train(problem, fm.Ring(), algorithm, 5)


def test_objective_round_trips_through_an_experiment_file(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(
        'rounds = 10\ndata = { name = "digits", nodes = 4 }\n'
        '[objective]\njudged_on = "held-out"\nshare = 0.3\nagainst = "constant"\n'
    )
    experiment = fm.load_experiment(path)
    assert experiment.objective == Objective("held-out", share=0.3, against="constant")
    fm.run(experiment, out=tmp_path / "run")
    again = fm.load_experiment(tmp_path / "run" / "experiment.toml")
    assert again.objective == experiment.objective
    assert again.algorithm == experiment.algorithm


@pytest.mark.parametrize("judged_on", ["held-out", "validation"])
def test_units_that_judge_a_node_are_counted_and_not_their_rows(judged_on):
    def samples(units: int, first: int) -> Samples:
        of_rows = torch.arange(first, first + units).repeat_interleave(6)
        return Samples(torch.randn(len(of_rows), 2), torch.randint(2, (len(of_rows),)), units=of_rows)

    sites = [fm.Site(samples(10, 100 * i), validation=samples(4, 100 * i + 50)) for i in range(3)]
    problem = fm.Problem(nn.Linear(2, 2), sites, objective=Objective(judged_on, rounds=20))
    division = oracle_of(problem.prepared).division
    assert set(division.apart.flatten().tolist()) == {2 if judged_on == "held-out" else 4}
    assert set(division.judges.flatten().tolist()) == {12 if judged_on == "held-out" else 24}
