"""Writes runs to MLflow: to a local database, or to a server."""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fairmesh.trackers.base import FinalTable, Status, TrackedReplica, Tracker

_BATCH = 1000  # metrics that MLflow takes at once
_PARAMS = 100
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_ANSWERS_WITHIN_S = 10


@dataclass
class MLflow(Tracker):
    """Writes every measurement to MLflow. `mlflow ui --backend-store-uri URI` shows them.

    MLflow's own telemetry is switched off. Only a `uri` of a server makes a connection.

    Args:
        uri: The address of a server, such as "http://localhost:5000", or another place that MLflow knows. None for the
            database `trackers/mlflow.db` in the run's folder, or `mlflow.db` here if the run has none. Default: None.
        experiment: MLflow's experiment, a group of runs. Default: "fairmesh".

    Example:
        >>> import fairmesh as fm
        >>> tracker = fm.trackers.MLflow("http://localhost:5000", experiment="hospitals")
    """

    uri: str | None = None
    experiment: str = "fairmesh"

    extra: ClassVar[str] = "mlflow"
    variables: ClassVar[Mapping[str, str]] = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(_ANSWERS_WITHIN_S),  # rounds wait for a server, so not for minutes
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }

    def load(self) -> None:
        import alembic  # noqa: F401
        import mlflow.telemetry
        import sqlalchemy  # noqa: F401

        mlflow.telemetry.set_telemetry_client()  # reads it again, if something else imported MLflow before

    def open(self, replica: TrackedReplica, folder: Path, alone: bool) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        if not self.uri:
            folder.mkdir(exist_ok=True)
        uri = self.uri or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        for name in ("mlflow.store.db.utils", "alembic"):  # which tell how they make a new database
            logging.getLogger(name).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=uri)
        replica.handle = client
        if replica.id:
            client.update_run(replica.id, status="RUNNING")
            return
        found = client.get_experiment_by_name(self.experiment)
        artifacts = (folder / "mlflow").resolve().as_uri() if uri.startswith("sqlite:") else None
        group = found.experiment_id if found else client.create_experiment(self.experiment, artifacts)
        name = replica.name if alone else f"{replica.run}: {replica.name}"
        tags = {"fairmesh.run": replica.run, "fairmesh.replica": replica.key}
        replica.id = client.create_run(group, run_name=name, tags=tags).info.run_id
        params = [Param(_key(key), str(value)[:6000]) for key, value in replica.flat_settings.items()]
        for first in range(0, len(params), _PARAMS):
            client.log_batch(replica.id, params=params[first : first + _PARAMS])

    def write(self, replica: TrackedReplica, round: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_key(name), number, now, round) for name, number in numbers.items()]
        for first in range(0, len(metrics), _BATCH):
            replica.handle.log_batch(replica.id, metrics=metrics[first : first + _BATCH])

    def write_result(
        self, replica: TrackedReplica, round: int, intervals: Mapping[str, float], table: FinalTable
    ) -> None:
        self.write(replica, round, intervals)
        replica.handle.log_text(replica.id, table.markdown() + "\n", "result.md")

    def close(self, replica: TrackedReplica, status: Status) -> None:
        replica.handle.set_terminated(replica.id, _STATUS[status])


def _key(name: str) -> str:
    """Returns a name with characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]
