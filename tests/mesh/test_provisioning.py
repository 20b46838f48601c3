"""`fairmesh mesh` from the founder's first command to a site that is ready, and what each step refuses."""

import json
import socket
import ssl
import stat
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import fairmesh as fm
from fairmesh.errors import BadInput
from fairmesh.mesh.agreement import (
    agreed,
    differences,
    digest_of,
    own_site,
    refuse_undeployable,
)
from fairmesh.mesh.certificates import make_authority, make_key, sign
from fairmesh.mesh.founding import copied
from fairmesh.mesh.members import Mesh, SiteFile

TRIAL = """
rounds = 30            # kept as it is written
[data]
name = "digits"
nodes = 3
odd = 1
[topology]
name = "ring"
[algorithm]
name = "ad-gda"
consensus_step = 0.5
compressor = { name = "quantize", bits = 4 }
"""

OWN = """
import torch
import fairmesh as fm

def site():
    return fm.Site((torch.zeros(8, 8, 8), torch.arange(8) % 2), test=(torch.zeros(2, 8, 8), torch.zeros(2).long()))

def sites():
    return [site()]

def broken():
    raise KeyError("no such patient")

def half(outputs, targets):
    return 0.5
"""


@pytest.fixture
def cli(monkeypatch, called, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trial.toml").write_text(TRIAL)
    return partial(called, "mesh")


def free_ports(count: int) -> list[int]:
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in opened]
    for one in opened:
        one.close()
    return ports


@pytest.fixture
def sites(cli, tmp_path):
    """The folders of a mesh whose sites are all signed: alpha and beta can be dialled, gamma dials both."""
    first, second = free_ports(2)
    founded(cli, f"alpha=127.0.0.1:{first}", f"beta=127.0.0.1:{second}", "gamma")
    for name in ("alpha", "beta", "gamma"):
        assert cli("key", "mesh/mesh.toml", name)[0] == 0
        assert cli("sign", f"{name}/{name}.csr")[0] == 0
    return tmp_path


def founded(cli, *names: str, experiment: str = "trial.toml", options: tuple[str, ...] = ()):
    return cli("init", experiment, *(part for name in names for part in ("--site", name)), *options)


def verdicts(cli, site: str) -> tuple[int, dict[str, dict]]:
    code, out, _ = cli("check", f"{site}/site.toml", "--json")
    answer = json.loads(out)
    assert answer["ready"] == (code == 0)
    return code, {check["what"]: check for check in answer["checks"]}


def wrong(found: dict[str, dict]) -> set[str]:
    return {what for what, check in found.items() if not check["ok"]}


def test_init_writes_the_mesh_and_says_who_dials_whom(cli, tmp_path):
    code, out, err = founded(cli, "alpha=127.0.0.1:7701", "beta=beta.example:7702", "gamma")
    assert code == 0
    assert out.splitlines() == [
        "site\tdials\tat",
        "alpha\tbeta\tbeta.example:7702",
        "gamma\talpha\t127.0.0.1:7701",
        "gamma\tbeta\tbeta.example:7702",
    ]
    assert "keep authority.key here" in err
    assert {path.name for path in (tmp_path / "mesh").iterdir()} == {
        "mesh.toml", "experiment.toml", "authority.pem", "authority.key",
    }  # fmt: skip
    assert (tmp_path / "mesh" / "experiment.toml").read_text() == TRIAL
    made = Mesh.read(tmp_path / "mesh" / "mesh.toml")
    assert (made.name, made.generation, made.names) == ("trial", 1, ("alpha", "beta", "gamma"))
    assert made.experiment == digest_of(agreed(fm.load_experiment("trial.toml")))
    assert stat.S_IMODE((tmp_path / "mesh" / "authority.key").stat().st_mode) == 0o600


def test_commands_print_json(cli):
    code, out, err = founded(cli, "alpha=a.example:1", "beta", options=("--json", "--name", "pair"))
    facts = json.loads(out)
    assert (code, err, facts["mesh"]) == (0, "", "pair")
    assert facts["edges"] == [{"dials": "beta", "answers": "alpha"}]
    code, out, err = cli("key", "mesh/mesh.toml", "beta", "--json")
    made = json.loads(out)
    assert (code, err, made["listen"], made["authority"]) == (0, "", None, facts["authority"])
    code, out, err = cli("sign", made["request"], "--json")
    assert (code, err, json.loads(out)["fingerprint"]) == (0, "", made["fingerprint"])


def test_graph_is_the_experiments(cli, tmp_path):
    (tmp_path / "trial.toml").write_text(TRIAL.replace('"ring"', '"star"'))
    founded(cli, "a=h:1", "b", "c", "d")
    made = Mesh.read(tmp_path / "mesh" / "mesh.toml")
    assert [len(member.neighbours) for member in made.members] == [3, 1, 1, 1]


def test_schedule_of_graphs_needs_all_its_edges(cli, tmp_path):
    schedule = "[topology]\nname = 'changing'\ntopologies = [{ name = 'edges', edges = [[0, 1]] }, { name = 'star' }]"
    (tmp_path / "trial.toml").write_text(TRIAL.replace('[topology]\nname = "ring"', schedule))
    assert founded(cli, "a=h:1", "b", "c")[0] == 0
    assert Mesh.read(tmp_path / "mesh" / "mesh.toml").edges == (("b", "a"), ("c", "a"))


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("alpha=h:1",), "at least two sites"),
        (("alpha=h:1", "alpha=h:2"), "there is a site alpha already"),
        (("alpha=", "beta=h:1"), "write name=host:port"),
        (("alpha=h", "beta=h:1"), "'h' is not host:port"),
        (("alpha=h:1", "beta", "gamma"), "beta and gamma are neighbours, but neither has an address"),
        (("Alpha=h:1", "beta"), "site 'Alpha': use 1 to 63"),
    ],
)
def test_sites_that_make_no_mesh_are_refused_and_nothing_is_written(cli, tmp_path, names, reason):
    code, _, err = founded(cli, *names)
    assert code == 2
    assert reason in err
    assert not (tmp_path / "mesh").exists()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            '"ad-gda"\nconsensus_step = 0.5\ncompressor = { name = "quantize", bits = 4 }',
            '"drfa"',
            "drfa needs a server",
        ),
        ('"ad-gda"\nconsensus_step = 0.5\ncompressor = { name = "quantize", bits = 4 }', '"afl"', "use ad-gda"),
        ("rounds = 30", "rounds = 30\nseeds = [0, 1]", "a deployment is one run, but seeds = [0, 1]"),
        (
            "[data]",
            "[sweep]\nconsensus_step = [0.1, 0.2]\n[data]",
            "one run, but the experiment sweeps over consensus_step",
        ),
        ("rounds = 30", "rounds = 30\nplacements = 2", "remove placements"),
        ("rounds = 30", "rounds = 30\nprior = [0.5, 0.5]", "prior has 2 entries for 3 sites"),
        ('"ring"', '"hypercube"', "a hypercube needs a power of two"),
    ],
)
def test_experiments_that_need_a_server_or_several_runs_are_refused(cli, tmp_path, old, new, reason):
    assert old in TRIAL
    (tmp_path / "trial.toml").write_text(TRIAL.replace(old, new))
    code, _, err = founded(cli, "alpha=h:1", "beta=h:2", "gamma")
    assert code == 2
    assert reason in err
    assert not (tmp_path / "mesh").exists()


def test_algorithms_without_a_server_may_be_deployed():
    from tests.toys import ALGORITHMS

    trial = fm.Experiment(fm.data.Digits(), fm.Ring(), fm.DSGD(), rounds=3)
    for algorithm in ALGORITHMS.values():
        if algorithm.needs_server:
            with pytest.raises(BadInput, match="needs a server"):
                refuse_undeployable(replace(trial, algorithm=algorithm))
        else:
            refuse_undeployable(replace(trial, algorithm=algorithm))


def test_second_mesh_does_not_take_the_firsts_place(cli, tmp_path):
    founded(cli, "alpha=h:1", "beta")
    before = {path: path.read_bytes() for path in (tmp_path / "mesh").iterdir()}
    code, _, err = founded(cli, "alpha=h:1", "beta")
    assert code == 2
    assert "exists already" in err
    assert {path: path.read_bytes() for path in (tmp_path / "mesh").iterdir()} == before


def test_private_keys_are_in_no_other_file(sites):
    secrets = {path: b"".join(path.read_bytes().splitlines()[1:-1]) for path in sites.rglob("*.key")}
    assert len(secrets) == 4
    for path in sites.rglob("*"):
        if path.is_file() and path.suffix != ".key":
            content = path.read_bytes()
            assert b"PRIVATE" not in content
            assert not any(secret[60:100] in content.replace(b"\n", b"") for secret in secrets.values()), path
    assert len(set(secrets.values())) == 4
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secrets)


def test_sites_folder_is_complete_and_may_be_moved(sites, cli):
    assert {path.name for path in (sites / "alpha").iterdir()} == {
        "alpha.key", "alpha.csr", "alpha.pem", "site.toml", "mesh.toml", "experiment.toml", "authority.pem",
    }  # fmt: skip
    (sites / "alpha").rename(sites / "elsewhere")
    _, found = verdicts(cli, "elsewhere")
    assert wrong(found) == {"neighbour beta"}  # whose node does not run


def test_site_listens_on_its_port_or_not_at_all(sites):
    port = Mesh.read(sites / "mesh" / "mesh.toml").members[0].address.rpartition(":")[2]
    assert SiteFile.read(sites / "alpha" / "site.toml").listen == f"0.0.0.0:{port}"
    assert SiteFile.read(sites / "gamma" / "site.toml").listen is None


def test_key_for_a_stranger_or_made_twice_is_refused(sites, cli):
    code, _, err = cli("key", "mesh/mesh.toml", "alfa")
    assert code == 2
    assert "has no site 'alfa'; did you mean 'alpha'?" in err
    before = (sites / "alpha" / "alpha.key").read_bytes()
    code, _, err = cli("key", "mesh/mesh.toml", "alpha")
    assert code == 2
    assert "exists already" in err
    (sites / "alpha" / "site.toml").unlink()
    code, _, err = cli("key", "mesh/mesh.toml", "alpha")
    assert code == 2
    assert "alpha.key exists already" in err
    assert (sites / "alpha" / "alpha.key").read_bytes() == before


def test_key_is_not_made_for_another_experiment(cli, tmp_path):
    founded(cli, "alpha=h:1", "beta")
    (tmp_path / "mesh" / "experiment.toml").write_text(TRIAL.replace("consensus_step = 0.5", "consensus_step = 0.4"))
    code, _, err = cli("key", "mesh/mesh.toml", "alpha")
    assert code == 2
    assert "mesh/experiment.toml is not the mesh's experiment" in err
    assert not (tmp_path / "alpha").exists()


def test_sign_refuses_another_fingerprint_than_the_one_read_out(sites, cli):
    code, out, _ = cli("sign", "alpha/alpha.csr")
    shown = out.strip().split("\t")[1]
    assert cli("sign", "alpha/alpha.csr", "--fingerprint", shown.upper())[0] == 0
    code, _, err = cli("sign", "beta/beta.csr", "--fingerprint", shown, "--out", "never.pem")
    assert code == 2
    assert f"not {shown}" in err
    assert not Path("never.pem").exists()


def test_ready_site_passes_every_check_but_those_of_neighbours_that_do_not_run(sites, cli):
    code, found = verdicts(cli, "gamma")
    assert wrong(found) == {"neighbour alpha", "neighbour beta"}
    assert code == 1
    assert {"site file", "mesh file", "experiment file", "experiment", "clock", "certificate", "listening", "data",
            "neighbour alpha", "neighbour beta"} == set(found)  # fmt: skip
    assert "connection refused: nobody listens there" in found["neighbour beta"]["found"]
    _, out, err = cli("check", "gamma/site.toml")
    assert out.splitlines()[0] == "check\t\tfound\twhat to do"
    assert "2 of 10 checks failed" in err


@pytest.mark.parametrize(
    ("break_", "what", "reason"),
    [
        (lambda home: (home / "alpha.pem").unlink(), "certificate", "No such file"),
        (lambda home: (home / "alpha.key").chmod(0o644), "certificate", "can be read by others (mode 0644)"),
        (lambda home: _signed(home, "alpha", "trial", -1), "certificate", "expired on"),
        (lambda home: _signed(home, "beta", "trial", 9), "certificate", "is for 'beta', not for site 'alpha'"),
        (lambda home: _foreign(home), "certificate", "signed by another authority"),
        (lambda home: (home / "alpha.pem").write_bytes(b"?"), "certificate", "is damaged"),
        (lambda home: _edit(home / "experiment.toml", "30", "31"), "experiment", "but the mesh agreed on"),
        (lambda home: _edit(home / "experiment.toml", "rounds", "round"), "experiment file", "did you mean 'rounds'?"),
        (lambda home: _edit(home / "mesh.toml", '"alpha"', '"aleph"'), "mesh file", "has no site 'alpha'"),
        (lambda home: _edit(home / "site.toml", "listen", "lissen"), "site file", "did you mean 'listen'?"),
        (lambda home: _drop_line(home / "site.toml", "listen"), "listening", "gamma dial 127.0.0.1:"),
        (lambda home: _edit(home / "experiment.toml", "nodes = 3", "nodes = 4"), "data", "data has 4 sites"),
    ],
)  # fmt: skip
def test_check_says_what_is_wrong_and_exits_with_one(sites, cli, break_, what, reason):
    break_(sites / "alpha")
    code, found = verdicts(cli, "alpha")
    assert code == 1
    assert what in wrong(found)
    assert reason in found[what]["found"]
    assert found[what]["advice"]
    assert wrong(found) <= {what, "neighbour beta"}


def _signed(home: Path, name: str, mesh_name: str, days: float) -> None:
    """A certificate for this key, or for another site's, of the true authority."""
    mesh = Mesh.read(home / "mesh.toml")
    request = home.parent / name / f"{name}.csr"
    (home / "alpha.pem").write_bytes(sign(request.read_bytes(), home.parent / "mesh", mesh, days))


def _foreign(home: Path) -> None:
    other = home.parent / "other"
    other.mkdir()
    make_authority(other, "trial", 30)
    (home / "alpha.pem").write_bytes(sign((home / "alpha.csr").read_bytes(), other, Mesh.read(home / "mesh.toml"), 30))


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _drop_line(path: Path, start: str) -> None:
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith(start)))


@pytest.mark.parametrize("holder", [None, "beta", "alpha"])
def test_port_may_be_held_by_the_sites_own_node_and_by_nobody_else(sites, cli, holder):
    port = int(SiteFile.read(sites / "alpha" / "site.toml").listen.rpartition(":")[2])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if holder:
        context.load_cert_chain(sites / holder / f"{holder}.pem", sites / holder / f"{holder}.key")

    def answer() -> None:
        with server.accept()[0] as plain:
            if holder:
                with context.wrap_socket(plain, server_side=True) as secured:
                    secured.recv(1)

    with socket.create_server(("0.0.0.0", port)) as server:
        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        _, found = verdicts(cli, "alpha")
        answering.join(10)
    said = "this site's node listens on" if holder == "alpha" else "Address already in use"
    assert said in found["listening"]["found"]
    assert found["listening"]["ok"] == (holder == "alpha")


def _site_with(sites: Path, data: str) -> tuple[SiteFile, fm.Experiment, Mesh]:
    path = sites / "beta" / "site.toml"
    (sites / "beta" / "own.py").write_text(OWN)
    path.write_text(path.read_text() + data)
    site_file = SiteFile.read(path)
    return site_file, fm.load_experiment(site_file.experiment), Mesh.read(site_file.mesh)


def test_site_without_data_of_its_own_takes_the_experiments_at_its_position(sites):
    parts = _site_with(sites, "")
    taken, expected = own_site(*parts), parts[1].data.sites()[1]
    assert taken.name == "beta"
    assert taken.train[0].equal(expected.train[0])


def test_sites_own_data_may_be_a_function_in_a_file_beside_it(sites, monkeypatch, tmp_path_factory):
    parts = _site_with(sites, 'data = "own.py:site"')
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    taken = own_site(*parts)
    assert (taken.name, len(taken.train[0])) == ("beta", 8)


def test_sites_own_data_may_be_a_table_with_files_beside_it(sites, monkeypatch, tmp_path_factory):
    pictures = np.zeros((20, 8, 8), np.float32)
    np.savez(sites / "beta" / "rows.npz", x=pictures, y=np.arange(20) % 10)
    table = '[data]\nname = "npz"\nfile = "rows.npz"\npartition = { name = "even", nodes = 1 }\n'
    parts = _site_with(sites, table)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert len(own_site(*parts).train[0]) == 16


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ('data = "own.py:sites"', "must return one fairmesh.Site, got list"),
        ('data = "own.py:sight"', "did you mean 'site'?"),
        ('data = "none.py:site"', "no such Python file"),
        ('data = "own.py:broken"', "KeyError: 'no such patient'"),
        ('[data]\nname = "digits"\n', "gives 10 sites, but a site has only its own data"),
        ('[data]\nname = "digit"\n', "did you mean 'digits'?"),
        ('[data]\nname = "npz"\nfile = "rows.npz"\n', "beta/rows.npz"),
    ],
)
def test_data_that_are_not_one_sites_are_reported(sites, cli, data, reason):
    _site_with(sites, data)
    code, found = verdicts(cli, "beta")
    assert code == 1
    assert reason in found["data"]["found"]


def _with_own_metric(folder: Path, at: str = "") -> Path:
    (folder / at).mkdir(parents=True, exist_ok=True)
    (folder / at / "own.py").write_text(OWN)
    path = folder / "trial.toml"
    path.write_text(TRIAL + f'[metrics]\nhalf = "{Path(at) / "own.py"}:half"\n')
    return path


def test_agreed_fields_do_not_depend_on_where_files_lie_but_on_what_they_hold(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = _with_own_metric(tmp_path / "one"), _with_own_metric(tmp_path / "two", "code")
    first, second = (agreed(fm.load_experiment(path)) for path in (one, two))
    assert first == second
    assert differences(first, second) == []
    (tmp_path / "two" / "code" / "own.py").write_text(OWN.replace("0.5", "0.25"))
    [said] = differences(first, agreed(fm.load_experiment(two)))
    assert said.startswith('metrics.half: "own.py:half sha256 ')


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"rounds": 31}, "rounds: 30 here, 31 there"),
        ({"seeds": (1,)}, "seeds: [0] here, [1] there"),
        ({"clip_norm": 1.0}, "clip_norm: nothing here, 1.0 there"),
        ({"topology": fm.topologies.Star()}, 'topology.name: "ring" here, "star" there'),
        ({"options": fm.Options(dtype="float64")}, 'options.dtype: "float32" here, "float64" there'),
        ({"options": fm.Options(measure_every=7)}, "options.measure_every: 50 here, 7 there"),
        ({"sampling": fm.Sampling(batch=5)}, "sampling.batch: 50 here, 5 there"),
        ({"prior": (0.2, 0.3, 0.5)}, "prior: nothing here, [0.2, 0.3, 0.5] there"),
    ],
)
def test_field_in_which_two_sites_differ_is_named(cli, changed, field):
    here = fm.load_experiment("trial.toml")
    there = replace(here, **changed)
    assert differences(agreed(here), agreed(there)) == [field]
    assert digest_of(agreed(here)) != digest_of(agreed(there))


def test_sites_data_device_and_memory_are_its_own_affair(cli):
    here = fm.load_experiment("trial.toml")
    own = fm.Options(device="cuda", memory_gib=3.0, data_on="host", checkpoint_every=5)
    assert digest_of(agreed(replace(here, data=fm.data.MNIST(), options=own))) == digest_of(agreed(here))


def test_python_files_that_an_experiment_names_go_with_it(cli, tmp_path):
    _with_own_metric(tmp_path, "code")
    assert founded(cli, "alpha=h:1", "beta")[0] == 0
    assert cli("key", "mesh/mesh.toml", "alpha")[0] == 0
    assert (tmp_path / "alpha" / "own.py").read_text() == OWN
    assert '"own.py:half"' in (tmp_path / "alpha" / "experiment.toml").read_text()
    mesh = Mesh.read(tmp_path / "alpha" / "mesh.toml")
    assert digest_of(agreed(fm.load_experiment(tmp_path / "alpha" / "experiment.toml"))) == mesh.experiment


def test_python_files_of_one_name_are_refused(tmp_path):
    path = _with_own_metric(tmp_path, "code")
    (tmp_path / "own.py").write_text(OWN)
    path.write_text(path.read_text() + 'other = "own.py:half"\n')
    (tmp_path / "out").mkdir()
    with pytest.raises(BadInput, match="two Python files with the same name"):
        copied(path, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_request_for_a_site_outside_the_mesh_is_refused(sites, cli):
    make_key(sites, "delta")
    code, _, err = cli("sign", "delta.csr")
    assert code == 2
    assert "for site 'delta', which is not in the mesh trial: alpha, beta, gamma" in err
    assert not (sites / "delta.pem").exists()
