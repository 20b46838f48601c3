"""An LSTM that reads the vital signs of patients at three hospitals, measured every hour.

`fairmesh run examples/models/lstm.toml` imports this file.
"""

import torch
from torch import Tensor, nn

import fairmesh as fm


class Course(nn.Module):
    """Reads a course of measurements, (patients, hours, signs), and predicts a class."""

    def __init__(self, signs: int = 3, hidden: int = 16):
        super().__init__()
        self.lstm = nn.LSTM(signs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, courses: Tensor) -> Tensor:
        return self.head(self.lstm(courses)[0][:, -1])


def hospital(number: int, patients: int = 80, hours: int = 12) -> fm.Site:
    """Returns patients whose pulse rises or falls; hospitals differ in how fast."""
    generator = torch.Generator().manual_seed(number)
    worse = torch.arange(patients) % 2
    courses = 0.5 * torch.randn(patients, hours, 3, generator=generator).cumsum(dim=1)
    courses[:, :, 0] += (2.0 * worse - 1.0)[:, None] * torch.linspace(0, 1.0 + number, hours)
    rows = patients // 4
    return fm.Site(
        (courses[rows:], worse[rows:]), test=(courses[:rows], worse[:rows]), name=("north", "south", "east")[number]
    )


def sites() -> list[fm.Site]:
    return [hospital(number) for number in range(3)]
