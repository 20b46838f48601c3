"""Layers with torch's spectral norm and weight norm, new and old, train as they are; a spectral norm is a function of
the weight alone, and a saved model has torch's buffers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

import fairmesh as fm
from fairmesh.problems.weight_norms import SpectralNorm, singular_vectors
from tests import toys
from tests.refusals import missing_from
from tests.toys import CLASSES, FEATURES

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of what it deprecates

SPECTRAL = {
    "parametrization": parametrizations.spectral_norm,
    "old": old_spectral_norm,
    "after weight norm": lambda layer: parametrizations.spectral_norm(parametrizations.weight_norm(layer)),
}
spectral = pytest.mark.parametrize("norm", SPECTRAL.values(), ids=SPECTRAL.keys())


def network(norm) -> nn.Module:
    """A linear layer, a convolution and a transposed one, whose matrix begins with the second axis."""
    torch.manual_seed(3)
    return nn.Sequential(
        norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Unflatten(1, (2, 4)), norm(nn.Conv1d(2, 3, 2)),
        norm(nn.ConvTranspose1d(3, 2, 2)), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def run(norm, rounds: int = 4, nodes: int = 3, model=None, dtype="float64", **options) -> fm.Result:
    fields = {"models_at_once": options.pop("models_at_once", 1)}
    problem = toys.problem(nodes, model=model or network(norm), sampling=fm.Sampling(5), **fields)
    return fm.train(problem, fm.Ring(), fm.ADGDA(0.2), rounds, dtype=dtype, **{"trace": "no"} | options)


@spectral
@pytest.mark.quick_cases(1)
def test_spectral_norm_trains_stacked_as_one_by_one_and_a_line_says_how(norm):
    said: list[str] = []
    stacked = run(norm, models_at_once="all", trace="auto", announce=said.append)
    torch.testing.assert_close(stacked.row(), run(norm).row(), rtol=1e-9, atol=1e-10)
    assert not missing_from("\n".join(said), "spectral norm (3 weights)", "power iterations")


@spectral
def test_saved_model_with_spectral_norm_loads_strictly_predicts_the_same_and_has_norm_1(norm):
    result = run(norm, dtype="float32", models_at_once="auto")
    module = network(norm)
    module.load_state_dict(result.state_dict(), strict=True)
    module.eval()
    inputs = torch.randn(7, FEATURES)
    judged = result.problem.flat_model(result.whole_row(0).float(), inputs)  # as the common model is measured
    torch.testing.assert_close(module(inputs), judged, rtol=1e-5, atol=1e-6)
    for layer, axis in ((module[0], 0), (module[3], 0), (module[4], 1)):
        matrix = layer.weight.detach().movedim(axis, 0).flatten(1)
        assert torch.linalg.matrix_norm(matrix, ord=2).item() == pytest.approx(1.0, abs=1e-3)


@spectral
@pytest.mark.quick_cases(1)
def test_resumed_run_with_spectral_norm_ends_bit_for_bit_where_an_undisturbed_one_ends(norm, tmp_path):
    run(norm, 2, out=tmp_path)
    resumed = run(norm, 4, out=tmp_path, resume=True)
    whole = run(norm, 4).state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.state_dict().items())


@pytest.mark.parametrize(("iterations", "apart"), [(100, 1e-9), (1, 0.05)])
@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, old_spectral_norm])
def test_training_with_spectral_norm_is_that_of_a_loop_with_torchs_own(norm, iterations, apart):
    """To rounding if torch iterates to convergence, and closely if it moves its vectors by one step per pass."""

    def normed(layer: nn.Module) -> nn.Module:
        return norm(layer, n_power_iterations=iterations)

    loop, site = network(normed).double(), toys.sites(1)[0]
    model = copy.deepcopy(loop)
    start = torch.cat([p.detach().flatten() for p in loop.parameters()])
    inputs, targets = site.train
    for _ in range(12):
        loss = F.cross_entropy(loop(inputs), targets)
        loop.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in loop.parameters():
                parameter -= 0.1 * parameter.grad
    problem = fm.Problem(model, [site] * 2, sampling=fm.Sampling(order="full"))
    result = fm.train(problem, fm.Ring(), fm.DSGD(0.1), 12, dtype="float64", trace="no")
    expected = dict(loop.named_parameters())
    found = torch.cat([result.state_dict()[name].flatten() for name in expected])
    wanted = torch.cat([p.detach().flatten() for p in expected.values()])
    assert (wanted - start).norm() > 0.1
    assert (found - wanted).norm() < apart * (wanted - start).norm()


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (1, 5), (5, 1), (30, 30)], ids=str)
@pytest.mark.parametrize("second", [0.5, 0.9, 0.999, 1.0])
def test_singular_vectors_give_the_largest_singular_value(shape, second):
    """Also if the second one is nearly as large, and if all rows and columns sum to zero."""
    generator = torch.Generator().manual_seed(0)
    u, s, v = torch.linalg.svd(torch.randn(*shape, generator=generator), full_matrices=False)
    s = 0.8 * s / s[0]
    s[1:2], s[0] = second, 1.0
    matrix = (u * s) @ v
    if min(shape) > 1 and second < 0.9:
        matrix = matrix - matrix.mean(0) - matrix.mean(1, keepdim=True) + matrix.mean()
    for scale in (1e-12, 1.0, 1e12):
        one, other = singular_vectors(scale * matrix)
        assert (one.shape, other.shape) == (shape[:1], shape[1:])
        assert [one.norm().item(), other.norm().item()] == pytest.approx([1.0, 1.0])
        largest = torch.linalg.matrix_norm(matrix.double(), ord=2).item()
        assert (one.double() @ matrix.double() @ other.double()).item() == pytest.approx(largest, rel=1e-3)


def test_gradient_of_spectral_norm_is_that_of_the_exact_norm():
    weight = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    other = weight.detach().clone().requires_grad_()
    direction = torch.randn(4, 3, 2, dtype=torch.float64)
    (SpectralNorm(1)(weight) * direction).sum().backward()
    exact = other / torch.linalg.matrix_norm(other.movedim(1, 0).flatten(1), ord=2)
    (exact * direction).sum().backward()
    torch.testing.assert_close(weight.grad, other.grad)


def test_old_weight_norm_trains_as_the_new_one():
    model = network(old_weight_norm)
    model(torch.randn(2, FEATURES))  # leaves a weight that torch does not copy
    old = run(old_weight_norm, model=model, models_at_once="all")
    new = run(parametrizations.weight_norm)
    torch.testing.assert_close(old.row().sort().values, new.row().sort().values, rtol=1e-9, atol=1e-10)
    model.load_state_dict(old.state_dict(), strict=True)
    inputs = torch.randn(4, FEATURES)
    judged = old.problem.flat_model(old.whole_row(0).float(), inputs)
    torch.testing.assert_close(model.eval()(inputs), judged, rtol=1e-5, atol=1e-6)


def test_function_that_makes_a_model_with_old_weight_norm_trains():
    run(None, 1, model=lambda: network(old_weight_norm))
