"""Tables of patients as hospitals have them: unequal sites, several rows per patient, gaps, categories."""

import csv
import math
import random
from pathlib import Path

COLUMNS = ["patient_id", "hospital", "age", "creatinine", "ward", "outcome"]


def patients(hospitals: int, seed: int = 1) -> list[list[object]]:
    """Returns the rows of a table; hospitals have 4 to 400 of them."""
    draw = random.Random(seed)
    rows: list[list[object]] = []
    number = 0
    for hospital in range(hospitals):
        left = max(4, round(math.exp(draw.uniform(math.log(8), math.log(400)))))
        shift = draw.gauss(0, 1)
        while left > 0:
            number += 1
            age = round(min(100, max(18, draw.gauss(55 + 4 * shift, 15))))
            for _ in range(min(left, draw.choice([1, 1, 2, 3]))):
                creatinine = round(max(0.3, draw.lognormvariate(0.1 + 0.1 * shift, 0.4)), 2)
                ward = draw.choice(["icu", "north", "south"])
                risk = 0.05 * (age - 55) + 1.5 * (creatinine - 1.2) + 0.8 * (ward == "icu") + draw.gauss(0, 1)
                seen: object = "" if draw.random() < 0.05 else creatinine
                ill = "yes" if risk - 0.5 * shift > 0 else "no"
                rows.append([f"P{number:05d}", f"hospital {hospital + 1}", age, seen, ward, ill])
                left -= 1
    return rows


def write_table(path: Path, header: list[str], rows: list[list[object]]) -> None:
    """Writes a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_ill(path: Path, rows: int, seed: int) -> None:
    """Writes a table as the contract of deploy.md's risk.toml wants it, with a column that nobody asked for."""
    draw = random.Random(seed)
    shift = draw.gauss(0, 1)
    made: list[list[object]] = []
    for number in range(rows):
        age = round(min(109, max(18, draw.gauss(54 + 5 * shift, 15))))
        creatinine = round(min(14.0, max(0.3, draw.lognormvariate(0.1 + 0.1 * shift, 0.4))), 2)
        risk = 0.06 * (age - 54) + 1.5 * (creatinine - 1.1) + draw.gauss(0, 1)
        made.append([f"{seed}-{number}", age, creatinine, "yes" if risk > 0 else "no"])
    write_table(path, ["patient_id", "age", "creatinine", "ill"], made)
