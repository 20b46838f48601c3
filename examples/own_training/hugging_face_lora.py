"""Hugging Face's Trainer with LoRA as a node: the text classifier stays frozen, and only adapters and head travel.

    python examples/own_training/hugging_face_lora.py      # pip install 'fairmesh[lora]'

The base has random weights, so that nothing is downloaded; a real one is `AutoModelForSequenceClassification.
from_pretrained(folder, num_labels=2)`, from a folder that all sites have. As an experiment file, also between
organisations:

    trainer = "hugging_face_lora.py:train"
    data = { name = "import", path = "hugging_face_lora.py:sites" }
    [model]
    name = "lora"
    base = { name = "import", path = "hugging_face_lora.py:base" }
    rank = 4
    targets = ["query", "key", "value", "dense"]
    head = ["classifier"]
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

import fairmesh as fm

LORA = fm.models.LoRA(rank=4, targets=("query", "key", "value", "dense"), head=("classifier",))


def train(module, data, ctx):
    fm.trainers.fit_hugging_face(module, data, ctx, per_device_train_batch_size=16, learning_rate=1e-2)


def base() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=12, num_labels=2,
        )
    ).train()  # fmt: skip


def site(number: int, rows: int = 96) -> fm.Site:
    """Texts of twelve words. In those about class 1, four are a word that this site uses for it."""
    draw = torch.Generator().manual_seed(number)
    labels = torch.arange(rows) % 2
    words = torch.randint(10, 40, (rows, 12), generator=draw)
    places = torch.rand(rows, 12, generator=draw).argsort(dim=1)[:, :4]
    words.scatter_(1, places, torch.where(labels == 1, 2 + number % 3, 5).unsqueeze(1).expand(-1, 4))
    texts = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}
    return fm.Site({k: v[:64] for k, v in texts.items()}, test={k: v[64:] for k, v in texts.items()}, name=f"s{number}")


def sites() -> list[fm.Site]:
    return [site(k) for k in range(3)]


def main(rounds: int = 10) -> fm.Result:
    torch.manual_seed(0)
    model = base()
    whole = fm.train(fm.Problem(model, sites(), trainer=train), rounds=1)  # to compare the bytes
    result = fm.train(fm.Problem(LORA.adapt(model), sites(), trainer=train), rounds=rounds, measure_every=rounds)
    sent, full = result.final[0]["bytes_total"] / rounds, whole.final[0]["bytes_total"]
    print(
        f"worst site {result.worst:.3f} after {rounds} rounds; a round sends {sent:,.0f} bytes, and {full:,.0f} if the "
        f"whole model is trained: {sent / full:.1%}"
    )
    return result


if __name__ == "__main__":
    main()
