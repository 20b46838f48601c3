"""What `fm.train(problem)` and an experiment without `[algorithm]` use. `python -m reproduction sites` shows why."""

from fairmesh.algorithms.tracked_ad_gda import TrackedADGDA
from fairmesh.problems.objective import Objective
from fairmesh.regularizers.members import ChiSquare

ROUNDS = 600
# Its weights are softer than the default of Tracked AD-GDA itself, which suits sites that share no class.
DEFAULT_ALGORITHM = TrackedADGDA(regularizer=ChiSquare(0.2))


def default_objective() -> Objective:
    """Returns weights that follow held-out rows and discount noise."""
    return Objective(judged_on="held-out", discount_noise=True)
