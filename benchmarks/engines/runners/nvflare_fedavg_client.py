"""A client of NVFlare's FedAvg."""

import sys

import nvflare.client as flare

from benchmarks.engines.task import Task

flare.init()
node = int(flare.system_info()["site_name"].removeprefix("site-")) - 1
task = Task(sys.argv[1])
model, batches = task.model(), task.batches(node)
while flare.is_running():
    received = flare.receive()
    if received is None or received.params is None:
        break
    model.load_state_dict(received.params)
    task.train(model, next(batches))
    flare.send(flare.FLModel(params=model.state_dict()))
