"""torch's own random functions draw from the node's stream while a model runs: models train as they are and repeat."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fairmesh as fm
from fairmesh.problems.torch_draws import TorchDraws
from tests import toys
from tests.refusals import refused
from tests.toys import CLASSES, FEATURES

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap runs attention in a loop


def drawn(function, *arguments: Any, key: int = 3, **settings: Any) -> torch.Tensor:
    with TorchDraws(torch.tensor(key)):
        return function(*arguments, **settings)


ONES = torch.ones(200, 100)
HALF_TO_HALF = torch.full((200, 100), 0.5)
DRAWS = {  # function, arguments, mean and standard deviation
    "rand": (torch.rand, (200, 100), 0.5, 1 / 12**0.5),
    "rand of a size": (torch.rand, ((200, 100),), 0.5, 1 / 12**0.5),
    "randn": (torch.randn, (200, 100), 0.0, 1.0),
    "rand_like": (torch.rand_like, (ONES,), 0.5, 1 / 12**0.5),
    "randn_like": (torch.randn_like, (ONES,), 0.0, 1.0),
    "randint": (torch.randint, (2, 6, (200, 100)), 3.5, 1.25**0.5),
    "randint_like": (torch.randint_like, (ONES, 4), 1.5, 1.25**0.5),
    "bernoulli": (torch.bernoulli, (HALF_TO_HALF,), 0.5, 0.5),
    "bernoulli p": (torch.bernoulli, (ONES, 0.2), 0.2, 0.4),
    "normal": (torch.normal, (2 * ONES, 3 * ONES), 2.0, 3.0),
    "normal of a size": (torch.normal, (2.0, 3.0, (200, 100)), 2.0, 3.0),
    "uniform_": (lambda: torch.empty(200, 100).uniform_(1, 3), (), 2.0, 2 / 12**0.5),
    "normal_": (lambda: torch.empty(200, 100).normal_(1, 3), (), 1.0, 3.0),
    "exponential_": (lambda: torch.empty(200, 100).exponential_(2), (), 0.5, 0.5),
    "bernoulli_": (lambda: torch.empty(200, 100).bernoulli_(0.2), (), 0.2, 0.4),
    "dropout": (F.dropout, (ONES, 0.2), 1.0, 0.5),
    "dropout in place": (lambda: F.dropout(ONES.clone(), 0.2, inplace=True), (), 1.0, 0.5),
    "torch.dropout": (torch.dropout, (ONES, 0.2, True), 1.0, 0.5),
    "a distribution": (lambda: torch.distributions.Normal(2 * ONES, 3.0).rsample(), (), 2.0, 3.0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_the_distribution_they_are_asked_for_and_leave_torchs_generator_alone(name):
    function, arguments, mean, deviation = DRAWS[name]
    before = torch.get_rng_state()
    one, again, other = (drawn(function, *arguments, key=key).double() for key in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert one.shape == (200, 100)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert float(one.mean()) == pytest.approx(mean, abs=5 * deviation / 20_000**0.5)
    assert float(one.std()) == pytest.approx(deviation, rel=0.03)


def test_permutations_are_permutations_and_draws_of_one_pass_differ():
    order = drawn(torch.randperm, 50)
    assert sorted(order.tolist()) == list(range(50))
    one, other = drawn(lambda: (torch.rand(1000), torch.rand(1000)))
    assert float(torch.corrcoef(torch.stack([one, other]))[0, 1].abs()) < 0.15


def test_alpha_dropout_keeps_mean_and_variance():
    normal = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    for function in (F.alpha_dropout, F.feature_alpha_dropout):
        found = drawn(function, normal, 0.3, True)
        assert float(found.mean()) == pytest.approx(0.0, abs=0.02)
        assert float(found.std()) == pytest.approx(1.0, abs=0.02)
    image = drawn(F.feature_alpha_dropout, torch.ones(4, 8, 5, 5), 0.5, True)
    assert torch.equal(image, image[..., :1, :1].expand_as(image))


def test_channel_dropout_drops_whole_channels():
    for function, shape in ((F.dropout1d, (40, 9, 5)), (F.dropout2d, (40, 9, 5, 4)), (F.dropout3d, (40, 9, 2, 3, 4))):
        kept = drawn(function, torch.ones(shape), 0.5).flatten(2)
        assert torch.equal(kept, kept[..., :1].expand_as(kept))
        assert 0.3 < float((kept == 0).float().mean()) < 0.7


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "additive"])
@pytest.mark.quick_cases(1)
def test_attention_with_dropout_is_attention_on_average(mask):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, 4, generator=generator) for _ in range(3))
    allowed = torch.ones(5, 5, dtype=torch.bool).tril(1)
    settings: dict[str, Any] = {
        "none": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": allowed},
        "additive": {"attn_mask": torch.zeros(5, 5).masked_fill(~allowed, -1e9)},
    }[mask]
    many = [
        drawn(F.scaled_dot_product_attention, query, key, value, dropout_p=0.2, key=k, **settings) for k in range(500)
    ]
    wanted = F.scaled_dot_product_attention(query, key, value, **settings)
    torch.testing.assert_close(torch.stack(many).mean(dim=0), wanted, rtol=0, atol=0.15)
    torch.testing.assert_close(
        drawn(F.scaled_dot_product_attention, query, key, value, dropout_p=0.0, **settings), wanted
    )


def encoder() -> nn.Module:
    """torch's own transformer with its default dropout, also in the attention."""

    def forward(self, inputs):
        return self.head(self.encoder(self.embed(inputs.unsqueeze(-1))).mean(dim=1))

    inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    return toys.module(forward, embed=nn.Linear(1, 8), encoder=inner, head=nn.Linear(8, CLASSES))


def noisy(draw, always: bool = False) -> nn.Module:
    """A linear model with something random in front."""

    def forward(self, inputs):
        return self.head(self.draw(inputs) if self.training or always else inputs)

    return toys.module(forward, draw=draw, head=nn.Linear(FEATURES, CLASSES))


def stochastic_depth(inputs: torch.Tensor) -> torch.Tensor:  # as torchvision writes it
    noise = torch.empty([inputs.shape[0], 1], dtype=inputs.dtype, device=inputs.device)
    noise = noise.bernoulli_(0.8)
    noise.div_(0.8)
    return inputs * noise


def reparametrized(inputs: torch.Tensor) -> torch.Tensor:
    return inputs + torch.randn_like(inputs) * 0.1


class OwnDropout(nn.Dropout):
    """A subclass, which is not replaced by a layer of fairmesh's."""


MODELS = {
    "nn.TransformerEncoder": encoder,
    "stochastic depth": lambda: noisy(stochastic_depth),
    "VAE": lambda: noisy(reparametrized),
    "AlphaDropout": lambda: noisy(nn.AlphaDropout(0.3)),
    "own dropout": lambda: noisy(OwnDropout(0.3)),
    "gumbel": lambda: noisy(lambda inputs: inputs * F.gumbel_softmax(inputs)),
    "RReLU": lambda: noisy(nn.RReLU()),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_that_draws_by_itself_trains_as_it_is_and_repeats_bit_for_bit(name):
    runs = []
    for seed in (0, 123):
        torch.manual_seed(seed)
        problem = toys.problem(3, model=MODELS[name])
        assert problem.at_once(torch.device("cpu")) is None
        runs.append(fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 2, measure_every=1, trace="no"))
    assert torch.equal(runs[0].row(), runs[1].row())
    assert runs[0].records == runs[1].records


@pytest.mark.parametrize("name", MODELS)
def test_model_that_draws_by_itself_draws_the_same_one_by_one_and_other_numbers_at_other_nodes_and_rounds(name):
    sites, found = [toys.sites(1)[0]] * 3, []
    for at_once in ("all", 1):
        problem = toys.problem(
            3, model=MODELS[name], sites=sites, sampling=fm.Sampling(order="full"), models_at_once=at_once
        )
        _, oracle = toys.on_stack(problem, fm.Ring(), trace=False)
        models = oracle.initial_models()
        found.append([oracle.losses_and_gradients(models, torch.tensor(t), 0) for t in (0, 1)])
    for (losses, gradients), (others, their) in zip(*found):
        torch.testing.assert_close(losses, others, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradients, their, rtol=1e-10, atol=1e-12)
    (first, _), (second, _) = found[0]
    assert len({*first.flatten().tolist(), *second.flatten().tolist()}) == 6


RECURRENT = {
    "LSTM": lambda **settings: nn.LSTM(3, 4, 3, **settings),
    "LSTM with projections": lambda **settings: nn.LSTM(3, 4, 3, proj_size=2, **settings),
    "GRU both ways": lambda **settings: nn.GRU(3, 4, 3, bidirectional=True, **settings),
    "RNN without biases": lambda **settings: nn.RNN(3, 4, 3, bias=False, **settings),
}


def _numbers(answer: Any) -> torch.Tensor:
    """All numbers of a recurrent layer's outputs and last states."""
    outputs, states = answer
    held = [outputs if isinstance(outputs, torch.Tensor) else outputs.data]
    return torch.cat([part.flatten() for part in (*held, *(states if isinstance(states, tuple) else [states]))])


@pytest.mark.parametrize("form", ["batch", "one sequence", "packed"])
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.quick_cases(4)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_recurrent_layers_with_dropout_are_torchs_own_but_for_where_the_draws_come_from(name, form):
    sequences = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1))
    packed = nn.utils.rnn.pack_padded_sequence(sequences, torch.tensor([5, 4, 2, 1]))
    inputs = {"batch": sequences, "one sequence": sequences[:, 0], "packed": packed}[form]
    layer = RECURRENT[name](dropout=0.5)
    before = torch.get_rng_state()
    one, again, other = (_numbers(drawn(layer, inputs, key=key)) for key in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    layer.dropout = 1e-9  # keeps all that passes from one layer to the next
    torch.testing.assert_close(_numbers(drawn(layer, inputs)), _numbers(layer.eval()(inputs)))


def sequences() -> nn.Module:
    """Reads inputs as a sequence of numbers."""

    def forward(self, inputs):
        return self.head(self.layer(inputs.unsqueeze(-1))[0][:, -1])

    return toys.module(forward, layer=nn.LSTM(1, 3, 2, dropout=0.3, batch_first=True), head=nn.Linear(3, CLASSES))


def test_lstm_with_dropout_trains_and_repeats_bit_for_bit_as_it_is_called_and_as_it_is_replayed():
    rows = []
    for seed, trace in ((0, "no"), (1, "no"), (2, "auto")):
        torch.manual_seed(seed)
        problem = toys.problem(3, model=sequences)
        rows.append(fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 3, trace=trace).row())
    assert torch.equal(rows[0], rows[1])
    torch.testing.assert_close(rows[0], rows[2])


def test_fractional_pooling_draws_from_the_nodes_stream():
    image = torch.randn(4, 2, 9, 9, generator=torch.Generator().manual_seed(0))
    for inputs in (image, image[0]):
        pool = nn.FractionalMaxPool2d(2, output_size=4)
        one, again, other = (drawn(pool, inputs, key=key) for key in (3, 3, 4))
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def test_layer_that_draws_from_torchs_generator_is_named():
    counts = toys.module(lambda self, inputs: inputs + torch.poisson(torch.ones_like(inputs)))
    with refused("layer 1 (Made)", "generator of torch", "torch.randn"):
        toys.problem(2, model=lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), counts))


def test_draws_in_evaluation_mode_are_the_same_every_time():
    problem = toys.problem(2, model=lambda: noisy(reparametrized, always=True))
    records = [fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 1, measure_every=1).records for _ in range(2)]
    assert records[0] == records[1]
