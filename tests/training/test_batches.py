"""Which samples a step looks at, and what is done to their gradients, against plain autograd."""

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

import fairmesh as fm
from tests.toys import on_stack, problem, sites, small_model

DOUBLE = torch.float64
SIZES = (4, 9, 7)


def direct(row: torch.Tensor, made: fm.Problem, inputs, targets) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of one row on some samples by plain autograd."""
    row = row.detach().clone().requires_grad_()
    outputs = functional_call(small_model().double(), made.flat_model.parameters_of(row), (inputs,))
    loss = F.cross_entropy(outputs, targets)
    (gradient,) = torch.autograd.grad(loss, row)
    return loss.detach(), gradient


def made_with(order: str, **fields) -> fm.Problem:
    sampling = fm.Sampling(fields.pop("batch", 3), order, fields.pop("batches_per_step", 1))
    return problem(3, sites=sites(3, sizes=SIZES), sampling=sampling, **fields)


def models_of(oracle) -> torch.Tensor:
    """A different row at every node."""
    rows = oracle.initial_models()
    return rows + 0.3 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)


def at(t: int) -> torch.Tensor:
    return torch.tensor(t)


def test_full_batch_of_unequal_sites_is_each_nodes_mean_over_its_own_samples():
    made = made_with("full")
    _, oracle = on_stack(made, fm.Ring())
    models = models_of(oracle)
    losses, gradients = oracle.losses_and_gradients(models, at(5), 0)
    for i, site in enumerate(made.sites):
        loss, gradient = direct(models[0, i], made, site.train.inputs, site.train.targets)
        assert losses[0, i, 0] == pytest.approx(float(loss), rel=1e-12)
        assert torch.allclose(gradients[0, i], gradient, rtol=0, atol=1e-13)
    assert torch.allclose(oracle.losses(models, at(9), 0), losses, rtol=0, atol=1e-13)


def test_full_batch_of_equal_sites_is_each_nodes_mean_too():
    made = problem(3, sites=sites(3, sizes=(6, 6, 6)), sampling=fm.Sampling(order="full"))
    _, oracle = on_stack(made, fm.Ring())
    models = models_of(oracle)
    _, gradients = oracle.losses_and_gradients(models, at(0), 0)
    for i, site in enumerate(made.sites):
        _, gradient = direct(models[0, i], made, site.train.inputs, site.train.targets)
        assert torch.allclose(gradients[0, i], gradient, rtol=0, atol=1e-13)


def looked_at(sampling: fm.Sampling, t: int, call: int = 0, calls: int = 1, seeds=(0,), sizes=SIZES) -> torch.Tensor:
    """How often each node looks at each of all sites' samples in a call of a round: (seeds * nodes, samples).

    Samples are unit vectors and the model is linear, so that the gradient is their mean."""
    units = torch.eye(sum(sizes), dtype=DOUBLE).split(sizes)
    model = torch.nn.Linear(sum(sizes), 1, bias=False)
    loss = lambda outputs, targets: outputs.mean() + 0 * targets.mean()  # noqa: E731
    made = fm.Problem(model, [(unit, torch.zeros(len(unit))) for unit in units], loss=loss, sampling=sampling)
    _, oracle = on_stack(made, fm.Ring(), calls=calls, seeds=seeds)
    _, gradients = oracle.losses_and_gradients(oracle.initial_models(), at(t), call)
    return (gradients * sampling.batch * sampling.batches_per_step).round().long().flatten(0, 1)


def in_order(first: int, count: int) -> torch.Tensor:
    """How often each sample comes up among `count` of every node's own, taken in order from the `first` on."""
    expected = torch.zeros(3, sum(SIZES), dtype=torch.int64)
    for i, size in enumerate(SIZES):
        for k in range(first, first + count):
            expected[i, sum(SIZES[:i]) + k % size] += 1
    return expected


def test_cyclic_order_visits_samples_in_order_and_wraps_at_each_nodes_own_end():
    for t in range(7):
        assert torch.equal(looked_at(fm.Sampling(3, "cyclic"), t), in_order(3 * t, 3))


def test_cyclic_order_goes_on_over_the_calls_of_a_round_and_the_batches_of_a_step():
    calls = fm.algorithms.DRFA(local_steps=2).oracle_calls()
    sampling = fm.Sampling(2, "cyclic", batches_per_step=2)
    for t in range(3):
        for call in range(calls):
            assert torch.equal(looked_at(sampling, t, call, calls), in_order((t * calls + call) * 4, 4))


def test_drfa_over_cyclic_batches_takes_its_local_steps_on_samples_in_order():
    made = made_with("cyclic")
    algorithm = fm.algorithms.DRFA(primal_step=0.2, dual_step=0.0, participation=1.0, local_steps=2)
    result = fm.train(made, fm.Ring(), algorithm, 2, dtype="float64")
    calls = 3  # two local steps and the probe
    network, oracle = on_stack(made, fm.Ring(), calls=calls)
    rows = oracle.initial_models()[0, 0]
    from fairmesh.algorithms.base import Round
    from fairmesh.algorithms.drfa import _drawn_by

    for t in range(2):
        draws = Round(at(t), oracle, network).server_draws("clients").uniforms(3)
        weights = _drawn_by(oracle.prior, draws).flatten() / 3
        ends = []
        for i, site in enumerate(made.sites):
            row = rows
            for call in range(2):
                samples = ((t * calls + call) * 3 + torch.arange(3)) % SIZES[i]
                _, gradient = direct(row, made, site.train.inputs[samples], site.train.targets[samples])
                row = row - 0.2 * gradient
            ends.append(row)
        rows = sum(w * row for w, row in zip(weights, ends))
    assert torch.allclose(result.row()[0], rows, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_random_batches_hold_every_sample_of_the_node_equally_often_and_none_of_another():
    counts = sum(looked_at(fm.Sampling(200, "random"), t) for t in range(10)).split(SIZES, dim=1)
    for i, size in enumerate(SIZES):
        assert [int(counts[j][i].sum()) for j in range(3)] == [2000 * (i == j) for j in range(3)]
        expected = 2000 / size
        assert float(((counts[i][i] - expected).square() / expected).sum()) < 5 * size  # size - 1 degrees of freedom


def test_random_batches_differ_between_nodes_rounds_calls_and_seeds():
    sampling, sizes = fm.Sampling(40, "random"), (9, 9, 9)
    drawn = [looked_at(sampling, t, call, 2, (0, 1), sizes) for t in range(2) for call in range(2)]
    own = torch.cat([rows[i : i + 1, 9 * (i % 3) : 9 * (i % 3) + 9] for rows in drawn for i in range(6)])
    assert len({tuple(row.tolist()) for row in own}) == 2 * 2 * 2 * 3


def test_gradient_is_that_of_the_samples_looked_at():
    made = made_with("random")
    _, oracle = on_stack(made, fm.Ring())
    models = models_of(oracle)
    losses, gradients = oracle.losses_and_gradients(models, at(4), 0)
    samples = (
        torch.cat([site.train.inputs for site in made.sites]),
        torch.cat([site.train.targets for site in made.sites]),
    )
    for i, counts in enumerate(looked_at(made.sampling, 4)):
        loss, gradient = direct(models[0, i], made, *(part.repeat_interleave(counts, dim=0) for part in samples))
        assert float(losses[0, i, 0]) == pytest.approx(float(loss), rel=1e-12)
        assert torch.allclose(gradients[0, i], gradient, rtol=0, atol=1e-13)


@pytest.mark.parametrize("order", ["random", "cyclic"])
def test_k_batches_a_step_are_the_mean_of_k_single_batches(order):
    _, several = on_stack(made_with(order, batches_per_step=4), fm.Ring())
    _, single = on_stack(made_with(order), fm.Ring(), calls=4)
    models = models_of(several)
    losses, gradients = several.losses_and_gradients(models, at(2), 0)
    pieces = [single.losses_and_gradients(models, at(2), k) for k in range(4)]
    assert torch.allclose(gradients, sum(g for _, g in pieces) / 4, rtol=0, atol=1e-13)
    assert torch.allclose(losses, sum(loss for loss, _ in pieces) / 4, rtol=0, atol=1e-13)
    assert not torch.allclose(pieces[0][1], pieces[1][1])


def test_k_cyclic_batches_a_step_are_one_batch_of_k_times_the_size():
    several, one = made_with("cyclic", batches_per_step=4), made_with("cyclic", batch=12)
    (_, a), (_, b) = (on_stack(made, fm.Ring()) for made in (several, one))
    models = models_of(a)
    for t in range(3):
        pair = [oracle.losses_and_gradients(models, at(t), 0)[1] for oracle in (a, b)]
        assert torch.allclose(*pair, rtol=0, atol=1e-13)


def test_weight_decay_adds_its_share_of_the_model_to_the_gradient_only():
    plain, decayed = made_with("full"), made_with("full", weight_decay=0.3)
    (_, a), (_, b) = (on_stack(made, fm.Ring()) for made in (plain, decayed))
    models = models_of(a)
    (losses_a, gradients_a), (losses_b, gradients_b) = (o.losses_and_gradients(models, at(0), 0) for o in (a, b))
    assert torch.allclose(gradients_b, gradients_a + 0.3 * models, rtol=0, atol=1e-13)
    assert torch.equal(losses_a, losses_b)


def test_clipping_shortens_long_gradients_to_the_norm_and_leaves_short_ones():
    plain = made_with("full")
    _, oracle = on_stack(plain, fm.Ring())
    models = models_of(oracle)
    models[0, 1] *= 4.0
    _, gradients = oracle.losses_and_gradients(models, at(0), 0)
    norms = gradients.norm(dim=-1)[0]
    limit = float(norms.sort().values[:2].mean())  # between the shortest and the others
    _, clipped = on_stack(made_with("full", clip_norm=limit), fm.Ring())
    _, shortened = clipped.losses_and_gradients(models, at(0), 0)
    for i in range(3):
        holder = torch.nn.Parameter(torch.zeros(gradients.shape[-1], dtype=DOUBLE))
        holder.grad = gradients[0, i].clone()
        torch.nn.utils.clip_grad_norm_([holder], limit)
        assert torch.allclose(shortened[0, i], holder.grad, rtol=1e-5, atol=0)
    assert torch.equal(shortened[0, norms.argmin()], gradients[0, norms.argmin()])
    assert float(shortened.norm(dim=-1).max()) == pytest.approx(limit, rel=1e-12)


def test_weight_decay_is_added_after_clipping_as_in_torch():
    _, oracle = on_stack(made_with("full", weight_decay=5.0, clip_norm=0.5), fm.Ring())
    models = models_of(oracle)
    _, plain = on_stack(made_with("full"), fm.Ring())
    own = plain.losses_and_gradients(models, at(0), 0)[1]
    _, gradients = oracle.losses_and_gradients(models, at(0), 0)
    clipped = own * (0.5 / own.norm(dim=-1, keepdim=True)).clamp(max=1.0)
    assert float((clipped - own).abs().max()) > 1e-3
    assert torch.allclose(gradients, clipped + 5.0 * models, rtol=0, atol=1e-13)


def test_zero_gradient_survives_clipping():
    made = problem(2, loss=lambda o, t: (o * 0).sum(), clip_norm=1.0)
    _, oracle = on_stack(made, fm.Ring())
    assert torch.count_nonzero(oracle.losses_and_gradients(oracle.initial_models(), at(0), 0)[1]) == 0
