"""Low-rank adapters of peft: a common frozen A, so that averaging nodes is averaging what they compute; a base that is
held once; adapters that peft reads."""

import functools
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fairmesh as fm
from fairmesh.cli.main import app
from fairmesh.problems import notes
from fairmesh.training.memory_estimate import footprint, peak_bytes
from tests.late import late
from tests.refusals import missing_from, refused

peft = late("peft")

SITES = fm.data.Digits(nodes=4, odd=1).sites()
LORA = fm.models.LoRA(rank=3, targets=("1", "3"), head=("5",))
A = "base_model.model.1.lora_A.default.weight"


def base(width: int = 12) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        return nn.Sequential(nn.Flatten(), *layers)


def problem(lora: fm.models.LoRA = LORA, **settings) -> fm.Problem:
    return fm.Problem(lora.adapt(base()), SITES, **settings)


def change(module: nn.Module, layer: int = 1) -> Tensor:
    """What the adapter adds to the weight of a layer, B A."""
    return module.base_model.model[layer].get_delta_weight("default").detach()


def products(given: fm.Problem, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the products B A of several models, and the product of their mean."""
    flat = given.flat_model
    return torch.stack([change(flat.module(row)) for row in rows]).mean(dim=0), change(flat.module(rows.mean(dim=0)))


def run(given: fm.Problem, algorithm: fm.algorithms.Algorithm, rounds: int, **options) -> fm.Result:
    return fm.train(given, fm.Ring(), algorithm, rounds, trace="no", **options)


def trained(result: fm.Result) -> nn.Module:
    return fm.inference.TrainedModel.of(result).module


def test_averaging_with_a_common_a_is_averaging_the_products_and_without_it_is_not():
    torch.manual_seed(0)
    for train_a in (False, True):
        given = problem(fm.models.LoRA(rank=3, targets=("1", "3"), train_a=train_a))
        mean, of_mean = products(given, torch.randn(4, given.flat_model.dim))
        apart = (mean - of_mean).norm() / mean.norm()
        assert apart > 0.5 if train_a else apart < 1e-6


def test_result_computes_what_its_nodes_compute_on_average():
    seen = []
    given = problem()
    result = run(
        given,
        fm.algorithms.DSGD(0.5),
        3,
        observers=[lambda number, state: seen.append(state.algorithm.models[0].clone())],
    )
    mean, _ = products(given, seen[-1])
    assert (change(given.flat_model.module(seen[-1][0])) - mean).norm() > 0.1 * mean.norm()  # nodes differ
    assert (change(trained(result)) - mean).norm() < 1e-5 * mean.norm()


def test_only_b_and_the_head_are_trained_and_sent():
    given, whole = problem(), fm.Problem(base(), SITES)
    names = given.flat_model.layout.names
    assert all("lora_B" in name or "5.modules_to_save" in name for name in names)
    assert given.flat_model.dim == 2 * 12 * 3 + 130
    sent = [run(one, fm.ChocoSGD(0.1), 2).final[0]["nominal_bits_total"] for one in (given, whole)]
    assert sent[0] / sent[1] == pytest.approx(given.flat_model.dim / whole.flat_model.dim, rel=0.05)


def test_a_depends_on_its_seed_alone():
    def a(seed: int, draw: int) -> Tensor:
        torch.manual_seed(draw)
        return dict(fm.models.LoRA(targets=("1", "3"), seed=seed).adapt(base()).named_parameters())[A].detach()

    assert torch.equal(a(0, 1), a(0, 2))
    assert not torch.equal(a(0, 1), a(1, 1))
    alone = dict(fm.models.LoRA(targets=("1",)).adapt(base()).named_parameters())[A]
    assert torch.equal(a(0, 1), alone)  # whatever else is adapted
    assert a(0, 1).abs().max() <= 1 / 8  # as peft draws it: uniform within 1 / sqrt(inputs)
    assert a(0, 1).std() == pytest.approx(1 / 8 / 3**0.5, rel=0.1)


def test_stacked_nodes_train_as_nodes_one_after_another():
    rows = [run(problem(models_at_once=k), fm.algorithms.DSGD(0.3), 3, dtype="float64").row() for k in ("all", 1)]
    assert (rows[0] - rows[1]).abs().max() < 1e-12


def steps(module, data, ctx):
    with torch.no_grad():
        module.base_model.model[1].lora_B["default"].weight.add_(0.1)


@pytest.mark.parametrize("trainer", [None, pytest.param(steps, marks=pytest.mark.slow)], ids=["stacked", "own code"])
def test_base_is_held_once_however_many_nodes_there_are(trainer):
    wide = base(1024)
    size = sum(p.nbytes for p in wide.parameters())  # 4.5 MB
    module, few, peaks, estimates = LORA.adapt(wide), [tensor[:4] for tensor in SITES[0].train], [], []
    for n in (2, 10):
        given = fm.Problem(module, [few] * n, sampling=fm.Sampling(batch=2), trainer=trainer).prepared
        assert given.at_once(torch.device("cpu")) is None  # all at once
        one_round = functools.partial(run, given, fm.algorithms.DSGD(0.1), 1)
        peaks.append(peak_bytes(one_round)[0])
        estimates.append(footprint(given, fm.algorithms.DSGD(0.1)).of(1))
    for found in (peaks, estimates):
        assert found[1] - found[0] < 2 * size  # of eight more nodes


def test_resumed_run_is_the_uninterrupted_one(tmp_path: Path):
    whole = run(problem(), fm.ChocoSGD(0.1), 4)
    run(problem(), fm.ChocoSGD(0.1), 2, out=tmp_path)
    resumed = run(problem(), fm.ChocoSGD(0.1), 4, out=tmp_path, resume=True)
    assert torch.equal(whole.row(), resumed.row())
    other = LORA.adapt(base())
    with torch.no_grad():
        other.base_model.model[3].base_layer.weight[0, 0] += 1
    with refused("checkpoint", error=fm.errors.CheckpointError):
        run(fm.Problem(other, SITES), fm.ChocoSGD(0.1), 5, out=tmp_path, resume=True)


def test_adapter_makes_the_round_trip_through_peft_and_merges(tmp_path: Path):
    result = run(problem(), fm.algorithms.DSGD(0.3), 3)
    inputs, module = SITES[0].test[0][:20], trained(result)
    about = fm.export(result, tmp_path / "adapter", "peft")
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "fairmesh.json"}
    read = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert torch.equal(read(inputs), module(inputs))
    assert about["largest_difference"] == 0
    fm.export(result, tmp_path / "adapter", "peft")  # again, over the old one
    fm.export(result, tmp_path / "merged.safetensors", "merged")
    merged = base()
    fm.inference.load_weights(tmp_path / "merged.safetensors", merged)
    assert torch.allclose(merged.eval()(inputs), module(inputs), atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "merged.safetensors"]
    with refused("PeftModel", "fm.models.LoRA"):
        fm.export(run(fm.Problem(base(), SITES), fm.algorithms.DSGD(), 1), tmp_path / "other", "peft")
    assert not (tmp_path / "other").exists()


def test_adapter_whose_outputs_differ_is_not_left(tmp_path: Path, monkeypatch):
    result = run(problem(), fm.algorithms.DSGD(0.3), 1)
    given = peft.PeftModel.save_pretrained

    def with_another_scale(self, folder, **options):
        self.peft_config["default"].lora_alpha = 1
        given(self, folder, **options)

    monkeypatch.setattr(peft.PeftModel, "save_pretrained", with_another_scale)
    with refused("adapter", "was not written", "differ"):
        fm.export(result, tmp_path / "adapter", "peft")
    assert list(tmp_path.iterdir()) == []


def test_experiment_files_name_the_base_and_export_the_adapter(tmp_path: Path):
    (tmp_path / "mine.py").write_text("from tests.problems.test_lora import base\n")
    (tmp_path / "lora.toml").write_text(
        'rounds = 2\ndata = { name = "digits", nodes = 4 }\nalgorithm = "choco-sgd"\n[model]\nname = "lora"\n'
        'base = { name = "import", path = "mine.py:base" }\ntargets = ["all-linear"]\nrank = 2\n'
    )
    experiment = fm.load_experiment(tmp_path / "lora.toml")
    assert experiment.model.targets == ("all-linear",)
    fm.run(experiment, out=tmp_path / "run")
    said = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--peft"])
    assert not missing_from(said.output, "exported-peft", "from_pretrained")
    read = peft.PeftModel.from_pretrained(base(), tmp_path / "run" / "exported-peft").eval()
    inputs = SITES[0].test[0][:20]
    assert torch.equal(read(inputs), fm.inference.load_model(tmp_path / "run").module(inputs))


def trains_a(module, data, ctx):
    torch.optim.SGD([dict(module.named_parameters())[A].requires_grad_()], lr=0.1)
    with torch.no_grad():
        dict(module.named_parameters())[A].add_(0.1)


def merges(module, data, ctx):
    steps(module, data, ctx)
    module.merge_adapter()


def test_trainer_that_changes_what_is_frozen_is_refused_with_site_and_part():
    for train, part in ((trains_a, A), (merges, "1.base_layer.weight")):
        with refused(SITES[0].name, "round 0", part, "unmerge_adapter", error=fm.errors.TrainerFailed):
            run(problem(trainer=train), fm.algorithms.DSGD(1.0), 1)


def own_peft(**settings) -> nn.Module:
    return peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["1", "3"], **settings))


def test_adapters_of_the_users_own_work_with_a_frozen_or_a_local_a_and_are_refused_otherwise():
    with refused("1", "lora_A", "parts.frozen", "train_a"):
        fm.Problem(own_peft(), SITES)
    frozen = fm.Problem(own_peft(), SITES, parts=fm.Parts(frozen=("*.lora_A.*",))).prepared
    assert frozen.flat_model.dim == 2 * 12 * 2
    local = fm.Problem(
        own_peft(), SITES, parts=fm.Parts(local=("*.lora_B.*",))
    ).prepared  # a common A, and B of each site
    assert (local.flat_model.dim, local.flat_model.local_dim) == (2 * (64 + 12), 2 * 12 * 2)
    assert "averaging" not in notes.on_parts(local)


def test_merged_adapters_are_refused():
    module = LORA.adapt(base())
    module.merge_adapter()
    with refused("merged", "unmerge_adapter"):
        fm.Problem(module, SITES)
    module.unmerge_adapter()
    fm.Problem(module, SITES)


EMBEDDED = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
REFUSED = {
    "target": (lambda: fm.models.LoRA(targets=("qery",)).adapt(base()), ["targets", "'qery'"]),
    "head": (lambda: fm.models.LoRA(targets=("1",), head=("9",)).adapt(base()), ["head", "'9'"]),
    "no target": (lambda: fm.models.LoRA().adapt(base()), ["targets", "1", "3"]),
    "not linear": (lambda: fm.models.LoRA(targets=("2",)).adapt(base()), ["targets", "ReLU"]),
    "embedding": (lambda: fm.models.LoRA(targets=("0",)).adapt(EMBEDDED), ["0", "Embedding", "head"]),
    "adapted already": (lambda: LORA.adapt(LORA.adapt(base())), ["adapters", "already"]),
    "rank": (lambda: fm.models.LoRA(rank=-1), ["rank", -1]),
    "alpha": (lambda: fm.models.LoRA(alpha=-1), ["alpha", -1]),
    "seed": (lambda: fm.models.LoRA(seed=-1), ["seed", -1]),
    "dropout": (lambda: fm.models.LoRA(dropout=1.0), ["dropout", 1.0]),
    "no base": (lambda: fm.models.LoRA().build(torch.Size([8, 8]), 10), ["base", "import"]),
    "DoRA": (lambda: fm.Problem(own_peft(use_dora=True), SITES), ["DoRA", "parts.local"]),
    "another kind": (lambda: fm.Problem(loha(), SITES), ["loha", "parts.local"]),
}


def loha() -> nn.Module:
    return peft.get_peft_model(base(), peft.LoHaConfig(r=2, target_modules=["1"]))


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_layers_settings_and_adapters_that_do_not_fit_are_refused_by_name(call, words):
    with refused(*words):
        call()


def test_layers_keep_their_modes_and_peft_knows_the_targets_of_transformers():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    bert = BertForSequenceClassification(BertConfig(**sizes)).train()
    bert.bert.embeddings.eval()
    module = fm.models.LoRA(dropout=0.5, head=("classifier",)).adapt(bert)
    layer = module.base_model.model.bert.encoder.layer[0].attention.self.query
    assert layer.lora_dropout["default"].training
    assert not module.base_model.model.bert.embeddings.dropout.training
    assert not any(part.training for part in LORA.adapt(base().eval()).modules())


def test_training_a_too_is_possible_and_said():
    said = []
    run(problem(fm.models.LoRA(targets=("1",), train_a=True)), fm.algorithms.DSGD(), 1, announce=said.append)
    assert any("A is trained too" in line for line in said)
    said.clear()
    run(problem(), fm.algorithms.DSGD(), 1, announce=said.append)
    assert any("frozen" in line and "LoRA" in line for line in said)


@pytest.mark.slow
def test_averaging_both_factors_loses_where_sites_differ_and_rounds_are_long():
    found = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "lora_factors.py"))["main"]()
    assert found[False].values("mean")[0] > found[True].values("mean")[0] + 0.1


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft.tuners.lora.layer", None)
    with refused("fairmesh[lora]"):
        LORA.adapt(base())
