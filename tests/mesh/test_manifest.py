"""What a site executes: only files that the founder signed and the site approved, and nothing before it has compared
them. Every refusal here is tried with node, mesh check and mesh show, and imports nothing."""

import importlib
import json
import math
import py_compile
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from fairmesh.config.trusted import import_paths
from fairmesh.mesh.enrol.agreement import refuse_undeployable
from fairmesh.mesh.enrol.approval import not_allowed, refuse_not_allowed
from fairmesh.mesh.enrol.certificates import fingerprint, make_authority, renew_authority
from fairmesh.mesh.enrol.founding import founded, hand_out
from fairmesh.mesh.enrol.manifest import Handout, Manifest, collected, handed_out, loaded, seal
from fairmesh.mesh.enrol.roster import Mesh, SiteFile
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.preflight import checks
from tests.mesh import fleet
from tests.mesh.scenarios import Run
from tests.refusals import missing_from, refused, refused_command

NAMES = ["a", "b", "c"]
EXPERIMENT = """
rounds = 40
loss = "own.py:loss"
[data]
name = "digits"
nodes = 3
[metrics]
half = "own.py:half"
[algorithm]
name = "ad-gda"
primal_step = { name = "linear", start = 6.0 }
compressor = { name = "quantize", bits = 4 }
[options]
measure_every = 20
"""
FILES = {
    "own.py": """
import math
import torch.nn.functional as F
import helper
from parts import deep as below
from parts.deep import *

def loss(outputs, targets):
    from late import scaled  # an import inside a function is an import too
    return scaled(F.cross_entropy(outputs, targets), helper.ONE)

def half(outputs, targets):
    return below.HALF * everything
""",
    "helper.py": "ONE = 1.0\n",
    "late.py": "def scaled(value, by):\n    return value * by\n",
    "parts/__init__.py": "from . import deep\n",
    "parts/deep.py": "from .deeper.deepest import HALF\nfrom parts import deep\neverything = 1.0\n",
    "parts/deeper/deepest.py": "HALF = 0.5\n",  # in a package without __init__.py
}


def written(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "trial.toml"


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("founder")
    fleet.provisioned(folder / "mesh-and-sites", written(folder, FILES | {"trial.toml": EXPERIMENT}), NAMES)
    return folder / "mesh-and-sites"


@pytest.fixture
def home(provisioned, tmp_path) -> Path:
    """The folder of site a, next to the founder's, which is called mesh."""
    shutil.copytree(provisioned, tmp_path / "all")
    return tmp_path / "all" / "a"


def imported_from(home: Path) -> list[str]:
    folder = str(home.resolve())
    return [name for name in sys.modules if name.startswith(folder)]


def marking(marker: Path) -> str:
    """A line that shows that a file was executed."""
    return f"\nopen({str(marker)!r}, 'w').close()\n"


def appended(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def replaced(path: Path, *changes: tuple[str, str]) -> None:
    for old, new in changes:
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))


def refused_everywhere(home: Path, called: Callable, *names: object, at: str = "manifest") -> None:
    """A node, the check and, if it is the manifest that is wrong, mesh show name these words, and import nothing."""
    with refused(*names):
        Membership.read(home / "site.toml")
    found = {check.what: check for check in checks(home / "site.toml")}
    assert not found[at].ok
    assert missing_from(found[at].found, *names) == []
    assert "data" not in found  # the site's own code is not executed either
    code, out, err = called("mesh", "show", home / "site.toml")
    if at == "manifest":
        assert (code, out, missing_from(err, *names)) == (2, "", [])
    assert imported_from(home) == []


# What is signed


def test_manifest_has_every_file_whole_with_the_helpers_that_its_files_import(provisioned):
    table = json.loads((provisioned / "mesh" / "manifest.json").read_text())
    assert set(table["files"]) == {"experiment.toml", *FILES}
    assert all(len(digest) == 64 for digest in table["files"].values())
    assert [(member["name"], set(member["neighbours"])) for member in table["members"]] == [
        ("a", {"b", "c"}), ("b", {"a", "c"}), ("c", {"a", "b"}),
    ]  # fmt: skip
    assert "127.0.0.1" not in json.dumps(table)


def test_helpers_are_found_without_importing(tmp_path):
    marker = tmp_path / "executed"
    path = written(
        tmp_path, {name: text + marking(marker) for name, text in FILES.items()} | {"trial.toml": EXPERIMENT}
    )
    assert set(collected(path)) == {"experiment.toml", *FILES}
    assert not marker.exists()


def test_files_as_signed_and_approved_are_imported_and_import_each_other(home):
    experiment = Membership.read(home / "site.toml").experiment
    assert experiment.metrics["half"](None, None) == 0.5
    assert set(imported_from(home)) == {str(home.resolve() / name) for name in FILES if name != "late.py"}
    assert float(experiment.loss(torch.zeros(1, 2), torch.zeros(1).long())) == pytest.approx(math.log(2))  # type: ignore[operator]
    assert set(imported_from(home)) == {str(home.resolve() / name) for name in FILES}


def test_what_is_executed_is_what_was_compared_whatever_the_folder_contains_by_then(home, tmp_path):
    site = SiteFile.read(home / "site.toml")
    handout = handed_out(site, Mesh.read(site.mesh))
    for name in FILES:
        (home / name).write_text(marking(tmp_path / "executed"))
    experiment = loaded(handout.folder, handout.contents, {})
    assert experiment.metrics["half"](None, None) == 0.5
    assert not (tmp_path / "executed").exists()


def test_compiled_copies_in_the_folder_are_not_executed(home, tmp_path, monkeypatch):
    source, marker, before = home / "helper.py", tmp_path / "executed", (home / "helper.py").read_text()
    source.write_text(marking(marker) + before)
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    source.write_text(before)
    Membership.read(home / "site.toml")
    assert not marker.exists()
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    importlib.import_module("helper")  # as Python imports it
    monkeypatch.delitem(sys.modules, "helper")
    assert marker.exists()


def test_address_may_change_and_site_file_is_the_sites_own(home):
    mesh = Mesh.read(home / "mesh.toml")
    replaced(home / "mesh.toml", (mesh.member("b").address or "?", "b.example:7000"))
    appended(home / "site.toml", '[options]\ndevice = "cpu"\ncheckpoint_every = 7\n')
    membership = Membership.read(home / "site.toml")
    assert membership.mesh.member("b").address == "b.example:7000"
    assert membership.experiment.options.checkpoint_every == 7


def test_renewed_authority_keeps_its_key_so_manifest_and_approval_stay(home):
    renew_authority(home.parent / "mesh", 60)
    before = (home / "authority.pem").read_bytes()
    (home / "authority.pem").write_bytes((home.parent / "mesh" / "authority.pem").read_bytes())
    assert (home / "authority.pem").read_bytes() != before
    Membership.read(home / "site.toml")


def test_site_sets_no_option_that_all_must_share(home):
    appended(home / "site.toml", '[options]\ndtype = "float64"\n')
    with refused("options.dtype", "device"):
        SiteFile.read(home / "site.toml")


# What is refused before anything is imported


def _of_another_authority(manifest: Path, marker: Path) -> None:
    other = shutil.copytree(manifest.parents[1] / "mesh", manifest.parents[1] / "other")
    for name in ("authority.pem", "authority.key"):
        (other / name).unlink()
    make_authority(other, "test-mesh", 30)
    seal(other, Mesh.read(other / "mesh.toml"), ["experiment.toml", *FILES])
    shutil.copy(other / "manifest.json", manifest)


def _named_as_an_allowed_module(path: Path, marker: Path) -> None:
    home = path.parents[1]
    text = EXPERIMENT.replace('"own.py:loss"', '"allowed.losses:loss"')
    fleet.amend(home.parent / "mesh", home, {"experiment.toml": text})
    appended(home / "site.toml", 'allow = ["allowed"]\n')
    written(home, {"allowed/losses.py": marking(marker)})


def _changed(change: Callable[[dict], object]) -> Callable[[Path, Path], object]:
    def spoil(path: Path, marker: Path) -> None:
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))

    return spoil


SIGNED = "signed by the authority"
MANIFESTS = [
    *(
        (_changed(change), SIGNED)
        for change in (
            lambda table: table["files"].update({"helper.py": "0" * 64}),
            lambda table: table.update(signed=table["signed"] + 1),
            lambda table: table.update(signature="00" + table["signature"][2:]),
            lambda table: table["members"].reverse(),
            lambda table: table.pop("signature"),
        )
    ),
    (_of_another_authority, SIGNED, "fingerprint"),
    *(
        (lambda path, marker, text=text: path.write_text(text), *names)
        for text, *names in [
            *((text, "not a manifest") for text in ("[]", "{", '{"signature": "not it"}', '{"signature": 3}')),
            ('{"mesh": "test-mesh"}', "authority", "missing"),
            (" " * (1 << 20) + "{}", 1 << 20),
        ]
    ),
]
ANOTHER_MESH = [('name = "test-mesh"', 'name = "other-mesh"')]
ONE_LESS = [("removed = []", 'removed = ["c"]'), ("generation = 1", "generation = 2")]


@pytest.mark.parametrize(
    ("file", "spoil", "names"),
    [
        *((name, lambda path, marker: appended(path, marking(marker)), ["SHA-256"]) for name in FILES),
        ("experiment.toml", lambda path, marker: appended(path, "\n# one more line"), ["SHA-256"]),
        *(
            (name, lambda path, marker: path.unlink(), [])
            for name in ("helper.py", "parts/deep.py", "experiment.toml", "manifest.json")
        ),
        *(
            (name, lambda path, marker: written(path.parent, {path.name: marking(marker)}), [f"imports {instead}"])
            for name, instead in (("math.py", "math"), ("helper/__init__.py", "helper"), ("torch.py", "torch"))
        ),
        ("allowed/losses.py", _named_as_an_allowed_module, ["experiment.toml"]),
        *(("manifest.json", spoil, names) for spoil, *names in MANIFESTS),
        ("mesh.toml", lambda path, marker: replaced(path, *ANOTHER_MESH), ["other-mesh", "test-mesh"]),
        ("mesh.toml", lambda path, marker: replaced(path, *ONE_LESS), ["c", "left"]),
    ],
)
@pytest.mark.quick_cases(15)
def test_file_that_is_not_as_it_was_signed_is_refused_by_name_and_nothing_is_executed(
    home, tmp_path, called, file, spoil, names
):
    spoil(home / file, tmp_path / "executed")
    refused_everywhere(home, called, home / file, *names)
    assert not (tmp_path / "executed").exists()


def test_other_file_next_to_it_is_the_sites_own(home):
    written(home, {"ward.py": "raise SystemExit\n"})
    Membership.read(home / "site.toml")


def test_module_of_the_folder_that_is_not_in_the_manifest_cannot_be_imported(home, tmp_path):
    written(home, {"ward.py": marking(tmp_path / "executed")})
    sneaking = {"own.py": b"def f():\n    name = 'ward'\n    return __import__(name)\n"}
    experiment = loaded(home.resolve(), sneaking | {"experiment.toml": b'data = "digits"\naugment = "own.py:f"'}, {})
    with pytest.raises(ModuleNotFoundError, match="ward"):
        experiment.augment()  # type: ignore[misc, call-arg]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "name", ["../site.py", "/etc/x.py", "a//b.py", ".hidden.py", "site.toml", "own.pth", "x\\y.py"]
)
def test_manifest_names_only_python_files_below_its_folder(name):
    with refused(repr(name)):
        Manifest("m", "0" * 64, 0, (), {"experiment.toml": "0" * 64, name: "0" * 64})


def test_files_of_another_founder_are_refused_if_all_were_replaced(home, called):
    other = home.parent / "other"
    other.mkdir()
    mesh = Mesh.read(home / "mesh.toml")
    source = written(other.parent / "source", FILES | {"trial.toml": EXPERIMENT})
    hand_out(source, mesh, other, 30)
    for name in ("manifest.json", "authority.pem"):
        (home / name).write_bytes((other / name).read_bytes())
    refused_everywhere(home, called, "approved", "manifest", at="approval")
    shown = fingerprint((home.parent / "mesh" / "authority.pem").read_bytes())
    refused_command(
        called("mesh", "show", home / "site.toml", "--approve", "--fingerprint", shown), "fingerprint", shown
    )
    refused_everywhere(home, called, "approved", "manifest", at="approval")


def test_key_is_made_from_files_as_signed_and_imports_nothing(home, tmp_path, called, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, marker = home.parent / "mesh", tmp_path / "executed"
    assert called("mesh", "key", source / "mesh.toml", "b", "--out", tmp_path / "fine")[0] == 0
    assert imported_from(source) == imported_from(tmp_path / "fine") == []
    for name in FILES:
        assert (tmp_path / "fine" / name).read_bytes() == (source / name).read_bytes()
    appended(source / "parts" / "deep.py", marking(marker))
    refused_command(called("mesh", "key", source / "mesh.toml", "b"), source / "parts" / "deep.py", "SHA-256")
    assert not marker.exists()
    assert not (tmp_path / "b").exists()


# The founder


def test_founder_cannot_hand_out_a_file_with_the_name_of_a_module_of_python(tmp_path):
    path = written(tmp_path, FILES | {"math.py": "", "trial.toml": EXPERIMENT})
    with refused(tmp_path / "math.py", "rename"):
        collected(path)


def test_file_that_the_toml_names_in_disguise_is_refused_by_the_founder(tmp_path):
    escaped = EXPERIMENT.replace('"own.py:loss"', '"other\\u002epy:loss"')
    path = written(tmp_path, FILES | {"other.py": "def loss(o, t):\n    return o.sum()\n", "trial.toml": escaped})
    (tmp_path / "out").mkdir()
    plain = loaded(tmp_path, {"experiment.toml": b'data = "digits"'}, {})
    mesh = founded(plain, "m", {"a": "h:1", "b": "h:2", "c": ""})
    with refused("loss", "other.py", "manifest"):
        hand_out(path, mesh, tmp_path / "out", 1)
    assert list((tmp_path / "out").iterdir()) == []


def test_experiment_that_no_site_could_allow_is_refused_by_the_founder_and_modules_to_allow_are_named(tmp_path, called):
    own = FILES | {"own.py": "import os, numpy\n" + FILES["own.py"]}
    trial = written(tmp_path, own | {"trial.toml": EXPERIMENT})
    found = partial(called, "mesh", "init", trial, "--out", tmp_path / "out")
    code, out, _ = found("--site", "a=h:1", "--site", "b", "--json")
    assert (code, json.loads(out)["allow"]) == (0, ["numpy", "os"])
    shutil.rmtree(tmp_path / "out")
    written(tmp_path, {"trial.toml": EXPERIMENT.replace("own.py:half", "own.py:os.system")})
    refused_command(found("--site", "a=h:1", "--site", "b"), "own.py:os.system", "metrics.half")
    assert list((tmp_path / "out").iterdir()) == []


def test_founder_signs_a_correction_and_sites_approve_it_again(home, called):
    folder = home.parent / "mesh"
    written(folder, {"helper.py": "ONE = 2.0\n"})
    code, out, _ = called("mesh", "seal", folder, "--json")
    assert (code, set(json.loads(out)["files"])) == (0, {"experiment.toml", *FILES})
    for name in ("helper.py", "manifest.json"):
        (home / name).write_bytes((folder / name).read_bytes())
    refused_everywhere(home, called, "approved", at="approval")
    assert called("mesh", "show", home / "site.toml", "--approve")[0] == 0
    Membership.read(home / "site.toml")
    text = EXPERIMENT + '[topology]\nname = "star"\n'
    written(folder, {"experiment.toml": text})
    before = (folder / "manifest.json").read_bytes()
    refused_command(called("mesh", "seal", folder), "graph", "neighbours")
    assert (folder / "manifest.json").read_bytes() == before


def test_every_string_that_can_be_imported_is_seen():
    table = {"a": {"b": ["os:system", {"c": "own.py:f"}]}, "d": "x.y:z.w", "e": "https://host/path", "f": "plain"}
    assert import_paths(table) == {"a.b[0]": "os:system", "a.b[1].c": "own.py:f", "d": "x.y:z.w"}


# Approval


def test_manifest_that_was_not_approved_is_refused_with_the_command(home, called):
    (home / "approved.json").unlink()
    refused_everywhere(home, called, "approved", f"mesh show {home / 'site.toml'} --approve", at="approval")
    assert called("mesh", "show", home / "site.toml", "--approve")[0] == 0
    assert (home / "approved.json").stat().st_mode & 0o777 == 0o600
    assert imported_from(home) == []
    Membership.read(home / "site.toml")


def test_another_manifest_than_the_approved_one_is_refused(home, called):
    approved = (home / "approved.json").read_bytes()
    fleet.amend(home.parent / "mesh", home, {"helper.py": "ONE = 1.5\n"})
    (home / "approved.json").write_bytes(approved)
    refused_everywhere(home, called, json.loads(approved)["manifest"], "--approve", at="approval")


def test_older_manifest_is_neither_run_nor_approved(home, called):
    older = home.parent / "mesh"
    shutil.copytree(older, home.parent / "newer")
    mesh = Mesh.read(home / "mesh.toml")
    seal(home.parent / "newer", mesh, ["experiment.toml", *FILES], time.time() + 60)
    before = (home / "manifest.json").read_bytes()
    (home / "manifest.json").write_bytes((home.parent / "newer" / "manifest.json").read_bytes())
    fleet.approve_at(home)
    (home / "manifest.json").write_bytes(before)
    refused_everywhere(home, called, "approved", at="approval")
    refused_command(called("mesh", "show", home / "site.toml", "--approve"), "before", home / "approved.json")


def test_damaged_approval_is_refused(home, called):
    (home / "approved.json").write_text("{}")
    with refused(home / "approved.json", "damaged"):
        Membership.read(home / "site.toml")


# Modules from outside the manifest


def named(loss: str, tmp_path: Path, own: str = "", **site) -> tuple[SiteFile, Handout]:
    contents = {"experiment.toml": f'data = "digits"\nloss = "{loss}"\n'.encode(), "own.py": own.encode()}
    manifest = Manifest("m", "0" * 64, 0, (), dict.fromkeys(contents, "0" * 64))
    return SiteFile.of(tmp_path / "site.toml", {"name": "a"} | site), Handout(manifest, tmp_path, contents)


@pytest.mark.parametrize(
    "path",
    [
        "torch.nn.functional:mse_loss", "torch.nn:CrossEntropyLoss", "torch.nn.functional:gelu", "fairmesh:ADGDA",
        "fairmesh.algorithms.ad_gda:ADGDA", "own.py:loss", "own.py:Mine.loss",
    ],
)  # fmt: skip
def test_models_of_torch_classes_of_fairmesh_and_the_manifests_files_are_allowed(tmp_path, path):
    import fairmesh.algorithms.ad_gda  # noqa: F401

    refuse_not_allowed(*named(path, tmp_path, "class Mine:\n    loss = staticmethod(print)\n"))


@pytest.mark.parametrize(
    "path",
    [
        "subprocess:check_output", "os:system", "torchvision.models:resnet18", "builtins:exec", "torch:load",
        "torch.hub:load", "torch.utils.cpp_extension:load_inline", "torch.nn:modules", "torch.nn.functional:importlib",
        "torch.nn.functional:boolean_dispatch", "fairmesh:run", "fairmesh.config.imports:called",
        "fairmesh.__main__:main", "weird module:name",
    ],
)  # fmt: skip
def test_anything_else_is_refused_until_the_site_allows_it(tmp_path, path):
    before, module = set(sys.modules), path.partition(":")[0].partition(".")[0]
    with refused(repr(path), f'allow = ["{module}"]', tmp_path / "site.toml"):
        refuse_not_allowed(*named(path, tmp_path))
    assert set(sys.modules) == before
    refuse_not_allowed(*named(path, tmp_path, allow=[module]))


@pytest.mark.parametrize(
    "path", ["torch.nn.functional:torch.hub.load", "own.py:os.system", "torchvision:models.torch.load"]
)
def test_name_that_reaches_through_a_module_is_refused_even_if_it_is_allowed(tmp_path, path):
    with refused(repr(path), "reaches"):
        refuse_not_allowed(*named(path, tmp_path, "import os\n", allow=["torch", "torchvision", "os"]))


def test_modules_that_the_files_import_must_be_allowed_too(tmp_path):
    own = "import math, numpy.linalg\nfrom collections import abc\ndef f():\n    from subprocess import run\n"
    with refused("own.py imports numpy.linalg", "own.py imports subprocess", 'allow = ["numpy", "subprocess"]'):
        refuse_not_allowed(*named("own.py:f", tmp_path, own))
    refuse_not_allowed(*named("own.py:f", tmp_path, own, allow=["numpy", "subprocess"]))
    assert [module for module, _ in not_allowed(named("own.py:f", tmp_path, own)[1].contents, ["numpy"])] == [
        "subprocess"
    ]


def test_program_named_by_the_toml_alone_is_refused_everywhere(home, called):
    text = EXPERIMENT.replace('"own.py:loss"', '"subprocess:check_output"')
    fleet.amend(home.parent / "mesh", home, {"experiment.toml": text})
    refused_everywhere(home, called, "subprocess:check_output", "allow", at="experiment")
    code, out, _ = called("mesh", "show", home / "site.toml", "--json")
    [reason] = json.loads(out)["runs"]["refused"]
    assert (code, missing_from(reason, "subprocess:check_output", "loss")) == (0, [])


@pytest.mark.parametrize(
    ("observer", "names"),
    [
        *((f'name = "csv", path = "{it}"', [it, "csv"]) for it in ("/etc/passwd", "a.key", "../x.csv", "site.toml")),
        ('name = "mlflow", uri = "http://elsewhere"', ["mlflow", "--track"]),  # each site's own choice
    ],
)
def test_observer_that_writes_over_other_files_or_tracks_the_run_for_all_is_refused(observer, names):
    table = f'data = "digits"\nobservers = [{{ {observer} }}]'
    with refused(*names):
        refuse_undeployable(loaded(Path("/nowhere"), {"experiment.toml": table.encode()}, {}))


# fairmesh mesh show


def test_show_says_what_runs_on_which_data_what_leaves_to_whom_and_for_how_long(home, called):
    written(home, {"ward.py": "import sqlite3\n"})
    replaced(home / "site.toml", ('data = "experiment"', 'data = "ward.py:site"'))
    code, out, err = called("mesh", "show", home / "site.toml")
    digests = json.loads((home / "manifest.json").read_text())["files"]
    assert (code, missing_from(err, "approved")) == (0, [])
    address = Mesh.read(home / "mesh.toml").member("b").address
    words = ["own.py:loss", "ad-gda", "ward.py", "4 bits", "40 rounds", f"neighbour b, {address}", "all sites: b, c"]
    assert missing_from(out, *digests, *digests.values(), *words, "certificate ends", "weights", "metric") == []
    code, out, _ = called("mesh", "show", home / "site.toml", "--json")
    table = json.loads(out)
    assert table["approved"]
    assert table["runs"]["names"] == {"loss": "own.py:loss", "metrics.half": "own.py:half"}
    assert table["runs"]["imports"]["own.py"] == ["math", "torch.nn.functional"]
    assert list(table["data"]["files"]) == [str(home / "ward.py")]
    assert imported_from(home) == []


def test_show_says_no_size_that_only_the_experiments_code_knows(home, called):
    own = EXPERIMENT.replace('{ name = "quantize", bits = 4 }', '{ name = "import", path = "own.py:Mine" }')
    fleet.amend(home.parent / "mesh", home, {"experiment.toml": own})
    _, out, _ = called("mesh", "show", home / "site.toml", "--json")
    assert json.loads(out)["leaves"]["bits_per_parameter"] is None


# Real nodes


@pytest.mark.slow
def test_site_with_a_changed_helper_is_refused_and_the_others_wait_for_it_until_it_is_mended(tmp_path):
    written(tmp_path, FILES)
    with Run(tmp_path, NAMES, EXPERIMENT) as run:
        helper, marker = tmp_path / "a" / "helper.py", tmp_path / "executed"
        right = helper.read_bytes()
        appended(helper, marking(marker))
        run.start(*NAMES)
        assert fleet.ended(run.running.pop("a"), 60) == 1
        assert missing_from((tmp_path / "a.log").read_text(), helper, "SHA-256") == []
        assert not marker.exists()
        for name in "bc":
            run.until(lambda name=name: any("a" in e["sites"].split(", ") for e in run.events(name, "waiting")))
        helper.write_bytes(right)
        run.start("a")
        run.end(*NAMES)
