"""DSGD over a ring as a plain loop over nodes."""

import copy
import sys

import torch

from benchmarks.engines.task import Task

task, rounds = Task(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
models = [task.model() for _ in range(task.nodes)]
batches = [task.batches(node) for node in range(task.nodes)]
for _ in range(rounds):
    before = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]
    for node, model in enumerate(models):
        task.train(model, next(batches[node]))
        left, right = before[node - 1], before[(node + 1) % task.nodes]
        with torch.no_grad():
            for parameter, own, a, b in zip(model.parameters(), before[node], left, right):
                parameter += (own + a + b) / 3 - own
average = copy.deepcopy(models[0])
with torch.no_grad():
    for parameters in zip(average.parameters(), *(model.parameters() for model in models)):
        parameters[0].copy_(torch.stack(parameters[1:]).mean(dim=0))
task.tell(average, 2 * task.size())
