"""Models of transformers, built from configurations: all their dropouts draw from the node's stream."""

import pytest
import torch
from torch import nn

import fairmesh as fm
from tests.late import late

transformers = late("transformers")


class Bert(nn.Module):
    """A text classifier; ids and attention mask are stacked into one tensor."""

    def __init__(self, attention: str):
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=16, num_labels=2, attn_implementation=attention,
        )  # fmt: skip
        self.bert = transformers.BertForSequenceClassification(config)

    def forward(self, inputs):
        return self.bert(input_ids=inputs[:, 0], attention_mask=inputs[:, 1]).logits


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_bert_with_masks_and_default_dropout_trains_and_repeats_bit_for_bit(attention):
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 30, (8, 6)), (torch.arange(6) < torch.randint(3, 7, (8, 1))).long()
    site = torch.stack([ids, mask], dim=1), torch.arange(8) % 2
    module, said, rows = Bert(attention).train(), [], []
    problem = fm.Problem(module, [site] * 3, sampling=fm.Sampling(4)).prepared
    for seed in (1, 2):
        torch.manual_seed(seed)
        rows.append(fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 2, announce=said.append).row())
    assert torch.equal(*rows)
    assert not torch.equal(rows[0][0], problem.initial_row(0).float())
    assert problem.at_once(torch.device("cpu")) == 1
    assert "one after another" in said[0]
