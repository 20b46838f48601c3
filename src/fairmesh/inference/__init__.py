"""Trained models out and in use: read from a run's folder, exported to files that need no fairmesh, and applied.

Public as `fm.inference`; `fm.export` and `fm.predict` are at the top.
"""

from fairmesh.inference.predict import Predictions
from fairmesh.inference.trained import TrainedModel, load_model, load_weights

__all__ = ["Predictions", "TrainedModel", "load_model", "load_weights"]
