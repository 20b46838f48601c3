"""Trackers: observers that write a run's measurements to TensorBoard, MLflow or Weights & Biases."""

from collections.abc import Sequence

from fairmesh.config.tables import register
from fairmesh.errors import BadInput, nearest
from fairmesh.trackers.base import FinalTable, TrackedReplica, Tracker
from fairmesh.trackers.mlflow import MLflow
from fairmesh.trackers.tensorboard import TensorBoard
from fairmesh.trackers.wandb import WandB
from fairmesh.training.observers import Observer

__all__ = ["FinalTable", "MLflow", "TensorBoard", "TrackedReplica", "Tracker", "WandB"]

_KINDS = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}

register(Observer, _KINDS)


def trackers_of(words: Sequence[str]) -> list[Tracker]:
    """Returns the trackers of a command line, ready to be used.

    Args:
        words: Each "name", or "name=place": a folder, or the address of a server.

    Raises:
        BadInput: There is no such tracker, or its library is not installed.
    """
    made: list[Tracker] = []
    for word in words:
        name, _, place = word.partition("=")
        if name not in _KINDS:
            raise BadInput(f"--track {word}: there is no tracker {name!r}{nearest(name, _KINDS)}")
        made.append(_KINDS[name](*([place] if place else [])))
        made[-1].before_run()
    return made
