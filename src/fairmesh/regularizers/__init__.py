"""[regularizer] Which weights of the sites the adversary may choose, and its exact worst case. `fm.regularizers`.

The objective is g(theta, lambda) = (1/n) sum_i lambda_i f_i(theta) + alpha r(lambda), with r concave. (The paper prints
chi-square and KL with the convex sign; r is their negative.)
"""

from fairmesh.regularizers.base import Cappable, Priced, Regularizer
from fairmesh.regularizers.builtin import Capped, ChiSquare, Custom, KullbackLeibler, NoRegularizer, OwnCoordinate
from fairmesh.regularizers.simplex import project_onto_simplex

__all__ = [
    "Cappable",
    "Capped",
    "ChiSquare",
    "Custom",
    "KullbackLeibler",
    "NoRegularizer",
    "OwnCoordinate",
    "Priced",
    "Regularizer",
    "project_onto_simplex",
]
