"""Models and targets that cannot be used are refused before round 0: the error names the part and the way out."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

import fairmesh as fm
from tests import toys
from tests.problems.test_problem_data import GOOD, INPUTS, LABELS
from tests.refusals import missing_from, refused
from tests.toys import CLASSES, FEATURES

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of what it deprecates or falls back to


def problem(model, targets=LABELS, **fields) -> fm.Problem:
    sites = fields.pop("sites", [(INPUTS, targets)] * 2)
    return fm.Problem(model, sites, **{"sampling": fm.Sampling(batch=4)} | fields)


def network(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, CLASSES))


def layer() -> nn.Linear:
    return nn.Linear(FEATURES, 4)


def _by_linalg(module: nn.Module) -> nn.Module:
    normed = toys.module(lambda self, weight: weight / torch.linalg.matrix_norm(weight, ord=2))
    parametrize.register_parametrization(module, "weight", normed)
    return module


MADE = {
    "weight norm": lambda: network(parametrizations.weight_norm(layer())),
    "orthogonal": lambda: network(parametrizations.orthogonal(layer())),
    "spectral norm by torch.linalg": lambda: network(_by_linalg(layer())),
    "spectral norm in evaluation mode": lambda: network(parametrizations.spectral_norm(layer()).eval()),
    "torch.jit.script": lambda: torch.jit.script(network(layer())),
    "torch.jit.trace": lambda: torch.jit.trace(network(layer()), INPUTS[:2].float()),
    "complex numbers as two parameters": lambda: complex_model(as_real=True),
}


def one_round(made: fm.Problem, **options) -> fm.Result:
    return fm.train(made, fm.Ring(), fm.algorithms.DSGD(0.1), 1, trace="no", **options)


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_parametrizations_and_compiled_modules_train(made):
    assert bool(torch.isfinite(one_round(problem(made()), dtype="float64").row()).all())


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize(
    ("changed", "names"),
    [
        (parametrizations.spectral_norm, ("spectral_norm", "0.parametrizations.weight.0", "matrix_norm")),
        (old_spectral_norm, ("layer 0", "parametrizations.weight_norm")),
        (old_weight_norm, ("layer 0", "parametrizations.weight_norm")),
    ],
    ids=["spectral norm", "old spectral norm", "old weight norm"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_norms_of_weights_with_a_state_or_a_hook_are_refused_by_the_name_of_the_layer(changed, names, as_function):
    def made() -> nn.Module:
        model = network(changed(layer()))
        model(INPUTS[:2].float())  # an old one leaves a weight that torch does not copy
        return model

    with refused(*names):
        problem(made if as_function else made())


def complex_model(as_real: bool) -> nn.Module:
    def forward(self, inputs):
        weight = self.weights[0] if len(self.weights) == 1 else torch.complex(*self.weights)
        return self.head((inputs.to(weight.dtype) @ weight).abs())

    weight = torch.randn(FEATURES, 4, dtype=torch.complex64)
    parts = [part.clone() for part in ((weight.real, weight.imag) if as_real else (weight,))]
    return toys.module(forward, weights=nn.ParameterList(parts), head=nn.Linear(4, CLASSES))


@pytest.mark.parametrize("inputs", [INPUTS, INPUTS.numpy(), (INPUTS,), INPUTS[:2]])
def test_inputs_without_targets_are_refused(inputs):
    with refused("site 0", "no targets", "fm.Site((x, x))", "mse_loss"):
        problem(nn.Linear(FEATURES, FEATURES), sites=[fm.Site(inputs)])


def test_targets_0_and_1_as_floats_are_predicted_by_squared_error_and_a_line_says_so():
    said: list[str] = []
    own = {"loss": lambda outputs, y: nn.functional.mse_loss(outputs[:, 0], y)}
    for targets, given in (((LABELS % 2).float(), {}), (INPUTS[:, 0], {}), ((LABELS % 2).float(), own)):
        said.append("")
        made = problem(nn.Linear(FEATURES, 1), targets, **given)
        one_round(made, announce=lambda line: said.append(said.pop() + line))
    assert not missing_from(said[0], "squared error", "fm.losses.BinaryCrossEntropy()", "targets.long()")
    assert ["squared error" in lines for lines in said] == [True, False, False]


def test_shares_of_classes_train_by_the_cross_entropy_of_torch_and_are_no_numbers():
    made = problem(network(layer()), nn.functional.one_hot(LABELS, CLASSES).float())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not one_round(made).notes


def test_checkpoint_of_another_architecture_is_refused(tmp_path):
    def run(width: int, rounds: int, **options):
        model = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES))
        made = problem(model, sites=[GOOD, GOOD])
        fm.train(made, fm.Ring(), fm.algorithms.DSGD(0.1), rounds, out=tmp_path, trace="no", **options)

    run(3, 1)
    with refused("model", error=fm.errors.FairmeshError):
        run(4, 2, resume=True)


def returning(returned) -> nn.Module:
    """Returns what a function makes of its outputs and its inputs."""
    return toys.module(lambda self, x: returned(self.layer(x), x), layer=nn.Linear(FEATURES, CLASSES))


def _sparse(self, inputs):
    return self.head(nn.functional.embedding(inputs, self.weight, sparse=True).flatten(1))


WORDS = toys.module(_sparse, weight=nn.Parameter(torch.randn(5, 4)), head=nn.Linear(8, CLASSES))


def embedding(sparse: bool) -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, CLASSES))


def embedding_bag(sparse: bool) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(5, 4, sparse=sparse), nn.Linear(4, CLASSES))


ONE, NORMED = nn.Linear(FEATURES, 1), network(nn.Sequential(layer(), nn.BatchNorm1d(4)))
ALONE = [fm.Site((INPUTS, LABELS)), fm.Site((INPUTS[:1], LABELS[:1]), name="north")]
TOKENS = {"sites": [(torch.arange(2 * len(LABELS)).reshape(-1, 2) % 5, LABELS)] * 2}
ONE_HOT = nn.functional.one_hot(LABELS, CLASSES)
NO_SHARES = ("3 floats", "do not sum to 1", "mse_loss", "BinaryCrossEntropy")
NO_LABELS = ("cross-entropy", "floats", "targets.long()", "cross_entropy")
BY_ROWS = {"sites": [(INPUTS[:1], LABELS[:1])] * 2, "sampling": fm.Sampling(order="full"), "batch_norm": "shared"}
SECOND = {"loss": lambda outputs, targets: outputs[1], "read": lambda outputs: outputs[0]}
TWO_TARGETS = {
    "sites": [(INPUTS, (LABELS, LABELS))] * 2,
    "metrics": ["accuracy"],
    "loss": lambda outputs, targets: nn.functional.cross_entropy(outputs, targets[0]),
}
EMPTY = nn.Sequential(nn.Linear(FEATURES, CLASSES, device="meta"))
SPARSE, SQUARES = ("layer 0", "sparse=True"), nn.functional.mse_loss
MIXED_UP = ("parameter weights.0 (ParameterList)", "complex", "w.real", "w.imag", "torch.complex")
REFUSED = {  # words of the refusal, model, targets, and other settings
    "sparse gradients": (("leave out sparse=True",), WORDS, LABELS, TOKENS),
    "sparse embedding": ((*SPARSE, "Embedding"), embedding(True), LABELS, TOKENS),
    "sparse bag": ((*SPARSE, "EmbeddingBag"), embedding_bag(True), LABELS, TOKENS),
    "complex parameters": (MIXED_UP, complex_model(as_real=False), LABELS, {}),
    "negative shares": (NO_SHARES, nn.Linear(FEATURES, 3), INPUTS[:, :1].repeat(1, 3).double(), {}),
    "shares beyond 1": (NO_SHARES, nn.Linear(FEATURES, 3), torch.ones(len(INPUTS), 3).double(), {}),
    "one output": (("one output", "BinaryCrossEntropy"), ONE, LABELS % 2, {}),
    "no values": (("0.weight", "meta", "load_state_dict"), EMPTY, LABELS, {}),
    "float labels": (("squared error", "targets.long()"), network(layer()), LABELS.float(), {}),
    **{
        f"floats for a loss of labels {k}": (NO_LABELS, network(layer()), targets, {"loss": fm.losses.CrossEntropy()})
        for k, targets in enumerate((LABELS.float(), LABELS + 0.5, ONE_HOT.float()))
    },
    "one-hot labels": (
        ("one-hot", "argmax(dim=1)", "BinaryCrossEntropy"),
        network(layer()),
        ONE_HOT,
        {"loss": fm.losses.CrossEntropy()},
    ),
    "labels in a column": (("(samples, 1)", "squeeze(1)"), network(layer()), LABELS[:, None], {}),
    "no loss": (("fm.losses", "None"), network(layer()), LABELS, {"loss": None}),
    "name of a loss": (("fm.losses", "'focal'"), network(layer()), LABELS, {"loss": "focal"}),
    "class of a loss": (("fm.losses", "class Focal", "Focal()"), network(layer()), LABELS, {"loss": fm.losses.Focal}),
    "dictionary": (("'size'", "outputs['risk']"), returning(lambda o, x: {"risk": o, "size": x.sum(1)}), LABELS, {}),
    "yes or no": (("True and False", "long()"), network(layer()), LABELS > 0, {}),
    "complex targets": (("site 0", "targets", "complex"), network(layer()), LABELS.to(torch.complex64), {}),
    "loss of logits": (
        ("BinaryCrossEntropy",),
        ONE,
        LABELS % 2,
        {"loss": nn.functional.binary_cross_entropy_with_logits},
    ),
    "outputs without rows": (
        ("tuple of 2", "one row per sample", "ModelLoss"),
        returning(lambda outputs, inputs: (outputs, inputs.mean())),
        LABELS,
        SECOND,
    ),
    "BatchNorm of one sample": (("batch_norm", "site 0 (node 0)", "frozen", "convert"), NORMED, LABELS, BY_ROWS),
    "BatchNorm at a site with one sample": (
        ("batch_norm", "site 1 (north)", "frozen", "convert"),
        NORMED,
        LABELS,
        {"sites": ALONE, "sampling": fm.Sampling(), "batch_norm": "local"},
    ),
    "metric of one target": (("accuracy", "fm.metrics.Metric"), network(layer()), LABELS, TWO_TARGETS),
}


@pytest.mark.parametrize(("words", "model", "targets", "fields"), REFUSED.values(), ids=REFUSED)
def test_unfit_models_and_targets_are_refused_with_the_way_out(words, model, targets, fields):
    with refused(*words) as caught:
        problem(model, targets, **fields)
    assert "metrics that fit it" not in str(caught.value)  # no other metric is offered where none fits


@pytest.mark.parametrize(
    ("model", "targets", "fields"),
    [
        (nn.Linear(FEATURES, 3), torch.softmax(torch.randn(len(INPUTS), 3).double(), dim=1), {}),
        (ONE, LABELS % 2, {"loss": fm.losses.BinaryCrossEntropy()}),
        (network(layer()), ONE_HOT, {"loss": fm.losses.BinaryCrossEntropy()}),
        (embedding(False), LABELS, TOKENS),
        (embedding_bag(False), LABELS, TOKENS),
        (nn.Linear(FEATURES, FEATURES), INPUTS, {"loss": SQUARES}),
    ],
)
def test_ways_out_are_accepted_and_train(model, targets, fields):
    one_round(problem(model, targets, **fields))
