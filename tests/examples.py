"""How many examples hypothesis tries: few in the quick run, many in the thorough one of `make test-all`."""

import os

from hypothesis import HealthCheck, settings

THOROUGH = os.environ.get("FAIRMESH_TESTS") == "thorough"
QUICK, TIMES = 10, 12  # examples of a property in the quick run, and how many times as many in the thorough one


def examples(quick: int = QUICK) -> settings:
    """Settings for a property whose examples cost more, or tell more, than those of the others."""
    return settings(max_examples=quick * (TIMES if THOROUGH else 1))


def load_profile() -> None:
    """The same examples on every machine, whose slowness is no failure."""
    settings.register_profile(
        "fairmesh",
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=QUICK * (TIMES if THOROUGH else 1),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("fairmesh")
