"""A planted case: patients differ, in inputs and targets, so that a model that knows a patient looks too good."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fairmesh as fm

pytestmark = [pytest.mark.slow, pytest.mark.recorded]

SITES, UNITS, ROWS, INPUTS = 6, 7, 140, 8


def patients(generator, slope, count, rows):
    """Rows of patients, each with a shift of its inputs and of its target, and the patient of each row."""
    shift, effect = 2.0 * generator.normal(size=(count, 1, INPUTS)), 2.0 * generator.normal(size=(count, 1))
    inputs = shift + generator.normal(size=(count, rows, INPUTS))
    targets = inputs @ slope + effect + generator.normal(size=(count, rows))
    of_row = np.arange(count).repeat(rows)
    scaled = inputs.reshape(-1, INPUTS) / 2.2, targets.reshape(-1) / 7.0
    return *(part.astype(np.float32) for part in scaled), of_row


def gains(by_unit, seed=0, splits=5):
    """By how much the common model's error is below that of each site alone: on the test rows of several splits, and
    on rows of new patients."""
    generator = np.random.default_rng(seed)
    common = generator.normal(size=INPUTS)
    whole, new = [], []
    for k in range(SITES):
        slope = common + 0.2 * generator.normal(size=INPUTS)
        inputs, targets, who = patients(generator, slope, UNITS, ROWS)
        whole.append(fm.Site((inputs, targets), name=f"clinic {k}", units=who + 100 * k))
        new.append(patients(generator, slope, 300, 10)[:2])
    if not by_unit:
        whole = [replace(site, units=None) for site in whole]
    divided = [fm.data.split(whole, test_share=0.2, seed=k) for k in range(splits)]
    fresh = [[replace(site, test=rows) for site, rows in zip(sites, new)] for sites in divided]
    return tuple(_gain(every) for every in (divided, fresh))


def _gain(every):
    torch.manual_seed(0)
    problems = [fm.Problem(torch.nn.Linear(INPUTS, 1), sites, loss=fm.losses.SquaredError()) for sites in every]
    compared = fm.compare_with_references(problems, rounds=300, references=("local",))
    return np.sqrt(compared.values("local", "loss")) - np.sqrt(compared.values(metric="loss"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of targets that no model explains well
def test_rows_of_known_patients_make_every_site_look_better_alone_which_new_patients_and_units_do_not_confirm():
    by_row, on_new = gains(by_unit=False)
    assert (by_row < -0.03).all()
    assert _standard_errors(by_row - on_new) < -3  # sites look worse than alone, which is not true
    by_unit, on_new = gains(by_unit=True)
    assert (by_unit > 0).any()
    assert abs(_standard_errors(by_unit - on_new)) < 2.6  # 5 % of t with 5 degrees of freedom


def _standard_errors(differences):
    return differences.mean() / (differences.std(ddof=1) / len(differences) ** 0.5)
