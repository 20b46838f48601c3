"""A run that was stopped, however, continues from its checkpoint and ends bit-identical to one never stopped."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import fairmesh as fm
from fairmesh.storage.run_folder import CHECKPOINT, METRICS
from tests.pairwise import case
from tests.refusals import missing_from, refused
from tests.training.interrupted_run import ROUNDS, train

ROOT = Path(__file__).parents[2]
RARELY = 1000  # rounds between checkpoints: none but that of round 0 and the one a signal asks for


def outcome(folder: Path) -> dict[str, Any]:
    """Everything a finished run leaves, without the time it took and the order of the checkpoint's metadata."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    summary = json.loads(found["summary.json"])
    del summary["seconds"]
    found["summary.json"] = summary
    with safe_open(folder / CHECKPOINT, framework="pt") as file:
        tensors = {name: file.get_tensor(name).numpy().tobytes() for name in sorted(file.keys())}
        found[CHECKPOINT] = (file.metadata(), tensors)
    return found


def round_of(folder: Path) -> int:
    with safe_open(folder / CHECKPOINT, framework="pt") as file:
        return int(file.metadata()["round"])


def stopped_at(folder: Path, done: int, number: signal.Signals, checkpoint_every: int) -> subprocess.CompletedProcess:
    """Starts the run in a process of its own and sends it a signal after some rounds."""
    arguments = [str(folder), str(torch.get_num_threads()), str(checkpoint_every)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.training.interrupted_run", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == str(done):
            process.send_signal(number)
            break
    output, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict[str, Any]:
    """What the run leaves when nothing stops it."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(folder)
    return outcome(folder)


def test_run_leaves_its_settings_records_summary_models_and_checkpoint(straight):
    assert set(straight) == {
        *("experiment.toml", "metrics.jsonl", "outcomes.safetensors", "summary.json", CHECKPOINT),
        *(f"model{kept}{r}.safetensors" for kept in ("", "-best", "-time-average") for r in ("", "-1")),
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, case(signal.SIGINT, quick=False)])
def test_signal_writes_a_checkpoint_and_the_resumed_run_ends_bit_identical(straight, tmp_path, number):
    folder = tmp_path / "run"
    stopped = stopped_at(folder, 8, number, RARELY)
    assert stopped.returncode == 1
    assert 8 <= round_of(folder) < ROUNDS
    assert missing_from(stopped.stderr, fm.errors.Interrupted.__name__, f"round {round_of(folder)} ", ROUNDS) == []
    assert not (folder / "summary.json").exists()
    train(folder, resume=True)
    assert outcome(folder) == straight


@pytest.mark.slow  # a signal stops a run in the quick tests
def test_run_killed_between_checkpoints_is_resumed_bit_identical_though_a_record_was_cut_short(straight, tmp_path):
    folder = tmp_path / "run"
    stopped = stopped_at(folder, 11, signal.SIGKILL, 7)
    assert stopped.returncode == -signal.SIGKILL
    assert round_of(folder) == 7
    records = (folder / METRICS).read_bytes()
    assert b'"round": 9' in records  # measured after the checkpoint, and to be measured again
    (folder / METRICS).write_bytes(records[:-20])
    train(folder, resume=True)
    assert outcome(folder) == straight


@pytest.mark.parametrize("leave", [40, case(1, quick=False)])
def test_records_cut_anywhere_after_the_checkpoint_do_not_matter(straight, tmp_path, leave):
    folder = tmp_path / "run"
    stop_after(folder, 9)
    line = b'{"round": 12, "replica": 0, "accuracy": {"worst": 0.1}}\n'
    with open(folder / METRICS, "ab") as file:
        file.write(line[:leave])
    train(folder, resume=True)
    assert outcome(folder) == straight


class Stop(Exception):
    pass


def stop_after(folder: Path, done: int, **options) -> None:
    """A run that breaks off after some rounds, with a checkpoint at every one."""

    def watch(now: int, state) -> None:
        if now == done:
            raise Stop

    with pytest.raises(Stop):
        train(folder, checkpoint_every=1, observers=[watch], **options)


@pytest.mark.parametrize(
    "stops", [(), (0,), case((9,), quick=False), case((ROUNDS - 1,), quick=False), case((5, 13), quick=False)], ids=str
)
def test_run_broken_off_after_any_rounds_is_resumed_bit_identical(straight, tmp_path, stops):
    for done in stops:
        stop_after(tmp_path / "run", done, resume=True)
        assert round_of(tmp_path / "run") == done
    train(tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == straight


@pytest.mark.parametrize("rounds", [ROUNDS, case(ROUNDS // 2, quick=False)])
def test_finished_run_is_resumed_as_if_asked_for_all_rounds_at_once(straight, tmp_path, rounds):
    train(tmp_path / "run", rounds=rounds)
    again = train(tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == straight
    assert again.final[0]["round"] == ROUNDS


def test_checkpoints_and_measurements_do_not_change_the_trajectory(tmp_path):
    rows = [train(tmp_path / str(every), checkpoint_every=every).row() for every in (1, RARELY)]
    assert torch.equal(*rows)


@pytest.fixture
def python_s_ctrl_c():
    """Python's own handler, also where the tests were started in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_second_ctrl_c_stops_at_once(python_s_ctrl_c, tmp_path):
    def impatient(now: int, state) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", observers=[impatient], handle_signals=True)


def test_request_to_stop_in_the_last_round_lets_the_run_finish_and_handlers_are_put_back(tmp_path):
    def late(now: int, state) -> None:
        if now == 4:
            signal.raise_signal(signal.SIGTERM)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert train(tmp_path / "run", rounds=4, observers=[late], handle_signals=True).rounds == 4
    assert (tmp_path / "run" / "summary.json").exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_run_leaves_ctrl_c_alone_unless_told_to_handle_it(python_s_ctrl_c):
    def watch(now: int, state) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(None, observers=[watch])  # type: ignore[arg-type]


def test_checkpoint_of_a_stopped_run_is_refused_for_other_settings(tmp_path):
    stop_after(tmp_path / "run", 3)
    with refused("dtype", "'float64' here", "default there", error=fm.errors.CheckpointError):
        train(tmp_path / "run", resume=True, dtype="float64")
