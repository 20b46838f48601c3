"""Writes runs for Weights & Biases, without a connection."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fairmesh.trackers.base import FinalTable, Status, TrackedReplica, Tracker


@dataclass
class WandB(Tracker):
    """Writes every measurement to files of Weights & Biases. `wandb sync FOLDER/wandb/offline-run-*` uploads them.

    Nothing is sent: no measurement, no report of errors, and nothing about this machine, its packages or its code.

    Args:
        folder: The folder. None for `trackers` in the run's folder, or the current one if the run has none. Default:
            None.
        project: The project that the runs belong to. Default: "fairmesh".

    Example:
        >>> import fairmesh as fm
        >>> tracker = fm.trackers.WandB("tracked", project="hospitals")
    """

    folder: str | None = None
    project: str = "fairmesh"

    extra: ClassVar[str] = "wandb"
    variables: ClassVar[Mapping[str, str]] = {"WANDB_ERROR_REPORTING": "false"}

    def load(self) -> None:
        import wandb  # noqa: F401

    def open(self, replica: TrackedReplica, folder: Path, alone: bool) -> None:
        import wandb

        base = Path(self.folder or folder)
        base.mkdir(parents=True, exist_ok=True)
        replica.id = replica.id or uuid.uuid4().hex[:16]
        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, save_code=False,
            x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        replica.handle = wandb.init(
            mode="offline",
            dir=base,
            project=self.project,
            id=replica.id,
            name=replica.name if alone else f"{replica.run}: {replica.name}",
            group=None if alone else replica.run,
            config=replica.settings,
            reinit="create_new",
            settings=quiet,
        )
        replica.handle.define_metric("*", step_metric="round")

    def write(self, replica: TrackedReplica, round: int, numbers: Mapping[str, float]) -> None:
        replica.handle.log({"round": round, **numbers}, step=round, commit=True)

    def write_result(
        self, replica: TrackedReplica, round: int, intervals: Mapping[str, float], table: FinalTable
    ) -> None:
        import wandb

        result = wandb.Table(columns=[*table.columns], data=table.rows)
        replica.handle.summary.update({**intervals, "result": result})

    def close(self, replica: TrackedReplica, status: Status) -> None:
        replica.handle.finish(exit_code=0 if status == "finished" else 1)
