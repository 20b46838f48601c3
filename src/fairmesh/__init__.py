"""fairmesh: one model that works for every site, trained without a server and with little bandwidth.

Everyday names are at the top: `fm.train`, `fm.Problem`, `fm.TrackedADGDA`, `fm.Ring`, ... The rest is in namespaces:

    fm.algorithms     training algorithms, and the base class of your own
    fm.compressors    what a node sends instead of its full model
    fm.data           datasets, files of your own, and how samples are dealt to sites
    fm.errors         the errors that fairmesh raises on purpose
    fm.evidence       intervals, and verdicts on two models
    fm.losses         what training lowers: cross-entropy with class weights, focal, Dice, ...
    fm.metrics        how good a model is at a site and over sites: accuracy, AUROC, calibration, ...
    fm.inference      trained models as objects, read from a run's folder
    fm.models         models that experiment files can name
    fm.observers      what happens around the rounds: early stopping, a CSV file, and the base class of your own
    fm.optimizers     what each node makes of its gradients: momentum, AdamW
    fm.personalization  how sites get models of their own after the common training
    fm.regularizers   how far the weights of the sites may move from the prior
    fm.report         pictures of runs and of sites
    fm.roles          what the fields of an algorithm's state are
    fm.schedules      step sizes as functions of the round
    fm.testing        checks for algorithms, compressors and others that you write yourself
    fm.topologies     who talks to whom
    fm.trackers       observers that write to TensorBoard, MLflow or Weights & Biases
    fm.trainers       what training code of your own gets, and adapters for other libraries
    fm.weighting      how TrackedADGDA finds the weights of the sites

Example:
    >>> import fairmesh as fm
    >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=20)
    >>> result = fm.run(experiment)
    >>> result.worst > 0.2  # accuracy at the worst site
    True
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and editors see; at run time a name is imported when it is first used
    from fairmesh import algorithms as algorithms
    from fairmesh import data as data
    from fairmesh import errors as errors
    from fairmesh import evidence as evidence
    from fairmesh import inference as inference
    from fairmesh import losses as losses
    from fairmesh import metrics as metrics
    from fairmesh import personalization as personalization
    from fairmesh import regularizers as regularizers
    from fairmesh import report as report
    from fairmesh import testing as testing
    from fairmesh import trackers as trackers
    from fairmesh import trainers as trainers
    from fairmesh.advice import advise
    from fairmesh.algorithms import ADGDA, AFL, DRDSGD, DRFA, DSGD, ChocoSGD, Local, TrackedADGDA
    from fairmesh.algorithms import optimizers as optimizers
    from fairmesh.algorithms import schedules as schedules
    from fairmesh.algorithms import weighting as weighting
    from fairmesh.comparisons.leave_one_out import leave_one_site_out
    from fairmesh.comparisons.reference_models import compare_with_references
    from fairmesh.compression import compressors as compressors
    from fairmesh.compression.compressors import Quantize, Sign, TopK
    from fairmesh.data.site import Site
    from fairmesh.errors import BadInput, CheckpointError, Diverged, FairmeshError, Interrupted
    from fairmesh.experiment import Experiment, load_experiment, run
    from fairmesh.inference.export import export
    from fairmesh.inference.predict import predict
    from fairmesh.metrics.base import Metric
    from fairmesh.networks import roles as roles
    from fairmesh.personalization.personalize import personalize
    from fairmesh.problems import models as models
    from fairmesh.problems.objective import Objective
    from fairmesh.problems.parts import Parts
    from fairmesh.problems.problem import Problem
    from fairmesh.problems.sampling import Sampling
    from fairmesh.regularizers.builtin import ChiSquare
    from fairmesh.report.plots import plot
    from fairmesh.topology import graphs as topologies
    from fairmesh.topology.graphs import Ring
    from fairmesh.trainers.local_trainer import LocalTrainer
    from fairmesh.training import observers as observers
    from fairmesh.training.options import Options
    from fairmesh.training.result import Result
    from fairmesh.training.train import train

__version__ = "0.2.0"

__all__ = [
    "ADGDA",
    "AFL",
    "DRDSGD",
    "DRFA",
    "DSGD",
    "BadInput",
    "CheckpointError",
    "ChiSquare",
    "ChocoSGD",
    "Diverged",
    "Experiment",
    "FairmeshError",
    "Interrupted",
    "Local",
    "LocalTrainer",
    "Metric",
    "Objective",
    "Options",
    "Parts",
    "Problem",
    "Quantize",
    "Result",
    "Ring",
    "Sampling",
    "Sign",
    "Site",
    "TopK",
    "TrackedADGDA",
    "__version__",
    "advise",
    "algorithms",
    "compare_with_references",
    "compressors",
    "data",
    "errors",
    "evidence",
    "export",
    "inference",
    "leave_one_site_out",
    "load_experiment",
    "losses",
    "metrics",
    "models",
    "observers",
    "optimizers",
    "personalization",
    "personalize",
    "plot",
    "predict",
    "regularizers",
    "report",
    "roles",
    "run",
    "schedules",
    "testing",
    "topologies",
    "trackers",
    "train",
    "trainers",
    "weighting",
]

_NAMESPACES = {  # name -> module
    "algorithms": "algorithms",
    "compressors": "compression.compressors",
    "data": "data",
    "errors": "errors",
    "evidence": "evidence",
    "inference": "inference",
    "losses": "losses",
    "metrics": "metrics",
    "models": "problems.models",
    "observers": "training.observers",
    "optimizers": "algorithms.optimizers",
    "personalization": "personalization",
    "regularizers": "regularizers",
    "report": "report",
    "roles": "networks.roles",
    "schedules": "algorithms.schedules",
    "testing": "testing",
    "topologies": "topology.graphs",
    "trackers": "trackers",
    "trainers": "trainers",
    "weighting": "algorithms.weighting",
}
_HOMES = {  # name -> module that defines it
    "advise": "advice",
    "ADGDA": "algorithms",
    "AFL": "algorithms",
    "DRDSGD": "algorithms",
    "DRFA": "algorithms",
    "DSGD": "algorithms",
    "ChocoSGD": "algorithms",
    "Local": "algorithms",
    "TrackedADGDA": "algorithms",
    "Quantize": "compression.compressors",
    "Sign": "compression.compressors",
    "TopK": "compression.compressors",
    "Site": "data.site",
    "BadInput": "errors",
    "CheckpointError": "errors",
    "Diverged": "errors",
    "FairmeshError": "errors",
    "Interrupted": "errors",
    "Experiment": "experiment",
    "load_experiment": "experiment",
    "run": "experiment",
    "Metric": "metrics.base",
    "export": "inference.export",
    "predict": "inference.predict",
    "Objective": "problems.objective",
    "Parts": "problems.parts",
    "Problem": "problems.problem",
    "Sampling": "problems.sampling",
    "personalize": "personalization.personalize",
    "LocalTrainer": "trainers.local_trainer",
    "ChiSquare": "regularizers.builtin",
    "plot": "report.plots",
    "Ring": "topology.graphs",
    "Options": "training.options",
    "Result": "training.result",
    "compare_with_references": "comparisons.reference_models",
    "leave_one_site_out": "comparisons.leave_one_out",
    "train": "training.train",
}

if not TYPE_CHECKING:  # checkers would take any attribute for one that this function provides

    def __getattr__(name):
        """Imports a public name when it is first used, so that `import fairmesh` does not import torch."""
        if name in _NAMESPACES:
            found = importlib.import_module(f"fairmesh.{_NAMESPACES[name]}")
        elif name in _HOMES:
            found = getattr(importlib.import_module(f"fairmesh.{_HOMES[name]}"), name)
        else:
            raise AttributeError(f"module 'fairmesh' has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
