"""Hypothesis draws the same examples on every machine and never fails for slowness."""

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fairmesh",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fairmesh")


@pytest.fixture(autouse=True)
def one_thread():
    """Operations on a few hundred numbers only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
