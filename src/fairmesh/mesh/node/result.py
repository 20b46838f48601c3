"""The result of a run between organisations: the average model, lambda and report. It is the same at every site, and
what is announced of it shows whether it is."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairmesh.algorithms.companions import carried
from fairmesh.algorithms.companions.own_parts import OwnState
from fairmesh.config.overrides import portable
from fairmesh.config.tables import to_table
from fairmesh.errors import BadInput
from fairmesh.mesh.fields import OF_BEST
from fairmesh.mesh.node.measurements import add_metrics, judged_on
from fairmesh.mesh.node.membership import Membership
from fairmesh.mesh.node.reduction import Sums
from fairmesh.mesh.node.rounds import Rounds, branch_of
from fairmesh.mesh.node.store import new_folder
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.transport import FIRST_ROUND
from fairmesh.networks.base import Traffic
from fairmesh.networks.bounds import FACTOR
from fairmesh.networks.roles import Duals, Models, StateView
from fairmesh.problems.prepared import Prepared
from fairmesh.storage.files import read_bytes, write_atomically
from fairmesh.storage.run_folder import EXPERIMENT, METRICS, SUMMARY, Record, read_summary, toml_of
from fairmesh.storage.strict_json import as_json
from fairmesh.training.agreement import on_disagreement
from fairmesh.training.loop import Best, TrainingState
from fairmesh.training.meter import traffic
from fairmesh.training.model_files import about_model, model_files
from fairmesh.training.replicas import Replica
from fairmesh.training.result import Result
from fairmesh.training.summary import summary_of

_BEST = "best_model"  # where a record has the best round's model's metrics
_MOMENTS = "moments of "  # how BatchNorm statistics are summed
_ALL = torch.tensor([-1])  # owns what all sites contribute to


class _Averages(NamedTuple):
    """The result that all nodes share, in the form of an algorithm's state with one node."""

    models: Models  # (1, 1, dim)
    duals: Duals | None  # (1, 1, n)


def write_result(rounds: Rounds, folder: Path) -> None:
    """Computes and writes the result, which is the same at every site. It takes two sums over all sites: of the models,
    duals and traffic, then of each site's own evaluation of the average models. Only partial sums travel."""
    if folder.exists():
        return
    problem, training, state, membership = rounds.problem, rounds.training, rounds.state, rounds.membership
    measurements, last = rounds.node.measurements, membership.experiment.rounds
    best, has_duals = measurements.best(), training.view.duals(state.algorithm) is not None
    own_of, totals = _added_up(rounds, best)
    means = {name: sums / problem.n for name, sums in totals.items() if name not in ("bits", "bytes")}
    commons = _common_parts(rounds, own_of, means)
    by_site, (models_apart, duals_apart) = _judged(rounds, own_of, means, commons)
    record: Record = {"round": last, "replica": 0, "seed": membership.experiment.seeds[0], "models": "average"}
    add_metrics([record], by_site, problem, OF_BEST, _BEST)
    record |= traffic(totals["bits"], totals["bytes"]) | {"consensus_models": models_apart}
    weighed = float(means["dual"].sum()) > 0  # some algorithms have no weights
    if weighed:
        means["dual"] = means["dual"] if has_duals else means["dual"] / math.fsum(means["dual"].tolist())
        record |= {"lambda": means["dual"].tolist()}
    if has_duals:
        record |= {"consensus_duals": duals_apart}
    whole = _whole(state, means, training.dtype, weighed, best, commons)
    records = [*(earlier for earlier in measurements.records if earlier["round"] < last), record]
    on, level = judged_on(problem), membership.experiment.options.cvar_level
    measured = [None if getattr(site, on) is None else {} for site in problem.sites]  # counts stay at their sites
    result = Result(problem, training.replicas, last, records, whole, [], on, support=measured, cvar_level=level)
    if rounds.node.private is not None:
        tested = {name: int(rounds.node.facts[name]["test"]) for name in membership.names}
        labels = bool(problem.classes)
        private = rounds.node.private.summary(measurements.epsilons(), training.private, tested, labels)
        result = replace(result, privacy=private)
        record["epsilon"] = private["epsilon"]
    apart = on_disagreement(result, rounds.training.network.cycle)
    result = replace(result, notes=[apart] if apart else [])
    chosen = {"best_by": membership.experiment.options.best_by, "best_chosen_on": measurements.chosen_on}
    if best is not None:
        chosen |= {"best_decided": measurements.decided(best)}
    unsigned = measurements.unsigned()
    more = ({} if best is None else chosen) | {"measured": measurements.digests()}
    more |= {"unsigned": unsigned} if unsigned else {}
    _write(result, membership, more, folder)


def _added_up(rounds: Rounds, best: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns this site's own parts of the models that are averaged, by the model's name, and the sums over all
    sites."""
    problem, state, view, number = rounds.problem, rounds.state, rounds.training.view, rounds.membership.number
    flat, n, last = problem.flat_model, problem.n, rounds.membership.experiment.rounds
    pieces = _pieces(state, view, torch.eye(n, dtype=torch.float64)[number])
    own_of = {} if state.own is None else {"model": state.own.rows[0, 0].cpu()}
    if best not in (None, last):
        kept = rounds.node.measurements.model(best)
        pieces["best"] = kept[: flat.dim]
        own_of |= {"best": kept[flat.dim :]}
    if flat.pools_statistics:  # averages over all samples: sums are divided by n
        weight = n * float(problem.shares_of_samples[number])
        pieces |= {_MOMENTS + name: weight * flat.moments(part) for name, part in own_of.items()}
    of_sites = {"bits", "bytes"} | ({"dual"} if view.duals(state.algorithm) is None else set())
    owners = [torch.arange(n) if name in of_sites else _ALL.expand(len(piece)) for name, piece in pieces.items()]
    row = torch.cat([piece.double().cpu() for piece in pieces.values()]).detach()
    sums = sums_of(rounds).over_sites(row, last + FIRST_ROUND, torch.cat(owners))
    return own_of, dict(zip(pieces, sums.split([len(piece) for piece in pieces.values()])))


def _common_parts(rounds: Rounds, own_of: Iterable[str], means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what the common models have in place of sites' own parts: local parts, which never leave their site, as
    they start, and the statistics of all samples, if the sites pool them."""
    flat = rounds.problem.flat_model
    start = rounds.problem.initial_whole_row(rounds.membership.experiment.seeds[0])[flat.dim :]
    statistics = {
        name: flat.statistics_of(means[_MOMENTS + name]) if flat.pools_statistics else start[flat.local_dim :]
        for name in own_of
    }
    return {name: torch.cat([start[: flat.local_dim], part]) for name, part in statistics.items()}


def _judged(
    rounds: Rounds, own_of: Mapping[str, Tensor], means: Mapping[str, Tensor], commons: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """Returns how every site judges the average models on its own data, by metric, and how far the models and the duals
    of the sites are from their averages, squared."""
    problem, training, state, number = rounds.problem, rounds.training, rounds.state, rounds.membership.number
    n, view = problem.n, training.view

    def judged_here(name: str) -> dict[str, Tensor]:
        row = means[name]
        if name in own_of:
            row = problem.flat_model.at_site(torch.cat([row, commons[name]]), own_of[name])
        return rounds.judge.of_sites(row.to(training.device, training.dtype).unsqueeze(0))

    if rounds.node.private is None:
        metrics = judged_here("model")
    else:  # with noise, and what has none is not told
        told = rounds.node.private.evaluation(problem, number, means["model"].to(training.dtype))
        metrics = {name: torch.full((1, n), told.get(name, math.nan)) for name in rounds.judge.names}
    if "best" in means:
        metrics |= {OF_BEST + name: value for name, value in judged_here("best").items()}
    duals = view.duals(state.algorithm)
    apart = (view.models(state.algorithm)[0, 0].double().cpu() - means["model"]).square().sum()
    duals_apart = torch.zeros(()) if duals is None else (duals[0, 0].double().cpu() - means["dual"]).square().sum()
    own = torch.eye(n, dtype=torch.float64)[number]
    told = [_told(float(value[0, number]), own) for value in metrics.values()]
    row = torch.cat([*told, torch.stack([apart, duals_apart.to(apart)]).detach().cpu()])
    owners = torch.cat([torch.arange(n).repeat(2 * len(metrics)), _ALL, _ALL])
    step = rounds.membership.experiment.rounds + FIRST_ROUND + 1
    sums = sums_of(rounds).over_sites(row, step, owners, FACTOR**2)  # distances are squared
    by_site = {name: _read_back(*parts) for name, parts in zip(metrics, sums[:-2].reshape(-1, 2, n))}
    return by_site, (float(sums[-2] / n), float(sums[-1] / n))


def sums_of(rounds: Rounds) -> Sums:
    """Returns the sums of this node over all present sites."""
    membership = rounds.membership
    return Sums(membership.number, branch_of(membership), membership.present, membership.names, rounds.mailroom)


def expected_results(folder: Path, membership: Membership) -> dict[str, dict[str, Any]]:
    """Returns what each present site announces if it has the result in a folder: its digest, the metrics at that site,
    and the digests of what each site has measured during the run."""
    last = _last_record(folder)
    by_metric = _by_site(last | {OF_BEST + key: entry for key, entry in last.get(_BEST, {}).items()})
    measured = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["measured"]
    body = {"generation": membership.mesh.generation, "digest": result_digest(folder), "measured": measured}
    body |= {"contradicted": {}}  # each site has its own
    return {
        name: body | {"metrics": {key: values[i] for key, values in by_metric.items()}}
        for i, name in enumerate(membership.names)
    }


def add_contradictions(folder: Path, bulletin: Bulletin, membership: Membership) -> None:
    """Adds to the summary of a result who says that which sites have sent or signed two different things, if anybody
    does. All sites have announced this with the result, so it is the same at every site."""
    results = {name: bulletin.of(name, "result") for name in membership.names}
    said = [
        {"by": by, "site": site, **contradiction}
        for by, body in results.items()
        for site, contradiction in sorted(body.get("contradicted", {}).items())
        if site in membership.names
    ]
    if said:
        summary = json.loads(read_bytes(folder / SUMMARY))
        write_atomically(folder / SUMMARY, (as_json(summary | {"contradicted": said}, indent=2) + "\n").encode())


def results_apart(expected: Mapping[str, dict[str, Any]], bulletin: Bulletin) -> dict[str, str]:
    """Returns for each site that has announced another result of this generation than expected how it differs."""
    apart = {}
    for name, theirs in bulletin.of_all("result").items():
        if name in expected and theirs["generation"] == expected[name]["generation"]:
            apart[name] = _apart(name, theirs, expected[name])
    return {name: reasons for name, reasons in apart.items() if reasons}


def _apart(name: str, theirs: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    said, here = theirs["metrics"], expected["metrics"]
    reasons = [
        f"it announced the {key} {said.get(key)}, but the sum that came here has {here.get(key)} for it"
        for key in sorted(here.keys() | said.keys())
        if said.get(key) != here.get(key)
    ]
    reasons += [
        f"it has other metrics of {site} from the rounds before; {site} has told sites different numbers, or "
        f"{name} has changed them"
        for site, digest in sorted(expected["measured"].items())
        if theirs["measured"].get(site) != digest
    ]
    if theirs["digest"] != expected["digest"]:
        digests = [body["digest"][:16] for body in (theirs, expected)]
        reasons.append(f"its result has the digest {digests[0]}, that of this site {digests[1]}")
    return "; ".join(reasons)


def result_digest(folder: Path) -> str:
    """Returns the SHA-256 of a result: its models and its numbers."""
    digest = hashlib.sha256()
    for name in ("model.safetensors", "model-time-average.safetensors", "model-best.safetensors", METRICS):
        content = (folder / name).read_bytes() if (folder / name).exists() else b""
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def is_intact(folder: Path, digest: str) -> bool:
    """Returns whether the result in a folder has the digest that was announced, and can be read."""
    try:
        read_summary(folder)
        return result_digest(folder) == digest
    except (BadInput, OSError):
        return False


_NOT_FINITE = {1: math.nan, 2: math.inf, 3: -math.inf}  # messages carry finite numbers only


def _told(value: float, own: Tensor) -> Tensor:
    """Returns what a site contributes to the sums about its metric: the value, and which of those that are not finite
    it is. A metric can be undefined at a site, such as an AUC where all targets are equal."""
    kind = 0 if math.isfinite(value) else 1 if math.isnan(value) else 2 if value > 0 else 3
    return torch.cat([own * (0.0 if kind else value), own * kind])


def _read_back(values: Tensor, kinds: Tensor) -> Tensor:
    """Returns a metric by site, (1, n)."""
    for kind, value in _NOT_FINITE.items():
        values = values.masked_fill(kinds == kind, value)
    return values.unsqueeze(0)


def undefined_metrics(folder: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Returns for each metric of a result the sites at which it has no finite value, if there are any."""
    by_metric = metrics_by_site(folder)
    missing = {key: [name for name, value in zip(names, values) if value is None] for key, values in by_metric.items()}
    return {key: sites for key, sites in missing.items() if sites}


def metrics_by_site(folder: Path) -> dict[str, list[float | None]]:
    """Returns the values of the average model at the sites, by metric."""
    return _by_site(_last_record(folder))


def _last_record(folder: Path) -> Record:
    return json.loads((folder / METRICS).read_text(encoding="utf-8").splitlines()[-1])


def _by_site(record: Record) -> dict[str, list[float | None]]:
    """Returns the values of the sites, by metric."""
    return {key: entry["sites"] for key, entry in record.items() if isinstance(entry, dict) and "sites" in entry}


def _pieces(state: TrainingState, view: StateView, own: Tensor) -> dict[str, Tensor]:
    """Returns what is added up over all sites: the rows of this node, and its own entries of rows over all nodes."""
    duals, weights = view.duals(state.algorithm), view.own_weights(state.algorithm)
    nothing = torch.zeros_like(own)
    weighed = nothing if weights is None else own * weights[0, 0].cpu()  # n lambda_i
    return {
        "model": view.models(state.algorithm)[0, 0],
        "time-average": state.average_model[0],
        "dual": weighed if duals is None else duals[0, 0],
        "dual time-average": nothing if state.average_dual is None else state.average_dual[0],
        "bits": own * state.sent.node_bits[0, 0].cpu(),
        "bytes": own * state.sent.node_bytes[0, 0].cpu(),
    }


def _whole(
    state: TrainingState,
    means: dict[str, Tensor],
    dtype: torch.dtype,
    weighed: bool,
    best: int | None,
    commons: dict[str, Tensor],
) -> TrainingState:
    """Returns the state that all sites share. Every site has the same own part in it, that of the common model."""
    n = len(means["dual"])
    own = {name: part.to(dtype).expand(1, n, -1) for name, part in commons.items()}
    models = means["model"].to(dtype).reshape(1, 1, -1)
    duals = means["dual"].to(dtype).reshape(1, 1, -1) if weighed else None
    nobody = torch.zeros(1)
    return TrainingState(
        algorithm=_Averages(models, duals),
        average_model=means["time-average"].to(dtype).unsqueeze(0),
        average_dual=means["dual time-average"].to(dtype).unsqueeze(0) if state.average_dual is not None else None,
        sent=Traffic(nobody, nobody, nobody, nobody),
        best=None
        if best is None
        else Best(
            nobody,
            torch.tensor([best]),
            means.get("best", means["model"]).to(dtype).unsqueeze(0),
            own.get("best", own.get("model")),
        ),
        companions=carried({"own": OwnState(own["model"], *[torch.zeros(1, n, 1)] * 3)} if "model" in own else {}),
    )


def write_progress(membership: Membership, problem: Prepared, records: Sequence[Record], folder: Path) -> None:
    """Writes the summary and the settings of a run in progress next to its metrics, as a finished run's folder has
    them. The node itself never reads them."""
    experiment, nobody = membership.experiment, torch.zeros(1)
    replica = Replica(experiment.seeds[0], tuple(range(problem.n)), experiment.algorithm)
    state = TrainingState(None, nobody, None, Traffic(nobody, nobody, nobody, nobody), None)
    last = records[-1]
    on, level = judged_on(problem), experiment.options.cvar_level
    result = Result(problem, [replica], last["round"], [last], state, judged_on=on, cvar_level=level)
    summary = summary_of(result) | {"sites": membership.names, "planned_rounds": experiment.rounds}
    del summary["seconds"], summary["models"]  # there are none yet
    write_atomically(folder / SUMMARY, as_json(summary, indent=2).encode(), durable=False)
    if not (folder / EXPERIMENT).exists():
        write_atomically(folder / EXPERIMENT, toml_of(settings_of(membership)), durable=False)


def settings_of(membership: Membership) -> dict[str, Any]:
    """Returns the experiment's settings without what differs between sites."""
    settings = portable(to_table(membership.experiment))
    return {key: value for key, value in settings.items() if key not in ("data", "options")}


def _write(result: Result, membership: Membership, more: dict[str, Any], folder: Path) -> None:
    """Writes the folder of a finished run as a simulation does, without what differs between sites."""
    summary = summary_of(result)
    del summary["seconds"]
    with new_folder(folder) as into:
        into.write_settings(settings_of(membership))
        into.replace_records(result.records)
        into.write_preprocessing([result.problem.preprocessing])
        for file in model_files(result):
            about = about_model(result, 0, file.which)
            into.write_model(file.name, result.state_dict(0, file.which), about)  # type: ignore[arg-type]
        into.write_summary(summary | {"sites": membership.names} | more)
