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
    from fairmesh.advice import advise as advise
    from fairmesh.algorithms import ADGDA as ADGDA
    from fairmesh.algorithms import ChocoSGD as ChocoSGD
    from fairmesh.algorithms import TrackedADGDA as TrackedADGDA
    from fairmesh.algorithms import optimizers as optimizers
    from fairmesh.algorithms import schedules as schedules
    from fairmesh.algorithms import weighting as weighting
    from fairmesh.comparisons.leave_one_out import leave_one_site_out as leave_one_site_out
    from fairmesh.comparisons.reference_models import compare_with_references as compare_with_references
    from fairmesh.compression import compressors as compressors
    from fairmesh.data.site import Site as Site
    from fairmesh.errors import BadInput as BadInput
    from fairmesh.experiment import Experiment as Experiment
    from fairmesh.experiment import load_experiment as load_experiment
    from fairmesh.experiment import run as run
    from fairmesh.inference.export import export as export
    from fairmesh.inference.predict import predict as predict
    from fairmesh.networks import roles as roles
    from fairmesh.personalization.personalize import personalize as personalize
    from fairmesh.privacy.settings import Privacy as Privacy
    from fairmesh.problems import models as models
    from fairmesh.problems.batches import Sampling as Sampling
    from fairmesh.problems.objective import Objective as Objective
    from fairmesh.problems.parts import Parts as Parts
    from fairmesh.problems.problem import Problem as Problem
    from fairmesh.regularizers.builtin import ChiSquare as ChiSquare
    from fairmesh.report.plots import plot as plot
    from fairmesh.topology import graphs as topologies
    from fairmesh.topology.graphs import Ring as Ring
    from fairmesh.training import observers as observers
    from fairmesh.training.options import Options as Options
    from fairmesh.training.result import Result as Result
    from fairmesh.training.train import train as train

    __all__ = ["topologies"]  # whose module has another name; imports "as" themselves are public for checkers

__version__ = "0.2.0"

_MODULES = {  # by their public names
    **{name: name for name in ("algorithms", "data", "errors", "evidence", "inference", "losses", "metrics")},
    **{name: name for name in ("personalization", "regularizers", "report", "testing", "trackers", "trainers")},
    "compressors": "compression.compressors",
    "models": "problems.models",
    "observers": "training.observers",
    "optimizers": "algorithms.optimizers",
    "roles": "networks.roles",
    "schedules": "algorithms.schedules",
    "topologies": "topology.graphs",
    "weighting": "algorithms.weighting",
}
_DEFINED_IN = {  # module -> the public names that it defines
    "advice": ("advise",),
    "algorithms": ("ADGDA", "ChocoSGD", "TrackedADGDA"),
    "comparisons.leave_one_out": ("leave_one_site_out",),
    "comparisons.reference_models": ("compare_with_references",),
    "data.site": ("Site",),
    "errors": ("BadInput",),
    "experiment": ("Experiment", "load_experiment", "run"),
    "inference.export": ("export",),
    "inference.predict": ("predict",),
    "personalization.personalize": ("personalize",),
    "privacy.settings": ("Privacy",),
    "problems.objective": ("Objective",),
    "problems.parts": ("Parts",),
    "problems.problem": ("Problem",),
    "problems.batches": ("Sampling",),
    "regularizers.builtin": ("ChiSquare",),
    "report.plots": ("plot",),
    "topology.graphs": ("Ring",),
    "training.options": ("Options",),
    "training.result": ("Result",),
    "training.train": ("train",),
}

if not TYPE_CHECKING:  # checkers would take any attribute for one that this function provides
    _HOMES = {name: module for module, names in _DEFINED_IN.items() for name in names}
    __all__ = sorted(["__version__", *_MODULES, *_HOMES])

    def __getattr__(name):
        """Imports a public name when it is first used, so that `import fairmesh` does not import torch."""
        if name not in __all__:
            spaces = ("algorithms", "compressors", "errors", "metrics", "trainers") if name[:1].isupper() else ()
            there = next((f"; use fm.{space}.{name}" for space in spaces if hasattr(__getattr__(space), name)), "")
            raise AttributeError(f"module 'fairmesh' has no attribute {name!r}{there}")
        module = importlib.import_module(f"fairmesh.{_MODULES.get(name) or _HOMES[name]}")
        globals()[name] = module if name in _MODULES else getattr(module, name)
        return globals()[name]

    def __dir__():
        return __all__
