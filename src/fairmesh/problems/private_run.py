"""What a private run has decided before round 0: rates, shapes and noise of every site, and its secrets."""

import hashlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fairmesh.data.sealed import sealed
from fairmesh.data.site import Site
from fairmesh.errors import BadInput
from fairmesh.numerics import SECRET_BYTES, trees
from fairmesh.privacy.accounting import ACCOUNTANT, TOLERANCE, Releases, epsilon_of, noise_for, static_shape
from fairmesh.privacy.settings import Privacy
from fairmesh.problems.identity import digest_of_now, fingerprint
from fairmesh.problems.model_for_sites import shape_of

if TYPE_CHECKING:
    from fairmesh.problems.hosted_nodes import HostedNodes
    from fairmesh.problems.prepared import Prepared

_FRACTIONS = 50  # of a run, at which records tell what was spent
Charge = Callable[[int, int, Tensor], Sequence[bool]]  # (round, call, nonces) -> which nodes may release


@dataclass(frozen=True, eq=False)
class PrivateRun:
    """The decisions of a private run.

    Args:
        privacy: Its settings.
        releases: What the sites of all splits release in the whole run, one entry per site.
        calls: How many releases a round has.
        rounds: How many rounds the noise is for.
        loss_clip: The largest loss of a unit.
        loss_share: The share of the budget for losses; 0 for an algorithm that does not use them.
        unit: What is protected: "row", or what a unit of several rows is called, such as "patient".
        secrets: The secrets of the sites whose data is here, or one secret of the whole simulation.
        generation: That of a mesh; 0 elsewhere.
        charge: Asked before every release, with what it is a function of; None if the run's length bounds them.
    """

    privacy: Privacy
    releases: tuple[Releases, ...]
    calls: int
    rounds: int
    loss_clip: float
    loss_share: float
    unit: str = "row"
    secrets: tuple[bytes, ...] = ()
    generation: int = 0
    charge: Charge | None = None

    @staticmethod
    def of(problem: "Prepared", calls: int, rounds: int, with_losses: bool) -> "PrivateRun":
        """Returns the decisions for a problem: the least noise that keeps every site in the budget.

        Args:
            problem: The problem, with sealed rows.
            calls: How many releases a round has.
            rounds: How many rounds there are.
            with_losses: Whether the algorithm uses the losses of the sites.
        """
        privacy, batch = _settings(problem), problem.sampling.batch
        loss_clip, releases = loss_clip_of(problem, privacy), []
        for split in problem.every_split:
            for i, site in enumerate(split.sites):
                refuse_size(len(site.train), batch, privacy, f"site {i} ({site.name})")
        for split in problem.every_split:
            for site in split.sites:
                units = len(site.train)
                noise = noise_for(privacy.epsilon, privacy.delta, units, batch, rounds * calls)
                rate = min(1.0, batch / units)
                releases.append(Releases(units, rate, static_shape(units, batch), noise, rounds * calls))
        share = privacy.loss_share if with_losses else 0.0
        named = {samples.sealed.unit: None for samples in problem.train_sets if samples.sealed}
        return PrivateRun(privacy, tuple(releases), calls, rounds, loss_clip, share, " or ".join(named) or "row")

    def with_secrets(self, seed: int) -> "PrivateRun":
        """Returns it with secrets of its own, unless it has some: of a repeatable simulation from the seed."""
        if self.secrets:
            return self
        given = hashlib.blake2b(f"seed {seed}".encode(), digest_size=SECRET_BYTES, person=b"fairmesh seeded").digest()
        return replace(self, secrets=(given if self.privacy.repeatable else os.urandom(SECRET_BYTES),))

    def secrets_of(self, nodes: "HostedNodes") -> list[bytes]:
        """Returns the keys of every row of a stack of hosted nodes. They follow from the site's secret, or from the
        simulation's secret and the site; from the replica; and from all that the noise is scaled by and added to, as
        far as a run's identity knows it. With another loss, seed, settings or rows there is other noise, so nobody can
        subtract two releases and be left without any."""
        if not self.secrets:
            raise ValueError("a private run has secrets before it draws")
        (replicas, count), sites, seeds = nodes.shape, nodes.sites.tolist(), nodes.seeds.tolist()
        own = len(self.secrets) > 1 or self.charge is not None  # a secret for each site, as between organisations
        secrets = itertools.cycle(self.secrets)
        problems = [digest_of_now(split) for split in nodes.problem.every_split]
        keys = []
        for r, i in itertools.product(range(replicas), range(count)):
            samples, site = nodes.site(r, i)[1].train, sites[r][i]
            bound = f"replica {r} seed {seeds[r]} {'own' if own else f'site {site}'} generation {self.generation} "
            bound += f"{problems[site // nodes.problem.n]} {self.privacy} {self.releases[site]} "
            bound += f"{self.loss_clip} {self.loss_share} {self.calls} {fingerprint(samples)}"
            keys.append(hashlib.blake2b(bound.encode(), digest_size=SECRET_BYTES, key=next(secrets)).digest())
        return keys

    def spent(self, rounds: int) -> float:
        """Returns the largest epsilon of any site after so many rounds, for records. Within the run it is rounded up to
        that of the next fiftieth, since each number takes long to compute. Of sites whose noise is for one budget,
        either the one with the highest sampling rate has spent most or the one with the lowest, up to the tolerance
        of that noise."""
        slowest, *_, fastest = sorted((*self.releases, *self.releases), key=lambda release: release.rate)
        step = math.ceil(self.rounds / _FRACTIONS)
        rounded = math.ceil(rounds / step) * step
        if rounded >= self.rounds:
            return self.largest_spent(self.rounds)
        return min(self._spent_by([slowest, fastest], rounded) * (1 + TOLERANCE), self.privacy.epsilon)

    def largest_spent(self, rounds: int) -> float:
        """Returns the largest epsilon of any site after so many rounds."""
        return self._spent_by(self.releases, rounds)

    def _spent_by(self, releases: Sequence[Releases], rounds: int) -> float:
        times = min(rounds, self.rounds) * self.calls
        distinct = {release._replace(times=times) for release in releases}
        return max(epsilon_of([release], self.privacy.delta) for release in distinct)

    def together(self, rounds: int, splits: Sequence[int]) -> float:
        """Returns the largest epsilon of any site after so many rounds of several models that are trained on its rows.

        Args:
            rounds: How many rounds.
            splits: The split of the data that each model is trained on. Other splits of a site's rows may have the
                same units, so that what they spend adds up.
        """
        times, n = min(rounds, self.rounds) * self.calls, len(self.releases) // (max(splits) + 1)
        found = []
        for i in range(n):
            counts = Counter(self.releases[split * n + i] for split in splits)
            parts = [release._replace(times=times * count) for release, count in counts.items()]
            found.append(epsilon_of(sorted(parts), self.privacy.delta))
        return max(found)

    def table(self, rounds: int, splits: Sequence[int] = (0,)) -> dict[str, Any]:
        """Returns what a summary says of the budget after so many rounds.

        Args:
            rounds: How many rounds.
            splits: The split of the data that each replica is trained on. Default: (0,), one replica.
        """
        together = {"together": self.together(rounds, splits), "models": len(splits)} if len(splits) > 1 else {}
        return {
            "epsilon": self.largest_spent(rounds),
            "delta": self.privacy.delta,
            "unit": self.unit,
            "accountant": ACCOUNTANT,
            "budget": self.privacy.epsilon,
            "clip": self.privacy.clip,
            "loss_clip": self.loss_clip,
            "loss_share": self.loss_share,
            "noise": [release.noise for release in self.releases],
            "units": [release.units for release in self.releases],
            "epsilons": [self._spent_by([release], rounds) for release in self.releases],
            "batch": round(max(release.rate * release.units for release in self.releases)),
            "releases": min(rounds, self.rounds) * self.calls,
            **together,
            "secret": "from the seed: not for publication" if self.privacy.repeatable else "of its own",
        }


def seal(problem: "Prepared") -> "Prepared":
    """Returns the problem without the values of its training rows, which only the mechanism can open. Its tables have
    no rows, and no site has reserved ones."""

    def sealed_split(split: "Prepared") -> "Prepared":
        sites = [_sealed(site, split.label_range or (0, None)) for site in split.sites]
        probe = split.probe
        zeros = [trees.mapped(torch.zeros_like, part) for part in (probe.inputs, probe.targets, probe.more_targets)]
        names = ("inputs", "targets", "more_targets")
        return replace(split, sites=sites, probe=replace(probe, **dict(zip(names, zeros))))

    return problem.each(sealed_split) if problem.splits else sealed_split(problem)


def _sealed(site: Site, label_range: tuple[int, int | None]) -> Site:
    if not site.train.here or site.train.sealed:
        return site
    table = site.table and site.table.without_rows()
    targets = site.train.targets
    labels = isinstance(targets, Tensor) and not targets.is_floating_point()
    # Of labels, as many as the model tells apart, and not as the rows have; 0 if only the rows tell.
    outputs = label_range[0] if labels else shape_of([site])[1]
    train = sealed(site.train, fingerprint(site.train), outputs, str(site.unit))
    return replace(site, train=train, table=table, reserved=None)


def _settings(problem: "Prepared") -> Privacy:
    if problem.privacy is None:
        raise ValueError("the problem has no privacy")
    return problem.privacy


def loss_clip_of(problem: "Prepared", privacy: Privacy) -> float:
    """Returns the largest loss of a unit that counts."""
    if privacy.loss_clip is not None:
        return privacy.loss_clip
    if not problem.classes:
        raise BadInput(
            "privacy.loss_clip: name the largest loss of a unit that counts, since targets are not labels; about four "
            "times the loss that you expect is a good choice"
        )
    return 2 * math.log(problem.classes)


def refuse_size(units: int, batch: int, privacy: Privacy, where: str) -> None:
    """Refuses sites whose size does not fit the settings."""
    if privacy.delta >= 1 / units:
        raise BadInput(
            f"privacy.delta = {privacy.delta:g} is not below 1 / {units}, and {where} has {units} units: with such a "
            f"delta a mechanism may publish a whole unit; use at most {0.1 / units:.0e}"
        )
    if units < batch:
        raise BadInput(
            f"{where} has {units} units, fewer than the {batch} that a batch has; use sampling.batch = "
            f"{max(1, units // 2)} or less at all sites, or leave this one out (`fairmesh advise` shows the noise)"
        )
