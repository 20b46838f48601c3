"""Tables of three clinics with categories and missing values, from a file to predictions of new patients.

    python examples/clinic_tables.py FOLDER

writes FOLDER/patients.csv and FOLDER/new.csv (made up), trains, and prints the first predictions. Then, in FOLDER:

    fairmesh data check patients.csv --target outcome --site clinic
    fairmesh predict run new.csv
"""

import csv
import random
import sys
from pathlib import Path

import fairmesh as fm


def write_patients(path: Path, count: int, seed: int, known: bool) -> None:
    """Writes made-up patients: smokers and old people are ill more often. Some values are missing."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "ward", "smokes", "admitted", "clinic"] + ["outcome"] * known)
        for _ in range(count):
            age, smokes = draw.randint(20, 90), draw.random() < 0.4
            ill = draw.random() < (0.1 + 0.5 * smokes + 0.3 * (age > 60))
            row = [
                "" if draw.random() < 0.1 else age,
                "NA" if draw.random() < 0.1 else draw.choice(["surgery", "medicine", "children"]),
                "yes" if smokes else "no",
                f"2025-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}",
                draw.choice(["north", "south", "east"]),
            ]
            writer.writerow(row + ["ill" if ill else "well"] * known)


def main(folder: Path) -> None:
    write_patients(folder / "patients.csv", 600, 0, known=True)
    write_patients(folder / "new.csv", 20, 1, known=False)
    data = fm.data.Table(str(folder / "patients.csv"), target="outcome", site="clinic")
    result = fm.run(fm.Experiment(data, rounds=200, algorithm=fm.TrackedADGDA()), out=folder / "run", announce=print)
    print(f"accuracy at the worst clinic: {result.worst:.2f}")
    predictions = fm.predict(fm.inference.load_model(folder / "run"), folder / "new.csv")
    print("first new patients:", ", ".join(predictions.labels[:5]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
