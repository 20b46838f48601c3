"""Trackers, each read back by its own library."""

import fairmesh as fm
from tests import toys


def train(tracker, rounds=4, **options):
    """Returns a short run with this tracker."""
    options = {"measure_every": 2, "trace": "no"} | options
    algorithm = toys.ALGORITHMS["ad-gda"]
    return fm.train(toys.problem(4), fm.Ring(), algorithm, rounds, observers=[tracker], **options)
