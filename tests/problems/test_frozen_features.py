"""Features of a frozen encoder: training a head on them is training the whole model with the encoder frozen, nothing is
computed twice, and what cannot be kept is refused."""

import copy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.problems import frozen_features as module
from tests import toys
from tests.refusals import refused

calls: list[int] = []  # rows that the encoder has been given


def _encode(self, ids, mask):
    calls.append(len(ids))
    states = self.norm(self.embedding(ids).transpose(1, 2)).transpose(1, 2)
    states = self.scale * self.function(self.layer(self.drop(states))) + self.shift[1000]
    return {"states": states * mask.unsqueeze(-1), "mask": mask}


def _pooled(self, states, mask):
    mask = mask.unsqueeze(-1)
    return self.layers((states * mask).sum(1) / mask.sum(1).clamp(min=1))


def samples(k: int, count: int = 30) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    labels = torch.arange(count) % 2
    ids = torch.randint(0, 5, (count, 4), generator=generator) + 4 * labels[:, None]
    mask = torch.arange(4) < torch.randint(2, 5, (count, 1), generator=generator)
    return {"ids": ids, "mask": mask.long(), "labels": labels}


def items(k: int) -> toys.Items:
    held = samples(k)
    return toys.Items(len(held["labels"]), lambda i: {name: part[i] for name, part in held.items()})


def sites(kind="held"):
    read = (lambda k: fm.data.Streamed(items(k))) if kind == "streamed" else samples
    shared = samples(20)
    return [fm.Site(read(k), test=samples(10 + k), validation=shared, name=f"site {k}") for k in range(3)]


@pytest.fixture
def encoder():
    torch.manual_seed(3)
    layers = {"embedding": nn.Embedding(9, 6), "norm": nn.BatchNorm1d(6), "drop": nn.Dropout(0.5)}
    settings = {"scale": 1.0, "shift": torch.zeros(2000), "function": torch.tanh}
    return toys.module(_encode, **layers, layer=nn.Linear(6, 6), **settings).train()


@pytest.fixture
def head():
    torch.manual_seed(4)
    layers = nn.Sequential(nn.Dropout(0.2), nn.ReLU(inplace=True), nn.Linear(6, 2))
    return toys.module(_pooled, layers=layers).train()


def trained(made, rounds=8, **options):
    given = {"dtype": "float64", "measure_every": 4, "trace": "no"} | options
    return fm.train(made, fm.Ring(), fm.TrackedADGDA(0.05), rounds, **given)


def in_every_round(encoder, head, kind="held"):
    def forward(self, ids, mask):
        return self.head(**self.encoder(ids, mask))

    whole = toys.module(forward, encoder=copy.deepcopy(encoder).eval(), head=copy.deepcopy(head))
    return fm.Problem(whole, sites(kind), parts=fm.Parts(frozen=("encoder.*",)), sampling=fm.Sampling(6))


def on_features(encoder, head, folder, kind="held"):
    features = fm.models.frozen_features(encoder.double(), sites(kind), folder=folder, batch=8)
    return fm.Problem(head, features, sampling=fm.Sampling(6))


@pytest.mark.parametrize("kind", ["held", "streamed"])
def test_head_trained_on_features_is_that_of_the_whole_model_with_a_frozen_encoder(encoder, head, tmp_path, kind):
    whole = trained(in_every_round(encoder, head, kind))
    result = trained(on_features(encoder, head, tmp_path, kind))
    assert torch.allclose(result.row(), whole.row(), rtol=0, atol=1e-12)
    assert not torch.allclose(result.row()[0], result.problem.initial_row(0))
    for mine, theirs in zip(result.records, whole.records):
        assert mine["loss"]["sites"] == pytest.approx(theirs["loss"]["sites"], abs=1e-12)
        assert mine["bytes_total"] == theirs["bytes_total"]


def test_features_are_computed_once(encoder, tmp_path):
    def rows(encoder, given=None, **settings):
        calls.clear()
        fm.models.frozen_features(encoder, given or sites(), folder=tmp_path, **settings)
        return sum(calls)

    every = 3 * 30 + 3 * 30 + 30  # the validation set, which the sites share, once
    alone = 7 * 3  # a few rows of each set are also computed one by one
    assert rows(encoder) == every + alone
    assert rows(encoder) == 0
    assert rows(copy.deepcopy(encoder)) == 0
    changes = {
        "weights": lambda other: other.layer.bias.data[0].add_(1e-3),
        "buffers": lambda other: other.norm.running_mean.add_(1.0),
        "settings of a layer": lambda other: setattr(other.norm, "eps", 0.1),
        "an attribute": lambda other: setattr(other, "scale", 2.0),
        "a tensor that is no buffer": lambda other: other.shift[1000].add_(1.0),
        "a function": lambda other: setattr(other, "function", lambda x: 0.5 * x),
        "another function": lambda other: setattr(other, "function", lambda x: 0.6 * x),
    }
    for what, change in changes.items():
        other = copy.deepcopy(encoder)
        change(other)
        assert rows(other) == every + alone, what
    assert rows(encoder, batch=16) == every + alone
    relabelled, changed = sites(), sites()
    relabelled[0].train["labels"] = 1 - relabelled[0].train["labels"]
    changed[0].train["ids"][3, 0] += 1
    assert rows(encoder, relabelled) == 0
    assert rows(encoder, changed) == 30 + 3
    assert rows(encoder, sites("streamed")) == 3 * 30 + 3 * 3  # whose files have targets too
    assert rows(encoder, sites("streamed")) == 0


def test_encoder_is_left_as_it_is_and_computed_in_evaluation_mode(encoder, tmp_path):
    before = copy.deepcopy(encoder.state_dict())
    (first, *_) = fm.models.frozen_features(encoder, sites(), folder=tmp_path)
    assert encoder.training
    assert encoder.drop.training
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in encoder.parameters())
    with torch.no_grad():
        expected = encoder.eval()(samples(0)["ids"], samples(0)["mask"])["states"]
    torch.testing.assert_close(first.train[0]["states"], expected)
    assert not first.train[0]["states"].requires_grad


def test_sites_keep_all_but_their_inputs(encoder, tmp_path):
    inputs, labels = samples(0), samples(0)["labels"]
    scanners = ["A", "B"] * 15
    given = fm.Site(((inputs["ids"], inputs["mask"]), labels, scanners), group="new", name="Lyon", rows=list(range(30)))
    (made,) = fm.models.frozen_features(encoder, [given], folder=tmp_path)
    assert (made.group, made.name, made.rows) == ("new", "Lyon", list(range(30)))
    assert torch.equal(made.train[1], labels)
    assert made.train[2] == scanners
    several = fm.models.frozen_features(encoder, sites(), folder=tmp_path)
    assert several[0].validation is several[2].validation  # sites that share a set still do


@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "another file", "not written by fairmesh"])
def test_damaged_and_foreign_files_are_computed_again_and_told(encoder, tmp_path, damage, caplog):
    def features():
        return fm.models.frozen_features(encoder, sites(), folder=tmp_path)[1].train[0]["states"].clone()

    expected, files = features(), sorted(tmp_path.glob("*.features"))
    assert len(files) == 7
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)  # they say much about the rows behind them
    for file in files:
        content = bytearray(file.read_bytes())
        if damage == "a flipped bit":
            content[len(content) // 2] ^= 64
        contents = {"cut short": content[:-100], "another file": bytes(files[0].read_bytes()), "a flipped bit": content}
        if damage == "another file" and file == files[0]:
            continue
        file.write_bytes(contents.get(damage, b"mine"))
    calls.clear()
    assert torch.equal(features(), expected)
    told = [record.message for record in caplog.records if "computed again" in record.message]
    assert len(told) == (6 if damage == "another file" else 7)
    assert all(str(tmp_path) in line for line in told)
    calls.clear()
    features()
    assert not calls


def test_of_two_that_need_the_same_features_one_computes_and_the_other_waits(encoder, tmp_path):
    def features(own):
        return fm.models.frozen_features(own, sites(), folder=tmp_path)[2].train[0]["states"].clone()

    calls.clear()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(features, [copy.deepcopy(encoder) for _ in range(2)])
    assert torch.equal(first, second)
    assert sum(calls) == 7 * (30 + 3)


def test_interruption_leaves_nothing_unfinished(encoder, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        fm.models.frozen_features(encoder, sites(), folder=tmp_path)
    assert encoder.training
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_progress_is_told_if_it_takes_long(encoder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_EVERY_S", 0.0)
    fm.models.frozen_features(encoder, sites()[:1], folder=tmp_path, batch=20)
    assert ["20 of 30" in record.message for record in caplog.records].count(True) == 3
    assert "site 0" in caplog.records[0].message


def _encoder(function):
    return toys.module(lambda self, inputs: function(self.linear(inputs)), linear=nn.Linear(6, 4))


NOISY = toys.Items(12, lambda k: (torch.full((6,), float(k)) + torch.rand(6), k % 2))


NUMBERS = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
REFUSED = {
    "no module": (lambda: len, {}, ["nn.Module", "builtin_function"]),
    "batch": (lambda: nn.Linear(6, 4), {"batch": 0}, ["batch", 0]),
    "other inputs": (lambda: nn.Linear(5, 4), {}, ["site 0", "training samples", "encoder"]),
    "random": (lambda: _encoder(lambda x: x + torch.randn_like(x)), {}, ["random", "parts.frozen"]),
    "mixes rows": (lambda: _encoder(lambda x: x - x.mean(0)), {}, ["batch", "parts.frozen"]),
    "rows on another axis": (lambda: _encoder(lambda x: x.T), {}, ["(4, 12)", "12 rows"]),
    "no rows": (lambda: _encoder(lambda x: (x, x.mean())), {}, ["()", "12 rows"]),
    "an object": (lambda: _encoder(lambda x: (x, slice(1))), {}, ["slice", "use_cache"]),
    "nothing": (lambda: _encoder(lambda x: ()), {}, ["tuple"]),
    "NaN": (lambda: _encoder(lambda x: torch.where(torch.arange(12)[:, None] == 7, torch.nan, x)), {}, ["row 7"]),
    "random transforms": (lambda: nn.Linear(6, 4), {"data": fm.data.Streamed(NOISY)}, ["random transforms"]),
    "targets": (lambda: nn.Linear(6, 4), {"targets": "label"}, ["label"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.quick_cases(len(REFUSED))
def test_what_cannot_be_kept_is_refused(case, tmp_path):
    make, settings, names = REFUSED[case]
    settings = dict(settings)
    given = [fm.Site(settings.pop("data", NUMBERS))]
    with refused(*names):
        fm.models.frozen_features(make(), given, folder=tmp_path, **settings)
    assert not list(tmp_path.glob("*.features"))


def test_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with refused(str(tmp_path / "file"), "another folder"):
        fm.models.frozen_features(nn.Linear(6, 4), [fm.Site(NUMBERS)], folder=tmp_path / "file")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with refused(str(tmp_path), "No space left", "free some space"):
        fm.models.frozen_features(nn.Linear(6, 4), [fm.Site(NUMBERS)], folder=tmp_path)


def test_whole_model_is_exported_and_predicts_from_raw_inputs(tmp_path):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
    data = [fm.Site((NUMBERS[0] + k, NUMBERS[1]), test=NUMBERS, name=f"site {k}") for k in range(3)]
    features = fm.models.frozen_features(encoder, data, folder=tmp_path)
    result = fm.train(fm.Problem(nn.Linear(5, 2), features), rounds=5, out=tmp_path / "run")
    assert result.state_dict().keys() == {"weight", "bias"}  # what is trained, sent and kept in checkpoints
    model = fm.inference.TrainedModel.of(result).with_encoder(encoder, NUMBERS[0])
    assert (model.shape, model.dtype, model.output) == ((6,), "float32", "logits")
    head = nn.Linear(5, 2)
    head.load_state_dict(result.state_dict())
    with torch.no_grad():
        expected = nn.Sequential(encoder.eval(), head)(NUMBERS[0]).softmax(1)
    torch.testing.assert_close(torch.from_numpy(fm.predict(model, NUMBERS[0]).values), expected)
    about = fm.export(model, tmp_path / "whole.pt2", "torch-export")
    assert about["input"]["shape"] == [6]
    torch.testing.assert_close(torch.export.load(tmp_path / "whole.pt2").module()(NUMBERS[0]), expected)
    fm.export(model, tmp_path / "whole.safetensors", "safetensors")
    assert fm.inference.load_weights(tmp_path / "whole.safetensors", copy.deepcopy(model.module))["model"]["round"] == 5
    with refused("encoder and head", "inputs"):
        fm.inference.TrainedModel.of(result).with_encoder(encoder, torch.zeros(2, 7))


def test_whole_model_of_several_inputs_is_exported(encoder, head, tmp_path):
    result = trained(on_features(encoder, head, tmp_path), 4)
    raw = {name: part for name, part in samples(0).items() if name != "labels"}
    model = fm.inference.TrainedModel.of(result).with_encoder(encoder, raw)
    about = fm.export(model, tmp_path / "whole.safetensors", "safetensors")
    assert [part["name"] for part in about["input"]["parts"]] == ["ids", "mask"]
    assert about["output"]["kind"] == "structure"
    test = samples(11)
    right = (model.module(test["ids"], test["mask"]).argmax(1) == test["labels"]).double().mean()
    assert float(right) == pytest.approx(result.final[0]["accuracy"]["sites"][1])


LARGE = """
import resource, sys
import torch
import fairmesh as fm

class Rows(torch.utils.data.Dataset):
    def __init__(self, site):
        self.site, self.targets = site, [k % 2 for k in range(30_000)]
    def __len__(self):
        return 30_000
    def __getitem__(self, k):
        return torch.full((4,), float(self.targets[k])) + torch.arange(4) * self.site + k * 1e-5, self.targets[k]

torch.manual_seed(0)
encoder, few = torch.nn.Linear(4, 2000), (torch.rand(20, 4), torch.arange(20) % 2)
def problem(make):
    sites = [fm.Site(make(k), test=few) for k in range(2)]
    features = fm.models.frozen_features(encoder, sites, batch=500, folder=sys.argv[1])
    return fm.Problem(torch.nn.Linear(2000, 2), features, sampling=fm.Sampling(8))
fm.train(problem(lambda k: few), fm.Ring(), fm.algorithms.DSGD(1e-4), 2)  # what a first run imports and allocates
lines = open("/proc/self/status").read().splitlines()
now = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (now + (150 << 20), resource.RLIM_INFINITY))
result = fm.train(problem(lambda k: fm.data.Streamed(Rows(k))), fm.Ring(), fm.algorithms.DSGD(1e-4), 5)
print(result.rounds, sum(site.train.nbytes for site in result.problem.sites))
"""


@pytest.mark.slow
def test_features_that_are_larger_than_memory_stay_on_disk(tmp_path):
    done = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rounds, size = map(int, done.stdout.split())
    assert rounds == 5
    assert size > 2 * 30_000 * 2000 * 4  # 480 MB, where the process may take 150 MB


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["held", "streamed"])
def test_features_are_computed_where_the_encoder_is(encoder, head, tmp_path, kind):
    whole = trained(in_every_round(encoder, head, kind), 20, device="cuda", trace="auto").row().cpu()
    for device in ("cpu", "cuda"):
        made = on_features(encoder.to(device), head, tmp_path, kind)
        assert made.sites[0].train.inputs["states"].device.type == "cpu"
        result = trained(made, 20, device=device, trace="auto")
        torch.testing.assert_close(result.row().cpu(), whole, rtol=1e-6, atol=1e-7)
