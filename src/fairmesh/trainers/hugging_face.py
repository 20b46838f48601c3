"""A round of Hugging Face's `Trainer` as the local work of a site."""

import tempfile
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from fairmesh.errors import optional
from fairmesh.trainers.local_trainer import LocalContext, SiteData


def fit_hugging_face(module: nn.Module, data: SiteData, ctx: LocalContext, **arguments: Any) -> None:
    """Trains a model with `transformers.Trainer` for a round. The optimizer's state stays in `ctx.state`.

    It is called by a training function of yours, which may also do more:

        def train(module, data, ctx):
            fm.trainers.fit_hugging_face(module, data, ctx, max_steps=50, learning_rate=5e-5)

    Targets are handed to the model as `labels`, and a single tensor of inputs as the model's main input. fairmesh
    measures the loss at the start.

    Args:
        module: A model of transformers, or one whose `forward` takes `labels` and returns the loss first.
        data: The site's data.
        ctx: The context.
        **arguments: Those of `transformers.TrainingArguments`. A round is one epoch at a constant rate, unless they say
            otherwise; nothing is logged or saved.

    Example:
        >>> import fairmesh as fm
        >>> def train(module, data, ctx):
        ...     fm.trainers.fit_hugging_face(module, data, ctx, max_steps=20, per_device_train_batch_size=8)
        >>> fm.trainers.LocalTrainer(train).unchanged
        'refuse'

        `examples/own_training/hugging_face.py` is a whole run.
    """
    with optional("hugging-face"):
        from transformers import PrinterCallback, Trainer, TrainingArguments

    def collated(items: list[Any]) -> dict[str, Any]:
        inputs, targets = default_collate(items)
        inputs = inputs if isinstance(inputs, dict) else {getattr(module, "main_input_name", "input"): inputs}
        return {**inputs, "labels": targets}

    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        round_of = {"num_train_epochs": 1, "lr_scheduler_type": "constant", "seed": ctx.seed}
        place = {"use_cpu": ctx.device.type == "cpu", "remove_unused_columns": False, "output_dir": folder}
        settings: Any = quiet | round_of | place | arguments
        trainer = Trainer(model=module, args=TrainingArguments(**settings), train_dataset=data, data_collator=collated)
        trainer.remove_callback(PrinterCallback)
        optimizer = trainer.create_optimizer()
        if "optimizer" in ctx.state:
            optimizer.load_state_dict(ctx.state["optimizer"])
        trainer.train()
        ctx.state["optimizer"] = optimizer.state_dict()
