"""A user's own files: images by site and class, tables by a site column, arrays; and what is wrong with them."""

import csv
import random

import numpy as np
import pytest
import torch
from PIL import Image

import fairmesh as fm
from tests import toys
from tests.refusals import refused


def write_images(folder, mode: str = "L", sizes=((8, 6),)) -> None:
    for s, site in enumerate(("lyon", "oslo")):
        for c, kind in enumerate(("benign", "tumour")):
            (folder / site / kind).mkdir(parents=True)
            for k in range(10):
                height, width = sizes[k % len(sizes)]
                value = 100 * s + 50 * c + k
                colour = value if mode == "L" else (value, 0, 255 - value)
                Image.new(mode, (width, height), colour).save(folder / site / kind / f"{k}.png")


def test_image_folder_gives_one_node_per_site(tmp_path):
    write_images(tmp_path)
    made = fm.data.ImageFolder(str(tmp_path)).sites()
    sizes = [(site.name, site.group, len(site.train[0]), len(site.test[0])) for site in made]
    assert sizes == [("lyon", "lyon", 16, 4), ("oslo", "oslo", 16, 4)]
    for s, site in enumerate(made):
        for images, labels in (site.train, site.test):
            assert (images.shape[1:], images.dtype) == ((8, 6), torch.uint8)
            assert torch.equal(labels, (images[:, 0, 0].long() - 100 * s) // 50)
    every = torch.cat([part[0][:, 0, 0] for site in made for part in (site.train, site.test)])
    assert len(set(every.tolist())) == 40


def test_image_folder_gives_colour_images_three_planes(tmp_path):
    write_images(tmp_path, "RGB")
    Image.new("L", (6, 8), 7).save(tmp_path / "oslo" / "tumour" / "grey.png")
    images, labels = fm.data.ImageFolder(str(tmp_path)).sites()[0].train
    assert images.shape[1:] == (3, 8, 6)
    assert int(labels[0]) == int(images[0, 0, 0, 0]) // 50
    assert int(images[0, 0, 0, 0]) + int(images[0, 2, 0, 0]) == 255


def test_image_folder_brings_images_to_one_size(tmp_path):
    write_images(tmp_path, sizes=((8, 6), (16, 12)))
    with refused("1.png", "16 x 12", "0.png", "8 x 6", "size"):
        fm.data.ImageFolder(str(tmp_path)).sites()
    assert fm.data.ImageFolder(str(tmp_path), size=(4, 5)).sites()[0].train[0].shape[1:] == (4, 5)


def test_image_folder_trains_from_an_experiment_file_dealt_otherwise_than_by_site(tmp_path):
    write_images(tmp_path / "scans")
    made = fm.data.ImageFolder(str(tmp_path / "scans"), fm.data.OneClass(4)).sites()
    assert [site.train[1].unique().tolist() for site in made] == [[0], [1], [0], [1]]
    (tmp_path / "e.toml").write_text(
        f'rounds = 2\ntopology = "ring"\nalgorithm = "dsgd"\n[data]\nname = "image-folder"\n'
        f'folder = "{tmp_path / "scans"}"\npartition = {{name = "even", nodes = 3}}\n'
    )
    result = fm.run(fm.load_experiment(tmp_path / "e.toml"))
    assert len(result.final[0]["accuracy"]["sites"]) == 3


ROWS = [
    {"age": 20 + i, "weight": 50.5 + i, "ward": ("north", "south", "10")[i % 3], "ill": ("no", "yes")[i % 2]}
    for i in range(30)
]


def write_csv(path, rows=ROWS) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def write_parquet(path, rows=ROWS) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_table_gives_the_same_sites_from_csv_and_parquet(tmp_path):
    files = write_csv(tmp_path / "rows.csv"), write_parquet(tmp_path / "rows.parquet")
    a, b = (fm.data.Table(file, "ill", site="ward", standardize=False).sites() for file in files)
    assert [site.name for site in a] == [site.name for site in b] == ["10", "north", "south"]
    for left, right in zip(a, b):
        assert torch.equal(left.train[0], right.train[0])
        assert torch.equal(left.train[1], right.train[1])
        assert (len(left.train[0]), len(left.test[0])) == (8, 2)
    inputs, labels = a[1].train
    assert (inputs.dtype, inputs.shape[1]) == (torch.float32, 2)
    assert torch.equal(labels, (inputs[:, 0].long() - 20) % 2)
    assert torch.equal(inputs[:, 1], inputs[:, 0] + 30.5)


def test_table_orders_sites_and_labels_that_are_whole_numbers(tmp_path):
    rows = [{"x": i, "site": (9, 10, 100)[i % 3], "y": (2, 11)[i % 2]} for i in range(18)]
    made = fm.data.Table(write_csv(tmp_path / "t.csv", rows), "y", site="site").sites()
    assert [site.name for site in made] == ["9", "10", "100"]
    assert {int(y) for site in made for y in site.train[1]} == {0, 1}


def test_classes_are_numbered_by_their_list(tmp_path):
    rows = [{"x": i, "kind": ("mild", "severe")[i % 2]} for i in range(12)]
    file = write_csv(tmp_path / "t.csv", rows)
    classes, alone = ("none", "mild", "severe"), fm.data.Even(1)
    listed = fm.data.Table(file, "kind", partition=alone, standardize=False, classes=classes)
    inputs, labels = listed.sites()[0].train
    assert torch.equal(labels, 1 + inputs[:, 0].long() % 2)
    with refused("kind", "'severe'", "classes"):
        fm.data.Table(file, "kind", partition=alone, classes=classes[:2]).sites()
    write_images(tmp_path / "images")
    folder = fm.data.ImageFolder(str(tmp_path / "images"), classes=("tumour", "benign"))
    images, labels = folder.sites()[0].train
    assert torch.equal(labels, 1 - images[:, 0, 0].long() // 50)


def test_table_standardizes_columns_over_the_training_rows(tmp_path):
    made = fm.data.Table(write_csv(tmp_path / "t.csv"), "ill", site="ward").sites()
    inputs = torch.cat([site.train[0] for site in made])
    assert torch.allclose(inputs.mean(0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(inputs.std(0, correction=0), torch.ones(2), atol=1e-5)


@pytest.mark.filterwarnings("ignore:clearly worse than a constant")  # targets are noise
def test_table_of_numbers_to_predict_with_chosen_columns_and_no_site_column(tmp_path):
    settings = {"inputs": ("age",), "predict": "numbers", "partition": fm.data.Even(4), "standardize": False}
    data = fm.data.Table(write_csv(tmp_path / "t.csv"), "weight", **settings)
    made = data.sites()
    assert len(made) == 4
    assert torch.equal(made[0].train[1], made[0].train[0][:, 0] + 30.5)
    options = {"topology": fm.Ring(), "algorithm": fm.algorithms.DSGD(0.6), "rounds": 1, "loss": "squared-error"}
    with pytest.warns(UserWarning, match="constant answer"):  # after one round
        assert "loss" in fm.run(fm.Experiment(data=data, **options)).final[0]


def test_npz_arrays_are_dealt_by_their_sites(tmp_path):
    x, y, site = np.arange(40.0, dtype=np.float32)[:, None], np.arange(40) % 3, np.array(["b", "a"])[np.arange(40) % 2]
    np.savez(tmp_path / "a.npz", x=x, y=y, site=site)
    made = fm.data.Npz(str(tmp_path / "a.npz")).sites()
    assert [(s.name, len(s.train[0]), len(s.test[0])) for s in made] == [("a", 16, 4), ("b", 16, 4)]
    assert torch.equal(made[0].train[1], made[0].train[0][:, 0].long() % 3)
    assert (made[0].train[0] % 2 == 1).all()


def test_npz_arrays_may_bring_their_own_test_samples(tmp_path):
    x, y, site = np.arange(12, dtype=np.uint8).reshape(6, 2), np.arange(6) % 2, np.array([0, 0, 0, 1, 1, 1])
    np.savez(tmp_path / "a.npz", x=x, y=y, site=site, x_test=x[:4], y_test=y[:4], site_test=np.array([1, 1, 0, 0]))
    made = fm.data.Npz(str(tmp_path / "a.npz")).sites()
    assert made[0].train[0].tolist() == x[:3].tolist()
    assert made[0].test[0].tolist() == x[2:4].tolist()
    np.savez(tmp_path / "b.npz", x=x, y=y, x_test=x, y_test=y)
    assert len(fm.data.Npz(str(tmp_path / "b.npz"), fm.data.Even(2)).sites()) == 2


def images(name: str, save):
    """An image folder in which one more image is saved under a name."""

    def call(folder):
        write_images(folder)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save(folder / name)
        return fm.data.ImageFolder(str(folder)).sites()

    return call


def table(rows, **fields):
    return lambda folder: fm.data.Table(write_csv(folder / "t.csv", rows), "y", **({"site": "s"} | fields)).sites()


def npz(**arrays):
    def call(folder):
        np.savez(folder / "a.npz", **arrays)
        fm.data.Npz(str(folder / "a.npz")).sites()

    return call


def file_of(name: str, content: bytes, data=lambda file: fm.data.Table(file, "y", site="x")):
    def call(folder):
        (folder / name).write_bytes(content)
        data(str(folder / name)).sites()

    return call


GOOD = [{"x": i, "s": i % 2, "y": i % 2} for i in range(8)]
SPOILT = {
    "no folder": (lambda folder: fm.data.ImageFolder(str(folder / "no")).sites(), ["no"]),
    "no image": (lambda folder: fm.data.ImageFolder(str(folder)).sites(), ["site/class/file"]),
    "16 bits": (images("lyon/benign/deep.png", Image.fromarray(np.zeros((8, 6), np.uint16)).save), ["deep", "8 bits"]),
    "broken image": (images("lyon/benign/broken.png", lambda path: path.write_bytes(b"no image")), ["broken.png"]),
    "size": (lambda folder: fm.data.ImageFolder("x", size=(3,)), ["size"]),
    "share": (lambda folder: fm.data.ImageFolder("x", test_share=1.0), ["test_share", "(0, 1)", "1.0"]),
    "no site column": (lambda folder: fm.data.Table("t.csv", "y"), ["site"]),
    "no such column": (table(GOOD, site="where"), ["'where'", "x, s, y"]),
    "text column": (table([*GOOD, {"x": "tall", "s": 0, "y": 1}]), ["row 9", "'x'", "'tall'"]),
    "missing number": (table([*GOOD, {"x": "", "s": 0, "y": 1}], missing="refuse"), ["row 9", "'x'", "''", "impute"]),
    "nan": (table([*GOOD, {"x": "nan", "s": 0, "y": 1}], missing="refuse"), ["row 9", "'x'", "'nan'"]),
    "missing site": (table([*GOOD, {"x": 1, "s": "", "y": 1}]), ["row 9", "'s'"]),
    "ragged": (file_of("t.csv", b"y,x,z\n1,2,3\n1,2\n"), ["row 2", "2 values", "3 columns"]),
    "no rows": (file_of("t.csv", b"x,y\n"), ["t.csv"]),
    "empty": (file_of("t.csv", b""), ["t.csv"]),
    "other table": (file_of("t.xls", b""), [".csv", ".parquet"]),
    "bad parquet": (file_of("t.parquet", b"no"), ["t.parquet"]),
    "only target": (table([{"s": i % 2, "y": i} for i in range(8)]), ["column"]),
    "no y": (npz(x=np.zeros((4, 2))), ["'y'", "x"]),
    "lengths": (npz(x=np.zeros((4, 2)), y=np.zeros(3)), ["4, 3"]),
    "no site": (npz(x=np.zeros((4, 2)), y=np.zeros(4)), ["by-site"]),
    "site of test": (
        npz(x=np.zeros((4, 2)), y=np.zeros(4), site=np.zeros(4), x_test=np.zeros((4, 2)), y_test=np.zeros(4)),
        ["site_test"],
    ),
    "no npz": (file_of("a.npz", b"no", fm.data.Npz), ["a.npz"]),
    "pickle": (npz(x=np.array([{}, {}]), y=np.zeros(2)), ["a.npz"]),
}


@pytest.mark.parametrize("case", SPOILT)
def test_own_files_that_are_wrong_are_refused_with_the_place(case, tmp_path):
    call, names = SPOILT[case]
    with refused(*names):
        call(tmp_path)


def randomly_flipped(draw) -> toys.Items:
    """Items of which about half are flipped, differently each time."""
    row = torch.arange(6.0)
    return toys.Items(2, lambda i: ((row + i).flip(0) if draw() < 0.5 else row + i, i % 2))


DRAWS = {"torch": lambda: float(torch.rand(())), "Python": random.random, "numpy": np.random.rand}


@pytest.mark.parametrize("whose", DRAWS)
def test_dataset_with_a_random_flip_is_refused_every_time(whose):
    for _ in range(60):
        with refused("site 0", "random transforms", whose, "augment"):
            fm.data.Samples.of(randomly_flipped(DRAWS[whose]), "site 0")


def table_with(tmp_path, rows: str, target: str = "ill", **settings) -> fm.data.Table:
    (tmp_path / "t.csv").write_text("mass,site,ill\n" + rows)
    return fm.data.Table(str(tmp_path / "t.csv"), target=target, site="site", **settings)


def test_site_with_one_image_or_row_trains_on_it_and_is_not_measured(tmp_path):
    *_, rome = images("rome/benign/one.png", Image.new("L", (6, 8)).save)(tmp_path)
    rows = "".join(f"{i},big,{'yn'[i % 2]}\n" for i in range(20)) + "7,tiny,y\n"
    big, tiny = table_with(tmp_path, rows, validation_share=0.2).sites()
    for site in (rome, tiny):
        assert (len(site.train[0]), site.test, site.validation) == (1, None, None)
    assert big.test is not None
    with refused("too few", 1):
        table_with(tmp_path, "7,tiny,y\n").sites()


def test_target_of_one_class_is_refused_but_not_a_site_of_one_class(tmp_path):
    rows = "".join(f"{i},{'ab'[i % 2]},y\n" for i in range(20))
    with refused("'ill'", "one class", "'y'", "classes"):
        fm.Experiment(table_with(tmp_path, rows), rounds=1).problem()
    for data in (table_with(tmp_path, rows, classes=("n", "y")), table_with(tmp_path, rows.replace("b,y", "b,n"))):
        assert fm.Experiment(data, rounds=1).problem().classes == 2


def test_labels_that_are_another_number_in_every_row_are_refused_unless_they_are_listed(tmp_path):
    rows = "".join(f"{i},{'ab'[i % 2]},{i}.5\n" for i in range(200))
    with refused("'ill'", "200", 'predict = "numbers"', "classes"):
        table_with(tmp_path, rows).sites()
    assert len(table_with(tmp_path, rows, predict="numbers").sites()) == 2
    assert len(table_with(tmp_path, rows, classes=[f"{i}.5" for i in range(200)]).sites()) == 2


@pytest.mark.parametrize("name", ["none.csv", "none.parquet"])
def test_missing_table_is_refused_with_the_folder_that_its_path_is_relative_to(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(name, tmp_path):
        fm.data.read_table(name)


def test_missing_column_is_refused_with_each_column_once(tmp_path):
    with refused("bmi", "mass", "ill") as caught:
        table_with(tmp_path, "61,a,yes\n", target="bmi").sites()
    assert str(caught.value).count("mass") == 1
