"""Losses that call the model themselves: `fm.losses.ModelLoss`."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fairmesh as fm
from fairmesh.config.tables import from_table, to_table
from tests import toys
from tests.refusals import missing_from, refused
from tests.toys import CLASSES, FEATURES


class Encoder(nn.Module):
    """Has more methods than `forward`, and dropout."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head, self.dropout = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES), nn.Dropout(0.3)

    def encode(self, inputs):
        return self.dropout(torch.tanh(self.encoder(inputs)))

    def forward(self, inputs):
        return self.head(self.encode(inputs))


def vae() -> nn.Module:
    """Draws noise in every mode, and returns a tuple."""

    def forward(self, inputs):
        mean, log_variance = self.encoder(inputs).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(latent), mean, log_variance

    return toys.module(forward, encoder=nn.Linear(FEATURES, 4), decoder=nn.Linear(2, FEATURES))


def recurrent() -> nn.Module:
    """vmap cannot evaluate it."""

    def forward(self, inputs):
        return self.head(self.lstm(inputs.unsqueeze(-1))[0][:, -1])

    return toys.module(forward, lstm=nn.LSTM(1, 4, batch_first=True), head=nn.Linear(4, CLASSES))


def plain(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


def two_passes(model, batch):
    inputs, targets = batch
    once, again = model.encode(inputs), model.encode(inputs)
    return F.cross_entropy(model.head(once), targets, reduction="none") + (once - again).square().mean(dim=1)


def mean_of(function):
    return lambda model, batch: function(model, batch).mean()


def elbo(model, batch):
    inputs, _ = batch
    found, mean, log_variance = model(inputs)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1)
    return (found - inputs).square().sum(dim=1) + divergence


def problem(function, model=None, **fields) -> fm.Problem:
    loss = fm.losses.ModelLoss(function)
    return toys.problem(3, model=model or Encoder(), loss=loss, sampling=fm.Sampling(batch=5), **fields)


def trained(made: fm.Problem, rounds: int = 3, **options) -> fm.Result:
    return fm.train(made, fm.Ring(), fm.ADGDA(0.05), rounds, dtype="float64", trace="no", **options)


@pytest.mark.parametrize("function", [plain, mean_of(plain)], ids=["samples", "mean"])
def test_model_loss_that_calls_the_model_once_trains_and_measures_as_the_loss_of_outputs(function):
    model = Encoder()
    by_outputs = toys.problem(3, model=model, sampling=fm.Sampling(batch=5))
    mine, usual = (trained(made) for made in (problem(function, model), by_outputs))
    torch.testing.assert_close(mine.row(), usual.row(), rtol=1e-10, atol=1e-12)
    for metric in ("loss", "accuracy"):
        assert mine.records[-1][metric]["sites"] == pytest.approx(usual.records[-1][metric]["sites"])


@pytest.mark.parametrize("function", [two_passes, mean_of(two_passes)], ids=["samples", "mean"])
def test_model_loss_agrees_however_many_models_are_evaluated_at_once(function):
    model = Encoder()
    one, two, stacked = (trained(problem(function, model, models_at_once=k)).row() for k in (1, 2, "all"))
    torch.testing.assert_close(one, stacked, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(two, stacked, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("function", [elbo, mean_of(elbo)], ids=["samples", "mean"])
def test_model_loss_of_a_vae_trains_and_resumes_bit_for_bit(function, tmp_path):
    made = problem(function, vae(), read=lambda outputs: outputs[0])
    torch.manual_seed(1)
    whole = trained(made, 4)
    trained(made, 2, out=tmp_path)
    torch.manual_seed(2)
    assert torch.equal(trained(made, 4, out=tmp_path, resume=True).row(), whole.row())
    losses = [record["loss"]["mean"] for record in trained(made, 30, measure_every=30).records]
    assert losses[-1] < losses[0]


def test_model_loss_takes_models_that_vmap_cannot_evaluate_and_measures_sample_by_sample():
    made = problem(mean_of(plain), recurrent())
    assert made.at_once(torch.device("cpu")) == 1
    result = trained(made, 1)
    usual = toys.problem(3, model=made.initial_model(0), sampling=fm.Sampling(batch=5))
    assert result.records[-1]["loss"]["mean"] == pytest.approx(trained(usual, 1).records[-1]["loss"]["mean"])


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": fm.Sampling(order="full")},
        {"objective": fm.Objective(judged_on="held-out")},
        {"metrics": ["balanced-accuracy"]},
    ],
    ids=["full batches", "held-out rows", "metrics"],
)
def test_model_loss_of_samples_goes_with_weights_of_samples_objectives_and_metrics(fields):
    model = Encoder().eval()
    fields = {"sampling": fm.Sampling(batch=5)} | fields
    with pytest.warns(UserWarning, match="evaluation mode"):
        mine, usual = (
            trained(toys.problem(3, model=model, **fields, **loss))
            for loss in ({"loss": fm.losses.ModelLoss(plain)}, {})
        )
    torch.testing.assert_close(mine.row(), usual.row(), rtol=1e-10, atol=1e-12)


def test_model_loss_goes_with_augmentation_and_subgroups():
    def noisy(inputs, draw):
        return inputs + draw(*inputs.shape)

    sites = [(*site.train, ["ab"[k % 2] for k in range(len(site.train[1]))]) for site in toys.sites(3)]
    objective = fm.Objective(subgroups="within")
    trained(problem(plain, sites=sites, augment=noisy, objective=objective), 2)
    with refused("ModelLoss", "(samples,)", "subgroups"):
        trained(problem(mean_of(plain), sites=sites, objective=objective), 2)


@pytest.mark.slow
def test_model_loss_is_the_same_at_every_host():
    from fairmesh.problems.oracle import Oracle

    made, rows = problem(two_passes), []
    for hosted in (torch.arange(3), torch.tensor([1])):
        oracle = Oracle(made, hosted, hosted, seeds=[0], dtype=torch.float64)
        rows.append(oracle.losses_and_gradients(oracle.initial_models(), torch.tensor(0), 0)[1])
    torch.testing.assert_close(rows[0][:, 1], rows[1][:, 0], rtol=1e-10, atol=1e-12)


def _contrastive(model, batch):
    found = F.normalize(model(batch[0]), dim=1)
    return (found @ found.T).mean()


def _contrastive_samples(model, batch):
    found = F.normalize(model(batch[0]), dim=1)
    return (found @ found.T).mean(dim=1)


def _weighted(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 5.0, 1.0]))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_contrastive, ["loss", "mean", "(samples,)"]),
        (_contrastive_samples, ["loss", "alone", "others"]),
        (_weighted, ["loss", "mean", "(samples,)"]),
        (lambda model, batch: model(batch[0]), ["loss", "one number per sample", f"{CLASSES})"]),
        (lambda model, batch: 1.0, ["loss", "float"]),
        (lambda model, batch: model.no_such_layer(batch), ["loss", "ModelLoss", "no_such_layer"]),
        (lambda outputs: outputs, ["loss", "ModelLoss", "(model, (inputs, targets))"]),
    ],
)
def test_unfit_model_loss_is_refused_before_training(function, names):
    with refused(*names):
        problem(function)


def test_weighted_model_loss_is_refused_also_if_initial_outputs_are_equal():
    model = Encoder()
    for parameter in model.head.parameters():
        nn.init.zeros_(parameter)
    with refused("loss", "mean"):
        problem(_weighted, model)


def test_function_of_a_model_that_is_not_wrapped_is_told_the_way():
    with refused("loss", "model", "fm.losses.ModelLoss"):
        toys.problem(3, loss=plain)


def test_personalization_and_constant_references_need_a_loss_of_outputs():
    with refused("ModelLoss", "outputs"):
        trained(problem(plain), personalization=fm.personalization.Mixture())
    compared = fm.compare_with_references(problem(plain), rounds=1, references=["constant"], trace="no")
    assert missing_from(compared.failed["constant"], "ModelLoss", "outputs") == []


def test_digest_of_a_problem_knows_the_function_of_its_model_loss():
    model = Encoder()
    made = problem(plain, model)
    assert made.digest() == problem(plain, model).digest() != problem(two_passes, model).digest()
    assert made.keeping([0]).digest(made.digests_here()) == made.digest()


FILE = """
from torch.nn import functional as F

def loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")
"""


def test_experiment_file_names_a_model_loss_by_its_function(tmp_path: Path):
    (tmp_path / "mine.py").write_text(FILE)
    text = 'rounds = 2\nloss = { function = "mine.py:loss" }\n[data]\nname = "digits"\nnodes = 3\nodd = 1\n'
    text += '[algorithm]\nname = "tracked-ad-gda"\n'  # the default's decay needs a loss of outputs
    (tmp_path / "mine.toml").write_text(text)
    experiment = fm.load_experiment(tmp_path / "mine.toml")
    assert isinstance(experiment.loss, fm.losses.ModelLoss)
    result = fm.run(experiment, out=tmp_path / "run")
    usual = fm.run(fm.load_experiment(tmp_path / "mine.toml", ["loss=cross-entropy"]))
    torch.testing.assert_close(result.row(), usual.row(), rtol=1e-4, atol=1e-6)
    again = fm.load_experiment(tmp_path / "run" / "experiment.toml")
    assert missing_from(to_table(again)["loss"]["function"], "mine.py", "loss") == []
    assert from_table(fm.Experiment, to_table(experiment), "it").loss == experiment.loss
