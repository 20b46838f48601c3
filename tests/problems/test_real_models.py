"""Models, losses and data as users bring them. Each works, or is refused with the way out: a row per case."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import fairmesh as fm
from tests import toys
from tests.pairwise import some_quick
from tests.problems.test_structures import bert, gpt2
from tests.refusals import missing_from, refused

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap runs attention in a loop

ROWS: dict[str, Callable[[], None]] = {}
INPUTS = torch.linspace(-1, 1, 72).reshape(12, 6)
LABELS = torch.arange(12) % 3
SITES = [fm.Site((INPUTS + k, LABELS), test=(INPUTS, LABELS)) for k in range(3)]


def row(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds a case to the table."""

    def added(case: Callable[[], None]) -> Callable[[], None]:
        ROWS[name] = case
        return case

    return added


def works(model: nn.Module | Callable[[], nn.Module], sites=SITES, **fields) -> tuple[fm.Result, str]:
    """Trains for two rounds, twice, which must give the same bits; returns the result and what was announced."""
    problem, said, options = fm.Problem(model, sites, **fields).prepared, [], {"measure_every": 2, "trace": "no"}
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        runs.append(fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 2, announce=said.append, **options))
    assert torch.equal(runs[0].row(), runs[1].row())
    assert torch.isfinite(runs[0].row()).all()
    assert not torch.equal(runs[0].row()[0], problem.initial_row(0).float())
    return runs[0], "\n".join(said)


def asked(*names: object, model=None, sites=SITES, **fields) -> None:
    """Passes if the problem is refused with all of the names."""
    with refused(*names):
        fm.Problem(nn.Linear(6, 3) if model is None else model, sites, **fields)


# Vision


def backbone() -> nn.Module:
    """A frozen network with BatchNorm, never put into evaluation mode, and a head that is trained."""
    body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU()).requires_grad_(False)
    return toys.module(lambda self, inputs: self.head(self.body(inputs)), body=body, head=nn.Linear(4, 3))


@row("resnet18, BatchNorm in train mode; mobilenet_v3_small")
def _():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    for policy in ("frozen", "local", "shared", "convert"):
        assert policy in works(model, batch_norm=policy, sampling=fm.Sampling(4))[1]


@row("frozen resnet18 with a trainable head, never put into evaluation mode")
def _():
    module = backbone()
    asked("body.1 (BatchNorm1d)", ".eval()", '"frozen"', model=module)
    result, said = works(module, batch_norm="frozen")
    assert "keep their statistics" in said
    assert result.problem.flat_model.dim == 15
    assert torch.equal(result.state_dict()["body.1.running_mean"], module.body[1].running_mean)


# Text, sequences, dense targets


def _bert_of_one_tensor(self, inputs: Tensor) -> Tensor:
    mask = (1.0 - inputs[:, 1].float())[:, None, None, :] * -1e9 if self.additive else inputs[:, 1]
    return self.bert(input_ids=inputs[:, 0], attention_mask=mask).logits


def trains_bert(attention: str, additive: bool = False) -> fm.Result:
    """BERT with its default dropout, ids and mask in one tensor; the mask may be added to the attention's scores."""
    ids = torch.arange(48).reshape(8, 6) % 30
    mask = (torch.arange(6) < 3 + torch.arange(8)[:, None] % 4).long()
    sites = [(torch.stack([ids, mask], dim=1), torch.arange(8) % 2)] * 2

    def made() -> nn.Module:
        inner = bert("BertForSequenceClassification", num_labels=2, attn_implementation=attention)
        return toys.module(_bert_of_one_tensor, bert=inner, additive=additive)

    return works(made, sites, sampling=fm.Sampling(4))[0]


@row("BERT with a 4-D additive mask and its default dropout")
def _():
    trains_bert("sdpa", True)


@row("BERT with its own mask, eager attention")
def _():
    trains_bert("eager")


@row("BERT with its own mask")
def _():
    assert trains_bert("sdpa").problem.at_once(torch.device("cpu")) == 1


@row("GPT-2 as a language model is traced without a warning")
def _():
    ids = torch.arange(48).reshape(8, 6) % 12
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        problem = fm.Problem(gpt2(), [({"input_ids": ids}, ids)] * 2)
        fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 1, announce=lambda line: None)
    assert [str(one.message) for one in told if "traced" in str(one.message)] == []


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Every sample shall resemble itself more than the others of its batch."""
    directions = F.normalize(outputs, dim=1)
    return F.cross_entropy(directions @ directions.T / 0.1, torch.arange(len(outputs)))


@row("loss over the batch (contrastive)")
def _():
    asked("mean of their single losses", "compares samples with each other", loss=contrastive)


@row("a contrastive loss within samples")
def _():
    def forward(self, anchor: Tensor, others: Tensor) -> Tensor:
        return torch.einsum("bd,bkd->bk", *(F.normalize(self.embed(one), dim=-1) for one in (anchor, others)))

    views = toys.module(forward, embed=nn.Linear(6, 4))
    others = torch.randn(12, 5, 6, generator=torch.Generator().manual_seed(0))
    works(views, [((INPUTS, others), torch.zeros(12, dtype=torch.int64))] * 2, sampling=fm.Sampling(4))


# Data


def drawings(mode: str) -> toys.Items:
    """Images as a folder gives them without a transform."""
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    return toys.Items(6, lambda i: (Image.fromarray(pixels + i).convert(mode), i % 2))


@row("PIL images without ToTensor")
def _():
    for mode, channels in (("RGB", 3), ("L", 1)):
        images = torch.stack(
            [torch.from_numpy(np.array(image)) for image, _ in map(drawings(mode).__getitem__, range(6))]
        )
        arrays = images.permute(0, 3, 1, 2) if channels == 3 else images.unsqueeze(1), torch.arange(6) % 2
        model = nn.Sequential(nn.Flatten(), nn.Linear(16 * channels, 2))
        runs = [works(model, [one] * 2)[0] for one in (drawings(mode), fm.data.Streamed(drawings(mode)), arrays)]
        assert torch.equal(runs[0].row(), runs[2].row())
        assert torch.equal(runs[1].row(), runs[2].row())
    asked("site 0", "mode 'CMYK'", ".convert('RGB')", sites=[drawings("CMYK")])


class Broken(toys.Items):
    def __getitem__(self, i: int):
        raise self.item


@row("a Dataset that is read into memory and does not fit")
def _():
    for error in (
        MemoryError("Unable to allocate 4.77 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        asked("site 0", "does not fit into memory", "fm.data.Streamed", sites=[Broken(6, error)])


@row("items of unequal size")
def _():
    asked("site 0", "unequal size", "pad or crop", sites=[toys.Items(6, lambda i: (torch.zeros(1, 4 + i, 4), i % 2))])


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(6), 0


@row("IterableDataset")
def _():
    asked("site 0", "IterableDataset", "items by index", sites=[Stream()])


# Training options


@row('dtype = "bfloat16"')
def _():
    for short in ("bfloat16", "float16"):
        with refused("dtype", short, 'precision = "bf16"'):
            fm.train(fm.Problem(nn.Linear(6, 3), SITES), rounds=1, dtype=short)


@row("bf16 modules")
def _():
    result, said = works(nn.Linear(6, 3).bfloat16())
    assert missing_from(said, "bfloat16", "float32", "precision = 'bf16'") == []
    assert result.row().dtype == torch.float32


@row("autocast around fm.Problem and fm.train")
def _():
    problem = fm.Problem(nn.Linear(6, 3), SITES)
    with torch.autocast("cpu", torch.bfloat16):
        asked("torch.autocast", "precision = 'bf16'")
        with refused("torch.autocast", "precision = 'bf16'"):
            fm.train(problem, rounds=1)


@row("autocast inside forward")
def _():
    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(inputs)

    works(toys.module(forward, layer=nn.Linear(6, 3)))


@row("torch.compile(model)")
def _():
    asked("torch.compile", "layer itself", "fuse", model=torch.compile(nn.Linear(6, 3), backend="eager"))
    asked("torch.compile", "layer 0", model=nn.Sequential(torch.compile(nn.Linear(6, 3), backend="eager")))


TEMPERATURE = {"value": 1.0}


class Annealing(fm.observers.Observer):
    def after_round(self, round, state):
        TEMPERATURE["value"] = 1.0 + round


@row('a temperature that an observer anneals, with trace = "no"')
def _():
    annealed = toys.module(lambda self, x: self.layer(x) / TEMPERATURE["value"], layer=nn.Linear(6, 3))
    problem, rows = fm.Problem(annealed, SITES), []
    for observers in ([], [Annealing()]):
        TEMPERATURE["value"] = 1.0
        rows.append(fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 3, observers=observers, trace="no").row())
    assert not torch.equal(*rows)


SLOW = (
    "GPT-2 as a language model is traced without a warning",
    "BERT with a 4-D additive mask and its default dropout",
    "BERT with its own mask, eager attention",
)


@some_quick("name", list(ROWS), *[name for name in ROWS if name not in SLOW])
def test_row_works_or_is_refused_with_the_way_out(name: str):
    ROWS[name]()
