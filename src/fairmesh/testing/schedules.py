"""The contract of a schedule."""

import torch

from fairmesh.algorithms.schedules import Schedule
from fairmesh.testing.violations import checked_settings, require, require_close, running


def check_schedule(schedule: Schedule, rounds: int = 300) -> None:
    """Checks that a schedule gives a step size for every round.

    1. It is a frozen dataclass that survives being written to TOML and read again.
    2. `at` turns a tensor of rounds of any shape into their step sizes, finite, not negative and in float64.
    3. A round's step size is the same whether rounds are asked for one by one or many at once.

    Args:
        schedule: The object to check.
        rounds: How many rounds to look at. Default: 300.

    Raises:
        ContractViolation: An AssertionError that says what was violated, with numbers.

    Example:
        >>> import fairmesh as fm
        >>> fm.testing.check_schedule(fm.schedules.Geometric(0.1, 0.99))
    """
    schedule = checked_settings(schedule, Schedule)
    index = torch.arange(rounds)
    with running("at(rounds)"):
        steps = schedule.at(index)
        stacked = schedule.at(index[:, None, None, None])
        alone = torch.stack([schedule.at(torch.tensor(t)) for t in range(0, rounds, 7)])
    require(steps.dtype == torch.float64, f"steps are {str(steps.dtype)[6:]}, not float64; use round_index.double()")
    require(steps.shape == index.shape, f"{rounds} rounds get steps of shape {tuple(steps.shape)}")
    require(stacked.shape == (rounds, 1, 1, 1), f"rounds (n, 1, 1, 1) get steps of shape {tuple(stacked.shape)}")
    bad = ~(steps.isfinite() & (steps >= 0))
    require(not bad.any(), f"the step of round {int(bad.long().argmax())} is {float(steps[bad.long().argmax()]):.3g}")
    require_close(stacked.flatten(), steps, 1e-12 * float(steps.max()), "steps of rounds in another shape")
    require_close(alone, steps[::7], 1e-12 * float(steps.max()), "steps of rounds one by one")
