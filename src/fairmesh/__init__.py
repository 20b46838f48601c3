"""fairmesh: one model that works for every site, trained with no server and little bandwidth."""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {  # public name -> module; loaded when first used, so that importing fairmesh does not import torch
    **dict.fromkeys(
        [
            "Algorithm", "ADGDA", "AFL", "ChocoSGD", "DRDSGD", "DRFA", "DSGD", "ExactMaximum", "PriorWeights",
            "ProjectedAscent", "ShadowPrice", "TrackedADGDA", "Weighting",
        ],
        "algorithms",
    ),
    **dict.fromkeys(
        ["Capped", "ChiSquare", "Custom", "KullbackLeibler", "NoRegularizer", "OwnCoordinate", "Regularizer"],
        "regularizers.members",
    ),
    "project_onto_simplex": "regularizers.simplex",
    **dict.fromkeys(
        ["Compressor", "Half", "Identity", "Quantize", "RandomK", "Sign", "Threshold", "TopK", "TopKQuantize"],
        "compression.compressors",
    ),
    **dict.fromkeys(["BadInput", "CheckpointError", "Diverged", "FairmeshError", "Interrupted"], "errors"),
    **dict.fromkeys(["Experiment", "load_experiment", "run"], "experiment"),
    "Options": "training.options",
    **dict.fromkeys(["Problem", "Sampling"], "problems.problem"),
    "Samples": "data.samples",
    "Site": "data.site",
    **dict.fromkeys(
        [
            "CIFAR10", "COOS7", "Corrupted", "Data", "Digits", "FashionMNIST", "Fewer", "HeldOut", "ImageFolder",
            "ImportedData", "MNIST", "Npz", "Table",
        ],
        "data.datasets",
    ),
    **dict.fromkeys(
        [
            "BySite", "Contrast", "Dirichlet", "Even", "Instrument", "OneClass", "Partition", "Pool", "Quantity",
            "Shards",
        ],
        "data.partitions",
    ),
    **dict.fromkeys(["FullyConnected", "ImportedModel", "Logistic", "PaperCNN"], "problems.models"),
    "picture": "report.site_pictures",
    "plot": "report.plots",
    **dict.fromkeys(
        [
            "Constant", "Geometric", "Linear", "Polynomial", "Schedule", "Staircase", "Theorem1", "Theorem2Dual",
            "Theorem2Primal",
        ],
        "algorithms.schedules",
    ),
    **dict.fromkeys(
        [
            "Changing", "Circulant", "Complete", "Edges", "ErdosRenyi", "Exponential", "Hypercube", "Matrix",
            "RandomRegular", "Ring", "Star", "Topology", "Torus",
        ],
        "topology.graphs",
    ),
    "DecodeError": "compression.decode",
    "Mixing": "topology.mixing",
    "Result": "training.result",
    "train": "training.train",
}  # fmt: skip

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fairmesh' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fairmesh.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
