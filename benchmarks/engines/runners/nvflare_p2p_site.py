"""A site of NVFlare's decentralized gradient descent."""

from pathlib import Path

import torch
from nvflare.apis.dxo import from_shareable
from nvflare.app_opt.p2p.executors.distributed_gradient_descent import DGDExecutor

from benchmarks.engines.task import Task


class RingSite(DGDExecutor):
    """Takes the rows of one site. It evaluates nothing while it trains, as no engine here does."""

    def __init__(self, folder: str, node: int):
        self.folder, self.node = folder, node
        task = Task(folder)
        super().__init__(task.model(), torch.nn.CrossEntropyLoss(), task.batches(node))  # type: ignore[arg-type]

    def _pre_algorithm_run(self, fl_ctx, shareable, abort_signal):
        given = from_shareable(shareable).data
        self._iterations, self._stepsize = given["iterations"], given["stepsize"]

    def _post_algorithm_run(self, *args, **kwargs):
        torch.save(self.model.state_dict(), Path(self.folder) / f"model-{self.node}.pt")
