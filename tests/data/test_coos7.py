"""COOS7 from a small generated file that has the layout of the real one."""

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.data.datasets.download import check
from fairmesh.data.datasets.sources import SOURCES
from tests.refusals import refused

h5py = pytest.importorskip("h5py")


def write(folder, name: str, count: int, top: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 1000, (count, 2, 64, 64)).astype(np.float32)
    data[-1, 1, 5, 5] = top  # beyond the slices that are read: the whole file's maximum scales them
    labels = generator.integers(0, 7, count)
    with h5py.File(folder / f"COOS7_v1.1_{name}.hdf5", "w") as file:
        file["data"], file["labels"] = data, labels
    return data, labels


@pytest.fixture
def files(tmp_path):
    return write(tmp_path, "test4", 50, 2000.0, 0), write(tmp_path, "test3", 30, 4000.0, 1)


def test_coos7_deals_the_first_slices_of_its_files_to_eight_nodes_and_two(tmp_path, files):
    made = fm.data.COOS7(folder=str(tmp_path), per_node=3).sites()
    (first, first_labels), (second, second_labels) = files
    assert [site.group for site in made] == ["microscope 1"] * 8 + ["microscope 2"] * 2
    assert [len(site.train[0]) for site in made] == [3] * 10
    for i in range(8):
        assert np.array_equal(made[i].train[0].numpy(), (first[3 * i : 3 * i + 3] / 2000).astype(np.float16))
        assert made[i].train[1].tolist() == first_labels[3 * i : 3 * i + 3].tolist()
    assert np.array_equal(made[9].train[0].numpy(), (second[3:6] / 4000).astype(np.float16))
    assert made[9].train[1].tolist() == second_labels[3:6].tolist()
    assert (made[0].test is made[7].test, made[8].test is made[9].test) == (True, True)  # they follow, and are shared
    assert made[0].test[1].tolist() == first_labels[24:48].tolist()
    assert np.array_equal(made[8].test[0].numpy(), (second[6:12] / 4000).astype(np.float16))
    assert made[0].test[0].dtype == torch.float16


def test_coos7_can_be_trained_on(tmp_path, files):
    data = fm.data.COOS7(fm.data.BySite((3, 1)), str(tmp_path), per_node=4)
    result = fm.run(fm.Experiment(data=data, topology=fm.Ring(), algorithm=fm.algorithms.DSGD(), rounds=2))
    assert len(result.final[0]["accuracy"]["sites"]) == 4


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda folder: fm.data.COOS7(folder=folder, per_node=1000).sites(), ["50 images", "16000"]),
        (lambda folder: fm.data.COOS7(fm.data.OneClass(3)), ["by-site"]),
        (lambda folder: fm.data.COOS7(fm.data.BySite((1, 2, 3))), ["two files"]),
        (lambda folder: fm.data.COOS7(folder=folder + "/nowhere").sites(), ["COOS7", "nowhere", "v1.1_test4.hdf5"]),
    ],
)
def test_coos7_that_cannot_be_read_is_refused_with_the_numbers(tmp_path, files, call, names):
    with refused(*names):
        call(str(tmp_path))


def test_coos7_names_damaged_files(tmp_path, files):
    source = SOURCES["coos7"]
    verdict = dict(check(source, tmp_path))["COOS7_v1.1_test3.hdf5"]
    assert verdict.startswith("right")
    assert "30 images" in verdict
    with h5py.File(tmp_path / "COOS7_v1.1_test3.hdf5", "w") as file:
        file["data"] = np.zeros((4, 1, 64, 64))
    with refused("COOS7_v1.1_test3.hdf5", "'labels'"):
        fm.data.COOS7(folder=str(tmp_path), per_node=2).sites()
    (tmp_path / "COOS7_v1.1_test4.hdf5").write_bytes(b"no HDF5")
    with refused("COOS7_v1.1_test4.hdf5"):
        fm.data.COOS7(folder=str(tmp_path), per_node=2).sites()
    assert all(verdict.startswith("damaged") for _, verdict in check(source, tmp_path))
