"""Six algorithms on one problem: ten sites, two of which use a scanner that mirrors the digits.

`python examples/rivals.py [picture.png]` prints a table and, if asked, draws the curves. The step sizes are reasonable
but not tuned, so the table shows how to compare algorithms, not which one is best.
"""

import sys

import fairmesh as fm

ROUNDS = 400


def main() -> None:
    experiment = fm.Experiment(
        data=fm.data.Digits(split="instrument"),
        topology=fm.topologies.Circulant((1, 2)),
        algorithm=fm.algorithms.DSGD(),
        rounds=ROUNDS,
        sampling=fm.Sampling(batch=20),
    )
    problem = experiment.problem()
    shrink = 0.995
    four_bits = fm.compressors.Quantize(bits=4, block=128)
    robust = fm.ADGDA(
        fm.schedules.Geometric(10.0, shrink),
        0.02,
        consensus_step=0.5,
        compressor=four_bits,
        regularizer=fm.ChiSquare(0.003),
    )
    algorithms = {
        "AD-GDA, 4 bit": robust,
        "CHOCO-SGD, 4 bit": fm.ChocoSGD(fm.schedules.Geometric(1.0, shrink), consensus_step=0.5, compressor=four_bits),
        "DSGD": fm.algorithms.DSGD(fm.schedules.Geometric(1.0, shrink)),
        "DR-DSGD": fm.algorithms.DRDSGD(fm.schedules.Geometric(2.0, shrink), temperature=3.0),
        "AFL (server)": fm.algorithms.AFL(fm.schedules.Geometric(1.0, shrink), dual_step=0.02),
        "DRFA (server)": fm.algorithms.DRFA(fm.schedules.Geometric(0.2, shrink), dual_step=0.005, local_steps=5),
    }
    results = []
    print(f"{'':18}{'worst site':>12}{'mean':>8}{'busiest node sent':>20}")
    for name, algorithm in algorithms.items():
        result = fm.train(problem, experiment.topology, algorithm, ROUNDS, seeds=(0, 1, 2), measure_every=20)
        sent = result.final[0]["bytes_busiest_node"] / 1e6
        mean = sum(result.values("mean")) / 3
        print(f"{name:18}{result.worst:12.1%}{mean:8.1%}{sent:17.2f} MB")
        results.append(result)
    if len(sys.argv) > 1:
        fm.plot(results, sys.argv[1])


if __name__ == "__main__":
    main()
