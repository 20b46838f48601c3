"""The example of a frozen encoder as a mesh of three sites: outputs are computed at home, nodes that are killed go on
where they were, and all end where a simulation ends that computes the encoder in every pass."""

import json
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fairmesh as fm
from fairmesh.experiment import load_experiment
from fairmesh.storage import feature_store
from fairmesh.storage.feature_store import StoredRows
from tests.mesh.fleet import KnowingSecrets, provisioned
from tests.mesh.lives import Lives, Point, fresh
from tests.mesh.scenarios import played

EXAMPLES = Path(__file__).parents[2] / "examples" / "backbones"
NAMES = ["north", "south", "east"]
ROUNDS, PORTION = 6, 32
KILLED = {"north": [Point("outputs", 0)], "south": [Point("sent", 2)], "east": [Point("after checkpoint", 3)]}
OPTIONS = 'measure_every = 4\ncheckpoint_every = 3\ntrace = "no"\ndtype = "float64"'
BACKBONE = 'module = "encoder"\ndtype = "float64"\nbatch = 16'

IN_EVERY_PASS = """

class InEveryPass(Classifier):
    def __init__(self):
        super().__init__()
        self.encoder.eval()
"""


def experiment_of(folder: Path) -> Path:
    """Copies the example and writes its experiment with fewer rounds."""
    shutil.copy(EXAMPLES / "notes.py", folder)
    text = (EXAMPLES / "notes.toml").read_text()
    for pattern, instead in ((r"rounds = .*", f"rounds = {ROUNDS}"), (r"measure_every = .*", OPTIONS)):
        text = re.sub(f"^{pattern}$", instead, text, flags=re.M)
    path = folder / "experiment.toml"
    path.write_text(text.replace('module = "encoder"', BACKBONE))
    return path


def dies_while_computing(flag: Path) -> None:
    """In this process, from now on: it is killed in the middle of the second portion that it writes, once."""
    feature_store._MOST_ROWS = PORTION
    write = StoredRows.write

    def or_die(self: StoredRows, portion: int, tensors) -> None:
        if portion == 1 and not flag.exists():
            flag.touch()
            with open(self._file(0), "r+b") as file:  # half of it is on disk
                file.seek(self._forms[0].nbytes * self.place(portion).start)
                file.write(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, portion, tensors)

    StoredRows.write = or_die  # type: ignore[method-assign]


def scenario(folder: Path) -> None:
    """The mesh of the example, undisturbed and with kills."""
    provisioned(folder / "provisioned", experiment_of(folder), NAMES)
    for what, points in (("calm", None), ("killed", KILLED)):
        nodes = Lives(fresh(folder / "provisioned", folder / what), NAMES, points)
        if points:
            nodes.before_start = lambda name: dies_while_computing(folder / "died") if name == "north" else None
        try:
            nodes.start_all()
            nodes.finish(250)
        finally:
            nodes.end()
        said = {name: [e["said"] for e in nodes.log_of(name) if e["what"] == "features"] for name in NAMES}
        kept = [name for name in NAMES if (folder / what / name / "state" / "features").exists()]
        (folder / f"{what}.json").write_text(json.dumps({"reached": nodes.reached, "said": said, "kept": kept}))


def written(folder: Path) -> dict[str, bytes]:
    """Returns the results of all sites."""
    files = [path for name in NAMES for path in sorted((folder / name / "state" / "result").glob("*"))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


@pytest.mark.slow
def test_killed_nodes_go_on_with_the_outputs_that_they_had_computed(tmp_path: Path):
    pytest.importorskip("transformers")
    played("tests.mesh.test_backbones", str(tmp_path), seconds=500)
    assert (tmp_path / "died").exists()
    told = json.loads((tmp_path / "killed.json").read_text())
    assert len(told["reached"]) == 3
    assert told["kept"] == []  # they are deleted at the end
    first, again = told["said"]["north"][:2]
    assert "known" not in first
    assert f"{PORTION} of them known" in again  # the finished portion of 120 rows
    calm, killed = (written(tmp_path / what) for what in ("calm", "killed"))
    assert calm.keys() == killed.keys()
    assert [name for name in calm if calm[name] != killed[name]] == []
    assert len({calm[f"{name}/state/result/model.safetensors"] for name in NAMES}) == 1

    experiment, group = load_experiment(tmp_path / "experiment.toml"), KnowingSecrets(NAMES)
    (tmp_path / "every_pass.py").write_text((EXAMPLES / "notes.py").read_text() + IN_EVERY_PASS)
    model = fm.models.ImportedModel(f"{tmp_path}/every_pass.py:InEveryPass")
    in_every_pass = replace(experiment, backbone=None, parts=fm.Parts(frozen=("encoder.*",)), model=model)
    record = json.loads(calm["north/state/result/metrics.jsonl"].splitlines()[-1])
    for one in (experiment, in_every_pass):
        simulated = fm.run(one, process_group=group)
        assert record["loss"]["sites"] == pytest.approx(simulated.final[0]["loss"]["sites"], rel=1e-6)
        assert record["bytes_total"] == pytest.approx(simulated.final[0]["bytes_total"], rel=1e-3)
    whole = fm.inference.load_model(tmp_path / "calm" / "south")
    assert any(name.startswith("encoder.") for name in whole.module.state_dict())


if __name__ == "__main__":
    scenario(Path(sys.argv[1]))
