"""Official files: where they are found, how they are fetched, resumed and checked, and what errors name."""

import gzip
import hashlib
import http.server
import json
import re
import tarfile
import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

import fairmesh as fm
from fairmesh.data.datasets import download
from fairmesh.data.datasets.download import check, fetch, folder_of
from fairmesh.data.datasets.sources import SOURCES, File, Source, cache_of, found
from tests.refusals import refused

CONTENT = bytes(range(256)) * 2000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Site(http.server.BaseHTTPRequestHandler):
    """Serves `files`, honours Range, breaks off once after `cut` bytes, and records the requests."""

    files: dict[str, bytes]
    cut: int | None
    ranged: bool
    asked: list

    def do_GET(self):
        content = self.files.get(self.path.partition("?")[0])
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        self.asked.append((self.path, self.headers.get("Range")))
        if content is None:
            self.send_error(404)
            return
        first = int(start[1]) if start and self.ranged else 0
        if first >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        cut, type(self).cut = self.cut, None
        self.wfile.write(content[first : None if cut is None else first + cut])

    def log_message(self, *_):
        pass


@contextmanager
def served(files: dict[str, bytes], cut: int | None = None, ranged: bool = True):
    handler = type("Here", (Site,), {"files": files, "cut": cut, "ranged": ranged, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def source(base: str, md5: str = MD5, packed: bool = True) -> Source:
    file = File("numbers", md5, len(CONTENT), f"{base}/numbers{'.gz' * packed}")
    return Source("numbers", "Numbers", (file,), "free", "https://example.org/numbers")


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FAIRMESH_DATA", raising=False)
    monkeypatch.setattr(download, "_PATIENCE", 5.0)
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)


def test_fetch_brings_a_file_into_the_cache_and_checks_it():
    told = []
    with served({"/numbers.gz": gzip.compress(CONTENT)}) as (base, _):
        folder = fetch(source(base), progress=lambda *step: told.append(step))
    assert folder == cache_of(source(base))
    assert [path.name for path in folder.iterdir()] == ["numbers.gz"]
    assert dict(check(source(base), folder)) == {"numbers": "right"}
    name, done, total = told[-1]
    assert (name, done) == ("numbers.gz", total)


def left_in_the_cache(base: str, name: str, content: bytes):
    folder = cache_of(source(base))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def test_fetch_replaces_a_damaged_file_and_leaves_one_that_is_right():
    with served({"/numbers.gz": gzip.compress(CONTENT)}) as (base, asked):
        folder = left_in_the_cache(base, "numbers", b"damaged")
        for _ in range(2):
            fetch(source(base))
            assert dict(check(source(base), folder)) == {"numbers": "right"}
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("server", "left", "asked_for"),
    [
        ({"cut": 100_000}, 0, [None, "bytes=100000-"]),
        ({"cut": 100_000, "ranged": False}, 0, [None, "bytes=100000-"]),
        ({}, 300_000, ["bytes=300000-"]),  # by an earlier process
        ({}, len(CONTENT), [f"bytes={len(CONTENT)}-"]),
    ],
    ids=["cut", "a server that cannot go on", "begun", "whole"],
)
def test_fetch_asks_only_for_the_rest(server, left, asked_for):
    with served({"/numbers": CONTENT}, **server) as (base, asked):
        if left:
            left_in_the_cache(base, "numbers.part", CONTENT[:left])
        folder = fetch(source(base, packed=False))
    assert (folder / "numbers").read_bytes() == CONTENT
    assert asked == [("/numbers", rest) for rest in asked_for]


@pytest.mark.parametrize(
    "content", [gzip.compress(b"something else"), b"not packed at all"], ids=["other", "not packed"]
)
def test_fetch_refuses_a_wrong_checksum_and_keeps_nothing(content):
    with served({"/numbers.gz": content}) as (base, _), refused("numbers.gz"):
        fetch(source(base))
    assert list(cache_of(source(base)).iterdir()) == []


def test_fetch_without_a_network_or_file_names_files_and_folder():
    with served({}) as (base, _), refused("numbers.gz", 404):
        fetch(source(base))
    with refused("Numbers", cache_of(source(base)), "https://example.org/numbers"):  # nobody listens there any more
        fetch(source(base))


def test_fetch_checks_unpacks_and_removes_an_archive(tmp_path):
    packed = tmp_path / "both.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for name in ("one.bin", "two.bin"):
            (tmp_path / name).write_bytes(name.encode())
            archive.add(tmp_path / name, f"inner/{name}")
    files = tuple(File(name, hashlib.md5(name.encode()).hexdigest(), 7) for name in ("one.bin", "two.bin"))
    with served({"/both.tar.gz": packed.read_bytes()}) as (base, _):
        whole = File("both.tar.gz", hashlib.md5(packed.read_bytes()).hexdigest(), 0, f"{base}/both.tar.gz")
        both = Source("both", "Both", files, "free", "nowhere", archive=whole)
        folder = fetch(both, tmp_path / "data")
    assert folder == tmp_path / "data" / "both"
    assert sorted(path.name for path in folder.iterdir()) == ["one.bin", "two.bin"]
    assert dict(check(both, folder)) == {"one.bin": "right", "two.bin": "right"}
    with refused("MD5", "0"), served({"/both.tar.gz": b"x"}) as (base, _):
        fetch(replace(both, name="again", archive=replace(whole, md5="0", url=f"{base}/both.tar.gz")))


def test_fetch_asks_a_zenodo_record_for_address_and_checksum():
    with served({"/numbers": CONTENT}) as (base, _):
        entry = {"key": "numbers", "checksum": f"md5:{MD5}", "links": {"self": f"{base}/numbers"}}
        answer = {"hits": {"hits": [{"files": [{"key": "other"}]}, {"files": [entry]}]}}
        with served({"/records": json.dumps(answer).encode()}) as (zenodo, asked):
            plain = Source("z", "Z", (File("numbers"),), "", "", record=f"{zenodo}/records?q=z")
            folder = fetch(plain)
            assert asked[0][0] == "/records?q=z"
    assert (folder / "numbers").read_bytes() == CONTENT


def test_fetch_refuses_a_record_without_the_file():
    answer = json.dumps({"hits": {"hits": []}}).encode()
    with served({"/records": answer}) as (zenodo, _), refused("/records", "numbers"):
        fetch(Source("z", "Z", (File("numbers"),), "", "", record=f"{zenodo}/records"))


def write_idx(folder, name: str, values: np.ndarray, packed: bool) -> None:
    content = (
        bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.astype(np.uint8).tobytes()
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}-ubyte{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)


def write_mnist(folder, packed: bool = False, train: int = 100, test: int = 40) -> None:
    generator = np.random.default_rng(0)
    for split, count in (("train", train), ("t10k", test)):
        write_idx(folder, f"{split}-images-idx3", generator.integers(0, 256, (count, 28, 28)), packed)
        write_idx(folder, f"{split}-labels-idx1", np.arange(count) % 10, packed)


def cifar_row(label: int, value: int) -> bytes:
    return bytes([label]) + bytes([value]) * 1024 + bytes([value + 1]) * 1024 + bytes([value + 2]) * 1024


def write_cifar(folder) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for b, file in enumerate(SOURCES["cifar-10"].files):
        (folder / file.name).write_bytes(b"".join(cifar_row((b + i) % 10, 10 * b + i) for i in range(8)))


@pytest.mark.parametrize("packed", [True, False])
def test_found_looks_in_the_folder_given_then_in_fairmesh_data_then_in_the_cache(tmp_path, monkeypatch, packed):
    mnist = SOURCES["mnist"]
    assert found(mnist) is None
    write_mnist(cache_of(mnist), packed)
    assert found(mnist) == cache_of(mnist)
    own = tmp_path / "own"
    monkeypatch.setenv("FAIRMESH_DATA", str(own))
    assert found(mnist) == cache_of(mnist)
    write_mnist(own / "mnist", packed)
    assert found(mnist) == own / "mnist"
    write_mnist(tmp_path / "here", packed)
    assert found(mnist, tmp_path / "here") == tmp_path / "here"
    assert found(mnist, own) == own / "mnist"
    assert found(mnist, tmp_path / "nowhere") is None


def test_mnist_is_the_same_from_packed_and_unpacked_files(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRMESH_DATA", str(tmp_path / "a"))  # which may itself be the folder of the files
    write_mnist(tmp_path / "a", packed=True)
    write_mnist(tmp_path / "b", packed=False)
    a, b = (fm.data.MNIST(fm.data.OneClass(20), folder=folder).sites() for folder in (None, str(tmp_path / "b")))
    assert all(torch.equal(x.train[0], y.train[0]) and torch.equal(x.test[1], y.test[1]) for x, y in zip(a, b))


def test_cifar_is_read_from_its_batches_or_from_the_official_archive(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-bin")
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / "cifar-10-binary.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "cifar-10-batches-bin", "cifar-10-batches-bin")
    a, b = (fm.data.CIFAR10(fm.data.Contrast(4, ()), folder=str(tmp_path / where)).sites() for where in ("", "packed"))
    images, labels = (torch.cat(parts) for parts in zip(*(site.train for site in a)))
    assert (images.shape, images.dtype) == ((40, 3, 32, 32), torch.uint8)
    assert labels[:8].tolist() == list(range(8))
    assert images[9, :, 0, 0].tolist() == [11, 12, 13]  # planes of red, green and blue
    assert a[0].test[1].tolist() == [5, 6, 7, 8, 9, 0, 1, 2]
    assert fm.data.CIFAR10().partition == fm.data.Contrast(20, (0.5, 0.5, 1.5, 1.5), "kind", "published")  # the paper's
    assert all(torch.equal(x.train[0], y.train[0]) for x, y in zip(a, b))


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        ("train-images-idx3-ubyte", b"", ["train-images-idx3-ubyte", "IDX"]),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03" + b"\0\0\0\x05" * 3 + b"x" * 20, ["train-images-idx3-ubyte"]),
        ("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x03abc", ["(40, 28, 28)", "(3,)"]),
    ],
)
def test_mnist_names_a_damaged_file(tmp_path, name, content, names):
    write_mnist(tmp_path)
    fm.data.MNIST(folder=str(tmp_path)).sites()
    (tmp_path / name).write_bytes(content)
    with refused(*names):
        fm.data.MNIST(folder=str(tmp_path)).sites()


def test_cifar_names_a_cut_batch_and_a_cut_archive(tmp_path):
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(b"x" * 5000)
    with refused("data_batch_3.bin", "5000 bytes"):
        fm.data.CIFAR10(folder=str(tmp_path)).sites()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(b"x")[:10])
    with refused("cifar-10-binary.tar.gz"):
        fm.data.CIFAR10(folder=str(tmp_path / "a")).sites()


def test_check_names_what_is_missing_and_what_is_damaged(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(b"no gzip")
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    verdicts = dict(check(SOURCES["mnist"], tmp_path))
    assert verdicts["t10k-labels-idx1-ubyte"] == "missing"
    assert verdicts["train-labels-idx1-ubyte"].startswith("damaged")
    assert verdicts["train-images-idx3-ubyte"].startswith("damaged")
    assert "6bbc9ace" in verdicts["train-images-idx3-ubyte"]  # the MD5 of the official file begins with it


def test_folder_of_does_not_download_into_a_folder_that_was_named(tmp_path):
    with refused("CIFAR-10", tmp_path, "6 files"):
        folder_of(SOURCES["cifar-10"], tmp_path)


def test_mnist_files_are_read_once_and_again_when_they_change(tmp_path):
    write_mnist(tmp_path)
    first, again = (fm.data.MNIST(fm.data.Contrast(2, ()), folder=str(tmp_path)).sites() for _ in range(2))
    assert first[0].test is again[0].test
    write_mnist(tmp_path, train=50, test=20)
    assert len(fm.data.MNIST(fm.data.Contrast(2, ()), folder=str(tmp_path)).sites()[0].test[0]) == 20


def test_held_out_judges_by_training_samples_that_are_not_trained_on(tmp_path):
    write_mnist(tmp_path, train=200)
    plain = fm.data.MNIST(fm.data.OneClass(20), folder=str(tmp_path))
    whole, made, again = plain.sites(), fm.data.HeldOut(plain).sites(), fm.data.HeldOut(plain).sites()
    assert [len(site.train[0]) for site in made] == [8] * 20
    assert all(site.test is made[i % 10].test for i, site in enumerate(made))
    for c in range(10):
        rows = [torch.cat([site.train[0], site.test[0]]).flatten(1) for site in (made[c], made[c + 10])]
        kept = torch.cat([made[c].train[0], made[c + 10].train[0], made[c].test[0]]).flatten(1)
        given = torch.cat([whole[c].train[0], whole[c + 10].train[0]]).flatten(1)
        assert len(rows[0]) == 12
        assert sorted(map(tuple, kept.tolist())) == sorted(map(tuple, given.tolist()))
    assert all(torch.equal(a.train[0], b.train[0]) for a, b in zip(made, again))
    other = fm.data.HeldOut(plain, seed=1).sites()
    assert not all(torch.equal(a.train[0], b.train[0]) for a, b in zip(made, other))


def test_sources_on_this_machine_are_right(monkeypatch):
    monkeypatch.undo()
    here = [(source, found(source)) for source in SOURCES.values() if found(source)]
    if not here:
        pytest.skip("no published dataset on this machine")
    for source, place in here:
        assert all(verdict.startswith("right") for _, verdict in check(source, place)), source.name
