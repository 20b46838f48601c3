"""How good a model is at one site, with noise: the one evaluation that a private site tells others, at the end."""

import hashlib

import torch
from torch import Tensor

from fairmesh.data.units import units_of
from fairmesh.numerics import SECRET_BYTES, trees
from fairmesh.privacy.accounting import noise_for
from fairmesh.privacy.secret_draws import ModelDigests, SecretDraws
from fairmesh.privacy.settings import Privacy
from fairmesh.problems.identity import digest_of_now, fingerprint
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_run import loss_clip_of
from fairmesh.problems.row_loss import answering, as_floats

_GRID = 2.0**-20  # of a unit's largest contribution, on which sums and noise lie
_AT_ONCE = 4096  # rows


def deviation_of_evaluation(privacy: Privacy, loss_clip: float, units: int, labels: bool) -> dict[str, float]:
    """Returns the standard deviation of the noise in the metrics of a site with so many test units, if nothing of its
    budget for them was spent before; nothing if it tells none."""
    if not privacy.evaluation_epsilon or not units or privacy.delta >= 1 / units:
        return {}
    noise = noise_for(privacy.evaluation_epsilon, privacy.delta, units, units, 1)
    names = ("accuracy", "loss") if labels else ("loss",)
    of_share = 0.5 * noise * len(names) ** 0.5 / units
    return {name: of_share * (loss_clip if name == "loss" else 1.0) for name in names}


class NoisedEvaluation:
    """Loss and, of labels, accuracy on the test units of a site. A unit counts as the mean over its rows, its loss at
    most as `loss_clip` says. Both are one Gaussian release.

    Args:
        problem: The problem.
        number: The number of the site, whose test rows are here.
        noise: The standard deviation of the noise, over the largest contribution of a unit.
        secret: The site's.
    """

    def __init__(self, problem: Prepared, number: int, noise: float, secret: bytes):
        test = problem.sites[number].test
        if test is None or problem.privacy is None:
            raise ValueError("a site without test rows, or a problem without privacy, has no noised evaluation")
        self._problem, self._test, self._noise = problem, test, noise
        self._loss_clip = loss_clip_of(problem, problem.privacy)
        of_model = f"{fingerprint(test)} {digest_of_now(problem)}"
        bound = f"evaluation {problem.privacy} {noise} {self._loss_clip} {of_model}".encode()
        self._key = hashlib.blake2b(bound, digest_size=SECRET_BYTES, key=secret).digest()

    def digest(self, row: Tensor) -> str:
        """Returns the digest of a model, by which the ledger knows the release."""
        return self._nonce(row, 0).numpy().tobytes()[4:].hex()

    def _nonce(self, row: Tensor, generation: int) -> Tensor:
        digests = ModelDigests([self._key], torch.device("cpu")).of(row.detach().cpu().unsqueeze(0))
        return torch.cat([torch.tensor([[generation]], dtype=torch.int32), digests], dim=1)

    def of(self, row: Tensor, generation: int) -> dict[str, float]:
        """Returns the noised metrics of a model, which is the same for the same model and generation."""
        sums, units = self._sums(row), units_of(self._test)
        draws = SecretDraws([self._key], "evaluation", torch.device("cpu"))
        noise = draws.normals(self._nonce(row, generation), len(sums))[0] * self._noise * len(sums) ** 0.5
        noised = ((torch.stack(list(sums.values())) / _GRID).round() + (noise / _GRID).round()) * _GRID
        means = dict(zip(sums, (0.5 + 0.5 * noised / units).tolist()))  # of numbers from 0 to 1
        told = {name: min(max(mean, 0.0), 1.0) for name, mean in means.items()}
        return told | {"loss": told["loss"] * self._loss_clip}

    @torch.no_grad()
    def _sums(self, row: Tensor) -> dict[str, Tensor]:
        """Returns the sum over the units of each number, which lies in [-1, 1] for every unit."""
        problem, test = self._problem, self._test
        answers = answering(problem.flat_model, problem.loss, problem.at_once(torch.device("cpu")))
        rows, worst = row.detach().cpu().float().unsqueeze(0), {"loss": 1.0, "accuracy": 0.0}
        names = ("loss", "accuracy") if problem.classes else ("loss",)

        def numbers(first: int, end: int) -> list[Tensor]:
            """Returns the numbers of rows, the worst ones where the model or the loss raises: else a single row would
            end the run."""
            parts = (trees.at(part, slice(first, end)) for part in (test.inputs, test.targets))
            inputs, targets = (as_floats(part, torch.float32) for part in parts)
            try:
                outputs, losses = answers(rows, inputs, targets)
            except Exception:  # whatever the user's code raises
                if end - first == 1:
                    return [torch.tensor([worst[name]], dtype=torch.float64) for name in names]
                middle = (first + end) // 2
                return [torch.cat(pair) for pair in zip(numbers(first, middle), numbers(middle, end))]
            bounded = torch.where(losses[0].isfinite(), losses[0].double(), self._loss_clip)
            share = bounded.clamp(0.0, self._loss_clip) / self._loss_clip
            return [share, problem.right(outputs[0], targets).double()] if problem.classes else [share]

        starts = range(0, len(test), _AT_ONCE)
        chunks = [numbers(first, min(first + _AT_ONCE, len(test))) for first in starts]
        owners = torch.arange(len(test)) if test.units is None else test.units.unique(return_inverse=True)[1]
        counts = owners.bincount().double()

        def summed(shares: tuple[Tensor, ...]) -> Tensor:
            means = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, owners, torch.cat(shares)) / counts
            return (2 * means.clamp(0.0, 1.0) - 1).sum()

        return {name: summed(shares) for name, shares in zip(names, zip(*chunks))}
