"""A frozen text encoder with a small head: three clinics sort notes into urgent and not urgent.

`fairmesh run examples/backbones/notes.toml` imports this file. The encoder is computed once for every note, and only
the head is trained and sent. Its random weights stand for a download: for a pretrained encoder, return
`transformers.AutoModel.from_pretrained(path)` from `encoder`, and use its tokenizer in `notes`.
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
LENGTH = 12  # tokens; shorter notes are padded


def notes(clinic: str, count: int, seed: int, length: int) -> dict[str, Tensor]:
    """Returns notes as a tokenizer gives them: ids, and a mask that is 0 where a note is padded."""
    draw = random.Random(f"{clinic} {seed}")
    ids, mask, labels = torch.zeros(count, length, dtype=torch.int64), torch.zeros(count, length, dtype=torch.int64), []
    for i in range(count):
        labels.append(i % 2)
        text = draw.choice(PHRASES[clinic]).format(draw.choice(URGENT if i % 2 else CALM))
        tokens = [1 + WORDS.index(word) for word in text.split()]
        ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(labels)}


def sites(count: int = 120, length: int = LENGTH) -> list[fm.Site]:
    return [
        fm.Site(notes(name, count, 0, length), test=notes(name, count // 2, 1, length), name=name) for name in PHRASES
    ]


def encoder(hidden: int, layers: int, length: int) -> nn.Module:
    """Returns a BERT with random weights."""
    config = transformers.BertConfig(
        vocab_size=1 + len(WORDS), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=2 * hidden, max_position_embeddings=length,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


class Classifier(nn.Module):
    """An encoder, and a head on the mean over the words of a note."""

    def __init__(self, hidden: int = 64, layers: int = 2, length: int = LENGTH):
        super().__init__()
        self.encoder = encoder(hidden, layers, length)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(hidden, 2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)  # the rest of the model reads it too, so it is kept with the outputs
        return self.head((states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1))
