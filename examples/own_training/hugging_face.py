"""Hugging Face's Trainer as the local work of a site: a small BERT that tells texts apart.

The model is made from a configuration, so nothing is downloaded; `from_pretrained` works in the same way.

    pip install 'fairmesh[hugging-face]'
    python examples/own_training/hugging_face.py
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

import fairmesh as fm


def train(module, data, ctx):
    fm.trainers.fit_hugging_face(
        module, data, ctx, per_device_train_batch_size=16, learning_rate=1e-2, weight_decay=0.01, max_grad_norm=1.0
    )


def model() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=12, num_labels=2,
        )
    ).train()  # fmt: skip


def site(number: int, rows: int = 96) -> fm.Site:
    """Texts of twelve words. Those about class 1 contain a word that this site uses for it."""
    draw = torch.Generator().manual_seed(number)
    labels = torch.arange(rows) % 2
    words = torch.randint(10, 40, (rows, 12), generator=draw)
    places = torch.randint(1, 12, (rows,), generator=draw)
    words[torch.arange(rows), places] = torch.where(labels == 1, 2 + number % 3, 5)
    texts = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}
    return fm.Site({k: v[:64] for k, v in texts.items()}, test={k: v[64:] for k, v in texts.items()}, name=f"s{number}")


def sites() -> list[fm.Site]:
    return [site(k) for k in range(3)]


def main(rounds: int = 15) -> fm.Result:
    torch.manual_seed(0)
    problem = fm.Problem(model(), sites(), trainer=fm.trainers.LocalTrainer(train))
    result = fm.train(problem, rounds=rounds, measure_every=rounds)
    print(f"worst site {result.worst:.3f} after {rounds} rounds, {result.final[0]['bytes_total'] / 1e6:.2f} MB sent")
    return result


if __name__ == "__main__":
    main()
