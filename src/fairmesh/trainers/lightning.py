"""A round of Lightning's `Trainer` as the local work of a site."""

import logging
import warnings
from typing import Any, cast

from torch import nn
from torch.utils.data import DataLoader

from fairmesh.errors import optional
from fairmesh.trainers.local_trainer import LocalContext, SiteData


def fit_lightning(
    module: nn.Module, data: SiteData, ctx: LocalContext, batch_size: int = 32, workers: int = 0, **arguments: Any
) -> None:
    """Trains a LightningModule with `lightning.Trainer` for a round.

    The states of its optimizers and schedulers stay in `ctx.state`.

    It is called by a training function of yours, which may also do more:

        def train(module, data, ctx):
            fm.trainers.fit_lightning(module, data, ctx, max_epochs=2, gradient_clip_val=1.0)

    `training_step` gets batches (inputs, targets). fairmesh measures the loss at the start.

    Args:
        module: A LightningModule.
        data: The site's data.
        ctx: The context.
        batch_size: Samples per batch. Default: 32.
        workers: Processes that read the data. Default: 0.
        **arguments: Those of `lightning.Trainer`. A round is one epoch unless they say otherwise; nothing is logged or
            saved.

    Example:
        >>> import fairmesh as fm
        >>> def train(module, data, ctx):
        ...     fm.trainers.fit_lightning(module, data, ctx, batch_size=16, max_steps=20)
        >>> fm.trainers.LocalTrainer(train).unchanged
        'refuse'

        `examples/own_training/lightning_module.py` is a whole run.
    """
    with optional("lightning"):
        from lightning.fabric.utilities.warnings import PossibleUserWarning
        from lightning.pytorch import Callback, Trainer

    class Memory(Callback):
        """Gives optimizers and schedulers their states of the round before, and keeps those after this one."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for name, parts in _stateful(trainer).items():
                for part, state in zip(parts, ctx.state.get(name, [])):
                    part.load_state_dict(state)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            ctx.state.update(
                {name: [part.state_dict() for part in parts] for name, parts in _stateful(trainer).items()}
            )

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    place = {"accelerator": "gpu" if ctx.device.type == "cuda" else "cpu", "devices": 1}
    settings: dict[str, Any] = {"max_epochs": 1, **quiet, **place, **arguments}
    chatty = logging.getLogger("lightning.pytorch")  # tells about the machine in every round
    level = chatty.level
    try:
        chatty.setLevel(max(level, logging.WARNING))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            trainer = Trainer(**settings)
            trainer.callbacks.insert(0, Memory())
            trainer.fit(cast(Any, module), DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=workers))
    finally:
        chatty.setLevel(level)


def _stateful(trainer: Any) -> dict[str, list[Any]]:
    """Returns what has a state, by its name in `ctx.state`."""
    return {"optimizers": trainer.optimizers, "schedulers": [one.scheduler for one in trainer.lr_scheduler_configs]}
