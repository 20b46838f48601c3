"""The examples of real models as meshes of three sites: nodes that are killed end, bit for bit, where nodes that nobody
disturbs end, with the parts of the model that stay at their site."""

import json
import re
import resource
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

import fairmesh as fm
from fairmesh.experiment import load_experiment
from tests.mesh.fleet import KnowingSecrets, provisioned
from tests.mesh.lives import Lives, Point, fresh
from tests.mesh.scenarios import played

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
NAMES = ["north", "south", "east"]
ROUNDS = 6
KILLED = {"south": [Point("sent", 2)], "east": [Point("after checkpoint", 3)]}
CASES = {
    **{f"resnet {one}": ("resnet", f'batch_norm = "{one}"') for one in ("frozen", "local", "shared", "convert")},
    **{name: (name, "") for name in ("text", "unet", "lstm", "lora", "streamed")},
    "features of a frozen encoder": ("../backbones/notes", ""),
}
LIMITED = {"streamed": 300 << 20}  # bytes that a node may take beyond those it starts with; its data has 983 MB
# Each start of a node would trace the model again. In float32, a simulation rounds otherwise and quantizes otherwise.
OPTIONS = 'measure_every = 4\ncheckpoint_every = 3\ntrace = "no"\ndtype = "float64"'
OWN_MODELS = {"resnet local"}  # where each site has a model of its own


def experiment_of(case: str, folder: Path) -> Path:
    """Copies an example and writes its experiment with fewer rounds."""
    name, setting = CASES[case]
    shutil.copy(EXAMPLES / f"{name}.py", folder)
    text = re.sub(r"^rounds = .*$", f"rounds = {ROUNDS}", (EXAMPLES / f"{name}.toml").read_text(), flags=re.M)
    text = re.sub(r"^nodes = .*\nodd = .*$", "nodes = 3\nodd = 1", text, flags=re.M)
    text = re.sub(r"^batch_norm = .*$", setting, text, flags=re.M)
    text = re.sub(r"^measure_every = .*$", OPTIONS, text, flags=re.M)
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


def written(folder: Path) -> dict[str, bytes]:
    """Returns what the sites have at the end: the common result, and the models of their own."""
    found = {}
    for name in NAMES:
        for part in ("result", "personal"):
            inside = folder / name / "state" / part
            found |= {f"{name}/{path.name}": path.read_bytes() for path in sorted(inside.glob("*")) if path.is_file()}
    return found


def limit_memory(log: Path, limit: int) -> None:
    """In this process, from now on: refuses it more memory than that, and writes down what it has taken."""

    def taken(what: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))

    resource.setrlimit(resource.RLIMIT_DATA, (taken("VmData") + limit, resource.RLIM_INFINITY))
    before = taken("RssAnon")

    def watch() -> None:
        while True:
            with open(log, "a") as file:
                file.write(f"{taken('RssAnon') - before}\n")
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()


def scenario(folder: Path, case: str) -> None:
    """The mesh of an example, undisturbed and with kills."""
    provisioned(folder / "provisioned", experiment_of(case, folder), NAMES)
    for what, points in (("calm", None), ("killed", KILLED)):
        with Lives(fresh(folder / "provisioned", folder / what), NAMES, points) as nodes:
            if case in LIMITED:
                nodes.before_start = lambda name: limit_memory(folder / "peaks", LIMITED[case])
            nodes.start_all()
            nodes.finish(250)
        (folder / f"{what}.json").write_text(json.dumps(nodes.reached))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_nodes_of_an_example_end_bit_for_bit_where_undisturbed_ones_end(case: str, tmp_path: Path):
    played("tests.mesh.test_real_models", str(tmp_path), case, seconds=500)
    assert len(json.loads((tmp_path / "killed.json").read_text())) == 2
    calm, killed = (written(tmp_path / what) for what in ("calm", "killed"))
    assert calm.keys() == killed.keys()
    assert [name for name in calm if calm[name] != killed[name]] == []
    assert len({calm[f"{name}/model.safetensors"] for name in NAMES}) == 1
    own = {calm[name] for name in calm if name.endswith("site.safetensors")}
    assert len(own) == (3 if case in OWN_MODELS else 0)
    if case in LIMITED:
        assert 0 < max(map(int, (tmp_path / "peaks").read_text().split())) < LIMITED[case]
    simulated = fm.run(load_experiment(tmp_path / "experiment.toml"), process_group=KnowingSecrets(NAMES))
    record = json.loads(calm["north/metrics.jsonl"].splitlines()[-1])
    assert record["loss"]["sites"] == pytest.approx(simulated.final[0]["loss"]["sites"], rel=1e-4)
    assert record["bytes_total"] == pytest.approx(simulated.final[0]["bytes_total"], rel=1e-3)


def test_examples_of_real_models_are_experiments_that_learn(tmp_path: Path):
    experiment = load_experiment(EXAMPLES / "lstm.toml")
    first, *_, last = fm.run(experiment).records
    assert last["loss"]["worst"] < first["loss"]["worst"]
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == {name for name, _ in CASES.values() if "/" not in name}


if __name__ == "__main__":
    scenario(Path(sys.argv[1]), sys.argv[2])
