"""A planted case: patients differ, in inputs and targets, so that a model that knows a patient looks too good."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fairmesh as fm

pytestmark = [pytest.mark.slow, pytest.mark.recorded]

SITES, UNITS, ROWS, INPUTS = 6, 7, 140, 10
SLOPE = 0.3 * np.random.default_rng(99).normal(size=INPUTS)


def patients(generator, count, rows):
    """Rows of patients, each with a shift of its inputs and of its target, and the patient of each row."""
    shift, effect = generator.normal(size=(count, 1, INPUTS)), 1.5 * generator.normal(size=(count, 1))
    inputs = shift + 0.5 * generator.normal(size=(count, rows, INPUTS))
    targets = inputs @ SLOPE + effect + 0.5 * generator.normal(size=(count, rows))
    flat = inputs.reshape(-1, INPUTS), targets.reshape(-1, 1)
    return tuple(part.astype(np.float32) for part in flat), np.arange(count).repeat(rows)


def clinics(generator):
    """Sites with all their rows to train on, named by unit."""
    made = [patients(generator, UNITS, ROWS) for _ in range(SITES)]
    return [fm.Site(rows, name=f"clinic {k}", units=who + 100 * k) for k, (rows, who) in enumerate(made)]


def versus_alone(every_split):
    """How the common model compares with each site alone."""
    torch.manual_seed(0)
    problems = [fm.Problem(torch.nn.Linear(INPUTS, 1), sites, fm.losses.SquaredError()) for sites in every_split]
    return fm.compare_with_references(problems, rounds=300, references=("local",)).versus_alone()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of targets that no model explains well
@pytest.mark.parametrize("seed", [0, 1])
def test_verdict_by_unit_agrees_with_that_on_new_units_and_the_one_by_row_does_not(seed):
    generator = np.random.default_rng(seed)
    whole = clinics(generator)
    of_rows = [replace(site, units=None) for site in whole]
    new = [replace(site, test=patients(generator, 200, 20)[0]) for site in of_rows]
    by_row, by_unit = (versus_alone([fm.data.split(sites, seed=k) for k in range(5)]) for sites in (of_rows, whole))
    on_new = versus_alone([new])
    assert on_new.mean.verdict == "better"
    assert by_row.count("worse") == SITES, "each site seems to do better alone, for it knows its patients"
    assert by_row.mean.verdict == "worse"
    low, high = by_unit.mean.interval
    assert low < on_new.mean.difference < high
    contradicted = {("better", "worse"), ("worse", "better")}
    assert not contradicted & {(a.verdict, b.verdict) for a, b in zip(by_unit.at_sites, on_new.at_sites)}
    assert by_unit.count("worse") == 0
