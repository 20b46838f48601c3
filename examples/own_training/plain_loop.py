"""Your own training loop as the local work of a site: AdamW, autocast and a DataLoader with a worker.

python examples/own_training/plain_loop.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import fairmesh as fm


def train(module, data, ctx):
    """An epoch on the site's data. The optimizer's state stays at the site, and is in its checkpoint."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.01)
    if "optimizer" in ctx.state:
        optimizer.load_state_dict(ctx.state["optimizer"])
    first = None
    for inputs, targets in DataLoader(data, batch_size=32, shuffle=True, num_workers=1):
        inputs, targets = inputs.to(ctx.device), targets.to(ctx.device)
        with torch.autocast(ctx.device.type, torch.bfloat16):
            loss = cross_entropy(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        first = loss.item() if first is None else first
    ctx.state["optimizer"] = optimizer.state_dict()
    return first  # the loss at the start, which the weights of the sites follow


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main(rounds: int = 20) -> fm.Result:
    sites = fm.data.Digits(nodes=4, odd=1).sites()
    problem = fm.Problem(model(), sites, trainer=fm.trainers.LocalTrainer(train))
    result = fm.train(problem, rounds=rounds, measure_every=rounds)  # by Tracked AD-GDA
    print(f"worst site {result.worst:.3f} after {rounds} rounds, {result.final[0]['bytes_total'] / 1e6:.2f} MB sent")
    return result


if __name__ == "__main__":
    main()
