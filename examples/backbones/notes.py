"""A frozen text encoder with a trained head: three clinics sort notes into urgent and not urgent.

`fairmesh run examples/backbones/notes.toml` imports this file. The encoder is computed once for every note, and only
the head is trained and sent. Its random weights stand for a download: for a pretrained encoder, let `Encoder` hold
`transformers.AutoModel.from_pretrained(path)`, and use its tokenizer in `notes`.
"""

import random

import torch
import transformers
from torch import Tensor, nn

import fairmesh as fm

URGENT = ("severe pain", "sudden weakness", "short of breath", "chest pain", "high fever")
CALM = ("mild cough", "routine visit", "feels well", "dry skin", "slept well")
PHRASES = {  # how the clinics write
    "north": ("patient reports {}", "{} since yesterday"),
    "south": ("complains of {} today and asks for advice", "noted: {}"),
    "east": ("{}", "again {} after the last visit"),
}
WORDS = sorted({word for text in (*URGENT, *CALM, *sum(PHRASES.values(), ())) for word in text.split() if word != "{}"})
LENGTH, HIDDEN = 12, 64  # tokens of a note, and numbers for each; shorter notes are padded


def notes(clinic: str, count: int, seed: int) -> dict[str, Tensor]:
    """Returns notes as a tokenizer gives them: ids, and a mask that is 0 where a note is padded."""
    draw = random.Random(f"{clinic} {seed}")
    ids, mask = torch.zeros(2, count, LENGTH, dtype=torch.int64)
    for i in range(count):
        text = draw.choice(PHRASES[clinic]).format(draw.choice(URGENT if i % 2 else CALM))
        tokens = [1 + WORDS.index(word) for word in text.split()]
        ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(count) % 2}


class Encoder(nn.Module):
    """A BERT with random weights, the same at every site, and the mean of its states over the words of a note."""

    def __init__(self, layers: int = 2):
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=1 + len(WORDS), hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=4,
            intermediate_size=2 * HIDDEN, max_position_embeddings=LENGTH,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.bert = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        return (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def sites(count: int = 120) -> list[fm.Site]:
    return [fm.Site(notes(name, count, 0), test=notes(name, count // 2, 1), name=name) for name in PHRASES]


def features() -> list[fm.Site]:
    return fm.models.frozen_features(Encoder(), sites())


def head() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.1), nn.Linear(HIDDEN, 2))
