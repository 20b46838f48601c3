"""NVFlare's FedAvg in its simulator. Every client takes one step in a round."""

import sys
from pathlib import Path

import torch

from benchmarks.engines.task import Task

if __name__ == "__main__":
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    task, rounds = Task(sys.argv[1]), int(sys.argv[2])
    recipe = FedAvgRecipe(
        name="star", min_clients=task.nodes, num_rounds=rounds, model=task.model(),
        train_script=str(Path(__file__).with_name("nvflare_fedavg_client.py")), train_args=str(task.folder),
    )  # fmt: skip
    recipe.execute(SimEnv(num_clients=task.nodes, workspace_root=str(task.folder / "workspace")))
    model = task.model()
    saved = next((task.folder / "workspace").rglob("FL_global_model.pt"))
    model.load_state_dict(torch.load(saved)["model"])
    task.tell(model, task.size())
