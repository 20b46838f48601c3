"""What a small run does not pay for."""

import subprocess
import sys

RUN = """
import sys
import fairmesh as fm
fm.run(fm.Experiment(fm.data.Digits(nodes=4), algorithm=fm.TrackedADGDA(), rounds=3))
heavy = {"torch._dynamo", "torch._inductor", "torch.onnx"}
print(sorted(heavy & set(sys.modules)))
"""


def test_run_on_a_cpu_does_not_import_a_compiler():
    """TorchDynamo takes as long to import as half of torch. `torch.func.grad` and `make_fx` would import it."""
    ran = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
