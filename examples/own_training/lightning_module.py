"""A LightningModule as the local work of a site.

pip install 'fairmesh[lightning]'
python examples/own_training/lightning_module.py
"""

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fairmesh as fm


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, inputs):
        return self.layers(inputs)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return cross_entropy(self(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(module, data, ctx):
    fm.trainers.fit_lightning(module, data, ctx, batch_size=32, max_epochs=1, gradient_clip_val=1.0)


def main(rounds: int = 20) -> fm.Result:
    torch.manual_seed(0)
    sites = fm.data.Digits(nodes=4, odd=1).sites()
    problem = fm.Problem(Classifier(), sites, trainer=fm.trainers.LocalTrainer(train))
    result = fm.train(problem, rounds=rounds, measure_every=rounds)
    print(f"worst site {result.worst:.3f} after {rounds} rounds, {result.final[0]['bytes_total'] / 1e6:.2f} MB sent")
    return result


if __name__ == "__main__":
    main()
