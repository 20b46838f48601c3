"""A plain run executes no code of what it does not use."""

import sys
import threading
from types import FrameType
from typing import Any

import torch

import fairmesh as fm

UNUSED = {
    "algorithms.companions.local_optimizer", "algorithms.companions.own_parts", "algorithms.companions.subgroups",
    "algorithms.companions.trainer_memory", "algorithms.subgroups", "problems.augmentation", "problems.batch_norm",
    "problems.convolutions", "problems.frozen_features", "problems.local_work", "problems.lora",
    "problems.subgroup_losses", "problems.subgroups",
}  # fmt: skip
MODULES = 82  # with a function that runs; adding a feature must not add to them


def test_logistic_run_visits_no_code_of_adapters_batch_norm_subgroups_or_trainers():
    visited = set()

    def called(frame: FrameType, event: str, argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("fairmesh.") and frame.f_code.co_name != "<module>":
            visited.add(module.removeprefix("fairmesh."))

    def run() -> None:
        labels = torch.arange(20) % 2
        sites = [fm.Site((torch.randn(20, 3) + labels[:, None], labels)) for _ in range(4)]
        fm.train(fm.Problem(torch.nn.Linear(3, 2), sites, test=sites[0].train), fm.Ring(), fm.ADGDA(), 3)

    run()  # modules that are imported now
    before = sys.getprofile()
    sys.setprofile(called)
    threading.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    assert visited & UNUSED == set()
    assert len(visited) <= MODULES
