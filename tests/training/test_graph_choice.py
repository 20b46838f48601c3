"""The graph of a run that names none, and what is said where sites cannot agree over a graph, or have not."""

import json
import math
import tomllib

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.training.agreement import on_disagreement, on_too_few_rounds
from fairmesh.training.graph_choice import ENOUGH, RING_UP_TO, Mixed, default_topology
from tests.refusals import missing_from

DEFAULT = fm.TrackedADGDA()


@pytest.mark.parametrize("n", [1, 2, 5, RING_UP_TO])
def test_up_to_a_dozen_sites_talk_over_a_ring(n):
    assert default_topology(n, 50, DEFAULT) == fm.Ring()


@pytest.mark.quick_cases("all")
@pytest.mark.parametrize("n", [13, 16, 42, 60, 160, 1000])
def test_more_sites_talk_over_the_sparsest_graph_for_which_the_rounds_suffice(n):
    degrees = []
    for rounds in (600, 1200, 20_000):
        topology = default_topology(n, rounds, DEFAULT)
        mixed = Mixed.over(topology.build(n), DEFAULT)
        assert mixed.times(rounds) >= ENOUGH
        degrees.append(mixed.neighbours)
    assert degrees == sorted(degrees, reverse=True)
    assert degrees[-1] < degrees[0]


def test_no_graph_with_fewer_neighbours_would_do():
    sparser = [fm.Ring(), *(fm.topologies.Circulant((1, k)) for k in range(2, 51))]
    most = max(Mixed.over(one.build(100), DEFAULT).times(600) for one in sparser)
    assert Mixed.over(default_topology(100, 600, DEFAULT).build(100), DEFAULT).neighbours == 6
    assert most < ENOUGH


def test_too_few_rounds_get_about_the_fastest_graph_and_finer_messages_a_sparser_one():
    graphs = (default_topology(160, 20, DEFAULT), fm.topologies.Exponential(), fm.topologies.Circulant((1, 13)))
    chosen, *others = (Mixed.over(graph.build(160), DEFAULT) for graph in graphs)
    assert chosen.times(20) < ENOUGH
    assert all(chosen.times(1) >= 0.8 * other.times(1) for other in others)
    finer = fm.TrackedADGDA(compressor=fm.compressors.Quantize(bits=4, block=256))
    of = [Mixed.over(default_topology(42, 200, one).build(42), one).neighbours for one in (DEFAULT, finer)]
    assert of[1] < of[0]


def test_algorithms_that_do_not_gossip_have_a_ring():
    assert (
        default_topology(60, 10, fm.algorithms.Local())
        == default_topology(60, 10, fm.algorithms.FedAvg(0.1))
        == fm.Ring()
    )


@pytest.mark.parametrize(
    ("topology", "n"), [(fm.Ring(), 9), (fm.topologies.Circulant((1, 6)), 42), (fm.topologies.Exponential(), 33)]
)
def test_eigenvalues_of_graphs_that_look_the_same_from_every_node_are_those_of_the_matrix(topology, n):
    [mixing] = topology.build(n)
    values = np.linalg.eigvalsh(mixing.matrix.toarray())
    assert mixing.gap == pytest.approx(1 - max(abs(values[0]), abs(values[-2])), abs=1e-12)
    assert mixing.beta == pytest.approx(1 - values[0], abs=1e-12)


def _experiment(nodes: int, **settings) -> fm.Experiment:
    return fm.Experiment(fm.data.Digits(nodes=nodes, odd=1), **({"rounds": 6} | settings))


def test_settings_of_a_run_name_the_graph_that_it_chose_and_a_resumed_run_has_the_same(tmp_path):
    experiment = _experiment(16, options=fm.Options(compare_weights=False, checkpoint_every=3))
    result = fm.run(experiment, out=tmp_path / "run")
    recorded = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())["topology"]
    chosen = default_topology(16, 6, DEFAULT)
    assert result.topology == chosen
    assert recorded["offsets"] == list(chosen.offsets)
    assert fm.run(experiment, out=tmp_path / "run", resume=True).rounds == 6


def test_a_run_that_is_extended_keeps_the_graph_that_it_began_with(tmp_path):
    sites = [fm.Site((torch.randn(6, 3), torch.arange(6) % 2)) for _ in range(14)]
    problem, algorithm = fm.Problem(torch.nn.Linear(3, 2), sites), fm.algorithms.DSGD(0.05)
    begun = fm.train(problem, None, algorithm, rounds=3, out=tmp_path / "run")
    longer = default_topology(14, 5000, algorithm)
    assert begun.topology != longer == fm.Ring()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fairmesh.training.plan.default_topology", lambda n, rounds, algorithm: longer)
        assert (
            fm.train(problem, None, algorithm, rounds=5, out=tmp_path / "run", resume=True).topology == begun.topology
        )


def test_a_model_without_a_site_has_the_default_graph_of_one_site_less():
    sites = [fm.Site((torch.randn(6, 3), torch.arange(6) % 2)) for _ in range(14)]
    problem = fm.Problem(torch.nn.Linear(3, 2), sites)
    left_out = fm.leave_one_site_out(problem, algorithm=fm.algorithms.DSGD(0.05), rounds=4)
    assert left_out.result.topology == default_topology(13, 4, fm.algorithms.DSGD(0.05)) != fm.Ring()


def test_rounds_that_are_too_few_for_a_graph_are_named_before_the_run_with_a_graph_that_suffices():
    said = on_too_few_rounds(fm.Ring().build(160), 250, DEFAULT, 650)
    assert said is not None
    assert missing_from(said, "250 rounds", "160 sites", "topology = {", "neighbours") == []
    table = tomllib.loads("topology = " + said.partition("topology = ")[2].partition("}")[0] + "}")["topology"]
    helped = fm.topologies.Circulant(tuple(table["offsets"]))
    assert on_too_few_rounds(helped.build(160), 250, DEFAULT, 650) is None
    assert Mixed.over(helped.build(160), DEFAULT).times(250) >= ENOUGH
    assert "rounds (" in (
        on_too_few_rounds(fm.Ring().build(160), 60, DEFAULT, 650) or ""
    )  # for which no graph suffices


@pytest.mark.parametrize("rounds", [100, 600])
def test_usual_runs_of_ten_sites_are_told_nothing(rounds):
    assert on_too_few_rounds(fm.Ring().build(10), rounds, DEFAULT, 650) is None


def _levels(n: int) -> fm.Problem:
    """Returns sites with levels of their own, which a model must learn from columns that are the same in a site."""
    draws, sites = torch.Generator().manual_seed(0), []
    for _ in range(n):
        own, level = torch.randn(5, generator=draws), torch.randn(1, generator=draws)
        inputs = torch.cat([own.expand(40, -1), torch.randn(40, 3, generator=draws)], dim=1)
        sites.append(fm.Site((inputs, level.expand(40, 1) + 0.2 * torch.randn(40, 1, generator=draws))))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    return fm.Problem(model, sites, test=sites[0].train)


def test_a_run_whose_models_have_not_agreed_ends_with_a_note_and_over_the_default_graph_it_does_not(tmp_path):
    told: list[str] = []
    run = {"compare_weights": False, "measure_every": 40}
    apart = fm.train(_levels(24), fm.Ring(), rounds=40, out=tmp_path / "ring", announce=told.append, **run)
    (note,) = (note for note in apart.notes if "not agreed" in note)
    assert missing_from(note, "average", "%", "circulant", "neighbours instead of 2") == []
    assert note in told
    assert note in json.loads((tmp_path / "ring" / "summary.json").read_text())["notes"]
    told.clear()
    fm.train(_levels(24), rounds=40, announce=told.append, **run)
    assert told
    assert not any("agree" in text for text in told)


def test_distances_that_members_lie_about_end_no_run():
    result = fm.run(fm.Experiment(fm.data.Digits(nodes=4), rounds=10))
    cycle = fm.Ring().build(4)
    for told in (-50.0, math.inf, math.nan):
        result.final[0]["consensus_models"] = told
        assert on_disagreement(result, cycle) is None
