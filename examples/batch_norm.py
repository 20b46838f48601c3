"""BatchNorm at four clinics whose scanners differ: one small network under each policy, and with a local head.

python examples/batch_norm.py
"""

import torch
from torch import nn

import fairmesh as fm


def clinic(number: int, rows: int = 120) -> fm.Site:
    """Returns images with a bright spot in one of four corners, as the scanner of a clinic shows them."""
    generator = torch.Generator().manual_seed(number)
    labels = torch.arange(rows) % 4
    images = torch.randn(rows, 1, 8, 8, generator=generator)
    for row, label in enumerate(labels.tolist()):
        images[row, 0, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 1.5
    images = images * (1.0 + 2.0 * number) + 3.0 * number  # contrast and brightness
    half = rows // 2
    return fm.Site((images[:half], labels[:half]), test=(images[half:], labels[half:]), name=f"clinic {number}")


def network() -> nn.Module:
    """Returns a network as many are written: with BatchNorm, in training mode."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


def main() -> None:
    sites = [clinic(number) for number in range(4)]
    print(f"{'batch_norm':24} {'worst site':>10} {'mean':>6} {'bytes sent':>12}")
    for policy, local in (("frozen", ()), ("convert", ()), ("shared", ()), ("local", ()), ("local", ("9.*",))):
        parts = fm.Parts(local=local, step=0.01)
        problem = fm.Problem(network, sites, sampling=fm.Sampling(batch=20), batch_norm=policy, parts=parts)
        result = fm.train(problem, fm.Ring(), fm.TrackedADGDA(), rounds=40, measure_every=40)
        final, what = result.final[0], policy + (" and a local head" if local else "")
        print(
            f"{what:24} {final['accuracy']['worst']:10.1%} {final['accuracy']['mean']:6.1%} {final['bytes_total']:12,}"
        )
    own = result.state_dict(site="clinic 2")  # the model of one clinic, with its own head and statistics
    network().load_state_dict(own)


if __name__ == "__main__":
    main()
