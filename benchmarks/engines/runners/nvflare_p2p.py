"""NVFlare's own peer-to-peer module: its decentralized gradient descent over a ring, in its simulator."""

import sys

import torch

from benchmarks.engines.runners.nvflare_p2p_site import RingSite
from benchmarks.engines.task import Task

if __name__ == "__main__":
    from nvflare.app_opt.p2p.controllers.dist_opt_controller import DistOptController
    from nvflare.app_opt.p2p.types import Config, Neighbor, Network, Node
    from nvflare.job_config.api import FedJob

    task, rounds = Task(sys.argv[1]), int(sys.argv[2])
    count = task.nodes
    around = [[(k - 1) % count, (k + 1) % count] for k in range(count)]
    nodes = [Node(f"site-{k + 1}", [Neighbor(f"site-{j + 1}", 1 / 3) for j in around[k]]) for k in range(count)]
    extra = {"iterations": rounds, "stepsize": task.step}
    job = FedJob(name="ring")
    job.to_server(DistOptController(config=Config(Network(nodes), extra)))
    for k in range(count):
        job.to(RingSite(str(task.folder), k), f"site-{k + 1}")
    job.simulator_run(str(task.folder / "workspace"), threads=count)
    average = task.model()
    states = [torch.load(task.folder / f"model-{k}.pt") for k in range(count)]
    average.load_state_dict({name: torch.stack([state[name] for state in states]).mean(dim=0) for name in states[0]})
    task.tell(average, 2 * task.size())
