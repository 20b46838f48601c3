"""Weights & Biases: what its own reader finds in the files of runs that were never online."""

import json
import os
import struct

import pytest

import fairmesh as fm
from tests.trackers import train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # starts a process


def logged(content):
    """Yields what the library wrote, one after another: a log in blocks of 32 KiB, as LevelDB has them."""
    start, block, parts = 7, 1 << 15, b""  # after the file's own header
    while start + 7 <= len(content):
        if block - start % block < 7:  # the rest of a block is empty
            start += block - start % block
            continue
        _, length, kind = struct.unpack("<IHB", content[start : start + 7])
        parts += content[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):  # whole, or the last of its parts
            yield parts
            parts = b""


def read(folder):
    """Returns the settings, the history and the summary in the file of a run."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("run-*.wandb")
    config, history, summary, exits = {}, [], {}, []
    for data in logged(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            history.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
        elif kind == "summary":
            items = record.summary.update
            summary |= {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items}
        elif kind == "exit":
            exits.append(record.exit.exit_code)
    return config, history, summary, exits


def test_wandb_reads_back_curves_settings_result_and_a_resumed_run_once(tmp_path):
    tracker = fm.trackers.WandB(project="wards")
    train(tracker, out=tmp_path / "run")
    result = train(tracker, out=tmp_path / "run", rounds=8, resume=True)
    folders = sorted((tmp_path / "run/trackers/wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert len({folder.name.split("-")[-1] for folder in folders}) == 1  # the same run for W&B
    config, first, *_ = read(folders[0])
    _, second, summary, exits = read(folders[1])
    assert config["algorithm"]["name"] == "ad-gda"
    for i, site in enumerate(result.problem.sites):
        found = [(row["_step"], row["round"], row[f"accuracy/site/{site.name}"]) for row in first + second]
        assert found == [(one["round"], one["round"], one["accuracy"]["sites"][i]) for one in result.records]
        assert second[-1][f"lambda/{site.name}"] == result.final[0]["lambda"][i]
    assert second[-1]["bytes_total"] == result.final[0]["bytes_total"]
    assert summary["interval/accuracy/worst/low"] == result.evidence()["worst"]["interval"][0]
    table = json.loads((folders[1] / "files" / summary["result"]["path"]).read_text())
    assert [row[0] for row in table["data"]] == [site.name for site in result.problem.sites]
    assert exits == [0]
    assert "WANDB_ERROR_REPORTING" not in os.environ


def test_wandb_keeps_to_itself_what_machine_and_packages_there_are(tmp_path):
    train(fm.trackers.WandB(str(tmp_path)), rounds=2)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    names = {path.name for path in (folder / "files").rglob("*") if path.is_file()}
    assert not names & {"requirements.txt", "wandb-metadata.json", "output.log", "conda-environment.yaml"}
