"""TensorBoard: what its own reader finds in the event files."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

import fairmesh as fm
from tests.trackers import train

pytestmark = pytest.mark.filterwarnings("default")  # those of the library


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def texts(events, tag):
    return [(one.step, one.tensor_proto.string_val[0].decode()) for one in events.Tensors(f"{tag}/text_summary")]


def test_tensorboard_reads_back_curves_settings_and_the_result(tmp_path):
    result = train(fm.trackers.TensorBoard(str(tmp_path)))
    events = read(tmp_path)
    for i, site in enumerate(result.problem.sites):
        curve = [(one.step, one.value) for one in events.Scalars(f"accuracy/site/{site.name}")]
        assert curve == [(record["round"], pytest.approx(record["accuracy"]["sites"][i])) for record in result.records]
        assert events.Scalars(f"lambda/{site.name}")[-1].value == pytest.approx(result.final[0]["lambda"][i])
    assert events.Scalars("bytes_total")[-1].value == result.final[0]["bytes_total"]
    low = events.Scalars("interval/accuracy/worst/low")
    assert [(one.step, one.value) for one in low] == [(4, pytest.approx(result.evidence()["worst"]["interval"][0]))]
    ((_, settings),) = texts(events, "settings")
    assert "| algorithm.name | ad-gda |" in settings
    ((step, table),) = texts(events, "result")
    assert step == 4
    assert all(f"| {site.name} |" in table for site in result.problem.sites)


def test_tensorboard_shows_the_newest_run_of_a_folder(tmp_path):
    tracker = fm.trackers.TensorBoard(str(tmp_path))
    train(tracker, rounds=4)
    result = train(tracker, rounds=2)
    curve = read(tmp_path).Scalars("loss/mean")
    assert [(one.step, one.value) for one in curve] == [
        (one["round"], pytest.approx(one["loss"]["mean"])) for one in result.records
    ]


def test_tensorboard_has_a_folder_per_replica(tmp_path):
    result = train(fm.trackers.TensorBoard(), out=tmp_path / "run", seeds=(0, 7))
    folders = sorted((tmp_path / "run/trackers/tensorboard").iterdir())
    assert [one.name for one in folders] == ["0-seed-0", "1-seed-7"]
    for folder, final in zip(folders, result.final):
        assert read(folder).Scalars("loss/mean")[-1].value == pytest.approx(final["loss"]["mean"])


KILLED = """
    import os, signal, sys
    import fairmesh as fm
    from tests import toys
    def die(round, state):
        if round == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
    fm.train(
        toys.problem(4), fm.Ring(), toys.ALGORITHMS["ad-gda"], 12, measure_every=1, checkpoint_every=5, out=sys.argv[1],
        observers=[fm.trackers.TensorBoard(), die], resume=sys.argv[3] == "resume",
    )
"""


@pytest.mark.slow
def test_tensorboard_of_a_run_that_was_killed_has_every_round_once(tmp_path):
    out = str(tmp_path / "run")
    for dies_at, resume in ((8, "new"), (11, "resume"), (-1, "resume")):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), out, str(dies_at), resume]
        done = subprocess.run(command, cwd=os.getcwd(), capture_output=True, text=True, timeout=300)
        assert done.returncode == (0 if dies_at < 0 else -signal.SIGKILL), done.stderr
    events = read(tmp_path / "run/trackers/tensorboard")
    assert [one.step for one in events.Scalars("loss/mean")] == list(range(13))
    assert len(texts(events, "settings")) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_tensorboard_on_a_full_disk_says_so_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    from fairmesh.trackers import tensorboard

    monkeypatch.setattr(tensorboard, "open", lambda path, mode: open("/dev/full", mode), raising=False)  # noqa: SIM115
    assert train(fm.trackers.TensorBoard(str(tmp_path))).rounds == 4
    assert sum("No space left" in one.message for one in caplog.records) == 1
