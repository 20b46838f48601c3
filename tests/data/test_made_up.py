"""A site made up from a contract fulfils it, and has all its classes and categories."""

from dataclasses import replace

import pytest
import torch

import fairmesh as fm
from fairmesh.data.made_up import made_up_site

CLASSES = ("no", "yes", "maybe")
LABEL = fm.data.Column("ill", "label", classes=CLASSES)
COLUMNS = (
    fm.data.Column("age", "whole", min=18, max=110, center=54.0, scale=20.0),
    fm.data.Column("level", min=0.2),
    fm.data.Column("change", max=-3.0),
    fm.data.Column("ward", "category", classes=tuple(f"ward {k}" for k in range(30))),
    fm.data.Column("smokes", "yes-no"),
    fm.data.Column("since", "date", center=20_000.0, scale=100.0),
    fm.data.Column("weight", fill=70.0),
)
INPUTS = 1 + 1 + 1 + 31 + 1 + 1 + 1  # of categories one each, and one for others


@pytest.mark.parametrize("standardize", [False, True])
def test_rows_of_a_table_have_every_class_and_category_and_the_inputs_of_a_real_one(standardize):
    site = made_up_site(fm.data.Contract(COLUMNS if not standardize else COLUMNS[:-1], LABEL, standardize=standardize))
    inputs, targets = site.train
    assert inputs.shape[1] == INPUTS - standardize
    assert targets.unique().tolist() == [0, 1, 2]
    assert bool(inputs.isfinite().all())


def test_rows_with_numbers_to_predict_lie_in_their_range():
    _, targets = made_up_site(fm.data.Contract(COLUMNS, fm.data.Column("stay", "whole", min=1, max=9))).train
    assert targets.is_floating_point()
    assert (float(targets.min()) >= 1, float(targets.max()) <= 9) == (True, True)


@pytest.mark.parametrize("dtype", ["float32", "uint8", None])
def test_arrays_have_the_shape_type_and_range(dtype):
    contract = fm.data.Contract(target=LABEL, inputs=fm.data.Arrays((3, 8), dtype, min=10, max=20))
    site = made_up_site(contract)
    contract.checked([site])
    assert (site.train[0].shape[1:], site.train[0].dtype) == ((3, 8), getattr(torch, dtype or "float32"))


def test_contract_that_leaves_inputs_or_targets_open_has_no_made_up_rows():
    missing = replace(COLUMNS[0], fill="mean")  # an input of its own, if some site has missing values
    for contract in (
        fm.data.Contract(COLUMNS),
        fm.data.Contract(target=LABEL),
        fm.data.Contract(target=LABEL, inputs=fm.data.Arrays(dtype="uint8")),
        fm.data.Contract((missing,), LABEL),
    ):
        assert made_up_site(contract) is None


def test_made_up_rows_need_no_unit_and_no_time():
    assert made_up_site(fm.data.Contract(COLUMNS, LABEL, unit="patient_id", time="date")).units is None
