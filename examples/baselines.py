"""Compares fairmesh's default with the baselines of federated learning, untuned, on the ten sites of the demo.

Six sites are small, and their scanner shifts images by a pixel. Takes a minute or two.
"""

import fairmesh as fm

SIZES = (270, 240, 210, 170, 25, 25, 25, 25, 25, 25)
ALGORITHMS = {
    "Pooled": fm.algorithms.Pooled(),
    "FedAvg": fm.algorithms.FedAvg(),
    "FedAvg, participation=0.5": fm.algorithms.FedAvg(participation=0.5),
    "FedAvg as published, primal_step=0.5": fm.algorithms.FedAvg(0.5, beta1=0.0, beta2=0.0),
    "FedProx": fm.algorithms.FedProx(),
    "q-FFL, q = 1": fm.algorithms.QFFL(q=1.0),
    "q-FFL, q = 5": fm.algorithms.QFFL(q=5.0),
    "TERM, t = 1": fm.algorithms.TERM(tilt=1.0),
    "TERM, t = 5": fm.algorithms.TERM(tilt=5.0),
    "Tracked AD-GDA with fixed weights": fm.TrackedADGDA(weighting=fm.weighting.PriorWeights()),
}


def main(rounds: int = 400, splits: int = 4) -> None:
    digits = {"nodes": 10, "odd": 6, "instrument": "shifted", "sizes": SIZES, "validation_share": 0.1}
    robust = fm.Objective(judged_on="held-out", share=0.35, discount_noise=True)
    rows = {name: (algorithm, fm.Objective()) for name, algorithm in ALGORITHMS.items()}
    print(f"accuracy in %, {rounds} rounds, mean over {splits} splits: worst site, mean over sites")
    for name, (algorithm, objective) in (rows | {"fairmesh's default": (fm.TrackedADGDA(), robust)}).items():
        result = fm.run(
            fm.Experiment(
                data=fm.data.Digits(**digits),
                algorithm=algorithm,
                rounds=rounds,
                sampling=fm.Sampling(batch=32),
                splits=splits,
                objective=objective,
                options=fm.Options(measure_every=rounds),
            )
        )
        worst, mean = (100 * sum(result.values(what)) / splits for what in ("worst", "mean"))
        print(f"{name:38s} {worst:5.1f} {mean:5.1f}", flush=True)


if __name__ == "__main__":
    main()
