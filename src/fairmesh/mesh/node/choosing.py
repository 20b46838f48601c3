"""A site's own model at the end of a run between organisations: chosen by the site's own rows and, if the way to choose
needs them, by sums over all sites.

Each of these sums is a step of its own, so that a node that was killed in between continues with the bits that it had.
All sites take part in every sum. One that cannot judge adds nothing, and keeps the common model.

What others add is checked: probabilities are not negative, those of a site sum to one, and nobody counts more rows than
it has declared. So a member that lies shifts the prior by at most one site, and the noise that sites take for usual by
a factor that falls with the number of sites. One that passes on the sums of others can lie about these as well. No
member chooses another site's model: its candidates, and the rows that judge them, are its own.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from fairmesh.mesh.enrol.agreement import personalization_of
from fairmesh.mesh.node import life
from fairmesh.mesh.node.node import Node
from fairmesh.mesh.node.result import sums_of
from fairmesh.mesh.node.rounds import Rounds, alone_identity, phases_of
from fairmesh.mesh.node.store import new_folder
from fairmesh.mesh.node.watching import uses_in_words
from fairmesh.mesh.wire.mailroom import BEFORE_THE_CHOICE
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.networks.bounds import FACTOR
from fairmesh.personalization.base import Personalization
from fairmesh.personalization.personalize import NOT_CHOSEN, mixes_models, personalized
from fairmesh.personalization.pooled_prior import CommonLosses, SomeSites, Wrong, nothing_wrong
from fairmesh.storage.files import read_bytes
from fairmesh.storage.occupied import PERSONAL


def first_step(rounds: Rounds) -> int:
    """Returns the step of the first sum."""
    return rounds.membership.experiment.rounds + FIRST_ROUND + BEFORE_THE_CHOICE


def step_after(rounds: Rounds) -> int:
    """Returns the step after the last sum."""
    method = personalization_of(rounds.membership.experiment, rounds.problem)
    return first_step(rounds) + (method.sums if method else 0)


class _SumsOfSites:
    """The sums over all sites that a way to choose asks for, one step after the other.

    Args:
        rounds: The rounds of this node.
    """

    def __init__(self, rounds: Rounds):
        self._rounds, self._sums, self.step = rounds, sums_of(rounds), first_step(rounds)
        self._facts = [rounds.node.facts[name] for name in rounds.membership.names]

    def __call__(self, total: Tensor, wrong: Wrong = nothing_wrong, /) -> Tensor:
        bounded = wrong is not nothing_wrong
        owners = torch.full((len(total),), -1)
        added = self._sums.over_sites(
            total.detach().cpu(),
            self._next_step(),
            owners,
            math.inf if bounded else FACTOR,
            lambda sums, nodes: wrong(sums, self._known_of(nodes)),
        )
        return added.to(total)

    def _next_step(self) -> int:
        if self.step == step_after(self._rounds):
            raise RuntimeError("the personalization asks for more sums than its `sums` says; correct that number")
        self.step += 1
        return self.step - 1

    def _known_of(self, nodes: Sequence[int]) -> SomeSites:
        facts = [self._facts[node] for node in nodes]
        unseen = sum(said["reserved"] or said["validation"] for said in facts)
        return SomeSites(len(nodes), unseen, sum(said["samples"] for said in facts))


def choose(node: Node, result: Path) -> None:
    """Chooses and writes this site's own model, from the common one in the folder of the result, unless that was done
    before a restart or the run has only the common model."""
    rounds = node.generation.rounds
    method = personalization_of(rounds.membership.experiment, rounds.problem)
    if method is None and rounds.membership.experiment.options.choose_weights:
        node.log("info", "all sites keep the common model", reason=NOT_CHOSEN)
    if method is None or (node.folder / PERSONAL).exists():
        return
    node.life.interrupt(life.CHOOSING)
    sums = _SumsOfSites(rounds)
    if mixes_models(rounds.problem):
        _write_choice(rounds, method, result, sums)
    else:
        method.learned([], CommonLosses.over(sums, []), sums)
        reason = "its samples are read when a batch needs them, and the choice needs them in memory"
        node.log("warning", "this site keeps the common model", reason=reason)
    if sums.step != step_after(rounds):
        raise RuntimeError("the personalization asks for fewer sums than its `sums` says; correct that number")
    node.life.resume()


def _write_choice(rounds: Rounds, method: Personalization, result: Path, sums: _SumsOfSites) -> None:
    """Writes the model into a folder of its own, since the result is the same at every site."""
    training, flat, phases = rounds.training, rounds.problem.flat_model, phases_of(rounds.node)
    common = read_bytes(result / "model.safetensors")
    identity = {"common": hashlib.sha256(common).hexdigest(), "generation": rounds.membership.mesh.generation}
    identity |= alone_identity(rounds.problem, rounds.membership)
    found = personalized(
        rounds.problem,
        flat.row_of_state_dict(load(common)),
        method,
        seed=rounds.membership.experiment.seeds[0],
        device=training.device,
        dtype=training.dtype,
        trace=training.options.trace == "auto",
        carrier=lambda name, *work: phases.carried_out(life.CHOOSING, f"personal-{name}", identity, *work),
        sums=sums,
    )
    (site,) = found.sites
    with new_folder(rounds.node.folder / PERSONAL) as into:
        about = {"architecture": flat.architecture, "which": "personal", "site": site.name}
        into.write_model("personal", site.tensors(), about)
        into.write_summary({"method": found.method} | site.table())
    rounds.node.log("info", "this site's model is chosen", uses=uses_in_words(site.table()), folder=PERSONAL)
    phases.forget("personal-*")
