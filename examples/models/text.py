"""A text classifier of Hugging Face with attention masks: three clinics sort notes into urgent and not urgent.

`fairmesh run examples/models/text.toml` imports this file. For a pretrained model, return
`transformers.AutoModelForSequenceClassification.from_pretrained(path).train()` from `classifier`, and use its
tokenizer.
"""

import random

import torch
import transformers

import fairmesh as fm

URGENT = ("severe pain", "sudden weakness", "short of breath")
CALM = ("mild cough", "routine visit", "feels well")
PHRASES = {  # how the clinics write
    "north": ("patient reports {}", "{} since yesterday"),
    "south": ("complains of {} today and asks for advice", "noted: {}"),
    "east": ("{}", "again {} after the last visit"),
}
WORDS = sorted({word for text in (*URGENT, *CALM, *sum(PHRASES.values(), ())) for word in text.split() if word != "{}"})
LENGTH = 10  # tokens; shorter notes are padded


def notes(clinic: str, count: int, seed: int) -> dict[str, torch.Tensor]:
    """Returns notes as a tokenizer gives them: ids, and a mask that is 0 where a note is padded."""
    draw = random.Random(f"{clinic} {seed}")
    ids, mask, labels = torch.zeros(count, LENGTH, dtype=torch.int64), torch.zeros(count, LENGTH, dtype=torch.int64), []
    for i in range(count):
        labels.append(i % 2)
        text = draw.choice(PHRASES[clinic]).format(draw.choice(URGENT if i % 2 else CALM))
        tokens = [1 + WORDS.index(word) for word in text.split()]
        ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(labels)}


def sites() -> list[fm.Site]:
    return [fm.Site(notes(name, 60, 0), test=notes(name, 30, 1), name=name) for name in PHRASES]


def classifier() -> torch.nn.Module:
    """Returns a small BERT in training mode, so that its dropout acts."""
    config = transformers.BertConfig(
        vocab_size=1 + len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).train()
