"""Privacy between organisations: what a node with `[privacy]` may read, send and tell, and what it has spent.

Its training rows are sealed before anything else of the node sees them. Every release is written to the site's ledger
first. Other sites hear the noised losses of the rounds, what was spent, and one noised evaluation at the end.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from fairmesh.data.units import units_of
from fairmesh.errors import BadInput
from fairmesh.mesh.fields import EPSILON
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.node.privacy_ledger import TEST, TRAIN, PrivacyLedger
from fairmesh.mesh.wire.journal import storing
from fairmesh.privacy.accounting import Releases, epsilon_of, noise_for
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_evaluation import NoisedEvaluation, deviation_of_evaluation
from fairmesh.problems.private_oracle import PrivateOracle
from fairmesh.problems.private_run import PrivateRun
from fairmesh.storage.files import read_record, write_record

if TYPE_CHECKING:
    from fairmesh.mesh.node.watching import Log
    from fairmesh.training.loop import Training
    from fairmesh.training.plan import Plan

_HEAD = "privacy.json"  # in the state folder: how long the ledger was at the last checkpoint
_LEAST = 0.1  # of the budget; with less of it left, a new run would learn nothing
_PUT_BACK = "put the ledger of the run back, or have this site voted out"
_STATE_BACK = "it says how long the ledger was: put the state folder back from a backup, or have this site voted out"


class PrivateSite:
    """The privacy of a node.

    Args:
        membership: The site's.
        log: Where to log.
    """

    def __init__(self, membership: Membership, log: "Log"):
        self._membership, self._log = membership, log
        self._run, self._head = membership.manifest.digest(), membership.site.state / _HEAD
        self._anew = not self._head.exists()  # this state folder has released nothing yet
        path = membership.site.ledger_path
        begun = any(membership.site.state.glob("generation-*/*"))
        if begun and not path.exists():
            raise BadInput(f"{path} is missing, and this site has begun the run with it; {_PUT_BACK}")
        self.ledger = PrivacyLedger(path)
        with ExitStack() as opened:
            opened.callback(self.ledger.close)
            if not self.ledger.has(read_record(self._head, _STATE_BACK)):
                raise BadInput(f"{path} is older than this site's state, or another file; {_PUT_BACK}")
            refuse_spent(self.ledger, membership)
            opened.pop_all()
        self._plan: int | None = None
        self._most = 0  # releases of this plan that the budget allows
        self._evaluated: dict[str, float] | None = None

    def close(self) -> None:
        """Lets go of the ledger."""
        self.ledger.close()

    def keep(self) -> None:
        """Notes in the state folder how long the ledger is, as a checkpoint is written."""
        with storing(self._head.parent):
            write_record(self._head, self.ledger.head)
        self._anew = False

    # Training

    def entered(self, plan: "Plan", membership: Membership, start: int, restored: bool) -> "Plan":
        """Returns the plan of the rounds of a generation, with this site's noise, secret and ledger.

        Args:
            plan: The plan of the run.
            membership: That of the generation.
            start: The round from which the generation began.
            restored: Whether this site has lost its state and got it from its neighbours since.
        """
        private, number = plan.private, membership.number
        if private is None or membership.secret is None:
            raise ValueError("a private run has a plan for its noise, and a secret")
        of = {"run": self._run, "generation": membership.mesh.generation, "units": TRAIN}
        known = self.ledger.plan(of)
        if known is not None and self._anew and self.ledger.made(known):
            raise BadInput(
                f"{self.ledger.path} says that this run was made with these rows already, and the state folder has "
                "nothing of it, so its releases would be made a second time; put the state folder back from a backup, "
                "or found a new mesh, whose run gets what the ledger has left"
            )
        if known is None:
            self._refuse_other_units(private.unit)
            if restored:
                self._assume_lost(start, membership.mesh.generation, len(membership.mesh.members), private.calls)
            releases = self._noise(private, private.releases[number], plan.rounds - start)
            of |= {"start": start, "unit": private.unit, "delta": private.privacy.delta}
            known = self.ledger.add_plan(of, releases)
            made, releases = self.epsilon(), self.ledger.plans[known][1]
            self._log("info", "privacy", spent=round(made, 4), noise=releases.noise, releases=releases.times)
            self.keep()  # before anything is sent: from now on no other ledger is taken for this one
        self._plan, self._most = known, self._within_budget(known, private.privacy.epsilon)
        of_sites = list(private.releases)
        of_sites[number] = self.ledger.plans[known][1]
        entered = replace(
            private,
            releases=tuple(of_sites),
            secrets=(self._secret_of_run(membership.secret),),
            generation=membership.mesh.generation,
            charge=self._charge,
        )
        return replace(plan, private=entered)

    def _secret_of_run(self, secret: bytes) -> bytes:
        """Returns the secret of this run's noise: of another experiment, there is another one."""
        files = json.dumps(dict(self._membership.manifest.files), sort_keys=True).encode()
        return hashlib.blake2b(files, digest_size=len(secret), key=secret, person=b"fairmesh run").digest()

    def _refuse_other_units(self, unit: str) -> None:
        """Refuses a ledger that counts other units: what a run has spent per row says little of a patient's rows."""
        counted = {str(of["unit"]) for of, _ in self.ledger.plans if "unit" in of} - {unit}
        if counted:
            raise BadInput(
                f"{self.ledger.path} counts what runs have spent per {' and per '.join(sorted(counted))}, and this run "
                f"is private per {unit}, so the two cannot be added up; train with the same unit, or with rows of "
                "which that ledger counts nothing, and a ledger of their own"
            )

    def _noise(self, private: PrivateRun, usual: Releases, rounds: int) -> Releases:
        """Returns what a generation may release: so many rounds with the noise that keeps this site in its budget after
        all that its ledger has; nothing if that has used it up in the middle of a run."""
        privacy, times, before = private.privacy, rounds * private.calls, self.ledger.spent()
        batch = round(usual.rate * usual.units)
        try:
            noise = noise_for(privacy.epsilon, privacy.delta, usual.units, batch, times, before)
        except BadInput as error:
            self._log(
                "warning", "the privacy budget is spent; this site takes part without its rows", reason=str(error)
            )
            return usual._replace(times=0)
        return usual._replace(noise=noise, times=times)

    def _within_budget(self, plan: int, budget: float, units: str = TRAIN) -> int:
        """Returns how many releases of a plan the budget allows. They are fewer than planned if this run was
        interrupted, and another one has spent on the same rows since."""
        privacy, releases = self._membership.experiment.privacy, self.ledger.plans[plan][1]
        others = self.ledger.spent(units, but=plan)
        if privacy is None or not others:
            return releases.times
        delta, few, many = privacy.delta, 0, releases.times + 1
        while many - few > 1:
            times = releases.times if many > releases.times else (few + many) // 2
            fits = epsilon_of([*others, releases._replace(times=times)], delta) <= budget
            few, many = (times, many) if fits else (few, times)
        return few

    def _assume_lost(self, start: int, generation: int, ahead: int, calls: int) -> None:
        """Checks that the ledger of a site that has lost its state is as new as that state was, and adds what may be
        missing in it.

        Args:
            start: The round from which the site is restored.
            generation: The generation that begins then.
            ahead: How many rounds sites can be ahead of each other at most.
            calls: How many releases a round has.
        """
        before = {"run": self._run, "generation": generation - 1, "units": TRAIN}
        last = self.ledger.plan(before)
        if last is not None:
            of, releases = self.ledger.plans[last]
            left = releases.times - self.ledger.made(last)
            reached = max(self.ledger.last_round(last) + 1, int(of["start"]))
            if left <= 0 or reached >= start - ahead:
                self.ledger.assume(last, max(0, min(2 * ahead * calls, left)))
                return
        raise BadInput(
            f"{self.ledger.path} lacks releases that this site has made up to round {start}, before it lost its state; "
            f"{_PUT_BACK}"
        )

    def _charge(self, done: int, call: int, nonces: Tensor) -> Sequence[bool]:
        """Writes a release to the ledger. Returns whether this node may make it."""
        (nonce,) = nonces.tolist()
        model = "".join(f"{word & 0xFFFFFFFF:08x}" for word in nonce[1:])
        if self._plan is None:
            raise ValueError("a node enters a generation before it releases anything")
        allowed = self.ledger.charge(self._plan, done, call, model, self._most)
        if not allowed and self.ledger.plans[self._plan][1].times:
            self._log("warning", "the privacy budget of this site is spent; its rows are used no more", round=done)
        return [allowed]

    def epsilon(self) -> float:
        """Returns what this site has spent on its training units, in all runs of its ledger."""
        privacy = self._membership.experiment.privacy
        return 0.0 if privacy is None else epsilon_of(self.ledger.spent(), privacy.delta)

    # What others are told

    def told(self, values: Mapping[str, float], training: "Training") -> dict[str, float]:
        """Returns what a site tells of a measurement: of all metrics only the loss, which is the noised one of the last
        round, and what it has spent."""
        noised = cast(PrivateOracle, training.oracle).released_loss()
        return dict.fromkeys(values, math.nan) | {"loss": noised, EPSILON: self.epsilon()}

    def evaluation(self, problem: Prepared, number: int, row: Tensor) -> dict[str, float]:
        """Returns the noised metrics of the common model on this site's test units, with the noise that its ledger
        allows; nothing if it allows none.

        Args:
            problem: The problem.
            number: The number of this site in it.
            row: The model.
        """
        privacy, membership = problem.privacy, self._membership
        test = problem.sites[number].test
        if privacy is None or not privacy.evaluation_epsilon or test is None or membership.secret is None:
            return {}
        units = units_of(test)
        if privacy.delta >= 1 / units:
            self._log("warning", "no evaluation is told", reason=f"delta is not below 1 / {units} test units")
            return {}
        of = {"run": self._run, "generation": membership.mesh.generation, "units": TEST}
        plan = self.ledger.plan(of)
        if plan is None:
            try:
                budget, before = privacy.evaluation_epsilon, self.ledger.spent(TEST)
                if epsilon_of(before, privacy.delta) > (1 - _LEAST) * budget:
                    raise BadInput(f"privacy.evaluation_epsilon = {budget:g} is spent by runs before")
                noise = noise_for(budget, privacy.delta, units, units, 1, before)
            except BadInput as error:
                self._log("warning", "no evaluation is told", reason=str(error))
                return {}
            plan = self.ledger.add_plan(of | {"delta": privacy.delta}, Releases(units, 1.0, units, noise, 1))
            self.keep()
        evaluation = NoisedEvaluation(
            problem, number, self.ledger.plans[plan][1].noise, self._secret_of_run(membership.secret)
        )
        most = self._within_budget(plan, privacy.evaluation_epsilon, TEST)
        if not self.ledger.charge(plan, membership.experiment.rounds, 0, evaluation.digest(row), most):
            self._log("warning", "no evaluation is told", reason="this site has told one of another model")
            return {}
        return evaluation.of(row, membership.mesh.generation)

    def summary(
        self, epsilons: Mapping[str, float | None], private: PrivateRun | None, tested: Mapping[str, int], labels: bool
    ) -> dict[str, Any]:
        """Returns what the result says of privacy, the same at every site.

        Args:
            epsilons: What each site has spent on training units.
            private: The decisions of the run.
            tested: How many test units each site has.
            labels: Whether they have labels, so that there is an accuracy.
        """
        if private is None:
            raise ValueError("the run has no privacy")
        known = [value for value in epsilons.values() if value is not None]
        table = private.table(0)
        privacy = private.privacy
        return {
            "epsilon": max(known, default=privacy.epsilon),
            "sites": dict(epsilons),
            **{key: table[key] for key in ("delta", "unit", "accountant", "budget", "clip", "loss_clip", "loss_share")},
            "evaluation_epsilon": privacy.evaluation_epsilon,
            "evaluation_deviation": {
                name: deviation_of_evaluation(privacy, private.loss_clip, units, labels)
                for name, units in tested.items()
            },
        }


def refuse_spent(ledger: PrivacyLedger, membership: Membership) -> None:
    """Raises BadInput for a ledger that leaves too little for a run which has not begun here."""
    privacy = membership.experiment.privacy
    if privacy is None or ledger.of_run(membership.manifest.digest()):
        return
    spent = epsilon_of(ledger.spent(), privacy.delta)
    least = min((float(of["delta"]) for of, _ in ledger.plans if "delta" in of), default=1.0)
    if privacy.delta > least:
        raise BadInput(
            f"privacy.delta = {privacy.delta:g} is larger than the {least:g} that was promised to those whose rows "
            f"{ledger.path} counts; with it, all runs together would spend more than that promise says. Agree on delta "
            f"= {least:g} or less"
        )
    if spent > (1 - _LEAST) * privacy.epsilon:
        raise BadInput(
            f"privacy.epsilon = {privacy.epsilon:g} leaves too little for this run: {ledger.path} says that "
            f"{spent:.3g} are spent on these rows; use a larger epsilon, or take part with other rows and a ledger of "
            "their own"
        )
