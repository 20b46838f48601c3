"""Models, losses and data as users bring them. Each works, or is refused with the way out: a row per case.

Rows with a test elsewhere are in ELSEWHERE, so that this file lists all of them."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

import fairmesh as fm
from tests.late import late
from tests.pairwise import some_quick
from tests.refusals import missing_from, refused

transformers = late("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap runs attention in a loop

ROOT = Path(__file__).parents[2]
ROWS: dict[str, Callable[[], None]] = {}
INPUTS = torch.linspace(-1, 1, 72).reshape(12, 6)
LABELS = torch.arange(12) % 3
SITES = [fm.Site((INPUTS + k, LABELS), test=(INPUTS, LABELS)) for k in range(3)]


def row(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds a case to the table."""

    def added(case: Callable[[], None]) -> Callable[[], None]:
        ROWS[name] = case
        return case

    return added


def works(model: nn.Module | Callable[[], nn.Module], sites=SITES, **fields) -> tuple[fm.Result, str]:
    """Trains for two rounds, twice, which must give the same bits; returns the result and what was announced."""
    problem, said, options = fm.Problem(model, sites, **fields).prepared, [], {"measure_every": 2, "trace": "no"}
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        runs.append(fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 2, announce=said.append, **options))
    assert torch.equal(runs[0].row(), runs[1].row())
    assert torch.isfinite(runs[0].row()).all()
    assert not torch.equal(runs[0].row()[0], problem.initial_row(0).float())
    return runs[0], "\n".join(said)


def asked(*names: object, model=None, sites=SITES, **fields) -> None:
    """Passes if the problem is refused with all of the names."""
    with refused(*names):
        fm.Problem(nn.Linear(6, 3) if model is None else model, sites, **fields)


# Vision


class Backbone(nn.Module):
    """A frozen network with BatchNorm, never put into evaluation mode, and a head that is trained."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU()).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))


@row("resnet18, BatchNorm in train mode; mobilenet_v3_small")
def _():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    asked("layer 1 (BatchNorm1d)", '"frozen"', '"local"', '"shared"', '"convert"', model=model)
    for policy in ("frozen", "local", "shared", "convert"):
        assert policy in works(model, batch_norm=policy, sampling=fm.Sampling(4))[1]


@row("frozen resnet18 with a trainable head, never put into evaluation mode")
def _():
    module = Backbone()
    asked("body.1 (BatchNorm1d)", ".eval()", '"frozen"', model=module)
    result, said = works(module, batch_norm="frozen")
    assert "keep their statistics" in said
    assert result.problem.flat_model.dim == 15
    assert torch.equal(result.state_dict()["body.1.running_mean"], module.body[1].running_mean)


class Attention(nn.Module):
    """What a ViT does with its patches, with dropout of the attention."""

    def __init__(self, drop: float = 0.1):
        super().__init__()
        self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=drop, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs.unsqueeze(-1))
        return self.head((hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]).mean(dim=1))


@row("ViT with attention dropout")
def _():
    works(Attention)


# Text, sequences, dense targets


def bert(**settings) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=2, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config).train()


class AdditiveMask(nn.Module):
    """BERT with its default dropout, ids and mask in one tensor, and the mask added to the attention's scores."""

    def __init__(self):
        super().__init__()
        self.bert = bert()

    def forward(self, inputs: Tensor) -> Tensor:
        mask = (1.0 - inputs[:, 1].float())[:, None, None, :] * -1e9
        return self.bert(input_ids=inputs[:, 0], attention_mask=mask).logits


@row("BERT with a 4-D additive mask and its default dropout")
def _():
    ids = torch.arange(48).reshape(8, 6) % 30
    mask = (torch.arange(6) < 3 + torch.arange(8)[:, None] % 4).long()
    works(AdditiveMask, [(torch.stack([ids, mask], dim=1), torch.arange(8) % 2)] * 2, sampling=fm.Sampling(4))


@row("GPT-2 as a language model is traced without a warning")
def _():
    config = transformers.GPT2Config(
        vocab_size=12, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    module = transformers.GPT2LMHeadModel(config).train()
    ids = torch.arange(48).reshape(8, 6) % 12
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        problem = fm.Problem(module, [({"input_ids": ids}, ids)] * 2)
        fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 1, announce=lambda line: None)
    assert [str(one.message) for one in told if "traced" in str(one.message)] == []


@row("torch.jit.script")
def _():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")  # torch's own, when such a module is copied
        works(torch.jit.script(nn.Linear(6, 3)))


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Every sample shall resemble itself more than the others of its batch."""
    directions = F.normalize(outputs, dim=1)
    return F.cross_entropy(directions @ directions.T / 0.1, torch.arange(len(outputs)))


@row("loss over the batch (contrastive)")
def _():
    asked("mean of their single losses", "compares samples with each other", loss=contrastive)


class Views(nn.Module):
    """Several views of a sample, one of which belongs to it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 4)

    def forward(self, anchor: Tensor, others: Tensor) -> Tensor:
        return torch.einsum("bd,bkd->bk", *(F.normalize(self.embed(one), dim=-1) for one in (anchor, others)))


@row("a contrastive loss within samples")
def _():
    others = torch.randn(12, 5, 6, generator=torch.Generator().manual_seed(0))
    works(Views, [((INPUTS, others), torch.zeros(12, dtype=torch.int64))] * 2, sampling=fm.Sampling(4))


# Data


class Drawings(Dataset):
    """Images as a folder gives them without a transform."""

    def __init__(self, mode: str):
        self.mode = mode

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int):
        return Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3) + i).convert(self.mode), i % 2


@row("PIL images without ToTensor")
def _():
    for mode, channels in (("RGB", 3), ("L", 1)):
        images = torch.stack(
            [torch.from_numpy(np.array(image)) for image, _ in map(Drawings(mode).__getitem__, range(6))]
        )
        arrays = images.permute(0, 3, 1, 2) if channels == 3 else images.unsqueeze(1), torch.arange(6) % 2
        model = nn.Sequential(nn.Flatten(), nn.Linear(16 * channels, 2))
        runs = [works(model, [one] * 2)[0] for one in (Drawings(mode), fm.data.Streamed(Drawings(mode)), arrays)]
        assert torch.equal(runs[0].row(), runs[2].row())
        assert torch.equal(runs[1].row(), runs[2].row())
    asked("site 0", "mode 'CMYK'", ".convert('RGB')", sites=[Drawings("CMYK")])


class Large(Dataset):
    """Fails as numpy, or as torch does, where there is no memory left."""

    def __init__(self, error: Exception):
        self.error = error

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int):
        raise self.error


@row("a Dataset that is read into memory and does not fit")
def _():
    for error in (
        MemoryError("Unable to allocate 4.77 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        asked("site 0", "does not fit into memory", "fm.data.Streamed", sites=[Large(error)])


class Unequal(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int):
        return torch.zeros(1, 4 + i, 4), i % 2


@row("items of unequal size")
def _():
    asked("site 0", "unequal size", "pad or crop", sites=[Unequal()])


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(6), 0


@row("IterableDataset")
def _():
    asked("site 0", "IterableDataset", "items by index", sites=[Stream()])


class Flipped(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int):
        return INPUTS[i].flip(0) if random.random() < 0.5 else INPUTS[i], int(LABELS[i])


@row("Dataset with a random flip only")
def _():
    asked("site 0", "random transforms", "augment", sites=[Flipped()])


# Training options


@row('dtype = "bfloat16"')
def _():
    for short in ("bfloat16", "float16"):
        with refused("dtype", short, 'precision = "bf16"'):
            fm.train(fm.Problem(nn.Linear(6, 3), SITES), rounds=1, dtype=short)


@row("bf16 modules")
def _():
    result, said = works(nn.Linear(6, 3).bfloat16())
    assert missing_from(said, "bfloat16", "float32", "precision = 'bf16'") == []
    assert result.row().dtype == torch.float32


@row("autocast around fm.Problem and fm.train")
def _():
    problem = fm.Problem(nn.Linear(6, 3), SITES)
    with torch.autocast("cpu", torch.bfloat16):
        asked("torch.autocast", "precision = 'bf16'")
        with refused("torch.autocast", "precision = 'bf16'"):
            fm.train(problem, rounds=1)


class Short(nn.Module):
    """Computes in bfloat16 by itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(inputs)


@row("autocast inside forward")
def _():
    works(Short)


@row("torch.compile(model)")
def _():
    asked("torch.compile", "layer itself", "fuse", model=torch.compile(nn.Linear(6, 3), backend="eager"))
    asked("torch.compile", "layer 0", model=nn.Sequential(torch.compile(nn.Linear(6, 3), backend="eager")))


TEMPERATURE = {"value": 1.0}


class Annealed(nn.Module):
    """Reads a number of Python's that changes while it trains."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) / TEMPERATURE["value"]


class Annealing(fm.observers.Observer):
    def after_round(self, round, state):
        TEMPERATURE["value"] = 1.0 + round


@row('a temperature that an observer anneals, with trace = "no"')
def _():
    problem, rows = fm.Problem(Annealed(), SITES), []
    for observers in ([], [Annealing()]):
        TEMPERATURE["value"] = 1.0
        rows.append(fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 3, observers=observers, trace="no").row())
    assert not torch.equal(*rows)


SLOW = (
    "GPT-2 as a language model is traced without a warning",
    "BERT with a 4-D additive mask and its default dropout",
    "torch.jit.script",
)


@some_quick("name", list(ROWS), *[name for name in ROWS if name not in SLOW])
def test_row_works_or_is_refused_with_the_way_out(name: str):
    ROWS[name]()


ELSEWHERE = {
    "ResNet-18 under each policy, also between organisations": (
        "tests.mesh.test_real_models",
        "test_killed_nodes_of_an_example_end_bit_for_bit_where_undisturbed_ones_end",
    ),
    "convnext_tiny, efficientnet_b0 (stochastic depth), VAE, nn.TransformerEncoder": (
        "tests.problems.test_torch_draws",
        "test_model_that_draws_by_itself_trains_as_it_is_and_repeats_bit_for_bit",
    ),
    "dict and tuple inputs": (
        "tests.problems.test_structures",
        "test_several_inputs_train_as_the_same_numbers_in_one_tensor",
    ),
    "HF-style Dataset of dicts": ("tests.problems.test_structures", "test_samples_of_every_form_are_the_same"),
    "a Dataset with text in it": (
        "tests.problems.test_structures",
        "test_text_and_items_of_unequal_length_are_refused_by_name",
    ),
    "tuple inputs (features, adjacency)": (
        "tests.problems.test_structures",
        "test_a_graph_network_takes_features_and_adjacency_as_a_tuple",
    ),
    "HF model as it is": (
        "tests.problems.test_structures",
        "test_bert_as_it_is_trains_on_a_dataset_of_dictionaries",
    ),
    "BERT wrapped, ids and mask stacked in one tensor": (
        "tests.problems.test_hugging_face_models",
        "test_bert_with_masks_and_default_dropout_trains_and_repeats_bit_for_bit",
    ),
    "token classification, plain cross-entropy": (
        "tests.problems.test_structures",
        "test_tokens_with_classes_on_the_last_axis_take_the_plain_cross_entropy",
    ),
    "padding with ignore_index": (
        "tests.problems.test_structures",
        "test_a_padded_loss_of_torch_is_refused_and_the_named_one_is_offered",
    ),
    "per-sample mean over unpadded tokens": (
        "tests.problems.test_structures",
        "test_bert_classifies_tokens_and_padding_does_not_count",
    ),
    "nn.LSTM, nn.GRU, checkpointing, branch on data": (
        "tests.problems.test_models_at_once",
        "test_model_that_vmap_cannot_take_trains_one_by_one_and_says_so",
    ),
    "mask with void label, one wholly void; NaN of one test sample": (
        "tests.training.test_named_metrics",
        "test_sample_without_a_loss_is_named_once_and_other_sites_keep_theirs",
    ),
    "targets (B,) against outputs (B, 1)": (
        "tests.problems.test_models_and_losses",
        "test_targets_that_broadcast_against_the_outputs_are_refused_with_both_shapes",
    ),
    "multi-label BCE with integer targets": (
        "tests.problems.test_structures",
        "test_whole_numbers_for_a_loss_of_floats_are_refused_with_the_loss_that_takes_them",
    ),
    "class-weighted CE with a zero-initialised head": (
        "tests.problems.test_models_and_losses",
        "test_loss_with_class_weights_is_refused_though_the_last_layer_starts_at_zero",
    ),
    "class-weighted CE by name": ("tests.losses.test_builtin", "test_weighted_losses_train"),
    "batch Dice and padded token losses": (
        "tests.problems.test_models_and_losses",
        "test_loss_that_is_no_mean_over_samples_is_refused_whatever_the_initial_outputs",
    ),
    "two outputs (tuple)": (
        "tests.problems.test_structures",
        "test_two_outputs_and_two_targets_train_by_a_loss_of_the_users_own",
    ),
    "two outputs that nothing says how to read": (
        "tests.problems.test_structures",
        "test_outputs_that_nothing_says_how_to_read_are_refused",
    ),
    "unlabelled samples": (
        "tests.problems.test_structures",
        "test_samples_without_a_label_train_with_ignore_index_and_cannot_judge",
    ),
    "Dataset with RandomCrop and flip": (
        "tests.data.test_own_data",
        "test_dataset_with_a_random_flip_is_refused_every_time",
    ),
    "DataLoader": ("tests.problems.test_structures", "test_a_data_loader_is_refused_with_the_way_out"),
    "np.memmap larger than the memory limit": (
        "tests.data.test_rows",
        "test_a_mapped_file_larger_than_the_memory_limit_trains",
    ),
    "spectral_norm, and weight_norm in its old form": (
        "tests.problems.test_unfit_models",
        "test_norms_of_weights_with_a_state_or_a_hook_are_refused_by_the_name_of_the_layer",
    ),
    "other parametrizations": ("tests.problems.test_unfit_models", "test_other_parametrizations_train"),
    "a Dataset larger than memory": (
        "tests.mesh.test_real_models",
        "test_killed_nodes_of_an_example_end_bit_for_bit_where_undisturbed_ones_end",
    ),
    "torchvision.transforms.v2 within augment": (
        "tests.problems.test_augmentation",
        "test_transforms_of_torchvision_train_and_repeat",
    ),
    "mixup, cutmix, any augmentation of the targets": (
        "tests.problems.test_augmentation",
        "test_mixed_labels_train_with_named_losses_metrics_and_algorithms_that_follow_errors",
    ),
    "a loss that calls the model": (
        "tests.problems.test_model_loss",
        "test_model_loss_that_calls_the_model_once_trains_and_measures_as_the_loss_of_outputs",
    ),
    "AdamW with decay by parameter": (
        "tests.algorithms.test_optimizers",
        "test_optimizer_at_one_node_is_that_of_torch",
    ),
    "clip_norm clips as torch.optim does": (
        "tests.training.test_batches",
        "test_weight_decay_is_added_after_clipping_as_in_torch",
    ),
    "shuffled epochs": (
        "tests.problems.test_sampling",
        "test_shuffled_sampling_takes_every_row_once_per_epoch",
    ),
    "a schedule of one's own": (
        "tests.properties.test_schedules",
        "test_schedule_of_a_user_learns_the_length_of_the_run",
    ),
    "sizes and layout in a round": ("tests.problems.test_sampling", "test_round_tells_sizes_and_layout"),
    "EXTRA, BEER, DM-HSGD, q-FFL over a graph, low-rank gossip": (
        "tests.extension.test_research_examples",
        "test_example_keeps_the_contract",
    ),
    "a user's algorithm has no name": (
        "tests.extension.test_identity",
        "test_checkpoint_is_not_continued_by_another_class_with_the_same_fields",
    ),
    "memory is promised from above": (
        "tests.training.test_footprint",
        "test_round_needs_no_more_than_estimated_and_not_far_less",
    ),
    "a module in eval mode trains in eval mode": (
        "tests.problems.test_models_at_once",
        "test_module_in_evaluation_mode_trains_without_dropout_and_says_how_to_change_it",
    ),
    "a site that leaves": (
        "tests.mesh.test_leaving",
        "test_fields_that_sum_to_zero_are_reset_and_the_rest_of_a_tracked_state_stays",
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_row_has_a_test_elsewhere(name: str):
    module, test = ELSEWHERE[name]
    assert f"\ndef {test}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
