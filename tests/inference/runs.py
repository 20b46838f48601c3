"""A table of three hospitals with categories and missing values, and a short run on it."""

import csv
import random
from pathlib import Path

import fairmesh as fm

HEADER = ["age", "ward", "smokes", "hospital", "outcome", "pressure"]


def write_table(path: Path, rows: int = 150, seed: int = 0, columns=HEADER) -> Path:
    draw, lines = random.Random(seed), []
    for k in range(rows):
        ward, age, smokes = draw.choice(["north", "south", "east"]), draw.gauss(55, 12), draw.choice(["yes", "no"])
        z = 0.1 * (age - 55) + (2 if ward == "south" else -1) + (1 if smokes == "yes" else -1)
        known = ["" if draw.random() < 0.1 else f"{age:.1f}", "" if draw.random() < 0.1 else ward]
        made = [*known, smokes, "ABC"[k % 3], "ill" if z > 0 else "well", f"{120 + 10 * z:.2f}"]
        lines.append(dict(zip(HEADER, made)))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)
    return path


def table_run(folder: Path, target: str, rounds: int = 60, **changes) -> Path:
    """Trains on a table and returns the run's folder."""
    other = "pressure" if target == "outcome" else "outcome"
    file = write_table(folder / "table.csv", columns=[name for name in HEADER if name != other])
    predict = "labels" if target == "outcome" else "numbers"
    data = fm.data.Table(str(file), target=target, site="hospital", predict=predict)
    fm.run(fm.Experiment(data, fm.Ring(), fm.TrackedADGDA(), rounds=rounds, **changes), out=folder / "run")
    return folder / "run"
