"""Models and targets that cannot be used are refused before round 0: the error names the part and the way out."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

import fairmesh as fm
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


class Normed(nn.Module):
    """Spectral norm by torch.linalg."""

    def forward(self, weight):
        return weight / torch.linalg.matrix_norm(weight, ord=2)


def _by_linalg(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Normed())
    return module


@pytest.mark.parametrize(
    "changed",
    [parametrizations.weight_norm, parametrizations.orthogonal, _by_linalg,
     lambda module: parametrizations.spectral_norm(module).eval()],
    ids=["weight norm", "orthogonal", "spectral norm by torch.linalg", "spectral norm in evaluation mode"],
)  # fmt: skip
def test_other_parametrizations_train(changed):
    result = fm.train(
        problem(network(changed(layer()))), fm.Ring(), fm.algorithms.DSGD(0.1), 1, dtype="float64", trace="no"
    )
    assert bool(torch.isfinite(result.row()).all())


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


@pytest.mark.parametrize("made", [torch.jit.script, lambda module: torch.jit.trace(module, INPUTS[:2].float())])
def test_compiled_modules_of_torch_jit_train(made):
    fm.train(problem(made(network(layer()))), fm.Ring(), fm.algorithms.DSGD(0.1), 1, trace="no")


def test_complex_parameters_are_refused_by_name_and_the_way_out_trains():
    class Complex(nn.Module):
        def __init__(self, as_real):
            super().__init__()
            weight = torch.randn(FEATURES, 4, dtype=torch.complex64)
            parts = (weight.real, weight.imag) if as_real else (weight,)
            self.weights = nn.ParameterList([part.clone() for part in parts])
            self.head = nn.Linear(4, CLASSES)

        def forward(self, inputs):
            weight = self.weights[0] if len(self.weights) == 1 else torch.complex(*self.weights)
            return self.head((inputs.to(weight.dtype) @ weight).abs())

    with refused("parameter weights.0 (ParameterList)", "complex", "w.real", "w.imag", "torch.complex"):
        problem(Complex(as_real=False))
    fm.train(problem(Complex(as_real=True)), fm.Ring(), fm.algorithms.DSGD(0.1), 1, trace="no")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embedding_is_refused_by_name(kind):
    tokens = torch.arange(2 * len(LABELS)).reshape(-1, 2) % 5

    def model(sparse):
        layers = [nn.Flatten(), nn.Linear(8, CLASSES)] if kind is nn.Embedding else [nn.Linear(4, CLASSES)]
        return nn.Sequential(kind(5, 4, sparse=sparse), *layers)

    with refused("layer 0", kind.__name__, "sparse=True"):
        problem(model(sparse=True), sites=[(tokens, LABELS)] * 2)
    problem(model(sparse=False), sites=[(tokens, LABELS)] * 2)


@pytest.mark.parametrize("inputs", [INPUTS, INPUTS.numpy(), (INPUTS,), INPUTS[:2]])
def test_inputs_without_targets_are_refused_and_the_way_out_trains(inputs):
    with refused("site 0", "no targets", "fm.Site((x, x))", "mse_loss"):
        problem(nn.Linear(FEATURES, FEATURES), sites=[fm.Site(inputs)])
    sites = [fm.Site((INPUTS, INPUTS))] * 2
    coder = problem(nn.Linear(FEATURES, FEATURES), sites=sites, loss=nn.functional.mse_loss)
    fm.train(coder, fm.Ring(), fm.algorithms.DSGD(0.1), 1, trace="no")


def test_targets_0_and_1_as_floats_are_predicted_by_squared_error_and_a_line_says_so():
    said: list[str] = []
    for targets, loss in (((LABELS % 2).float(), None), (INPUTS[:, 0], None), ((LABELS % 2).float(), "mse")):
        given = {} if loss is None else {"loss": lambda outputs, y: nn.functional.mse_loss(outputs[:, 0], y)}
        said.append("")
        fm.train(
            problem(nn.Linear(FEATURES, 1), targets, **given), fm.Ring(), fm.algorithms.DSGD(0.1), 1, trace="no",
            announce=lambda line: said.append(said.pop() + line),
        )  # fmt: skip
    assert not missing_from(said[0], "squared error", "fm.losses.BinaryCrossEntropy()", "targets.long()")
    assert ["squared error" in lines for lines in said] == [True, False, False]


def test_shares_of_classes_train_by_the_cross_entropy_of_torch_and_are_no_numbers():
    made = problem(network(layer()), nn.functional.one_hot(LABELS, CLASSES).float())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not fm.train(made, fm.Ring(), fm.algorithms.DSGD(0.1), 1, trace="no").notes


def test_metric_that_fits_no_such_problem_names_no_other():
    with refused("accuracy", "fm.metrics.Metric") as caught:
        problem(
            network(layer()), sites=[(INPUTS, (LABELS, LABELS))] * 2, metrics=["accuracy"],
            loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets[0]),
        )  # fmt: skip
    assert "metrics that fit it" not in str(caught.value)


def test_checkpoint_of_another_architecture_is_refused(tmp_path):
    def run(width: int, rounds: int, **options):
        model = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES))
        made = problem(model, sites=[GOOD, GOOD])
        fm.train(made, fm.Ring(), fm.algorithms.DSGD(0.1), rounds, out=tmp_path, trace="no", **options)

    run(3, 1)
    with refused("model", error=fm.errors.FairmeshError):
        run(4, 2, resume=True)


class Words(nn.Embedding):
    def forward(self, inputs):
        return nn.functional.embedding(inputs, self.weight, sparse=True).flatten(1)


class Returning(nn.Linear):
    """Returns what a function makes of its outputs and its inputs."""

    def __init__(self, returned):
        super().__init__(FEATURES, CLASSES)
        self.returned = returned

    def forward(self, inputs):
        return self.returned(super().forward(inputs), inputs)


def named(outputs, inputs):
    return {"risk": outputs, "size": inputs.sum(dim=1)}


ONE, NORMED = nn.Linear(FEATURES, 1), network(nn.Sequential(layer(), nn.BatchNorm1d(4)))
ALONE = [fm.Site((INPUTS, LABELS)), fm.Site((INPUTS[:1], LABELS[:1]), name="north")]
TOKENS = torch.arange(2 * len(LABELS)).reshape(-1, 2) % 5
ONE_HOT = nn.functional.one_hot(LABELS, CLASSES)
NO_SHARES = ("3 floats", "do not sum to 1", "mse_loss", "BinaryCrossEntropy")
NO_LABELS = ("cross-entropy", "floats", "targets.long()", "cross_entropy")
REFUSED = {  # words of the refusal, model, targets, and other settings
    "sparse gradients": (
        ("leave out sparse=True",),
        nn.Sequential(Words(5, 4), nn.Linear(8, CLASSES)),
        LABELS,
        {"sites": [(TOKENS, LABELS)] * 2},
    ),
    "negative shares": (NO_SHARES, nn.Linear(FEATURES, 3), INPUTS[:, :1].repeat(1, 3).double(), {}),
    "shares beyond 1": (NO_SHARES, nn.Linear(FEATURES, 3), torch.ones(len(INPUTS), 3).double(), {}),
    "one output": (("one output", "BinaryCrossEntropy"), ONE, LABELS % 2, {}),
    "no values": (
        ("0.weight", "meta", "load_state_dict"),
        nn.Sequential(nn.Linear(FEATURES, CLASSES, device="meta")),
        LABELS,
        {},
    ),
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
    "dictionary": (("'size'", "outputs['risk']"), Returning(named), LABELS, {}),
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
        Returning(lambda outputs, inputs: (outputs, inputs.mean())),
        LABELS,
        {"loss": lambda outputs, targets: outputs[1], "read": lambda outputs: outputs[0]},
    ),
    "BatchNorm of one sample": (
        ("batch_norm", "site 0 (node 0)", "frozen", "convert"),
        NORMED,
        LABELS,
        {"sites": [(INPUTS[:1], LABELS[:1])] * 2, "sampling": fm.Sampling(order="full"), "batch_norm": "shared"},
    ),
    "BatchNorm at a site with one sample": (
        ("batch_norm", "site 1 (north)", "frozen", "convert"),
        NORMED,
        LABELS,
        {"sites": ALONE, "sampling": fm.Sampling(), "batch_norm": "local"},
    ),
}


@pytest.mark.parametrize(("words", "model", "targets", "fields"), REFUSED.values(), ids=REFUSED)
def test_unfit_models_and_targets_are_refused_with_the_way_out(words, model, targets, fields):
    with refused(*words):
        problem(model, targets, **fields)


@pytest.mark.parametrize(
    ("model", "targets", "fields"),
    [
        (nn.Linear(FEATURES, 3), torch.softmax(torch.randn(len(INPUTS), 3).double(), dim=1), {}),
        (ONE, LABELS % 2, {"loss": fm.losses.BinaryCrossEntropy()}),
        (network(layer()), ONE_HOT, {"loss": fm.losses.BinaryCrossEntropy()}),
    ],
)
def test_ways_out_are_accepted(model, targets, fields):
    problem(model, targets, **fields)
