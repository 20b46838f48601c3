"""What a site's data may be: tensors, arrays, Datasets; labels or numbers; bytes or floats; of any sizes."""

import gzip

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import fairmesh as fm
from tests.toys import CLASSES, FEATURES, problem, sites, small_model

ALGORITHM = fm.ADGDA(primal_step=1.0, dual_step=0.05, consensus_step=0.5, compressor=fm.compressors.Quantize(bits=4))


class Items(Dataset):
    """A Dataset of single (input, label) items, as a user writes it."""

    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.inputs[index], int(self.labels[index])


FORMS = {
    "Dataset": Items,
    "TensorDataset": TensorDataset,
    "numpy arrays": lambda inputs, labels: (inputs.numpy(), labels.numpy()),
    "Samples": fm.data.Samples,
    "int32 labels": lambda inputs, labels: (inputs, labels.int()),
    "uint8 labels": lambda inputs, labels: (inputs.numpy(), labels.numpy().astype(np.uint8)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick_cases(2)
def test_same_samples_in_another_form_give_the_same_run(form):
    plain = sites(4)
    other = [fm.Site(FORMS[form](*s.train), test=FORMS[form](*s.test), group=s.group) for s in plain]
    a, b = (fm.train(problem(4, sites=given), fm.Ring(), ALGORITHM, 4, measure_every=2) for given in (plain, other))
    assert torch.equal(a.row(), b.row())
    assert a.records == b.records


def test_site_may_be_given_as_its_training_data_alone():
    plain = sites(3)
    bare = fm.train(problem(3, sites=[s.train for s in plain]), fm.Ring(), ALGORITHM, 3)
    wrapped = fm.train(problem(3, sites=[fm.Site(s.train) for s in plain]), fm.Ring(), ALGORITHM, 3)
    assert torch.equal(bare.row(), wrapped.row())


def test_classification_learns_and_is_measured_by_accuracy():
    result = fm.train(problem(4), fm.Ring(), fm.algorithms.DSGD(primal_step=0.5), 60, measure_every=60)
    start, end = result.records
    assert result.problem.primary == "accuracy"
    assert end["accuracy"]["mean"] > start["accuracy"]["mean"] + 0.2
    assert end["loss"]["mean"] < 0.8 * start["loss"]["mean"]
    assert 0.0 <= end["accuracy"]["worst"] <= end["accuracy"]["best"] <= 1.0


def regression_sites(n: int = 4) -> list[fm.Site]:
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(FEATURES, 2, generator=generator)
    made = []
    for i in range(n):
        inputs = torch.randn(30 + i, FEATURES, generator=generator)
        targets = inputs @ truth + 0.1 * i
        made.append(fm.Site((inputs[10:], targets[10:]), test=(inputs[:10], targets[:10])))
    return made


def test_regression_learns_and_is_measured_by_loss_where_lower_is_better():
    made = fm.Problem(
        model=lambda: nn.Linear(FEATURES, 2),
        sites=regression_sites(),
        loss=F.mse_loss,
        sampling=fm.Sampling(batch=10),
    ).prepared
    result = fm.train(made, fm.Ring(), fm.algorithms.DSGD(primal_step=0.1), 80, measure_every=80)
    start, end = result.records
    assert made.primary == "loss"  # two numbers per sample have no common unit
    assert "accuracy" not in end
    assert end["loss"]["mean"] < 0.05 * start["loss"]["mean"]
    assert end["loss"]["worst"] == max(end["loss"]["sites"])
    assert end["loss"]["best"] == min(end["loss"]["sites"])
    model = nn.Linear(FEATURES, 2)
    model.load_state_dict(result.state_dict())
    model.requires_grad_(False)
    expected = [float(F.mse_loss(model(site.test.inputs), site.test.targets)) for site in made.sites]
    assert end["loss"]["sites"] == pytest.approx(expected, rel=1e-5)


def test_sites_of_unequal_sizes_weigh_by_their_share_of_the_samples():
    made = problem(3, sites=sites(3, sizes=(10, 20, 70)))
    assert made.prior_of_sites.tolist() == [0.1, 0.2, 0.7]
    result = fm.train(made, fm.Ring(), ALGORITHM, 1, measure_every=1)
    assert result.records[0]["lambda"] == pytest.approx([0.1, 0.2, 0.7], abs=1e-7)


def test_bytes_are_scaled_to_between_zero_and_one():
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (24, FEATURES), generator=generator, dtype=torch.uint8)
    labels = torch.arange(24) % CLASSES
    as_bytes = [fm.Site((raw[k::2], labels[k::2]), test=(raw, labels)) for k in range(2)]
    floats = raw.float() / 255.0
    as_floats = [fm.Site((floats[k::2], labels[k::2]), test=(floats, labels)) for k in range(2)]
    a, b = (
        fm.train(problem(2, sites=given), fm.Ring(), ALGORITHM, 4, measure_every=2) for given in (as_bytes, as_floats)
    )
    assert torch.allclose(a.row(), b.row(), rtol=0, atol=1e-6)
    assert a.final[0]["loss"]["sites"] == pytest.approx(b.final[0]["loss"]["sites"], abs=1e-6)


def test_whole_numbers_reach_an_embedding_as_they_are():
    tokens = torch.arange(24).reshape(12, 2) % 7
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, CLASSES))
    made = problem(2, sites=[(tokens, torch.arange(12) % CLASSES)] * 2, model=model)
    result = fm.train(made, fm.Ring(), fm.algorithms.DSGD(primal_step=0.5), 3)
    assert not torch.equal(result.row()[0], made.initial_row(0).float())


def test_module_given_as_it_is_is_where_every_seed_starts_and_is_not_changed():
    model = small_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = fm.train(problem(3, model=model), fm.Ring(), ALGORITHM, 3, seeds=(0, 1), measure_every=3)
    assert result.records[0]["loss"] == result.records[1]["loss"]  # both seeds, before the first round
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_function_makes_another_model_for_each_seed_and_leaves_torchs_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    result = fm.train(problem(3), fm.Ring(), ALGORITHM, 1, seeds=(0, 1), measure_every=1)
    assert torch.equal(torch.rand(3), expected)
    assert result.records[0]["loss"]["sites"] != result.records[1]["loss"]["sites"]


def write_idx(folder, name: str, values: np.ndarray) -> None:
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))


def test_fashion_mnist_is_read_from_its_files_one_class_to_a_site(tmp_path):
    generator = np.random.default_rng(0)
    for split, count in (("train", 100), ("t10k", 40)):
        write_idx(tmp_path, f"{split}-images-idx3", generator.integers(0, 256, (count, 28, 28)))
        write_idx(tmp_path, f"{split}-labels-idx1", np.arange(count) % 10)
    made = fm.data.FashionMNIST(fm.data.OneClass(20), folder=str(tmp_path)).sites()
    assert [len(site.train[0]) for site in made] == [5] * 20
    assert all(set(site.train[1].tolist()) == {i % 10} == set(site.test[1].tolist()) for i, site in enumerate(made))
    assert made[3].test is made[13].test
    assert made[0].train[0].dtype == torch.uint8
    result = fm.train(
        fm.Problem(lambda: fm.models.Logistic().build(torch.Size((28, 28)), 10), made),
        fm.Ring(),
        fm.algorithms.DSGD(),
        2,
    )
    assert len(result.final[0]["accuracy"]["sites"]) == 20
