"""Image files of three clinics, read batch by batch: files of different sizes, random flips, and no site in memory.

python examples/streamed_images.py
"""

import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import fairmesh as fm

SIZE = 16


def write_scans(folder: Path, clinic: int, count: int) -> None:
    """Writes images with a bright upper or lower half, 12 to 16 pixels high and wide, as 0-1.png, 1-0.png, ..."""
    generator = np.random.default_rng(clinic)
    folder.mkdir()
    for k in range(count):
        height, width = generator.integers(12, SIZE + 1, 2)
        pixels = generator.normal(90 + 20 * clinic, 30, (height, width))
        half = slice(0, height // 2) if k % 2 else slice(height // 2, height)
        pixels[half] += 60
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{k}-{k % 2}.png")


class Scans(Dataset):
    """The images of a folder, flipped left to right at random. Only their paths are in memory."""

    def __init__(self, folder: Path, flip: bool):
        self.files, self.flip = sorted(folder.glob("*.png")), flip

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, k: int) -> tuple[np.ndarray, int]:
        image = np.asarray(Image.open(self.files[k]))
        if self.flip and random.random() < 0.5:  # fairmesh seeds Python's, numpy's and torch's generators for each item
            image = image[:, ::-1]
        return image, int(self.files[k].stem.split("-")[1])


def padded(items: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch of images of one size."""
    images = torch.zeros(len(items), 1, SIZE, SIZE, dtype=torch.uint8)
    for k, (image, _) in enumerate(items):
        images[k, 0, : image.shape[0], : image.shape[1]] = torch.from_numpy(image.copy())
    return images, torch.tensor([label for _, label in items])


def main(rounds: int = 60) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sites = []
        for clinic in range(3):
            train, test = Path(folder) / f"train {clinic}", Path(folder) / f"test {clinic}"
            write_scans(train, clinic, 200)
            write_scans(test, clinic, 60)
            streamed = fm.data.Streamed(Scans(train, flip=True), workers=2, collate=padded)
            judged = fm.data.Streamed(Scans(test, flip=False), collate=padded)
            sites.append(fm.Site(streamed, test=judged, name=f"clinic {clinic}"))
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 2)
        )
        problem = fm.Problem(model, sites, sampling=fm.Sampling(batch=16, order="shuffled"))
        result = fm.train(problem, fm.Ring(), fm.ADGDA(primal_step=0.5), rounds, measure_every=rounds, announce=print)
        print(f"worst site {result.worst:.1%}, mean {result.final[0]['accuracy']['mean']:.1%}")


if __name__ == "__main__":
    main()
