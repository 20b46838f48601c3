"""Run folders that cannot be used, and checkpoints that are damaged or another's, are refused and left as they are."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import nn

import fairmesh as fm
from fairmesh.storage.checkpoint import FORMAT, load_checkpoint
from fairmesh.storage.files import write_atomically
from fairmesh.storage.run_folder import CHECKPOINT, read_records, read_summary
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests.refusals import refused
from tests.toys import problem, sites, small_model

ALGORITHM = fm.ChocoSGD(primal_step=0.1, consensus_step=0.5, compressor=fm.compressors.TopK(0.5))


def run(folder: Path, rounds: int = 4, **changes):
    """A short run, or one that differs from it in one thing."""
    arguments = {"problem": None, "topology": fm.Ring(), "algorithm": ALGORITHM, "measure_every": 2} | changes
    made = arguments.pop("problem") or problem(3)
    return fm.train(made, arguments.pop("topology"), arguments.pop("algorithm"), rounds, out=folder, **arguments)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def refused_to_resume(
    folder: Path, *names: object, error: type[Exception] = fm.errors.CheckpointError, **changes
) -> None:
    before = content(folder)
    with refused(*names, error=error):
        run(folder, resume=True, **changes)
    assert content(folder) == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A finished run of its own for a test to spoil."""
    copy = tmp_path / "run"
    copy.mkdir()
    for name, data in content(finished).items():
        (copy / name).write_bytes(data)
    return copy


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_run_folder_that_is_a_file_or_under_one_is_refused_with_its_path(tmp_path, place):
    (tmp_path / "file").write_text("not a folder")
    with refused(tmp_path / place):
        run(tmp_path / place)
    assert (tmp_path / "file").read_text() == "not a folder"


def test_run_folder_without_write_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fairmesh.storage.run_folder.os.access", lambda path, mode: False)  # root may write anywhere
    with refused(tmp_path / "run", "permission"):
        run(tmp_path / "run")


def test_run_folder_with_something_else_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with refused(tmp_path):
        run(tmp_path)
    assert content(tmp_path) == {"thesis.tex": b"years of work"}


def test_run_folder_with_a_run_in_it_is_refused_without_resume(folder):
    before = content(folder)
    with refused(folder, "resume"):
        run(folder)
    assert content(folder) == before


def test_run_folder_without_a_checkpoint_cannot_be_resumed(folder):
    (folder / CHECKPOINT).unlink()
    refused_to_resume(folder, CHECKPOINT, error=fm.BadInput)


def test_damaged_checkpoint_is_refused_by_name(folder):
    whole = (folder / CHECKPOINT).read_bytes()
    cut = [whole[:length] for length in (0, 4, 8, 200, len(whole) // 2, len(whole) - 1)]
    for damaged in (*cut, bytes(range(256)) * 20, whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]):
        (folder / CHECKPOINT).write_bytes(damaged)
        refused_to_resume(folder, CHECKPOINT)


def test_checkpoint_with_one_flipped_bit_is_refused_wherever_it_is(finished, tmp_path):
    whole = (finished / CHECKPOINT).read_bytes()
    training = Training(problem(3), fm.Ring(), replicas_of([ALGORITHM], (0,), None, 3), Options())
    like, identity = training.initial(), training.identity()
    header = 8 + int.from_bytes(whole[:8], "little")
    accepted = []
    path = tmp_path / CHECKPOINT
    for place in [*range(header), *range(header, len(whole), 29)]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (place % 7)
        path.write_bytes(bytes(flipped))
        try:
            load_checkpoint(path, like, identity)
            accepted.append(place)
        except fm.errors.CheckpointError:
            pass
    assert [whole[max(0, place - 20) : place + 20] for place in accepted] == []
    path.write_bytes(whole)
    assert load_checkpoint(path, like, identity)[1] == 4


def test_checkpoint_of_another_format_is_refused_with_both_numbers(folder):
    path = folder / CHECKPOINT
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    path.write_bytes(save(load(path.read_bytes()), metadata | {"format": "7"}))
    refused_to_resume(folder, CHECKPOINT, "7", FORMAT)


def test_checkpoint_that_is_a_model_file_is_refused(folder):
    (folder / CHECKPOINT).write_bytes((folder / "model.safetensors").read_bytes())
    refused_to_resume(folder, CHECKPOINT, "format")


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        (["topology.name", "'complete'", "'ring'"], {"topology": fm.topologies.Complete()}),
        (["seeds", "[1]", "[0]"], {"seeds": (1,)}),
        (["placements"], {"placements": [(2, 1, 0)]}),
        (["dtype", "'float64'", "default"], {"dtype": "float64"}),
        (["precision", "'bf16'", "default"], {"precision": "bf16"}),
        (["algorithms"], {"algorithm": fm.algorithms.DSGD(0.1)}),
        (
            ["primal_step"],
            {"algorithm": fm.ChocoSGD(primal_step=0.2, consensus_step=0.5, compressor=fm.compressors.TopK(0.5))},
        ),
    ],
)
def test_checkpoint_of_another_experiment_is_refused_with_the_field_that_differs(folder, names, changes):
    refused_to_resume(folder, *names, **changes)


def _absolute(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets) + 0.0 * outputs.abs().mean()


@pytest.mark.parametrize(
    "other",
    [
        {"sites": sites(3, seed=1)},
        {"sampling": fm.Sampling(batch=8)},
        {"weight_decay": 0.1},
        {"clip_norm": 1.0},
        {"prior": [1.0, 2.0, 3.0]},
        {"loss": _absolute},
        {"augment": lambda batch, draw: batch},
        {"model": lambda: nn.Sequential(*[nn.ReLU() if i == 1 else m for i, m in enumerate(small_model())])},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_checkpoint_of_other_data_model_or_loss_is_refused(folder, other):
    name = {"sites": "data", "prior": "data"}.get(*other, *other)
    refused_to_resume(folder, f"problem.{name}", "here", "there", problem=problem(3, **other))


def test_checkpoint_trained_on_another_frozen_body_is_refused(tmp_path):
    def with_body(scale: float) -> fm.Problem:
        model = small_model()
        for k, parameter in enumerate(model.parameters()):
            torch.nn.init.constant_(parameter, scale if k == 0 else 0.1)
        model[0].requires_grad_(False)
        return problem(3, model=model)

    run(tmp_path / "run", problem=with_body(0.3))
    refused_to_resume(tmp_path / "run", "problem.model", problem=with_body(0.4))


def test_checkpoint_beyond_the_rounds_asked_for_is_refused_with_both_numbers(folder):
    refused_to_resume(folder, "round 4", "3 rounds", error=fm.BadInput, rounds=3)


def test_run_folder_that_holds_no_run_cannot_be_read(tmp_path):
    with refused("metrics.jsonl"):
        read_records(tmp_path)
    with refused("summary.json"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text("nonsense")
    with refused("summary.json", "damaged", "run the experiment again"):
        read_summary(tmp_path)


def test_records_with_a_broken_line_are_refused_with_its_number(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([lines[0], "{broken\n", *lines[1:]]))
    with refused("metrics.jsonl", "line 2"):
        read_records(folder, ragged=True)


def test_write_atomically_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    write_atomically(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fairmesh.storage.files.os.replace", full)
    with refused(path, "No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_write_atomically_flushes_before_it_replaces(tmp_path, monkeypatch):
    path, seen = tmp_path / "checkpoint", []
    write_atomically(path, b"old")
    import os

    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr("fairmesh.storage.files.os.fsync", lambda file: (seen.append("flushed"), fsync(file)))

    def observed(source, target):
        seen.append((Path(source).read_bytes(), Path(target).read_bytes()))
        replace(source, target)

    monkeypatch.setattr("fairmesh.storage.files.os.replace", observed)
    write_atomically(path, b"new")
    assert seen[:2] == ["flushed", (b"new", b"old")]
    assert path.read_bytes() == b"new"


def test_checkpoint_that_cannot_be_written_stops_the_run_and_keeps_the_last_one(tmp_path, monkeypatch):
    import os

    replace = os.replace

    def full_after_round_0(source, target):
        if Path(target).name == CHECKPOINT and Path(target).exists():
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("fairmesh.storage.files.os.replace", full_after_round_0)
    with refused(CHECKPOINT, "No space left"):
        run(tmp_path / "run", checkpoint_every=2)
    monkeypatch.undo()
    resumed = run(tmp_path / "run", resume=True, checkpoint_every=2)
    straight = run(tmp_path / "straight", checkpoint_every=2)
    assert torch.equal(resumed.row(), straight.row())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 4


def test_loaded_tensors_are_aligned_as_fresh_ones_are(tmp_path):
    """Kernels round differently on unaligned memory, so a run that continues would not be bit for bit the same."""
    from fairmesh.storage.checkpoint import read_stored, write_stored

    tensors = {name: torch.randn(size) for name, size in (("a", 3), ("b", 61), ("c", 1), ("d", 200))}
    write_stored(tmp_path / "state.safetensors", tensors, 7, {})
    found = read_stored(tmp_path / "state.safetensors", {}).tensors
    assert [tensor.data_ptr() % 64 for tensor in found.values()] == [0] * 4
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
