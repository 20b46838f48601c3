"""COOS7 from a small generated file of the layout of its own."""

import builtins

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.data.datasets.download import check
from fairmesh.data.datasets.sources import SOURCES

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


def test_eight_nodes_of_one_microscope_and_two_of_the_other_hold_the_first_slices_of_their_files(tmp_path, files):
    made = fm.data.COOS7(folder=str(tmp_path), per_node=3).sites()
    (first, first_labels), (second, second_labels) = files
    assert [site.group for site in made] == ["microscope 1"] * 8 + ["microscope 2"] * 2
    assert [len(site.train[0]) for site in made] == [3] * 10
    for i in range(8):
        assert np.array_equal(made[i].train[0].numpy(), (first[3 * i : 3 * i + 3] / 2000).astype(np.float16))
        assert made[i].train[1].tolist() == first_labels[3 * i : 3 * i + 3].tolist()
    assert np.array_equal(made[9].train[0].numpy(), (second[3:6] / 4000).astype(np.float16))
    assert made[9].train[1].tolist() == second_labels[3:6].tolist()


def test_the_images_that_follow_judge_and_are_shared_by_a_microscopes_nodes(tmp_path, files):
    made = fm.data.COOS7(folder=str(tmp_path), per_node=3).sites()
    assert made[0].test is made[7].test
    assert made[8].test is made[9].test
    assert made[0].test[1].tolist() == files[0][1][24:48].tolist()
    assert np.array_equal(made[8].test[0].numpy(), (files[1][0][6:12] / 4000).astype(np.float16))
    assert made[0].test[0].dtype == torch.float16


def test_a_run_trains_on_it(tmp_path, files):
    data = fm.data.COOS7(fm.data.BySite((3, 1)), str(tmp_path), per_node=4)
    result = fm.run(fm.Experiment(data=data, topology=fm.Ring(), algorithm=fm.DSGD(), rounds=2))
    assert len(result.final[0]["accuracy"]["sites"]) == 4


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda folder: fm.data.COOS7(folder=folder, per_node=1000).sites(), "50 images, but 16000 are needed"),
        (lambda folder: fm.data.COOS7(fm.data.OneClass(3)), "dealt by-site"),
        (lambda folder: fm.data.COOS7(fm.data.BySite((1, 2, 3))), "each of its two files"),
        (lambda folder: fm.data.COOS7(folder=folder + "/nowhere").sites(), r"COOS7 is not in .*COOS7_v1.1_test4.hdf5"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path, files, call, reason):
    with pytest.raises(fm.BadInput, match=reason):
        call(str(tmp_path))


def test_damaged_files_are_named_by_loading_and_by_a_check(tmp_path, files):
    source = SOURCES["coos7"]
    assert dict(check(source, tmp_path))["COOS7_v1.1_test3.hdf5"].startswith("right in its layout: 30 images")
    with h5py.File(tmp_path / "COOS7_v1.1_test3.hdf5", "w") as file:
        file["data"] = np.zeros((4, 1, 64, 64))
    with pytest.raises(fm.BadInput, match=r"COOS7_v1.1_test3.hdf5 is missing or damaged: it has no 'labels'"):
        fm.data.COOS7(folder=str(tmp_path), per_node=2).sites()
    (tmp_path / "COOS7_v1.1_test4.hdf5").write_bytes(b"no HDF5")
    with pytest.raises(fm.BadInput, match=r"COOS7_v1.1_test4.hdf5 is missing or damaged"):
        fm.data.COOS7(folder=str(tmp_path), per_node=2).sites()
    assert all(verdict.startswith("damaged") for _, verdict in check(source, tmp_path))


def test_without_h5py_the_extra_is_named(tmp_path, files, monkeypatch):
    original = builtins.__import__

    def without(name, *rest):
        if name == "h5py":
            raise ModuleNotFoundError(name, name=name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(fm.BadInput, match=r"pip install 'fairmesh\[coos7\]'"):
        fm.data.COOS7(folder=str(tmp_path), per_node=1).sites()
