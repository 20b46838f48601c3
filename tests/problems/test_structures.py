"""Inputs, targets and outputs may be tensors, tuples, dictionaries or ModelOutputs."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fairmesh as fm
from fairmesh.data.check import check_sites
from fairmesh.data.contract import Arrays, Contract
from fairmesh.data.samples import Samples
from fairmesh.data.summary import site_summaries
from fairmesh.mesh.announcements import KINDS
from fairmesh.mesh.node.membership import facts
from fairmesh.mesh.node.site_statistics import WITHHELD, statistics
from tests import toys
from tests.late import late
from tests.refusals import refused

transformers = late("transformers")
CPU = torch.device("cpu")


def drawn(k: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(k))


def trained(problem: fm.Problem, rounds: int = 20, **options) -> fm.Result:
    return fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.3), rounds, measure_every=rounds, **options)


def _of_both(self, left, right):
    return self.layer(torch.cat([left, right], dim=1))


def both() -> nn.Module:
    """A linear model of two inputs."""
    return toys.module(_of_both, layer=nn.Linear(5, 2))


def halves(k: int) -> tuple[Tensor, Tensor, Tensor]:
    inputs = drawn(k, 12, 5)
    return inputs[:, :2], inputs[:, 2:], (inputs.sum(dim=1) > 0).long()


def of_names(k: int):
    left, right, labels = halves(k)
    return {"right": right, "left": left, "labels": labels}


def items(k: int) -> toys.Items:
    """A Dataset of dictionaries, with lists as tokenizers give them."""
    parts = of_names(k)

    def item(i: int) -> dict:
        one = {name: part[i] for name, part in parts.items()}
        return one | {"left": one["left"].tolist(), "labels": int(one["labels"])}

    return toys.Items(12, item)


SOURCES = {
    "tuple": lambda k: ((halves(k)[0], halves(k)[1]), halves(k)[2]),
    "arrays": lambda k: (tuple(np.asarray(part) for part in halves(k)[:2]), halves(k)[2].numpy()),
    "names": lambda k: ({"left": halves(k)[0], "right": halves(k)[1]}, halves(k)[2]),
    "table": of_names,
    "dataset": items,
}


@pytest.mark.parametrize("at_once", [pytest.param("all", id="all"), 1, 2])
@pytest.mark.parametrize("source", [SOURCES["tuple"], SOURCES["names"]], ids=["tuple", "names"])
@pytest.mark.quick_cases(2)
def test_several_inputs_train_as_the_same_numbers_in_one_tensor(source, at_once):
    torch.manual_seed(0)
    several = both()
    single = toys.module(lambda self, inputs: self.layer(inputs), layer=several.layer)
    whole = [(torch.cat(halves(k)[:2], dim=1), halves(k)[2]) for k in range(3)]
    results = [
        trained(fm.Problem(model, [fm.Site(s, test=s) for s in sets], sampling=fm.Sampling(4), models_at_once=at_once))
        for model, sets in ((several, [source(k) for k in range(3)]), (single, whole))
    ]
    assert torch.equal(*(result.row() for result in results))
    assert results[0].final[0]["accuracy"]["sites"] == results[1].final[0]["accuracy"]["sites"]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_samples_of_every_form_are_the_same(source):
    read, (left, right, labels) = Samples.of(source(0), "it"), halves(0)
    inputs = read.inputs if isinstance(read.inputs, tuple) else (read.inputs["left"], read.inputs["right"])
    for found, wanted in zip((*inputs, read.targets), (left, right, labels)):
        assert torch.allclose(found.to(wanted.dtype), wanted)
    assert len(read) == 12
    assert read.targets.dtype == torch.int64


def test_the_target_is_found_by_name_or_by_place():
    left, right, labels = halves(0)
    for source, targets in ((DIAGNOSED, "diagnosis"), (torch.utils.data.TensorDataset(left, right, labels), 2)):
        problem = fm.Problem(both(), [source] * 2, targets=targets).prepared
        assert torch.equal(problem.sites[0].train.targets, labels)
        assert dataclasses.replace(problem, weight_decay=0.1).sites[0].train.targets is not None


def test_a_problem_with_several_inputs_has_a_digest_of_names_and_values():
    sites, model = [of_names(k) for k in range(2)], both()
    same = [{name: one[name] for name in ("labels", "left", "right")} for one in sites]
    swapped = [one | {"left": one["left"] + 1} for one in sites]
    first, again, other = (fm.Problem(model, given).prepared.digest() for given in (sites, same, swapped))
    assert first == again != other


@pytest.mark.slow
def test_several_inputs_are_kept_by_a_process_judged_on_held_out_rows_and_reserved():
    sites = [fm.Site(of_names(k), test=of_names(k + 9)) for k in range(3)]
    problem = fm.Problem(
        both(), fm.data.reserve(sites, 0.3), objective=fm.Objective(judged_on="held-out", share=0.4)
    ).prepared
    kept = problem.keeping([1])
    assert kept.here == [1]
    assert kept.digests_here()[1] == problem.digests_here()[1]
    result = fm.train(problem, fm.Ring(), fm.ADGDA(primal_step=0.1), 4, measure_every=4)
    assert len(result.final[0]["accuracy"]["sites"]) == 3
    assert len(result.evidence()["sites"]) == 3
    with refused("personalization", "inputs"):
        trained(problem, personalization=fm.personalization.Mixture())


def bert(kind: str, **settings) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).train()


def tokens(k: int, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(k)
    ids = torch.randint(0, 30, (8, length), generator=generator)
    lengths = torch.randint(2, length + 1, (8, 1), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths).long()}


def test_bert_as_it_is_trains_on_a_dataset_of_dictionaries():
    sites = [fm.Site(tokens(k) | {"labels": tokens(k)["input_ids"][:, 0] % 2}) for k in range(2)]
    problem = fm.Problem(bert("BertForSequenceClassification", num_labels=2), sites, test=sites[0].train)
    assert (problem.task, problem.classes) == ("classes", 2)
    result = trained(problem, 2)
    assert 0.0 <= result.final[0]["accuracy"]["worst"] <= 1.0
    assert torch.equal(result.row(), trained(problem, 2).row())


@pytest.mark.parametrize("classes", [3, 6], ids=["3 classes", "as many classes as tokens"])
def test_bert_classifies_tokens_and_padding_does_not_count(classes):
    def site(k: int):
        one = tokens(k)
        return one | {"labels": (one["input_ids"] % classes).where(one["attention_mask"] == 1, -100)}

    module = bert("BertForTokenClassification", num_labels=classes)
    loss = fm.losses.CrossEntropy(ignore_index=-100)
    problem = fm.Problem(module, [site(0), site(1)], loss, test=site(2), metrics=["accuracy"]).prepared
    assert problem.task == "masks"
    one, row = tokens(2), problem.initial_row(0).float()
    with torch.no_grad():
        outputs = problem.flat_model(row, one)
        truth, logits = site(2)["labels"], module.eval()(**one).logits
    counted = [nn.functional.cross_entropy(a[t >= 0], t[t >= 0]) for a, t in zip(logits, truth) if bool((t >= 0).any())]
    assert torch.allclose(problem.loss(outputs, truth), torch.stack(counted).mean(), atol=1e-5)
    shares = [(a[t >= 0].argmax(-1) == t[t >= 0]).double().mean() for a, t in zip(logits, truth)]
    measured = fm.metrics.Accuracy()(outputs, truth)
    assert measured == pytest.approx(float(torch.stack(shares).mean()))


def test_tokens_with_classes_on_the_last_axis_take_the_plain_cross_entropy():
    inputs = drawn(0, 10, 7, 4)
    labels = inputs.argmax(dim=-1)[..., :] % 3
    problem = fm.Problem(nn.Linear(4, 3), [(inputs, labels)] * 2, test=(inputs, labels), metrics=["accuracy"])
    assert problem.task == "masks"
    assert trained(problem, 100).final[0]["accuracy"]["worst"] > 0.8
    read = fm.Problem(nn.Linear(4, 7), [(inputs, labels)] * 2, read=lambda outputs: outputs.transpose(1, 2))
    assert read.task == "masks"


def _class_and_number(self, inputs):
    return self.classes(inputs), self.number(inputs).squeeze(-1)


def two_outputs() -> nn.Module:
    return toys.module(_class_and_number, classes=nn.Linear(3, 2), number=nn.Linear(3, 1))


def both_losses(outputs, targets):
    logits, number = outputs
    return nn.functional.cross_entropy(logits, targets["class"]) + (number - targets["size"]).square().mean()


def sized(k: int):
    inputs = drawn(k, 16, 3)
    return inputs, {"class": (inputs[:, 0] > 0).long(), "size": inputs[:, 1].contiguous()}


@pytest.mark.parametrize("at_once", [pytest.param("all", id="all"), 1])
def test_two_outputs_and_two_targets_train_by_a_loss_of_the_users_own(at_once):
    torch.manual_seed(0)
    sites = [fm.Site(sized(k), test=sized(k)) for k in range(3)]
    right = fm.metrics.Metric(lambda logits, targets: (logits.argmax(-1) == targets["class"]).double().mean())
    problem = fm.Problem(
        two_outputs(), sites, both_losses, fm.Sampling(order="full"), models_at_once=at_once,
        read=lambda outputs: outputs[0], metrics={"right": right},
    ).prepared  # fmt: skip
    assert problem.task == "several"
    row = problem.initial_row(0).float()
    with torch.no_grad():
        wanted = both_losses(problem.initial_model(0)(sized(0)[0]), sized(0)[1])
        assert torch.allclose(problem.loss(problem.flat_model(row, sized(0)[0]), sized(0)[1]), wanted)
    result = trained(problem, 60)
    assert result.final[0]["right"]["worst"] > 0.8
    assert result.final[0]["loss"]["worst"] < float(wanted)
    assert dataclasses.replace(problem, weight_decay=0.1).loss(problem.flat_model(row, sized(0)[0]), sized(0)[1]) > 0


def tokens_of(classes: int, padded: bool = False) -> tuple[Tensor, Tensor]:
    inputs = drawn(0, 8, 7, 4)
    labels = inputs.argmax(dim=-1) % classes
    labels[:4, 2:] = -100 if padded else labels[:4, 2:]
    return inputs, labels


(LEFT, RIGHT, YES), (NUMBERS, TARGETS) = halves(0), sized(0)
DIAGNOSED = {"left": LEFT, "right": RIGHT, "diagnosis": YES}
FOUR = torch.utils.data.TensorDataset(LEFT, RIGHT, YES, YES)
LOADER, PAIR = torch.utils.data.DataLoader(items(0), batch_size=4), (NUMBERS, TARGETS["class"])
SEVERAL_LABELS = (NUMBERS, (NUMBERS > 0).long())
SUMMED = toys.module(lambda self, x: {"logits": self.layer(x), "size": x.sum()}, layer=nn.Linear(3, 2))
TEXTS = toys.Items(2, lambda i: {"text": "good", "ids": [1, 2], "label": 0})
UNEQUAL = toys.Items(2, lambda i: {"ids": [1] * (i + 1), "label": 0})


def of_logits(outputs, targets):
    return nn.functional.cross_entropy(outputs["logits"], targets)


REFUSED = {  # words of the refusal, model, data, and other settings
    "no target": (("'diagnosis'", "Problem(targets="), both(), DIAGNOSED, {}),
    "another target": (("'label'", "'diagnosis'"), both(), DIAGNOSED, {"targets": "label"}),
    "four parts": (("4 parts", "Problem(targets="), both(), FOUR, {}),
    "as many tokens as classes": (("read=", "transpose"), nn.Linear(4, 7), tokens_of(3), {}),
    "padded tokens": (("ignore_index", "fm.losses.CrossEntropy"), nn.Linear(4, 4), tokens_of(4, padded=True), {}),
    "two outputs": (("tuple of 2", "read="), two_outputs(), PAIR, {}),
    "no such output": (("read", "IndexError"), two_outputs(), PAIR, {"read": lambda outputs: outputs[2]}),
    "two targets": (("targets", "loss=function"), nn.Linear(3, 2), (NUMBERS, TARGETS), {}),
    "keywords": (("keywords", "left"), nn.Linear(5, 2), of_names(0), {}),
    "output without rows": (("one row per sample",), SUMMED, PAIR, {"loss": of_logits}),
    "whole numbers": (
        ("BinaryCrossEntropy", "floats"),
        nn.Linear(3, 3),
        SEVERAL_LABELS,
        {"loss": nn.functional.binary_cross_entropy_with_logits},
    ),
    "DataLoader": (("DataLoader", "loader.dataset", "Sampling(batch="), both(), LOADER, {}),
    "text": (("'text'", "numbers"), both(), TEXTS, {}),
    "unequal length": (("unequal size", "padding"), both(), UNEQUAL, {}),
}


@pytest.mark.parametrize(("words", "model", "data", "fields"), REFUSED.values(), ids=REFUSED)
def test_parts_that_nothing_says_how_to_read_are_refused_with_the_way_out(words, model, data, fields):
    with refused(*words):
        fm.Problem(model, [data], **fields)


def test_ways_out_are_accepted():
    fm.Problem(SUMMED, [PAIR])  # reads the logits
    assert fm.Problem(nn.Linear(3, 3), [SEVERAL_LABELS], fm.losses.BinaryCrossEntropy()).task == "multi-label"


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 12, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)).train()


def test_a_language_model_keeps_its_cache_to_itself_if_the_loss_is_the_users_own():
    ids = tokens(0)["input_ids"] % 12

    def next_token(outputs, targets):
        return nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), targets[:, 1:])

    problem = fm.Problem(gpt2(), [({"input_ids": ids}, ids)] * 2, next_token, models_at_once=1)
    assert torch.isfinite(trained(problem, 1).row()).all()


def test_samples_without_a_label_train_with_ignore_index_and_cannot_judge():
    inputs = drawn(0, 20, 3)
    labels = inputs.argmax(dim=1)
    some = labels.where(torch.arange(20) % 2 == 0, -1)
    with refused("ignore_index=-1", "-1 to 2"):
        fm.Problem(nn.Linear(3, 3), [(inputs, some)])
    loss = fm.losses.CrossEntropy(ignore_index=-1)
    sites = [fm.Site((inputs, some), test=(inputs, labels))] * 2
    problem = fm.Problem(nn.Linear(3, 3), sites, loss, fm.Sampling(order="full"))
    changed = inputs.where(torch.arange(20)[:, None] % 2 == 0, 7.0)
    other = fm.Problem(problem.model, [fm.Site((changed, some), test=(inputs, labels))] * 2, loss, problem.sampling)
    rows = [trained(one, 30).row() for one in (problem, other)]
    assert torch.allclose(*rows, atol=1e-6)  # what has no label teaches nothing
    assert trained(problem, 30).final[0]["accuracy"]["worst"] > 0.6
    with refused("10 of 20", "test"):
        fm.Problem(nn.Linear(3, 3), [fm.Site((inputs, labels), test=(inputs, some))], loss)


def test_several_inputs_come_from_an_experiment_file_with_a_module_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch, fairmesh as fm\n"
        "from torch import nn\n"
        "class Both(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(5, 2)\n"
        "    def forward(self, left, right):\n"
        "        return self.layer(torch.cat([left, right], dim=1))\n"
        "def sites():\n"
        "    draw = lambda k: torch.randn(12, 5, generator=torch.Generator().manual_seed(k))\n"
        "    sets = [({'left': (x := draw(k))[:, :2], 'right': x[:, 2:]}, (x.sum(1) > 0).long()) for k in range(3)]\n"
        "    return [fm.Site(one, test=one, name=f'site {k}') for k, one in enumerate(sets)]\n"
    )
    (tmp_path / "experiment.toml").write_text(
        'rounds = 4\n[data]\nname = "import"\npath = "mine.py:sites"\n[model]\nname = "import"\npath = "mine.py:Both"\n'
        '[algorithm]\nname = "dsgd"\nprimal_step = 0.1\n'
    )
    monkeypatch.chdir(tmp_path)
    result = fm.run(fm.load_experiment("experiment.toml"), out="run")
    assert result.rounds == 4
    loaded = fm.inference.load_model("run").module
    assert loaded(left=torch.zeros(4, 2), right=torch.zeros(4, 3)).shape == (4, 2)
    with refused("'logistic'", "several inputs"):
        fm.run(dataclasses.replace(fm.load_experiment("experiment.toml"), model=fm.models.Logistic()))


def test_what_a_site_announces_of_several_inputs_are_their_forms():
    site = fm.Problem(both(), [of_names(0)]).prepared.sites[0]
    said = facts(site)
    assert said["inputs"] == {"left": ["torch.float32", [2]], "right": ["torch.float32", [3]]}
    assert all(KINDS["facts"].fields[what](said[what]) for what in ("inputs", "targets"))
    assert KINDS["facts"].fields["inputs"]([["torch.float32", [2]], ["torch.float32", [3, 3]]])
    deep = ["torch.float32", [2]]
    for _ in range(6):
        deep = [deep]
    for wrong in (deep, {}, [["torch.float32", [-1]]], {"x" * 1000: ["torch.float32", [2]]}):
        assert not KINDS["facts"].fields["inputs"](wrong)
    assert statistics(Samples.of({"x": torch.ones(30, 2), "label": torch.arange(30) % 2}, "it")) == WITHHELD


def test_checks_and_summaries_of_data_know_several_inputs_and_a_contract_refuses_them():
    sites = [fm.Site(of_names(k), test=of_names(k), name=f"site {k}") for k in range(2)]
    (first, _) = site_summaries(sites)
    assert (first.train, sum(first.classes)) == (12, 12)
    assert any(finding.what == "test rows in training" for finding in check_sites(sites))
    contract = Contract(inputs=Arrays(shape=(2,)))
    with refused("several inputs", "contract"):
        contract.checked(sites)
