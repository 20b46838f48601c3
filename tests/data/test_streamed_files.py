"""Image folders and parquet files that are read when a batch needs them."""

import io

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import fairmesh as fm
from fairmesh.data import streams
from fairmesh.data.datasets import own
from fairmesh.data.samples import Samples
from tests import toys
from tests.data.test_own_data import write_images
from tests.refusals import refused


def trained(data: fm.data.Data) -> fm.Result:
    settings = {"rounds": 3, "sampling": fm.Sampling(4), "model": fm.models.FullyConnected(hidden=4)}
    return fm.run(fm.Experiment(data, fm.Ring(), fm.algorithms.DSGD(0.1), **settings))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_streamed_image_folder_trains_as_the_one_in_memory(mode, tmp_path):
    write_images(tmp_path, mode)
    held, streamed = (
        trained(fm.data.ImageFolder(str(tmp_path), size=(4, 4), stream=stream)) for stream in (False, True)
    )
    assert torch.equal(held.row(), streamed.row())
    assert held.final[0]["accuracy"] == streamed.final[0]["accuracy"]
    assert streamed.problem.class_names == ("benign", "tumour")


def test_large_image_folder_is_streamed_and_a_small_one_is_not(tmp_path, monkeypatch):
    write_images(tmp_path)
    data = fm.data.ImageFolder(str(tmp_path))
    assert not isinstance(data.sites()[0].train, fm.data.Streamed)
    monkeypatch.setattr(own, "HELD_UP_TO", 40 * 8 * 6 - 1)
    sites = data.sites()
    assert [len(site.train) for site in sites] == [16, 16]
    assert sites[0].train.labels.unique().tolist() == [0, 1]


def test_streamed_image_folder_names_the_image_that_is_unlike_the_first(tmp_path):
    write_images(tmp_path)
    Image.new("RGB", (6, 8)).save(tmp_path / "lyon" / "benign" / "z.png")
    every = fm.data.ImageFolder(str(tmp_path), stream=True, test_share=0.01).sites()
    with refused("z.png", "channels = 3"):
        list(map(Samples.some, (Samples.of(one, "a set") for site in every for one in (site.train, site.test))))
    assert fm.data.ImageFolder(str(tmp_path), stream=True, channels=3).sites()[0].train.dataset[0][0].shape == (3, 8, 6)
    with refused("Contrast", "memory"):
        fm.data.ImageFolder(str(tmp_path), fm.data.Contrast(nodes=4), stream=True).sites()


def write_parquet(path, rows: int = 60, **columns) -> dict:
    generator = np.random.default_rng(0)
    table = {
        "clinic": [f"clinic {k % 3}" for k in range(rows)],
        "age": generator.normal(size=rows),
        "dose": generator.integers(0, 9, rows),
        "outcome": ["ill" if k % 2 else "well" for k in range(rows)],
    } | columns
    parquet.write_table(pa.table(table), path, row_group_size=7)
    return table


def test_parquet_rows_train_as_the_same_rows_in_memory(tmp_path):
    table = write_parquet(tmp_path / "visits.parquet")
    streamed = trained(fm.data.ParquetRows(str(tmp_path / "visits.parquet"), "outcome", "clinic"))
    inputs = np.stack([table["age"], table["dose"]], axis=1).astype(np.float32)
    labels = np.array([name == "well" for name in table["outcome"]]).astype(np.int64)
    np.savez(tmp_path / "visits.npz", x=inputs, y=labels, site=table["clinic"])
    held = trained(fm.data.Npz(str(tmp_path / "visits.npz")))
    assert torch.equal(held.row(), streamed.row())
    assert streamed.problem.class_names == ("ill", "well")
    assert [site.name for site in streamed.problem.sites] == ["clinic 0", "clinic 1", "clinic 2"]


def test_parquet_rows_may_be_lists_or_images_in_several_files_and_read_by_workers(tmp_path):
    def encoded(k: int) -> dict:
        file = io.BytesIO()
        Image.new("RGB", (4, 3), (k, 0, 0)).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    lists = {"pixels": [[float(k), 1.0] for k in range(60)], "image": [encoded(k) for k in range(60)]}
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", **lists)
    settings = {"file": str(tmp_path), "target": "age", "partition": fm.data.Even(2), "predict": "numbers"}
    sites = fm.data.ParquetRows(inputs=("pixels",), **settings).sites()
    first = Samples.of(sites[0].train, "site 0")
    assert first.read(torch.arange(3)).inputs.shape == (3, 2)
    images = fm.data.ParquetRows(inputs=("image",), workers=1, **settings).sites()
    read = Samples.of(images[0].train, "site 0").read(torch.arange(3)).inputs
    assert (read.shape[1:], read.dtype) == ((3, 3, 4), torch.uint8)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 1))
    problem = fm.Problem(model, images, sampling=fm.Sampling(4))
    assert fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.01), 2, announce=lambda text: None).rounds == 2


def test_parquet_rows_name_what_they_cannot_use(tmp_path):
    path, alone = str(tmp_path / "visits.parquet"), fm.data.Even(1)
    with refused("visits.parquet", "folder"):
        fm.data.ParquetRows(path, "outcome", "clinic").sites()
    write_parquet(path, age=[None] * 60)
    for inputs, names in {
        ("weight",): ["weight", "age", "dose"],
        (): ["row", "age"],
        ("clinic",): ["no numbers", "clinic", "table"],
    }.items():
        with refused(*names):
            fm.data.ParquetRows(path, "outcome", partition=alone, inputs=inputs).sites()[0].train.dataset[0]
    with refused("site column"):
        fm.data.ParquetRows(path, "outcome")


class HubDataset:
    """What a set of Hugging Face's `datasets` looks like: no torch Dataset, items as dictionaries with lists."""

    def __len__(self):
        return 30

    def __getitem__(self, k):
        return {"input_ids": [k, k + 1, 2], "attention_mask": [1, 1, 0], "label": k % 2}


def test_sets_of_dictionaries_are_streamed_by_index(monkeypatch):
    def forward(self, input_ids, attention_mask):
        return self.head((self.embedding(input_ids) * attention_mask.unsqueeze(-1)).mean(dim=1))

    torch.manual_seed(0)
    model = toys.module(forward, embedding=torch.nn.Embedding(40, 4), head=torch.nn.Linear(4, 2))
    found = []
    for limit in (1 << 30, 10):
        monkeypatch.setattr(streams, "HELD_UP_TO", limit)
        problem = fm.Problem(model, [HubDataset(), HubDataset()], sampling=fm.Sampling(4)).prepared
        assert (problem.sites[0].train.stream is not None) == (limit == 10)
        found.append(fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 2))
    assert torch.equal(found[0].row(), found[1].row())
