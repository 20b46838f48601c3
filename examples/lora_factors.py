"""LoRA with a common frozen A, and with both factors trained and averaged, where sites differ and rounds are long.

    pip install 'fairmesh[lora]'
    python examples/lora_factors.py

Ten sites adapt the classifier of examples/models/lora.py; five of them mirror every image. Each trains forty steps of
Adam per round on its own rows, and neighbours average.
"""

import sys
from pathlib import Path

import torch

import fairmesh as fm

sys.path.insert(0, str(Path(__file__).parent / "models"))
from lora import base


def train(module, data, ctx):
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(data.inputs), data.targets).backward()
        optimizer.step()


def main(rounds: int = 10) -> dict[bool, fm.Result]:
    sites, found = fm.data.Digits(nodes=10, odd=5).sites(), {}
    for train_a in (False, True):
        module = fm.models.LoRA(rank=8, targets=("1", "3", "5"), train_a=train_a).adapt(base())
        problem = fm.Problem(module, sites, trainer=train)
        found[train_a] = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(1.0), rounds, measure_every=rounds)
        mean = found[train_a].values("mean")[0]
        factors = "A and B trained" if train_a else "A common and frozen"
        print(f"{factors}: worst site {found[train_a].worst:.3f}, mean {mean:.3f}")
    return found


if __name__ == "__main__":
    main()
