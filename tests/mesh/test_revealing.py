"""Settings with which neighbours can read training rows need the consent of every site."""

import tomllib
from pathlib import Path

import pytest

from fairmesh.mesh.enrol.revealing import ALLOW, bits_per_parameter, revealing
from fairmesh.mesh.enrol.roster import SiteFile
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.preflight import checks
from fairmesh.training.defaults import FOR_UPDATES
from tests.mesh import fleet
from tests.mesh.experiments import experiment
from tests.refusals import missing_from, refused

ROOT = Path(__file__).parents[2]
EXPERIMENT = experiment(10, algorithm="ad-gda", data={"odd": None}, sampling={"batch": 8})
SIGNS = 'compressor = { name = "sign", block = 64 }'


def _table(text: str) -> dict:
    return tomllib.loads(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('algorithm = "ad-gda"', ["uncompressed", SIGNS]),
        ('algorithm = "choco-sgd"', ["uncompressed", SIGNS]),
        ('algorithm = "dsgd"', ["uncompressed", "leave [algorithm] out"]),
        ('algorithm = "dr-dsgd"\noptions = { dtype = "float64" }', ["uncompressed"]),
        ('algorithm = { name = "ad-gda", compressor = "half" }', ["16 bits", "more than 2"]),
        ('algorithm = { name = "ad-gda", compressor = { name = "quantize", bits = 4, block = 64 } }', ["4 bits"]),
        ('algorithm = { name = "ad-gda", compressor = { name = "top-k", fraction = 0.25 } }', ["8 bits"]),
        ('algorithm = { name = "tracked-ad-gda", compressor = { name = "quantize", bits = 2 } }', ["4 bits"]),
        ('algorithm = { name = "import", path = "own.py:Mine" }', ["own code"]),
        ('algorithm = { name = "ad-gda", compressor = { name = "import", path = "own.py:Mine" } }', ["own code"]),
        ("sampling = { batch = 31 }", ["31 rows", "fewer than 32", "batch = 32"]),
        ("sampling = { batch = 8, batches_per_step = 2 }", ["16 rows"]),
        ("algorithm = { name = 'tracked-ad-gda', local_steps = 4 }\nsampling = { batch = 8 }", ["8 rows"]),
        ('trainer = "own.py:train"\nalgorithm = "ad-gda"', ["uncompressed", "training function", "bits = 4"]),
    ],
)
def test_settings_with_which_rows_were_read_are_revealing(text, names):
    [reason] = revealing(_table(text))
    assert missing_from(reason, *names) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        'algorithm = "tracked-ad-gda"',
        'algorithm = { name = "tracked-ad-gda", weighting = { name = "import", path = "own.py:Mine" } }',
        'algorithm = { name = "ad-gda", compressor = { name = "quantize", bits = 2 } }',
        "sampling = { batch = 32 }",
        "sampling = { batch = 16, batches_per_step = 2 }",
        'sampling = { order = "full", batch = 1 }',
        'trainer = "own.py:train"',
        'trainer = "own.py:train"\nsampling = { batch = 1 }',
        'algorithm = "drfa"',  # refused by every node
    ],
)
def test_defaults_and_settings_that_show_as_little_are_not_revealing(text):
    assert revealing(_table(text)) == []


@pytest.mark.parametrize("name", ["ad-gda", "choco-sgd", "tracked-ad-gda"])
def test_advice_about_compressors_helps(name):
    assert revealing(_table(f'algorithm = {{ name = "{name}", compressor = "none" }}'))
    assert revealing(_table(f'algorithm = {{ name = "{name}", {SIGNS} }}')) == []


def test_bits_of_a_training_function_s_experiment_are_those_of_its_own_default():
    assert bits_per_parameter(_table('trainer = "own.py:train"')) == 2 * FOR_UPDATES.compressor.bits


def test_mesh_of_the_documentation_needs_no_consent():
    assert revealing(_table((ROOT / "examples/clinics.toml").read_text())) == []
    risk = (ROOT / "docs/howto/deploy.md").read_text().partition("`risk.toml`:\n\n```toml\n")[2].partition("```")[0]
    assert "[contract.target]" in risk
    assert revealing(_table(risk)) == []


@pytest.fixture
def site(tmp_path) -> Path:
    """A site of a provisioned mesh with a revealing experiment, which its file does not allow."""
    (tmp_path / "trial.toml").write_text(EXPERIMENT)
    fleet.provisioned(tmp_path / "sites", tmp_path / "trial.toml", ("a", "b", "c"))
    path = tmp_path / "sites" / "a" / "site.toml"
    path.write_text(path.read_text().replace(f"{ALLOW}\n", ""))
    return path


def test_revealing_experiment_is_shown_checked_and_refused_until_the_site_s_own_file_allows_it(site, called):
    reasons = ["training rows", "uncompressed", "8 rows", "fewer than 32"]
    with refused(*reasons, ALLOW, site, SIGNS):
        Membership.read(site)
    found = next(one for one in checks(site) if one.what == "messages")
    assert (found.ok, missing_from(found.found, *reasons, ALLOW)) == (False, [])
    _, out, _ = called("mesh", "show", site)
    assert missing_from(out, "REFUSED", ALLOW, "uncompressed", "8 rows") == []
    site.write_text(f"{ALLOW}\n{site.read_text()}")
    Membership.read(site)
    found = next(one for one in checks(site) if one.what == "messages")
    assert (found.ok, missing_from(found.found, ALLOW, "8 rows")) == (True, [])
    _, out, _ = called("mesh", "show", site)
    assert ("REFUSED" in out, missing_from(out, "this site accepts", "8 rows")) == (False, [])


def test_founder_is_told_and_the_site_s_new_file_holds_the_line_to_uncomment(tmp_path, called, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trial.toml").write_text(EXPERIMENT)
    sites = [part for name in ("a=127.0.0.1:7701", "b=127.0.0.1:7702", "c") for part in ("--site", name)]
    code, _, err = called("mesh", "init", "trial.toml", *sites, "--out", "mesh")
    told = " ".join(err.split())
    assert (code, missing_from(told, "uncompressed", "8 rows", ALLOW)) == (0, [])
    code, _, err = called("mesh", "key", "mesh/mesh.toml", "a", "--out", "a")
    assert (code, missing_from(" ".join(err.split()), ALLOW)) == (0, [])
    text = Path("a/site.toml").read_text()
    assert not SiteFile.read("a/site.toml").allow_revealing
    Path("a/site.toml").write_text(text.replace(f"# {ALLOW}", ALLOW))
    assert SiteFile.read("a/site.toml").allow_revealing
