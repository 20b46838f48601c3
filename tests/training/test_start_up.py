"""What a small run does not pay for."""

import subprocess
import sys

RUN = """
import sys
import fairmesh as fm
fm.run(fm.Experiment(fm.data.Digits(nodes=4), algorithm=fm.TrackedADGDA(), rounds=3))
heavy = {"torch._dynamo", "torch._inductor", "torch.onnx", "networkx", "sympy"}
print(sorted(heavy & set(sys.modules)))
"""


def test_run_on_a_cpu_imports_neither_a_compiler_nor_what_few_runs_need():
    """TorchDynamo takes as long to import as half of torch. `torch.func.grad` and `make_fx` would import it, and
    torch's cross-entropy under vmap would import sympy. Only random graphs need networkx."""
    ran = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
