"""How much faster a run is if the outputs of a frozen encoder are computed once, and how far the models are apart.

`python examples/backbones/speed.py` trains the model of notes.py three times in one process: with the encoder frozen by
`parts.frozen`, which computes it in every pass; as a backbone with an empty cache; and as a backbone whose outputs are
known.
"""

import tempfile
import time

import torch
from notes import Classifier, sites

import fairmesh as fm

ROUNDS, LENGTH = 100, 32


def trained(problem: fm.Problem) -> tuple[float, fm.Result]:
    begun = time.process_time()  # CPU time, so that other work on the machine does not count
    result = fm.train(problem, fm.Ring(), fm.TrackedADGDA(), ROUNDS, measure_every=25, count_bytes=False)
    return time.process_time() - begun, result


def main() -> None:
    torch.manual_seed(0)
    model = Classifier(hidden=128, layers=4, length=LENGTH).train()
    model.encoder.eval()  # as a backbone is
    given = {"sites": sites(300, LENGTH), "sampling": fm.Sampling(batch=32)}
    every_pass, one = trained(fm.Problem(model, **given, parts=fm.Parts(frozen=("encoder.*",))))
    with tempfile.TemporaryDirectory() as folder:
        problem = fm.Problem(model, **given, backbone=fm.models.Backbone("encoder", folder=folder))
        first, _ = trained(problem)
        again, other = trained(problem)
    moved = (one.row() - problem.initial_row(0)).norm()
    print(f"encoder in every pass:    {every_pass:7.2f} s")
    print(f"backbone, empty cache:    {first:7.2f} s, {every_pass / first:.0f} times as fast")
    print(f"backbone, outputs known:  {again:7.2f} s, {every_pass / again:.0f} times as fast")
    print(f"trained models differ by {(one.row() - other.row()).norm() / moved:.1g} of what training moved them")
    print(f"accuracy at the worst site: {one.worst:.3f} and {other.worst:.3f}")


if __name__ == "__main__":
    main()
