"""`fairmesh mesh` from the founder's first command to a site that is ready, and what each step refuses."""

import json
import shutil
import socket
import ssl
import stat
import threading
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import fairmesh as fm
from fairmesh.config.registry import registered_name
from fairmesh.mesh.enrol.agreement import agreed, own_site, refuse_undeployable
from fairmesh.mesh.enrol.certificates import fingerprint, make_authority, make_key, sign, valid_until
from fairmesh.mesh.enrol.manifest import collected
from fairmesh.mesh.enrol.roster import Mesh, SiteFile
from fairmesh.mesh.wire.frames import Refused
from fairmesh.mesh.wire.greeting import differences, greeting, refuse_unlike
from tests import toys
from tests.mesh import fleet
from tests.mesh.reasons import NOBODY_LISTENS
from tests.refusals import missing_from, refused, refused_command

STEP = 'primal_step = { name = "linear", start = 6.0 }'
ALGORITHM = f'"ad-gda"\n{STEP}\nconsensus_step = 0.5\ncompressor = {{ name = "quantize", bits = 2 }}'
TRIAL = f"""
rounds = 30            # kept as it is written
[data]
name = "digits"
nodes = 3
odd = 1
[topology]
name = "ring"
[algorithm]
name = {ALGORITHM}
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


@pytest.fixture
def sites(cli, tmp_path):
    """The folders of a mesh whose sites are all signed: alpha and beta can be dialled, gamma dials both."""
    first, second = fleet.free_ports(2)
    founded(cli, f"alpha=127.0.0.1:{first}", f"beta=127.0.0.1:{second}", "gamma")
    for name in ("alpha", "beta", "gamma"):
        assert cli("key", "mesh/mesh.toml", name, "--trial")[0] == 0
        assert cli("sign", f"{name}/{name}.csr")[0] == 0
        assert cli("show", f"{name}/site.toml", "--approve")[0] == 0
    return tmp_path


def founded(cli, *names: str, experiment: str = "trial.toml", options: tuple[str, ...] = ()):
    return cli("init", experiment, *(part for name in names for part in ("--site", name)), *options)


def port_of(sites: Path) -> int:
    """The port that alpha listens on."""
    return int(SiteFile.read(sites / "alpha" / "site.toml").listen.rpartition(":")[2])


def secured(sites: Path, name: str):
    """Answers a connection as a site would, for `_serving`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sites / name / f"{name}.pem", sites / name / f"{name}.key")

    def answer(plain: socket.socket) -> None:
        with context.wrap_socket(plain, server_side=True) as ours:
            ours.recv(1)

    return answer


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
    assert "authority.key" in err
    assert {path.name for path in (tmp_path / "mesh").iterdir()} == {
        "mesh.toml", "experiment.toml", "manifest.json", "authority.pem", "authority.key",
    }  # fmt: skip
    assert (tmp_path / "mesh" / "experiment.toml").read_text() == TRIAL
    made = Mesh.read(tmp_path / "mesh" / "mesh.toml")
    assert (made.name, made.generation, made.names) == ("trial", 1, ("alpha", "beta", "gamma"))
    assert stat.S_IMODE((tmp_path / "mesh" / "authority.key").stat().st_mode) == 0o600


def test_commands_print_json(cli):
    code, out, err = founded(cli, "alpha=a.example:1", "beta", options=("--json",))
    facts = json.loads(out)
    assert (code, err, facts["mesh"]) == (0, "", "trial")
    assert facts["edges"] == [{"dials": "beta", "answers": "alpha"}]
    code, out, err = cli("key", "mesh/mesh.toml", "beta", "--json")
    made = json.loads(out)
    assert (code, err, made["listen"], made["authority"]) == (0, "", None, facts["authority"])
    code, out, err = cli("sign", made["request"], "--json")
    assert (code, err, json.loads(out)["fingerprint"]) == (0, "", made["fingerprint"])


@pytest.mark.parametrize(
    "topology",
    [
        "name = 'star'",
        "name = 'changing'\ntopologies = [{ name = 'edges', edges = [[0, 1]] }, { name = 'edges', edges = [[0, 2]] }]",
    ],
)
@pytest.mark.quick_cases(2)
def test_graph_is_the_experiments_with_the_edges_of_all_rounds(cli, tmp_path, topology):
    (tmp_path / "trial.toml").write_text(TRIAL.replace('name = "ring"', topology))
    assert founded(cli, "a=h:1", "b", "c")[0] == 0
    assert Mesh.read(tmp_path / "mesh" / "mesh.toml").edges == (("b", "a"), ("c", "a"))


def test_without_a_topology_the_graph_is_the_default_for_the_number_of_sites_and_is_named(cli, tmp_path):
    (tmp_path / "trial.toml").write_text(TRIAL.replace('name = "ring"', "").replace("[topology]", ""))
    code, _, err = founded(cli, *(f"s{k}=h:{7700 + k}" for k in range(16)))
    made = Mesh.read(tmp_path / "mesh" / "mesh.toml")
    assert (code, len(made.members[0].neighbours) > 2) == (0, True)
    assert missing_from(err, "no topology", "circulant", "16 sites", f"{len(made.members[0].neighbours)} neigh") == []


SITES = ("alpha=h:1", "beta=h:2", "gamma")


@pytest.mark.parametrize(
    ("names", "old", "new", "told"),
    [
        *(
            (names, "", "", told)
            for names, told in (
                (("alpha=h:1",), ["sites", 1, "--site"]),
                (("alpha=h:1", "alpha=h:2"), ["alpha"]),
                (("alpha=", "beta=h:1"), ["alpha", "name=host:port"]),
                (("alpha=h", "beta=h:1"), ["'h'", "host:port"]),
                (("alpha=h:1", "beta", "gamma"), ["beta", "gamma", "address"]),
                (("Alpha=h:1", "beta"), ["'Alpha'", 63]),
            )
        ),
        (SITES, ALGORITHM, '"drfa"', ["drfa", "server"]),
        (SITES, ALGORITHM, '"afl"', ["afl", "server", "ad-gda"]),
        (SITES, "rounds = 30", "rounds = 30\nseeds = [0, 1]", ["seeds"]),
        (SITES, "[data]", "[sweep]\nconsensus_step = [0.1, 0.2]\n[data]", ["sweep"]),
        (SITES, "rounds = 30", "rounds = 30\nplacements = 2", ["placements"]),
        (SITES, "rounds = 30", "rounds = 30\nprior = [0.5, 0.5]", ["prior", 2, "3 sites"]),
        (SITES, '"ring"', '"hypercube"', ["hypercube", 3]),
    ],
)
@pytest.mark.quick_cases(6)
def test_sites_and_experiments_that_make_no_mesh_are_refused_and_nothing_is_written(
    cli, tmp_path, names, old, new, told
):
    assert old in TRIAL
    (tmp_path / "trial.toml").write_text(TRIAL.replace(old, new, 1))
    refused_command(founded(cli, *names), *told)
    assert not (tmp_path / "mesh").exists()


CONTRACT = """
rounds = 30
topology = "ring"
MODEL
[[contract.columns]]
name = "age"
min = 18
max = 110
center = 54
scale = 17
[[contract.columns]]
name = "ward"
type = "category"
classes = ["north", "south"]
[contract.target]
name = "ill"
type = "label"
classes = ["no", "yes", "maybe"]
"""


@pytest.mark.parametrize(
    ("inputs", "outputs", "loss", "names"),
    [
        (5, 3, "cross-entropy", ["(4,)", "5"]),
        (4, 2, "cross-entropy", ["3 classes", "the model has 2 classes"]),
        (4, 3, "squared-error", ["3 classes"]),
        (4, 3, "cross-entropy", None),
    ],
)
@pytest.mark.quick_cases(4)
def test_model_that_does_not_fit_its_own_contract_is_refused_and_nothing_is_written(
    cli, tmp_path, inputs, outputs, loss, names
):
    model = f'loss = "{loss}"\nmodel = {{ name = "import", path = "mine.py:net" }}'
    (tmp_path / "risk.toml").write_text(CONTRACT.replace("MODEL", model))
    (tmp_path / "mine.py").write_text(f"from torch import nn\ndef net():\n    return nn.Linear({inputs}, {outputs})\n")
    code, _, err = founded(cli, "a=a:7700", "b=b:7700", experiment="risk.toml")
    assert (code, missing_from(err, *(["[contract]", "[model]", *names] if names else []))) == (2 * bool(names), [])
    assert (tmp_path / "mesh").exists() != bool(names)


@pytest.mark.parametrize("algorithm", toys.ALGORITHMS.values(), ids=toys.ALGORITHMS)
def test_algorithms_without_a_server_may_be_deployed(algorithm):
    why = "data of all sites in one place" if algorithm.needs_server and not algorithm.sends else "server"
    allowed = algorithm.sends and not algorithm.needs_server
    reasons = [registered_name(algorithm), why if algorithm.needs_server else "deploy"]
    with nullcontext() if allowed else refused(*reasons):
        refuse_undeployable(fm.Experiment(fm.data.Digits(), fm.Ring(), algorithm, rounds=3))


def test_second_mesh_does_not_take_the_firsts_place(cli, tmp_path):
    founded(cli, "alpha=h:1", "beta")
    before = {path: path.read_bytes() for path in (tmp_path / "mesh").iterdir()}
    refused_command(founded(cli, "alpha=h:1", "beta"), "mesh", "exists")
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
        "alpha.key", "alpha.secret", "alpha.csr", "alpha.pem",
        "site.toml", "mesh.toml", "experiment.toml", "manifest.json", "approved.json",
        "authority.pem",
    }  # fmt: skip
    port = Mesh.read(sites / "mesh" / "mesh.toml").members[0].address.rpartition(":")[2]
    listening = [SiteFile.read(sites / name / "site.toml").listen for name in ("alpha", "gamma")]
    assert listening == [f"0.0.0.0:{port}", ""]
    (sites / "alpha").rename(sites / "elsewhere")
    _, found = verdicts(cli, "elsewhere")
    assert wrong(found) == {"neighbour beta"}  # whose node does not run


def test_key_for_a_stranger_or_made_twice_is_refused(sites, cli):
    refused_command(cli("key", "mesh/mesh.toml", "alfa"), "'alfa'", "'alpha'")
    before = (sites / "alpha" / "alpha.key").read_bytes()
    refused_command(cli("key", "mesh/mesh.toml", "alpha"), "alpha", "exists")
    (sites / "alpha" / "site.toml").unlink()
    refused_command(cli("key", "mesh/mesh.toml", "alpha"), "alpha.key", "exists")
    assert (sites / "alpha" / "alpha.key").read_bytes() == before
    make_key(sites, "delta")
    refused_command(cli("sign", "delta.csr"), "'delta'", "mesh trial", "alpha, beta, gamma")
    assert not (sites / "delta.pem").exists()


def test_sign_refuses_another_fingerprint_than_the_one_read_out(sites, cli):
    shown = cli("sign", "alpha/alpha.csr")[1].strip().split("\t")[1]
    assert cli("sign", "alpha/alpha.csr", "--fingerprint", shown.upper())[0] == 0
    before = (sites / "beta" / "beta.pem").read_bytes()
    for said in (shown, ""):  # as of a shell's variable that is not set
        refused_command(cli("sign", "beta/beta.csr", "--fingerprint", said), f"not {said}")
    assert (sites / "beta" / "beta.pem").read_bytes() == before


def test_ready_site_passes_every_check_but_those_of_neighbours_that_do_not_run(sites, cli):
    code, found = verdicts(cli, "gamma")
    others = {"neighbour alpha", "neighbour beta"}
    assert (code, wrong(found)) == (1, others)
    assert found.keys() - others == {"site file", "mesh file", "manifest", "messages", "approval", "experiment",
                                     "certificate", "data", "listening", "disk", "secret of the draws", "a round",
                                     "time of the run"}  # fmt: skip
    assert NOBODY_LISTENS in found["neighbour beta"]["found"]
    _, out, err = cli("check", "gamma/site.toml")
    assert len(out.splitlines()[0].split("\t")) == 4
    assert missing_from(err, 2, 15) == []


def _signed(home: Path, name: str, days: float, founder: str = "mesh") -> None:
    """Replaces alpha's certificate by one for alpha's key, or for another site's."""
    request = home.parent / name / f"{name}.csr"
    mesh = Mesh.read(home / "mesh.toml")
    (home / "alpha.pem").write_bytes(sign(request.read_bytes(), home.parent / founder, mesh, days))


def _foreign(home: Path) -> None:
    (home.parent / "other").mkdir()
    make_authority(home.parent / "other", "trial", 30)
    _signed(home, "alpha", 30, "other")


def _edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def _signed_again(home: Path, old: str, new: str) -> None:
    assert old in TRIAL
    fleet.amend(home.parent / "mesh", home, {"experiment.toml": TRIAL.replace(old, new)})


@pytest.mark.parametrize(
    ("break_", "what", "names"),
    [
        (lambda home: (home / "alpha.pem").unlink(), "certificate", ["alpha.pem"]),
        (lambda home: (home / "alpha.key").chmod(0o644), "certificate", ["alpha.key", "0644"]),
        (lambda home: (home / "alpha.secret").chmod(0o640), "secret of the draws", ["alpha.secret"]),
        (lambda home: _signed(home, "alpha", -1), "certificate", ["expired"]),
        (lambda home: _signed(home, "beta", 9), "certificate", ["'beta'", "'alpha'"]),
        (_foreign, "certificate", ["another authority"]),
        (lambda home: (home / "alpha.pem").write_bytes(b"?"), "certificate", ["PEM"]),
        (lambda home: _edit(home / "experiment.toml", "30", "31"), "manifest", ["alpha/experiment.toml", "SHA-256"]),
        (lambda home: _signed_again(home, "rounds", "round"), "experiment", ["round", "'rounds'"]),
        (lambda home: _edit(home / "mesh.toml", '"alpha"', '"aleph"'), "mesh file", ["'alpha'"]),
        (lambda home: _edit(home / "site.toml", "listen", "lissen"), "site file", ["lissen", "'listen'"]),
        (lambda home: _edit(home / "site.toml", "\nlisten", "\n#"), "listening", ["gamma", "127.0.0.1:"]),
        (lambda home: _signed_again(home, "nodes = 3", "nodes = 4"), "data", ["data", 4, 3]),
    ],
)  # fmt: skip
def test_check_says_what_is_wrong_and_exits_with_one(sites, cli, break_, what, names):
    break_(sites / "alpha")
    code, found = verdicts(cli, "alpha")
    assert code == 1
    assert what in wrong(found)
    assert missing_from(found[what]["found"], *names) == []
    assert found[what]["advice"]
    assert wrong(found) <= {what, "neighbour beta"}


@pytest.mark.parametrize("holder", [None, "beta", "alpha"])
def test_port_may_be_held_by_the_sites_own_node_and_by_nobody_else(sites, cli, holder):
    port = port_of(sites)
    with _serving(port, secured(sites, holder) if holder else lambda plain: None, "0.0.0.0"):
        _, found = verdicts(cli, "alpha")
    assert str(port) in found["listening"]["found"]
    assert found["listening"]["ok"] == (holder == "alpha")


def _serving(port: int, answer, host: str = "127.0.0.1") -> socket.socket:
    """A server that gives each connection to `answer`, in a thread, until it is closed."""
    server = socket.create_server((host, port))

    def serve() -> None:
        while True:
            try:
                plain = server.accept()[0]
            except OSError:
                return
            with plain, suppress(OSError):
                answer(plain)

    threading.Thread(target=serve, daemon=True).start()
    return server


@pytest.mark.parametrize("forwarded", [False, True])
def test_port_that_differs_from_the_address_must_lead_to_this_site(sites, cli, forwarded):
    dialled = port_of(sites)
    (port,) = fleet.free_ports(1)
    _edit(sites / "alpha" / "site.toml", str(dialled), str(port))

    def forward(plain: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", port)) as onward:
            onward.sendall(plain.recv(16))

    with _serving(dialled, forward) if forwarded else nullcontext():
        _, found = verdicts(cli, "alpha")
    assert found["listening"]["ok"] == forwarded
    if not forwarded:
        assert missing_from(found["listening"]["found"], port, f"127.0.0.1:{dialled}", "gamma") == []
        assert missing_from(found["listening"]["advice"], "listen", dialled) == []


def test_check_names_the_site_that_answers_in_the_place_of_a_neighbour(sites, cli):
    port = port_of(sites)
    with _serving(port, secured(sites, "beta")):
        _, found = verdicts(cli, "gamma")
    assert missing_from(found["neighbour alpha"]["found"], port, "beta answers", "not alpha") == []
    assert missing_from(found["neighbour alpha"]["advice"], "beta", "alpha", "mesh check") == []


def _site_with(sites: Path, data: str) -> tuple[SiteFile, fm.Experiment, Mesh]:
    path = sites / "beta" / "site.toml"
    (sites / "beta" / "own.py").write_text(OWN)
    path.write_text(path.read_text().replace('data = "experiment"\n', "") + data)
    site_file = SiteFile.read(path)
    return site_file, fm.load_experiment(site_file.experiment), Mesh.read(site_file.mesh)


def test_site_that_names_no_data_is_refused_also_beside_a_table_of_the_experiments_name(sites, cli, monkeypatch):
    parts = _site_with(sites, "")
    (sites / "rows.csv").write_text("a,b,site\n1,0,x\n2,1,x\n3,0,x\n")  # where the command runs
    beside = replace(parts[1], data=fm.data.Table("rows.csv", "b", "site"))
    for experiment in (parts[1], beside):
        with refused("beta/site.toml names no data", "patients.csv", "data = 'experiment'"):
            own_site(parts[0], experiment, parts[2])
    code, found = verdicts(cli, "beta")
    assert (code, missing_from(found["data"]["found"], "names no data")) == (1, [])


def test_experiments_table_is_found_next_to_the_site_file_only(sites):
    parts = _site_with(sites, 'data = "experiment"')
    (sites / "rows.csv").write_text("a,b,site\n" + "1,0,x\n2,1,y\n3,1,z\n" * 2)  # where the command runs
    table = fm.data.HeldOut(fm.data.Table("rows.csv", "b", "site"))
    experiment = replace(parts[1], data=table)
    with refused("cannot read", "beta/rows.csv"):
        own_site(parts[0], experiment, parts[2])


def test_check_reads_the_sites_data_once(sites, cli):
    _site_with(sites, 'data = "counted.py:site"')
    counted = "def site():\n    with open('reads', 'a') as file:\n        file.write('x')"
    (sites / "beta" / "counted.py").write_text(OWN.replace("def site():", counted))
    _, found = verdicts(cli, "beta")
    assert {"data", "disk"} <= found.keys() - wrong(found)
    assert (sites / "reads").read_text() == "x"


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ('data = "experiment"', None),
        ('data = "own.py:site"', 8),
        ('[data]\nname = "npz"\nfile = "rows.npz"\npartition = { name = "even", nodes = 1 }\n', 16),
    ],
    ids=["the experiment's at its position", "a function", "a table with a file beside it"],
)
def test_sites_own_data_is_the_one_that_its_file_names(sites, monkeypatch, tmp_path_factory, data, rows):
    np.savez(sites / "beta" / "rows.npz", x=np.zeros((20, 8, 8), np.float32), y=np.arange(20) % 10)
    parts = _site_with(sites, data)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    taken, shared = own_site(*parts), parts[1].data.sites()[1]
    assert (taken.name, len(taken.train[0])) == ("beta", rows or len(shared.train[0]))
    assert (rows is None) == taken.train[0].equal(shared.train[0])


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ('data = "own.py:sites"', ["own.py:sites", "Site", "list"]),
        ('data = "own.py:sight"', ["sight", "'site'"]),
        ('data = "none.py:site"', ["none.py"]),
        ('data = "own.py:broken"', ["KeyError", "no such patient"]),
        ('[data]\nname = "digits"\n', ["data", "10 sites"]),
        ('[data]\nname = "digit"\n', ["'digit'", "'digits'"]),
        ('[data]\nname = "npz"\nfile = "rows.npz"\n', ["beta/rows.npz"]),
    ],
)
def test_data_that_are_not_one_sites_are_reported(sites, cli, data, names):
    _site_with(sites, data)
    code, found = verdicts(cli, "beta")
    assert (code, missing_from(found["data"]["found"], *names)) == (1, [])


def _with_own_metric(folder: Path, at: str = "") -> Path:
    (folder / at).mkdir(parents=True, exist_ok=True)
    (folder / at / "own.py").write_text(OWN)
    path = folder / "trial.toml"
    path.write_text(TRIAL + f'[metrics]\nhalf = "{Path(at) / "own.py"}:half"\n')
    return path


def test_agreed_fields_do_not_depend_on_where_files_lie(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = _with_own_metric(tmp_path / "one"), _with_own_metric(tmp_path / "two", "code")
    first, second = (agreed(fm.load_experiment(path)) for path in (one, two))
    assert first == second
    assert differences(first, second) == []


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"rounds": 31}, ["rounds", "30 here", "31 there"]),
        ({"seeds": (1,)}, ["seeds", "the default here", "[1] there"]),
        ({"clip_norm": 1.0}, ["clip_norm", "1.0 there"]),
        ({"topology": fm.topologies.Star()}, ["topology", '"star"']),
        ({"options": fm.Options(dtype="float64")}, ["options.dtype", "the default here", '"float64" there']),
        ({"options": fm.Options(measure_every=7)}, ["options.measure_every", "the default here", "7 there"]),
        ({"sampling": fm.Sampling(batch=5)}, ["sampling.batch", "the default here", "5 there"]),
        ({"prior": (0.2, 0.3, 0.5)}, ["prior", "[0.2, 0.3, 0.5] there"]),
    ],
)
def test_field_in_which_two_sites_differ_is_named(cli, changed, names):
    here = fm.load_experiment("trial.toml")
    fields = agreed(here)
    assert fields["rounds"] == 30
    assert "options.dtype" not in fields  # defaults are not compared, so that a later version may have more fields
    [said] = differences(fields, agreed(replace(here, **changed)))
    assert missing_from(said, *names) == []


def test_sites_data_device_and_memory_are_its_own_affair(cli):
    here = fm.load_experiment("trial.toml")
    own = fm.Options(device="cuda", memory_gib=3.0, checkpoint_every=5)
    assert agreed(replace(here, data=fm.data.MNIST(), options=own)) == agreed(here)


def test_python_files_that_an_experiment_names_go_with_it(cli, tmp_path):
    _with_own_metric(tmp_path, "code")
    assert founded(cli, "alpha=h:1", "beta")[0] == 0
    assert cli("key", "mesh/mesh.toml", "alpha")[0] == 0
    assert (tmp_path / "alpha" / "own.py").read_text() == OWN
    assert '"own.py:half"' in (tmp_path / "alpha" / "experiment.toml").read_text()
    taken, meant = (fm.load_experiment(tmp_path / path) for path in ("alpha/experiment.toml", "trial.toml"))
    assert agreed(taken) == agreed(meant)


def test_python_files_of_one_name_are_refused(tmp_path):
    path = _with_own_metric(tmp_path, "code")
    (tmp_path / "own.py").write_text(OWN)
    path.write_text(path.read_text() + 'other = "own.py:half"\n')
    with refused(path, "Python"):
        collected(path)


def test_founder_keeps_a_ledger_and_signs_a_second_key_only_when_asked(sites, cli):
    assert cli("sign", "alpha/alpha.csr")[0] == 0  # renewed
    lines = [line.split("\t") for line in (sites / "mesh" / "ledger.tsv").read_text().splitlines()]
    assert lines[0] == ["signed", "site", "fingerprint", "serial", "valid until"]
    assert [line[1] for line in lines[1:]] == ["alpha", "beta", "gamma", "alpha"]
    first, *_, again = lines[1:]
    assert (again[2], again[3] != first[3]) == (first[2], True)
    (sites / "alpha" / "alpha.key").unlink()
    make_key(sites / "alpha", "alpha")
    before = (sites / "alpha" / "alpha.pem").read_bytes()
    refused_command(cli("sign", "alpha/alpha.csr"), "alpha", first[2], "--new-key", "mesh trust")
    assert (sites / "alpha" / "alpha.pem").read_bytes() == before
    assert cli("sign", "alpha/alpha.csr", "--new-key")[0] == 0
    assert cli("sign", "alpha/alpha.csr", "--new-key")[0] == 0
    assert len((sites / "mesh" / "ledger.tsv").read_text().splitlines()) == 7


def test_authority_outlives_a_run_and_is_renewed(sites, cli):
    before = (sites / "mesh" / "authority.pem").read_bytes()
    assert (valid_until(before) - datetime.now(UTC)).days > 3600
    code, out, _ = cli("authority", "mesh", "--days", "5000", "--json")
    told = json.loads(out)
    assert (code, told["authority"]) == (0, fingerprint(before))
    assert (valid_until((sites / "mesh" / "authority.pem").read_bytes()) - datetime.now(UTC)).days > 4900
    shutil.copy(sites / "mesh" / "authority.pem", sites / "beta" / "authority.pem")
    assert verdicts(cli, "beta")[1]["certificate"]["ok"]


def test_key_of_another_site_is_confirmed_by_its_fingerprint(sites, cli):
    code, out, _ = cli("trust", "alpha/site.toml", "beta", "ABCD 0123 abcd 0123 abcd 0123", "--json")
    assert (code, json.loads(out)) == (0, {"site": "beta", "fingerprint": "abcd 0123 abcd 0123 abcd 0123"})
    refused_command(cli("trust", "alpha/site.toml", "beta", "abcd"))
    refused_command(cli("trust", "alpha/site.toml", "omega", "abcd 0123 abcd 0123 abcd 0123"), "omega")


def test_neighbour_with_another_version_is_accepted_and_one_with_another_compatibility_is_refused(cli, mesh):
    experiment = fm.load_experiment("trial.toml")
    mine, theirs = (greeting(name, agreed(experiment), mesh, {}) for name in ("alpha", "beta"))
    refuse_unlike(mine, "beta", theirs | {"version": "99.1"})
    (number,) = [key for key in theirs["agreed"] if key.startswith("compatibility")]
    for other in (99, None, "x" * 1000):
        unlike = theirs | {"version": "99.1\x1b", "agreed": theirs["agreed"] | {number: other}}
        with refused("fairmesh 99.1 there", f"{fm.__version__} here", "install", error=Refused):
            refuse_unlike(mine, "beta", unlike)
