"""Your own data, model and metric: six hospitals of unequal size, one of which has a different device.

`fairmesh run examples/hospitals.toml` imports this file. `python examples/hospitals.py` compares training for the
average with training for the worst mixture, from Python.
"""

import torch
from torch import Tensor, nn

import fairmesh as fm


def sites(count: int = 6) -> list[fm.Site]:
    """Returns hospitals with synthetic patients: eight measurements each, ill or not.

    The device of the smallest hospital reverses the sign of four measurements.
    """
    generator = torch.Generator().manual_seed(7)
    truth = torch.randn(8, generator=generator)
    made = []
    for i in range(count):
        patients = 150 + 60 * i
        measured = torch.randn(patients, 8, generator=generator)
        noise = 0.3 * torch.randn(patients, generator=generator)
        ill = (measured @ truth + measured[:, 0] * measured[:, 1] + noise > 0).long()
        if i == 0:
            measured = torch.cat([-measured[:, :4], measured[:, 4:]], dim=1)
        held_out = patients // 3
        made.append(
            fm.Site(
                train=(measured[held_out:], ill[held_out:]),
                test=(measured[:held_out], ill[:held_out]),
                name=f"hospital {i}",
                group="reversed device" if i == 0 else "usual device",
            )
        )
    return made


class RiskModel(nn.Module):
    """A small network with dropout. fairmesh draws the masks from its own random streams, so runs can be repeated."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 2))

    def forward(self, measured: Tensor) -> Tensor:
        return self.layers(measured)


def sensitivity(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the share of ill patients that the model finds."""
    return (outputs.argmax(dim=1)[targets == 1] == 1).float().mean()


def main() -> None:
    problem = fm.Problem(RiskModel, sites(), sampling=fm.Sampling(batch=25), metrics={"sensitivity": sensitivity})
    six_bits = fm.compressors.Quantize(bits=6, block=64)
    robust = fm.ADGDA(
        primal_step=1.0, dual_step=0.1, consensus_step=0.4, compressor=six_bits, regularizer=fm.ChiSquare(0.001)
    )
    average = fm.ChocoSGD(primal_step=1.0 / 6, consensus_step=0.4, compressor=six_bits)
    for name, algorithm in (("for the average", average), ("for the worst mixture", robust)):
        result = fm.train(problem, fm.Ring(), algorithm, rounds=300)
        record = result.final[0]
        print(f"{name}: worst hospital {record['accuracy']['worst']:.1%}, mean {record['accuracy']['mean']:.1%}")
        print("   by group:", {group: f"{value:.1%}" for group, value in record["accuracy"]["groups"].items()})
    RiskModel().load_state_dict(result.state_dict())  # a plain state_dict, for use without fairmesh


if __name__ == "__main__":
    main()
