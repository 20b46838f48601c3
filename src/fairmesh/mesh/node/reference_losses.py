"""The losses that the objective compares this site's with, such as that of a model that it trains alone. They are found
once in a run, from this site's data only, and kept in the state folder."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairmesh.comparisons.reference_losses import with_references
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.node.store import REFERENCES
from fairmesh.mesh.wire.journal import storing
from fairmesh.mesh.wire.links import Report
from fairmesh.networks.base import Network
from fairmesh.numerics.random_streams import SecretIdentities
from fairmesh.problems.identity import fingerprint
from fairmesh.problems.problem import Problem
from fairmesh.storage.files import read_bytes, write_atomically

_TABLES = ("local_losses", "untrained_losses", "constant_losses")  # fields of the objective


def with_kept_references(
    problem: Problem,
    membership: Membership,
    network: Network,
    go_on: Callable[[int], None],
    report: Report,
) -> Problem:
    """Returns the problem with the losses in its objective. Those on disk are used if they are of this run and of this
    site's data and start; sites that leave or come back do not change them. `go_on` is called after every round in
    which this site trains alone, and may raise."""
    experiment = membership.experiment
    settings = experiment.topology, experiment.rounds, experiment.seeds[0], membership.options, network
    wanted = [name for name in _TABLES if getattr(problem.objective, name) is None]
    if not (problem.objective.needs_local_models or problem.objective.needs_constants):
        return with_references(problem, *settings, alone=True)
    path, key = membership.site.state / REFERENCES, _key(problem, membership)
    tables = _read(path, key, membership.name, report)
    if tables is None:
        fitted = with_references(problem, *settings, alone=True, go_on=go_on).objective
        tables = {name: dict(getattr(fitted, name)) for name in wanted if getattr(fitted, name) is not None}
        with storing(path.parent):
            write_atomically(path, json.dumps({"key": key} | tables).encode())
    return problem.with_other(objective=replace(problem.objective, **tables).with_run_length(experiment.rounds))


def with_any_references(problem: Problem, membership: Membership) -> Problem:
    """Returns the problem with losses that mean nothing, for rounds that are never trained."""
    objective = problem.objective.with_run_length(membership.experiment.rounds)
    if objective.needs_local_models or objective.needs_constants:
        objective = replace(objective, **{name: {membership.name: 1.0} for name in _TABLES})
    return problem.with_other(objective=objective)


def _key(problem: Problem, membership: Membership) -> str:
    """Returns a fingerprint of all that determines the losses. It has the start of the run, which all sites agree on,
    and not this site's number among those that are still in the mesh."""
    (mine,) = [site for site in problem.sites if site.train.here]
    sets = [mine.train, mine.validation] if problem.objective.judged_on == "validation" else [mine.train]
    secret = None if membership.secret is None else SecretIdentities([membership.secret]).digest()
    described = [membership.name, membership.agreed, secret, [fingerprint(one) for one in sets]]
    hasher = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    hasher.update(problem.initial_whole_row(membership.experiment.seeds[0]).numpy().tobytes())
    return hasher.hexdigest()


def _read(path: Path, key: str, site: str, report: Report) -> dict[str, Any] | None:
    """Returns the tables on disk, or None if there are none, or others."""
    if not path.exists():
        return None
    try:
        tables = json.loads(read_bytes(path))
        own = tables.pop("key") == key and all(one.keys() == {site} for one in tables.values())
        if own and tables and all(math.isfinite(one[site]) for one in tables.values()):
            report("info", "reference losses are known", file=path.name)
            return tables
    except (ValueError, TypeError, KeyError, AttributeError):
        pass  # damaged
    why = "they are damaged, or of another run, of other data, of another secret of this site, or of another start"
    report("warning", "the reference losses on disk cannot be used; they are found again", file=path.name, reason=why)
    return None
