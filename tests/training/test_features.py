"""Runs on the outputs of a frozen prefix: they are the runs that compute the prefix in every pass, and nothing is
computed twice."""

import copy
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import fairmesh as fm
from fairmesh.storage import feature_store
from fairmesh.training.features import bytes_of_features, with_features
from tests.refusals import missing_from, refused

CPU = torch.device("cpu")
calls: list[int] = []  # rows that the prefix has been given


class Encoder(nn.Module):
    """Returns states of tokens and a summary, which the rest does not read."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(9, 6), nn.BatchNorm1d(6)
        self.drop, self.layer = nn.Dropout(0.5), nn.Linear(6, 6)

    def forward(self, ids, mask):
        calls.append(len(ids))
        states = self.norm(self.embedding(ids).transpose(1, 2)).transpose(1, 2)
        states = torch.tanh(self.layer(self.drop(states))) * mask.unsqueeze(-1)
        return {"states": states, "summary": states.sum(1)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 2))

    def forward(self, ids, mask):
        states, mask = self.encoder(ids, mask)["states"], mask.unsqueeze(-1)
        return self.head((states * mask).sum(1) / mask.sum(1).clamp(min=1))


def samples(k: int, count: int = 30) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    labels = torch.arange(count) % 2
    ids = torch.randint(0, 5, (count, 4), generator=generator) + 4 * labels[:, None]
    mask = torch.arange(4) < torch.randint(2, 5, (count, 1), generator=generator)
    return {"ids": ids, "mask": mask.long(), "labels": labels}


class Items(torch.utils.data.Dataset):
    def __init__(self, k: int, count: int = 30):
        self.held = samples(k, count)

    def __len__(self):
        return len(self.held["labels"])

    def __getitem__(self, i):
        return {name: part[i] for name, part in self.held.items()}


def sites(kind="held"):
    read = (lambda k: fm.data.Streamed(Items(k))) if kind == "streamed" else samples
    shared = samples(20)
    return [fm.Site(read(k), test=samples(10 + k), validation=shared, name=f"site {k}") for k in range(3)]


@pytest.fixture
def model():
    torch.manual_seed(3)
    return Model().train()


def problem(model, folder, kind="held", dtype="float64", **fields):
    backbone = fm.models.Backbone("encoder", dtype=dtype, batch=8, folder=str(folder))
    return fm.Problem(model, sites(kind), backbone=backbone, sampling=fm.Sampling(6), **fields)


def in_every_pass(model, kind="held", **fields):
    model = copy.deepcopy(model)
    model.encoder.eval()
    frozen = fm.Parts(frozen=("encoder.*",))
    return fm.Problem(model, sites(kind), parts=frozen, sampling=fm.Sampling(6), **fields)


def trained(made, rounds=8, **options):
    given = {"dtype": "float64", "measure_every": 4, "trace": "no"} | options
    return fm.train(made, fm.Ring(), fm.TrackedADGDA(0.05), rounds, **given)


@pytest.mark.parametrize("kind", ["held", "streamed"])
def test_runs_on_outputs_are_those_that_compute_the_prefix_in_every_pass(model, tmp_path, kind):
    one, other = trained(problem(model, tmp_path, kind)), trained(in_every_pass(model, kind))
    assert torch.allclose(one.row(), other.row(), rtol=0, atol=1e-12)
    assert not torch.allclose(one.row()[0], one.problem.initial_row(0))
    for mine, theirs in zip(one.records, other.records):
        assert mine["loss"]["sites"] == pytest.approx(theirs["loss"]["sites"], abs=1e-12)
        assert mine["bytes_total"] == theirs["bytes_total"]


def test_the_prefix_is_held_once_next_to_its_outputs(model, tmp_path):
    calls = []

    def make():
        calls.append(1)
        return copy.deepcopy(model)

    for given in (model, make):
        made = problem(given, tmp_path)
        bound = with_features(made, CPU)
        assert bound.on_features
        assert bound.initial_model(0) is made.initial_model(0)
    assert len(calls) == 1


@pytest.mark.parametrize("order", ["shuffled", "full"])
def test_rest_may_change_outputs_in_place(tmp_path, order):
    class Changing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.Linear(4, 5)
            self.head = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(5, 2))

        def forward(self, ids, mask):
            return self.head(self.encoder((ids * mask).to(self.head[1].weight.dtype) / 4))

    torch.manual_seed(3)
    model, sampling = Changing(), fm.Sampling(6, order=order)
    cached = [trained(dataclasses.replace(problem(model, tmp_path), sampling=sampling)) for _ in range(2)]
    whole = trained(dataclasses.replace(in_every_pass(model), sampling=sampling))
    for one in cached:
        assert torch.allclose(one.row(), whole.row(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "apart"), [("float32", 1e-4), pytest.param("bfloat16", 0.05, marks=pytest.mark.slow)]
)
def test_stored_dtype_decides_how_close_runs_are(model, tmp_path, dtype, apart):
    one, other = trained(problem(model, tmp_path, dtype=dtype)), trained(in_every_pass(model))
    difference = (one.row() - other.row()).norm() / (other.row()[0] - one.problem.initial_row(0)).norm()
    assert 0 < difference < apart
    size = sum(path.stat().st_size for path in tmp_path.rglob("tensor-*.bin"))
    assert size == bytes_of_features(problem(model, tmp_path, dtype=dtype))


def test_outputs_are_computed_once(model, tmp_path):
    def rows(made, told=None):
        calls.clear()
        with_features(made, CPU, say=(told if told is not None else []).append)
        return sum(calls)

    told: list[str] = []
    first = problem(model, tmp_path)
    assert rows(first, told) == 3 * 30 + 3 * 30 + 30  # the validation set, which sites share, once
    assert not missing_from(told[0], "'encoder'", "evaluation mode", "dropout", "BatchNorm", "210 rows", "MB", tmp_path)
    assert rows(first) <= 7 * 2  # of each set, to see whether they still are what the prefix gives
    assert rows(problem(copy.deepcopy(model), tmp_path)) <= 7 * 2
    head = copy.deepcopy(model)
    head.head[1].weight.data += 1  # another head on the same prefix
    assert rows(problem(head, tmp_path)) <= 7 * 2
    weights, buffers = copy.deepcopy(model), copy.deepcopy(model)
    weights.encoder.layer.bias.data[0] += 1e-3
    buffers.encoder.norm.running_mean += 1.0
    for other in (weights, buffers):
        assert rows(problem(other, tmp_path)) == 210
    settings = copy.deepcopy(model)
    settings.encoder.norm.eps = 0.1
    assert rows(problem(settings, tmp_path)) == 210
    assert rows(problem(model, tmp_path, dtype="bfloat16")) == 210
    labels = sites()
    labels[0].train["labels"] = 1 - labels[0].train["labels"]  # other labels of the same rows
    inputs = sites()
    inputs[0].train["ids"][3, 0] += 1
    for given, computed in ((labels, 14), (inputs, 30 + 6 * 2)):
        assert rows(fm.Problem(model, given, backbone=first.backbone, sampling=fm.Sampling(6))) <= computed


def test_code_that_changes_in_a_function_is_found_by_a_few_rows(model, tmp_path, monkeypatch):
    before = with_features(problem(model, tmp_path), CPU).sites[0].train.inputs[0].clone()
    told: list[str] = []
    monkeypatch.setattr(torch, "tanh", lambda tensor: 0.5 * torch.sigmoid(tensor))
    after = with_features(problem(model, tmp_path), CPU, say=told.append)
    assert len([line for line in told if "computed again" in line]) == 7
    assert not torch.equal(before, after.sites[0].train.inputs[0])
    again: list[str] = []
    with_features(problem(model, tmp_path), CPU, say=again.append)
    assert len(again) == 1


def test_damaged_outputs_are_computed_again_and_told(model, tmp_path):
    whole = with_features(problem(model, tmp_path), CPU).sites[1].train.inputs[0].clone()
    for file in tmp_path.rglob("tensor-0.bin"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 64
        file.write_bytes(content)
    told: list[str] = []
    mended = with_features(problem(model, tmp_path), CPU, say=told.append)
    assert len([line for line in told if "are damaged" in line]) == 7
    assert torch.equal(mended.sites[1].train.inputs[0], whole)


def test_interruption_leaves_finished_portions(model, tmp_path, monkeypatch):
    monkeypatch.setattr(feature_store, "_MOST_ROWS", 8)
    steps = iter(range(100))

    def stop():
        if next(steps) == 5:
            raise fm.Interrupted("stop")

    calls.clear()
    with pytest.raises(fm.Interrupted):
        with_features(problem(model, tmp_path), CPU, go_on=stop)
    made = problem(model, tmp_path)
    calls.clear()
    with_features(made, CPU)
    assert sum(calls) <= 210 - (30 + 2 * 8) + 2 * 2  # six portions are whole, of which the last of a set has 6 rows


def test_interrupted_runs_resume_on_the_same_outputs_and_refuse_others(model, tmp_path):
    made, out = problem(model, tmp_path / "features"), tmp_path / "run"

    def trained(made, rounds=8, **options):
        return fm.train(made, fm.Ring(), fm.DSGD(0.1), rounds, trace="no", **options)

    whole = trained(made)
    trained(made, 4, out=out)
    checkpoint = (out / "checkpoint.safetensors").stat().st_size
    assert checkpoint < 8 * made.flat_model.dim * 200  # rows of the head, not of the encoder
    other = copy.deepcopy(model)
    other.encoder.layer.bias.data += 1
    with refused("problem.model", error=fm.CheckpointError):
        trained(problem(other, tmp_path / "features"), out=out, resume=True)
    resumed = trained(made, out=out, resume=True)
    assert torch.equal(resumed.row(), whole.row())
    assert made.digest() == resumed.problem.digest()


def test_exported_and_saved_models_are_whole(model, tmp_path):
    result = trained(problem(model, tmp_path))
    assert result.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(result.state_dict()["encoder.layer.weight"], model.encoder.layer.weight)
    about = fm.export(result, tmp_path / "model.safetensors", "safetensors")
    assert [part["name"] for part in about["input"]["parts"]] == ["ids", "mask"]
    test = sites()[1].test
    found = fm.inference.TrainedModel.of(result).module(test["ids"], test["mask"])
    right = (found.argmax(1) == test["labels"]).double().mean()
    assert float(right) == pytest.approx(result.final[0]["accuracy"]["sites"][1])


def test_nan_outputs_name_site_and_row(model, tmp_path):
    given = sites()
    for part in (part for site in given for part in (site.train, site.test, site.validation)):
        part["ids"].clamp_(max=7)
    given[2].train["ids"][17, 0] = 8
    model.encoder.embedding.weight.data[8] = torch.nan
    made = fm.Problem(model, given, backbone=fm.models.Backbone("encoder", folder=str(tmp_path)))
    with refused("site 2", "row 17", "states", "finite"):
        with_features(made, CPU)


def test_full_disk_is_refused_with_the_size(model, tmp_path, monkeypatch):
    monkeypatch.setattr(
        feature_store.shutil, "disk_usage", lambda path: feature_store.shutil._ntuple_diskusage(1, 1, 0)
    )
    with refused("encoder", "MB", tmp_path, "bfloat16"):
        trained(problem(model, tmp_path))


def test_experiment_files_name_a_backbone(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch.nn import Flatten, Linear, Sequential\n"
        "def model():\n    return Sequential(Flatten(), Linear(64, 8), Linear(8, 10))\n"
    )
    (tmp_path / "it.toml").write_text(
        f'rounds = 4\ndata = {{ name = "digits", nodes = 3 }}\nbackbone = {{ module = "2", folder = "{tmp_path}/f" }}\n'
        '[model]\nname = "import"\npath = "mine.py:model"\n'
    )
    with refused("backbone", "'2'", "trained parameters", "1.weight"):
        fm.load_experiment(tmp_path / "it.toml").problem()
    experiment = fm.load_experiment(tmp_path / "it.toml", ["backbone.module='1'"])
    assert experiment.problem().flat_model.dim == 90
    assert experiment.backbone == fm.models.Backbone("1", folder=f"{tmp_path}/f")


def test_summary_describes_the_inputs_of_the_whole_model(model, tmp_path):
    trained(problem(model, tmp_path), out=tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "summary.json").read_text())["model"]
    assert facts["input_dtype"] == {"ids": ["torch.int64", [4]], "mask": ["torch.int64", [4]]}


@pytest.mark.slow
def test_runs_without_one_site_and_several_splits_work_on_outputs(model, tmp_path):
    made = problem(model, tmp_path)
    result = trained([made, fm.Problem(model, sites(), backbone=made.backbone, sampling=made.sampling)], 4)
    assert result.problem.of_split(1).on_features
    left = fm.leave_one_site_out(made, fm.Ring(), fm.DSGD(0.1), 3)
    assert len(left.as_json()["sites"]) == 3


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
model = torch.nn.Sequential(torch.nn.Linear(4, 2000), torch.nn.Linear(2000, 2))
few = (torch.rand(20, 4), torch.arange(20) % 2)
def problem(make):
    return fm.Problem(model, [fm.Site(make(k), test=few) for k in range(2)], sampling=fm.Sampling(8),
                      backbone=fm.models.Backbone("0", batch=500, folder=sys.argv[1]))
fm.train(problem(lambda k: few), fm.Ring(), fm.DSGD(1e-4), 2)  # what a first run imports and allocates
lines = open("/proc/self/status").read().splitlines()
now = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (now + (150 << 20), resource.RLIM_INFINITY))
result = fm.train(problem(lambda k: fm.data.Streamed(Rows(k))), fm.Ring(), fm.DSGD(1e-4), 5)
print(result.rounds, sum(site.train.nbytes for site in result.problem.sites))
"""


@pytest.mark.slow
def test_outputs_that_are_larger_than_memory_stay_on_disk(tmp_path):
    done = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rounds, size = map(int, done.stdout.split())
    assert rounds == 5
    assert size > 2 * 30_000 * 2000 * 4  # 480 MB, where the process may take 150 MB


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_outputs_are_computed_on_the_device_of_the_run(model, tmp_path):
    one = trained(problem(model, tmp_path), device="cuda")
    assert torch.allclose(one.row().cpu(), trained(in_every_pass(model), device="cuda").row().cpu(), atol=1e-10)
