"""Hypothesis draws the same examples on every machine and never fails for slowness."""

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
