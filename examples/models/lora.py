"""A classifier of digits as somebody has trained it before, for upright images. Its sites adapt it with LoRA.

A real one is loaded instead: `torch.load` of a file, or `from_pretrained` of a folder that all sites have.
"""

import torch
from torch import nn

import fairmesh as fm


def base() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    images, labels = fm.data.Digits(nodes=1, odd=0).sites()[0].train
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with torch.enable_grad():
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model
