"""A table of patients at 60 unequal hospitals, several rows per patient, from the check of the data to predictions:
data.md's own example file, and nothing named that it does not name."""

import json
import re
import shutil

import pytest

from tests.journeys.patients import COLUMNS, patients, write_table
from tests.journeys.user import User, shown


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """A folder in which the table was checked, trained on and reported, with what was printed."""
    user = User(tmp_path_factory.mktemp("sixty"))
    rows = patients(60)
    write_table(user.folder / "patients.csv", COLUMNS, rows)
    write_table(user.folder / "new.csv", COLUMNS[2:5], [row[2:5] for row in rows[:50]])
    user.writes(
        "patients.toml",
        shown(
            "docs/howto/data.md",
            "toml",
            'file = "patients.csv"\ntarget = "outcome"       #',
            {'exclude = ["visit_id"]': "exclude = []"},
        ),
    )
    seen = {
        "check of the table": user.runs("fairmesh data check patients.csv --target outcome --site hospital", code=1),
        "check": user.runs("fairmesh data check patients.toml"),
        "advice": user.runs("fairmesh advise patients.toml"),
        "run": user.runs("fairmesh run patients.toml"),
        "report": user.runs("fairmesh report runs/patients"),
    }
    return user, seen


@pytest.mark.slow
def test_check_names_the_identifier_and_finds_no_error_without_it(walked):
    _, seen = walked
    assert "patient_id" in seen["check of the table"]
    assert "exclude" in seen["check of the table"]
    assert "error:" not in seen["check"]  # rows that are equal by chance are no errors


@pytest.mark.slow
def test_run_prints_what_fits_on_a_screen(walked):
    _, seen = walked
    for what in ("run", "check", "advice"):
        lines = seen[what].splitlines()
        assert len(lines) < 60, f"{what} prints {len(lines)} lines"
        assert all(len(line) < 1500 for line in lines), max(lines, key=len)


@pytest.mark.slow
def test_the_mean_lies_inside_its_interval_and_the_worst_site_has_enough_rows(walked):
    _, seen = walked
    means = re.findall(r"([\d.]+) % \(([\d.]+) to ([\d.]+)\)", seen["run"])
    assert means
    assert all(float(low) < float(value) < float(high) for value, low, high in means), means
    worst_low, worst_high = (float(edge) for edge in means[0][1:])
    assert worst_high - worst_low < 65, means[0]  # that of one or two rows would be wider
    named = re.search(r"the worst sites by accuracy are [^(]*\(([\d.]+) %\)", seen["run"])
    assert named
    assert named[1] == means[0][0]  # the sentence and the table are of one site
    assert "train longer" not in seen["run"]


@pytest.mark.slow
def test_report_has_every_site(walked):
    user, _ = walked
    page = (user.folder / "runs" / "patients" / "report.html").read_text()
    told = json.loads((user.folder / "runs" / "patients" / "report.json").read_text())["runs"][0]
    worst = told["sites"][told["worst_first"][0]]
    assert f"worst at {worst['name']}:" in told["sentence"]
    assert worst["metrics"]["accuracy"] == pytest.approx(told["intervals"]["worst"]["value"])
    assert all(f"hospital {k + 1}" in page for k in range(60))


@pytest.mark.slow
def test_the_moved_run_predicts_and_reports(walked):
    user, _ = walked
    moved = shutil.copytree(user.folder / "runs" / "patients", user.folder / "archive" / "2026" / "patients")
    user.runs(f"fairmesh predict {moved} new.csv --out predicted.csv")
    assert len((user.folder / "predicted.csv").read_text().splitlines()) == 51
    user.runs(f"fairmesh report {moved} --out elsewhere")
    assert json.loads((moved / "summary.json").read_text())["rounds"] == 600


@pytest.fixture(scope="module")
def in_one_command(tmp_path_factory):
    """A folder with the same hospitals as one table and as one file each, which were trained on without a file."""
    user = User(tmp_path_factory.mktemp("one-command"))
    rows = patients(60)
    write_table(user.folder / "patients.csv", COLUMNS, rows)
    for k in range(60):
        here = [[*row[:1], *row[2:]] for row in rows if row[1] == f"hospital {k + 1}"]
        columns = [COLUMNS[0], *COLUMNS[2:]]
        if k % 7 == 3:  # these do not measure creatinine
            columns, here = [*columns[:2], *columns[3:]], [[*row[:2], *row[3:]] for row in here]
        write_table(user.folder / "hospitals" / f"hospital {k + 1}.csv", columns, here)
    seen = {
        "table with identifier": user.runs("fairmesh run patients.csv --target outcome --site hospital", code=2),
        "table": user.runs("fairmesh run patients.csv --target outcome --site hospital --without patient_id"),
        "files": user.runs("fairmesh run hospitals --target outcome --without patient_id"),
        "number": user.runs(
            "fairmesh run patients.csv --target age --site hospital --without patient_id --out x", code=2
        ),
    }
    return user, seen


@pytest.mark.slow
def test_a_table_trains_in_one_command_but_not_on_an_identifier(in_one_command):
    user, seen = in_one_command
    assert "--without patient_id" in seen["table with identifier"]
    assert "runs/patients/patients.toml" in seen["table"]
    assert len(seen["table"].splitlines()) < 60
    user.runs("fairmesh run runs/patients/patients.toml --out again")
    told = [json.loads((user.folder / name / "summary.json").read_text()) for name in ("runs/patients", "again")]
    assert told[0]["sites"] == told[1]["sites"]
    assert "--numbers" in seen["number"]
    user.runs("fairmesh run patients.csv --target age --site hospital --without patient_id --numbers --out numbers")


@pytest.mark.slow
def test_files_of_sixty_hospitals_train_though_some_lack_a_column(in_one_command):
    user, seen = in_one_command
    assert "creatinine at hospital 11, hospital 18" in seen["files"]
    made = json.loads((user.folder / "runs" / "hospitals" / "preprocessing.json").read_text())
    assert "creatinine missing" in made["inputs"]
    write_table(user.folder / "new.csv", COLUMNS[2:5], [[50, 1.1, "icu"], [50, "", "icu"]])
    user.runs("fairmesh predict runs/hospitals new.csv --out predicted.csv")
    assert len((user.folder / "predicted.csv").read_text().splitlines()) == 3
