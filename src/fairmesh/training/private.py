"""Private runs: what they refuse, how they stop at the budget, and what their folder keeps to continue them."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from fairmesh.algorithms.base import Algorithm, unmeasured
from fairmesh.errors import BadInput, CheckpointError
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.personalization.base import Personalization
from fairmesh.privacy.accounting import Releases
from fairmesh.problems.objective import Objective
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_data import WHERE
from fairmesh.problems.private_run import PrivateRun
from fairmesh.storage.files import private_files, write_atomically
from fairmesh.storage.occupied import SUMMARY
from fairmesh.storage.run_folder import RunFolder
from fairmesh.training.loop import TrainingState
from fairmesh.training.observers import EarlyStopping, ObservedRun, Observer
from fairmesh.training.options import Options

NOISE, SECRET = "privacy.json", "privacy.secret"
SPENT = "the privacy budget is spent"


def refuse_with_privacy(
    problem: Prepared, algorithms: Sequence[Algorithm], options: Options, personalization: Personalization | None
) -> None:
    """Raises BadInput for settings that read training rows in another way than the mechanism does."""
    rows, named = "reads training rows without noise", [name for a in algorithms for name in unmeasured(a)]
    judges = "chooses by what is measured without noise, so that the choice would tell of it"
    objective, plain = problem.objective, Objective()
    given = [
        name
        for name in ("local_losses", "untrained_losses", "constant_losses", "penalties")
        if getattr(objective, name)
    ]
    by_errors = [a for a in algorithms if getattr(a, "ascends", "loss") == "error"]
    reasons = {
        f"sampling.order = {problem.sampling.order!r}": problem.sampling.order != "random"
        and "is no Poisson sampling of units, which the accounting needs; leave it out",
        "sampling.batches_per_step": problem.sampling.batches_per_step > 1
        and "takes several draws for one gradient; use a larger batch",
        f"objective.judged_on = {objective.judged_on!r}": objective.judged_on != plain.judged_on and rows,
        f"objective.against = {objective.against!r}": objective.against is not None and rows,
        "objective.discount_noise": objective.discount_noise and rows,
        "objective.validated_decay": bool(objective.validated_decay) and rows + "; name a weight_decay",
        "objective.subgroups": objective.subgroups is not None and rows,
        f"objective.{' and '.join(given)}": bool(given) and "would say what training rows hold, and is not used",
        "trainer": problem.trainer is not None
        and "is code of your own, whose steps nobody accounts for; let fairmesh compute the gradients: leave it out, "
        "and give the model and the loss",
        "batch_norm": (len(problem.flat_model.momenta) > 0 or problem.batch_norm in ("local", "shared"))
        and 'has statistics over a batch, which mix units; use "frozen" or "convert"',
        "parts": problem.flat_model.own_dim > 0 and "keeps parts at a site, which are trained without noise",
        "personalization": personalization is not None
        and "tells other sites sums over training rows; adapt the common model inside your site instead",
        "options.compare_weights": bool(options.compare_weights) and "trains twice on the same rows",
        "options.choose_weights": bool(options.choose_weights) and "trains several times on the same rows",
        "options.keep_best": options.keep_best and judges + "; the model of the last round is private",
        'algorithm.ascends = "error"': bool(by_errors) and rows + '; use "loss"',
        "augment": problem.augmenter is not None
        and not problem.augmenter.with_model
        and "sees several units at once; use a function (inputs, draw) -> inputs",
        f"algorithm.{' and '.join(dict.fromkeys(named))}": bool(named)
        and "would be measured on training rows before round 0; name a number",
        "options.precision": options.precision != "float32" and "computes norms too coarsely; leave it out",
        "a problem without test samples": not problem.held_out("test")[1]
        and "would be measured on training rows; give each site, or the problem, a test set",
        "this model": bool(problem.why_not_stacked)
        and f"has no gradients of single units, since torch.vmap cannot run it: {problem.why_not_stacked}",
    }
    for what, why in reasons.items():
        if why:
            raise BadInput(f"privacy: {what} {why} {WHERE}")


def refuse_observers(observers: Sequence[Observer]) -> None:
    """Raises BadInput for observers that decide by what is measured without noise."""
    if any(isinstance(observer, EarlyStopping) for observer in observers):
        raise BadInput(
            "privacy: early stopping ends the run by what is measured without noise, so that the length of the run "
            f"would tell of it; leave it out, and choose rounds {WHERE}"
        )


def kept_in(folder: RunFolder | None, private: PrivateRun, seed: int, process_group: ProcessGroup) -> PrivateRun:
    """Returns the decisions of a private run with its secret, the same in all processes. A resumed run has those that
    it began with, so that it repeats its noise, and more rounds do not lower it.

    Args:
        folder: The run's folder, which keeps them; None if nothing is written.
        private: What was decided for the settings at hand.
        seed: Of the first replica, by which a repeatable run draws.
        process_group: The processes that train together.

    Raises:
        CheckpointError: The folder of a resumed run does not have them.
    """
    begun = private.with_secrets(seed)
    if folder is None:
        return _shared(begun, process_group)
    if folder.resuming:
        kept = _read(folder, begun)
        if process_group.is_leader and kept.secrets == begun.secrets:  # a new one, for what follows a finished run
            _write(folder, kept)
        return _shared(kept, process_group)
    if process_group.is_leader:
        _write(folder, begun)
    return _shared(begun, process_group)


def _write(folder: RunFolder, private: PrivateRun) -> None:
    with private_files():  # which nobody else on the machine may read
        write_atomically(folder.path / SECRET, private.secrets[0])
    table = decisions(private) | {"secret": _digest(private.secrets[0])}
    write_atomically(folder.path / NOISE, json.dumps(table, indent=1).encode())


def decisions(private: PrivateRun) -> dict[str, Any]:
    """Returns what was decided before round 0, as a table. A checkpoint has it too: it is not continued with others."""
    return {
        "releases": [release.table() for release in private.releases],
        "calls": private.calls,
        "rounds": private.rounds,
        "loss_clip": private.loss_clip,
        "loss_share": private.loss_share,
    }


def _digest(secret: bytes) -> str:
    return hashlib.blake2b(secret, digest_size=16, person=b"fairmesh kept").hexdigest()


def _read(folder: RunFolder, begun: PrivateRun) -> PrivateRun:
    """Returns what a run began with, as its folder has it."""
    noise, secret = folder.path / NOISE, folder.path / SECRET
    try:
        table: dict[str, Any] = json.loads(noise.read_bytes())
        digest = str(table.pop("secret"))
        releases = tuple(Releases(**entry) for entry in table.pop("releases"))
        kept = dataclasses.replace(begun, releases=releases, **table)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{noise} is missing or damaged, so what this private run has spent is not known; start a new run in "
            "another folder"
        ) from error
    if [(r.units, r.rate) for r in kept.releases] != [(r.units, r.rate) for r in begun.releases]:
        raise CheckpointError(
            f"{noise} is of other numbers of units or another batch; resume with the settings and the data that the "
            "run began with"
        )
    if secret.exists() and _digest(secret.read_bytes()) == digest:
        return dataclasses.replace(kept, secrets=(secret.read_bytes(),))
    if not secret.exists() and (folder.path / SUMMARY).exists():
        return kept  # a finished run has let go of it; what more it releases has noise of its own
    raise CheckpointError(
        f"{secret} is missing or damaged, without which this private run cannot repeat its noise; start a new run in "
        "another folder"
    )


def _shared(private: PrivateRun, process_group: ProcessGroup) -> PrivateRun:
    """Returns it with the secret of the first process."""
    if process_group.world_size == 1:
        return private
    secrets = process_group.all_gather_json([secret.hex() for secret in private.secrets])[0]
    return dataclasses.replace(private, secrets=tuple(map(bytes.fromhex, secrets)))


def forget_secret(folder: RunFolder | None, process_group: ProcessGroup) -> None:
    """Removes the secret of a finished run, so that nobody can compute its noise any more."""
    if folder and process_group.is_leader:
        (folder.path / SECRET).unlink(missing_ok=True)


class Budget(Observer):
    """Ends a run once the rounds are done that its noise is for.

    Args:
        private: The decisions of the run.
    """

    def __init__(self, private: PrivateRun):
        self._private = private

    def start(self, run: ObservedRun) -> None:
        self.run = run
        self.after_round(run.round, run.state)

    def after_round(self, round: int, state: TrainingState) -> None:
        if round >= self._private.rounds and not self.run.is_last:
            rounds = self._private.rounds
            self.run.stop(f"{SPENT} after {rounds} rounds, for which its noise was chosen")


def on_privacy(private: PrivateRun, splits: Sequence[int]) -> str:
    """Returns what a private run will spend, in words.

    Args:
        private: The decisions of the run.
        splits: The split of each replica.
    """
    privacy, noise = private.privacy, sorted(release.noise for release in private.releases)
    batch = max(release.rate * release.units for release in private.releases)
    spread = f"{noise[0]:.3g}" if noise[-1] < 1.01 * noise[0] else f"{noise[0]:.3g} to {noise[-1]:.3g}"
    return (
        f"private: every site spends at most epsilon = {privacy.epsilon:g} at delta = {privacy.delta:g} per "
        f"{private.unit}; noise of {spread} times the clip of {privacy.clip:g}, on sums over about "
        f"{batch:.0f} units; metrics are measured on held-out rows without noise{_of_all(private, splits)}"
    )


def _of_all(private: PrivateRun, splits: Sequence[int]) -> str:
    """Returns what several models on the same rows spend together, in words."""
    if len(splits) == 1:
        return ""
    together = private.together(private.rounds, splits)
    return (
        f". This is the budget of each of {len(splits)} models; together they spend up to epsilon = {together:.3g}, "
        "which counts if the best of them is chosen"
    )
