"""How much faster a run is if a frozen encoder is computed once, and how far the trained heads are apart.

`python examples/backbones/speed.py` trains the head of notes.py three times in one process: with the encoder in a whole
model, frozen by `parts.frozen`, which computes it in every round; on features; and on features that are in files.
"""

import tempfile
import time
from collections.abc import Callable

from notes import Encoder, head, sites
from torch import nn

import fairmesh as fm


class Whole(nn.Module):
    def __init__(self, encoder: nn.Module, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder.eval(), head

    def forward(self, input_ids, attention_mask):
        return self.head(self.encoder(input_ids, attention_mask))


def trained(make: Callable[[], fm.Problem]) -> tuple[float, fm.Result]:
    begun = time.process_time()  # CPU time, so that other work on the machine does not count
    result = fm.train(make(), fm.Ring(), fm.TrackedADGDA(), 100, measure_every=25, count_bytes=False)
    return time.process_time() - begun, result


encoder, small, data, frozen = Encoder(layers=6), head(), sites(300), fm.Parts(frozen=("encoder.*",))
every_round, whole = trained(lambda: fm.Problem(Whole(encoder, small), data, parts=frozen))
with tempfile.TemporaryDirectory() as folder:
    runs = [trained(lambda: fm.Problem(small, fm.models.frozen_features(encoder, data, folder=folder))) for _ in "12"]
(first, _), (again, result) = runs
moved = (whole.row() - whole.problem.initial_row(0)).norm()
print(f"encoder in every round:  {every_round:7.2f} s")
print(f"features, no files yet:  {first:7.2f} s, {every_round / first:.0f} times as fast")
print(f"features of files:       {again:7.2f} s, {every_round / again:.0f} times as fast")
print(f"trained heads differ by {(whole.row() - result.row()).norm() / moved:.1g} of what training moved them")
print(f"accuracy at the worst site: {whole.worst:.3f} and {result.worst:.3f}")
