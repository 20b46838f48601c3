"""The algorithms of a sweep: one for every combination of its values."""

import itertools
from collections.abc import Collection, Mapping, Sequence

from fairmesh.algorithms.base import Algorithm
from fairmesh.config.overrides import put
from fairmesh.config.tables import from_table, to_table
from fairmesh.errors import BadInput


def swept(algorithm: Algorithm, sweep: Mapping[str, Sequence[float]], sections: Collection[str]) -> list[Algorithm]:
    """Returns the algorithm with every combination of values, by the dotted names of its numbers. Refuses a number of
    another of an experiment's sections."""
    for path in sweep:
        section = path.split(".")[0]
        if section != "algorithm" and section in sections:
            raise BadInput(
                f"sweep: {path} is no number of the algorithm, and only these can be swept; for other settings, run "
                f"the experiment once for each value, with --set {path}=VALUE; for several splits of the data, write "
                "`splits = 10` at the top of the file"
            )
    tables = []
    for values in itertools.product(*sweep.values()):
        tables.append(to_table(algorithm))
        for path, value in zip(sweep, values):
            put(tables[-1], path.removeprefix("algorithm."), value, "sweep")
    return [from_table(Algorithm, table, "algorithm") for table in tables]
