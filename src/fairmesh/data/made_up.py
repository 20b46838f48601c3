"""A made-up site that fulfils a contract, to try a model on before any site has shown its data."""

import datetime
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fairmesh.data.columns import Column
from fairmesh.data.contract import Arrays, Contract
from fairmesh.data.datasets.table import Table
from fairmesh.data.partitions import Even
from fairmesh.data.site import Site

_ROWS = 20  # at least
_TRIED = "made-up rows of the contract"


def made_up_site(contract: Contract) -> Site | None:
    """Returns a site whose values lie evenly over the contract's ranges, and that has every class and category. None if
    the contract does not say what inputs or targets are. That a value is missing is an input of its own where it is
    not filled by a constant, so the number of inputs is then known only from real data."""
    target, inputs = contract.target, contract.inputs
    if not target or not (contract.columns or (inputs and inputs.shape)):
        return None
    plan = contract.plan(target)
    if any(column.open and not column.required for column in plan.columns):
        return None
    count = max(_ROWS, *(2 * len(column.classes) for column in (*contract.columns, target)))
    values = _values(target, count)
    if inputs:
        labels = [target.classes.index(value) for value in values] if target.type == "label" else []
        targets = torch.tensor(labels) if labels else torch.tensor(values, dtype=torch.float32)
        return Site((_arrays(inputs, count), targets), name=_TRIED)
    table = replace(Table(_TRIED, partition=Even(1), **contract.settings("table")), unit=None, time=None)
    columns = {column.name: np.array(_values(column, count)) for column in contract.columns}
    (site,) = table.sites_of(columns | {target.name: np.array(values)}, plan)
    return replace(site, name=_TRIED)


def _values(column: Column, count: int) -> list:
    if column.classes:
        return [column.classes[k % len(column.classes)] for k in range(count)]
    if column.type == "yes-no":
        return ["no", "yes"] * (count // 2) + ["no"] * (count % 2)
    if column.type == "date":
        return [str(datetime.date(2026, 1, 1) + datetime.timedelta(days=k)) for k in range(count)]
    low, high = _ends(column.min, column.max, column.center, column.scale)
    numbers = np.linspace(low, high, count)
    return (np.clip(np.round(numbers), np.ceil(low), np.floor(high)) if column.type == "whole" else numbers).tolist()


def _arrays(form: Arrays, count: int) -> Tensor:
    shape = (count, *(form.shape or ()))
    dtype = torch.float32 if form.dtype is None else getattr(torch, form.dtype)
    low, high = _ends(form.min, form.max, 0.5, 0.5)
    draws = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return (low + (high - low) * draws).to(dtype)


def _ends(low: float | None, high: float | None, center: float, scale: float) -> tuple[float, float]:
    """Returns a plausible range. Where the contract has no limit, values go as far as a scale from the center."""
    low = (center - scale if high is None else min(center, high) - scale) if low is None else low
    return low, max(low, center) + scale if high is None else high
