"""Checks for classes written outside fairmesh: does an object keep the contract of its role? Public as `fm.testing`.

Each check returns nothing, or raises a ContractViolation, an AssertionError that says what was violated, with numbers.
The built-in algorithms, compressors, topologies, regularizers and schedules pass the same checks in fairmesh's tests.
No test framework is needed. In a test of your own, call the check and nothing else.
"""

from fairmesh.testing.algorithms import check_algorithm
from fairmesh.testing.compressors import check_compressor
from fairmesh.testing.hosts import on_hosts
from fairmesh.testing.problems import small_problem
from fairmesh.testing.regularizers import check_regularizer
from fairmesh.testing.schedules import check_schedule
from fairmesh.testing.topologies import check_topology
from fairmesh.testing.violations import ContractViolation

__all__ = [
    "ContractViolation",
    "check_algorithm",
    "check_compressor",
    "check_regularizer",
    "check_schedule",
    "check_topology",
    "on_hosts",
    "small_problem",
]
