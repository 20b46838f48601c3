"""fairmesh: one model that works for every site, trained with no server and little bandwidth."""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {  # public name -> module; loaded when first used, so that importing fairmesh does not import torch
    **dict.fromkeys(
        [
            "Algorithm", "ADGDA", "AFL", "Ascent", "ChocoSGD", "DRDSGD", "DRFA", "DSGD", "Fixed", "Maximum", "Price",
            "TrackedADGDA", "Weighing",
        ],
        "algorithms",
    ),
    **dict.fromkeys(
        ["Capped", "ChiSquare", "Custom", "KullbackLeibler", "NoRegularizer", "OwnCoordinate", "Regularizer"],
        "ambiguity",
    ),
    "project_onto_simplex": "simplex",
    **dict.fromkeys(
        ["Compressor", "Half", "Identity", "Quantize", "RandomK", "Sign", "Threshold", "TopK", "TopKQuantize"],
        "compression",
    ),
    **dict.fromkeys(["BadInput", "CheckpointError", "Diverged", "FairmeshError", "Interrupted"], "errors"),
    **dict.fromkeys(["Experiment", "load_experiment", "run"], "experiment"),
    "Options": "training",
    **dict.fromkeys(["Problem", "Samples", "Sampling", "Site"], "problems.base"),
    **dict.fromkeys(
        [
            "CIFAR10", "COOS7", "Corrupted", "Data", "Digits", "FashionMNIST", "Fewer", "HeldOut", "ImageFolder",
            "ImportedData", "MNIST", "Npz", "Table",
        ],
        "problems.datasets",
    ),
    **dict.fromkeys(
        [
            "BySite", "Contrast", "Dirichlet", "Even", "Instrument", "OneClass", "Partition", "Pool", "Quantity",
            "Shards",
        ],
        "problems.partitions",
    ),
    **dict.fromkeys(["FullyConnected", "ImportedModel", "Logistic", "PaperCNN"], "problems.models"),
    "picture": "holdings",
    "plot": "report",
    **dict.fromkeys(
        [
            "Constant", "Geometric", "Linear", "Polynomial", "Schedule", "Staircase", "Theorem1", "Theorem2Dual",
            "Theorem2Primal",
        ],
        "schedules",
    ),
    **dict.fromkeys(
        [
            "Changing", "Circulant", "Complete", "Edges", "ErdosRenyi", "Exponential", "Hypercube", "Matrix",
            "RandomRegular", "Ring", "Star", "Topology", "Torus",
        ],
        "topology",
    ),
    "DecodeError": "codec",
    "Mixing": "mixing",
    "Result": "result",
    "train": "recording",
}  # fmt: skip

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fairmesh' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fairmesh.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
