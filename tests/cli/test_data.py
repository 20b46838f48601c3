"""`fairmesh data` as a person and as a machine use it."""

import json
from functools import partial

import numpy as np
import pytest

from fairmesh.data.datasets import download
from tests.data.test_sources import served, write_mnist
from tests.pairwise import covering


@pytest.fixture
def cli(monkeypatch, called, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRMESH_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_mnist(tmp_path / "data" / "mnist", train=400, test=200)
    return partial(called, "data")


def test_data_lists_what_is_here_and_what_is_missing(cli, tmp_path):
    code, out, err = cli()
    lines = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["dataset", "found in", "size", "licence", "source"]
    found = {line[0]: line[1] for line in lines[1:]}
    assert found["mnist"] == str(tmp_path / "data" / "mnist")
    assert found["coos7"] == "missing"
    assert "fairmesh data fetch" in err


def test_data_as_json_says_where_it_looked(cli, tmp_path):
    code, out, err = cli("--json")
    rows = {row["name"]: row for row in json.loads(out)["datasets"]}
    assert (code, err) == (0, "")
    assert set(rows) == {"fashion-mnist", "mnist", "cifar-10", "coos7"}
    assert rows["mnist"]["bytes"] == 600 * (28 * 28 + 1) + 2 * (16 + 8)
    assert str(tmp_path / "data" / "cifar-10") in rows["cifar-10"]["looked_in"]


def test_data_check_of_damaged_files_exits_with_one_and_names_them(cli):
    code, out, err = cli("check", "mnist", "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["damaged"] == 4  # generated files are not the official ones
    assert all(row["verdict"].startswith("damaged") for row in answer["files"])
    code, out, err = cli("check")
    assert code == 1
    assert err.startswith("4 of ")  # others may be on this machine, and right


def test_data_check_of_what_is_not_here_says_where_it_looked(cli, tmp_path):
    code, _, err = cli("check", "coos7")
    assert code == 2
    assert str(tmp_path / "data" / "coos7") in err
    assert "fairmesh data fetch coos7" in err


@pytest.mark.slow
def test_data_show_draws_who_holds_what_and_prints_a_table(cli, tmp_path):
    code, out, err = cli("show", "mnist", "--partition", "one-class", "--nodes", "20", "--plot", "held.png")
    lines = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["site", "group", "train", "test", "classes"]
    assert lines[4] == ["site 3 (class 3)", "class 3", "20", "20", "only 3"]
    assert (tmp_path / "held.png").read_bytes().startswith(b"\x89PNG")
    assert "held.png" in err


@covering(
    strength=1,
    partition=("contrast", "instrument", "dirichlet", "shards", "quantity", "even"),
    nodes={"one": 1, "three": 3, "forty": 40},
)
@pytest.mark.quick_cases(1)
def test_data_show_draws_every_partition_at_any_size(cli, tmp_path, partition, nodes):
    own = {"contrast": "factors=[0.5]", "instrument": "odd=1", "shards": "per_node=1"}.get(partition, f"nodes={nodes}")
    code, out, err = cli(
        "show", "mnist", "--partition", partition, "--nodes", nodes, "--set", f"partition.{own}", "--json"
    )
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["nodes"] == nodes == len(answer["sites"])
    assert sum(answer["sites"][0]["classes"]) == answer["sites"][0]["train"]
    assert (tmp_path / f"mnist-{partition}.png").exists()


def test_data_show_takes_a_users_own_files_and_settings(cli, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((40, 3), np.float32), y=np.zeros(40), site=np.arange(40) % 4)
    code, out, _ = cli("show", "npz", "--set", "file=a.npz", "--set", "test_share=0.5", "--plot", "p.svg", "--json")
    assert code == 0
    assert [(site["name"], site["train"]) for site in json.loads(out)["sites"]] == [(f"{k}", 5) for k in range(4)]
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_data_show_takes_digits_which_need_no_files(cli):
    code, out, _ = cli("show", "digits", "--nodes", "5", "--json")
    assert code == 0
    assert [site["group"] for site in json.loads(out)["sites"]] == ["upright"] * 3 + ["mirrored"] * 2


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("show", "minst"), ["'minst'", "'mnist'"]),
        (("show", "mnist", "--partition", "shard"), ["partition", "'shard'", "'shards'"]),
        (("show", "mnist", "--nodes", "0"), ["nodes", ">= 1", "0"]),
        (("show", "mnist", "--set", "partition.seed"), ["key=value"]),
        (("show", "mnist", "--plot", "no/such/folder.png"), ["no/such/folder.png"]),
        (("show", "mnist", "--data", "elsewhere"), ["MNIST", "elsewhere"]),
        (("fetch", "mnit"), ["'mnit'", "'mnist'"]),
        (("check", "x"), ["'x'"]),
    ],
)
def test_data_names_mistakes_in_one_line(cli, arguments, names):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert [name for name in names if name not in err] == []


def test_data_fetch_brings_the_official_files_and_tells_how_far_it_is(cli, tmp_path, monkeypatch):
    import gzip
    import hashlib

    from fairmesh.data.datasets import sources

    content = b"official" * 1000
    with served({"/one.gz": gzip.compress(content)}) as (base, _):
        file = sources.File("one", hashlib.md5(content).hexdigest(), len(content), f"{base}/one.gz")
        monkeypatch.setitem(sources.SOURCES, "one", sources.Source("one", "One", (file,), "free", "nowhere"))
        code, out, err = cli("fetch", "one", "--data", "data")
        assert (code, out) == (0, "")
        assert "one.gz" in err
        assert json.loads(cli("fetch", "one", "--data", "data", "--json")[1]) == {"fetched": {"one": "data/one"}}
        assert cli("check", "one")[0] == 0
    monkeypatch.setattr(download, "_TRIES", 1)
    code, _, err = cli("fetch", "one", "--data", "more")
    assert code == 2
    assert err.splitlines()[-1].startswith("error: ")
    assert "One" in err
