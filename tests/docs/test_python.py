"""Python on pages: names and arguments of fairmesh exist, and every block runs."""

import ast
import builtins
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fairmesh as fm
from tests.docs.pages import ROOT, Block, blocks, code_spans, pages

BLOCKS = blocks("python")
PAGES = sorted({block.page.relative_to(ROOT).as_posix() for block in BLOCKS})
ELSEWHERE = {  # pages whose blocks another test runs
    "README.md": "tests/journeys/test_readme.py",
    "docs/howto/extending.md": "tests/extension/test_tutorial.py",
    "docs/howto/own-models.md": "tests/problems/test_own_models_page.py",
}
NEEDS_A_DOWNLOAD = "FashionMNIST("

SITES = """
import numpy as np
import torch
import fairmesh as fm

def _rows(seed, count=40):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
sites = [fm.Site(_rows(k), test=_rows(10 + k), name=name) for k, name in enumerate(["north", "south", "east"])]
"""
TABLE = """
import pathlib
import numpy as np
import torch
import fairmesh as fm

rows = [f"{20 + k},{k % 7},{'ill' if k % 5 else 'well'},{'AB'[k % 2]}" for k in range(80)]
pathlib.Path("patients.csv").write_text("\\n".join(["age,dose,outcome,hospital", *rows]))
pathlib.Path("new.csv").write_text("age,dose\\n30,2\\n50,3\\n")
_data = fm.data.Table("patients.csv", target="outcome", site="hospital", validation_share=0.2)
result = fm.run(fm.Experiment(_data, rounds=3, options=fm.Options(keep_best=True)), out="runs/hospitals")
np.save("images.npy", np.zeros((8, 3, 4, 4), dtype=np.float32))
labels = np.arange(8) % 2
scans = test_scans = torch.utils.data.TensorDataset(torch.zeros(8, 3), torch.arange(8) % 2)
"""
SUBGROUPS = f"""{SITES}
(x, y), (x_test, y_test) = _rows(0), _rows(1)
scanner = scanner_test = ["old", "new"] * 20
sites = [fm.Site((*_rows(k), scanner), test=(*_rows(10 + k), scanner)) for k in range(3)]
"""
PARTS = f"""{SITES}
from collections import OrderedDict
def _layers(**layers): return torch.nn.Sequential(OrderedDict(layers))
_linear = torch.nn.Linear
model = _layers(
    conv1=_linear(4, 8), layer1=_layers(a=_linear(8, 8)), layer2=_linear(8, 8), norm=torch.nn.BatchNorm1d(8),
    head=_linear(8, 2),
)
"""
PERSONAL = f"""{SITES}
my_module = model
problem = fm.Problem(model, [fm.Site(_rows(k), test=_rows(10 + k)) for k in range(9)])
"""
LORA = """
import os
import torch
import transformers
import fairmesh as fm

_config = transformers.BertConfig(
    vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
)
transformers.BertForSequenceClassification(_config).save_pretrained("the/folder")
def _rows(seed):
    ids = torch.randint(0, 30, (8, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
sites = [fm.Site(_rows(k), test=_rows(10 + k)) for k in range(3)]
os.makedirs("runs/lora")
os.symlink("../../adapter", "runs/lora/exported-peft")  # what `fairmesh export` writes
"""
COMING_FROM = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples" / "coming_from")!r})
"""
PREPARED = {  # what the text around the first fragment takes for granted
    "docs/concepts/weights.md": SUBGROUPS,
    "docs/howto/data.md": TABLE,
    "docs/howto/lora.md": LORA,
    "docs/howto/metrics.md": SITES,
    "docs/howto/models-and-parts.md": PARTS,
    "docs/howto/models.md": TABLE,
    "docs/howto/own-training-code.md": SITES,
    "docs/howto/personal.md": PERSONAL,
    "docs/start/coming-from-flower.md": COMING_FROM,
    "docs/start/coming-from-nvflare.md": COMING_FROM,
}


def problems_in(block: Block) -> Iterator[str]:
    """Yields what is wrong with a block: names of fairmesh that do not exist, arguments nobody takes."""
    for node in ast.walk(ast.parse(block.text, str(block))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fairmesh":
            module = importlib.import_module(node.module or "")
            yield from (f"{block}: {node.module} has no {a.name}" for a in node.names if not hasattr(module, a.name))
        if isinstance(node, ast.Attribute) and (chain := _chain(node)) and chain[0] == "fm":
            yield from _missing(block, chain[1:])
        if isinstance(node, ast.Call) and (chain := _chain(node.func)) and chain[0] == "fm":
            yield from _unknown_arguments(block, chain[1:], node)


def _chain(node: ast.AST) -> list[str]:
    """Returns ["fm", "data", "Digits"] for fm.data.Digits, and nothing for an expression that is no chain of names."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names, node = [node.attr, *names], node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def _named(names: list[str]) -> object:
    thing: object = fm
    for name in names:
        thing = getattr(thing, name)
    return thing


def _missing(block: Block, names: list[str]) -> Iterator[str]:
    try:
        _named(names)
    except AttributeError as error:
        yield f"{block}: {error}"


def _unknown_arguments(block: Block, names: list[str], call: ast.Call) -> Iterator[str]:
    try:
        taken = inspect.signature(_named(names)).parameters.values()  # type: ignore[arg-type]
    except (AttributeError, ValueError, TypeError):
        return
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken):
        known = {parameter.name for parameter in taken}
        for given in call.keywords:
            if given.arg and given.arg not in known:
                yield f"{block}: fm.{'.'.join(names)} takes no {given.arg}"


def defined_in(code: str) -> set[str]:
    """Returns the names that code defines anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in aliases}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_python_on_pages_names_what_exists():
    assert len(BLOCKS) > 30
    assert [problem for block in BLOCKS for problem in problems_in(block)] == []


def test_a_wrong_name_is_noticed():
    code = "fm.data.Digitz(); fm.compressors.Quantize(bitz=3); from fairmesh import trane"
    found = " ".join(problems_in(Block(ROOT / "README.md", 1, "python", code)))
    assert [part for part in ("Digitz", "bitz", "trane") if part not in found] == []


def test_names_in_running_text_exist():
    """Such as `fm.data.Table(...)` or `help(fm.TrackedADGDA)`."""
    wrong = []
    for page in pages():
        if page.name == "CHANGELOG.md":
            continue  # it also names what is gone
        for code in code_spans(page):
            for chain in re.findall(r"(?<![\w.])fm((?:\.[A-Za-z]\w*)+)", code):
                wrong += _missing(Block(page, 0, "", code), chain.strip(".").split("."))
    assert wrong == []


def test_python_on_pages_uses_no_name_that_nothing_defines():
    wrong = []
    known: dict[Path, set[str]] = {}
    for block in BLOCKS:
        prepared = PREPARED.get(block.page.relative_to(ROOT).as_posix(), "")
        names = known.setdefault(block.page, {*dir(builtins), *defined_in(prepared)})
        names |= defined_in(block.text)
        loads = [n for n in ast.walk(ast.parse(block.text)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        wrong += [f"{block}: {name}" for name in sorted({node.id for node in loads} - names)]
    assert wrong == []


def test_python_of_other_frameworks_compiles():
    for block in blocks("py"):
        compile(block.text, str(block), "exec")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_python_on_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names: dict[str, object] = {"__name__": "page"}
    exec(PREPARED.get(page, ""), names)
    for block in BLOCKS:
        if block.page == ROOT / page and NEEDS_A_DOWNLOAD not in block.text:
            exec(compile(block.text, str(block), "exec"), names)
