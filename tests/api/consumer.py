"""A typed program that uses fairmesh as its users do. test_types.py checks it with mypy and pyright; it also runs."""

from typing import assert_type

import torch
from torch import nn

import fairmesh as fm


def problem() -> fm.Problem:
    labels = torch.arange(20) % 2
    sites = [fm.Site((torch.randn(20, 3) + labels[:, None], labels), name=f"site {i}") for i in range(4)]
    return fm.Problem(nn.Linear(3, 2), sites, sampling=fm.Sampling(batch=10), test=sites[0].train)


def algorithms() -> list[fm.algorithms.Algorithm]:
    robust = fm.ADGDA(
        primal_step=fm.schedules.Geometric(1.0, 0.998),
        dual_step=0.01,
        compressor=fm.compressors.Quantize(bits=4),
        regularizer=fm.regularizers.Capped(0.5, fm.ChiSquare(0.01)),
    )
    assert_type(robust, fm.ADGDA)
    assert_type(robust.compressor, fm.compressors.Compressor)
    tracked = fm.TrackedADGDA(weighting=fm.weighting.ShadowPrice(), compressor=fm.compressors.Sign(block=64))
    assert_type(tracked, fm.TrackedADGDA)
    return [
        robust,
        tracked,
        fm.ChocoSGD(compressor=fm.compressors.TopK(0.1), consensus_step=0.3),
        fm.algorithms.DSGD(0.1),
    ]


def experiment() -> fm.Experiment:
    data = fm.data.Fewer(fm.data.Digits(nodes=4), train=20, test=10)
    assert_type(data, fm.data.Fewer)
    topology = fm.topologies.Changing((fm.Ring(), fm.topologies.Torus(2, 2)), every=2)
    assert_type(topology, fm.topologies.Changing)
    model = fm.models.FullyConnected(hidden=8)
    return fm.Experiment(data, topology, fm.ADGDA(), rounds=2, model=model, options=fm.Options(measure_every=1))


def main() -> None:
    try:
        result = fm.train(problem(), fm.Ring(), algorithms()[0], rounds=3, seeds=range(2), measure_every=1)
    except fm.errors.FairmeshError as error:
        raise SystemExit(str(error)) from error
    assert_type(result, fm.Result)
    assert_type(result.worst, float)
    assert_type(fm.run(experiment()), fm.Result)


if __name__ == "__main__":
    main()
