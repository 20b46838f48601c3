"""How much traffic local steps save: the worst site and the mean against rounds and gradient evaluations.

`python -m reproduction.local_steps --write reproduction/results/local_steps.json` takes about half an hour on one core;
`--show` prints the table of the recorded runs. Ten sites hold the digits: either two of them have another instrument,
or each has one class. Tracked AD-GDA runs with its defaults, on batches of its own in every local step. A round costs
the same bytes whatever the number of local steps.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import fairmesh as fm
from fairmesh.training.options import Options

RESULTS = Path(__file__).parent / "results" / "local_steps.json"
PROBLEMS = {
    "two sites with another instrument": fm.data.Digits(nodes=10, odd=2),
    "one class per site": fm.data.Digits(nodes=10, split="class"),
}
CASES = {1: (40, 75, 150, 300), 5: (40, 75, 150), 20: (40, 75, 150), 100: (20, 40, 75)}  # local steps -> rounds
SEEDS = (0, 1, 2, 3, 4)  # each with its own placement


def measured(problem: str, local_steps: int, rounds: int, max_drift: float) -> dict[str, Any]:
    """Runs one case and returns its row."""
    experiment = fm.Experiment(
        PROBLEMS[problem],
        fm.Ring(),
        fm.TrackedADGDA(local_steps=local_steps, max_drift=max_drift),
        rounds=rounds,
        seeds=SEEDS,
        placements="by-seed",
        options=Options(measure_every=rounds),
    )
    result = fm.run(experiment)
    probes = 1 if local_steps > 1 and max_drift > 0 else 0  # the first batch again
    return {
        "problem": problem,
        "local_steps": local_steps,
        "rounds": rounds,
        "max_drift": max_drift,
        "gradients": rounds * (local_steps + probes),
        "worst": result.values("worst"),
        "mean": result.values("mean"),
        "kilobytes": [record["bytes_busiest_node"] / 1000 for record in result.final],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table in Markdown."""
    lines = [
        "| problem | local steps | rounds | gradients | busiest node sent, kB | worst site, % | mean, % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        steps = f"{row['local_steps']}" + ("" if row["max_drift"] > 0 else ", full length")
        worst, average = ([100 * value for value in row[name]] for name in ("worst", "mean"))
        lines.append(
            f"| {row['problem']} | {steps} | {row['rounds']} | {row['gradients']:,} | {mean(row['kilobytes']):.0f} "
            f"| {mean(worst):.1f} ± {stdev(worst):.1f} | {mean(average):.1f} ± {stdev(average):.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, help="run every case and write the rows here")
    what.add_argument("--show", action="store_true", help="print the table of the recorded rows")
    given = parser.parse_args()
    if given.show:
        print(table(json.loads(RESULTS.read_text())))
        return
    rows = []
    for problem in PROBLEMS:
        cases = [(steps, rounds, 2.0) for steps, every in CASES.items() for rounds in every]
        for steps, rounds, max_drift in [*cases, (20, 75, 0.0)]:
            rows.append(measured(problem, steps, rounds, max_drift))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            given.write.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
