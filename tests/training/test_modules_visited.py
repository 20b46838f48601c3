"""What a small run does not pay for: modules that it neither imports nor enters."""

import json
import subprocess
import sys

IMPORTED = """
import sys
import fairmesh as fm
fm.run(fm.Experiment(fm.data.Digits(nodes=4), algorithm=fm.TrackedADGDA(), rounds=3))
heavy = {"torch._dynamo", "torch._inductor", "torch.onnx", "networkx", "sympy"}
print(sorted(heavy & set(sys.modules)))
"""
ENTERED = """
import json, sys
import torch
import fairmesh as fm
fm.train, fm.Problem, fm.Site, fm.Ring, fm.algorithms  # imports all that is needed
entered = set()
def note(frame, event, argument):
    _, inside, file = frame.f_code.co_filename.rpartition("/src/fairmesh/")
    if event == "call" and inside and frame.f_code.co_name != "<module>":
        entered.add(file)
labels = torch.arange(40) % 2
sites = [fm.Site((torch.randn(40, 3) + labels[:, None], labels)) for _ in range(4)]
sys.setprofile(note)
fm.train(fm.Problem(torch.nn.Linear(3, 2), sites, test=sites[0].train), fm.Ring(), fm.algorithms.DSGD(0.1), rounds=20)
sys.setprofile(None)
print(json.dumps(sorted(entered)))
"""
MOST = 64  # modules; 97 before a run had stages, and features had seams
UNASKED = (
    "lora", "batch_norm", "subgroup", "data/streams", "trainer", "local_work", "augmentation", "convolution",
    "parts", "local_optimizer", "frozen_features", "personalization", "evidence",
)  # fmt: skip


def _printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_run_on_a_cpu_imports_neither_a_compiler_nor_what_few_runs_need():
    """TorchDynamo takes as long to import as half of torch. `torch.func.grad` and `make_fx` would import it, and
    torch's cross-entropy under vmap would import sympy. Only random graphs need networkx."""
    assert _printed(IMPORTED).splitlines()[-1] == "[]"


def test_plain_logistic_run_enters_no_code_of_features_that_it_does_not_use():
    entered = json.loads(_printed(ENTERED))
    assert [file for file in entered if any(word in file for word in UNASKED)] == []
    assert len(entered) <= MOST, entered
