"""What the settings of algorithms and weightings declare of themselves, besides the ranges in `config/ranges.py`."""

from typing import Annotated

from fairmesh.config.ranges import Within

EXACT = {"exact": True}  # metadata of a number that replicas stack in float64 in every run
MEASURED = {"measured": True}  # of a number that the run measures before round 0 if it is None
STRUCTURAL = {"structural": True}  # of a number on which shapes depend: equal in all replicas of a run
Emphasis = Annotated[float, Within("[0, inf)", "0 minimises the average loss")]
