"""What the folder of a private run tells whoever gets it."""

import json

import torch

import fairmesh as fm
from fairmesh.problems.identity import fingerprint


def test_no_file_but_the_checkpoint_has_a_digest_of_training_rows(tmp_path):
    """Somebody who knows all rows but one, and their digest, finds the last one by trying."""
    sites = fm.data.Digits(nodes=3).sites()
    problem = fm.Problem(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        sites,
        privacy=fm.Privacy(4, 1e-3),
        sampling=fm.Sampling(batch=40),
    )
    digests = [fingerprint(site.train) for site in problem.prepared.sites]
    digests += [problem.prepared.digest()]
    fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), 2, out=tmp_path / "run")
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file() and "checkpoint" not in file.name]
    assert {file.name for file in files} >= {"summary.json", "metrics.jsonl", "model.safetensors"}
    for file in files:
        for digest in digests:
            assert digest[:16].encode() not in file.read_bytes(), f"{file.name} has a digest of rows"
    data = json.loads((tmp_path / "run" / "summary.json").read_text())["provenance"]["data"]
    assert {site["digest"] for site in data["sites"]} == {""}
