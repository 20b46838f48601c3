"""Private runs: what they refuse, how they stop at the budget, and what their folder keeps to continue them."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from fairmesh.algorithms.base import Algorithm, unmeasured
from fairmesh.errors import BadInput, CheckpointError
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.personalization.base import Personalization
from fairmesh.privacy.accounting import Releases
from fairmesh.problems.batches import Sampling
from fairmesh.problems.objective import Objective
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_data import WHERE, has_tokens
from fairmesh.problems.private_run import PrivateRun
from fairmesh.storage.files import private_files, write_atomically
from fairmesh.storage.occupied import SUMMARY
from fairmesh.storage.run_folder import RunFolder
from fairmesh.training.loop import TrainingState
from fairmesh.training.observers import EarlyStopping, ObservedRun, Observer
from fairmesh.training.options import Options

NOISE, SECRET = "privacy.json", "privacy.secret"
SPENT = "the privacy budget is spent"


class _Rule(NamedTuple):
    """A setting that does not go with privacy."""

    applies: bool
    what: str
    why: str


_ROWS = "reads training rows without noise"


def refuse_with_privacy(
    problem: Prepared, algorithms: Sequence[Algorithm], options: Options, personalization: Personalization | None
) -> None:
    """Raises BadInput for settings that read training rows in another way than the mechanism does."""
    rules = [
        *_on_sampling(problem.sampling),
        *_on_objective(problem.objective),
        *_on_model(problem),
        *_on_run(algorithms, options, personalization),
    ]
    for rule in rules:
        if rule.applies:
            raise BadInput(f"privacy: {rule.what} {rule.why} {WHERE}")


def _on_sampling(sampling: Sampling) -> list[_Rule]:
    no_poisson = "is no Poisson sampling of units, which the accounting needs; leave it out"
    several = "takes several draws for one gradient; use a larger batch"
    return [
        _Rule(sampling.order != "random", f"sampling.order = {sampling.order!r}", no_poisson),
        _Rule(sampling.batches_per_step > 1, "sampling.batches_per_step", several),
    ]


def _on_objective(objective: Objective) -> list[_Rule]:
    told = ("local_losses", "untrained_losses", "constant_losses", "penalties")
    given = [name for name in told if getattr(objective, name)]
    judged_on, plain = objective.judged_on, Objective()
    return [
        _Rule(judged_on != plain.judged_on, f"objective.judged_on = {judged_on!r}", _ROWS),
        _Rule(objective.against is not None, f"objective.against = {objective.against!r}", _ROWS),
        _Rule(objective.discount_noise, "objective.discount_noise", _ROWS),
        _Rule(bool(objective.validated_decay), "objective.validated_decay", f"{_ROWS}; name a weight_decay"),
        _Rule(objective.subgroups is not None, "objective.subgroups", _ROWS),
        _Rule(bool(given), f"objective.{' and '.join(given)}", "would say what training rows hold, and is not used"),
    ]


def _on_model(problem: Prepared) -> list[_Rule]:
    own_code = (
        "is code of your own, whose steps nobody accounts for; let fairmesh compute the gradients: leave it out, and "
        "give the model and the loss"
    )
    of_batches = len(problem.flat_model.momenta) > 0 or problem.batch_norm in ("local", "shared")
    together = problem.augmenter is not None and not problem.augmenter.with_model
    tokens = (
        "of whole numbers, or with an nn.Embedding, may make some that the model does not know, which would change "
        "other units; leave it out (positions can be an nn.Parameter)"
    )
    untested = "would be measured on training rows; give each site, or the problem, a test set"
    not_stacked = f"has no gradients of single units, since torch.vmap cannot run it: {problem.why_not_stacked}"
    return [
        _Rule(problem.trainer is not None, "trainer", own_code),
        _Rule(of_batches, "batch_norm", 'has statistics over a batch, which mix units; use "frozen" or "convert"'),
        _Rule(problem.flat_model.own_dim > 0, "parts", "keeps parts at a site, which are trained without noise"),
        _Rule(together, "augment", "changes rows outside of the mechanism; use a function (inputs, draw) -> inputs"),
        _Rule(problem.augmenter is not None and has_tokens(problem), "augment", tokens),
        _Rule(not problem.held_out("test")[1], "a problem without test samples", untested),
        _Rule(bool(problem.why_not_stacked), "this model", not_stacked),
    ]


def _on_run(algorithms: Sequence[Algorithm], options: Options, personalization: Personalization | None) -> list[_Rule]:
    left_out = dict.fromkeys(name for algorithm in algorithms for name in unmeasured(algorithm))
    by_errors = any(getattr(algorithm, "ascends", "loss") == "error" for algorithm in algorithms)
    drifts = any(
        getattr(algorithm, "local_steps", 1) > 1 and getattr(algorithm, "max_drift", 0) != 0 for algorithm in algorithms
    )
    second = "looks at a batch a second time to limit drift, which is a release of its own; set max_drift = 0"
    tells = "tells other sites sums over training rows; adapt the common model inside your site instead"
    judges = (
        "chooses by what is measured without noise, so that the choice would tell of it; the model of the last round "
        "is private"
    )
    unknown = "would be measured on training rows before round 0; name a number"
    return [
        _Rule(personalization is not None, "personalization", tells),
        _Rule(bool(options.compare_weights), "options.compare_weights", "trains twice on the same rows"),
        _Rule(bool(options.choose_weights), "options.choose_weights", "trains several times on the same rows"),
        _Rule(options.keep_best, "options.keep_best", judges),
        _Rule(by_errors, 'algorithm.ascends = "error"', f'{_ROWS}; use "loss"'),
        _Rule(drifts, "algorithm.local_steps > 1", second),
        _Rule(bool(left_out), f"algorithm.{' and '.join(left_out)}", unknown),
        _Rule(options.precision != "float32", "options.precision", "computes norms too coarsely; leave it out"),
    ]


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
    table = decisions(private) | {"secret_digest": _digest(private.secrets[0])}
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
        digest = str(table.pop("secret_digest"))
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
            self.run.stop(
                f"{SPENT} after {rounds} rounds, for which its noise was chosen; for more, start a run in another "
                "folder, whose epsilon adds up with this one's"
            )


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
