"""What `fm.train(problem)` and an experiment without `[algorithm]` use. `python -m reproduction sites` shows why."""

from fairmesh.algorithms.tracked_ad_gda import TrackedADGDA
from fairmesh.problems.objective import Objective

ROUNDS = 600
DEFAULT_ALGORITHM = TrackedADGDA()


def default_objective() -> Objective:
    """Returns weights that follow held-out rows and discount noise."""
    return Objective(judged_on="held-out", share=0.35, discount_noise=True)
