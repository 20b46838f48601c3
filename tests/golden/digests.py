"""Digests of how runs end, on one machine: `python -m tests.golden.digests write FILE` before a refactoring, and
`python -m tests.golden.digests compare FILE` after each step of it. A refactoring changes no bit.

Rounding differs between processors, so digests are not committed; the traces next to this file are."""

import hashlib
import json
import sys
from pathlib import Path

import torch

import fairmesh as fm
from tests import toys
from tests.golden.settings import HOSTS, SETTINGS, on_two_hosts, trace_of, trained


def digests() -> dict[str, str]:
    """Returns a digest of each run: of all algorithms in both precisions, and of all settings."""
    found = {
        f"{name}, {dtype}": _digest(trained(toys.problem(), algorithm, dtype=dtype))
        for dtype in ("float32", "float64")
        for name, algorithm in toys.ALGORITHMS.items()
    }
    found |= {name: _digest(train()) for name, train in SETTINGS.items()}
    return found | {HOSTS: hashlib.sha256(repr(on_two_hosts()).encode()).hexdigest()}


def _digest(result: fm.Result) -> str:
    """Returns the digest of a run's last model, the sites' own parts, the weights, the losses and the traffic."""
    digest = hashlib.sha256()
    for tensor in (result.row("last"), result.own_parts(), result.weights()):
        if tensor is not None:
            digest.update(tensor.contiguous().numpy().tobytes())
    digest.update(repr(trace_of(result)).encode())
    digest.update(json.dumps(result.final, sort_keys=True, default=repr).encode())
    return digest.hexdigest()


def main(what: str, file: str) -> None:
    torch.set_num_threads(1)
    found = digests()
    if what == "write":
        Path(file).write_text(json.dumps(found, indent=1))
        print(f"{len(found)} digests written to {file}")
        return
    before = json.loads(Path(file).read_text())
    changed = [name for name in before.keys() | found.keys() if before.get(name) != found.get(name)]
    print(
        f"{len(found) - len(changed)} of {len(found)} are the same" + "".join(f"\nchanged: {name}" for name in changed)
    )
    sys.exit(bool(changed))


if __name__ == "__main__":
    main(*sys.argv[1:])
