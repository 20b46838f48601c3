"""Nodes that train on a GPU: killed and started again, they end bit for bit where they would have."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.mesh.experiments import BY_CLASS, experiment
from tests.mesh.scenarios import Run

NAMES = ["a", "b", "c"]


def _started(run: Run, name: str) -> subprocess.Popen:
    """A node in a program of its own, since a process that has used CUDA cannot be forked."""
    with open(run.folder / f"{name}.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fairmesh", "node", str(run.folder / name / "site.toml")], stdout=log, stderr=log
        )


def killed_on_the_way(folder: Path, dtype: str, device: str = "cuda") -> None:
    """One node is killed twice in the middle of the run."""
    options = {"measure_every": 100, "checkpoint_every": 20, "device": device, "dtype": dtype}
    model, models = {"name": "fc", "hidden": 32}, []
    text = experiment(600, algorithm="tracked-ad-gda", data=BY_CLASS, model=model, options=options)
    for kills in ((), (150, 350)):
        run = Run(folder / f"{len(kills)} times", NAMES, text)
        nodes = {name: _started(run, name) for name in NAMES}
        try:
            for at in kills:
                run.until(lambda run=run, at=at: run.round("b") >= at)
                nodes["b"].kill()
                assert nodes["b"].wait(10) == -9
                assert run.round("b") < 600
                time.sleep(0.5)
                nodes["b"] = _started(run, "b")
            codes = [node.wait(200) for node in nodes.values()]
        finally:
            for node in nodes.values():
                node.kill()
        assert codes == [0, 0, 0], [(run.folder / f"{name}.log").read_text()[-2000:] for name in NAMES]
        models += [(run.folder / name / "state" / "result" / "model.safetensors").read_bytes() for name in NAMES]
        assert device.upper() in run.events("a", "machine")[0]["device"].upper()
    assert len(set(models)) == 1


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_node_on_a_gpu_that_is_killed_ends_bit_for_bit_where_it_would_have(dtype, tmp_path):
    killed_on_the_way(tmp_path, dtype)


if __name__ == "__main__":
    killed_on_the_way(Path(sys.argv[2]), sys.argv[1], *sys.argv[3:])
