"""Flower's FedAvg in its simulation engine. Every client takes one step in a round."""
# pyright: reportMissingImports=false
# Flower has an environment of its own.

import sys

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.engines.task import Task

task, rounds = Task(sys.argv[1]), int(sys.argv[2])
client, server = ClientApp(), ServerApp()


@client.train()
def on_train(message: Message, context: Context) -> Message:
    model = task.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    task.train(model, next(task.batches(int(context.node_config["partition-id"]))))
    metrics = MetricRecord({"num-examples": task.batch})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    model = task.model()
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=rounds)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    task.tell(model, task.size())


if __name__ == "__main__":
    run_simulation(server, client, num_supernodes=task.nodes)
