"""A model, data and a training loop, as a project has them before it trains with others. The pages "Coming from ..." of
the documentation start from this file.

Five hospitals hold made-up measurements. The last one has few rows, and its instrument measures the first value the
other way round.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HOSPITALS = 5


class Net(nn.Module):
    """A small network for two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def load_data(hospital: int) -> tuple[TensorDataset, TensorDataset]:
    """Returns a hospital's training and test rows."""
    draw = torch.Generator().manual_seed(hospital)
    unusual = hospital == HOSPITALS - 1
    rows = 120 if unusual else 400
    x = torch.randn(rows + 400, 6, generator=draw)
    y = (x[:, 0] + 0.7 * x[:, 1] * x[:, 2] + 0.3 * torch.randn(len(x), generator=draw) > 0).long()
    if unusual:
        x[:, 0] *= -1
        x[:, 5] += 2.0  # by which a model can tell this instrument from the others
    return TensorDataset(x[:rows], y[:rows]), TensorDataset(x[rows:], y[rows:])


def train(model: nn.Module, data: TensorDataset, lr: float, epochs: int = 1) -> None:
    """Trains a model on one hospital's rows, in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Returns the share of rows that a model labels correctly."""
    x, y = data.tensors
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(dim=1) == y).double().mean().item()
